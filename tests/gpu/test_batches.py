"""Several sequences, or several tokens of one, in a step on the GPU: small models against float32, and a long soak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from cheetah.models.llama import LlamaConfig
from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.device import open_device
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launcher import Part, Sampling
from tests.program.rig import F32, bits, float32_logits, model, random_weights, relative_error, token_ids
from tests.tolerances import LOGITS

pytestmark = pytest.mark.gpu

MODELS = {
    "head_dim 64": model(256, 700, 2, 8, 2, 64, 500, max_position_embeddings=1024),
    "head_dim 128, one KV head": model(512, 1500, 2, 4, 1, 128, 500, max_position_embeddings=1024),
    "group of 8": model(256, 512, 1, 8, 1, 64, 300, max_position_embeddings=1024),
    "narrow M-tiles": model(1024, 1600, 2, 16, 2, 64, 500, max_position_embeddings=1024),
}
LENGTHS = [300, 0, 37, 512, 16, 129, 1, 64]


@contextmanager
def assembled(config: LlamaConfig, **plan: Any) -> Iterator[Assembly]:
    with open_device("cuda") as device:
        ready = assemble(random_weights(config), device=device, overrides=plan, timeout_s=20, quiet=True)
        try:
            yield ready
        finally:
            ready.close()


def sequence(ready: Assembly) -> CachedSequence:
    cache = ready.launcher.cache
    return CachedSequence(cache.pool, cache.page_size, cache.context)


def read(ready: Assembly, cache: CachedSequence, ids: Sequence[int], per_step: int) -> None:
    """Bring ids into the cache; whoever wants a token after them has to give the last one."""
    most = 64 * per_step
    for begin in range(0, len(ids), most):
        part = ids[begin : begin + most]
        ready.launcher.launch_together([Part(cache, [*part, 0], len(part), Sampling(), per_step)])


def scored(ready: Assembly, caches: Sequence[CachedSequence], ids: Sequence[Sequence[int]]) -> list[F32]:
    launcher, steps = ready.launcher, len(ids[0])
    logits = ready.logits_buffer()
    launcher.launch_together([Part(c, tokens, steps) for c, tokens in zip(caches, ids, strict=True)], logits)
    found = logits.download(np.float32, (steps, launcher.tokens, launcher.vocab_size))
    order = [part for part, _ in launcher.columns]
    return [found[:, order.index(number)].copy() for number in range(len(ids))]


def ragged(ready: Assembly, lengths: Sequence[int], per_step: int, vocab: int) -> list[F32]:
    prompts = [token_ids(length + 5, vocab, seed) for seed, length in enumerate(lengths)]
    caches = [sequence(ready) for _ in lengths]
    for cache, ids in zip(caches, prompts, strict=True):
        if len(ids) > 5:
            read(ready, cache, ids[:-5], per_step)
    found = scored(ready, caches, [ids[-5:] for ids in prompts])
    for cache in caches:
        cache.clear()
    return found


@pytest.mark.parametrize("batch", [2, 3, 8])
@pytest.mark.parametrize("name", MODELS)
def test_a_ragged_batch(name: str, batch: int) -> None:
    config = MODELS[name]
    with assembled(config, batch=batch, max_context=1024, page_size={2: 16, 3: 5, 8: 64}[batch]) as ready:
        first = ragged(ready, LENGTHS[:batch], 1, config.vocab_size)
        again = ragged(ready, LENGTHS[:batch], 1, config.vocab_size)
        faster = ragged(ready, LENGTHS[:batch], ready.launcher.tokens, config.vocab_size)
    for number, length in enumerate(LENGTHS[:batch]):
        wanted = float32_logits(random_weights(config), token_ids(length + 5, config.vocab_size, number))[-5:]
        assert relative_error(first[number], wanted) < LOGITS
        assert relative_error(faster[number], wanted) < LOGITS
        np.testing.assert_array_equal(bits(first[number]), bits(again[number]))


@pytest.mark.parametrize("name", ["head_dim 64", "narrow M-tiles"])
def test_sixteen_tokens_of_a_prompt(name: str) -> None:
    config = MODELS[name]
    ids = token_ids(301, config.vocab_size, 4)
    with assembled(config, tokens=16, max_context=1024) as ready:
        cache = sequence(ready)
        read(ready, cache, ids[:-5], 16)
        ready.buffers["logits"] = ready.device.allocate(5 * 16 * config.vocab_size * 4, 0xFF)
        found = scored(ready, [cache], [ids[-5:]])[0]
    assert relative_error(found, float32_logits(random_weights(config), ids)[-5:]) < LOGITS


def test_a_soak_of_joining_and_leaving() -> None:
    """10,000 steps: with items of a fixed length every sequence makes what it makes alone, and no page is lost."""
    config = MODELS["head_dim 64"]
    draw = np.random.default_rng(0)
    with assembled(config, batch=8, max_context=512, kv_chunk=64) as ready:
        launcher, pool = ready.launcher, ready.launcher.cache.pool
        alone: dict[int, list[int]] = {}

        def prompt_of(number: int) -> list[int]:
            return token_ids(1 + number * 7 % 90, config.vocab_size, number)

        def sampling_of(number: int) -> Sampling:
            return Sampling(0.0 if number % 3 == 0 else 0.8, number)

        def begin(number: int) -> tuple[CachedSequence, list[int]]:
            cache, ids = sequence(ready), prompt_of(number)
            part = Part(cache, ids, len(ids), sampling_of(number), min(8, len(ids)))
            return cache, list(launcher.launch_together([part])[0].token_ids)

        running: dict[int, tuple[CachedSequence, list[int], int]] = {}
        finished: dict[int, list[int]] = {}
        following, steps = 0, 0
        while steps < 10_000:
            while len(running) < 8 and (not running or draw.random() < 0.7):
                cache, made = begin(following % 40)
                running[following] = (cache, made, int(draw.integers(20, 300)))
                following += 1
            count = min(int(draw.integers(1, 64)), min(wanted - len(made) for _, made, wanted in running.values()))
            order = list(running)
            parts = [Part(running[i][0], running[i][1][-1:], count, sampling_of(i % 40)) for i in order]
            for number, result in zip(order, launcher.launch_together(parts), strict=True):
                running[number][1].extend(result.token_ids)
            steps += count
            for number in [i for i in order if len(running[i][1]) >= running[i][2]]:
                cache, made, _ = running.pop(number)
                finished[number] = made
                cache.clear()
        for cache, _, _ in running.values():
            cache.clear()
        assert pool.free_pages == pool.pages
        for number, made in finished.items():
            kind = number % 40
            if len(alone.get(kind, ())) < len(made):
                cache, own = begin(kind)
                while len(own) < len(made):
                    part = Part(cache, own[-1:], min(64, len(made) - len(own)), sampling_of(kind))
                    own.extend(launcher.launch_together([part])[0].token_ids)
                alone[kind] = own
                cache.clear()
            assert made == alone[kind][: len(made)], f"sequence {number}"
        assert len(finished) > 100 and pool.free_pages == pool.pages
