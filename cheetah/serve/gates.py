"""Which requests are let in: by the Host that they name, and by their key."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from cheetah.printable import shown
from cheetah.serve.errors import ApiError
from cheetah.serve.page import PATHS
from cheetah.serve.replies import error_response

OPEN_TO_ALL = {*PATHS, "/health", "/ping"}
"""What needs no key: a page that asks for one, and whether the server is well."""


class Hosts:
    """Lets through requests to one of these names, whatever the port, and all if there is none. Else a page in a
    browser, whose name was made to mean this machine, could use a server that only this machine reaches."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]):
        self._app, self._allowed = app, {name.lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = _host_of(scope) if scope["type"] == "http" and self._allowed else None
        if name is None or name in self._allowed:
            await self._app(scope, receive, send)
        else:
            problem = ApiError(
                403, f"Host {shown(name)} is not one of this server's: it is started with --allowed-hosts NAME"
            )
            await error_response(problem)(scope, receive, send)


class Keys:
    """Lets requests through that have one of the keys, and all if there is none."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_TO_ALL or self._has_key(scope):
            await self._app(scope, receive, send)
        else:
            problem = ApiError(401, "this server needs an API key: send the header Authorization: Bearer KEY")
            await error_response(problem)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        """Compares with every key in a time that does not tell how much of one was right."""
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        is_right = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return not self._keys or (scheme.lower() == b"bearer" and any(is_right))


def _host_of(scope: Scope) -> str | None:
    """The name in a request's Host, without port; None if it has none, as no browser's."""
    given = dict(scope["headers"]).get(b"host")
    if given is None:
        return None
    text: str = given.decode("latin-1").strip().lower()
    name = text.partition("]")[0] + "]" if text.startswith("[") else text.partition(":")[0]
    return name.removesuffix(".")
