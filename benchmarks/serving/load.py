"""How fast a server answers: tokens a second, time to the first token, gaps between pieces, with 1 to 8 clients, and
what those who stream see of a long prompt that arrives. The requests are those of `vllm bench serve --dataset-name
random`: prompts of random ids, a fixed number of tokens, no end token, each client asking for the next as one ends."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.serving.stream import Stream, completion

LIMIT_S = 600.0


@dataclass(frozen=True)
class Load:
    """clients: that ask at the same time. prompt_tokens, tokens: of each request. requests: of each client, beside
    an intruder as many as there is time for."""

    clients: int
    prompt_tokens: int
    tokens: int
    requests: int = 3


def client_of(address: str, api_key: str | None = None) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(base_url=address, timeout=LIMIT_S, headers=headers, limits=httpx.Limits())


def request_of(draw: random.Random, vocab: int, prompt_tokens: int, tokens: int) -> dict[str, Any]:
    """A body whose prompt nobody else's begins like."""
    prompt = [draw.randrange(vocab) for _ in range(prompt_tokens)]
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}


async def measure(address: str, load: Load, vocab: int, seed: int = 0, api_key: str | None = None) -> dict[str, Any]:
    """A record of a load: milliseconds, tokens a second."""
    async with client_of(address, api_key) as client:
        draw = random.Random(seed)
        await completion(client, request_of(draw, vocab, load.prompt_tokens, 4))
        bodies = [
            [request_of(draw, vocab, load.prompt_tokens, load.tokens) for _ in range(load.requests)]
            for _ in range(load.clients)
        ]
        streams = await asyncio.gather(*(_one_by_one(client, own) for own in bodies))
    return {"work": "load", **vars(load), **_figures([one for own in streams for one in own], load.clients)}


async def measure_intrusion(
    address: str, load: Load, long_prompt: int, vocab: int, seed: int = 0, api_key: str | None = None
) -> dict[str, Any]:
    """A record of what clients see, who stream one request of `load` after the other, while a prompt of `long_prompt`
    tokens arrives: their gaps, and its time to the first token."""
    async with client_of(address, api_key) as client:
        draw = random.Random(seed)
        long = asyncio.Event()

        async def stream() -> list[Stream]:
            streams = []
            while not long.is_set():
                streams.append(await completion(client, request_of(draw, vocab, load.prompt_tokens, load.tokens)))
            return streams

        async def intrude() -> Stream:
            await asyncio.sleep(1.0)
            try:
                return await completion(client, request_of(draw, vocab, long_prompt, 8))
            finally:
                long.set()

        intruder, streams = await asyncio.gather(intrude(), asyncio.gather(*(stream() for _ in range(load.clients))))
    figures = _figures([one for own in streams for one in own], load.clients)
    record = {"work": "intrusion", **vars(load), "long_prompt": long_prompt}
    return {**record, **figures, "long_first_token_ms": _ms(intruder.first_token_s)}


async def _one_by_one(client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[Stream]:
    return [await completion(client, body) for body in bodies]


def _figures(streams: list[Stream], clients: int) -> dict[str, Any]:
    gaps = sorted(gap for one in streams for gap in one.gaps_s)
    firsts = sorted(one.first_token_s for one in streams)
    rates = sorted(one.tokens_per_s for one in streams if len(one.at_s) > 1)
    return {
        "tokens_per_s": round(percentile(rates, 50) * clients, 1),
        "first_token_ms_p50": _ms(percentile(firsts, 50)),
        "first_token_ms_p99": _ms(percentile(firsts, 99)),
        "gap_ms_p50": _ms(percentile(gaps, 50)),
        "gap_ms_p99": _ms(percentile(gaps, 99)),
        "gap_ms_max": _ms(gaps[-1] if gaps else 0.0),
    }


def percentile(ordered: list[float], share: int) -> float:
    """The least of `ordered` that `share` percent of them do not exceed; 0 of none."""
    return ordered[min(len(ordered) - 1, -(-len(ordered) * share // 100) - 1)] if ordered else 0.0


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
