"""Whole HTTP answers of JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from cheetah.serve.answers import as_json, long_json
from cheetah.serve.errors import ApiError
from cheetah.serve.reading import Reading


def json_response(record: Any, status: int = 200) -> Response:
    return Response(as_json(record), status, media_type="application/json")


async def long_response(reading: Reading, make: Callable[[], Any]) -> Response:
    """What `make` gives, which may be long: made and written beside the event loop."""
    return Response(await reading.beside(lambda: long_json(make())), media_type="application/json")


def error_response(problem: ApiError) -> Response:
    response = json_response(problem.body, problem.status)
    response.headers.update(problem.headers)
    return response
