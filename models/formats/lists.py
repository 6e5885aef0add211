"""A part of a matrix as lists: bf16 numbers with their columns, whose products are added to those of its K-tiles.

In SparseTIR's words an M-tile's list beside a chunk is dense_fixed(8), sparse_variable(2 rows x columns of the chunk),
padded to one length: that of the longest in all layers. What is listed is beside int4 and int8 whatever was too large
for a code (the code there stands for zero), beside 2:4 what a four has from its third weight on.

Behind a chunk's K-tiles, and what ends an M-tile, lie `list_units` units of 128 bytes, a word a lane. Lanes 4g to
4g + 3 (g 0..7) have numbers of rows g and g + 8 of the M-tile, ordered by column and row: number n is in unit n / 4,
lane 4g + n % 4. A word has the number in its upper half; below, its row in bit 15 (1: g + 8), its column of the chunk
in the others. What fills a list up is the number 0 of column 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.quantized import QuantizedRows, RowPlanes
from cheetah.models.formats.two_of_four import GROUP, columns_there
from cheetah.models.formats.weight_format import PackingError, TilePart, WeightFormat
from cheetah.models.rounding import F32, Bits, Bytes, widen
from cheetah.plan import M_TILE_ROWS, MatrixLayout

HALF = M_TILE_ROWS // 2
NUMBERS_OF_UNIT = 4
"""Of each pair of rows."""
SECOND_ROW = np.uint32(1 << 15)
MOST_COLUMNS = 1 << 15
BEHIND_TWO = np.array(
    [
        sum(1 << bit for bit in range(4) if one >> bit & 1 and (one & (1 << bit) - 1).bit_count() > 1)
        for one in range(16)
    ],
    np.uint8,
)
"""Of the columns of a four that are not zero, bit i for column i, those behind the second."""
SIZE = np.uint16(0x7FFF)
"""Of a bf16 number: all but its sign."""


@dataclass(frozen=True)
class ListedRows(RowPlanes):
    """Some whole rows: their codes, and the numbers beside them. listed: bf16 bits, uint16 [rows, columns], 0 where
    the code says all; where it does not the code stands for zero."""

    rows: QuantizedRows
    listed: Bits

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape

    @property
    def kind(self) -> str:
        return self.rows.kind

    @property
    def planes(self) -> tuple[NDArray[Any], ...]:
        """Those of the codes, then the numbers."""
        return (*self.rows.planes, self.listed)

    def with_planes(self, made: Callable[[NDArray[Any]], NDArray[Any]]) -> ListedRows:
        return replace(self, rows=self.rows.with_planes(made), listed=made(self.listed))

    def dequantized(self) -> F32:
        """float32 [rows, columns]: what the weights are."""
        return self.rows.dequantized() + widen(self.listed)


def parts_of(rows: Any) -> tuple[Any, Bits]:
    """What lies in K-tiles, and the numbers in lists. Of bf16 bits the first two weights of each four are in tiles."""
    if isinstance(rows, ListedRows):
        return rows.rows, rows.listed
    behind = _third_and_fourth(rows)
    return np.where(behind, np.uint16(0), rows), np.where(behind, rows, np.uint16(0))


def _third_and_fourth(rows: Bits) -> NDArray[np.bool_]:
    """Which weights are not zero and have two of that kind before them in their four."""
    behind = BEHIND_TWO[columns_there(rows)]
    return np.unpackbits(behind[..., None], axis=-1, count=GROUP, bitorder="little").view(np.bool_).reshape(rows.shape)


def counts_of(listed: Bits, chunk_columns: int) -> NDArray[np.uint16]:
    """Numbers in the list of each row and chunk: uint16 [rows, chunks]."""
    starts = np.arange(0, listed.shape[1], chunk_columns)
    return np.add.reduceat(listed & SIZE != 0, starts, axis=1, dtype=np.uint16)


def units_for(counts: NDArray[np.uint16]) -> int:
    """Units that the longest list needs, of counts [M-tiles * 16, chunks]."""
    of_pairs = counts.reshape(-1, 2, HALF, counts.shape[1]).sum(axis=1, dtype=np.int64)
    return -(-int(of_pairs.max(initial=0)) // NUMBERS_OF_UNIT)


@dataclass(frozen=True)
class Listed(WeightFormat):
    """K-tiles of a format, and a list beside each chunk. Rows are bf16 bits, or `ListedRows`."""

    tiles: WeightFormat

    def encode(self, rows: Any) -> tuple[TilePart, ...]:
        return self.tiles.encode(parts_of(rows)[0])

    def row_factors(self, rows: Any) -> Bytes:
        return self.tiles.row_factors(parts_of(rows)[0])

    def decode(self, tiles: Bytes, factors: Bytes) -> Any:
        return self.tiles.decode(tiles, factors)

    def pack_m_tiles(
        self,
        layout: MatrixLayout,
        m_tiles: range,
        rows: Any,
        out: Bytes,
        first_wave: int = 0,
        lists: Bytes | None = None,
    ) -> None:
        in_tiles, listed = parts_of(rows)
        self.tiles.pack_m_tiles(layout, m_tiles, in_tiles, out, first_wave, packed_lists(layout, listed))

    def unpack(self, layout: MatrixLayout, packed: Bytes) -> Any:
        rows, lists = self.tiles.unpack_parts(layout, packed)
        listed = unpacked_lists(layout, lists)
        return ListedRows(rows, listed) if isinstance(rows, QuantizedRows) else rows | listed


def packed_lists(layout: MatrixLayout, listed: Bits) -> Bytes:
    """uint8 [M-tiles, chunks, bytes] of numbers [M-tiles * 16, columns]; PackingError where a list is too short."""
    columns, units = layout.tiles_per_chunk * layout.tile_columns, layout.format.list_units
    m_tiles, chunks = len(listed) // M_TILE_ROWS, layout.chunks
    padded = np.zeros((m_tiles, 2, HALF, chunks * columns), np.uint16)
    padded[..., : listed.shape[1]] = listed.reshape(m_tiles, 2, HALF, -1)
    # in the order of numbers: M-tile, chunk, g, column, half of the rows
    numbers = np.ascontiguousarray(padded.reshape(m_tiles, 2, HALF, chunks, columns).transpose(0, 3, 2, 4, 1))
    there = np.flatnonzero(numbers & SIZE)
    pair, place = np.divmod(there, 2 * columns)
    counts = np.bincount(pair, minlength=m_tiles * chunks * HALF)
    if counts.max(initial=0) > units * NUMBERS_OF_UNIT or columns > MOST_COLUMNS:
        raise PackingError(
            f"weight format {layout.format.name}: rows r and r + 8 of an M-tile have {int(counts.max())} numbers in "
            f"{columns} columns, and the list has room for {units * NUMBERS_OF_UNIT}"
        )
    number = np.arange(len(there)) - np.repeat(np.cumsum(counts) - counts, counts)
    words = np.zeros((m_tiles * chunks, units, HALF, NUMBERS_OF_UNIT), np.uint32)
    value = numbers.reshape(-1)[there].astype(np.uint32) << np.uint32(16)
    of_word = (place >> 1).astype(np.uint32) | (place & 1).astype(np.uint32) * SECOND_ROW
    words[pair // HALF, number // NUMBERS_OF_UNIT, pair % HALF, number % NUMBERS_OF_UNIT] = value | of_word
    return words.reshape(m_tiles, chunks, units * HALF * NUMBERS_OF_UNIT).view(np.uint8)


def unpacked_lists(layout: MatrixLayout, lists: Bytes) -> Bits:
    """The inverse, for a whole matrix: [padded rows, padded columns]."""
    words = np.ascontiguousarray(lists).view(np.uint32)
    words = words.reshape(layout.m_tiles, layout.chunks, layout.format.list_units, HALF, NUMBERS_OF_UNIT)
    m_tile, chunk, unit, g, place = np.nonzero(words >> 16 & SIZE)
    found = words[m_tile, chunk, unit, g, place]
    row = m_tile * M_TILE_ROWS + g + np.where(found & SECOND_ROW, HALF, 0)
    column = chunk * (layout.tiles_per_chunk * layout.tile_columns) + (found & SECOND_ROW - 1)
    listed = np.zeros((layout.padded_rows, layout.padded_columns), np.uint16)
    listed[row, column] = found >> 16
    return listed
