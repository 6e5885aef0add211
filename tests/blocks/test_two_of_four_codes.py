"""Codes of which two of every four are there: packed and unpacked, refused, and products against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cheetah.blocks.linear.formats import digits, two_of_four_codes, vectors
from cheetah.blocks.linear.formats.two_of_four_codes import SparseDigits, SparseInt4
from cheetah.models.formats import PackingError, dense_name, pack_matrix, unpack_matrix
from cheetah.models.formats.quantized import QuantizedRows, scheme_of_name
from cheetah.models.formats.two_of_four_codes import is_two_of_four_codes
from cheetah.models.rounding import widen
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import BF16_VECTOR, PLAIN_DIGITS, RAISED, RAISED_SKEWED, SKEWED, SPARSE_QUANTIZED_FORMATS
from tests.blocks.small_kernel import filled
from tests.blocks.test_matvec import product
from tests.blocks.test_quantized_products import launched
from tests.program.quantized_weights import drawn_rows
from tests.program.quantized_weights import two_of_four_codes as pruned
from tests.program.rig import as_bf16, relative_error
from tests.tiers import tiered
from tests.tolerances import MATVEC, MATVEC_WITH_OUTLIERS

Patch = pytest.MonkeyPatch
BITS = {"2of4-int4": 3.0, "2of4-int4-g128": 3.125, "2of4-int4-g64": 3.25, "2of4-fp8": 5.0}
# rows, columns, blocks, then fields of the plan
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "one token, digits": (50, 1280, 3, {"down_slices": 2}),
    "two tokens, digits": (50, 1280, 3, {"tokens": 2, "down_slices": 2}),
    "sizes that do not divide": (33, 1100, 2, {"consumer_warps": 8}),
    "less than a group": (17, 35, 2, {}),
    "four tokens": (50, 1000, 3, {"tokens": 4, "down_slices": 2}),
    "eight tokens": (33, 400, 3, {"tokens": 8, "consumer_warps": 4}),
    "sixteen tokens": (33, 260, 2, {"tokens": 16}),
}
IN_MAKE_TEST = (("2of4-int4-g128", "one token, digits"), ("2of4-int4-g64", "two tokens, digits"))
IN_MAKE_TEST = (*IN_MAKE_TEST, ("2of4-int4", "eight tokens"), ("2of4-fp8", "four tokens"))


def rows_of(name: str, rows: int, columns: int) -> QuantizedRows:
    """With rows that are all zero, and fours with fewer than two."""
    draw = np.random.default_rng(rows + columns)
    dense = drawn_rows(scheme_of_name(str(dense_name(name)), "f16"), rows, columns, draw)
    sparse = pruned(dense, draw)
    codes = sparse.codes
    codes[1::5] = 8 if "int4" in name else 0
    return replace(sparse, stored_codes=codes)


def layout_of(name: str, rows: int, columns: int, blocks: int = 1) -> MatrixLayout:
    tiles = SPARSE_QUANTIZED_FORMATS[name]
    return MatrixLayout("w", rows, columns, blocks, 4 * tiles.tile_bytes, format=tiles)


@pytest.mark.parametrize("name", SPARSE_QUANTIZED_FORMATS)
def test_unpacking_gives_what_was_packed(name: str) -> None:
    tiles = SPARSE_QUANTIZED_FORMATS[name]
    assert tiles.tile_bytes * 8 / (16 * tiles.columns) == BITS[name]
    for rows, columns, blocks in ((16, 128, 1), (50, 200, 3), (7, 33, 2), (40, 1000, 2)):
        layout, matrix = layout_of(name, rows, columns, blocks), rows_of(name, rows, columns)
        packed = pack_matrix(layout, matrix)
        assert packed.size == layout.total_bytes
        np.testing.assert_array_equal(unpack_matrix(layout, packed).dequantized(), matrix.dequantized())


@pytest.mark.parametrize("name", SPARSE_QUANTIZED_FORMATS)
def test_three_of_four_are_refused_with_their_place(name: str) -> None:
    matrix = rows_of(name, 16, 128)
    assert is_two_of_four_codes(matrix)
    matrix.stored_codes[9, 20:24] = 1, 2, 8 if "int4" in name else 0x80, 3
    assert not is_two_of_four_codes(matrix)
    with pytest.raises(PackingError, match=r"columns 20 to 23 of row 9 have 3 weights that are not zero"):
        pack_matrix(layout_of(name, 16, 128), matrix)


def error_of(name: str, case: tuple[int, int, int, dict[str, Any]], outlier: float = 0.0) -> float:
    kernel, layout = product(*case[:3], dict(case[3]), name)
    matrix = rows_of(name, layout.rows, layout.columns)
    values = np.random.default_rng(1).standard_normal((kernel.plan.tokens, layout.columns))
    # Sizes that differ from token to token, so that each has a power of two of its own.
    values *= np.exp2(3.0 * np.arange(kernel.plan.tokens) % 7)[:, None]
    if outlier:
        values[:, 3] = outlier
    x = as_bf16(values)
    found = launched(kernel, layout, filled(pack_matrix(layout, matrix)), x)
    wanted = widen(x).astype(np.float64) @ matrix.dequantized().astype(np.float64).T
    assert not found[:, 1::5].any()
    there = wanted.any(axis=0)
    return relative_error(found[:, there], wanted[:, there])


ALL = [(name, case) for name in SPARSE_QUANTIZED_FORMATS for case in CASES]


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("name", "case"), tiered(ALL, [one for one in ALL if one not in IN_MAKE_TEST]))
def test_product_against_float64(name: str, case: str) -> None:
    assert error_of(name, CASES[case]) < MATVEC
    if "digits" in case:
        assert error_of(name, CASES[case], outlier=1000.0) < MATVEC_WITH_OUTLIERS


def test_which_vectors_are_digits() -> None:
    layout = layout_of("2of4-int4-g128", 16, 1280)
    kinds = [layout.vector_kind(tokens) for tokens in (1, 2, 4, 8)]
    assert kinds == [PLAIN_DIGITS, PLAIN_DIGITS, SKEWED, SKEWED]
    assert layout_of("2of4-int4", 16, 1100).vector_kind(1) == BF16_VECTOR
    fp8 = layout_of("2of4-fp8", 16, 1280)
    assert [fp8.vector_kind(tokens) for tokens in (1, 8)] == [RAISED, RAISED_SKEWED]


def changed(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    right = getattr(owner, name)
    wrong = (lambda *given: change(right, *given)) if callable(right) else change(right)
    return lambda patch: patch.setattr(owner, name, wrong)


ONE, FOUR = (16, 256, 1, {}), (16, 256, 1, {"tokens": 4})
BUGS: dict[str, tuple[str, tuple[int, int, int, dict[str, Any]], Callable[[Patch], None]]] = {
    "": ("2of4-int4-g64", ONE, lambda patch: None),
    "the places of the other half": (
        *("2of4-int4-g128", ONE),
        changed(SparseDigits, "load_places", lambda right, self, first, half: right(self, first, 1 - half)),
    ),
    "the digits of the other half": (
        *("2of4-int4-g128", ONE),
        changed(SparseDigits, "_digits", lambda right, self, all_, half, tokens: right(self, all_, 1 - half, tokens)),
    ),
    "the scale of the neighbouring group": (
        *("2of4-int4-g64", ONE),
        changed(two_of_four_codes, "group_scales", lambda right, self, first, group: right(self, first, group ^ 1)),
    ),
    "the balance of the third digit": ("2of4-int4-g128", ONE, changed(digits, "TOP_OF_HIGH", lambda right: 0)),
    "codes that are not less by 8": (
        *("2of4-int4-g128", FOUR),
        changed(two_of_four_codes, "ZERO", lambda right: 0x43004300),
    ),
    "the fours of a word exchanged": (
        *("2of4-int4-g128", FOUR),
        changed(two_of_four_codes, "FIRST_FOUR", lambda right: two_of_four_codes.OTHER_FOUR),
    ),
    "the places of rows g and g + 8 exchanged": (
        *("2of4-int4-g128", FOUR),
        changed(two_of_four_codes, "OWN_AND_NEXT", lambda right: 0x1054),
    ),
    "units that lie as for one token": (
        *("2of4-fp8", FOUR),
        changed(vectors, "unit_place", lambda right, unit, kind: unit),
    ),
    "the codes of the other half": (
        *("2of4-int4", FOUR),
        lambda patch: patch.setattr(
            SparseInt4, "_fragment", staticmethod(lambda spread, half, part: FRAGMENT(spread, 1 - half, part))
        ),
    ),
}
FRAGMENT = SparseInt4._fragment


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("bug", [pytest.param(name, id=name or "nothing") for name in BUGS])
def test_a_planted_bug_is_found(bug: str, monkeypatch: Patch) -> None:
    name, case, plant = BUGS[bug]
    plant(monkeypatch)
    kernel, layout = product(*case[:3], dict(case[3]), name)
    matrix = drawn_rows(scheme_of_name(str(dense_name(name)), "f16"), 16, 256, np.random.default_rng(0))
    matrix = pruned(matrix, np.random.default_rng(3))
    x = as_bf16(np.random.default_rng(1).standard_normal((kernel.plan.tokens, 256)))
    found = launched(kernel, layout, filled(pack_matrix(layout, matrix)), x)
    wanted = widen(x).astype(np.float64) @ matrix.dequantized().astype(np.float64).T
    assert (relative_error(found, wanted) < MATVEC) == (bug == "")
