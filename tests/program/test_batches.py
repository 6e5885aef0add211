"""Several sequences, or several tokens of one, in a step: against float32, and against each of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cheetah.emulator import SCHEDULERS
from cheetah.models.rounding import widen
from cheetah.plan.kv.tables import TileRecord, word
from cheetah.runtime.engine.launcher import Part, Sampling
from tests.program.rig import (
    F32,
    Rig,
    Session,
    bits,
    float32_logits,
    kept_kernel,
    model,
    random_weights,
    relative_error,
    token_ids,
)
from tests.tiers import tiered
from tests.tolerances import EIGHT_BIT_LOGITS, LOGITS

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

SHAPES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "two": (model(), 3, {"batch": 2}),
    "three of four": (model(heads=4, kv_heads=2), 4, {"batch": 4}),
    "eight, sliced down": (model(64, 600, 1, 4, 1), 3, {"batch": 8, "down_slices": 3, "consumer_warps": 4}),
    "eight on two warps": (model(), 2, {"batch": 8}),
    "barrier": (model(), 3, {"batch": 4, "sync": "barrier"}),
    "eight, parts that come ahead": (
        *(model(64, 600, 1, 4, 1), 3),
        {"batch": 8, "sync": "barrier", "consumer_warps": 4},
    ),
}


@cache
def rig_of(name: str, **more: Any) -> Rig:
    config, blocks, plan = SHAPES[name]
    sizes = {"blocks": blocks, "kv_chunk_min": 16, "stages": 5, "max_steps": 128}
    return Rig(random_weights(config), generate=kept_kernel, **{**sizes, **plan, **more})


def prompts_of(rig: Rig, lengths: Sequence[int]) -> list[list[int]]:
    return [token_ids(length, rig.config.vocab_size, seed) for seed, length in enumerate(lengths)]


def ragged(session: Session, lengths: Sequence[int], scored: int) -> list[F32]:
    """Sequences of different lengths: each begins alone, then all go on together; the logits of those last steps."""
    prompts = prompts_of(session.rig, [length + scored for length in lengths])
    caches = []
    for ids, length in zip(prompts, lengths, strict=True):
        caches.append(session.sequence())
        if length:
            session.launcher.launch_together([Part(caches[-1], ids[: length + 1], length)])
    return session.score_together([ids[-scored:] for ids in prompts], caches)


@pytest.mark.parametrize(
    "name", tiered(SHAPES, ["two", "barrier", "three of four", "eight on two warps", "eight, sliced down"])
)
def test_a_ragged_batch_against_float32(name: str) -> None:
    rig = rig_of(name)
    lengths = [33, 0, 70, 5, 16, 100, 1, 47][: max(2, rig.plan.batch - (name == "three of four"))]
    together = ragged(rig.session(), lengths, 3)
    for ids, logits in zip(prompts_of(rig, [length + 3 for length in lengths]), together, strict=True):
        wanted = float32_logits(rig.weights, ids)[-3:]
        assert relative_error(logits, wanted) < LOGITS


def test_with_a_fixed_chunk_the_company_does_not_matter() -> None:
    """Bits of a sequence in a batch are those of the sequence alone, wherever it stands in the batch."""
    rig = rig_of("three of four", kv_chunk=32)
    lengths = [40, 7, 65]
    together = ragged(rig.session(), lengths, 4)
    session = rig.session("random", 3)
    for number, length in enumerate(lengths):
        ids = prompts_of(rig, [other + 4 for other in lengths])[number]
        cache = session.sequence()
        session.launcher.launch_together([Part(cache, ids[: length + 1], length)])
        alone = session.score_together([ids[-4:]], [cache])[0]
        np.testing.assert_array_equal(bits(alone), bits(together[number]))


SCHEDULES = [("random", 1), *((scheduler, 3) for scheduler in SCHEDULERS)]


@pytest.mark.parametrize(("scheduler", "seeds"), tiered(SCHEDULES, SCHEDULES[1:]))
def test_the_schedule_does_not_matter(scheduler: str, seeds: int) -> None:
    rig = rig_of("three of four")
    first = ragged(rig.session(), [20, 3, 50], 3)
    for seed in range(seeds):
        again = ragged(rig.session(scheduler, seed), [20, 3, 50], 3)
        np.testing.assert_array_equal(bits(np.stack(again)), bits(np.stack(first)))


SEVERAL = [(name, per_step) for name in ("eight, sliced down", "eight on two warps") for per_step in (2, 4, 8)]


@pytest.mark.parametrize(("name", "per_step"), tiered(SEVERAL, [*SEVERAL[:2], SEVERAL[3], SEVERAL[5]]))
def test_several_tokens_of_a_prompt_in_a_step(name: str, per_step: int) -> None:
    rig = rig_of(name)
    ids = token_ids(45, rig.config.vocab_size)
    logits = rig.session().score(ids, per_step)
    assert relative_error(logits, float32_logits(rig.weights, ids)) < LOGITS


def test_more_tokens_a_step_than_a_tile_has_rows() -> None:
    """16 tokens with two consumer warps: several products' accumulators, and tiles of a part of the tokens."""
    rig = Rig(random_weights(model(heads=4, kv_heads=1)), blocks=3, kv_chunk_min=16, tokens=16, stages=4)
    ids = token_ids(50, rig.config.vocab_size)
    logits = rig.session().score(ids, 16)
    assert relative_error(logits, float32_logits(rig.weights, ids)) < LOGITS


