"""Relations between results of the stand-alone attention that need no outside reference, and float64 beside them.

Each runs in the emulator with few blocks, and on a GPU (marked `gpu`) with all of them. Everything that can vary at run
time does, over few kernels: each takes the compiler some seconds. Larger numbers are in test_grids.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cheetah.blocks.attention import shipped_variants as shipped
from tests.attention import reference
from tests.attention.adapter import attend
from tests.attention.cases import (
    Case,
    Core,
    random_case,
    rounded,
    with_alibi,
    with_both,
    with_mask,
    with_sigmoid,
    with_sink,
    with_sliding_window,
    with_soft_cap,
    with_streaming,
)
from tests.attention.reference import State
from tests.attention.relations import (
    assert_close,
    assert_equal,
    assert_meaning,
    assert_same_bits,
    edges,
    joined,
    output_error,
    rows_of,
    with_needle,
)
from tests.attention.rotation import rope_rows
from tests.tolerances import ATTENTION_OUTPUT

pytestmark = [pytest.mark.usefixtures("target"), pytest.mark.slow]

MAIN = Core(shortest_chunk=16)
PAGED = [replace(MAIN, page_size=page_size) for page_size in (1, 5, 64, 256)]
UNGROUPED = Core(kv_heads=4, group=1, blocks=1, levels=1, shortest_chunk=16)
WIDE = Core(kv_heads=1, group=4, head_dim=128, blocks=16)
CODES = Core(kv_heads=1, group=8, page_size=5, blocks=16, kv_dtype="e4m3")
PLAIN = {"main": MAIN, "pages of 1": PAGED[0], "ungrouped": UNGROUPED, "wide": WIDE, "codes": CODES}
every_plain_core = pytest.mark.parametrize("core", PLAIN.values(), ids=PLAIN.keys())
WINDOW, RECENT, SINKS = 13, 60, 4
RAGGED = (54, 3, 199, 97)
NO_SINK = np.full(8, -np.inf)


def windowed(case: Case, sinks: np.ndarray = NO_SINK) -> Case:
    """A window of 13 and a sink a head, which -inf switches off."""
    sinks = sinks[: case.core.heads]
    return with_both(case, with_sliding_window(case, WINDOW), with_sink(case, sinks))


def masked(case: Case, masks: list[np.ndarray], slopes: np.ndarray | None = None) -> Case:
    """A mask of bits, and ALiBi, which slopes of 0 (the default) switch off."""
    slopes = np.zeros(case.core.heads) if slopes is None else slopes
    return with_both(case, with_mask(case, masks), with_alibi(case, slopes))


def causal_masks(case: Case) -> list[np.ndarray]:
    return [np.tri(len(q), k.shape[1], k.shape[1] - len(q), bool) for q, k in zip(case.queries, case.keys, strict=True)]


# -- against float64 ---------------------------------------------------------------------------------------------------


@every_plain_core
def test_decoding_lengths(core: Core) -> None:
    for lengths in ((1,), (3, 15), (16, 17, 54), (97, 1, 199, 33)):
        assert_meaning(random_case(core, lengths))


@every_plain_core
def test_several_queries_of_a_request(core: Core) -> None:
    for lengths, queries in (((8, 17), (8, 2)), ((54, 97, 1), (4, 1, 1))):
        rows = min(queries[0], 16 // core.group)
        assert_meaning(random_case(core, lengths, (rows, *queries[1:])))


@pytest.mark.parametrize("core", [MAIN, WIDE])
@pytest.mark.parametrize(("shared", "own"), [(1, (1, 17, 37)), (128, (17, 1, 5))])
def test_a_shared_prefix(core: Core, shared: int, own: tuple[int, ...]) -> None:
    """Of any length; two of three requests have it."""
    assert_meaning(random_case(core, own, prefix=(0, 2, shared)))
    assert_meaning(random_case(core, own, prefix=(0, 3, shared), chunk=32))


def test_scales_of_codes() -> None:
    """The keys' scale acts on logits, the values' on outputs."""
    case = random_case(CODES, (54, 17), key_scale=0.25, value_scale=3.0)
    assert_meaning(case)
    assert_meaning(replace(case, core=CODES, key_scale=2.0, value_scale=0.01))


def test_sliding_window_and_sink() -> None:
    for sinks in (NO_SINK, np.linspace(-3, 4, 8)):
        assert_meaning(windowed(random_case(MAIN, RAGGED), sinks))
        assert_meaning(windowed(random_case(MAIN, (17, 54), queries=(8, 3)), sinks))
    assert_meaning(windowed(random_case(MAIN, (5, 17), prefix=(0, 2, 20))))


def test_mask_and_alibi() -> None:
    for lengths, queries in (((54, 3, 97), 1), ((17, 54), 4)):
        case = random_case(MAIN, lengths, queries)
        draw = np.random.default_rng(len(lengths))
        masks = [draw.random((len(q), k.shape[1])) < 0.7 for q, k in zip(case.queries, case.keys, strict=True)]
        masks[1][:] = False  # a request that keeps nothing has the identity
        assert_meaning(masked(case, masks))
        assert_meaning(masked(case, masks, shipped.alibi_slopes(MAIN.heads)))
    prefixed = random_case(MAIN, (5, 17), prefix=(0, 2, 20))
    ones = [np.ones((1, 20 + own), bool) for own in (5, 17)]
    assert_meaning(masked(prefixed, ones, shipped.alibi_slopes(MAIN.heads)))


def test_soft_cap() -> None:
    core = Core(kv_heads=1, group=7, head_dim=128, page_size=64, blocks=1)
    for scale in (1.0, 40.0):
        assert_meaning(with_soft_cap(random_case(core, (54, 97), 2, scale=scale), 30.0))


def test_sigmoid() -> None:
    core = Core(kv_heads=2, group=3, page_size=5)
    for lengths, queries in (((54, 17, 199), 1), ((33, 3), 3), ((0, 16), 1)):
        assert_meaning(with_sigmoid(random_case(core, lengths, queries)))
    assert_meaning(with_sigmoid(random_case(core, (5, 17), prefix=(0, 2, 20))))


def streaming(case: Case) -> Case:
    return with_streaming(case, SINKS, RECENT, rope_rows(SINKS + RECENT, case.core.head_dim))


def test_streaming_llm() -> None:
    assert_meaning(streaming(random_case(MAIN, (54, 64, 65, 199))))
    assert_meaning(streaming(random_case(MAIN, (1, 63, 80), seed=1)))


# -- equal bits --------------------------------------------------------------------------------------------------------


@every_plain_core
def test_pages_in_any_order(core: Core) -> None:
    """A contiguous cache is the table of pages in order."""
    case = random_case(core, (54, 97), 2, page_seed=None)
    assert_same_bits([case, *(replace(case, page_seed=seed) for seed in range(3))])


def test_pages_of_any_size() -> None:
    for lengths, queries, prefix in ((RAGGED, 1, None), ((17, 54), 3, None), ((17, 5, 3), 1, (0, 2, 37))):
        case = random_case(MAIN, lengths, queries, prefix=prefix)
        assert_same_bits([case, *(replace(case, core=core) for core in PAGED)])


@every_plain_core
def test_what_lies_in_unused_slots_and_pages(core: Core) -> None:
    """Zeros, ones or NaN."""
    case = random_case(core, (37, 1), 2)
    assert_same_bits([case, replace(case, leftover=0x00), replace(case, leftover=0x3F), replace(case, leftover=0x7F)])


@every_plain_core
def test_which_block_does_what(core: Core) -> None:
    """Whatever the scheduler's costs, and dealt at random; and once more as it was."""
    case = random_case(core, RAGGED[:3], chunk=32)
    dealt = [replace(case, deal=seed) for seed in range(3)]
    assert_same_bits([case, replace(case, costs=(1, 7)), replace(case, costs=(128, 1)), *dealt, case])


