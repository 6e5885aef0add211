"""What the loops over a matrix know of it on the device: its numbers as a record, so that products share their text."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.share import Run, Share
from cheetah.lang import ty
from cheetah.plan import MatrixLayout

MATRIX = ty.struct(
    "Matrix",
    offset=ty.u64,
    **dict.fromkeys(("m_tiles", "start", "waves", "last_wave_width", "wave_bytes"), ty.u32),
    **dict.fromkeys(("chunks", "slices", "slice_chunks", "chunk_bytes", "last_chunk_bytes"), ty.u32),
)
"""A `MatrixLayout`: where it begins in the weights; its M-tiles, of which block 0 has number `start` first; M-tiles of
its last wave, and bytes from wave to wave; chunks of an M-tile, and of a slice; bytes of a chunk, and of the last."""


def record_of(layout: MatrixLayout) -> ch.Expr:
    """The record of a matrix, called as the matrix is."""
    return ch.record(
        MATRIX,
        layout.name.upper(),
        **{
            name: getattr(layout, name) for name in ("offset", "m_tiles", "start", "waves", "last_wave_width", "chunks")
        },
        **{name: getattr(layout, name) for name in ("slices", "slice_chunks", "last_chunk_bytes")},
        wave_bytes=layout.wave_address(1),
        chunk_bytes=layout.full_chunk_bytes,
    )


def recorded(layout: MatrixLayout, record: ch.Expr, sizes: Collection[str] = tuple(MATRIX.fields)) -> Any:
    """A `MatrixLayout` of which these sizes are read from a record."""
    return RecordedMatrix(layout, record, sizes)


@dataclass(frozen=True, eq=False)
class RecordedMatrix:
    """A `MatrixLayout` of which some sizes are read from a record; what decides about the text is the layout's own."""

    layout: MatrixLayout
    record: Any
    sizes: Collection[str]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.record if name in self.sizes else self.layout, name)

    def position(self, block: ch.Expr) -> Any:
        return (block + self.record.start) % self.layout.blocks

    def wave_address(self, wave: ch.Expr, expert: ch.Value = 0) -> ch.Expr:
        return wave * ty.u64(self.record.wave_bytes)

    def wave_width(self, wave: ch.Expr) -> ch.Expr:
        return ch.select(wave + 1 == self.record.waves, self.record.last_wave_width, ty.u32(self.layout.blocks))

    def chunk_bytes(self, chunk: ch.Expr) -> ch.Expr:
        return ch.select(chunk + 1 == self.record.chunks, self.record.last_chunk_bytes, self.record.chunk_bytes)

    def chunk_address(self, chunk: ch.Expr, position: ch.Expr, width: ch.Expr) -> Any:
        return width * chunk * self.record.chunk_bytes + position * self.chunk_bytes(chunk)


@dataclass(frozen=True, eq=False)
class RecordedShare(Share):
    """The share of a block, of a `recorded` matrix; layout: the matrix itself."""

    layout: MatrixLayout

    @ch.inline
    def runs(self, position: ch.Expr) -> Iterator[Run]:
        matrix = self.matrix
        with ch.for_(matrix.slices, unroll=1, name="slice") as slice_:
            first = slice_ * matrix.slice_chunks
            end = ch.minimum(first + matrix.slice_chunks, matrix.chunks)
            for m_tile in self.m_tiles(position):
                yield Run(m_tile, position, first, end)

    def if_any(self, position: ch.Expr) -> ch.if_:
        return ch.if_(self.layout.m_tiles >= self.layout.blocks or position < self.matrix.m_tiles)
