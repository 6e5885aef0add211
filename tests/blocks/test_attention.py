"""The attention core alone: against float64, and the relations that hold between runs on different inputs or plans.

Nothing here depends on the model's reference; the relations need no reference at all.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cheetah.emulator import explore
from cheetah.models.llama.reference import widen
from cheetah.plan.kv import ITEM_WORDS, KvPlan
from tests.blocks.attention_kernel import Core, Inputs, attend, random_inputs
from tests.program.rig import as_bf16, relative_error
from tests.tolerances import ATTENTION_OUTPUT

pytestmark = pytest.mark.compiler

LENGTHS = (1, 2, 3, 15, 16, 17, 33, 54, 97, 199)
CORES = {
    "usual": Core(),
    "head of 128": Core(head_dim=128, page_size=5),
    "group of 1, pages of 1": Core(group=1, page_size=1, kv_heads=2),
    "group of 3": Core(group=3, blocks=4, math_warps=4),
    "group of 4, pages of 64": Core(group=4, kv_heads=2, page_size=64, blocks=2),
    "group of 7, head of 128": Core(group=7, head_dim=128, blocks=5, math_warps=8),
    "group of 8, barrier": Core(group=8, blocks=3, sync="barrier"),
    "pages of 256": Core(page_size=256, blocks=8, kv_heads=3),
}
every_core = pytest.mark.parametrize("core", CORES.values(), ids=CORES.keys())


def error(core: Core, inputs: Inputs, plan: KvPlan | None = None) -> float:
    """The largest relative L2 error of a head's output against float64."""
    return relative_error(widen(attend(core, inputs, plan)), inputs.output())


@every_core
def test_output_against_float64(core: Core) -> None:
    for length in LENGTHS:
        assert error(core, random_inputs(core, length)) < ATTENTION_OUTPUT, length


@every_core
def test_needle(core: Core) -> None:
    """One key 60 logits above the rest: the output is its value. It slides over page, tile, stage and chunk edges."""
    length = 100
    edges = {0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 79, 80, 95, 96, 97, 98, 99}
    pages = {min(edge + d, length - 1) for edge in range(0, length, core.page_size) for d in (0, core.page_size - 1)}
    for place in sorted(edges | set(sorted(pages)[:20])):
        inputs = random_inputs(core, length, seed=place)
        widened = widen(inputs.queries[:: core.group])  # the first query of each KV head
        keys = widen(inputs.keys) * 0.01
        keys[:, place] = widened * (60 * np.sqrt(core.head_dim) / (widened**2).sum(axis=1))[:, None]
        inputs = replace(inputs, keys=as_bf16(keys))
        found = widen(attend(core, inputs))[:: core.group]
        assert relative_error(found, widen(inputs.values[:, place])) < ATTENTION_OUTPUT, place


@every_core
def test_a_key_beyond_the_length_has_no_effect(core: Core) -> None:
    """Whatever lies in unused slots and pages, NaN or numbers: the same bits."""
    inputs = random_inputs(core, 37)
    for leftover in (0x00, 0x3F, 0x7F):
        np.testing.assert_array_equal(attend(core, replace(inputs, leftover=leftover)), attend(core, inputs))


@every_core
def test_constant_values_come_back(core: Core) -> None:
    for length in (1, 16, 50, 97):
        inputs = random_inputs(core, length)
        constant = as_bf16(np.broadcast_to(np.linspace(-3, 3, core.head_dim), inputs.values.shape))
        found = widen(attend(core, replace(inputs, values=constant)))
        assert relative_error(found, np.broadcast_to(widen(constant)[0, 0], found.shape)) < ATTENTION_OUTPUT


@every_core
def test_twice_the_values_twice_the_output(core: Core) -> None:
    inputs = random_inputs(core, 97)
    doubled = replace(inputs, values=as_bf16(widen(inputs.values) * 2))
    np.testing.assert_array_equal(widen(attend(core, doubled)), 2 * widen(attend(core, inputs)))


