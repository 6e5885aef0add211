"""The attention core alone: against float64, and the relations that hold between runs on different inputs or plans.

Nothing here depends on the model's reference; the relations need no reference at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cheetah import lang as ch
from cheetah.blocks.attention.tile import LN_2, LOG2_E
from cheetah.blocks.attention.variants import Pair, Variant
from cheetah.emulator import explore
from cheetah.lang import ty
from cheetah.models.rounding import widen
from cheetah.plan.kv import ITEM_WORDS, KvPlan
from tests.blocks.attention_kernel import Core, Inputs, attend, attend_all, exact, plan_for, random_inputs
from tests.program.rig import as_bf16, relative_error
from tests.tiers import tiered
from tests.tolerances import ATTENTION_LSE, ATTENTION_OUTPUT, ATTENTION_WEIGHTS

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

LENGTHS = (1, 2, 3, 15, 16, 17, 33, 54, 97, 199)
CORES = {
    "usual": Core(),
    "head of 128": Core(head_dim=128, page_size=5),
    "group of 1, pages of 1": Core(group=1, page_size=1, kv_heads=2),
    "group of 3": Core(group=3, blocks=4, consumer_warps=4),
    "group of 4, pages of 64": Core(group=4, kv_heads=2, page_size=64, blocks=2),
    "group of 7, head of 128": Core(group=7, head_dim=128, blocks=5, consumer_warps=8),
    "group of 8, barrier": Core(group=8, blocks=3, sync="barrier"),
    "group of 12, no key of the step": Core(group=12, blocks=3, consumer_warps=6, has_newest=False),
    "pages of 256": Core(page_size=256, blocks=8, kv_heads=3),
    "codes": Core(kv_dtype="e4m3", group=4, kv_heads=2),
    "codes, head of 128": Core(kv_dtype="e4m3", head_dim=128, group=3, page_size=5, consumer_warps=4),
}
SEVERAL = {
    "2 columns": Core(tokens=2, group=4),
    "4 columns, pages of 5": Core(tokens=4, group=7, head_dim=128, page_size=5, consumer_warps=4),
    "8 columns": Core(tokens=8, group=8, consumer_warps=8, blocks=2),
    "8 columns, pages of 1": Core(tokens=8, group=1, page_size=1, kv_heads=2),
    "8 columns in tiles of 5": Core(tokens=8, group=3, consumer_warps=2),
    "8 columns, all in the cache": Core(tokens=8, group=4, consumer_warps=4, has_newest=False, head_dim=128),
    "8 columns of codes": Core(tokens=8, group=4, consumer_warps=4, kv_dtype="e4m3", head_dim=128),
    "4 columns of codes, in the cache": Core(tokens=4, group=2, kv_dtype="e4m3", has_newest=False, page_size=64),
    "warps that do not divide": Core(tokens=2, group=12, consumer_warps=6, sync="barrier"),
}
RARE_CORES = [
    *(CORES[name] for name in ("group of 4, pages of 64", "group of 3", "pages of 256", "codes", "head of 128")),
    *(CORES[name] for name in ("group of 7, head of 128", "group of 1, pages of 1")),
]
RARE_SEVERAL = [
    *(
        SEVERAL[name]
        for name in ("2 columns", "8 columns, pages of 1", "4 columns of codes, in the cache", "8 columns")
    ),
    SEVERAL["8 columns, all in the cache"],
]
SEQUENCES = [(kv_dtype, has_newest) for kv_dtype in ("bf16", "e4m3") for has_newest in (True, False)]
every_core = pytest.mark.parametrize("core", tiered(CORES.values(), RARE_CORES), ids=CORES.keys())
every_several = pytest.mark.parametrize("core", tiered(SEVERAL.values(), RARE_SEVERAL), ids=SEVERAL.keys())


def error(core: Core, inputs: Inputs, plan: KvPlan | None = None, chunk: int = 0) -> float:
    """The largest relative L2 error of a head's output against float64."""
    return relative_error(attend(core, inputs, plan, chunk=chunk), inputs.output())


