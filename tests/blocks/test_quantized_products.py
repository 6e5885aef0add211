"""Products with quantised weights: packed and unpacked again, and against float64 of the dequantised weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from cheetah.emulator import allocate, explore
from cheetah.models.formats import PackingError, pack_matrix, unpack_matrix
from cheetah.models.formats.quantized import QuantizedRows, scheme_of_name
from cheetah.models.rounding import widen
from cheetah.plan import GPUS, VECTOR_COLUMNS, MatrixLayout, Plan, PlanError
from cheetah.plan.formats import DIGITS, HALVES, QUANTIZED_FORMATS, STAGGERED, tile_format
from cheetah.plan.index import round_up
from tests.blocks.small_kernel import SmallKernel, filled
from tests.blocks.test_matvec import in_fragment_order, product
from tests.program.quantized_weights import drawn_rows
from tests.program.rig import as_bf16, model, relative_error
from tests.tiers import tiered
from tests.tolerances import MATVEC, MATVEC_WITH_OUTLIERS

ALWAYS = ("int4", "int4-g128-asym", "int4-g32-asym", "int8", "int8-g64-asym", "fp8", "fp8-block128", "mxfp4", "nvfp4")
"""Of each kind of format there is one that `make test` looks at."""

# rows, columns, blocks, then fields of the plan: the odd sizes are those that no K-tile and no group divides
SMALL: tuple[int, int, int, dict[str, Any]] = (50, 1000, 3, {"tokens": 2, "down_slices": 2})
BY_DIGITS: tuple[int, int, int, dict[str, Any]] = (50, 1280, 3, {"down_slices": 2})
BY_DIGITS_OF_TWO: tuple[int, int, int, dict[str, Any]] = (50, 1280, 3, {"tokens": 2, "down_slices": 2})
OTHERS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "one element": (1, 1, 1, {}),
    "part of a group, an M-tile and a row": (17, 33, 2, {}),
    "one K-tile more than a chunk": (33, 1100, 2, {"consumer_warps": 8}),
    "eight tokens": (33, 400, 3, {"tokens": 8, "consumer_warps": 4}),
    "sixteen tokens": (33, 260, 2, {"tokens": 16}),
}


def rows_of(name: str, rows: int, columns: int, scales: str = "f16") -> QuantizedRows:
    return drawn_rows(scheme_of_name(name, scales), rows, columns, np.random.default_rng(rows + columns))


@pytest.mark.parametrize("scales", ["f16", "bf16"])
@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
def test_unpacking_gives_what_was_packed(name: str, scales: str) -> None:
    tiles = tile_format(name)
    for rows, columns, blocks in ((16, 128, 1), (50, 200, 3), (7, 33, 2), (40, 1000, 2)):
        layout = MatrixLayout("w", rows, columns, blocks, 4 * tiles.tile_bytes, format=tiles)
        matrix = rows_of(name, rows, columns, scales)
        packed = pack_matrix(layout, matrix)
        assert packed.size == layout.total_bytes
        found = unpack_matrix(layout, packed)
        np.testing.assert_array_equal(found.codes, matrix.codes)
        np.testing.assert_array_equal(found.dequantized(), matrix.dequantized())


@cache
def compiled(case: tuple[Any, ...], name: str) -> tuple[SmallKernel, MatrixLayout]:
    rows, columns, blocks, fields = case
    return product(rows, columns, blocks, dict(fields), name)


def launched(
    kernel: SmallKernel,
    layout: MatrixLayout,
    packed: Any,
    x: np.ndarray,
    scheduler: str = "round_robin",
    seed: int = 0,
    used: int | None = None,
) -> np.ndarray:
    """The product of bf16 bits x [tokens, columns]; used: of so many tokens, if not of all."""
    padded = np.zeros((len(x), round_up(layout.columns, VECTOR_COLUMNS)), np.uint16)
    padded[:, : layout.columns] = x
    y = allocate((len(x), layout.rows), np.float32)
    arguments = {"weights": packed, "x": filled(in_fragment_order(padded)), "y": y, "column_count": used or len(x)}
    kernel.launch(arguments, scheduler, seed)
    return y


def error_of_product(case: tuple[Any, ...], name: str, scales: str = "f16", outlier: float = 0.0) -> float:
    kernel, layout = compiled((*case[:3], tuple(case[3].items())), name)
    matrix = rows_of(name, layout.rows, layout.columns, scales)
    values = np.random.default_rng(1).standard_normal((kernel.plan.tokens, layout.columns))
    if outlier:
        values[:, 3], values[:, layout.columns // 2] = outlier, -0.3 * outlier
    x = as_bf16(values)
    found = launched(kernel, layout, filled(pack_matrix(layout, matrix)), x)
    return relative_error(found, widen(x).astype(np.float64) @ matrix.dequantized().astype(np.float64).T)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", tiered(QUANTIZED_FORMATS, [name for name in QUANTIZED_FORMATS if name not in ALWAYS]))
def test_product_against_float64(name: str) -> None:
    assert error_of_product(SMALL, name) < MATVEC
    assert error_of_product(SMALL, name, "bf16") < MATVEC
    assert error_of_product(SMALL, name, outlier=1000.0) < MATVEC_WITH_OUTLIERS


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", tiered(["int4", "int4-g128-asym", "int4-g64", "int4-g32-asym"], ["int4-g64", "int4"]))
def test_product_by_digits_against_float64(name: str) -> None:
    _, layout = compiled((*BY_DIGITS[:3], tuple(BY_DIGITS[3].items())), name)
    assert [layout.vector_kind(tokens) for tokens in (1, 2, 4, 8)] == [DIGITS, DIGITS, STAGGERED, STAGGERED]
    for case in (BY_DIGITS, BY_DIGITS_OF_TWO):
        assert error_of_product(case, name) < MATVEC
        assert error_of_product(case, name, outlier=1000.0) < MATVEC_WITH_OUTLIERS


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("tokens", "slices"), tiered([(1, 1), (8, 3)], [(1, 1)]))
@pytest.mark.parametrize("name", tiered(["int4-g128-asym", "fp8-block128"], ["fp8-block128"]))
def test_a_product_as_long_as_the_longest_of_70b(name: str, tokens: int, slices: int) -> None:
    case = (20, 28672, 2, {"tokens": tokens, "down_slices": slices, "consumer_warps": 8})
    assert error_of_product(case, name) < MATVEC
    assert error_of_product(case, name, outlier=1000.0) < MATVEC_WITH_OUTLIERS


@pytest.mark.compiler
def test_digits_of_two_tokens_know_nothing_of_each_other() -> None:
    """Not of how large the other is, nor whether it is in use."""
    kernel, layout = compiled((*BY_DIGITS_OF_TWO[:3], tuple(BY_DIGITS_OF_TWO[3].items())), "int4-g128-asym")
    packed = filled(pack_matrix(layout, rows_of("int4-g128-asym", layout.rows, layout.columns)))
    values = np.random.default_rng(1).standard_normal((2, layout.columns))
    both = launched(kernel, layout, packed, as_bf16(values))
    larger = launched(kernel, layout, packed, as_bf16(values * [[1.0], [2.0**40]]))
    np.testing.assert_array_equal(larger[0], both[0])
    np.testing.assert_array_equal(larger[1], both[1] * np.float32(2.0**40))
    np.testing.assert_array_equal(launched(kernel, layout, packed, as_bf16(values), used=1)[0], both[0])


@pytest.mark.compiler
def test_digits_of_elements_of_every_size() -> None:
    """Zeros, the smallest and the largest numbers, the largest in any column of a unit; what is no number leaves
    none."""
    kernel, layout = compiled((*BY_DIGITS[:3], tuple(BY_DIGITS[3].items())), "int4-g128-asym")
    matrix = rows_of("int4-g128-asym", layout.rows, layout.columns)
    packed = filled(pack_matrix(layout, matrix))
    values = np.random.default_rng(1).standard_normal((1, layout.columns))
    of_sizes = [(values * size, MATVEC) for size in (0.0, 2.0**-60, 2.0**100)]
    places = (np.arange(layout.columns) == place for place in range(704, 712))
    of_places = [(np.where(at, 1000.0, values), MATVEC_WITH_OUTLIERS) for at in places]
    for elements, bound in of_sizes + of_places:
        x = as_bf16(elements)
        wanted = widen(x).astype(np.float64) @ matrix.dequantized().astype(np.float64).T
        np.testing.assert_allclose(launched(kernel, layout, packed, x), wanted, rtol=0, atol=bound * abs(wanted).max())
    for value in (np.nan, np.inf):
        values[0, 700] = value
        assert np.isnan(launched(kernel, layout, packed, as_bf16(values))).all()


UNEVEN = [(name, case) for name in ("fp8", "int4-g128-asym", "mxfp4", "nvfp4") for case in OTHERS]
UNEVEN_ALWAYS = (
    *(("mxfp4", "one element"), ("int4-g128-asym", "part of a group, an M-tile and a row")),
    *(("fp8", "one K-tile more than a chunk"), ("int4-g128-asym", "eight tokens"), ("mxfp4", "sixteen tokens")),
    ("nvfp4", "part of a group, an M-tile and a row"),
)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("name", "case"), tiered(UNEVEN, [one for one in UNEVEN if one not in UNEVEN_ALWAYS]))
def test_sizes_that_do_not_divide(name: str, case: str) -> None:
    assert error_of_product(OTHERS[case], name) < MATVEC


@pytest.mark.slow
@pytest.mark.compiler
def test_columns_in_use_know_nothing_of_the_others() -> None:
    rows, columns, blocks, fields = OTHERS["eight tokens"]
    kernel, layout = compiled((rows, columns, blocks, tuple(fields.items())), "int4-g128-asym")
    packed = filled(pack_matrix(layout, rows_of("int4-g128-asym", rows, columns)))
    x = as_bf16(np.random.default_rng(1).standard_normal((8, columns)))
    fewer = launched(kernel, layout, packed, x, used=3)
    np.testing.assert_array_equal(fewer[:3], launched(kernel, layout, packed, x)[:3])


PUBLISHED: list[tuple[str, tuple[int, int, int, dict[str, Any]]]] = [
    ("int4-g64-asym", (17, 11008, 2, {"consumer_warps": 8, "down_slices": 3})),
    ("int4", (17, 11008, 2, {"consumer_warps": 8, "tokens": 8, "down_slices": 4})),
    ("int4-g128", (17, 5120, 2, {"consumer_warps": 8, "tokens": 4})),
    ("int8-g32-asym", (17, 3072, 2, {"consumer_warps": 8})),
]
"""Columns of published models: 86, 40 and 24 K-tiles, of which 8 warps leave some over in a chunk or a slice."""


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "case"),
    tiered(PUBLISHED, PUBLISHED[1:-1]),
    ids=[f"{case[1]} {name}" for name, case in PUBLISHED],
)
def test_columns_of_published_models(name: str, case: tuple[int, int, int, dict[str, Any]]) -> None:
    assert error_of_product(case, name) < MATVEC


HALF_CASES = [("fp8", 1), ("fp8-block128", 1), ("fp8-block128", 2)]


@pytest.mark.compiler
@pytest.mark.parametrize(("name", "tokens"), tiered(HALF_CASES, HALF_CASES[1:-1]))
@pytest.mark.slow
def test_product_by_f16_against_float64(name: str, tokens: int) -> None:
    case: tuple[int, int, int, dict[str, Any]] = (33, 1280, 3, {"tokens": tokens, "down_slices": 2})
    kernel, layout = compiled((*case[:3], tuple(case[3].items())), name)
    assert layout.vector_kind(tokens) == HALVES
    assert error_of_product(case, name) < MATVEC
    matrix = rows_of(name, layout.rows, layout.columns)
    packed = filled(pack_matrix(layout, matrix))
    # Each part of 32 columns has a size of its own; f16 alone would hold none of them.
    sizes = np.exp2(np.arange(layout.columns) // 32 % 7 * 5 + 30.0)
    x = as_bf16(np.random.default_rng(1).standard_normal((tokens, layout.columns)) * sizes)
    wanted = widen(x).astype(np.float64) @ matrix.dequantized().astype(np.float64).T
    assert relative_error(launched(kernel, layout, packed, x), wanted) < MATVEC
    if tokens > 1:  # columns that are not in use change none that are
        fewer = launched(kernel, layout, packed, x, used=tokens - 1)
        np.testing.assert_array_equal(fewer[:-1], launched(kernel, layout, packed, x)[:-1])


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "case"),
    [("fp8-block128", SMALL), ("int4-g128-asym", SMALL), ("int8", SMALL), ("int4-g128-asym", BY_DIGITS)],
)
def test_no_schedule_changes_a_bit(name: str, case: tuple[int, int, int, dict[str, Any]]) -> None:
    kernel, layout = compiled((*case[:3], tuple(case[3].items())), name)
    packed = filled(pack_matrix(layout, rows_of(name, layout.rows, layout.columns)))
    x = as_bf16(np.random.default_rng(2).standard_normal((kernel.plan.tokens, layout.columns)))
    report = explore(lambda scheduler, seed: launched(kernel, layout, packed, x, scheduler, seed), range(3))
    assert report.ok, str(report)


def test_rows_of_another_format_are_refused() -> None:
    tiles = tile_format("int4-g128")
    layout = MatrixLayout("w", 16, 256, 1, tiles.tile_bytes, format=tiles)
    for name, why in (("int8-g128", "rows of int8"), ("int4-g64", "groups of 64 columns: give int4 with groups of 128"),
                      ("int4-g128-asym", "give rows with no zero points")):  # fmt: skip
        with pytest.raises(PackingError, match=why):
            pack_matrix(layout, rows_of(name, 16, 256))


def test_scales_that_would_be_rounded_are_refused() -> None:
    tiles = tile_format("int4-g128")
    layout = MatrixLayout("w", 16, 256, 1, tiles.tile_bytes, format=tiles)
    with pytest.raises(PackingError, match="is no f16 number times a power of two .* round the scales to f16 or bf16"):
        pack_matrix(layout, rows_of("int4-g128", 16, 256, "f32"))


def test_a_stage_too_small_for_a_format_is_refused() -> None:
    shape = model(weight_formats=(("o", "int4-g128"),)).shape
    plan = Plan(consumer_warps=8, stage_bytes=8192, stages=4)
    with pytest.raises(PlanError, match="K-tiles of int4-g128 for 8 warps are 8576 bytes: use 8576 or more"):
        plan.check(shape, GPUS["h200"])
    with pytest.raises(PlanError, match="stage_bytes is 8600: use a multiple of 128"):
        Plan(consumer_warps=8, stage_bytes=8600, stages=4).check(shape, GPUS["h200"])
