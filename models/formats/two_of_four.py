"""bf16 weights of which two of every four neighbouring columns may differ from zero: those two, and where they are.

In SparseTIR's words: dense_fixed(rows), dense_fixed(columns / 4), sparse_fixed(4, 2).

A K-tile is 16 rows x 64 columns = 1152 bytes: two *halves* of 32 columns, 512 bytes each, then 128 bytes of places. In
half h, lane 4g + t (g 0..7, t 0..3) owns 16 bytes, the A fragment of one sparse mma.m16n8k32: a word (two weights, the
lower column in the lower half) of the four columns 4t .. of rows g and g + 8, then one of the columns 16 + 4t .. of
both. The places of a word are a nibble: that of the first weight in bits 0 and 1, that of the second in 2 and 3. Lane
4g + 2h + i owns a word of places of half h: nibble t is that of row g's columns 16i + 4t .., nibble 4 + t that of row
g + 8's.

Of four columns with fewer than two weights zeros are kept too. A zero that is not kept comes back as +0, also where it
was -0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.weight_format import PackingError, TilePart, WeightFormat
from cheetah.models.rounding import Bits, Bytes
from cheetah.plan import M_TILE_ROWS
from cheetah.plan.formats import TWO_OF_FOUR

GROUP = 4
"""Columns of which two are kept."""
HALF = M_TILE_ROWS // 2
SIZES = np.uint64(0x7FFF_7FFF_7FFF_7FFF)
"""Of four bf16 numbers: all but their signs."""
SIGNS_AT = np.uint64(15)
LOWEST_BITS = np.uint64(0x0001_0001_0001_0001)
GATHER, GATHERED_AT = np.uint64(1 << 48 | 1 << 33 | 1 << 18 | 1 << 3), np.uint64(48)
"""A product that brings bits 0, 16, 32 and 48 side by side."""
NOT_KEPT = 255


def _tables() -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.uint64]]:
    """For each set of columns that are not zero (bit i: column i): the nibble of the two that are kept, NOT_KEPT where
    there are more; and how far the two are shifted to the right to be the lowest and the next 16 bits."""
    nibbles = np.full(16, NOT_KEPT, np.uint8)
    shifts = np.zeros((2, 16), np.uint64)
    for there in range(16):
        columns = [column for column in range(GROUP) if there >> column & 1]
        if len(columns) > 2:
            continue
        others = [column for column in range(GROUP) if column not in columns]
        first, second = sorted([*columns, *others][:2])
        nibbles[there] = first | second << 2
        shifts[:, there] = 16 * first, 16 * (second - 1)
    return nibbles, shifts[0], shifts[1]


NIBBLES, FIRST_SHIFTS, SECOND_SHIFTS = _tables()


def columns_there(rows: Bits) -> NDArray[np.uint8]:
    """Which of each four columns are not zero, bit i for column i: uint8 [rows, columns / 4] of bf16 bits."""
    fours = np.ascontiguousarray(rows).view(np.uint64)
    # No carry: what is added to a size stays below 2^16.
    there = ((fours & SIZES) + SIZES >> SIGNS_AT & LOWEST_BITS) * GATHER >> GATHERED_AT
    return (there & np.uint64(15)).astype(np.uint8)


def is_two_of_four(rows: Bits) -> bool:
    """Whether no four neighbouring columns have more than two weights that are not zero. rows: bf16 bits, a multiple of
    four columns."""
    return not (NIBBLES[columns_there(rows)] == NOT_KEPT).any()


class TwoOfFour(WeightFormat):
    """Rows are bf16 bits, with their zeros."""

    def encode(self, rows: Bits) -> tuple[TilePart, ...]:
        there = columns_there(rows)
        nibbles = NIBBLES[there]
        if (nibbles == NOT_KEPT).any():
            row, group = np.argwhere(nibbles == NOT_KEPT)[0]
            raise PackingError(
                f"weight format {TWO_OF_FOUR.name}: columns {GROUP * group} to {GROUP * group + 3} of row {row} have "
                f"{int(there[row, group]).bit_count()} weights that are not zero: two at most are kept"
            )
        fours = np.ascontiguousarray(rows).view(np.uint64)
        first = fours >> FIRST_SHIFTS[there] & np.uint64(0xFFFF)
        second = fours >> SECOND_SHIFTS[there] & np.uint64(0xFFFF0000)
        return TilePart(0, _lanes(first.astype(np.uint32) | second.astype(np.uint32))), TilePart(
            TWO_OF_FOUR.places_at, places_of_lanes(nibbles)
        )

    def decode(self, tiles: Bytes, factors: Bytes) -> Bits:
        m_tiles, k_tiles = tiles.shape[:2]
        values = np.ascontiguousarray(tiles[..., : TWO_OF_FOUR.places_at]).view(np.uint32)
        # M-tile, K-tile, half h, g, t, columns 16i, half of the rows: as rows, then columns
        words = values.reshape(m_tiles, k_tiles, 2, HALF, GROUP, 2, 2).transpose(0, 6, 3, 1, 2, 5, 4)
        packed = np.ascontiguousarray(tiles[..., TWO_OF_FOUR.places_at :]).view(np.uint16)
        # M-tile, K-tile, g, h, i, half of the rows: nibbles behind
        quads = packed.reshape(m_tiles, k_tiles, HALF, 2, 2, 2).transpose(0, 5, 2, 1, 3, 4)
        nibbles = quads[..., None] >> np.arange(0, 16, 4, dtype=np.uint16) & np.uint16(15)
        rows = np.zeros((m_tiles * M_TILE_ROWS, k_tiles * (TWO_OF_FOUR.columns // GROUP), GROUP), np.uint16)
        words, nibbles = words.reshape(rows.shape[:2]), nibbles.reshape(rows.shape[:2])
        for shift, place in ((0, nibbles & 3), (16, nibbles >> 2)):
            np.put_along_axis(rows, place[..., None].astype(np.intp), (words >> shift).astype(np.uint16)[..., None], 2)
        return rows.reshape(len(rows), -1)


def _lanes(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Kept words [M-tiles * 16, columns / 4] in the order of lanes."""
    axes = words.reshape(-1, 2, HALF, words.shape[1] // 16, 2, 2, GROUP)  # half of the rows, g; K-tile, h, i, t
    return np.ascontiguousarray(axes.transpose(0, 3, 4, 2, 6, 5, 1))


def places_of_lanes(nibbles: NDArray[np.uint8]) -> NDArray[Any]:
    """Nibbles [M-tiles * 16, columns / 4] in the order of lanes."""
    pairs = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    axes = pairs.reshape(-1, 2, HALF, nibbles.shape[1] // 16, 2, 2, 2)  # half of the rows, g; K-tile, h, i, pair
    return np.ascontiguousarray(axes.transpose(0, 3, 2, 4, 5, 1, 6))
