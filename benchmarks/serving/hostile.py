"""Requests that mean harm, or come from broken programs: bodies of 8 MB, JSON of empty lists, schemas and expressions
that are hard to follow, connections that send and take nothing, names that are not the server's.

Each is answered with 4xx, or with what it asks for, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.serving.stream import NotAsExpected

LONG = 7_900_000
LONG_SHARE = 0.05
"""Of hostile requests those with a long body: each takes a fifth of a second of a processor."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "x"}

Body = tuple[str, Callable[[], bytes]]
"""A path, and what is sent there."""


def _completion(**fields: Any) -> Body:
    return "/v1/completions", lambda: json.dumps({"prompt": "x", "max_tokens": 2, **fields}).encode()


def _chat(**fields: Any) -> Body:
    return "/v1/chat/completions", lambda: json.dumps({"messages": [USER], "max_tokens": 2, **fields}).encode()


def _schema(schema: Any) -> Body:
    return _chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def _filled(entry: bytes) -> Body:
    """A prompt of as many such entries as there is room for."""
    return "/v1/completions", lambda: b'{"prompt":[' + b",".join([entry] * (LONG // (len(entry) + 1))) + b"]}"


LONG_BODIES: tuple[Body, ...] = (
    _completion(prompt="x" * LONG),
    _completion(prompt="x y " * (LONG // 4), truncate_prompt_tokens=4),
    _chat(messages=[{"role": "user", "content": "x" * LONG}]),
    _chat(messages=[{"role": "user", "content": "<|end|>" * (LONG // 7)}]),
    _chat(messages=[{"role": "user", "content": "<|end|>" * (LONG // 70)}]),
    _completion(bad_words=[f"{number} {'the x ' * 1200}" for number in range(1000)]),
    _completion(stop=[f"{'x' * 7000}{number}" for number in range(1000)]),
    ("/tokenize", lambda: json.dumps({"prompt": " x" * (LONG // 2)}).encode()),
    ("/v1/responses", lambda: json.dumps({"input": "x" * LONG}).encode()),
    _schema({"enum": ["x" * LONG]}),
    _completion(structured_outputs={"json": '{"enum":[' + "[]," * (LONG // 4) + "1]}"}),
    *map(_filled, (b"1", b"1.5", b"[]", b'"a"', b"{}")),
    ("/v1/completions", lambda: b"[" * LONG),
)
SHORT_BODIES: tuple[Body, ...] = (
    _schema({"enum": ["a" * length for length in range(300)]}),
    _schema({"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(800)}}),
    _schema({"$ref": "#"}),
    _schema({"type": "array", "items": {"type": "string"}, "minItems": 10**9}),
    _completion(structured_outputs={"regex": "(a{1,200}){1,200}"}),
    _completion(structured_outputs={"regex": "(.*a){30}.{200}"}),
    _completion(structured_outputs={"grammar": 'start: a\na: a a | "x" | '}),
    _completion(prompt=[[]]),
    _completion(prompt=[1.5] * 9000),
    _completion(prompt="x" * 60_000),
    _completion(n=10**9),
    _completion(stop=["x"] * 9000),
    _completion(logit_bias={str(token): [] for token in range(9000)}),
    _completion(model="m" * 60_000),
    _completion(**{str(number): [1] for number in range(4000)}),
    _completion(prompt=[5] * 400, max_tokens=1, echo=True, logprobs=20, stream=True),
    _chat(chat_template_kwargs={"x": [[[]]] * 9000}),
    _chat(tools=[{"type": "function", "function": {"name": "\0" * 900}}], tool_choice="required"),
    ("/v1/completions", lambda: b'{"prompt": "a", "prompt": "b"}'),
    ("/v1/completions", lambda: b'{"prompt": "\\ud800"}'),
    ("/v1/completions", lambda: b"\xff" * 99),
    ("/detokenize", lambda: b'{"tokens": [' + b"5," * 9000 + b"5]}"),
    ("/v1/models/" + "x" * 5000, lambda: b""),
)
PLAIN, STREAMED = _completion(), _completion(max_tokens=20, stream=True, ignore_eos=True)
UNFINISHED = (b"", b"GET / HT", HEAD, HEAD + b"content-length: 9000000\r\n\r\n" + b"x" * 100_000, b"\0" * 5000)


async def attack(client: httpx.AsyncClient, draw: random.Random) -> None:
    """One of them. NotAsExpected where it is answered otherwise than with 200 or 4xx."""
    kind = draw.random()
    if kind < LONG_SHARE:
        await _send(client, *draw.choice(LONG_BODIES), JSON)
    elif kind < 0.6:
        await _send(client, *draw.choice(SHORT_BODIES), JSON)
    elif kind < 0.7:
        await _send(client, *PLAIN, {**JSON, "host": "evil.com"}, (403,))
    elif kind < 0.75:
        await _send(client, *PLAIN, {**JSON, "content-encoding": "gzip"}, (415,))
    elif kind < 0.95:
        await _hold(client, draw.choice(UNFINISHED), draw.random())
    else:
        body = _made(STREAMED[1])
        await _hold(client, HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body), draw.random())


def prepare() -> None:
    """Makes the long bodies, which takes seconds: whoever measures does so before."""
    for _, body in LONG_BODIES:
        _made(body)


@cache
def _made(body: Callable[[], bytes]) -> bytes:
    return body()


async def _send(
    client: httpx.AsyncClient,
    path: str,
    body: Callable[[], bytes],
    headers: dict[str, str],
    statuses: tuple[int, ...] = (200, *range(400, 500)),
) -> None:
    answer = await client.post(path, content=_made(body), headers=headers)
    if answer.status_code not in statuses:
        raise NotAsExpected(f"{path}: {answer.status_code}: {answer.text[:400]}")


async def _hold(client: httpx.AsyncClient, data: bytes, seconds: float) -> None:
    """A connection that sends this, takes nothing, and is gone after a while."""
    address = urlsplit(str(client.base_url))
    try:
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(data)
        await asyncio.sleep(seconds)
        writer.transport.abort()
    except OSError:  # closed by the server, as it may
        pass
