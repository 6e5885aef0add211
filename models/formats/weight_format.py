"""A weight format in numpy: from rows of bf16 to the bytes that the kernel streams, back, and what they stand for.

Where chunks lie is `cheetah.plan.MatrixLayout`'s; a format knows the bytes of its K-tiles. Bits are uint16 patterns of
bf16. A lossy format packs the nearest that it can say; `meaning` is what the kernel then multiplies with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.rounding import F32, Bits
from cheetah.plan import MatrixLayout

Bytes = NDArray[np.uint8]


class PackingError(CheetahError):
    """A matrix or a packed buffer whose size is not the layout's."""


class WeightFormat(ABC):
    """The K-tiles of one format."""

    @abstractmethod
    def encode(self, rows: Bits) -> Bytes:
        """uint8 [M-tiles, K-tiles, tile bytes] of rows, uint16 [M-tiles * 16, padded columns]."""

    @abstractmethod
    def decode(self, tiles: Bytes) -> Bits:
        """The inverse, for what `encode` gives: the weights that the tiles stand for, rounded to bf16."""

    @abstractmethod
    def meaning(self, weights: F32) -> F32:
        """What the kernel multiplies with where a tensor [rows, columns] has these values."""

    def pack_m_tiles(self, layout: MatrixLayout, m_tiles: range, rows: Bits, out: Bytes, first_wave: int = 0) -> None:
        """Pack some M-tiles to their places in `out`, the bytes of some waves from `first_wave` on.

        rows: uint16 [M-tiles * 16, padded_columns], C-contiguous, padding included. Other threads may pack other
        M-tiles."""
        tiles = self.encode(rows).reshape(len(m_tiles), layout.k_tiles, layout.format.tile_bytes)
        for places, begin, end, of_m_tiles in chunks_of_rounds(layout, m_tiles, out, first_wave):
            places[:] = tiles[of_m_tiles.start : of_m_tiles.stop, begin:end].reshape(len(of_m_tiles), -1)

    def unpack(self, layout: MatrixLayout, packed: Bytes) -> Bits:
        """uint16 [rows, columns] of a whole packed matrix."""
        tiles = np.empty((layout.m_tiles, layout.k_tiles, layout.format.tile_bytes), np.uint8)
        for places, begin, end, m_tiles in chunks_of_rounds(layout, range(layout.m_tiles), packed):
            tiles[m_tiles.start : m_tiles.stop, begin:end] = places.reshape(len(m_tiles), end - begin, -1)
        rows = self.decode(tiles).reshape(layout.padded_rows, layout.padded_columns)
        return np.ascontiguousarray(rows[: layout.rows, : layout.columns])


def chunks_of_rounds(
    layout: MatrixLayout, m_tiles: range, memory: Bytes, first_wave: int = 0
) -> Iterator[tuple[Bytes, int, int, range]]:
    """Where the chunks of some M-tiles lie in `memory`, the bytes of some waves from `first_wave` on.

    Of each wave and chunk: its bytes [M-tiles, bytes] (a view), its first K-tile and the one behind its last, and which
    of the M-tiles they are, counted from the first of them.
    """
    for wave in sorted({m_tile // layout.blocks for m_tile in m_tiles}):
        width, start = int(layout.wave_width(wave)), wave * layout.blocks
        begin, stop = max(start, m_tiles.start), min(start + width, m_tiles.stop)
        position = (start - first_wave * layout.blocks) * layout.m_tile_bytes
        for first in range(0, layout.k_tiles, layout.tiles_per_chunk):
            last = min(first + layout.tiles_per_chunk, layout.k_tiles)
            end = position + width * (last - first) * layout.format.tile_bytes
            if end > memory.size or position < 0:
                raise PackingError(f"matrix {layout.name!r}: wave {wave} is not in a buffer of {memory.nbytes} bytes")
            chunk = memory[position:end].reshape(width, -1)[begin - start : stop - start]
            yield chunk, first, last, range(begin - m_tiles.start, stop - m_tiles.start)
            position = end