def require_close(core: Core, batch: list[Inputs]) -> None:
    """Output and LSE of every sequence against float64."""
    for (output, lse), inputs in zip(attend_all(core, batch), batch, strict=True):
        wanted, wanted_lse = inputs.states()
        assert relative_error(output, wanted) < ATTENTION_WEIGHTS, inputs.length
        assert (np.abs(lse - wanted_lse) <= ATTENTION_LSE * np.maximum(1, np.abs(wanted_lse))).all(), inputs.length


@every_core
def test_one_column_against_float64(core: Core) -> None:
    for length in LENGTHS:
        require_close(core, [random_inputs(core, length)])


@every_several
def test_several_columns_against_float64(core: Core) -> None:
    for length in (1, 2, 8, 15, 16, 17, 20, 33, 199):
        require_close(core, [random_inputs(core, length, columns=min(core.tokens, length))])


@pytest.mark.parametrize(("kv_dtype", "has_newest"), tiered(SEQUENCES, SEQUENCES[1:-1]))
def test_several_sequences_against_float64(kv_dtype: str, has_newest: bool) -> None:
    core = Core(tokens=8, batch=4, group=2, kv_heads=2, blocks=5, kv_dtype=kv_dtype, has_newest=has_newest)
    for lengths in ((1, 40, 199, 16), (150, 3, 4, 5), (33, 33, 33, 33)):
        columns = [min(length, wanted) for length, wanted in zip(lengths, (1, 4, 2, 1), strict=True)]
        batch = [
            random_inputs(core, n, seed=b, columns=c) for b, (n, c) in enumerate(zip(lengths, columns, strict=True))
        ]
        batch = [replace(one, scales=batch[0].scales) for one in batch]
        require_close(core, batch)


@every_core
def test_needle(core: Core) -> None:
    """One key 60 logits above the rest: the output is its value. It slides over page, tile, stage and chunk edges."""
    if core.kv_dtype != "bf16":
        pytest.skip("codes cannot hold such a key")
    length = 100
    edges = {0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 79, 80, 95, 96, 97, 98, 99}
    pages = {min(edge + d, length - 1) for edge in range(0, length, core.page_size) for d in (0, core.page_size - 1)}
    for place in sorted(edges | set(sorted(pages)[:20])):
        inputs = random_inputs(core, length, seed=place)
        widened = widen(inputs.queries[0, :: core.group])  # the first query of each KV head
        keys = widen(inputs.keys) * 0.01
        keys[:, place] = widened * (60 * np.sqrt(core.head_dim) / (widened**2).sum(axis=1))[:, None]
        inputs = replace(inputs, keys=as_bf16(keys))
        found = attend(core, inputs)[0, :: core.group]
        assert relative_error(found, widen(inputs.values[:, place])) < ATTENTION_WEIGHTS, place


@every_several
def test_a_later_key_has_no_effect(core: Core) -> None:
    """Query i gives the same whatever the keys after it are, also among the newest ones."""
    columns = core.tokens
    inputs = random_inputs(core, 30, columns=columns)
    keys, values = inputs.keys.copy(), inputs.values.copy()
    keys[:, -1], values[:, -1] = keys[:, 0], values[:, 0]
    changed = attend(core, replace(inputs, keys=keys, values=values))
    np.testing.assert_array_equal(changed[:-1], attend(core, inputs)[:-1])
    assert (changed[-1] != attend(core, inputs)[-1]).any()


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
        values = np.broadcast_to(inputs.values[:, :1], inputs.values.shape)
        constant = replace(inputs, values=np.ascontiguousarray(values))
        assert error(core, constant) < ATTENTION_WEIGHTS


