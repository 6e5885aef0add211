"""From the bytes of a request to what it asks for: limits, and the threads in which long ones are read.

Whatever a client sends, who streams goes on: reading is done beside the event loop, a few short bodies at a time and
one long one, and a body with more values than any request has is refused before it is read. Knows nothing of what is
asked for.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from cheetah.errors import CheetahError
from cheetah.serve.errors import ApiError, of_validation
from cheetah.serve.records import Body
from cheetah.untrusted import parse_json

BODY_SECONDS = 60.0
"""A body that takes longer to come is not waited for."""
SHORT_BYTES = 1 << 16
SHORT_TOGETHER = 8
LONG_TOGETHER = 16
"""Bodies of more than SHORT_BYTES that are in memory at a time; others wait in their clients."""
GRAMMARS_TOGETHER = 2

AnyBody = TypeVar("AnyBody", bound=Body)
Result = TypeVar("Result")


class Reading:
    """Reads bodies. most_bytes, most_values: of one body at most, as `parse_json` counts them."""

    def __init__(self, most_bytes: int, most_values: int):
        self._most_bytes, self._most_values = most_bytes, most_values
        self._short = ThreadPoolExecutor(SHORT_TOGETHER, "short bodies")
        self._long = ThreadPoolExecutor(1, "long bodies")  # several would take Python's lock from the event loop
        self._grammars = ThreadPoolExecutor(GRAMMARS_TOGETHER, "grammars")
        self._long_ones = asyncio.Semaphore(LONG_TOGETHER)

    async def read(self, request: Request, kind: type[AnyBody], use: Callable[[AnyBody], Result]) -> Result:
        """What `use` makes of the body, in a thread. ApiError for a body that is not taken."""
        _check_headers(request)
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    data = await self._data(request, held)
            except TimeoutError:
                raise ApiError(408, f"the body has not come within {BODY_SECONDS:.0f} s") from None
            pool = self._short if len(data) <= SHORT_BYTES else self._long
            work = asyncio.get_running_loop().run_in_executor(pool, lambda: use(self._parsed(kind, data)))
            try:
                return await unless_gone(request.receive, work)
            finally:
                if pool is self._long:
                    self._long.submit(_give_memory_back)

    async def beside(self, work: Callable[[], Result]) -> Result:
        """Work of some length, in the thread of a short body."""
        return await asyncio.get_running_loop().run_in_executor(self._short, work)

    async def grammar(self, work: Callable[[], Result]) -> Result:
        """Work that waits for a grammar to be read: it takes nobody else's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._grammars, work)

    def begin(self, work: Callable[[], object]) -> None:
        """Work for which nobody waits, in the thread of a grammar."""
        self._grammars.submit(work)

    def close(self) -> None:
        """What has not begun is dropped."""
        for pool in (self._short, self._long, self._grammars):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _data(self, request: Request, held: AsyncExitStack) -> bytes:
        data = bytearray()
        is_long = False
        async for part in request.stream():
            data += part
            if len(data) > self._most_bytes:
                raise ApiError(413, f"the body has more than {self._most_bytes} bytes, which this server does not take")
            if len(data) > SHORT_BYTES and not is_long:
                is_long = True
                await held.enter_async_context(self._long_ones)
        return bytes(data)

    def _parsed(self, kind: type[AnyBody], data: bytes) -> AnyBody:
        try:
            return kind.model_validate(parse_json(data, "the body", most_values=self._most_values))
        except ValidationError as problem:
            raise of_validation(problem) from None
        except CheetahError as problem:
            raise ApiError(400, str(problem)) from None


def _give_memory_back() -> None:
    """What a long body took: the C library would keep it for the next one. Other libraries have no such call."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled if the client goes away before; then ClientDisconnect."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_client_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_headers(request: Request) -> None:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "send the body as it is, without the header Content-Encoding")
