"""bf16 weights in blocks of 16 rows by 32 columns, of which those are stored that are not zero, M-tile by M-tile.

In SparseTIR's words BSR: dense_fixed(rows / 16), sparse_variable over the blocks of an M-tile (indptr, indices),
dense_fixed(16), dense_fixed(32). A matrix is its index, see `MatrixLayout`, blocks of zeros, and the lots of each
M-tile: LOT_BLOCKS blocks each, in the order of columns, the last with fewer, or without any where an M-tile has none. A
lot begins with a line of 128 bytes: the numbers of its blocks (u16), how many there are, and the number of the block
behind the lot, or NO_BLOCK; behind it the blocks, each as a K-tile of `Bf16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.bf16 import Bf16
from cheetah.models.formats.blocks import blocks_there
from cheetah.models.formats.weight_format import PackingError, TilePart, WeightFormat
from cheetah.models.rounding import Bits, Bytes
from cheetah.plan import M_TILE_ROWS, MatrixLayout
from cheetah.plan.dealing import dealt
from cheetah.plan.formats import (
    BF16,
    LOT_BLOCKS,
    LOT_COUNT_AT,
    LOT_FOLLOWING_AT,
    LOT_LINE_BYTES,
    NO_BLOCK,
    WINDOW_BLOCKS,
    ZERO_BLOCKS,
    BlockRows,
)

LINES_OF_BLOCK = BF16.tile_bytes // LOT_LINE_BYTES
LINES_OF_LOT = 1 + LOT_BLOCKS * LINES_OF_BLOCK
ROWS_AT_ONCE = 64 * M_TILE_ROWS
"""That are packed together: what is made of them on the way takes twice their room."""
BITS = np.uint32(1) << np.arange(WINDOW_BLOCKS, dtype=np.uint32)


@dataclass(frozen=True)
class LotsOfBlocks(WeightFormat):
    """Rows are bf16 bits, with their zeros."""

    tile: BlockRows
    whole: Bf16

    def encode(self, rows: Any) -> tuple[TilePart, ...]:
        raise NotImplementedError("M-tiles differ in length: whole matrices are packed")

    def decode(self, tiles: Bytes, factors: Bytes) -> Any:
        raise NotImplementedError("M-tiles differ in length: whole matrices are unpacked")

    def pack_m_tiles(
        self,
        layout: MatrixLayout,
        m_tiles: range,
        rows: Any,
        out: Bytes,
        first_wave: int = 0,
        lists: Bytes | None = None,
    ) -> None:
        if m_tiles != range(layout.m_tiles) or out.size != layout.total_bytes:
            raise PackingError(f"matrix {layout.name!r}: {self.tile.name} is packed whole, not M-tiles {m_tiles}")
        parts = [rows[first : first + ROWS_AT_ONCE] for first in range(0, len(rows), ROWS_AT_ONCE)]
        of_parts = [blocks_of(part) for part in parts]
        there = np.concatenate(of_parts)
        out[:] = 0
        begins = self._write_index(layout, there, out)
        lines = out.reshape(-1, LOT_LINE_BYTES)
        _write_lines(there, begins, lines.view(np.uint16))
        done = 0
        for part, of_part in zip(parts, of_parts, strict=True):
            self._write_blocks(part, of_part, begins[done : done + len(of_part)], lines)
            done += len(of_part)

    def _write_index(self, layout: MatrixLayout, there: NDArray[np.bool_], out: Bytes) -> NDArray[np.int64]:
        """Gives the line where each M-tile's lots begin. PackingError where there is no room for them."""
        counts, room = there.sum(axis=1), self.tile.room(layout.m_tiles * layout.chunks)
        if counts.sum() > room:
            raise PackingError(
                f"weight format {self.tile.name}: matrix {layout.name!r} has {counts.sum()} blocks that are not zero, "
                f"and there is room for {room}"
            )
        sizes = bytes_of(counts)
        index, of_slots = _Index.of(layout, out), np.arange(layout.m_tiles)
        if layout.is_dealt:
            of_slots = np.array(dealt(sizes.tolist(), layout.blocks))
        first, taken = (layout.index_bytes + ZERO_BLOCKS * BF16.tile_bytes) // LOT_LINE_BYTES, sizes // LOT_LINE_BYTES
        index.m_tiles[:], index.slots[of_slots] = of_slots, np.arange(layout.m_tiles)
        windows = there.reshape(layout.m_tiles, layout.chunks, WINDOW_BLOCKS)[of_slots]
        begins = np.zeros(layout.m_tiles, np.int64)
        begins[of_slots] = first + np.cumsum(taken[of_slots]) - taken[of_slots]
        index.entries[:, 0], index.entries[:, 1:] = begins[of_slots], np.cumsum(windows.sum(axis=2), axis=1)
        index.masks[:] = windows @ BITS
        return begins

    def _write_blocks(
        self, rows: Bits, there: NDArray[np.bool_], begins: NDArray[np.int64], lines: NDArray[np.uint8]
    ) -> None:
        """Those of some M-tiles, which begin at these lines of the matrix."""
        m_tile, number = np.nonzero(there)
        (part,) = self.whole.encode(rows)
        blocks = np.ascontiguousarray(part.tiles).view(np.uint8).reshape(*there.shape, LINES_OF_BLOCK, LOT_LINE_BYTES)
        lines[_lines_of(begins[m_tile], _ranks(there))] = blocks[m_tile, number]

    def unpack(self, layout: MatrixLayout, packed: Bytes) -> Bits:
        index = _Index.of(layout, packed)
        there = (index.masks[index.slots][:, :, None] & BITS != 0).reshape(layout.m_tiles, -1)
        begins = index.entries[index.slots, 0].astype(np.int64)
        m_tile, number = np.nonzero(there)
        blocks = np.zeros((layout.m_tiles, layout.chunks * WINDOW_BLOCKS, BF16.tile_bytes), np.uint8)
        found = packed.reshape(-1, LOT_LINE_BYTES)[_lines_of(begins[m_tile], _ranks(there))]
        blocks[m_tile, number] = found.reshape(-1, BF16.tile_bytes)
        return self.whole.decode(blocks, packed[:0])


