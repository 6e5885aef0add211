"""Weights of which two of every four are there: packed and unpacked, refused, and products against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cheetah.emulator import EmulatorError, allocate
from cheetah.models.formats import PackingError, pack_matrix, unpack_matrix
from cheetah.models.rounding import Bits, widen
from cheetah.plan import VECTOR_COLUMNS, MatrixLayout
from cheetah.plan.formats import TWO_OF_FOUR
from cheetah.plan.index import round_up
from tests.blocks.small_kernel import SmallKernel, filled
from tests.blocks.test_matvec import in_fragment_order, product
from tests.program.quantized_weights import two_of_four
from tests.program.rig import as_bf16, relative_error
from tests.tiers import tiered
from tests.tolerances import MATVEC

# rows, columns, blocks, then fields of the plan: the odd sizes are those that no K-tile and no group of four divides
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "less than a group": (2, 3, 1, {}),
    "part of an M-tile, a row and a K-tile": (17, 70, 2, {}),
    "more than a chunk": (33, 1100, 2, {"consumer_warps": 4}),
    "two tokens in two slices": (50, 1000, 3, {"tokens": 2, "down_slices": 2}),
    "four tokens": (33, 330, 2, {"tokens": 4}),
    "eight tokens": (33, 400, 3, {"tokens": 8, "consumer_warps": 4}),
    "sixteen tokens": (33, 260, 2, {"tokens": 16}),
}
IN_MAKE_TEST = ("more than a chunk", "two tokens in two slices", "eight tokens")


def matrix_of(rows: int, columns: int) -> Bits:
    """Random bits of which each four neighbours have none, one or two, and rows that are all zero."""
    draw = np.random.default_rng(rows + columns)
    bits = two_of_four(as_bf16(draw.standard_normal((rows, columns))), draw)
    bits[1::5] = 0
    return bits


def layout_of(rows: int, columns: int, blocks: int = 1) -> MatrixLayout:
    return MatrixLayout("w", rows, columns, blocks, 4 * TWO_OF_FOUR.tile_bytes, format=TWO_OF_FOUR)


@pytest.mark.parametrize(("rows", "columns", "blocks"), [(16, 64, 1), (50, 200, 3), (7, 33, 2), (40, 1000, 2)])
def test_unpacking_gives_what_was_packed(rows: int, columns: int, blocks: int) -> None:
    layout, matrix = layout_of(rows, columns, blocks), matrix_of(rows, columns)
    packed = pack_matrix(layout, matrix)
    assert packed.size == layout.total_bytes == layout.padded_rows * layout.padded_columns * 9 // 8
    np.testing.assert_array_equal(unpack_matrix(layout, packed), matrix)


def test_every_set_of_two_columns_is_kept_where_it_was() -> None:
    matrix = np.zeros((16, 64), np.uint16)
    sets = [there for there in range(16) if there.bit_count() <= 2]
    for group, there in enumerate(sets):
        for column in range(4):
            matrix[3, 4 * group + column] = (there >> column & 1) * (0x3F80 + 4 * group + column)
    np.testing.assert_array_equal(unpack_matrix(layout_of(16, 64), pack_matrix(layout_of(16, 64), matrix)), matrix)


def test_a_negative_zero_is_a_zero() -> None:
    matrix = matrix_of(16, 64)
    matrix[matrix == 0] = 0x8000
    found = unpack_matrix(layout_of(16, 64), pack_matrix(layout_of(16, 64), matrix))
    np.testing.assert_array_equal(widen(found), widen(matrix))


def test_three_of_four_are_refused_with_their_place() -> None:
    matrix = matrix_of(16, 64)
    matrix[9, 20:24] = 0x3F80, 0, 0x3F80, 0x0001  # a subnormal number is one
    with pytest.raises(PackingError, match=r"columns 20 to 23 of row 9 have 3 weights that are not zero"):
        pack_matrix(layout_of(16, 64), matrix)


def launched(kernel: SmallKernel, layout: MatrixLayout, packed: np.ndarray, x: Bits) -> np.ndarray:
    padded = np.zeros((len(x), round_up(layout.columns, VECTOR_COLUMNS)), np.uint16)
    padded[:, : layout.columns] = x
    y = allocate((len(x), layout.rows), np.float32)
    kernel.launch({"weights": packed, "x": filled(in_fragment_order(padded)), "y": y, "column_count": len(x)})
    return y


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("case", tiered(CASES, [name for name in CASES if name not in IN_MAKE_TEST]))
def test_product_against_float64(case: str) -> None:
    rows, columns, blocks, fields = CASES[case]
    kernel, layout = product(rows, columns, blocks, dict(fields), TWO_OF_FOUR.name)
    matrix = matrix_of(rows, columns)
    x = as_bf16(np.random.default_rng(1).standard_normal((kernel.plan.tokens, columns)))
    found = launched(kernel, layout, filled(pack_matrix(layout, matrix)), x)
    wanted = widen(x).astype(np.float64) @ widen(matrix).astype(np.float64).T
    assert not found[:, 1::5].any()
    there = wanted.any(axis=0)
    assert relative_error(found[:, there], wanted[:, there]) < MATVEC


@pytest.mark.compiler
def test_places_that_are_not_in_order_are_found() -> None:
    kernel, layout = product(16, 64, 1, {}, TWO_OF_FOUR.name)
    packed = pack_matrix(layout, matrix_of(16, 64))
    packed[TWO_OF_FOUR.places_at] = 0x11
    with pytest.raises(EmulatorError, match="places 1 and 0 are not in order"):
        launched(kernel, layout, filled(packed), as_bf16(np.ones((1, 64))))


PLANTED = {
    "nothing": ("", ""),
    "the places of the neighbouring lane": ("+ 1024))[lane]", "+ 1024))[lane ^ 1]"),
    "the places of both halves from the same lanes": ("mma_2of4_bf16_1(sums", "mma_2of4_bf16_0(sums"),
    "the weights of the other half": ("[lane + 32]", "[lane]"),
    "the vector of the other half": ("(lane / 8 + 4)", "(lane / 8)"),
}


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str) -> None:
    right, wrong = PLANTED[bug]
    kernel, layout = product(16, 128, 1, {}, TWO_OF_FOUR.name)
    head, start, body = kernel.text.partition("void run()")
    assert right in head
    kernel.text = head.replace(right, wrong) + start + body if right else kernel.text
    matrix = matrix_of(16, 128)
    x = as_bf16(np.random.default_rng(1).standard_normal((1, 128)))
    found = launched(kernel, layout, filled(pack_matrix(layout, matrix)), x)
    wanted = widen(x).astype(np.float64) @ widen(matrix).astype(np.float64).T
    there = wanted.any(axis=0)
    assert (relative_error(found[:, there], wanted[:, there]) < MATVEC) == (bug == "nothing")
