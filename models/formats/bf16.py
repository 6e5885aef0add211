"""bf16 weights, exactly: the words of an M-tile in the order in which tensor cores take them.

A *word* is two neighbouring columns of one row (32 bits, lower column in the lower half). A K-tile is 16 rows x 32
columns = 1024 bytes: tile 0, then tile 1. In tile h, lane 4g + t (g 0..7, t 0..3) owns 16 bytes, the A fragment of one
mma.m16n8k16: the words at columns c = 8t + 4h of rows g and g + 8, then at columns c + 2 of rows g and g + 8. So over
both tiles lane t meets the columns 8t .. 8t+7, and the activations it needs are one 16-byte load in natural order.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.weight_format import Bytes, WeightFormat, chunks_of_rounds
from cheetah.models.rounding import F32, Bits
from cheetah.plan import M_TILE_ROWS, MatrixLayout
from cheetah.plan.formats import BF16

TILE_WORDS = BF16.tile_bytes // 4


class Bf16(WeightFormat):
    """16 x 32 weights a tile."""

    def encode(self, rows: Bits) -> Bytes:
        words = _m_tile_words(rows)
        return words[:, _sources(words.shape[1] // TILE_WORDS)].view(np.uint8)

    def decode(self, tiles: Bytes, factors: Bytes) -> Bits:
        words = np.empty((len(tiles), tiles[0].size // 4), np.uint32)
        words[:, _sources(tiles.shape[1])] = tiles.view(np.uint32)
        return words.view(np.uint16).reshape(len(tiles) * M_TILE_ROWS, -1)

    def meaning(self, weights: F32) -> F32:
        return weights

    def pack_m_tiles(self, layout: MatrixLayout, m_tiles: range, rows: Bits, out: Bytes, first_wave: int = 0) -> None:
        # One table-driven copy of words a chunk and wave, no temporary memory; numpy lets other threads run meanwhile.
        words, sources = _m_tile_words(rows), _sources(layout.k_tiles)
        for places, begin, end, of_m_tiles in chunks_of_rounds(layout, m_tiles, out, first_wave):
            table, target = sources[begin:end].reshape(-1), places.view(np.uint32)
            # "clip": numpy copies twice when it must check
            np.take(words[of_m_tiles.start : of_m_tiles.stop], table, axis=1, out=target, mode="clip")


def _m_tile_words(rows: Bits) -> NDArray[np.uint32]:
    """[M-tiles, words of an M-tile], row by row."""
    return rows.reshape(-1, M_TILE_ROWS * rows.shape[-1]).view(np.uint32)


@lru_cache(maxsize=64)
def _sources(k_tiles: int) -> NDArray[np.intp]:
    """[K-tiles, words]: which word of the row-major M-tile each packed word is."""
    words = np.arange(k_tiles * TILE_WORDS, dtype=np.intp)
    # Axes of a row-major M-tile: half of the rows, g; tile, t, half h, column pair of the half.
    axes = words.reshape(2, M_TILE_ROWS // 2, k_tiles, 4, 2, 2)
    return np.ascontiguousarray(axes.transpose(2, 4, 1, 3, 5, 0)).reshape(k_tiles, TILE_WORDS)
