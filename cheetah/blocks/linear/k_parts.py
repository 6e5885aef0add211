"""An M-tile that several blocks share, each a part of its columns (`cheetah.plan.k_parts`).

The first of them, which has the M-tile's rows of the residual, adds up the parts in their order; the others publish
their sums, a word a row, to it alone. Who multiplies a part of the next layer has waited, through the vectors between,
for what the first published behind reading the last one's: so no part is overwritten before it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.exchange import Published
from cheetah.blocks.linear.interface import Epilogue, Rows
from cheetah.blocks.linear.parts import Part
from cheetah.blocks.linear.share import OwnTile, Run, Share
from cheetah.lang import prim, ty

WORDS = 4
"""Of a unit of an exchange."""


@dataclass(frozen=True, eq=False)
class PartsShare(Share):
    """A matrix with `parts` blocks for each M-tile: those with the first part stand first."""

    parts: int

    @property
    def about_fetch(self) -> str:
        return f"The block's part of an M-tile of {self.matrix.name}, chunk by chunk, into the stages of the ring."

    def if_any(self, position: ch.Expr) -> ch.if_:
        return ch.if_(position < self.matrix.m_tiles * self.parts)

    def part(self, position: ch.Expr) -> ch.Expr:
        """Which part of its M-tile the block at a position has."""
        part: ch.Expr = position // self.matrix.m_tiles
        return part

    def _chunks(self, position: ch.Expr) -> tuple[ch.Expr, ch.Expr]:
        """[first, end) of the block's part."""
        part, chunks = self.part(position), self.matrix.chunks
        return part * chunks // self.parts, (part + 1) * chunks // self.parts

    @ch.inline
    def m_tiles(self, position: ch.Expr) -> Iterator[ch.Expr]:
        m_tile = ch.const(position.type, position % self.matrix.m_tiles, name="m_tile")
        yield m_tile

    @ch.inline
    def runs(self, position: ch.Expr) -> Iterator[Run]:
        with self.if_any(position):
            first, end = self._chunks(position)
            for m_tile in self.m_tiles(position):
                yield Run(m_tile, m_tile, first, end)

    def strips(self, position: ch.Expr) -> Iterator[Sequence[OwnTile]]:
        yield [OwnTile(True, True, False)]

    def part_of(self, whole: Part) -> Part:
        """Of an input that is there whole, what the block's chunks are multiplied with."""
        first, end = self._chunks(self.position)
        return replace(whole, first=first, end=end, offset=first)


@dataclass(frozen=True, eq=False)
class AddedParts:
    """An epilogue of rows of which the block has a part: told of the sums of all parts, in the first part's block.
    into: the words of the others, f32 [part - 1][M-tile][row]."""

    share: PartsShare
    into: Published
    epilogue: Epilogue

    @ch.inline
    def __call__(self, rows: Rows) -> None:
        position = self.share.position
        part = ch.const(position.type, self.share.part(position), name="part")
        first = ch.const(position.type, position % self.share.matrix.m_tiles * rows.count, name="first_row")
        with ch.if_(part == 0):
            self.epilogue(replace(rows, sum=lambda: self._total(rows, first)))
        with ch.else_():
            made = ch.const(ty.f32, rows.sum(), name="made")
            with ch.if_(rows.is_own):
                self.into.publish(self._word(part, first) + rows.row, prim.float_bits(made))

    def _word(self, part: Any, first: ch.Expr) -> Any:
        matrix = self.share.matrix
        return (part - 1) * (matrix.m_tiles * matrix.tile_rows) + first

    def _total(self, rows: Rows, first: ch.Expr) -> ch.Expr:
        """The row's sum by all columns: each lane asks for the four words among which its row's is."""
        total = ch.var(ty.f32, rows.sum(), name="total")
        exchange, name, epoch = self.into.exchange, self.into.name, self.into.epoch
        for part in range(1, self.share.parts):
            unit = (self._word(part, first) + rows.row) // WORDS
            words = exchange.read4(name, unit, epoch)
            four = ch.const(words.type, words, name="words")
            word = four.w
            for index, member in enumerate("xyz"):
                word = ch.select(rows.row % WORDS == index, getattr(four, member), word)
            total += prim.bits_float(word)
        return total
