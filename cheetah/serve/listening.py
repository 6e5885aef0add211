"""How a server listens: its port, bounds on its connections, and the end on Ctrl-C. Knows nothing of what is asked.

Whoever holds a connection holds a descriptor, of which a process has some hundreds to a million. So connections are
counted: those that send no whole request in time, or do not take their answer, are closed, and where there are too many
the one that has waited longest for a request gives way to a new one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cheetah.errors import CheetahError
from cheetah.serve.reading import BODY_SECONDS

HEADER_SECONDS = 20.0
"""A connection on which no request begins is closed; uvicorn closes one on which there was an answer after five."""
WRITE_SECONDS = 60.0
"""So is one that takes nothing of its answer."""
CONNECTIONS = 1024
SPARE_DESCRIPTORS = 64
"""For files, processes and connections that are just coming, beside what is open when the server starts."""
MOST_DESCRIPTORS = 1 << 20
TAKEN_AT_ONCE = 32
"""New connections between two looks at their number."""
BACKLOG = 1024
"""Connections that wait in the system to be taken."""
HURRY_SECONDS = 5
"""For answers that are ended to reach their clients."""
SAID_AGAIN_SECONDS = 60.0

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_LOG = logging.getLogger("uvicorn.error")
_BUSY = b'{"error":{"message":"too many connections: try again later","type":"server_error","param":null,"code":null}}'


def listening(host: str, port: int) -> socket.socket:
    """A socket that has the port, at which nobody is answered yet. CheetahError if the port cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        return found
    except (OSError, UnicodeError) as problem:
        raise CheetahError(f"cannot listen at {host}:{port}: {_reason(problem)}") from None


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def enough_descriptors(connections: int) -> int:
    """Raises the process's limit of descriptors as far as it may, and gives how many of `connections` there can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    else:
        wanted = soft
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else SPARE_DESCRIPTORS
    return max(1, min(connections, wanted - used - SPARE_DESCRIPTORS))


class Seldom:
    """A line of the log that is not written more than once a minute, however often there is reason to."""

    def __init__(self, line: str):
        self._line, self._next = line, 0.0

    def say(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SAID_AGAIN_SECONDS
            _LOG.warning(self._line)


@dataclass
class Bounds:
    """Of the connections of one server. waiting: those that have sent no whole request, who began to wait first being
    first."""

    most: int = CONNECTIONS
    header_s: float = HEADER_SECONDS
    body_s: float = BODY_SECONDS + 5  # after the answer which says that it came too late
    write_s: float = WRITE_SECONDS
    waiting: dict[Connection, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_full = Seldom(f"more than {self.most} connections: those that wait longest for a request are closed")


class Connection(H11Protocol):
    """A client's connection, within bounds."""

    def __init__(self, bounds: Bounds, **given: Any):
        super().__init__(**given)
        self._bounds = bounds
        self._awaited: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._bounds.most:
            self._bounds.is_full.say()
            longest = next(iter(self._bounds.waiting), None)
            if longest is None:
                transport.write(
                    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
                    b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%s" % (len(_BUSY), _BUSY)
                )
                transport.close()
                return
            longest.end()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self._bounds.write_s, self.end)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def end(self) -> None:
        """Closes it at once."""
        self._wait_for(None)
        self.transport.abort()

    def _watch(self) -> None:
        """Notices for what of a request it waits, if it does."""
        state = self.conn.their_state
        self._wait_for(state if state in (h11.IDLE, h11.SEND_BODY) else None)

    def _wait_for(self, awaited: Any) -> None:
        if awaited is self._awaited:
            return
        self._awaited = awaited
        self._bounds.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if awaited is not None:
            self._bounds.waiting[self] = None
            seconds = self._bounds.header_s if awaited is h11.IDLE else self._bounds.body_s
            self._timer = self.loop.call_later(seconds, self.end)


class Server(uvicorn.Server):
    """uvicorn with such connections. hurry: ends what is under way, each request with an error for its client; called
    in the event loop by a second Ctrl-C, or drain_s after the first signal. A third one ends the process as it is."""

    def __init__(self, app: Any, bounds: Bounds, hurry: Callable[[], None], drain_s: int, log_level: str):
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, partial(Connection, bounds)),
                ws="none",
                lifespan="on",
                backlog=TAKEN_AT_ONCE,
                server_header=False,
                timeout_graceful_shutdown=drain_s + HURRY_SECONDS,
                log_level=log_level,
            )
        )
        self._drain_s = drain_s
        self._hurry, self._is_hurried = hurry, False
        self._no_descriptors = Seldom("no descriptor is left for a new connection: raise the limit (ulimit -n)")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._take_problem)
        await super().startup(sockets)
        for one in sockets or []:
            one.listen(BACKLOG)
            host, port = one.getsockname()[:2]
            _LOG.info("answering at http://%s:%d (Ctrl-C ends it)", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = self._loop.call_later(self._drain_s, self._hurry)
        await super().shutdown(sockets)
        ending.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT and not self._is_hurried:
            self._is_hurried = True
            self._loop.call_soon_threadsafe(self._hurry)
        else:
            super().handle_exit(sig, frame)

    def _take_problem(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        problem = context.get("exception")
        if isinstance(problem, OSError) and problem.errno in (errno.EMFILE, errno.ENFILE):
            self._no_descriptors.say()
        else:
            loop.default_exception_handler(context)


def _reason(problem: Exception) -> str:
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
