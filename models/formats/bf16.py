"""bf16 weights, exactly: the words of an M-tile in the order in which tensor cores take them.

A *word* is two neighbouring columns of one row (32 bits, lower column in the lower half). A K-tile is 16 rows x 32
columns = 1024 bytes: tile 0, then tile 1. In tile h, lane 4g + t (g 0..7, t 0..3) owns 16 bytes, the A fragment of one
mma.m16n8k16: the words at columns c = 8t + 4h of rows g and g + 8, then at columns c + 2 of rows g and g + 8. So over
both tiles lane t meets the columns 8t .. 8t+7, and the activations it needs are one 16-byte load in natural order.

A K-tile of a narrow M-tile is 8 rows x 64 columns: what is row g + 8 above are columns 32 .. 63 of row g.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.weight_format import TilePart, WeightFormat, units_of_halves, units_of_lanes
from cheetah.models.rounding import Bits, Bytes
from cheetah.plan import M_TILE_ROWS
from cheetah.plan.formats import BF16, NARROW_ROWS

TILE_WORDS = BF16.columns // 2
"""Of a row of a K-tile."""


class Bf16(WeightFormat):
    """16 x 32 weights a tile."""

    code_bits = 8
    code_columns = 2 * BF16.columns

    def rows_of_codes(self, codes: Bytes) -> Bits:
        return codes.view(np.uint16)

    def encode(self, rows: Bits) -> tuple[TilePart, ...]:
        return _tiles(units_of_lanes(rows.view(np.uint32)))

    def encode_narrow(self, rows: Bits) -> tuple[TilePart, ...]:
        m_tiles, k_tiles = len(rows) // NARROW_ROWS, rows.shape[1] // (2 * BF16.columns)
        words = rows.view(np.uint32).reshape(m_tiles, NARROW_ROWS, k_tiles, 2, TILE_WORDS)
        return _tiles(units_of_halves(words.transpose(0, 3, 1, 2, 4)))

    def decode(self, tiles: Bytes, factors: Bytes) -> Bits:
        words = tiles.view(np.uint32).reshape(*tiles.shape[:2], 2, M_TILE_ROWS // 2, 4, 2, 2)
        # M-tile, K-tile, tile h, g, t, word of the lane, half of the rows: as rows, then columns
        rows = np.ascontiguousarray(words.transpose(0, 6, 3, 1, 4, 2, 5))
        return rows.view(np.uint16).reshape(len(tiles) * M_TILE_ROWS, -1)

    def decode_narrow(self, tiles: Bytes) -> Bits:
        halves = self.decode(tiles, tiles[:0]).reshape(-1, 2, NARROW_ROWS, tiles.shape[1], BF16.columns)
        return np.ascontiguousarray(halves.transpose(0, 2, 3, 1, 4)).reshape(len(tiles) * NARROW_ROWS, -1)


def _tiles(units: NDArray[np.complex128]) -> tuple[TilePart, ...]:
    """Of [M-tiles, g, units of 16 bytes]."""
    tiles = units.reshape(*units.shape[:2], units.shape[2] // 8, 4, 2)  # M-tile, g; K-tile, t, tile h
    return (TilePart(0, tiles.transpose(0, 2, 4, 1, 3)),)
