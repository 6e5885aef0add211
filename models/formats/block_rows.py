"""bf16 weights in blocks of 16 rows by 32 columns, of which those are stored that are not zero, M-tile by M-tile.

In SparseTIR's words BSR: dense_fixed(rows / 16), sparse_variable over windows of 32 blocks (indptr), dense_fixed(16),
dense_fixed(32); a window that has none is a line of zeros, and nothing of its blocks is read (DBSR). A matrix is its
index, see `MatrixLayout`, blocks of zeros, and the windows. A window is a line of 128 bytes, which has a word with a
bit for each block that is there, then their numbers, a byte each, and zeros; behind it the blocks, each as a K-tile of
`Bf16`, in the order of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.bf16 import Bf16
from cheetah.models.formats.blocks import blocks_there
from cheetah.models.formats.weight_format import PackingError, TilePart, WeightFormat
from cheetah.models.rounding import F32, Bits, Bytes
from cheetah.plan import M_TILE_ROWS, MatrixLayout
from cheetah.plan.formats import BF16, WINDOW_BLOCKS, WINDOW_LINE_BYTES, ZERO_BLOCKS, BlockRows

LINES_OF_BLOCK = BF16.tile_bytes // WINDOW_LINE_BYTES
NUMBERS_AT = 4
ROWS_AT_ONCE = 64 * M_TILE_ROWS
"""That are packed together: what is made of them on the way takes twice their room."""
BITS = np.uint32(1) << np.arange(WINDOW_BLOCKS, dtype=np.uint32)


@dataclass(frozen=True)
class WindowsOfBlocks(WeightFormat):
    """Rows are bf16 bits, with their zeros."""

    tile: BlockRows
    whole: Bf16

    def encode(self, rows: Any) -> tuple[TilePart, ...]:
        raise NotImplementedError("windows differ in length: whole matrices are packed")

    def decode(self, tiles: Bytes, factors: Bytes) -> Any:
        raise NotImplementedError("windows differ in length: whole matrices are unpacked")

    def meaning(self, weights: F32) -> F32:
        return weights

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
        of_parts = [windows_of(part) for part in parts]
        starts = self._starts(layout, np.concatenate([there.sum(axis=1) for there in of_parts]))
        out[:] = 0
        out[: 4 * len(starts)] = starts.view(np.uint8)
        lines, done = out.reshape(-1, WINDOW_LINE_BYTES), 0
        for part, there in zip(parts, of_parts, strict=True):
            self._pack_windows(part, there, starts[done : done + len(there)], lines)
            done += len(there)

    def _pack_windows(
        self, rows: Bits, there: NDArray[np.bool_], starts: NDArray[np.uint32], lines: NDArray[np.uint8]
    ) -> None:
        """Some M-tiles, whose windows begin at these lines of the matrix."""
        window, number = np.nonzero(there)
        rank = (np.cumsum(there, axis=1) - 1)[window, number]
        lines[starts, :NUMBERS_AT] = (there @ BITS).astype(np.uint32).view(np.uint8).reshape(-1, NUMBERS_AT)
        lines[starts[window], NUMBERS_AT + rank] = number
        (part,) = self.whole.encode(rows)
        blocks = np.ascontiguousarray(part.tiles).view(np.uint8).reshape(-1, LINES_OF_BLOCK, WINDOW_LINE_BYTES)
        lines[_lines_of(starts[window], rank)] = blocks[window * WINDOW_BLOCKS + number]

    def _starts(self, layout: MatrixLayout, counts: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Line of the matrix where each window begins, and where the last ends. PackingError where there is no room."""
        room = self.tile.room(len(counts))
        if counts.max(initial=0) > self.tile.most:
            m_tile, chunk = divmod(int(np.argmax(counts)), layout.chunks)
            first = M_TILE_ROWS * m_tile
            raise PackingError(
                f"weight format {self.tile.name}: columns {chunk * self.tile.columns} and the {self.tile.columns - 1} "
                f"behind of rows {first} to {first + 15} have {counts.max()} blocks that are not zero"
            )
        if counts.sum() > room:
            raise PackingError(
                f"weight format {self.tile.name}: matrix {layout.name!r} has {counts.sum()} blocks that are not zero, "
                f"and there is room for {room}"
            )
        first = (layout.index_bytes + ZERO_BLOCKS * BF16.tile_bytes) // WINDOW_LINE_BYTES
        return (first + np.append(0, np.cumsum(1 + counts * LINES_OF_BLOCK))).astype(np.uint32)

    def unpack(self, layout: MatrixLayout, packed: Bytes) -> Bits:
        starts = packed[: 4 * (layout.m_tiles * layout.chunks)].view(np.uint32)
        lines = packed.reshape(-1, WINDOW_LINE_BYTES)
        masks = np.ascontiguousarray(lines[starts, :NUMBERS_AT]).view(np.uint32)
        there = masks & BITS != 0
        window, number = np.nonzero(there)
        rank = (np.cumsum(there, axis=1) - 1)[window, number]
        blocks = np.zeros((layout.m_tiles, layout.chunks * WINDOW_BLOCKS, BF16.tile_bytes), np.uint8)
        found = lines[_lines_of(starts[window], rank)].reshape(-1, BF16.tile_bytes)
        blocks.reshape(-1, BF16.tile_bytes)[window * WINDOW_BLOCKS + number] = found
        return self.whole.decode(blocks, packed[:0])


def windows_of(rows: Bits) -> NDArray[np.bool_]:
    """Which blocks are there: bool [M-tiles * windows, 32] of bf16 bits [M-tiles * 16, columns], whole windows."""
    return blocks_there(rows).reshape(-1, WINDOW_BLOCKS)


def _lines_of(starts: Any, rank: Any) -> Any:
    """The lines [blocks, 8] of blocks, each the `rank`-th of its window."""
    first = starts.astype(np.int64) + 1 + rank * LINES_OF_BLOCK
    return first[:, None] + np.arange(LINES_OF_BLOCK)