def test_pages_in_any_order_and_of_any_size() -> None:
    inputs = random_inputs(Core(), 97)
    plain = attend(Core(), inputs)
    for page_size in (1, 5, 16, 64, 256):
        core = Core(page_size=page_size)
        for page_seed in range(3):
            np.testing.assert_array_equal(attend(core, replace(inputs, page_seed=page_seed)), plain)


@pytest.mark.parametrize("sync", ["flags", "barrier"])
def test_split_in_any_way(sync: str) -> None:
    """Close to float64 however the keys are cut; the cuts, and nothing else, decide the bits."""
    core = Core(blocks=8, sync=sync)
    inputs = random_inputs(core, 120)
    for chunk in (16, 32, 48, 64, 112, 128):
        plan = core.plan(120, chunk)
        assert error(core, inputs, plan) < ATTENTION_OUTPUT, chunk
        for seed in range(3):
            np.testing.assert_array_equal(attend(core, inputs, dealt(plan, seed)), attend(core, inputs, plan))


def dealt(plan: KvPlan, seed: int) -> KvPlan:
    """The same items, dealt to the blocks at random: some get several, some none."""
    draw = np.random.default_rng(seed)
    owners = np.sort(draw.integers(0, plan.blocks, plan.item_count))
    items = plan.items[draw.permutation(plan.item_count)]
    starts = np.searchsorted(owners, np.arange(plan.blocks + 1)).astype(np.int32)
    return replace(plan, items=items, work_indptr=starts)


def test_a_block_with_all_the_items() -> None:
    core = Core(kv_heads=3, blocks=4)
    inputs = random_inputs(core, 60)
    plan = core.plan(60, 32)
    for owner in range(4):
        alone = replace(plan, work_indptr=np.array([0] * (owner + 1) + [plan.item_count] * (4 - owner), np.int32))
        np.testing.assert_array_equal(attend(core, inputs, alone), attend(core, inputs, plan))


def test_chunks_beyond_the_length_add_the_identity() -> None:
    """A plan for more keys than there are: the chunks that lie wholly beyond change no bit."""
    core = Core(blocks=8)
    for length in (17, 32, 33, 48):
        inputs = random_inputs(core, length)
        fitting = attend(core, inputs, core.plan(48, 16))
        for keys in (64, 96, 128):
            np.testing.assert_array_equal(attend(core, inputs, core.plan(keys, 16)), fitting)


def test_a_head_whose_first_chunk_alone_has_keys() -> None:
    core = Core(blocks=8)
    inputs = random_inputs(core, 5)
    assert error(core, inputs, core.plan(128, 16)) < ATTENTION_OUTPUT


def test_grouped_heads_are_repeated_keys() -> None:
    grouped, repeated = Core(group=4), Core(group=1, kv_heads=4)
    inputs = random_inputs(grouped, 54)
    copied = replace(inputs, keys=np.repeat(inputs.keys, 4, axis=0), values=np.repeat(inputs.values, 4, axis=0))
    ours, theirs = widen(attend(grouped, inputs, grouped.plan(54, 64))), widen(attend(repeated, copied))
    assert relative_error(ours, theirs) < ATTENTION_OUTPUT


def test_large_logits_stay_finite() -> None:
    core = Core(blocks=4)
    for scale in (30.0, 1000.0):
        inputs = random_inputs(core, 80, scale=scale)
        found = widen(attend(core, inputs))
        assert np.isfinite(found).all()
        assert relative_error(found, inputs.output()) < ATTENTION_OUTPUT


@pytest.mark.parametrize("sync", ["flags", "barrier"])
def test_the_same_bits_under_every_schedule(sync: str) -> None:
    core = Core(group=3, kv_heads=2, blocks=5, sync=sync)
    inputs = random_inputs(core, 150)
    report = explore(lambda scheduler, seed: attend(core, inputs, None, scheduler, seed), range(10))
    assert report.ok, str(report)


def test_the_plans_here_are_of_the_real_kind() -> None:
    plan = Core(blocks=8).plan(120, 16)
    assert plan.items.shape == (8, ITEM_WORDS) and plan.merge_count == 1 and plan.partials == 8
