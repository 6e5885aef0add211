"""Blocks of which some of every four are there: packed and unpacked, refused, and products against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cheetah.blocks.linear.formats.block_tiles import BlockFragments
from cheetah.blocks.linear.fragments import Activations
from cheetah.models.formats import PackingError, blocks, pack_matrix, unpack_matrix
from cheetah.models.rounding import Bits, widen
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import BLOCK_FORMATS, BlockTiles
from tests.blocks.small_kernel import filled
from tests.blocks.test_matvec import product
from tests.blocks.test_quantized_products import launched
from tests.program.quantized_weights import some_blocks
from tests.program.rig import as_bf16, relative_error
from tests.tiers import tiered
from tests.tolerances import MATVEC

CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "one token": (50, 1100, 2, {"down_slices": 2}),
    "four tokens": (33, 330, 2, {"tokens": 4, "consumer_warps": 4}),
    "eight tokens": (17, 700, 3, {"tokens": 8, "consumer_warps": 8}),
    "sixteen tokens": (33, 260, 2, {"tokens": 16}),
}
ALL = [(name, case) for name in BLOCK_FORMATS for case in CASES]
IN_MAKE_TEST = [("blocks-2of4", "one token"), ("blocks-1of4", "eight tokens")]


def matrix_of(name: str, rows: int, columns: int) -> Bits:
    """With an M-tile that is all zero, and fours with fewer blocks."""
    draw = np.random.default_rng(rows + columns)
    bits = some_blocks(as_bf16(draw.standard_normal((rows, columns))), BLOCK_FORMATS[name].kept, draw)
    bits[16:32] = 0
    return bits


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_unpacking_gives_what_was_packed(name: str) -> None:
    tiles = BLOCK_FORMATS[name]
    for rows, columns, count in ((16, 128, 1), (50, 700, 3), (7, 33, 2)):
        layout = MatrixLayout("w", rows, columns, count, 2 * tiles.tile_bytes, format=tiles)
        matrix = matrix_of(name, rows, columns)
        packed = pack_matrix(layout, matrix)
        assert packed.size == layout.m_tiles * layout.k_tiles * (1024 * tiles.kept + 16)
        np.testing.assert_array_equal(unpack_matrix(layout, packed), matrix)


def test_one_block_more_is_refused_with_its_place() -> None:
    tiles = BLOCK_FORMATS["blocks-2of4"]
    matrix = np.zeros((32, 256), np.uint16)
    matrix[20, [130, 170, 255]] = 0x3F80
    message = "columns 128 and the 127 behind of rows 16 to 31 have 3 blocks that are not zero: 2 at most"
    with pytest.raises(PackingError, match=message):
        pack_matrix(MatrixLayout("w", 32, 256, 1, 2 * tiles.tile_bytes, format=tiles), matrix)


def error_of(name: str, case: tuple[int, int, int, dict[str, Any]]) -> float:
    kernel, layout = product(*case[:3], dict(case[3]), name)
    matrix = matrix_of(name, *case[:2])
    x = as_bf16(np.random.default_rng(1).standard_normal((kernel.plan.tokens, layout.columns)))
    found = launched(kernel, layout, filled(pack_matrix(layout, matrix)), x)
    wanted = widen(x).astype(np.float64) @ widen(matrix).astype(np.float64).T
    there = wanted.any(axis=0)
    return np.inf if found[:, ~there].any() else relative_error(found[:, there], wanted[:, there])


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("name", "case"), tiered(ALL, [one for one in ALL if one not in IN_MAKE_TEST]))
def test_product_against_float64(name: str, case: str) -> None:
    assert error_of(name, CASES[case]) < MATVEC


def packed_wrongly(patch: pytest.MonkeyPatch, change: Any) -> None:
    right = blocks.Blocks.encode

    def encode(self: Any, rows: Bits) -> Any:
        tiles, numbers = right(self, rows)
        return change(tiles, numbers)

    patch.setattr(blocks.Blocks, "encode", encode)


BUGS: dict[str, Any] = {
    "nothing": lambda patch: None,
    "the numbers of the neighbouring K-tile": lambda patch: packed_wrongly(
        patch, lambda tiles, of: (tiles, type(of)(of.begin, np.roll(of.tiles, 1, axis=1)))
    ),
    "a block kept twice": lambda patch: packed_wrongly(
        patch, lambda tiles, of: (type(tiles)(0, np.repeat(tiles.tiles[:, :, :1], 2, axis=2)), of)
    ),
    "the first block's part of the vector for all": lambda patch: patch.setattr(
        Activations, "operand", lambda self, units, group, part=0, right=Activations.operand: right(self, units, group)
    ),
    "the last block left out": lambda patch: patch.setattr(
        BlockFragments, "multiply", lambda self, *given, right=BlockFragments.multiply: right(_one_fewer(self), *given)
    ),
}


def _one_fewer(fragments: BlockFragments) -> BlockFragments:
    tiles = fragments.format
    fragments.format = BlockTiles(tiles.name, tiles.columns, tiles.tile_bytes, kept=1, numbers_at=tiles.numbers_at)
    return fragments


BUGS_IN_MAKE_TEST = ("nothing", "the numbers of the neighbouring K-tile")


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("bug", tiered(BUGS, [name for name in BUGS if name not in BUGS_IN_MAKE_TEST]))
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    assert (error_of("blocks-2of4", (16, 384, 1, {"tokens": 2})) < MATVEC) == (bug == "nothing")
