"""The page at `/`: its files, served as they lie here, and what a browser may do with them.

Everything comes from this server, no text becomes markup or a script, and no other page may embed it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files

from fastapi import FastAPI
from starlette.responses import Response

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # a server that was updated has another page at once
}


def _paths() -> Mapping[str, tuple[str, str]]:
    found = {}
    for entry in files(__name__).iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in MEDIA_TYPES:
            found["/" if entry.name == "index.html" else f"/page/{entry.name}"] = entry.name, MEDIA_TYPES[suffix]
    return found


PATHS = _paths()
"""What the page consists of: path -> name of its file and media type. It needs no key: it asks for one."""


def add_page(app: FastAPI) -> None:
    """Serves the page's files."""
    for path, (name, media_type) in PATHS.items():
        app.add_api_route(path, _sender(files(__name__).joinpath(name).read_bytes(), media_type))


def _sender(data: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(data, media_type=media_type, headers=HEADERS)

    return send