@dataclass(frozen=True)
class _Index:
    """See `MatrixLayout.index_bytes`: u32 [slots], [M-tiles], [slots, chunks + 1], [slots, chunks]."""

    m_tiles: NDArray[np.uint32]
    slots: NDArray[np.uint32]
    entries: NDArray[np.uint32]
    masks: NDArray[np.uint32]

    @classmethod
    def of(cls, layout: MatrixLayout, packed: Bytes) -> _Index:
        rows, chunks = layout.m_tiles, layout.chunks
        words = packed[: 4 * rows * (2 * chunks + 3)].view(np.uint32)
        entries, masks = words[2 * rows : rows * (chunks + 3)], words[rows * (chunks + 3) :]
        return cls(words[:rows], words[rows : 2 * rows], entries.reshape(rows, -1), masks.reshape(rows, -1))


def blocks_of(rows: Bits) -> NDArray[np.bool_]:
    """Which blocks are there: bool [M-tiles, blocks] of bf16 bits [M-tiles * 16, columns], whole windows."""
    return blocks_there(rows).reshape(len(rows) // M_TILE_ROWS, -1)


def lots_of(counts: Any) -> Any:
    """Of M-tiles with so many blocks."""
    return np.maximum(1, -(-counts // LOT_BLOCKS))


def bytes_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of M-tiles with so many blocks."""
    nbytes: NDArray[np.int64] = counts * BF16.tile_bytes + lots_of(counts) * LOT_LINE_BYTES
    return nbytes


def _ranks(there: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Of each block that is there, how many of its M-tile are before it."""
    before: NDArray[np.int64] = np.cumsum(there, axis=1) - 1
    return before[there]


def _write_lines(there: NDArray[np.bool_], begins: NDArray[np.int64], lines: NDArray[np.uint16]) -> None:
    """What lots begin with."""
    counts = there.sum(axis=1)
    of_lots = np.repeat(np.arange(len(there)), lots_of(counts))
    lot = np.arange(len(of_lots)) - (np.cumsum(lots_of(counts)) - lots_of(counts))[of_lots]
    here = begins[of_lots] + lot * LINES_OF_LOT
    lines[here, LOT_COUNT_AT] = np.minimum(counts[of_lots] - lot * LOT_BLOCKS, LOT_BLOCKS)
    lines[here, LOT_FOLLOWING_AT] = NO_BLOCK
    (m_tile, number), rank = np.nonzero(there), _ranks(there)
    lines[begins[m_tile] + rank // LOT_BLOCKS * LINES_OF_LOT, rank % LOT_BLOCKS] = number
    follows = (rank > 0) & (rank % LOT_BLOCKS == 0)
    before = begins[m_tile[follows]] + (rank[follows] // LOT_BLOCKS - 1) * LINES_OF_LOT
    lines[before, LOT_FOLLOWING_AT] = number[follows]


def _lines_of(begins: NDArray[np.int64], rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """The lines [blocks, 8] of blocks, each the `rank`-th of its M-tile."""
    first = begins + rank // LOT_BLOCKS * LINES_OF_LOT + 1 + rank % LOT_BLOCKS * LINES_OF_BLOCK
    return first[:, None] + np.arange(LINES_OF_BLOCK)
