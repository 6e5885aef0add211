"""Random requests at random times to a server: streams, whole answers, clients that go away, bodies that are wrong,
more completions than places. Nothing may be lost: each answer is that of the same request by itself, wrong bodies get
4xx, and in the end nobody runs or waits and no page is held.

With `--kv-chunk` on the server an answer has one value; without it only the last bits of sums differ in company, which
may turn a token: the server should have it.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.serving.hostile import attack, prepare
from benchmarks.serving.load import client_of, percentile
from benchmarks.serving.stream import NotAsExpected, TryAgain, check, completion

WRONG: tuple[dict[str, Any], ...] = (
    {"prompt": []},
    {"prompt": [-1]},
    {"prompt": [10**9]},
    {"prompt": "a", "max_tokens": -3},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "n": 10**9},
    {"prompt": "a", "top_p": 7},
    {"prompt": "a", "no such field": 1},
    {"prompt": "a", "max_tokens": 10**9},
    {"prompt": {"a": 1}},
    {},
)
GONE_SHARE, WRONG_SHARE, WHOLE_SHARE = 0.1, 0.1, 0.3
SETTLE_S = 60.0
TRY_AGAIN_S = 0.5


@dataclass
class Soak:
    """kinds: different requests that are right. most_open: clients at a time. longest: tokens of a prompt, or made.
    hostile: share of requests that mean harm (`hostile`), beside which one client streams all the time."""

    address: str
    vocab: int
    requests: int
    kinds: int = 50
    most_open: int = 24
    longest: int = 40
    seed: int = 0
    api_key: str | None = None
    hostile: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    answers: dict[int, list[int]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    """That right requests took, from the first try to the whole answer."""
    gaps_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)

    async def run(self) -> dict[str, Any]:
        """A record of it. NotAsExpected names the first thing that is wrong."""
        draw = random.Random(self.seed)
        self._bodies = [self._body(draw, number) for number in range(self.kinds)]
        if self.hostile:
            prepare()
        began, gate = time.monotonic(), asyncio.Semaphore(self.most_open)
        async with client_of(self.address, self.api_key) as client:
            before = await self._resident_bytes(client)
            watching = [asyncio.create_task(self._stream(client)), asyncio.create_task(self._ask_health(client))]
            async with asyncio.TaskGroup() as group:
                for _ in range(self.requests):
                    await gate.acquire()
                    task = group.create_task(self._one(client, random.Random(draw.random())))
                    task.add_done_callback(lambda _: gate.release())
                    if draw.random() < 0.02:
                        await asyncio.sleep(draw.random() * 0.2)
            seconds = time.monotonic() - began
            for task in watching:
                task.cancel()
            for ended in await asyncio.gather(*watching, return_exceptions=True):
                if isinstance(ended, Exception):  # which to be cancelled is not
                    raise ended
            await self._settled(client)
            for number, answer in sorted(self.answers.items()):
                alone = (await completion(client, self._bodies[number])).token_ids
                _expect(alone == answer, f"request {number}: {alone} alone, {answer} in company")
            after, counted = await self._resident_bytes(client), await self._gauges(client)
        grown = {"resident_mb_before": before, "resident_mb_after": after} if before else {}
        preempted = {"preemptions": int(counted["vllm:num_preemptions_total"])}
        how = {"requests": self.requests, "longest": self.longest, "seconds": round(seconds, 1)}
        return {"work": "soak", **how, **self.outcomes, **preempted, **self._times(), **grown}

    def _times(self) -> dict[str, float]:
        """Milliseconds that requests took, between pieces of the stream beside them, and of /health."""
        found: dict[str, float] = {}
        for name, times in (("request", self.seconds), ("gap", self.gaps_s), ("health", self.health_s)):
            ordered = sorted(times)
            found |= {f"{name}_ms_p{share}": round(1e3 * percentile(ordered, share), 1) for share in (50, 99, 100)}
        return found

    async def _stream(self, client: httpx.AsyncClient) -> None:
        """Streams one completion after the other."""
        body = {"prompt": [1], "max_tokens": 4 * self.longest, "ignore_eos": True, "temperature": 0.0}
        while True:
            try:
                self.gaps_s += (await completion(client, body)).gaps_s
            except TryAgain:
                await asyncio.sleep(TRY_AGAIN_S)

    async def _ask_health(self, client: httpx.AsyncClient) -> None:
        while True:
            began = time.monotonic()
            _expect((await client.get("/health")).status_code == 200, "the server is ill")
            self.health_s.append(time.monotonic() - began)
            await asyncio.sleep(0.02)

    def _body(self, draw: random.Random, number: int) -> dict[str, Any]:
        shared = number % 3  # prompts that begin alike
        tokens = draw.randrange(1, self.longest)
        return {
            "prompt": [shared, *(draw.randrange(self.vocab) for _ in range(draw.randrange(self.longest)))],
            "max_tokens": tokens,
            "temperature": draw.choice([0.0, 0.7, 1.3]),
            "top_p": draw.choice([1.0, 0.9]),
            "repetition_penalty": draw.choice([1.0, 1.1]),
            "seed": draw.randrange(2**32),
        }

    async def _one(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        if draw.random() < self.hostile:
            await attack(client, draw)
            self.outcomes["hostile"] += 1
            return
        kind = draw.random()
        if kind < WRONG_SHARE:
            await self._wrong(client, draw.choice(WRONG))
            return
        number, began = draw.randrange(self.kinds), time.monotonic()
        while True:
            try:
                if kind < WRONG_SHARE + GONE_SHARE:
                    await completion(client, self._bodies[number], stop_after=draw.randrange(1, 4))
                    self.outcomes["gone"] += 1
                elif kind < WRONG_SHARE + GONE_SHARE + WHOLE_SHARE:
                    self._keep(number, await self._whole(client, number))
                    self.outcomes["whole"] += 1
                else:
                    self._keep(number, (await completion(client, self._bodies[number])).token_ids)
                    self.outcomes["streamed"] += 1
                self.seconds.append(time.monotonic() - began)
                return
            except TryAgain:
                self.outcomes["told to try again"] += 1
                await asyncio.sleep(TRY_AGAIN_S * draw.random())

    def _keep(self, number: int, token_ids: list[int]) -> None:
        known = self.answers.setdefault(number, token_ids)
        _expect(known == token_ids, f"request {number}: {known} once, {token_ids} another time")

    async def _whole(self, client: httpx.AsyncClient, number: int) -> list[int]:
        response = await client.post("/v1/completions", json={**self._bodies[number], "return_token_ids": True})
        check(response, response.content)
        found: list[int] = response.json()["choices"][0]["token_ids"]
        return found

    async def _wrong(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        response = await client.post("/v1/completions", json=body)
        _expect(400 <= response.status_code < 500, f"{body} was answered {response.status_code}: {response.text[:400]}")
        _expect(bool(response.json()["error"]["message"]), f"{body} was refused without a word")
        self.outcomes["wrong"] += 1

    async def _settled(self, client: httpx.AsyncClient) -> None:
        """Nobody runs, waits or holds pages, soon after the last answer."""
        end = time.monotonic() + SETTLE_S
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while held := {name: value for name, value in (await self._gauges(client)).items() if name in names and value}:
            _expect(time.monotonic() < end, f"nobody asks any more, and yet {held}")
            await asyncio.sleep(0.05)

    async def _resident_bytes(self, client: httpx.AsyncClient) -> int:
        """Of the server, in MB, where its metrics tell; else 0."""
        return int((await self._gauges(client)).get("process_resident_memory_bytes", 0.0) / 1e6)

    async def _gauges(self, client: httpx.AsyncClient) -> dict[str, float]:
        text = (await client.get("/metrics")).text
        return {name: float(value) for name, value in re.findall(r"^([\w:]+)(?:\{.*?\})? (\S+)$", text, re.MULTILINE)}


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise NotAsExpected(f"soak: {problem}")