@every_core
def test_twice_the_values_twice_the_output(core: Core) -> None:
    inputs = random_inputs(core, 97)
    if core.kv_dtype == "bf16":
        doubled = replace(inputs, values=as_bf16(widen(inputs.values) * 2))
    else:
        doubled = replace(inputs, scales=inputs.scales * np.array([[1], [2]], np.float32))
    np.testing.assert_array_equal(attend(core, doubled), 2 * attend(core, inputs))


PAGES = [("bf16", (5,)), ("bf16", (1, 16, 64, 256)), ("e4m3", (1, 5, 16, 64, 256))]


@pytest.mark.parametrize(("kv_dtype", "sizes"), tiered(PAGES, PAGES[1:]))
def test_pages_in_any_order_and_of_any_size(kv_dtype: str, sizes: tuple[int, ...]) -> None:
    usual = Core(kv_dtype=kv_dtype)
    inputs = random_inputs(usual, 97)
    plain = attend(usual, inputs)
    for page_size in sizes:
        core = replace(usual, page_size=page_size)
        for page_seed in range(3):
            np.testing.assert_array_equal(attend(core, replace(inputs, page_seed=page_seed)), plain)


@pytest.mark.parametrize("sync", tiered(["flags", "barrier"], ["barrier"]))
def test_split_in_any_way(sync: str) -> None:
    """Close to float64 however the keys are cut; the cuts, and nothing else, decide the bits."""
    core = Core(blocks=8, sync=sync)
    inputs = random_inputs(core, 120)
    for chunk in (16, 32, 48, 64, 112, 128):
        plan = plan_for(core, [120], [1], chunk)
        assert error(core, inputs, plan) < ATTENTION_WEIGHTS, chunk
        for seed in range(3):
            np.testing.assert_array_equal(attend(core, inputs, dealt(plan, seed)), attend(core, inputs, plan))


def test_a_cut_between_the_newest_keys() -> None:
    """Chunk edges among the keys of the step: some blocks have a part of them, or nothing else."""
    core = SEVERAL["8 columns in tiles of 5"]
    for length in range(12, 24):
        inputs = random_inputs(core, length, columns=8)
        assert error(core, inputs, chunk=16) < ATTENTION_WEIGHTS, length


def test_a_merge_of_many_states() -> None:
    core = Core(blocks=16, head_dim=128)
    inputs = random_inputs(core, 500)
    assert error(core, inputs, chunk=16) < ATTENTION_WEIGHTS


def dealt(plan: KvPlan, seed: int) -> KvPlan:
    """The same items, dealt to the blocks at random: some get several, some none."""
    draw = np.random.default_rng(seed)
    owners = np.sort(draw.integers(0, plan.blocks, plan.item_count))
    items = plan.items[draw.permutation(plan.item_count)]
    starts = np.searchsorted(owners, np.arange(plan.blocks + 1)).astype(np.int32)
    return replace(plan, items=items, work_indptr=starts)


def test_a_block_with_all_the_items() -> None:
    core = Core(group=3, kv_heads=2, blocks=5)
    inputs = random_inputs(core, 60)
    plan = plan_for(core, [60], [1], 32)
    for owner in range(5):
        alone = replace(plan, work_indptr=np.array([0] * (owner + 1) + [plan.item_count] * (5 - owner), np.int32))
        np.testing.assert_array_equal(attend(core, inputs, alone), attend(core, inputs, plan))


def test_chunks_beyond_the_length_add_the_identity() -> None:
    """A plan for more keys than there are: the chunks that lie wholly beyond change no bit."""
    core = Core(blocks=8)
    for length in (17, 32, 33, 48):
        inputs = random_inputs(core, length)
        fitting = attend(core, inputs, plan_for(core, [48], [1], 16))
        for keys in (64, 96, 128):
            np.testing.assert_array_equal(attend(core, inputs, plan_for(core, [keys], [1], 16)), fitting)


def test_a_head_whose_first_chunk_alone_has_keys() -> None:
    core = Core(blocks=8)
    inputs = random_inputs(core, 5)
    assert error(core, inputs, plan_for(core, [128], [1], 16)) < ATTENTION_WEIGHTS


