"""bf16 weights, exactly: the words of an M-tile in the order in which tensor cores take them.

A *word* is two neighbouring columns of one row (32 bits, lower column in the lower half). A K-tile is 16 rows x 32
columns = 1024 bytes: tile 0, then tile 1. In tile h, lane 4g + t (g 0..7, t 0..3) owns 16 bytes, the A fragment of one
mma.m16n8k16: the words at columns c = 8t + 4h of rows g and g + 8, then at columns c + 2 of rows g and g + 8. So over
both tiles lane t meets the columns 8t .. 8t+7, and the activations it needs are one 16-byte load in natural order.
"""

from __future__ import annotations

import numpy as np

from cheetah.models.formats.weight_format import Bytes, TilePart, WeightFormat, units_of_lanes
from cheetah.models.rounding import F32, Bits
from cheetah.plan import M_TILE_ROWS
from cheetah.plan.formats import BF16


class Bf16(WeightFormat):
    """16 x 32 weights a tile."""

    code_bits = 8
    code_columns = 2 * BF16.columns

    def rows_of_codes(self, codes: Bytes) -> Bits:
        return codes.view(np.uint16)

    def encode(self, rows: Bits) -> tuple[TilePart, ...]:
        units = units_of_lanes(rows.view(np.uint32))
        tiles = units.reshape(*units.shape[:2], rows.shape[1] // BF16.columns, 4, 2)  # M-tile, g; K-tile, t, tile h
        return (TilePart(0, tiles.transpose(0, 2, 4, 1, 3)),)

    def decode(self, tiles: Bytes, factors: Bytes) -> Bits:
        words = tiles.view(np.uint32).reshape(*tiles.shape[:2], 2, M_TILE_ROWS // 2, 4, 2, 2)
        # M-tile, K-tile, tile h, g, t, word of the lane, half of the rows: as rows, then columns
        rows = np.ascontiguousarray(words.transpose(0, 6, 3, 1, 4, 2, 5))
        return rows.view(np.uint16).reshape(len(tiles) * M_TILE_ROWS, -1)

    def meaning(self, weights: F32) -> F32:
        return weights
