"""The norm behind a product: its rows go through an RMSNorm of their own before they are added to the residual.

The rows stay with the blocks that own them, in f32; what they exchange are the sums of their squares, a word an M-tile
and token. A phase of its own then does with them what the product's epilogue does where there is no such norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cheetah import lang as ch
from cheetah.blocks.linear.adding import Adding
from cheetah.blocks.linear.epilogue import NormWeights, PublishedRows, place_of
from cheetah.blocks.linear.interface import ColumnScale, Epilogue, Rows
from cheetah.blocks.linear.rms import PublishedSquares
from cheetah.blocks.machine import Machine
from cheetah.lang import ty
from cheetah.plan import MatrixLayout


@dataclass(frozen=True, eq=False)
class KeepRows(PublishedRows):
    """The rows to the region `made`, where only this block reads them, and their squares published."""

    machine: Machine
    squares: PublishedSquares

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.squares.published.name,)

    @ch.inline
    def __call__(self, rows: Rows) -> None:
        place = place_of(self.machine, rows)
        value = ch.const(ty.f32, rows.sum(), name="value")
        with ch.if_(rows.is_own):
            self.machine.region("made", ty.f32)[place] = value
        self.squares.publish(rows, value, value)


def finish_kept_rows(
    adding: Adding,
    layout: MatrixLayout,
    scale: ColumnScale,
    norm: NormWeights,
    epilogue: Epilogue,
    region: str = "made",
) -> None:
    """In the consumer role, in the phase behind the product: a warp takes an M-tile's rows of two columns, times the
    scale, which waits for the squares of all blocks, and the norm's weights, to an epilogue. region: where they lie."""
    machine = adding.machine
    position, pairs = layout.position(machine.block), machine.plan.column_pairs
    with ch.for_(machine.warp, layout.waves * pairs, machine.plan.consumer_warps, unroll=1, name="turn") as turn:
        m_tile = ch.const(ty.u32, position + turn // pairs * layout.blocks, name="m_tile")
        with ch.if_(m_tile < layout.m_tiles):
            column = ch.const(ty.u32, adding.column_of_pair(turn % pairs), name="column")
            rows = adding.rows(layout, m_tile, column, 0, lambda: 0.0)
            made = ch.const(ty.f32, machine.region(region, ty.f32)[place_of(machine, rows)], name="made")
            weight = ch.const(ty.f32, norm.of(rows), name="weight_behind")
            epilogue(replace(rows, sum=lambda: made * scale.of(column, scale.arguments) * weight))