def test_requests_in_another_order() -> None:
    case = random_case(MAIN, RAGGED, (1, 2, 3, 1))
    plain = attend(case)
    for order in ((3, 2, 1, 0), (1, 3, 0, 2)):
        found = attend(case.reordered(order))
        assert_equal(found, joined(rows_of(plain, case, request) for request in order), order)


def test_a_batch_and_its_requests_alone() -> None:
    """With a fixed chunk length the bits do not depend on company; without, the numbers do not."""
    for prefix in (None, (0, 2, 37)):
        case = random_case(MAIN, RAGGED, (1, 2, 3, 1), prefix=prefix, chunk=48)
        assert_equal(attend(case), joined(attend(case.single(request)) for request in range(4)), prefix)
        free = replace(case, chunk=None)
        assert_close(attend(free), joined(attend(free.single(request)) for request in range(4)), prefix, factor=2)


def test_the_identity_in_a_merge() -> None:
    """A level that has no keys adds the identity to every row."""
    for chunk in (48, 512):
        case = random_case(MAIN, (54, 3, 97), 2, chunk=chunk)
        assert_same_bits([case, replace(case, empty_level=True)])


@every_plain_core
def test_twice_the_values_twice_the_output(core: Core) -> None:
    case = random_case(core, (97, 17))
    case = case.with_values(lambda values: np.clip(values, -200, 200))
    plain, doubled = attend(case), attend(case.with_values(lambda values: values * 2))
    assert_equal(doubled, State(plain.output * 2, plain.lse))


