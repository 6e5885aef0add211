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
        """uint8 [strips, K-tiles, tile bytes] of rows, uint16 [strips * 16, padded columns]."""

    @abstractmethod
    def decode(self, tiles: Bytes) -> Bits:
        """The inverse, for what `encode` gives: the weights that the tiles stand for, rounded to bf16."""

    @abstractmethod
    def meaning(self, weights: F32) -> F32:
        """What the kernel multiplies with where a tensor [rows, columns] has these values."""

    def pack_strips(
        self, layout: MatrixLayout, strips: range, rows: Bits, out: Bytes, first_round: int = 0
    ) -> None:
        """Pack some strips to their places in `out`, the bytes of some rounds from `first_round` on.

        rows: uint16 [strips * 16, padded_columns], C-contiguous, padding included. Other threads may pack other strips.
        """
        tiles = self.encode(rows).reshape(len(strips), layout.k_tiles, layout.format.tile_bytes)
        for places, begin, end, of_strips in chunks_of_rounds(layout, strips, out, first_round):
            places[:] = tiles[of_strips.start : of_strips.stop, begin:end].reshape(len(of_strips), -1)

    def unpack(self, layout: MatrixLayout, packed: Bytes) -> Bits:
        """uint16 [rows, columns] of a whole packed matrix."""
        tiles = np.empty((layout.strips, layout.k_tiles, layout.format.tile_bytes), np.uint8)
        for places, begin, end, strips in chunks_of_rounds(layout, range(layout.strips), packed):
            tiles[strips.start : strips.stop, begin:end] = places.reshape(len(strips), end - begin, -1)
        rows = self.decode(tiles).reshape(layout.padded_rows, layout.padded_columns)
        return np.ascontiguousarray(rows[: layout.rows, : layout.columns])


def chunks_of_rounds(
    layout: MatrixLayout, strips: range, memory: Bytes, first_round: int = 0
) -> Iterator[tuple[Bytes, int, int, range]]:
    """Where the chunks of some strips lie in `memory`, the bytes of some rounds from `first_round` on.

    Of each round and chunk: its bytes [strips, bytes] (a view), its first K-tile and the one behind its last, and which
    of the strips they are, counted from the first of them.
    """
    for round in sorted({strip // layout.blocks for strip in strips}):
        width, start = int(layout.round_width(round)), round * layout.blocks
        begin, stop = max(start, strips.start), min(start + width, strips.stop)
        position = (start - first_round * layout.blocks) * layout.strip_bytes
        for first in range(0, layout.k_tiles, layout.tiles_per_chunk):
            last = min(first + layout.tiles_per_chunk, layout.k_tiles)
            end = position + width * (last - first) * layout.format.tile_bytes
            if end > memory.size or position < 0:
                raise PackingError(f"matrix {layout.name!r}: round {round} is not in a buffer of {memory.nbytes} bytes")
            chunk = memory[position:end].reshape(width, -1)[begin - start : stop - start]
            yield chunk, first, last, range(begin - strips.start, stop - strips.start)
            position = end
