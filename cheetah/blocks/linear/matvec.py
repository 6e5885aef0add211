"""Matrix times vectors on tensor cores: the weights are the 16-row operand of `mma.m16n8k16`, tokens its 8 columns.

The copy lane brings the block's strips chunk by chunk; in each chunk every math warp multiplies its tile pairs and
keeps partial sums of the strip's 16 rows; at the end of a strip the warps' sums are added in fixed order, for each
token by one warp, which finishes the rows. Which warps finish rotates, so the others go on with the next strip.

Where the vectors of several tokens do not fit into shared memory whole, the matrix is multiplied slice by slice: all
the block's strips by the first part of the vectors, then by the next, with the sums of all its strips in registers. The
parts are waited for one by one, so the first is multiplied before the last one exists.

The loops over strips and chunks stay (almost) rolled: unrolled, the kernel is twice as long and no faster (H200).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import UNIT, Columns
from cheetah.blocks.linear.formats import fragments_of
from cheetah.blocks.linear.fragments import Activations
from cheetah.blocks.linear.interface import Epilogue, Linear, Prologue, Rows
from cheetah.blocks.ring import Ring, Stage
from cheetah.blocks.timeline import NO_TIMELINE, Timeline
from cheetah.lang import prim, ty
from cheetah.plan import STRIP_ROWS, MatrixLayout
from cheetah.plan.plan import COLUMNS


class Matvec(Linear):
    """The products of a kernel: they share the ring, the reduction buffers and the rotation of the finishing warps."""

    def __init__(self, columns: Columns, ring: Ring, weights: ch.Expr, timeline: Timeline = NO_TIMELINE) -> None:
        self.machine, self.columns, self.ring = columns.machine, columns, ring
        self.weights, self.timeline = weights, timeline
        self.layer_offset: ch.Expr = ty.u64(0)
        self._start()

    @ch.inline
    def begin_layer(self, layer: ch.Expr, layer_stride: int) -> None:
        """In the copy role: the products that follow are of this layer, `layer_stride` bytes after the one before."""
        layer_offset = ty.u64(layer) * layer_stride
        self.layer_offset = layer_offset

    def end_layers(self) -> None:
        """The products that follow belong to no layer."""
        self.layer_offset = ty.u64(0)

    def __call__(
        self, matrix: MatrixLayout, prologue: Prologue, epilogue: Epilogue, when: ch.Expr | None = None
    ) -> None:
        with self.machine.copy, ch.if_(when) if when is not None else nullcontext():
            self.copy(matrix)
        with self.machine.math:
            prologue.prepare()
            with ch.if_(when) if when is not None else nullcontext():
                self.multiply(matrix, prologue, epilogue)
                self.timeline.stamp_here("done")

    @property
    def _finishers(self) -> int:
        """Warps that finish a strip together: one a column, if there are so many."""
        return min(self.columns.limit, self.machine.plan.math_warps)

    @property
    def slots(self) -> int:
        """Columns that a finishing warp has."""
        return self.columns.limit // self._finishers

    def column_of_warp(self, slot: int) -> Any:
        """The column that this warp finishes."""
        return self.machine.warp % self._finishers + slot * self._finishers

    @ch.inline
    def _start(self) -> None:
        with self.machine.math:
            # Two reduction buffers in turn: the finishing warps read one while the others fill the other; the barrier
            # of the next strip lies between their reading and the next writing of the same buffer.
            turn = ch.var(ty.u32, 0)
            finisher = ch.var(ty.u32, 0)
            self.turn, self.finisher = turn, finisher

    @ch.inline
    def copy(self, layout: MatrixLayout) -> None:
        """In the copy role: fetch the block's strips of a matrix of the present layer."""
        self.ring.fills(layout.name)
        position = layout.position(self.machine.block)
        first_byte = self.layer_offset + layout.offset
        matrix = self.weights + first_byte
        if layout.slices == 1:
            self._copy_chunks(layout, matrix, position, 0, layout.chunks)
            return
        with ch.for_(layout.slices, unroll=1, name="slice") as slice_:
            first = slice_ * layout.slice_chunks
            end = ch.minimum(first + layout.slice_chunks, layout.chunks)
            self._copy_chunks(layout, matrix, position, first, end)

    @ch.function
    def _copy_chunks(
        self, layout: MatrixLayout, matrix: ch.Expr, position: ch.Expr, first: ch.Value, end: ch.Value
    ) -> None:
        with ch.for_(position, layout.strips, layout.blocks, unroll=1) as strip:
            round = strip // layout.blocks
            round_bytes = layout.round_address(ty.u64(round))
            width = layout.round_width(round)
            with ch.for_(first, end, unroll=1) as chunk:
                chunk_bytes = layout.chunk_bytes(chunk)
                source = matrix + (round_bytes + ty.u64(layout.chunk_address(chunk, position, width)))
                with self.ring.fill(chunk_bytes) as (destination, barrier):
                    prim.bulk_copy(destination, source, chunk_bytes, barrier)

    @ch.function
    def skip(self, layout: MatrixLayout) -> None:
        """In the math role: use up the block's chunks of a matrix that were fetched in vain."""
        with ch.for_(layout.position(self.machine.block), layout.strips, layout.blocks, unroll=1):
            with ch.for_(layout.chunks, unroll=1):
                self.ring.discard()

    @ch.inline
    def multiply(self, layout: MatrixLayout, prologue: Prologue, epilogue: Epilogue) -> None:
        """In the math role: multiply the block's strips by the vectors that the prologue brings.

        A block without a strip loads nothing and waits for nobody.
        """
        machine = self.machine
        self.ring.uses(layout.name)
        position = layout.position(machine.block)
        with ch.if_(position < layout.strips):
            if layout.slices == 1:
                self._multiply_whole(layout, position, prologue, epilogue)
            else:
                self._multiply_sliced(layout, position, prologue, epilogue)

    @ch.inline
    def _multiply_whole(self, layout: MatrixLayout, position: ch.Expr, prologue: Prologue, epilogue: Epilogue) -> None:
        self._load(layout, prologue, 0)
        with ch.for_(position, layout.strips, layout.blocks, unroll=1) as strip:
            sums = ch.array(ty.f32, self.columns.tiles, 4, zero=True)
            with ch.for_(layout.chunks, unroll=2) as chunk:
                with self.ring.use() as stage:
                    self.timeline.stamp_first("first_chunk")
                    self._multiply_chunk(layout, chunk, chunk, stage, sums)
            self.timeline.stamp_here("last_chunk")
            self._reduce(layout, strip, sums, epilogue)

    @ch.inline
    def _multiply_sliced(self, layout: MatrixLayout, position: ch.Expr, prologue: Prologue, epilogue: Epilogue) -> None:
        """Slices outside, strips inside."""
        sums = [ch.array(ty.f32, self.columns.tiles, 4, zero=True, name="sums") for _ in range(layout.rounds)]
        for number in range(layout.slices):
            first, end = layout.slice_range(number)
            if first == end:
                break  # rounding left none for this one and those behind it
            if number > 0:
                self.machine.meet()  # everybody has read the last part before it is loaded over
            self._load(layout, prologue, number)
            for round in range(layout.rounds):
                with self._has_strip(layout, position, round):
                    with ch.for_(first, end, unroll=2) as chunk:
                        with self.ring.use() as stage:
                            self.timeline.stamp_first("first_chunk")
                            self._multiply_chunk(layout, chunk, chunk - first, stage, sums[round])
        self.timeline.stamp_here("last_chunk")
        for round in range(layout.rounds):
            with self._has_strip(layout, position, round):
                self._reduce(layout, position + round * layout.blocks, sums[round], epilogue)

    def _load(self, layout: MatrixLayout, prologue: Prologue, number: int) -> None:
        prologue.load(layout, number)
        if number == 0:
            self.timeline.stamp_here("ready")

    @staticmethod
    def _has_strip(layout: MatrixLayout, position: ch.Expr, round: int) -> AbstractContextManager[Any]:
        """Whether this block has a strip in a round; surely in all but the last."""
        full = layout.round_width(round) == layout.blocks or round == 0
        return nullcontext() if full else ch.if_(position + round * layout.blocks < layout.strips)

    @ch.function
    def _multiply_chunk(self, layout: MatrixLayout, chunk: ch.Expr, place: ch.Expr, stage: Stage, sums: Any) -> None:
        """Chunk `chunk` of a strip by the vectors in shared memory, in which it is number `place`."""
        machine = self.machine
        vector = machine.region("vector", ty.u32x4)
        fragments = fragments_of(layout.format.name, stage, machine.lane)
        with ch.for_(layout.tiles_per_chunk // machine.plan.math_warps, unroll=True) as turn:
            pair = turn * machine.plan.math_warps + machine.warp

            def multiply_tile() -> None:
                units_per_tile = layout.format.columns // UNIT * self.columns.limit
                units = Activations(
                    self.columns, vector + (place * layout.tiles_per_chunk + pair) * units_per_tile
                )
                fragments.multiply(pair, units, sums)

            if layout.last_chunk_tiles == layout.tiles_per_chunk:
                multiply_tile()
            else:
                with ch.if_(pair < layout.chunk_tiles(chunk)):
                    multiply_tile()

    @ch.function
    def _reduce(self, layout: MatrixLayout, strip: ch.Expr, sums: Any, epilogue: Epilogue) -> None:
        machine, warps = self.machine, self.machine.plan.math_warps
        reductions = machine.region("reductions", ty.f32) + self.turn * (warps * STRIP_ROWS * self.columns.limit)
        self._lay_down(reductions, sums)
        machine.meet()
        with ch.if_(machine.warp // self._finishers == self.finisher):
            for slot in range(self.slots):
                column = ch.const(ty.u32, self.column_of_warp(slot), name="column")
                with self.columns.if_active(column):
                    self._finish_rows(layout, strip, reductions, column, slot, epilogue)
        self.turn ^= 1
        self.finisher += 1
        with ch.if_(self.finisher == warps // self._finishers):
            self.finisher.set(0)

    @ch.function
    def _lay_down(self, reductions: ch.Expr, sums: Any) -> None:
        """This warp's sums: [warp][row][column]. Lane 4g + t holds rows g and g + 8 of columns 2t and 2t + 1."""
        machine, tokens = self.machine, self.columns.limit
        row = machine.warp * STRIP_ROWS + machine.lane // 4
        for tile in range(self.columns.tiles):
            first = machine.lane % 4 * 2 + tile * COLUMNS
            with nullcontext() if tokens >= COLUMNS else ch.if_(first < tokens):
                for number in range(min(tokens, 2)):
                    place = row * tokens + first + number
                    reductions[place] = sums[tile][number]
                    reductions[place + 8 * tokens] = sums[tile][number + 2]

    @ch.function
    def _finish_rows(
        self, layout: MatrixLayout, strip: ch.Expr, reductions: ch.Expr, column: ch.Expr, slot: int, epilogue: Epilogue
    ) -> None:
        """Add the warps' sums of a column, in order: half of the warps on each half of the lanes."""
        machine, warps, tokens = self.machine, self.machine.plan.math_warps, self.columns.limit
        row = machine.lane % STRIP_ROWS
        half = machine.lane // STRIP_ROWS
        half_sum = ch.var(ty.f32, 0.0)
        with ch.for_(warps // 2, unroll=True) as other:
            place = (half * (warps // 2) + other) * STRIP_ROWS + row
            half_sum += reductions[place * tokens + column]
        row_sum = half_sum + prim.shuffle_xor_f32(half_sum, STRIP_ROWS)
        epilogue(Rows(strip, strip // layout.blocks, row, machine.lane, column, slot, row_sum))