def test_a_mask_of_ones_and_slopes_of_zero() -> None:
    case = random_case(MAIN, (54, 3, 97))
    assert_same_bits([case, masked(case, [np.ones((1, keys.shape[1]), bool) for keys in case.keys])])


def test_a_window_over_everything_and_no_sink() -> None:
    """Up to 14 keys a window of 13 shows all, and a sink of -inf takes nothing."""
    case = random_case(MAIN, (1, 3, 13, 14), (1, 2, 4, 3))
    assert_same_bits([case, windowed(case)])


def test_masked_keys_have_no_effect() -> None:
    """Nor do keys beyond a query's own position, or left of a window."""
    case = random_case(MAIN, (54, 97))
    keep = [np.random.default_rng(0).random((1, keys.shape[1])) < 0.5 for keys in case.keys]
    other = random_case(MAIN, (54, 97), seed=9)
    pairs = list(zip(case.keys, other.keys, keep, strict=True))
    changed = replace(case, keys=tuple(np.where(mask[0][:, None], a, 100 * b) for a, b, mask in pairs))
    assert_same_bits([masked(case, keep), masked(changed, keep)])
    beyond = replace(case, keys=tuple(np.concatenate([100 * b[:, :-14], a[:, -14:]], 1) for a, b, _ in pairs))
    assert_same_bits([windowed(case), windowed(beyond)])


# -- close -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", [MAIN, CODES])
def test_any_split(core: Core) -> None:
    case = random_case(core, (120, 199))
    for chunk in (16, 32, 48, 64, 112, 208):
        assert_meaning(replace(case, chunk=chunk))


@pytest.mark.parametrize("core", [MAIN, CODES])
def test_partial_states_in_any_order(core: Core) -> None:
    case = random_case(core, (199, 97), 2, chunk=16)
    plain = attend(case)
    for seed in range(3):
        assert_close(attend(replace(case, fold=seed)), plain, seed, factor=2)


def test_two_levels_and_one() -> None:
    case = random_case(MAIN, (17, 37, 1), prefix=(0, 3, 50))
    (prefix,) = case.prefixes
    keys = tuple(np.concatenate([prefix.keys, own], axis=1) for own in case.keys)
    values = tuple(np.concatenate([prefix.values, own], axis=1) for own in case.values)
    assert_close(attend(case), attend(replace(case, keys=keys, values=values, prefixes=())), factor=2)


def test_causal_as_a_mask() -> None:
    case = random_case(MAIN, (54, 8, 17), (3, 8, 4))
    assert_close(attend(masked(case, causal_masks(case))), attend(case), factor=2)


@pytest.mark.parametrize("core", [MAIN, WIDE])
def test_decoding_is_a_row_of_a_prefill(core: Core) -> None:
    case = random_case(core, (54,), 4)
    prefill = attend(case)
    for row in range(4):
        seen = slice(0, 51 + row)
        (queries,), (keys,), (values,) = case.queries, case.keys, case.values
        one = replace(case, queries=(queries[row : row + 1],), keys=(keys[:, seen],), values=(values[:, seen],))
        assert_close(attend(one), State(prefill.output[row : row + 1], prefill.lse[row : row + 1]), row, factor=2)


def test_grouped_heads_are_repeated_keys() -> None:
    case = random_case(MAIN, (54, 17), 2)
    keys, values = (tuple(np.repeat(part, 2, axis=0) for part in parts) for parts in (case.keys, case.values))
    assert_close(attend(replace(case, core=UNGROUPED, keys=keys, values=values)), attend(case), factor=2)


