"""Whole HTTP answers of JSON."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from cheetah.serve.answers import as_json
from cheetah.serve.errors import ApiError


def json_response(record: Any, status: int = 200) -> Response:
    return Response(as_json(record), status, media_type="application/json")


def error_response(problem: ApiError) -> Response:
    response = json_response(problem.body, problem.status)
    response.headers.update(problem.headers)
    return response