def test_grouped_heads_are_repeated_keys() -> None:
    grouped, repeated = Core(group=4), Core(group=1, kv_heads=4)
    inputs = random_inputs(grouped, 54)
    copied = replace(inputs, keys=np.repeat(inputs.keys, 4, axis=0), values=np.repeat(inputs.values, 4, axis=0))
    ours, theirs = attend(grouped, inputs, chunk=64), attend(repeated, copied)
    assert relative_error(ours, theirs) < ATTENTION_WEIGHTS


def test_a_column_alone_or_among_others() -> None:
    """The newest keys from the cache or from the exchange, one column at a time or all: close."""
    core = Core(tokens=8)
    inputs = random_inputs(core, 60, columns=8)
    together = attend(core, inputs)
    assert relative_error(attend(replace(core, has_newest=False), inputs), together) < ATTENTION_WEIGHTS
    for number in (0, 3, 7):
        end = 60 - 7 + number
        alone = replace(
            inputs,
            queries=inputs.queries[number : number + 1],
            keys=inputs.keys[:, :end],
            values=inputs.values[:, :end],
        )
        assert relative_error(attend(Core(), alone)[0], together[number]) < ATTENTION_WEIGHTS


def test_large_logits_stay_finite() -> None:
    core = Core(blocks=8)
    for scale in (30.0, 1000.0):
        inputs = random_inputs(core, 80, scale=scale)
        found = attend(core, inputs)
        assert np.isfinite(found).all()
        assert relative_error(found, inputs.output()) < ATTENTION_WEIGHTS


@pytest.mark.parametrize("sync", tiered(["flags", "barrier"], ["barrier"]))
def test_the_same_bits_under_every_schedule(sync: str) -> None:
    core = Core(group=3, kv_heads=2, blocks=5, sync=sync)
    inputs = random_inputs(core, 150)
    report = explore(lambda scheduler, seed: attend(core, inputs, None, scheduler, seed), range(10))
    assert report.ok, str(report)


@pytest.mark.parametrize("kv_dtype", tiered(["bf16", "e4m3"], ["bf16"]))
def test_several_columns_have_the_same_bits_under_every_schedule(kv_dtype: str) -> None:
    core = Core(tokens=8, batch=2, group=4, kv_heads=2, blocks=4, consumer_warps=4, kv_dtype=kv_dtype)
    batch = [random_inputs(core, 130, columns=4), random_inputs(core, 45, columns=3)]

    def run(scheduler: str, seed: int) -> np.ndarray:
        return np.concatenate([output for output, _ in attend_all(core, batch, None, scheduler, seed)])

    report = explore(run, range(4))
    assert report.ok, str(report)


def swapped(pair: Pair, at: Any) -> Pair:
    """Exchanges the halves of a vector and scales one by the dim: products of two such vectors tell every dim apart."""
    return pair[1] * 2.0, pair[0] * ch.cast(ty.f32, at.dim + 1) * 0.0625


TRANSFORMED = [(kv_dtype, head_dim) for kv_dtype in ("bf16", "e4m3") for head_dim in (64, 128)]
FUNCTORS = {
    "logits_transform": Variant("own scale", logits_transform=lambda x, at: x * (at.scale * LOG2_E) * LN_2),
    "logits_mask": Variant("own mask", logits_mask=lambda at: at.key <= at.position, causal=False),
    "value_transform": Variant("own values", value_transform=lambda value, at: value),
    "output_transform": Variant("own output", output_transform=lambda output, lse, at: (output, lse)),
}
FUNCTORS["all"] = Variant(
    "own everything",
    logits_transform=FUNCTORS["logits_transform"].logits_transform,
    logits_mask=FUNCTORS["logits_mask"].logits_mask,
    causal=False,
    value_transform=FUNCTORS["value_transform"].value_transform,
    output_transform=FUNCTORS["output_transform"].output_transform,
)


