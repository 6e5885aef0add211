"""What goes wrong in a request, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from cheetah.errors import CheetahError
from cheetah.printable import printable, shown_name
from cheetah.runtime.engine.requests import NothingAllowed
from cheetah.runtime.structured_outputs import GrammarError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """An answer other than 200. `param` is the field of the request that it is about, if it is about one."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, printable(message), param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        """429 and 503 say when to try again; OpenAI's clients do so by themselves."""
        return {"retry-after": "1"} if self.status in (429, 503) else {}


def refused(param: str, message: str) -> ApiError:
    """400 for a field."""
    return ApiError(400, f"{param}: {message}", param)


def of_validation(problem: ValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    first = problem.errors(include_input=False, include_url=False, include_context=False)[0]
    place = ".".join(shown_name(str(part)) for part in first["loc"])
    field = shown_name(str(first["loc"][0])) if first["loc"] else None
    return ApiError(400, f"{place}: {first['msg']}" if place else first["msg"], field)


def of_failure(problem: Exception) -> ApiError:
    """What ended a completion: what the request itself allows, or something here."""
    return of_mistake(problem) if isinstance(problem, GrammarError | NothingAllowed) else ApiError(500, str(problem))


def of_mistake(problem: CheetahError) -> ApiError:
    """A mistake that the runtime found; its messages begin with the name of what is wrong, where it has one."""
    name = re.match(r"(?:SamplingParams: )?([a-z_]+)(?=[=:]| is )", str(problem))
    return ApiError(400, str(problem), name[1] if name else None)
