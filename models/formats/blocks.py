"""bf16 weights in blocks of 16 rows by 32 columns, of every four neighbours of which some are there: those, whole.

In SparseTIR's words BSR with as many blocks in every window: dense_fixed(rows / 16), dense_fixed(columns / 128),
sparse_fixed(4, kept), dense_fixed(16), dense_fixed(32). So all M-tiles have as many bytes, and blocks of threads that
own as many M-tiles read as much. A K-tile of 128 columns is its `kept` blocks, each as a K-tile of `Bf16`, in the order
of columns, then their numbers, 0 to 3, a byte each, and zeros up to 16 bytes. Of four with fewer blocks that are not
zero, zero ones are kept too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.bf16 import Bf16
from cheetah.models.formats.weight_format import PackingError, TilePart, WeightFormat
from cheetah.models.rounding import Bits, Bytes
from cheetah.plan import M_TILE_ROWS
from cheetah.plan.formats import BF16, BLOCKS_OF_TILE, BlockTiles

SIZE = np.uint16(0x7FFF)
"""Of a bf16 number: all but its sign."""


def blocks_there(rows: Bits) -> NDArray[np.bool_]:
    """Which blocks are not zero: bool [M-tiles, blocks] of bf16 bits [M-tiles * 16, columns], whole blocks."""
    blocks = (rows & SIZE).reshape(-1, M_TILE_ROWS, rows.shape[1] // BF16.columns, BF16.columns)
    return np.asarray(blocks.any(axis=(1, 3)))


@dataclass(frozen=True)
class Blocks(WeightFormat):
    """Rows are bf16 bits, with their zeros."""

    tile: BlockTiles
    whole: Bf16

    def encode(self, rows: Bits) -> tuple[TilePart, ...]:
        there = blocks_there(rows).reshape(len(rows) // M_TILE_ROWS, -1, BLOCKS_OF_TILE)
        if (counts := there.sum(axis=2)).max(initial=0) > self.tile.kept:
            m_tile, window = np.argwhere(counts > self.tile.kept)[0]
            raise PackingError(
                f"weight format {self.tile.name}: columns {window * self.tile.columns} and the {self.tile.columns - 1} "
                f"behind of rows {M_TILE_ROWS * m_tile} to {M_TILE_ROWS * m_tile + 15} have {counts[m_tile, window]} "
                f"blocks that are not zero: {self.tile.kept} at most are kept"
            )
        numbers = np.sort(np.argsort(~there, axis=2, kind="stable")[..., : self.tile.kept], axis=2)
        (part,) = self.whole.encode(rows)
        blocks = np.ascontiguousarray(part.tiles).view(np.uint8).reshape(*there.shape, BF16.tile_bytes)
        kept = np.take_along_axis(blocks, numbers[..., None], axis=2)
        behind = np.zeros((*there.shape[:2], self.tile.tile_bytes - self.tile.numbers_at), np.uint8)
        behind[..., : self.tile.kept] = numbers
        return TilePart(0, kept), TilePart(self.tile.numbers_at, behind)

    def decode(self, tiles: Bytes, factors: Bytes) -> Bits:
        m_tiles, k_tiles = tiles.shape[:2]
        numbers = tiles[..., self.tile.numbers_at :][..., : self.tile.kept].astype(np.intp)
        blocks = np.zeros((m_tiles, k_tiles, BLOCKS_OF_TILE, BF16.tile_bytes), np.uint8)
        kept = tiles[..., : self.tile.numbers_at].reshape(m_tiles, k_tiles, self.tile.kept, BF16.tile_bytes)
        np.put_along_axis(blocks, numbers[..., None], kept, axis=2)
        return self.whole.decode(blocks.reshape(m_tiles, -1, BF16.tile_bytes), factors)
