"""A weight format in numpy: from rows of a checkpoint to the bytes that the kernel streams, back, and their meaning.

Where chunks lie is `cheetah.plan.MatrixLayout`'s; a format knows the bytes of its K-tiles. What rows are is the
format's business too: bf16 takes bits (uint16), quantised formats take `QuantizedRows`. A lossy format packs the
nearest that it can say; `meaning` is what the kernel then multiplies with.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.rounding import F32, Bytes
from cheetah.models.scratch import scratch
from cheetah.plan import M_TILE_ROWS, MatrixLayout

UNIT = np.dtype(np.complex128)
"""16 bytes, the A fragment of one lane: numpy copies them whole, whatever they are."""


class PackingError(CheetahError):
    """A matrix or a packed buffer whose size is not the layout's."""


class WeightFormat(ABC):
    """The K-tiles of one format, and what lies behind those of an M-tile."""

    @abstractmethod
    def encode(self, rows: Any) -> tuple[TilePart, ...]:
        """The K-tiles of rows [M-tiles * 16, columns], in parts that have every byte of a tile once. They may lie in
        memory of this thread that its next call overwrites."""

    @abstractmethod
    def decode(self, tiles: Bytes, factors: Bytes) -> Any:
        """The inverse, for tiles [M-tiles, K-tiles, tile bytes] and `row_factors`: rows [M-tiles * 16, padded
        columns]."""

    def meaning(self, weights: F32) -> F32:
        """What the kernel multiplies with where a tensor [rows, columns] has these values: of a format that loses
        nothing the same."""
        return weights

    def encode_narrow(self, rows: Any) -> tuple[TilePart, ...]:
        """As `encode`, of rows [narrow M-tiles * 8, columns]. Only for formats that `MatrixLayout` lets have those."""
        raise NotImplementedError("this weight format has no narrow M-tiles")

    def decode_narrow(self, tiles: Bytes) -> Any:
        """The inverse."""
        raise NotImplementedError("this weight format has no narrow M-tiles")

    def row_factors(self, rows: Any) -> Bytes:
        """uint8 [M-tiles, factor bytes] of rows: what lies behind an M-tile's last K-tile."""
        return np.empty((rows.shape[0] // M_TILE_ROWS, 0), np.uint8)

    # -- codes one by one, for who packs them otherwise

    @property
    def code_bits(self) -> int:
        """4 or 8: a weight of 16 bits is two codes. 0: only the host packs the format, by `encode`."""
        return 0

    @property
    def code_columns(self) -> int:
        """Codes of a row of a K-tile."""
        return 0

    @property
    def code_bytes(self) -> int:
        """Bytes of a K-tile's codes, with which it begins."""
        return M_TILE_ROWS * self.code_columns * self.code_bits // 8

    def rows_of_codes(self, codes: Bytes) -> Any:
        """Rows that `encode` takes, of codes uint8 [16, code_columns], of a format that has some."""
        raise NotImplementedError(type(self).__name__)

    def code_order(self) -> NDArray[np.uint32]:
        """Where in a K-tile of 16 rows each of its codes belongs, in the order in which they lie in memory: the row
        times 2^16, plus the column. Found by packing the numbers of codes, a digit at a time."""
        numbers = np.arange(M_TILE_ROWS * self.code_columns, dtype=np.uint32).reshape(M_TILE_ROWS, -1)
        order = np.zeros(numbers.size, np.uint32)
        for digit in range(0, numbers.size.bit_length(), self.code_bits):
            digits = (numbers >> digit & np.uint32((1 << self.code_bits) - 1)).astype(np.uint8)
            tiles = np.ascontiguousarray(self.encode(self.rows_of_codes(digits))[0].tiles).reshape(-1).view(np.uint8)
            found = np.stack([tiles & 15, tiles >> 4], -1).reshape(-1) if self.code_bits == 4 else tiles
            order |= found.astype(np.uint32) << np.uint32(digit)
        rows, columns = np.divmod(order, np.uint32(self.code_columns))
        return rows << np.uint32(16) | columns

    def pack_m_tiles(
        self,
        layout: MatrixLayout,
        m_tiles: range,
        rows: Any,
        out: Bytes,
        first_wave: int = 0,
        lists: Bytes | None = None,
    ) -> None:
        """Pack some M-tiles to their places in `out`, the bytes of some waves from `first_wave` on.

        rows: [M-tiles * 16 (8 of narrow ones), columns], C-contiguous; of bits the padding is included. lists: uint8
        [M-tiles, chunks, bytes], what lies behind each chunk. Other threads may pack other M-tiles."""
        # Few and large copies: numpy lets go of Python's lock for each, and many threads wait for it behind each.
        parts = self.encode_narrow(rows) if layout.is_narrow else self.encode(rows)
        factors = self.row_factors(rows) if layout.format.factor_bytes else None
        for places in places_of_waves(layout, m_tiles, out, first_wave):
            for part in parts:
                taken, split = part.tiles[places.m_tiles, places.k_tiles], places.tiles.shape[:3]
                of_part = places.tiles[..., part.begin : part.begin + part.nbytes].view(taken.dtype)
                of_part.reshape(*split, *taken.shape[2:])[:] = taken.reshape(*split, *taken.shape[2:])
            if places.factors is not None and factors is not None:
                places.factors[:, : factors.shape[1]] = factors[places.m_tiles]
                places.factors[:, factors.shape[1] :] = 0
            if lists is not None:
                places.lists[:] = lists[places.m_tiles, places.chunks]

    def unpack(self, layout: MatrixLayout, packed: Bytes) -> Any:
        """Rows [padded rows, padded columns] of a whole packed matrix."""
        return self.unpack_parts(layout, packed)[0]

    def unpack_parts(self, layout: MatrixLayout, packed: Bytes) -> tuple[Any, Bytes]:
        """The same, and what lies behind the chunks: uint8 [M-tiles, chunks, bytes]."""
        tiles = np.empty((layout.m_tiles, layout.k_tiles, layout.format.tile_bytes), np.uint8)
        factors = np.empty((layout.m_tiles, layout.factor_bytes), np.uint8)
        lists = np.empty((layout.m_tiles, layout.chunks, layout.format.list_bytes), np.uint8)
        for places in places_of_waves(layout, range(layout.m_tiles), packed):
            found = places.tiles.reshape(len(places.tiles), -1, layout.format.tile_bytes)
            tiles[places.m_tiles, places.k_tiles] = found
            if places.factors is not None:
                factors[places.m_tiles] = places.factors
            lists[places.m_tiles, places.chunks] = places.lists
        return self.decode_narrow(tiles) if layout.is_narrow else self.decode(tiles, factors), lists


@dataclass(frozen=True)
class TilePart:
    """Bytes of K-tiles from byte `begin` of a tile on: [M-tiles, K-tiles, ...] of any dtype, in any order in memory."""

    begin: int
    tiles: NDArray[Any]

    @property
    def nbytes(self) -> int:
        """Of a tile."""
        return math.prod(self.tiles.shape[2:]) * self.tiles.itemsize


def units_of_lanes(words: NDArray[np.uint32]) -> NDArray[np.complex128]:
    """The 16 bytes that a lane reads at a time: two neighbouring words of row g, each before that of row g + 8.

    words: [M-tiles * 16, words]. Gives [M-tiles, g, words / 2], in memory of this thread that its next call overwrites.
    """
    return units_of_halves(words.reshape(-1, 2, M_TILE_ROWS // 2, words.shape[1]))


def units_of_halves(halves: NDArray[np.uint32]) -> NDArray[np.complex128]:
    """The same of [M-tiles, 2, g, ...]: the words of rows g, and those that lie below them."""
    pairs = scratch("words of rows g and g + 8", (len(halves), *halves.shape[2:], 2), np.uint32)
    for half in range(2):  # both at once would be copied two words at a time
        pairs[..., half] = halves[:, half]
    return pairs.reshape(*pairs.shape[:2], math.prod(pairs.shape[2:])).view(UNIT)


@dataclass(frozen=True)
class Places:
    """Where some chunks of some M-tiles lie: a view, uint8 [M-tiles, chunks, K-tiles of a chunk, tile bytes].

    m_tiles, k_tiles, chunks: which they are, counted from the first of those asked for. factors: uint8 [M-tiles,
    bytes], with the last chunk. lists: uint8 [M-tiles, chunks, bytes].
    """

    tiles: Bytes
    factors: Bytes | None
    lists: Bytes
    m_tiles: slice
    k_tiles: slice
    chunks: slice


def places_of_waves(layout: MatrixLayout, m_tiles: range, memory: Bytes, first_wave: int = 0) -> Iterator[Places]:
    """Of some M-tiles their places in `memory`, the bytes of some waves from `first_wave` on: of each wave those of all
    chunks but the last together, then those of the last."""
    of_full = layout.tiles_per_chunk * (layout.chunks - 1)
    for wave in sorted({m_tile // layout.blocks for m_tile in m_tiles}):
        width, start = int(layout.wave_width(wave)), wave * layout.blocks
        begin, stop = max(start, m_tiles.start), min(start + width, m_tiles.stop)
        first = (start - first_wave * layout.blocks) * layout.m_tile_bytes
        of_wave = memory[max(first, 0) : first + width * layout.m_tile_bytes]
        if first < 0 or of_wave.size != width * layout.m_tile_bytes:
            raise PackingError(f"matrix {layout.name!r}: wave {wave} is not in a buffer of {memory.nbytes} bytes")
        own, taken = slice(begin - start, stop - start), slice(begin - m_tiles.start, stop - m_tiles.start)
        before, tile_bytes = layout.chunks - 1, layout.format.tile_bytes
        full, last = np.split(of_wave, [width * before * layout.full_chunk_bytes])
        if before:
            chunks = full.reshape(before, width, -1)[:, own].transpose(1, 0, 2)
            tiles, lists = chunks[..., : layout.stage_bytes], chunks[..., layout.stage_bytes :]
            tiles = tiles.reshape(*tiles.shape[:2], layout.tiles_per_chunk, tile_bytes)
            yield Places(tiles, None, lists, taken, slice(0, of_full), slice(0, before))
        ends, size = last.reshape(width, -1)[own], layout.last_chunk_tiles * tile_bytes
        tiles = ends[:, :size].reshape(len(ends), 1, layout.last_chunk_tiles, -1)
        factors, lists = np.split(ends[:, size:], [layout.factor_bytes], axis=1)
        yield Places(
            tiles, factors, lists[:, None], taken, slice(of_full, layout.k_tiles), slice(before, layout.chunks)
        )