def test_a_window_is_the_last_keys() -> None:
    case = random_case(MAIN, RAGGED)
    last = [
        (keys[:, -WINDOW - 1 :], values[:, -WINDOW - 1 :]) for keys, values in zip(case.keys, case.values, strict=True)
    ]
    short = replace(case, keys=tuple(keys for keys, _ in last), values=tuple(values for _, values in last))
    assert_close(attend(windowed(case)), attend(short), factor=2)


def test_streaming_that_evicts_nothing_is_rope() -> None:
    case = random_case(MAIN, (1, 17, 64))
    table = rope_rows(SINKS + RECENT, MAIN.head_dim)
    queries = tuple(
        turned(q.swapaxes(0, 1), table[[k.shape[1] - 1]]).swapaxes(0, 1)
        for q, k in zip(case.queries, case.keys, strict=True)
    )
    keys = tuple(turned(part, table[: part.shape[1]]) for part in case.keys)
    assert_close(attend(streaming(case)), attend(replace(case, queries=queries, keys=keys)), factor=2)


def turned(vectors: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """vectors [heads, n, D], rotated by the table's rows and rounded, as keys are cached."""
    return rounded(np.stack([reference.rotated(head.astype(np.float64), rows) for head in vectors]))


def test_a_sink_is_a_key_without_value() -> None:
    """Its logit is a_h: the key is a_h * sqrt(D) / |q|^2 times the query, which only ungrouped heads can have."""
    short = random_case(MAIN, (9,))
    (queries,), (keys,), (values,) = short.queries, short.keys, short.values
    queries = np.repeat(queries[:, ::2], 2, axis=1)  # both heads of a group ask the same
    norms = (queries[0, ::2].astype(np.float64) ** 2).sum(axis=1)
    wanted = np.array([1.5, -2.0])
    extra = rounded(queries[0, ::2] * (wanted * np.sqrt(MAIN.head_dim) / norms)[:, None])[:, None]
    sinks = (extra[:, 0].astype(np.float64) * queries[0, ::2]).sum(axis=1) / np.sqrt(MAIN.head_dim)
    longer = replace(
        short,
        queries=(queries,),
        keys=(np.concatenate([extra, keys], axis=1),),
        values=(np.concatenate([0 * extra, values], axis=1),),
    )
    with_key = attend(longer)
    assert_close(attend(windowed(replace(short, queries=(queries,)), np.repeat(sinks, 2))), with_key, factor=2)


def test_alibi_from_another_origin() -> None:
    """Masked keys at the end move the query's position: the same output, and the LSE moves by slope * distance."""
    slopes, moved = shipped.alibi_slopes(MAIN.heads), 7
    case = random_case(MAIN, (54,))
    longer = random_case(MAIN, (54 + moved,), seed=3)
    keys, values = (
        np.concatenate([a[0], b[0][:, 54:]], axis=1)
        for a, b in ((case.keys, longer.keys), (case.values, longer.values))
    )
    mask = np.arange(54 + moved)[None] < 54
    near = attend(masked(case, [np.ones((1, 54), bool)], slopes))
    far = attend(masked(replace(case, keys=(keys,), values=(values,)), [mask], slopes))
    assert_close(far, State(near.output, near.lse - slopes * moved), factor=2)


@every_plain_core
def test_constant_values_come_back(core: Core) -> None:
    case = random_case(core, (1, 16, 50, 97))
    constant = random_case(core, (1,), seed=5).values[0][0, 0]
    found = attend(case.with_values(lambda values: np.broadcast_to(constant, values.shape))).output
    assert output_error(found, np.broadcast_to(constant, found.shape)) < ATTENTION_OUTPUT


@every_plain_core
def test_equal_logits(core: Core) -> None:
    """n keys of the same logit s: LSE = s + ln n."""
    lengths = (1, 15, 97, 130)
    case = random_case(core, lengths)
    same = replace(case, keys=tuple(np.repeat(keys[:, :1], keys.shape[1], axis=1) for keys in case.keys))
    one = replace(same, keys=tuple(keys[:, :1] for keys in same.keys), values=tuple(v[:, :1] for v in same.values))
    logits = one.expected().lse
    np.testing.assert_allclose(attend(same).lse, logits + np.log(lengths)[:, None], rtol=1e-5, atol=1e-5)


# -- the needle --------------------------------------------------------------------------------------------------------


def assert_found(case: Case, request: int, place: int) -> None:
    """The last query's first heads give the value at the needle's place."""
    found = rows_of(attend(with_needle(case, request, place)), case, request).output[-1, :: case.core.group]
    assert output_error(found, case.values[request][:, place].astype(np.float64)) < ATTENTION_OUTPUT, place


@pytest.mark.parametrize("core", [MAIN, PAGED[1], WIDE])
def test_needle_at_every_edge(core: Core) -> None:
    """Of pages, tiles of 16 keys and chunks of 48."""
    case = random_case(core, (100, 33), (2, 1), chunk=48)
    for place in edges(100, (core.page_size, 16, 48)):
        assert_found(case, 0, place)


def test_needle_at_the_edges_of_a_window() -> None:
    case = random_case(MAIN, (100,))
    for place in (86, 87, 95, 96, 99):  # 86 = 99 - 13 is the window's first
        assert_found(windowed(case), 0, place)
    without = attend(windowed(replace(case, keys=(case.keys[0] * np.float32(0.01),))))
    for place in (0, 84, 85):
        hidden = attend(windowed(with_needle(case, 0, place)))
        assert_close(hidden, State(without.output, without.lse), place, factor=2)


def test_needle_at_the_edges_of_what_streaming_keeps() -> None:
    """Where it is kept it weighs: the output is its value. Needles are rotated back so that they point at the query."""
    case = random_case(MAIN, (150,))
    table = rope_rows(SINKS + RECENT, MAIN.head_dim)
    for place, cached in ((0, 0), (3, 3), (90, 4), (96, 10), (149, 63)):
        backwards = table[[RECENT + SINKS - 1 - cached]] * np.array([1, 1])
        query = reference.rotated(case.queries[0][0, :: MAIN.group].astype(np.float64), backwards)
        keys = case.keys[0] * np.float32(0.01)
        norms = (query**2).sum(axis=1, keepdims=True)
        keys[:, place] = query * (60 * np.sqrt(MAIN.head_dim) / norms)
        found = attend(streaming(replace(case, keys=(rounded(keys),)))).output[0, :: MAIN.group]
        assert output_error(found, case.values[0][:, place].astype(np.float64)) < ATTENTION_OUTPUT, place


# -- what must stay finite ---------------------------------------------------------------------------------------------


@every_plain_core
def test_requests_without_keys(core: Core) -> None:
    """All of them, and one among others: the identity."""
    for lengths in ((0, 0), (54, 0, 17)):
        found = assert_meaning(random_case(core, lengths))
        assert (found.output[lengths.index(0)] == 0).all()
        assert np.isneginf(found.lse[lengths.index(0)]).all()


@pytest.mark.parametrize("core", [MAIN, WIDE])
def test_huge_logits(core: Core) -> None:
    for scale in (30.0, 1000.0):
        assert_meaning(random_case(core, (80, 17), scale=scale))


def drawn_cases() -> Iterator[Case]:
    draw = np.random.default_rng(20)
    for seed in range(12):
        core = [MAIN, *PAGED, WIDE][draw.integers(6)]
        lengths = draw.integers(1, 150, draw.integers(1, 5)).tolist()
        queries = draw.integers(1, 16 // core.group + 1, len(lengths)).tolist()
        prefix = (0, int(draw.integers(1, len(lengths) + 1)), int(draw.integers(1, 100))) if seed % 3 == 0 else None
        yield random_case(core, lengths, queries, seed, prefix=prefix, chunk=[None, 32, 128][draw.integers(3)])


def test_drawn_at_random() -> None:
    for case in drawn_cases():
        assert_meaning(case)


@pytest.mark.parametrize("kv_dtype", ["bf16", "e4m3"])
def test_heads_of_256_dims(kv_dtype: str) -> None:
    """One column tile a warp, rows merged in halves: of few rows, and of several tiles of them."""
    core = Core(group=3, head_dim=256, page_size=5, kv_dtype=kv_dtype, max_keys=2000, batch=3)
    assert_meaning(random_case(core, [54, 199, 1], 1, seed=7))
    assert_meaning(random_case(core, [512, 17, 97], 4, seed=8))
