"""Lists beside K-tiles: packed and unpacked, refused, and products against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cheetah.blocks.linear.lists import List
from cheetah.models.formats import PackingError, lists, pack_matrix, unpack_matrix
from cheetah.models.formats.lists import ListedRows, counts_of, parts_of, units_for
from cheetah.models.formats.quantized import MIDDLE_CODE, scheme_of_name
from cheetah.models.rounding import widen
from cheetah.plan import M_TILE_ROWS, MatrixLayout, PlanError
from cheetah.plan.formats import DIGITS_AND_NUMBERS, LISTED_TILES, RAISED, STAGGERED, tile_format
from cheetah.plan.index import round_up
from tests.blocks.small_kernel import filled
from tests.blocks.test_matvec import product
from tests.blocks.test_quantized_products import launched
from tests.program.quantized_weights import drawn_rows
from tests.program.rig import as_bf16, relative_error
from tests.tiers import tiered
from tests.tolerances import MATVEC

BESIDE = ("int4-g128", "int4", "int8-g64-asym", "2of4")
# rows, columns, blocks, then fields of the plan; the vectors' kinds are those of the formats
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "one token": (50, 2560, 2, {"down_slices": 2}),
    "two tokens": (33, 1280, 2, {"tokens": 2}),
    "sizes that do not divide": (17, 1100, 2, {"tokens": 2}),
    "four tokens, eight warps": (33, 330, 2, {"tokens": 4, "consumer_warps": 8}),
    "eight tokens in slices": (50, 2300, 3, {"tokens": 8, "down_slices": 2, "consumer_warps": 4}),
    "sixteen tokens": (33, 260, 2, {"tokens": 16}),
}
ALL = [(name, case) for name in BESIDE for case in CASES]
IN_MAKE_TEST = [("int4-g128", "one token"), ("int4-g128", "eight tokens in slices"), ("2of4", "two tokens")]


def matrix_of(name: str, rows: int, columns: int) -> Any:
    """With rows that list nothing, one that lists much, and one whose numbers lie in the last columns alone."""
    draw = np.random.default_rng(rows + columns)
    density = np.full((rows, 1), 0.5 if name == "2of4" else 0.01)
    density[1::5], density[2::11] = 0, 1 if name == "2of4" else 0.2
    there = draw.random((rows, columns)) < density
    there[3], there[3, -2:] = False, True
    numbers = as_bf16(3 * draw.standard_normal((rows, columns)))
    if name == "2of4":
        return np.where(there, numbers, np.uint16(0))
    scheme = scheme_of_name(name, "f16")
    dense = drawn_rows(scheme, rows, columns, draw)
    middle = MIDDLE_CODE[scheme.kind]
    if dense.zero_points is not None:
        middle = np.repeat(dense.zero_points, dense.group_columns, axis=1)[:, :columns]
    codes = np.where(there, middle, dense.codes).astype(np.uint8)
    return ListedRows(replace(dense, stored_codes=codes), np.where(there, numbers, np.uint16(0)))


def values_of(matrix: Any) -> np.ndarray:
    return np.asarray(matrix.dequantized() if isinstance(matrix, ListedRows) else widen(matrix))


def format_for(name: str, matrix: Any, chunk_tiles: int = LISTED_TILES) -> str:
    """The format with as much room as the matrix needs."""
    bits = matrix.listed if isinstance(matrix, ListedRows) else matrix
    padded = np.zeros((round_up(len(bits), M_TILE_ROWS), round_up(bits.shape[1], 4)), np.uint16)
    padded[: len(bits), : bits.shape[1]] = bits
    listed = padded if isinstance(matrix, ListedRows) else parts_of(padded)[1]
    return f"{name}+list{units_for(counts_of(listed, chunk_tiles * tile_format(name).columns))}"


def layout_of(name: str, rows: int, columns: int, blocks: int, chunk_tiles: int = 3) -> tuple[MatrixLayout, Any]:
    matrix = matrix_of(name, rows, columns)
    tiles = tile_format(format_for(name, matrix, chunk_tiles))
    return MatrixLayout("w", rows, columns, blocks, chunk_tiles * tiles.tile_bytes, format=tiles), matrix


@pytest.mark.parametrize("name", BESIDE)
def test_unpacking_gives_what_was_packed(name: str) -> None:
    for rows, columns, blocks in ((16, 128, 1), (50, 700, 3), (7, 33, 2)):
        layout, matrix = layout_of(name, rows, columns, blocks)
        packed = pack_matrix(layout, matrix)
        assert packed.size == layout.total_bytes
        dense = replace(layout, format=tile_format(name)).total_bytes
        assert layout.total_bytes - dense == layout.m_tiles * layout.chunks * layout.format.list_units * 128
        found = unpack_matrix(layout, packed)
        np.testing.assert_array_equal(values_of(found), values_of(matrix))
        if name == "2of4":
            np.testing.assert_array_equal(found, matrix)


def test_one_number_more_than_there_is_room_for_is_refused() -> None:
    layout, matrix = layout_of("2of4", 16, 128, 1)
    less = replace(layout, format=tile_format(f"2of4+list{layout.format.list_units - 1}"))
    with pytest.raises(PackingError, match=r"2of4\+list\d+: rows r and r \+ 8 .* \d+ numbers .* has room for \d+"):
        pack_matrix(less, matrix)


@pytest.mark.parametrize(
    "name", ["fp8+list3", "2of4-int4+list3", "bf16+list1", "int4+list0", "int4+list", "int4+lists3"]
)
def test_lists_that_there_are_not(name: str) -> None:
    with pytest.raises(PlanError, match=r"weight format"):
        tile_format(name)


def test_which_vectors_numbers_are_multiplied_with() -> None:
    int4, int8 = (layout_of(name, 16, 1280, 1)[0] for name in ("int4-g128", "int8-g64-asym"))
    assert [int4.vector_kind(tokens) for tokens in (1, 2, 4)] == [DIGITS_AND_NUMBERS, DIGITS_AND_NUMBERS, STAGGERED]
    assert int8.vector_kind(1) == RAISED


def error_of(name: str, case: tuple[int, int, int, dict[str, Any]]) -> float:
    matrix = matrix_of(name, *case[:2])
    kernel, layout = product(*case[:3], dict(case[3]), format_for(name, matrix))
    values = np.random.default_rng(1).standard_normal((kernel.plan.tokens, layout.columns))
    values *= np.exp2(3.0 * np.arange(kernel.plan.tokens) % 7)[:, None]
    x = as_bf16(values)
    found = launched(kernel, layout, filled(pack_matrix(layout, matrix)), x)
    wanted = widen(x).astype(np.float64) @ values_of(matrix).astype(np.float64).T
    there = wanted.any(axis=0)
    return np.inf if found[:, ~there].any() else relative_error(found[:, there], wanted[:, there])


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("name", "case"), tiered(ALL, [one for one in ALL if one not in IN_MAKE_TEST]))
def test_product_against_float64(name: str, case: str) -> None:
    assert error_of(name, CASES[case]) < MATVEC


def patched(name: str, change: Any) -> Any:
    right = getattr(List, name)
    return lambda patch: patch.setattr(List, name, lambda self, *given: change(right, self, *given))


def packed_wrongly(change: Any) -> Any:
    """A list whose words are others than the packing's."""
    right = lists.packed_lists
    return lambda patch: patch.setattr(
        lists, "packed_lists", lambda *given: change(right(*given).view(np.uint32)).view(np.uint8)
    )


