"""What must not change a bit: schedules, page order, page size, memory left over, launches, epochs; and what sampling
gives, which must be a function of the kernel's own logits."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from cheetah.emulator import SCHEDULERS, explore
from cheetah.models.sampling import gumbel_noise
from cheetah.plan.kv.tables import epochs_of_step
from cheetah.runtime.engine.launcher import EPOCH_LIMIT, Sampling
from tests.program.rig import (
    Rig,
    bits,
    fill_cache,
    float32_logits,
    kept_kernel,
    model,
    random_weights,
    token_ids,
)
from tests.tiers import tiered
from tests.tolerances import SAMPLING_MARGIN, SMALL_MARGIN

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

WEIGHTS = random_weights(model(vocab=90))
IDS = token_ids(40, 90)
SEEDS = [("flags", 4), ("barrier", 4), ("flags", 50), ("barrier", 50)]
SYNCS = pytest.mark.parametrize("sync", ["flags", "barrier"])


@cache
def rig(sync: str = "flags", page_size: int = 16, sanitize: bool = False, head_dim: int = 64, blocks: int = 3) -> Rig:
    weights = random_weights(model(vocab=90, head_dim=head_dim))
    plan = {"blocks": blocks, "sync": sync, "page_size": page_size, "max_context": 128}
    return Rig(weights, kv_chunk_min=16, generate=kept_kernel, sanitize=sanitize, **plan)


@cache
def plain(sync: str) -> np.ndarray:
    return rig(sync).session().score(IDS)


@pytest.mark.parametrize(("sync", "seeds"), tiered(SEEDS, SEEDS[1:]))
def test_seeds_of_three_schedulers(sync: str, seeds: int) -> None:
    """One block more than one KV head needs, keys split two ways, scoring and sampling."""

    def run(scheduler: str, seed: int) -> list[np.ndarray]:
        session = rig(sync, blocks=2).session(scheduler, seed)
        session.launcher.launch(IDS[:15], 14, Sampling())
        logits = session.score(IDS[14:18])
        made = session.generate(IDS[18:19], 3, temperature=1.0, seed=5)
        return [logits, np.array(made), session.cached(), session.exchanged()]

    report = explore(run, range(seeds), SCHEDULERS)
    assert report.ok, str(report)


GROUPINGS = [(sync, steps) for steps in (17, 3, 1) for sync in ("flags", "barrier")]
RACELESS = [(sync, head_dim) for sync in ("flags", "barrier") for head_dim in (64, 128)]


@pytest.mark.parametrize(("sync", "head_dim"), tiered(RACELESS, RACELESS[1:]))
def test_no_race(sync: str, head_dim: int) -> None:
    session = rig(sync, sanitize=True, head_dim=head_dim, blocks=2).session("random", 2)
    other = rig(sync, head_dim=head_dim, blocks=2).session("priority", 5)
    for one in (session, other):
        fill_cache(one, 17)
    scored = session.score(IDS[17:20])
    np.testing.assert_array_equal(bits(other.score(IDS[17:20])), bits(scored))
    sampled = session.generate(IDS[20:21], 2, temperature=0.9, seed=1)
    assert other.generate(IDS[20:21], 2, temperature=0.9, seed=1) == sampled


@pytest.mark.parametrize(("sync", "launch_steps"), tiered(GROUPINGS, GROUPINGS[1:]))
def test_grouping_into_launches(sync: str, launch_steps: int) -> None:
    session = rig(sync).session("priority", 7, launch_steps=launch_steps)
    np.testing.assert_array_equal(bits(session.score(IDS)), bits(plain(sync)))
    session.launcher.restart()
    whole = rig(sync).session()
    assert session.generate(IDS, 8, 1.0, 3) == whole.generate(IDS, 8, 1.0, 3)


@pytest.mark.parametrize("page_size", tiered([1, 5, 16, 64], [1, 16, 64]))
def test_page_size_and_page_order(page_size: int) -> None:
    paged = rig(page_size=page_size)
    order = [int(page) for page in np.random.default_rng(3).permutation(paged.plan.kv_pages)]
    session = paged.session("random", 1, page_order=order)
    np.testing.assert_array_equal(bits(session.score(IDS)), bits(plain("flags")))


@pytest.mark.parametrize("leftover", [0x00, 0x7F, 0x3F])
def test_what_lies_in_unused_pages_and_slots(leftover: int) -> None:
    """By default NaN lies there; here zeros, infinity-like numbers, ordinary numbers."""
    session = rig().session()
    session.buffers["kv"].fill(leftover)
    np.testing.assert_array_equal(bits(session.score(IDS)), bits(plain("flags")))


def test_only_the_rows_of_the_sequence_are_written() -> None:
    session = rig(page_size=5).session(page_order=reversed(range(rig(page_size=5).plan.kv_pages)))
    session.score(IDS[:13])
    written = (session.cached() != 0xFFFF).any(axis=(0, 2, 3, 5))  # [pages, slots]
    wanted = np.zeros_like(written)
    wanted[-2:] = True  # the first two pages in the order: full
    wanted[-3, :3] = True
    np.testing.assert_array_equal(written, wanted)


@SYNCS
def test_epochs_up_to_the_last_one_and_again_from_the_first(sync: str) -> None:
    per_launch = 8 * epochs_of_step(WEIGHTS.config.layers)
    session = rig(sync).session(launch_steps=8, first_epoch=EPOCH_LIMIT - 2 * per_launch)
    np.testing.assert_array_equal(bits(session.score(IDS)), bits(plain(sync)))
    assert session.launcher._epochs.take(1)[0] < 10 * per_launch, "the epochs did not pass their end"


def test_greedy_ids_are_the_reference_s_up_to_a_small_margin() -> None:
    compared = 0
    for start in range(8):
        prompt = IDS[start : start + 5]
        made = rig().session().generate(prompt, 10)
        logits = float32_logits(WEIGHTS, [*prompt, *made])[4:-1]
        ordered = np.sort(logits, axis=1)
        small = np.flatnonzero(ordered[:, -1] - ordered[:, -2] < SMALL_MARGIN)
        sure = int(small[0]) if small.size else len(made)
        assert made[:sure] == [int(token) for token in logits.argmax(axis=1)[:sure]]
        compared += sure
    assert compared >= 8, "hardly a test"


DRAWN = [(0.0, 0), (0.7, 1), (1.3, 2**64 - 1), (50.0, 2**33 + 5)]
DRAWN_BY = [(sync, *drawn) for drawn in DRAWN for sync in ("flags", "barrier")]


@pytest.mark.parametrize(("sync", "temperature", "seed"), tiered(DRAWN_BY, [*DRAWN_BY[1::4], *DRAWN_BY[6:7]]))
def test_sampled_ids_follow_from_the_kernel_s_own_logits(sync: str, temperature: float, seed: int) -> None:
    session = rig(sync).session("random", 4)
    made = session.generate(IDS[:9], 30, temperature, seed)
    session.launcher.restart()
    logits = session.score([*IDS[:9], *made])[8:-1]
    for number, (token, row) in enumerate(zip(made, logits, strict=True)):
        candidates = row
        if temperature:
            candidates = row / np.float32(temperature) + gumbel_noise(np.arange(90), seed, 9 + number)
        assert candidates[token] >= candidates.max() - (SAMPLING_MARGIN if temperature else 0)
    if temperature:
        assert len(set(made)) > 3, "hardly a sample"


def test_of_equal_logits_the_lowest_id_is_taken() -> None:
    """Rows of the head that are the same, in one M-tile, in two M-tiles of a block, and in M-tiles of two blocks."""
    for twins in [(2, 3, 18), (0, 17, 64, 89)]:
        weights = type(WEIGHTS)(WEIGHTS.config)
        head = weights.tensors["lm_head.weight"]
        logits = float32_logits(weights, IDS[:1])[0]
        head[list(twins)] = head[int(logits.argmax())]
        plan = {"blocks": 3, "sync": "flags", "page_size": 16, "max_context": 128}
        session = Rig(weights, kv_chunk_min=16, generate=kept_kernel, **plan).session("priority", 2)
        expected = min(*twins, int(logits.argmax()))
        assert session.generate(IDS[:1], 1) == [expected]


STOPPING = [(sync, blocks) for sync in ("flags", "barrier") for blocks in (2, 3)]


@pytest.mark.parametrize(("sync", "blocks"), tiered(STOPPING, [("flags", 3), ("barrier", 2), ("barrier", 3)]))
def test_a_stop_id_ends_the_launch_and_one_can_go_on(sync: str, blocks: int) -> None:
    """At every place of a launch: the first sampled token, the middle, the last; also with a short ring."""
    weights = random_weights(model(vocab=90))
    kernel = Rig(weights, blocks=blocks, sync=sync, stages=3, in_flight=2, max_context=128)
    whole = kernel.session().generate(IDS[:5], 10, 1.0, 11)
    for place in (0, 4, 9):
        session = kernel.session("priority", place)
        stopped = session.generate(IDS[:5], 10, 1.0, 11, stop_ids=[89 - whole[place], whole[place]])
        end = next(i for i, token in enumerate(whole) if token in (89 - whole[place], whole[place]))
        assert stopped == whole[: end + 1]
        assert session.launcher.cache.length == 5 + end
        assert stopped + session.generate(stopped[-1:], 9 - end, 1.0, 11) == whole if end < 9 else stopped == whole


def test_a_stop_id_among_the_given_tokens_ends_nothing() -> None:
    session = rig().session()
    unsampled = next(token for token in IDS[:9] if token not in rig().session().generate(IDS[:9], 3))
    assert session.generate(IDS[:9], 3, stop_ids=[unsampled]) == rig().session().generate(IDS[:9], 3)