def test_each_sequence_samples_its_own_way() -> None:
    """Temperatures, seeds and lengths differ: every sequence makes what it makes alone."""
    rig = rig_of("three of four", kv_chunk=32)
    prompts = prompts_of(rig, [5, 1, 9])
    samplings = [Sampling(), Sampling(0.9, 7), Sampling(1.3, 2**63 + 5)]

    def made(session: Session, chosen: Sequence[int]) -> list[tuple[int, ...]]:
        parts = [Part(session.sequence(), prompts[i][:1], 12, samplings[i]) for i in chosen]
        return [result.token_ids for result in session.launcher.launch_together(parts)]

    together = made(rig.session(), [0, 1, 2])
    assert together == made(rig.session("random", 1), [2, 0, 1])[1:] + made(rig.session(), [2])
    assert [made(rig.session(), [number])[0] for number in range(3)] == together
    assert len(set(together)) == 3


def test_a_launch_ends_when_every_sequence_has_stopped() -> None:
    rig = rig_of("two")
    prompts = prompts_of(rig, [1, 1])

    def made(stops: Sequence[tuple[int, ...]]) -> list[Any]:
        session = rig.session()
        parts = [
            Part(session.sequence(), ids, 20, Sampling(0.7, 3, stop)) for ids, stop in zip(prompts, stops, strict=True)
        ]
        return session.launcher.launch_together(parts)

    free = [result.token_ids for result in made([(), ()])]
    early, late = free[0][2], free[1][7]
    first_early, first_late = free[0].index(early), free[1].index(late)
    one = made([(early,), ()])
    assert one[0].steps == 20 and one[0].token_ids == free[0][: first_early + 1] and one[1].token_ids == free[1]
    both = made([(early,), (late,)])
    assert both[0].steps == max(first_early, first_late) + 1
    assert [result.token_ids for result in both] == [free[0][: first_early + 1], free[1][: first_late + 1]]


def test_a_shared_prefix_is_read_once_and_changes_little() -> None:
    """Two levels against one: the same sequences with pages of their own."""
    rig = rig_of("three of four")
    prefix = token_ids(64, rig.config.vocab_size, 9)
    tails = prompts_of(rig, [4, 4, 4])

    def logits(shared: bool) -> list[F32]:
        session = rig.session()
        first = session.sequence()
        session.launcher.launch_together([Part(first, [*prefix, 0], 64)])
        caches = [first]
        for _ in tails[1:]:
            if shared:
                caches.append(first.fork())
            else:
                caches.append(session.sequence())
                session.launcher.launch_together([Part(caches[-1], [*prefix, 0], 64)])
        found = session.score_together(tails, caches)
        # A shared prefix has a tile of its own, the first, with the columns of all.
        assert shared == (session.launcher._plans._tiles[0, word(TileRecord, "columns")] == len(tails))
        return found

    apart, together = logits(False), logits(True)
    for number, tail in enumerate(tails):
        wanted = float32_logits(rig.weights, [*prefix, *tail])[-4:]
        assert relative_error(apart[number], wanted) < LOGITS and relative_error(together[number], wanted) < LOGITS


@pytest.mark.parametrize("scales", tiered([1.0, 0.03], [0.03]))
def test_eight_bit_keys_and_values(scales: float) -> None:
    """Codes in the cache are those of the keys and values of bf16, and what comes out is near."""
    config, blocks, plan = SHAPES["three of four"]
    plain = rig_of("three of four")
    coded = Rig(
        random_weights(config), blocks=blocks, kv_chunk_min=16, stages=5, max_steps=128, kv_dtype="e4m3", **plan
    )
    factors = np.full(coded.manifest.buffer("kv_scales").shape, scales, np.float32)
    coded.constants["kv_scales"].upload(factors)
    ids = token_ids(40, config.vocab_size, 5)
    sessions = plain.session(), coded.session()
    logits = [session.score(ids, 4) for session in sessions]
    wanted = float32_logits(plain.weights, ids)
    assert relative_error(logits[0], wanted) < relative_error(logits[1], wanted) < EIGHT_BIT_LOGITS
    page = sessions[0].launcher.cache.pages[0]
    # The first layer's keys and values do not depend on the attention before them.
    exact = widen(sessions[0].buffers["kv"].download(np.uint16, plain.manifest.buffer("kv").shape)[0, page])
    codes = sessions[1].buffers["kv"].download(np.uint8, coded.manifest.buffer("kv").shape)[0, page]
    stored = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    expected = np.clip(exact / np.float32(scales), -448, 448)
    # Half a step of 3 mantissa bits, or of the smallest numbers; the keys were rounded to bf16 on one side only.
    assert np.all(np.abs(stored - expected) <= np.maximum(np.abs(expected) * (2**-4 + 2**-8), 2**-10 + 2**-12))
