"""One streamed completion over HTTP, and when each of its pieces came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

Ids = tuple[int, ...]


class NotAsExpected(Exception):
    """A server that answers otherwise than it should."""


class TryAgain(Exception):
    """A server whose line is full."""


def check(response: httpx.Response, body: bytes) -> None:
    """TryAgain for 429, NotAsExpected for what else is not 200."""
    if response.status_code == 429:
        raise TryAgain
    if response.status_code != 200:
        raise NotAsExpected(f"{response.status_code}: {body[:400]!r}")


@dataclass
class Stream:
    """What came of a completion. at_s: when each piece came, in seconds of the monotonic clock; counts: its tokens."""

    began_s: float
    at_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def first_token_s(self) -> float:
        """Seconds from the request to its first token."""
        return self.at_s[0] - self.began_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between neighbouring pieces."""
        return [later - earlier for earlier, later in zip(self.at_s, self.at_s[1:], strict=False)]

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens behind the first piece."""
        return sum(self.counts[1:]) / (self.at_s[-1] - self.at_s[0])

    def take(self, token_ids: list[int], finish_reason: str | None) -> None:
        if token_ids:
            self.at_s.append(time.monotonic())
            self.counts.append(len(token_ids))
            self.token_ids += token_ids
        self.finish_reason = finish_reason or self.finish_reason


async def completion(client: httpx.AsyncClient, body: dict[str, Any], stop_after: int | None = None) -> Stream:
    """POST /v1/completions of `body`, streamed. stop_after: goes away after so many pieces. NotAsExpected for an answer
    that is no stream of a completion, TryAgain where the line is full."""
    found = Stream(time.monotonic())
    asked = {**body, "stream": True, "return_token_ids": True}
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        check(response, b"" if response.status_code == 200 else await response.aread())
        async for record in _records(response):
            if "error" in record:
                raise NotAsExpected(record["error"]["message"])
            for choice in record["choices"]:
                found.take(choice.get("token_ids") or [], choice["finish_reason"])
            if stop_after is not None and len(found.at_s) >= stop_after:
                return found
    if found.finish_reason is None:
        raise NotAsExpected(f"a stream ended after {len(found.token_ids)} tokens without saying why")
    return found


async def _records(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
