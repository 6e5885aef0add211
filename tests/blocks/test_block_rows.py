"""Blocks stored one by one behind an index: packed and unpacked, refused, and products against float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cheetah.blocks.linear.fragments import Activations
from cheetah.emulator import Deadlock, Misuse
from cheetah.models.formats import PackingError, pack_matrix, unpack_matrix
from cheetah.models.formats.block_rows import blocks_of
from cheetah.models.rounding import Bits, Bytes, widen
from cheetah.plan import MatrixLayout, PlanError
from cheetah.plan.formats import LOT_BLOCKS, NO_BLOCK, ZERO_BLOCKS, block_rows, tile_format
from cheetah.plan.index import round_up
from tests.blocks.small_kernel import filled
from tests.blocks.test_matvec import product
from tests.blocks.test_quantized_products import launched
from tests.program.rig import as_bf16, relative_error
from tests.tiers import tiered
from tests.tolerances import MATVEC

FORMAT = "blocks-800of1024"
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


def entries_of(layout: MatrixLayout, packed: Bytes) -> Any:
    """The entries of the index, a view."""
    words, before = packed.view(np.uint32), 2 * layout.m_tiles
    return words[before : before + layout.m_tiles * (layout.chunks + 1)].reshape(layout.m_tiles, -1)


def test_unpacking_gives_what_was_packed() -> None:
    for rows, columns, blocks in ((16, 32, 1), (50, 1100, 3), (1100, 1050, 2)):
        layout, matrix = layout_of(rows, columns, blocks), matrix_of(rows, columns)
        packed = pack_matrix(layout, matrix)
        np.testing.assert_array_equal(unpack_matrix(layout, packed), matrix)
        padded = np.zeros((layout.padded_rows, layout.padded_columns), np.uint16)
        padded[:rows, :columns] = matrix
        counts = blocks_of(padded).sum(axis=1)
        entries = entries_of(layout, packed)
        np.testing.assert_array_equal(entries[:, -1], counts)
        begins = entries[:, 0].astype(np.int64)
        np.testing.assert_array_equal(np.diff(begins), (8 * counts + np.maximum(1, -(-counts // LOT_BLOCKS)))[:-1])
        assert begins[0] * 128 == layout.index_bytes + ZERO_BLOCKS * 1024
        assert not packed[layout.index_bytes :][: ZERO_BLOCKS * 1024].any()


def test_m_tiles_are_dealt_by_their_bytes() -> None:
    layout = replace(layout_of(1100, 1050, 4), is_dealt=True)
    matrix = matrix_of(1100, 1050)
    packed = pack_matrix(layout, matrix)
    np.testing.assert_array_equal(unpack_matrix(layout, packed), matrix)
    of_slots = packed.view(np.uint32)[: layout.m_tiles].astype(np.int64)
    assert set(of_slots) == set(range(layout.m_tiles))
    np.testing.assert_array_equal(packed.view(np.uint32)[layout.m_tiles :][: layout.m_tiles], np.argsort(of_slots))
    sizes = entries_of(layout, packed)[:, -1].astype(np.int64)
    in_turn = entries_of(layout, pack_matrix(replace(layout, is_dealt=False), matrix))[:, -1].astype(np.int64)
    np.testing.assert_array_equal(sizes, in_turn[of_slots])
    shares, before = ([counts[position::4].sum() for position in range(4)] for counts in (sizes, in_turn))
    assert max(shares) - min(shares) < 16 and max(before) - min(before) > 32


def test_what_there_is_no_room_for_is_refused() -> None:
    matrix = np.zeros((32, 2048), np.uint16)
    matrix[20, [1030, 1070, 1100]] = 0x3F80
    with pytest.raises(PackingError, match="matrix 'w' has 3 blocks that are not zero, and there is room for 2"):
        pack_matrix(layout_of(32, 2048, name="blocks-16of1024"), matrix)


@pytest.mark.parametrize("name", ["blocks-0of1024", "blocks-1025of1024", "blocks-512of1024-most24"])
def test_formats_that_cannot_be(name: str) -> None:
    with pytest.raises(PlanError, match=re.escape(name)):
        tile_format(name)


def test_who_has_no_such_blocks() -> None:
    tiles = block_rows(512)
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


def lots(layout: MatrixLayout, packed: Bytes) -> tuple[Any, Any]:
    """The u16 of the matrix by lines, and the lines that lots begin with."""
    entries = entries_of(layout, packed)
    first = [
        begin + np.arange(0, max(count, 1), LOT_BLOCKS) // LOT_BLOCKS * (1 + 8 * LOT_BLOCKS)
        for begin, count in entries[:, [0, -1]].astype(int)
    ]
    return packed.view(np.uint16).reshape(-1, 64), np.concatenate(first)


def the_lots_of_the_neighbour(layout: MatrixLayout, packed: Bytes) -> None:
    entries = entries_of(layout, packed)
    entries[0] = entries[1]


def the_numbers_of_the_neighbour(layout: MatrixLayout, packed: Bytes) -> None:
    lines, heads = lots(layout, packed)
    lines[heads, :LOT_BLOCKS] = np.roll(lines[heads, :LOT_BLOCKS], 1, axis=1)


def a_block_dropped(layout: MatrixLayout, packed: Bytes) -> None:
    lines, heads = lots(layout, packed)
    lines[heads, LOT_BLOCKS] = np.maximum(lines[heads, LOT_BLOCKS], 1) - 1


def a_block_taken_twice(layout: MatrixLayout, packed: Bytes) -> None:
    lines, heads = lots(layout, packed)
    lines[heads, 1] = np.where(lines[heads, LOT_BLOCKS] > 1, lines[heads, 0], lines[heads, 1])


def lots_that_end_too_soon(layout: MatrixLayout, packed: Bytes) -> None:
    lines, heads = lots(layout, packed)
    lines[heads, LOT_BLOCKS + 1] = NO_BLOCK


def of_text(change: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], Any]:
    def plant(patch: pytest.MonkeyPatch) -> Any:
        change(patch)
        return nothing

    return plant


BUGS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "nothing": lambda patch: nothing,
    "the lots of the neighbour": lambda patch: the_lots_of_the_neighbour,
    "the numbers of the neighbouring blocks": lambda patch: the_numbers_of_the_neighbour,
    "a block dropped": lambda patch: a_block_dropped,
    "a block multiplied twice": lambda patch: a_block_taken_twice,
    "lots that end too soon": lambda patch: lots_that_end_too_soon,
    "the first block's part of the vector for all": of_text(
        lambda patch: patch.setattr(
            Activations,
            "operand",
            lambda self, units, group, part=0, right=Activations.operand: right(self, units, group),
        )
    ),
    "a lot's line counted as one of its blocks": of_text(
        lambda patch: patch.setattr("cheetah.blocks.linear.formats.block_tiles.LOT_LINE_BYTES", 0)
    ),
    "lots that lie as if none had a line": of_text(
        lambda patch: patch.setattr("cheetah.blocks.linear.lots.LINES_OF_LOT", 8 * LOT_BLOCKS)
    ),
}


BUGS_IN_MAKE_TEST = ("nothing", "the lots of the neighbour", "a block dropped")


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("bug", tiered(BUGS, [name for name in BUGS if name not in BUGS_IN_MAKE_TEST]))
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the emulator too, where a copy has no bytes, or warps wait for a lot that nobody copies."""
    change = BUGS[bug](monkeypatch)
    try:
        is_right = error_of((48, 1100, 1, {"tokens": 2}), change) < MATVEC
    except (Misuse, Deadlock):
        is_right = False
    assert is_right == (bug == "nothing")
