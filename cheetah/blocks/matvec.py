"""Matrix times vector on tensor cores, with the weights as the 16-row operand of `mma.m16n8k16`.

The copy lane brings the block's strips chunk by chunk; in each chunk every math warp multiplies its tile pairs and
keeps a partial sum of the strip's 16 rows; at the end of a strip one warp adds the warps' sums in fixed order and
finishes the rows. Which warp finishes rotates, so the others go on with the next strip.

The loops over strips and chunks stay (almost) rolled: unrolled, the kernel is twice as long and no faster (H200).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.machine import Machine
from cheetah.blocks.ring import Ring
from cheetah.blocks.timeline import NO_TIMELINE, Timeline
from cheetah.lang import prim, ty
from cheetah.plan import PAIR_BYTES, STRIP_ROWS, MatrixLayout


@dataclass(frozen=True, eq=False)
class Rows:
    """What a finishing warp gets of a strip: lane `l` and lane `l + 16` hold the sum of row `l % 16`.

    round counts the block's strips of this matrix from 0.
    """

    strip: ch.Expr
    round: ch.Expr
    row: ch.Expr
    lane: ch.Expr
    sum: ch.Expr


Finish = Callable[[Rows], None]


class Matvec:
    """The products of a kernel: they share the ring, the reduction buffers and the rotation of the finishing warp."""

    def __init__(self, machine: Machine, ring: Ring, weights: ch.Expr, timeline: Timeline = NO_TIMELINE) -> None:
        self.machine, self.ring, self.weights, self.timeline = machine, ring, weights, timeline
        self._start()

    @ch.inline
    def _start(self) -> None:
        with self.machine.math:
            # Two reduction buffers in turn: the finishing warp reads one while the others fill the other; the barrier
            # of the next strip lies between its reading and the next writing of the same buffer.
            turn = ch.var(ty.u32, 0)
            finisher = ch.var(ty.u32, 0)
            self.turn, self.finisher = turn, finisher

    @ch.inline
    def copy(self, layout: MatrixLayout, layer_offset: ch.Expr) -> None:
        """In the copy role: fetch the block's strips of a matrix. `layer_offset` is the layer's first byte (u64)."""
        self.ring.fills(layout.name)
        position = layout.position(self.machine.block)
        first_byte = layer_offset + layout.offset
        matrix = self.weights + first_byte
        with ch.for_(position, layout.strips, layout.blocks, unroll=1) as strip:
            round = strip // layout.blocks
            round_bytes = layout.round_address(ty.u64(round))
            width = layout.round_width(round)
            with ch.for_(layout.chunks, unroll=1) as chunk:
                chunk_bytes = layout.chunk_bytes(chunk)
                source = matrix + (round_bytes + ty.u64(layout.chunk_address(chunk, position, width)))
                with self.ring.fill(chunk_bytes) as (destination, barrier):
                    prim.bulk_copy(destination, source, chunk_bytes, barrier)

    @ch.inline
    def skip(self, layout: MatrixLayout) -> None:
        """In the math role: use up the block's chunks of a matrix that were fetched in vain."""
        with ch.for_(layout.position(self.machine.block), layout.strips, layout.blocks, unroll=1):
            with ch.for_(layout.chunks, unroll=1):
                with self.ring.use():
                    pass

    @ch.inline
    def multiply(self, layout: MatrixLayout, finish: Finish) -> None:
        """In the math role: multiply the block's strips by the vector in shared memory; `finish` gets each strip's
        rows."""
        machine = self.machine
        self.ring.uses(layout.name)
        position = layout.position(machine.block)
        with ch.for_(position, layout.strips, layout.blocks, unroll=1) as strip:
            sums = ch.array(ty.f32, 4, zero=True)
            with ch.for_(layout.chunks, unroll=2) as chunk:
                with self.ring.use() as tiles:
                    self.timeline.stamp_first("first_chunk")
                    self._multiply_chunk(layout, chunk, tiles, sums)
            self.timeline.stamp_here("last_chunk")
            self._reduce(layout, strip, sums, finish)

    @ch.inline
    def _multiply_chunk(self, layout: MatrixLayout, chunk: ch.Expr, tiles: ch.Expr, sums: Any) -> None:
        machine = self.machine
        vector = machine.region("vector", ty.u32x4)
        fragments = ch.reinterpret(ty.ptr(ty.u32x4), tiles)
        with ch.for_(machine.plan.pairs_per_warp, unroll=True) as turn:
            pair = turn * machine.plan.math_warps + machine.warp

            def multiply_pair() -> None:
                first = fragments[pair * (PAIR_BYTES // 16) + machine.lane]
                second = fragments[pair * (PAIR_BYTES // 16) + 32 + machine.lane]
                values = vector[(chunk * layout.pairs_per_chunk + pair) * 4 + machine.lane % 4]
                prim.mma_bf16(sums, first, values.x, values.y)
                prim.mma_bf16(sums, second, values.z, values.w)

            if layout.last_chunk_pairs == layout.pairs_per_chunk:
                multiply_pair()
            else:
                with ch.if_(pair < layout.chunk_pairs(chunk)):
                    multiply_pair()

    @ch.inline
    def _reduce(self, layout: MatrixLayout, strip: ch.Expr, sums: Any, finish: Finish) -> None:
        machine, warps = self.machine, self.machine.plan.math_warps
        reductions = machine.region("reductions", ty.f32) + self.turn * (warps * STRIP_ROWS)
        # Column 0 of the product: lane 4g holds rows g and g + 8. The other columns repeat it.
        with ch.if_(machine.lane % 4 == 0):
            reductions[machine.warp * STRIP_ROWS + machine.lane // 4] = sums[0]
            reductions[machine.warp * STRIP_ROWS + machine.lane // 4 + 8] = sums[2]
        machine.meet()
        with ch.if_(machine.warp == self.finisher):
            row = machine.lane % STRIP_ROWS
            half = machine.lane // STRIP_ROWS
            half_sum = ch.var(ty.f32, 0.0)
            with ch.for_(warps // 2, unroll=True) as other:
                half_sum += reductions[(half * (warps // 2) + other) * STRIP_ROWS + row]
            row_sum = half_sum + prim.shuffle_xor_f32(half_sum, STRIP_ROWS)
            finish(Rows(strip, strip // layout.blocks, row, machine.lane, row_sum))
        self.turn ^= 1
        self.finisher += 1
        with ch.if_(self.finisher == warps):
            self.finisher.set(0)