@pytest.mark.parametrize("name", tiered(FUNCTORS, [name for name in FUNCTORS if name != "all"]))
@pytest.mark.parametrize("kv_dtype", tiered(["bf16", "e4m3"], ["e4m3"]))
def test_functions_that_change_nothing(kv_dtype: str, name: str) -> None:
    core = Core(tokens=4, group=2, kv_dtype=kv_dtype, head_dim=128, blocks=5)
    inputs = random_inputs(core, 90, columns=4)
    assert relative_error(attend(core.with_variant(FUNCTORS[name]), inputs), inputs.output()) < ATTENTION_WEIGHTS


@pytest.mark.parametrize(("kv_dtype", "head_dim"), tiered(TRANSFORMED, TRANSFORMED[1:-1]))
def test_transformed_queries_and_keys(kv_dtype: str, head_dim: int) -> None:
    """The pairs of a vector, and their dims, are those that the functions are told."""
    core = Core(group=4, kv_dtype=kv_dtype, head_dim=head_dim)
    inputs = random_inputs(core, 40)
    inputs = replace(inputs, scales=np.ones_like(inputs.scales)) if kv_dtype == "bf16" else inputs
    found = attend(core.with_variant(Variant("swapped", query_transform=swapped, key_transform=swapped)), inputs)
    half = head_dim // 2
    factors = np.concatenate([np.full(half, 2.0), np.arange(1, half + 1) / 16])

    def swap(vectors: np.ndarray) -> np.ndarray:
        moved = np.concatenate([vectors[..., half:], vectors[..., :half]], axis=-1) * factors
        return widen(as_bf16(moved)).astype(np.float64)

    stored = widen(inputs.keys) if kv_dtype == "bf16" else inputs.keys.view(ml_dtypes.float8_e4m3fn)
    keys = swap(stored.astype(np.float64)) * inputs.scales[0][:, None, None]
    values, queries = exact(inputs.values, inputs.scales[1]), swap(widen(inputs.queries))
    logits = np.einsum("qhd,nd->qhn", queries, keys[0]) / np.sqrt(head_dim)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    wanted = weights @ values[0] / weights.sum(axis=-1, keepdims=True)
    assert relative_error(found, wanted) < ATTENTION_WEIGHTS


def test_without_softmax_states_are_added() -> None:
    variant = Variant("sums", logits_transform=lambda x, at: x * at.scale, softmax=False)
    for kv_dtype in ("bf16", "e4m3"):
        core = Core(tokens=2, group=2, kv_dtype=kv_dtype, blocks=8).with_variant(variant)
        inputs = random_inputs(core, 70, columns=2)
        keys, values = (
            exact(stored, scale) for stored, scale in zip((inputs.keys, inputs.values), inputs.scales, strict=True)
        )
        logits = np.einsum("qhd,nd->qhn", widen(inputs.queries).astype(np.float64), keys[0]) / np.sqrt(core.head_dim)
        logits[0, :, -1] = 0
        for chunk in (16, 80):
            assert relative_error(attend(core, inputs, chunk=chunk), logits @ values[0]) < ATTENTION_OUTPUT


@pytest.mark.parametrize("tokens", tiered([1, 8], [1]))
def test_no_race(tokens: int) -> None:
    core = Core(tokens=tokens, group=4, kv_heads=2, blocks=3, head_dim=128, sanitize=True)
    inputs = random_inputs(core, 50, columns=tokens)
    plain = attend(replace(core, sanitize=False), inputs)
    for seed, scheduler in enumerate(("round_robin", "random", "priority")):
        np.testing.assert_array_equal(attend(core, inputs, None, scheduler, seed), plain)


def test_the_plans_here_are_of_the_real_kind() -> None:
    plan = plan_for(Core(blocks=8), [120], [1], 16)
    assert plan.items.shape == (8, ITEM_WORDS) and plan.merge_count == 1 and plan.partials == 8
