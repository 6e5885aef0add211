"""Which M-tiles of a matrix a block has, and in which order: what all three roles must agree on.

The producer lane copies the block's M-tiles chunk by chunk, the consumer warps multiply them, adding warps finish them.
Each role has a loop of its own over the same M-tiles in the same order; the three are here, side by side. Whatever the
loops know of a matrix they ask of its `Share`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cheetah import lang as ch
from cheetah.blocks.linear.parts import Part
from cheetah.blocks.machine import Machine
from cheetah.plan import MatrixLayout


@dataclass(frozen=True, eq=False)
class Run:
    """Chunks [first, end) of an M-tile, which the producer lane copies one after another. position: of the M-tile in
    its wave. expert: of whose matrix it is, where there are several."""

    m_tile: ch.Expr
    position: ch.Expr
    first: ch.Value
    end: ch.Value
    expert: ch.Value = 0


@dataclass(frozen=True, eq=False)
class OwnTile:
    """An M-tile of a block. exists: whether the block has it. is_first, is_last: whether it is the block's first and
    last one by the present part of the input; the last is asked for where it pays to know."""

    exists: ch.Value
    is_first: ch.Value
    is_last: ch.Value


@dataclass(frozen=True, eq=False)
class Share:
    """A matrix of which the block at a position has every M-tile that many blocks further, part by part of the input
    where that is sliced."""

    machine: Machine
    matrix: MatrixLayout

    @property
    def about_fetch(self) -> str:
        return f"The block's M-tiles of {self.matrix.name}, chunk by chunk, into the stages of the ring."

    @property
    def about_finish(self) -> str:
        return f"The block's M-tiles of {self.matrix.name}: the warps' sums added up, the rows finished."

    @property
    def position(self) -> ch.Expr:
        """Where this block stands in every wave."""
        position: ch.Expr = self.matrix.position(self.machine.block)
        return position

    def begin(self, role: ch.Role) -> None:
        """Before the loop of the producer or the adder role: until it is known what there is."""

    def end(self, role: ch.Role) -> None:
        """Behind that loop."""

    def if_any(self, position: ch.Expr) -> ch.if_:
        """Whether this block has M-tiles of the matrix."""
        return ch.if_(self.matrix.m_tiles >= self.matrix.blocks or position < self.matrix.m_tiles)

    @ch.inline
    def m_tiles(self, position: ch.Expr) -> Iterator[ch.Expr]:
        """In any role: the numbers of the block's M-tiles, in a loop of the device."""
        with ch.for_(position, self.matrix.m_tiles, self.matrix.blocks, unroll=1) as m_tile:
            yield m_tile

    @ch.inline
    def runs(self, position: ch.Expr) -> Iterator[Run]:
        """In the producer role: what is copied, in order."""
        matrix = self.matrix
        if matrix.slices == 1:
            for m_tile in self.m_tiles(position):
                yield Run(m_tile, position, 0, matrix.chunks)
            return
        with ch.for_(matrix.slices, unroll=1, name="slice") as slice_:
            first = slice_ * matrix.slice_chunks
            end = ch.minimum(first + matrix.slice_chunks, matrix.chunks)
            for m_tile in self.m_tiles(position):
                yield Run(m_tile, position, first, end)

    @property
    def sums_wait(self) -> bool:
        """Whether the sums of all the block's M-tiles are in registers together, from part to part of the input."""
        return self.matrix.slices > 1

    @property
    def is_of_several(self) -> bool:
        """Whether each part of the input is multiplied by a matrix of its own, whose products are then added up."""
        return False

    def strips(self, position: ch.Expr) -> Iterator[Sequence[OwnTile]]:
        """In the consumer role: the M-tiles whose sums are in registers together. One after another, in a loop of the
        device; or all at once."""
        matrix = self.matrix
        if self.sums_wait:
            yield [self._of_wave(position, wave) for wave in range(matrix.waves)]
            return
        for m_tile in self.m_tiles(position):
            is_last = matrix.waves > 1 and m_tile + matrix.blocks >= matrix.m_tiles
            yield [OwnTile(True, m_tile < matrix.blocks, is_last)]

    def part_of(self, part: Part) -> Part:
        """In the consumer role: what of a part of the input the block multiplies with."""
        return part

    def _of_wave(self, position: ch.Expr, wave: int) -> OwnTile:
        """Of a block that has some: it surely has one in all waves but the last."""
        matrix = self.matrix
        is_sure = matrix.wave_width(wave) == matrix.blocks or wave == 0
        exists = is_sure or position + wave * matrix.blocks < matrix.m_tiles
        return OwnTile(exists, wave == 0, wave == matrix.waves - 1 > 0)