BUGS: dict[str, tuple[str, Any]] = {
    "nothing": ("int4-g128", lambda patch: None),
    "the end of the list": (
        "2of4",
        packed_wrongly(lambda words: np.concatenate([words[..., :-32], 0 * words[..., -32:]], -1)),
    ),
    "the list of the neighbouring chunk": ("2of4", packed_wrongly(lambda words: np.roll(words, 1, axis=1))),
    "the numbers of the neighbouring rows": ("2of4", packed_wrongly(lambda words: np.roll(words, 4, axis=2))),
    "the column of the neighbour": (
        "int4-g128",
        patched("_value", lambda right, self, element, column: right(self, element ^ 1, column)),
    ),
    "the row of the other half": (
        "2of4",
        lambda patch: patch.setattr("cheetah.blocks.linear.lists.SECOND_ROW", 0),
    ),
    "a column's sums in those of another": (
        "2of4",
        patched("_value", lambda right, self, element, column: right(self, element, 1 - column)),
    ),
    "the sums of the other row of a lane": (
        "int4-g128",
        patched("part", lambda right, self, column, row: right(self, column, 1 - row)),
    ),
    "the elements of the K-tile before, behind its digits": (
        "int4-g128",
        lambda patch: patch.setattr("cheetah.blocks.linear.lists.QUANTIZED_COLUMNS", 256),
    ),
    "the four lanes of a row not added up": (
        "2of4",
        lambda patch: patch.setattr("cheetah.blocks.linear.lists.LANES_OF_ROW", (1,)),
    ),
}

BUGS_IN_MAKE_TEST = ("nothing", "the list of the neighbouring chunk", "the row of the other half")


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("bug", tiered(BUGS, [name for name in BUGS if name not in BUGS_IN_MAKE_TEST]))
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = BUGS[bug]
    plant(monkeypatch)
    columns = 2 * LISTED_TILES * tile_format(name).columns if "chunk" in bug else 256
    assert (error_of(name, (16, columns, 1, {"tokens": 2})) < MATVEC) == (bug == "nothing")
