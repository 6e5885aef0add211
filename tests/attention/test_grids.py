"""The stand-alone attention on a GPU against float64, over the sizes that it must serve, drawn with fixed seeds.

A kernel takes NVRTC about a second, so that there are few of them, of which every value of a static choice is in some,
and many calls of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from cheetah.blocks.attention import shipped_variants as shipped
from tests.attention.adapter import attend
from tests.attention.cases import (
    Case,
    Core,
    random_case,
    with_alibi,
    with_mask,
    with_sigmoid,
    with_sink,
    with_sliding_window,
    with_soft_cap,
    with_streaming,
)
from tests.attention.conftest import GPU_AS_ASKED
from tests.attention.relations import assert_meaning, assert_same_bits
from tests.attention.rotation import rope_rows

pytestmark = [pytest.mark.usefixtures("target"), pytest.mark.parametrize("target", [GPU_AS_ASKED], indirect=True)]

BATCHES = (1, 2, 3, 4, 8)
LENGTHS = (1, 3, 15, 16, 17, 54, 97, 199, 512, 1177, 2048, 8191, 16384, 33001)
QUERIES = (1, 2, 4, 8)
PAGES = (1, 5, 16, 64, 256)
GROUPS = (1, 2, 3, 4, 7, 8)
HEAD_DIMS = (64, 128, 256)
KV_DTYPES = ("bf16", "e4m3")
PREFIXES = (1, 128, 512, 2048)
SUFFIXES = (0, 1, 17, 37)
WINDOWS = (0, 3, 13, 37, 533)
CAPS = (1.0, 30.0, 50.0)
BLOCKS = (1, 4, 16, 132)
MAX_ROWS = 32
"""Most query rows of a KV head in one call here; l_q is lowered to fit."""
MAX_KEYS = 33_001 + 2048


def cores() -> Iterator[Core]:
    """Every value of every static choice, in ever new company."""
    for number in range(len(HEAD_DIMS) * len(GROUPS)):
        turn = number + number // len(GROUPS)
        yield Core(
            kv_heads=1 + number % 2,
            group=GROUPS[number % len(GROUPS)],
            head_dim=HEAD_DIMS[turn % len(HEAD_DIMS)],
            page_size=PAGES[number % len(PAGES)],
            blocks=BLOCKS[turn % len(BLOCKS)],
            kv_dtype=KV_DTYPES[turn // 3 % 3 == 1],
            max_keys=MAX_KEYS,
            batch=8,
        )


CORES = list(cores())
every_core = pytest.mark.parametrize(
    "core", CORES, ids=lambda core: f"D{core.head_dim}-g{core.group}-page{core.page_size}"
)


def lengths_of(draw: np.random.Generator, batch: int) -> list[int]:
    """Equal, one long one among short ones, or anything."""
    kind = draw.integers(3)
    if kind == 0:
        return [int(draw.choice(LENGTHS[:-2]))] * batch
    if kind == 1:
        lengths = draw.choice(LENGTHS[:8], batch).tolist()
        lengths[draw.integers(batch)] = int(draw.choice(LENGTHS[8:]))
        return lengths
    return draw.integers(1, 11_000, batch).tolist()


def drawn(core: Core, count: int, seed: int, batches: tuple[int, ...] = BATCHES) -> Iterator[Case]:
    draw = np.random.default_rng(seed)
    for number in range(count):
        lengths = lengths_of(draw, int(draw.choice(batches)))
        queries = int(min(draw.choice(QUERIES), MAX_ROWS // core.group))
        yield random_case(core, lengths, queries, number)


def test_every_value_is_among_the_cores() -> None:
    for name, values in (("head_dim", HEAD_DIMS), ("group", GROUPS), ("page_size", PAGES), ("blocks", BLOCKS)):
        assert {getattr(core, name) for core in CORES} == set(values)
    pairs = {(core.group, core.head_dim) for core in CORES}
    assert len(pairs) == len(GROUPS) * len(HEAD_DIMS)
    for head_dim in HEAD_DIMS:
        assert {core.kv_dtype for core in CORES if core.head_dim == head_dim} == set(KV_DTYPES)


@every_core
def test_lengths(core: Core) -> None:
    for length in LENGTHS:
        assert_meaning(random_case(core, [length], seed=length))
    for case in drawn(core, 4, seed=core.group):
        assert_meaning(case)


@every_core
def test_shared_prefixes(core: Core) -> None:
    draw = np.random.default_rng(core.page_size)
    for shared in PREFIXES:
        own = draw.choice(SUFFIXES, draw.integers(2, 9)).tolist()
        if max(own) == 0:
            own[0] = 1
        assert_meaning(random_case(core, own, 1, prefix=(0, len(own), shared)))


VARIANTS: dict[str, Callable[[Case, np.random.Generator], Case]] = {
    **{f"window {window}": lambda case, draw, window=window: with_sliding_window(case, window) for window in WINDOWS},
    **{f"cap {cap}": lambda case, draw, cap=cap: with_soft_cap(case, cap) for cap in CAPS},
    "sigmoid": lambda case, draw: with_sigmoid(case, None, -1.0),
    "mask": lambda case, draw: with_mask(case, masks_of(case, draw)),
    "alibi": lambda case, draw: with_alibi(case),
    "sink": lambda case, draw: with_sink(case, draw.normal(0, 3, case.core.heads)),
    "streaming": lambda case, draw: with_streaming(case, 4, 500, rope_rows(504, case.core.head_dim)),
}


def masks_of(case: Case, draw: np.random.Generator) -> list[np.ndarray]:
    return [draw.random((len(q), k.shape[1])) < 0.6 for q, k in zip(case.queries, case.keys, strict=True)]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    number = list(VARIANTS).index(name)
    core = replace(CORES[number % len(CORES)], kv_dtype="bf16", blocks=132)
    queries = 1 if name == "streaming" else min(4, MAX_ROWS // core.group)
    draw = np.random.default_rng(number)
    for lengths in ((1, 3, 54), (533, 534, 535), (2048,), (199, 8191, 17)):
        case = random_case(core, lengths, queries)
        assert_meaning(VARIANTS[name](case, draw))


def test_alibi_of_any_number_of_heads() -> None:
    for heads in (1, 2, 3, 12, 40):
        core = Core(heads, 1, max_keys=MAX_KEYS, blocks=132)
        assert_meaning(with_alibi(random_case(core, (1177,)), shipped.alibi_slopes(heads)))


def test_a_thousand_times_the_same_bits() -> None:
    case = random_case(replace(CORES[0], blocks=132), (8191, 17, 1177), 2)
    assert_same_bits([case, *[case] * 20])
    plain = attend(case)
    assert attend(case, again=1000).output.tobytes() == plain.output.tobytes()
