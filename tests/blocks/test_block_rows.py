"""Blocks stored one by one behind an index: packed and unpacked, refused, and products against float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cheetah.blocks.linear.fragments import Activations
from cheetah.emulator import Misuse
from cheetah.models.formats import PackingError, pack_matrix, unpack_matrix
from cheetah.models.formats.block_rows import WindowsOfBlocks, windows_of
from cheetah.models.rounding import Bits, Bytes, widen
from cheetah.plan import MatrixLayout, PlanError
from cheetah.plan.formats import ZERO_BLOCKS, block_rows, tile_format
from cheetah.plan.index import round_up
from tests.blocks.small_kernel import filled
from tests.blocks.test_matvec import product
from tests.blocks.test_quantized_products import launched
from tests.program.rig import as_bf16, relative_error
from tests.tiers import tiered
from tests.tolerances import MATVEC

FORMAT = "blocks-800of1024-most32"
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "one token": (50, 1100, 2, {}),
    "two tokens, two stages": (65, 2330, 2, {"tokens": 2, "stages": 2, "in_flight": 1}),
    "four tokens": (33, 2330, 2, {"tokens": 4, "consumer_warps": 4}),
    "eight tokens in slices": (70, 3300, 2, {"tokens": 8, "consumer_warps": 8, "down_slices": 2}),
    "sixteen tokens": (33, 330, 3, {"tokens": 16}),
}
IN_MAKE_TEST = ("one token", "eight tokens in slices")


def matrix_of(rows: int, columns: int) -> Bits:
    """With an M-tile that is all zero, one that is whole, and others that have more or fewer blocks."""
    draw = np.random.default_rng(rows + columns)
    m_tiles, blocks = round_up(rows, 16) // 16, round_up(columns, 32) // 32
    there = draw.random((m_tiles, blocks)) < draw.random((m_tiles, 1))
    there[1:2], there[2:3] = False, True
    whole = np.repeat(np.repeat(there, 16, axis=0), 32, axis=1)[:rows, :columns]
    return np.where(whole, as_bf16(draw.standard_normal((rows, columns))), np.uint16(0))


def layout_of(rows: int, columns: int, blocks: int = 2, name: str = FORMAT) -> MatrixLayout:
    tiles = tile_format(name)
    return MatrixLayout("w", rows, columns, blocks, tiles.tile_bytes, format=tiles)


def test_unpacking_gives_what_was_packed() -> None:
    for rows, columns, blocks in ((16, 32, 1), (50, 1100, 3), (1100, 1050, 2)):
        layout, matrix = layout_of(rows, columns, blocks), matrix_of(rows, columns)
        packed = pack_matrix(layout, matrix)
        np.testing.assert_array_equal(unpack_matrix(layout, packed), matrix)
        padded = np.zeros((layout.padded_rows, layout.padded_columns), np.uint16)
        padded[:rows, :columns] = matrix
        counts = windows_of(padded).sum(axis=1)
        starts = packed[: 4 * (len(counts) + 1)].view(np.uint32).astype(np.int64)
        np.testing.assert_array_equal(np.diff(starts), 1 + 8 * counts)
        assert starts[0] * 128 == layout.index_bytes + ZERO_BLOCKS * 1024 and starts[-1] * 128 <= layout.total_bytes
        assert not packed[layout.index_bytes :][: ZERO_BLOCKS * 1024].any()


def test_what_there_is_no_room_for_is_refused_with_its_place() -> None:
    matrix = np.zeros((32, 2048), np.uint16)
    matrix[20, [1030, 1070, 1100]] = 0x3F80
    message = "columns 1024 and the 1023 behind of rows 16 to 31 have 3 blocks that are not zero"
    with pytest.raises(PackingError, match=message):
        pack_matrix(layout_of(32, 2048, name="blocks-512of1024-most2"), matrix)
    with pytest.raises(PackingError, match="matrix 'w' has 3 blocks that are not zero, and there is room for 2"):
        pack_matrix(layout_of(32, 2048, name="blocks-16of1024-most3"), matrix)


@pytest.mark.parametrize("name", ["blocks-0of1024-most3", "blocks-1025of1024-most3", "blocks-5of1024-most33"])
def test_formats_that_cannot_be(name: str) -> None:
    with pytest.raises(PlanError, match=re.escape(name)):
        tile_format(name)


def test_who_has_no_such_blocks() -> None:
    tiles = block_rows(512, 24)
    for others in ({"experts": 4}, {"ranks": 2}):
        with pytest.raises(PlanError, match="belong to no experts, nor to several GPUs"):
            MatrixLayout("w", 64, 1024, 2, tiles.tile_bytes, format=tiles, **others)


def error_of(case: tuple[int, int, int, dict[str, Any]], change: Callable[[MatrixLayout, Bytes], Any]) -> float:
    kernel, layout = product(*case[:3], dict(case[3]), FORMAT)
    matrix = matrix_of(*case[:2])
    packed = pack_matrix(layout, matrix)
    change(layout, packed)
    x = as_bf16(np.random.default_rng(1).standard_normal((kernel.plan.tokens, layout.columns)))
    found = launched(kernel, layout, filled(packed), x)
    wanted = widen(x).astype(np.float64) @ widen(matrix).astype(np.float64).T
    there = wanted.any(axis=0)
    return np.inf if found[:, ~there].any() else relative_error(found[:, there], wanted[:, there])


def nothing(layout: MatrixLayout, packed: Bytes) -> None:
    """The packing as it is."""


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("case", tiered(CASES, [one for one in CASES if one not in IN_MAKE_TEST]))
def test_product_against_float64(case: str) -> None:
    assert error_of(CASES[case], nothing) < MATVEC


def lines_of(layout: MatrixLayout, packed: Bytes) -> tuple[Any, Any]:
    """Of the matrix, and the numbers of those that windows begin with."""
    return packed.reshape(-1, 128), packed[: 4 * layout.m_tiles * layout.chunks].view(np.uint32)


def the_window_of_the_neighbour(layout: MatrixLayout, packed: Bytes) -> None:
    starts = packed[: 4 * layout.m_tiles * layout.chunks].view(np.uint32)
    starts[:2] = starts[:2].min()


def the_numbers_of_the_neighbour(layout: MatrixLayout, packed: Bytes) -> None:
    lines, starts = lines_of(layout, packed)
    lines[starts, 4:36] = np.roll(lines[starts, 4:36], 1, axis=1)


def a_block_dropped(layout: MatrixLayout, packed: Bytes) -> None:
    lines, starts = lines_of(layout, packed)
    masks = np.ascontiguousarray(lines[starts, :4]).view(np.uint32)
    lines[starts, :4] = (masks & masks - np.uint32(1)).view(np.uint8)


def of_text(change: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], Any]:
    def plant(patch: pytest.MonkeyPatch) -> Any:
        change(patch)
        return nothing

    return plant


BUGS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "nothing": lambda patch: nothing,
    "the window of the neighbour": lambda patch: the_window_of_the_neighbour,
    "the numbers of the neighbouring blocks": lambda patch: the_numbers_of_the_neighbour,
    "a block dropped": lambda patch: a_block_dropped,
    "the first block's part of the vector for all": of_text(
        lambda patch: patch.setattr(
            Activations,
            "operand",
            lambda self, units, group, part=0, right=Activations.operand: right(self, units, group),
        )
    ),
    "a line of a window counted as one of its blocks": of_text(
        lambda patch: patch.setattr("cheetah.blocks.linear.formats.block_tiles.WINDOW_LINE_BYTES", 0)
    ),
    "windows that begin as if none had a line": of_text(
        lambda patch: patch.setattr(WindowsOfBlocks, "_starts", _starts_without_lines)
    ),
}


def _starts_without_lines(self: WindowsOfBlocks, layout: MatrixLayout, counts: Any) -> Any:
    first = (layout.index_bytes + ZERO_BLOCKS * 1024) // 128
    return (first + np.append(0, np.cumsum(counts * 8))).astype(np.uint32)


BUGS_IN_MAKE_TEST = ("nothing", "the window of the neighbour", "a block dropped")


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("bug", tiered(BUGS, [name for name in BUGS if name not in BUGS_IN_MAKE_TEST]))
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the emulator too, where a copy has no bytes."""
    change = BUGS[bug](monkeypatch)
    try:
        is_right = error_of((48, 1100, 1, {"tokens": 2}), change) < MATVEC
    except Misuse:
        is_right = False
    assert is_right == (bug == "nothing")
