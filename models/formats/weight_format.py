"""A weight format in numpy: from rows of a checkpoint to the bytes that the kernel streams, back, and their meaning.

Where chunks lie is `cheetah.plan.MatrixLayout`'s; a format knows the bytes of its K-tiles. What rows are is the
format's business too: bf16 takes bits (uint16), quantised formats take `QuantizedRows`. A lossy format packs the
nearest that it can say; `meaning` is what the kernel then multiplies with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.rounding import F32
from cheetah.plan import M_TILE_ROWS, MatrixLayout

Bytes = NDArray[np.uint8]


class PackingError(CheetahError):
    """A matrix or a packed buffer whose size is not the layout's."""


class WeightFormat(ABC):
    """The K-tiles of one format, and what lies behind those of an M-tile."""

    @abstractmethod
    def encode(self, rows: Any) -> Bytes:
        """uint8 [M-tiles, K-tiles, tile bytes] of rows [M-tiles * 16, columns]."""

    @abstractmethod
    def decode(self, tiles: Bytes, factors: Bytes) -> Any:
        """The inverse, for what `encode` and `row_factors` give: rows [M-tiles * 16, padded columns]."""

    @abstractmethod
    def meaning(self, weights: F32) -> F32:
        """What the kernel multiplies with where a tensor [rows, columns] has these values."""

    def row_factors(self, rows: Any) -> Bytes:
        """uint8 [M-tiles, factor bytes] of rows: what lies behind an M-tile's last K-tile."""
        return np.empty((rows.shape[0] // M_TILE_ROWS, 0), np.uint8)

    def pack_m_tiles(self, layout: MatrixLayout, m_tiles: range, rows: Any, out: Bytes, first_wave: int = 0) -> None:
        """Pack some M-tiles to their places in `out`, the bytes of some waves from `first_wave` on.

        rows: [M-tiles * 16, columns], C-contiguous; of bits the padding is included. Other threads may pack other
        M-tiles."""
        tiles, factors = self.encode(rows), self.row_factors(rows)
        for places, begin, end, of_m_tiles in chunks_of_rounds(layout, m_tiles, out, first_wave):
            taken = slice(of_m_tiles.start, of_m_tiles.stop)
            codes = tiles[taken, begin:end].reshape(len(of_m_tiles), -1)
            places[:, : codes.shape[1]] = codes
            if end == layout.k_tiles:
                places[:, codes.shape[1] :] = factors[taken]

    def unpack(self, layout: MatrixLayout, packed: Bytes) -> Any:
        """Rows [padded rows, padded columns] of a whole packed matrix."""
        tiles = np.empty((layout.m_tiles, layout.k_tiles, layout.format.tile_bytes), np.uint8)
        factors = np.empty((layout.m_tiles, layout.format.factor_bytes), np.uint8)
        for places, begin, end, m_tiles in chunks_of_rounds(layout, range(layout.m_tiles), packed):
            taken, size = slice(m_tiles.start, m_tiles.stop), (end - begin) * layout.format.tile_bytes
            tiles[taken, begin:end] = places[:, :size].reshape(len(m_tiles), end - begin, -1)
            if end == layout.k_tiles:
                factors[taken] = places[:, size:]
        return self.decode(tiles, factors)


def chunks_of_rounds(
    layout: MatrixLayout, m_tiles: range, memory: Bytes, first_wave: int = 0
) -> Iterator[tuple[Bytes, int, int, range]]:
    """Where the chunks of some M-tiles lie in `memory`, the bytes of some waves from `first_wave` on.

    Of each wave and chunk: its bytes [M-tiles, bytes] (a view; in the last chunk they end in the factors of rows), its
    first K-tile and the one behind its last, and which of the M-tiles they are, counted from the first of them.
    """
    for wave in sorted({m_tile // layout.blocks for m_tile in m_tiles}):
        width, start = int(layout.wave_width(wave)), wave * layout.blocks
        begin, stop = max(start, m_tiles.start), min(start + width, m_tiles.stop)
        position = (start - first_wave * layout.blocks) * layout.m_tile_bytes
        for first in range(0, layout.k_tiles, layout.tiles_per_chunk):
            last = min(first + layout.tiles_per_chunk, layout.k_tiles)
            end = position + width * int(layout.chunk_bytes(first // layout.tiles_per_chunk))
            if end > memory.size or position < 0:
                raise PackingError(f"matrix {layout.name!r}: wave {wave} is not in a buffer of {memory.nbytes} bytes")
            chunk = memory[position:end].reshape(width, -1)[begin - start : stop - start]
            yield chunk, first, last, range(begin - m_tiles.start, stop - m_tiles.start)
            position = end
