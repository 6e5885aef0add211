"""The application: routes, keys, limits, and the ways of HTTP with requests that end early.

`asgi(llm)` is an ASGI application for any server; `cheetah serve` runs it with uvicorn.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cheetah.errors import CheetahError
from cheetah.runtime import LLM, StreamPiece
from cheetah.serve.answers import as_json, long_json
from cheetah.serve.driver import EngineStopped
from cheetah.serve.embeddings import EmbeddingBody
from cheetah.serve.errors import ApiError, of_failure
from cheetah.serve.gates import Hosts, Keys
from cheetah.serve.metrics import CONTENT_TYPE
from cheetah.serve.page import add_page
from cheetah.serve.reading import AnyBody, Reading, unless_gone
from cheetah.serve.records import ChatBody, CompletionBody, DetokenizeBody, ResponseBody, TokenizeBody
from cheetah.serve.replies import error_response, json_response, long_response
from cheetah.serve.service import Answering, Options, Prepared, Service
from cheetah.version import __version__

SWITCH_SECONDS = 0.0005
"""So long a thread that reads a body keeps Python's lock from who waits for it. The event loop and the engine's thread
wait some ten times a token: at Python's 5 ms three busy threads held a stream up for 89 ms in the middle, 617 at most,
where 0.5 ms gives 14 and 169 (both on a host of two processors with a load of 11)."""
IDLE_SECONDS = 1.0


def asgi(llm: LLM, options: Options | None = None, on_fault: Callable[[], None] = lambda: None) -> FastAPI:
    """The server's application over `llm`, which stays the caller's to close. on_fault: called once if the engine
    fails for good, after which nothing but errors is answered."""
    service = Service(llm, options or Options((llm.name,)), on_fault)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gc.collect()
        gc.freeze()  # the collector stops every thread: let it not look at what was loaded, again and again
        usual = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        service.driver.start()
        preparing = asyncio.create_task(_prepare_when_idle(service, llm))
        yield
        preparing.cancel()
        await service.driver.stop()
        service.reading.close()
        sys.setswitchinterval(usual)

    app = FastAPI(title="Cheetah", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.add_middleware(Keys, keys=service.options.api_keys)
    app.add_middleware(Hosts, allowed=service.options.hosts)
    for kind, answer in _MISHAPS.items():
        app.add_exception_handler(kind, answer)
    _add_engine_routes(app, service)
    _add_other_routes(app, service)
    add_page(app)
    return app


async def _prepare_when_idle(service: Service, llm: LLM) -> None:
    """Has llguidance read the vocabulary while nobody streams, who would be held up, and behind the first requests of a
    server that was just started."""
    await asyncio.sleep(IDLE_SECONDS)
    while not service.driver.is_idle:
        await asyncio.sleep(IDLE_SECONDS)
    service.reading.begin(llm.prepare_structured_outputs)


def _add_engine_routes(app: FastAPI, service: Service) -> None:
    """What makes text."""

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answered(request, service, CompletionBody, service.completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answered(request, service, ChatBody, service.chat)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await _answered(request, service, ResponseBody, service.response, named_events=True)


def _add_other_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/embeddings")
    async def of_texts(request: Request) -> Response:
        embed = await service.reading.read(request, EmbeddingBody, service.embeddings)
        found = await unless_gone(request.receive, asyncio.to_thread(embed))
        return await long_response(service.reading, lambda: found)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        found = await service.reading.read(request, TokenizeBody, service.tokenize)
        return await long_response(service.reading, lambda: found)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return json_response(await service.reading.read(request, DetokenizeBody, service.detokenize))

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(service.models())

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(service.model(name))

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        service.driver.check()
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)


class EventStream(StreamingResponse):
    """Server-sent events of a piece of work, which ends with its client."""

    def __init__(self, work: Answering, reading: Reading, named_events: bool):
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_events(work, reading, named_events), media_type="text/event-stream", headers=headers)
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self.stream_response(send))
        except ClientDisconnect:
            pass
        finally:
            self._work.close()


async def _answered(
    request: Request,
    service: Service,
    kind: type[AnyBody],
    read: Callable[[AnyBody], Prepared],
    named_events: bool = False,
) -> Response:
    """The answer to what a body of this kind asks for, as events or whole."""
    work = await service.begin(await service.reading.read(request, kind, read))
    if work.streams:
        return EventStream(work, service.reading, named_events)
    try:
        return await long_response(service.reading, await unless_gone(request.receive, work.whole()))
    finally:
        work.close()


async def _events(work: Answering, reading: Reading, named: bool) -> AsyncIterator[bytes]:
    try:
        async for number, piece in work.answers.pieces():
            work.answer.usage.take(piece)
            if piece.prompt_logprobs is not None:  # of a long prompt these take a while
                yield await reading.beside(partial(_long_events, work, number, piece, named))
                continue
            for record in work.answer.chunks(number, piece):
                yield _event(record, named)
        for record in work.answer.ending():
            yield _event(record, named)
    except (EngineStopped, CheetahError) as problem:
        yield _event(of_failure(problem).body, False)
    if not named:
        yield b"data: [DONE]\n\n"


def _long_events(work: Answering, number: int, piece: StreamPiece, named: bool) -> bytes:
    return b"".join(_event(record, named, long_json) for record in work.answer.chunks(number, piece))


def _event(record: dict[str, Any], named: bool, write: Callable[[Any], bytes] = as_json) -> bytes:
    name = f"event: {record['type']}\n".encode() if named else b""
    return name + b"data: " + write(record) + b"\n\n"


async def _of_api_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, ApiError)
    return error_response(problem)


async def _of_http(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    return error_response(ApiError(problem.status_code, f"{request.method} {request.url.path}: {problem.detail}"))


async def _of_stopped_engine(request: Request, problem: Exception) -> Response:
    return error_response(ApiError(503, str(problem)))


async def _of_failed_completion(request: Request, problem: Exception) -> Response:
    return error_response(of_failure(problem))


async def _of_gone_client(request: Request, problem: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the log does


async def _of_our_bug(request: Request, problem: Exception) -> Response:
    return error_response(ApiError(500, "internal error: the server's log says more"))


_MISHAPS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: _of_api_error,
    HTTPException: _of_http,
    EngineStopped: _of_stopped_engine,
    CheetahError: _of_failed_completion,
    ClientDisconnect: _of_gone_client,
    Exception: _of_our_bug,
}
