"""Symmetric codes of which two of every four neighbours may differ from zero: those two, and where they are.

Lane 4g + t (g 0..7, t 0..3) owns 16 bytes of a K-tile's codes: for each 32 columns s = 0, 1 a word of row g, then one
of row g + 8, which have the two codes of columns 4t .. 4t+3 and those of columns 16 + 4t ...

* int4 (128 columns): the bytes are the first and the second code of the one four, then of the other. In their upper
  halves are codes of columns 0 .. 63, in the lower ones of columns 64 .. 127, as two's complement.
* fp8 (64 columns): the bytes are the first code of either four, then the second of either.

Places are nibbles, as in `two_of_four`. fp8 has them as there. int4 has for each 64 columns 32 words: that of lane
4g + 2s + i has those of row g + 8i and of 32 columns, nibble p those of the columns 4n .., n = p / 2 + 4 (p % 2). So
integer tensor cores take them. Scales, f16 [group][g][row g, row g + 8], lie between codes and places; behind an
M-tile's last K-tile the factors of its rows, as in `quantized_tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.quantized import MIDDLE_CODE, QuantizedRows
from cheetah.models.formats.quantized_tiles import QuantizedFormat
from cheetah.models.formats.two_of_four import GROUP, HALF, NIBBLES, NOT_KEPT, places_of_lanes
from cheetah.models.formats.weight_format import PackingError, TilePart
from cheetah.models.rounding import Bytes
from cheetah.plan.formats import M_TILE_ROWS, SparseQuantizedTiles

SIZES = 0x7F
"""Of a byte of e4m3: all but its sign."""
GATHER, GATHERED_AT = np.uint64(1 << 24 | 1 << 17 | 1 << 10 | 1 << 3), np.uint64(24)
"""A product that brings bits 0, 8, 16 and 24 side by side."""
NATURAL = np.array([place // 2 + 4 * (place % 2) for place in range(8)])
"""Which four of 32 columns a nibble of int4 is of."""


def zero_code(kind: str) -> int:
    """The code of a weight that is zero."""
    return MIDDLE_CODE.get(kind, 0)


def codes_there(rows: QuantizedRows) -> NDArray[np.uint8]:
    """Which of each four columns are not zero, bit i for column i: uint8 [rows, columns / 4]."""
    fours = np.ascontiguousarray(rows.codes).view(np.uint32).astype(np.uint64)
    every = np.uint64(0x01010101)
    sizes = fours & every * np.uint64(SIZES) if rows.kind == "fp8" else fours ^ every * np.uint64(zero_code(rows.kind))
    # No carry: what is added to a size stays below 2^8.
    there = (sizes + every * np.uint64(SIZES) >> np.uint64(7) & every) * GATHER >> GATHERED_AT
    return (there & np.uint64(15)).astype(np.uint8)


def is_two_of_four_codes(rows: QuantizedRows) -> bool:
    """Whether no four neighbouring columns have more than two weights that are not zero; a multiple of four columns of
    symmetric weights."""
    return not (NIBBLES[codes_there(rows)] == NOT_KEPT).any()


@dataclass(frozen=True)
class SparseQuantized(QuantizedFormat):
    """Rows are `QuantizedRows`, padded to M-tiles with zeros, with the codes that stand for zero."""

    tile: SparseQuantizedTiles

    @property
    def code_bits(self) -> int:
        return 0

    def encode(self, rows: QuantizedRows) -> tuple[TilePart, ...]:
        k_tiles = -(-rows.shape[1] // self.tile.columns)
        codes = np.full((rows.shape[0], k_tiles * self.tile.columns), zero_code(self.tile.kind), np.uint8)
        codes[:, : rows.shape[1]] = rows.codes
        self._clear_padding(codes, rows)
        there = codes_there(QuantizedRows(rows.kind, codes, rows.scales[:, :1], None, codes.shape[1]))
        nibbles = NIBBLES[there]
        if (nibbles == NOT_KEPT).any():
            row, group = np.argwhere(nibbles == NOT_KEPT)[0]
            raise PackingError(
                f"weight format {self.tile.name}: columns {GROUP * group} to {GROUP * group + 3} of row {row} have "
                f"{int(there[row, group]).bit_count()} weights that are not zero: two at most are kept"
            )
        fours = codes.view(np.uint32)
        kept = np.stack([fours >> 8 * shift.astype(np.uint32) & 0xFF for shift in (nibbles & 3, nibbles >> 2)], -1)
        behind = self._dense.behind_codes(rows.row_scales, k_tiles)
        parts = (
            TilePart(0, self._codes_of_lanes(kept.astype(np.uint8))),
            TilePart(self.tile.places_at, self._places(nibbles)),
        )
        return (*parts, TilePart(self.tile.scales_at, behind)) if behind.shape[-1] else parts

    def _clear_padding(self, codes: Bytes, rows: QuantizedRows) -> None:
        """Rows of padding have codes 0 and scales 0: zero is another code."""
        if zero_code(self.tile.kind):
            codes[~rows.scales.astype(np.float32).any(axis=1)] = zero_code(self.tile.kind)

    def decode(self, tiles: Bytes, factors: Bytes) -> QuantizedRows:
        m_tiles, k_tiles = tiles.shape[:2]
        kept = self._kept_of_lanes(np.ascontiguousarray(tiles[..., : self.tile.scales_at]))
        nibbles = self._nibbles(np.ascontiguousarray(tiles[..., self.tile.places_at :]))
        shape = (m_tiles * M_TILE_ROWS, k_tiles * self.tile.columns // GROUP)
        codes = np.full((*shape, GROUP), zero_code(self.tile.kind), np.uint8)
        kept, nibbles = kept.reshape(*shape, 2), nibbles.reshape(shape)
        for number, places in enumerate((nibbles & 3, nibbles >> 2)):
            np.put_along_axis(codes, places[..., None].astype(np.intp), kept[..., number, None], 2)
        columns = self.tile.group_columns or k_tiles * self.tile.columns
        return QuantizedRows(self.tile.kind, codes.reshape(shape[0], -1), self.scales_of(tiles, factors), None, columns)

    @property
    def _dense(self) -> QuantizedFormat:
        """What says how scales lie: the same without places."""
        return QuantizedFormat(replace(self.tile, tile_bytes=self.tile.places_at))

    # -- codes: uint8 [rows, fours, 2]

    def _codes_of_lanes(self, kept: Bytes) -> Bytes:
        m_tiles, parts = len(kept) // M_TILE_ROWS, self.tile.columns // 64
        # half of the rows, g; K-tile, part of 64 columns, s, columns 16 + or not, t; first or second
        axes = kept.reshape(m_tiles, 2, HALF, -1, parts, 2, 2, GROUP, 2)
        if self.tile.kind == "fp8":  # M-tile, K-tile, g, t, s, half of the rows, first or second, columns 16 +
            return np.ascontiguousarray(axes[:, :, :, :, 0].transpose(0, 3, 2, 6, 4, 1, 7, 5))
        lanes = np.ascontiguousarray(axes.transpose(4, 0, 3, 2, 7, 5, 1, 6, 8)) ^ np.uint8(MIDDLE_CODE["int4"])
        return np.asarray(lanes[0] << 4 | lanes[1])

    def _kept_of_lanes(self, lanes: Bytes) -> Bytes:
        m_tiles, k_tiles = lanes.shape[:2]
        if self.tile.kind == "fp8":
            axes = lanes.reshape(m_tiles, k_tiles, HALF, GROUP, 2, 2, 2, 2)
            return np.ascontiguousarray(axes.transpose(0, 5, 2, 1, 4, 7, 3, 6))
        axes = np.stack([lanes >> 4, lanes & 15]).reshape(2, m_tiles, k_tiles, HALF, GROUP, 2, 2, 2, 2)
        return np.ascontiguousarray(axes.transpose(1, 6, 3, 2, 0, 5, 7, 4, 8)) ^ np.uint8(MIDDLE_CODE["int4"])

    # -- places: nibbles uint8 [rows, fours]

    def _places(self, nibbles: Bytes) -> NDArray[Any]:
        if self.tile.kind == "fp8":
            return places_of_lanes(nibbles)
        # half of the rows, g; K-tile, part, s, four; in the order of nibbles in pairs
        axes = nibbles.reshape(-1, 2, HALF, nibbles.shape[1] // 32, 2, 2, 8)[..., NATURAL]
        pairs = axes[..., ::2] | axes[..., 1::2] << 4
        return np.ascontiguousarray(pairs.transpose(0, 3, 4, 2, 5, 1, 6))

    def _nibbles(self, places: Bytes) -> Bytes:
        m_tiles, k_tiles = places.shape[:2]
        both = np.stack([places & 15, places >> 4], -1)
        if self.tile.kind == "fp8":  # g; s, columns 16 +, half of the rows, four
            axes = both.reshape(m_tiles, k_tiles, HALF, 2, 2, 2, GROUP)
            return np.ascontiguousarray(axes.transpose(0, 5, 2, 1, 3, 4, 6))
        axes = both.reshape(m_tiles, k_tiles, 2, HALF, 2, 2, 8)[..., np.argsort(NATURAL)]
        return np.ascontiguousarray(axes.transpose(0, 5, 3, 1, 2, 4, 6))
