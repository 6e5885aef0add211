"""Matrix times vectors on tensor cores: the weights are the 16-row operand of `mma.m16n8k16`, tokens its 8 columns.

The producer lane brings the block's M-tiles chunk by chunk; in each chunk every consumer warp multiplies its K-tiles
and keeps partial sums of the M-tile's 16 rows; at the end of an M-tile the warps' sums are added in fixed order, for
each token by one warp, which finishes the rows. Which warps finish rotates, and only they wait for the sums of all: the
others go on with the next M-tile.

Where the vectors of several tokens do not fit into shared memory whole, the matrix is multiplied slice by slice: all
the block's M-tiles by the first part of the vectors, then by the next, with the sums of all its M-tiles in registers.
The parts are waited for one by one, so the first is multiplied before the last one exists.

The loops over M-tiles and chunks stay (almost) rolled: unrolled, the kernel is twice as long and no faster (H200).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
from cheetah.blocks.linear.formats import fragments_of
from cheetah.blocks.linear.formats.bf16 import Bf16Fragments, HeldTiles
from cheetah.blocks.linear.fragments import Activations, groups_of
from cheetah.blocks.linear.interface import Epilogue, Linear, Parts, Prologue, Rows
from cheetah.blocks.ring import Cursor, Ring, Stage
from cheetah.blocks.timeline import NO_TIMELINE, Timeline
from cheetah.lang import prim, ty
from cheetah.plan import M_TILE_ROWS, MatrixLayout
from cheetah.plan.formats import NARROW_ROWS
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
        """In the producer role: the products that follow are of this layer, `layer_stride` bytes after the one
        before."""
        layer_offset = ty.u64(layer) * layer_stride
        self.layer_offset = layer_offset

    def end_layers(self) -> None:
        """The products that follow belong to no layer."""
        self.layer_offset = ty.u64(0)

    def __call__(
        self, matrix: MatrixLayout, prologue: Prologue, epilogue: Epilogue, when: ch.Expr | None = None
    ) -> None:
        with self.machine.producer, ch.if_(when) if when is not None else nullcontext():
            self.copy(matrix)
        with self.machine.consumer:
            prologue.prepare()
            with ch.if_(when) if when is not None else nullcontext():
                self.multiply(matrix, prologue, epilogue)
                self.timeline.stamp_here("done")

    @property
    def slots(self) -> int:
        """Columns that a finishing warp has."""
        return self.columns.limit // self.machine.plan.finishers

    def column_of_warp(self, slot: int) -> Any:
        """The column that this warp finishes."""
        return self.machine.warp % self.machine.plan.finishers + slot * self.machine.plan.finishers

    @ch.inline
    def _start(self) -> None:
        """Reductions and groups of finishing warps take turns, and there is one reduction more than groups. So when a
        warp comes to an M-tile's reduction again, it has itself finished an M-tile since, for which it waited for all
        warps: they had gone on from the first one, and read its sums before, if it was theirs to finish."""
        summed = self.machine.region("reduction_barriers", ty.u64)
        self.summed = summed
        with self.machine.consumer:
            turn = ch.var(ty.u32, 0)
            turn_parity = ch.var(ty.u32, 0)
            finisher = ch.var(ty.u32, 0)
            self.finisher, self.turn = finisher, Cursor(turn, turn_parity, self.machine.plan.reductions)

    @ch.inline
    def initialise(self) -> None:
        """Set the barriers up, as `Ring.initialise`."""
        with ch.for_(self.machine.plan.reductions, name="reduction") as reduction:
            prim.mbarrier_init(self.summed + reduction, self.machine.plan.consumer_warps)

    @ch.inline
    def copy(self, layout: MatrixLayout) -> None:
        """In the producer role: fetch the block's M-tiles of a matrix of the present layer."""
        self.ring.fills(layout.name)
        about = f"The block's M-tiles of {layout.name}, chunk by chunk, into the stages of the ring."
        with ch.outline(f"fetch_{layout.name}", about):
            position = layout.position(self.machine.block)
            matrix = self.weights + (self.layer_offset + layout.offset)
            if layout.slices == 1:
                self._copy_chunks(layout, matrix, position, 0, layout.chunks)
                return
            with ch.for_(layout.slices, unroll=1, name="slice") as slice_:
                first = slice_ * layout.slice_chunks
                end = ch.minimum(first + layout.slice_chunks, layout.chunks)
                self._copy_chunks(layout, matrix, position, first, end)

    @ch.inline
    def _copy_chunks(
        self, layout: MatrixLayout, matrix: ch.Expr, position: ch.Expr, first: ch.Value, end: ch.Value
    ) -> None:
        """Chunks [first, end) of each of the block's M-tiles of a matrix."""
        with ch.for_(position, layout.m_tiles, layout.blocks, unroll=1) as m_tile:
            wave = m_tile // layout.blocks
            wave_bytes = layout.wave_address(ty.u64(wave))
            width = layout.wave_width(wave)
            with ch.for_(first, end, unroll=1) as chunk:
                chunk_bytes = layout.chunk_bytes(chunk)
                source = matrix + (wave_bytes + ty.u64(layout.chunk_address(chunk, position, width)))
                most = self.machine.plan.in_flight_of(layout.name)
                with self.ring.fill(chunk_bytes, most=most) as (destination, barrier):
                    prim.bulk_copy(destination, source, chunk_bytes, barrier)

    @ch.function
    def skip(self, layout: MatrixLayout) -> None:
        """In the consumer role: use up the block's chunks of a matrix that were fetched in vain."""
        with ch.for_(layout.position(self.machine.block), layout.m_tiles, layout.blocks, unroll=1):
            with ch.for_(layout.chunks, unroll=1):
                self.ring.discard()

    @ch.inline
    def multiply(self, layout: MatrixLayout, prologue: Prologue, epilogue: Epilogue) -> None:
        """In the consumer role: multiply the block's M-tiles by the vectors that the prologue brings.

        A block without an M-tile loads nothing and waits for nobody.
        """
        machine = self.machine
        self.ring.uses(layout.name)
        position = layout.position(machine.block)
        with nullcontext() if layout.m_tiles >= layout.blocks else ch.if_(position < layout.m_tiles):
            parts = prologue.parts(layout)
            if layout.slices == 1:
                self._multiply_whole(layout, position, prologue, epilogue)
            elif parts is not None:
                self._multiply_parts(layout, position, parts, epilogue)
            else:
                self._multiply_sliced(layout, position, prologue, epilogue)
            machine.meet()  # everybody has read the vectors, and what the finishing warps write is seen

    @ch.inline
    def _multiply_whole(self, layout: MatrixLayout, position: ch.Expr, prologue: Prologue, epilogue: Epilogue) -> None:
        self._load(layout, prologue, 0)
        with ch.for_(position, layout.m_tiles, layout.blocks, unroll=1) as m_tile:
            sums = ch.array(ty.f32, self._groups(layout), 4, zero=True)
            if layout.waves > 1:
                with ch.if_(m_tile + layout.blocks >= layout.m_tiles):  # the last one: the next wait is near
                    self.ring.begin_waiting()
            with ch.for_(layout.chunks, unroll=2) as chunk:
                self._use_chunk(layout, chunk, chunk, sums)
            self.timeline.stamp_here("last_chunk")
            self._reduce(layout, m_tile, sums, epilogue)

    @ch.inline
    def _multiply_sliced(self, layout: MatrixLayout, position: ch.Expr, prologue: Prologue, epilogue: Epilogue) -> None:
        """Slices outside, M-tiles inside."""
        groups = self._groups(layout)
        sums = [ch.array(ty.f32, groups, 4, zero=True, name="sums") for _ in range(layout.waves)]
        for index in range(layout.slices):
            first, end = layout.slice_range(index)
            if first == end:
                break  # rounding left none for this one and those behind it
            if index > 0:
                self.machine.meet()  # everybody has read the last part before it is loaded over
            self._load(layout, prologue, index)
            for wave in range(layout.waves):
                with self._has_m_tile(layout, position, wave):
                    if index == layout.slices - 1 and wave == layout.waves - 1 > 0:
                        self.ring.begin_waiting()
                    with ch.for_(first, end, unroll=2) as chunk:
                        self._use_chunk(layout, chunk, chunk - first, sums[wave])
        self.timeline.stamp_here("last_chunk")
        for wave in range(layout.waves):
            with self._has_m_tile(layout, position, wave):
                self._reduce(layout, position + wave * layout.blocks, sums[wave], epilogue)

    @ch.inline
    def _multiply_parts(self, layout: MatrixLayout, position: ch.Expr, parts: Parts, epilogue: Epilogue) -> None:
        """The same with slices that come while the one before is multiplied."""
        groups = self._groups(layout)
        sums = [ch.array(ty.f32, groups, 4, zero=True, name="sums") for _ in range(layout.waves)]
        self.ring.begin_waiting()
        parts.begin()
        with ch.for_(parts.count, unroll=1, name="part") as part:
            parts.wait(part)
            with ch.if_(part == 0):
                self.ring.end_waiting()
                self.timeline.stamp_here("ready")
            first = part * layout.slice_chunks
            end = ch.minimum(first + layout.slice_chunks, layout.chunks)
            place = part % 2 * layout.slice_chunks
            for wave in range(layout.waves):
                with self._has_m_tile(layout, position, wave):
                    if wave == layout.waves - 1 > 0:
                        with ch.if_(part == parts.count - 1):
                            self.ring.begin_waiting()
                    with ch.for_(first, end, unroll=2) as chunk:
                        self._use_chunk(layout, chunk, chunk - first + place, sums[wave])
            parts.release(part)
        self.timeline.stamp_here("last_chunk")
        for wave in range(layout.waves):
            with self._has_m_tile(layout, position, wave):
                self._reduce(layout, position + wave * layout.blocks, sums[wave], epilogue)

    def _load(self, layout: MatrixLayout, prologue: Prologue, index: int) -> None:
        self.ring.begin_waiting()
        prologue.load(layout, index)
        self.ring.end_waiting()
        if index == 0:
            self.timeline.stamp_here("ready")

    @staticmethod
    def _has_m_tile(layout: MatrixLayout, position: ch.Expr, wave: int) -> AbstractContextManager[Any]:
        """Whether this block has an M-tile in a wave; surely in all but the last."""
        full = layout.wave_width(wave) == layout.blocks or wave == 0
        return nullcontext() if full else ch.if_(position + wave * layout.blocks < layout.m_tiles)

    @ch.inline
    def _use_chunk(self, layout: MatrixLayout, chunk: ch.Expr, place: ch.Expr, sums: Any) -> None:
        """The next stage, chunk `chunk` of an M-tile, by the vectors in shared memory, in which it is number `place`.

        Where all weights are bf16 and a warp has registers for its tiles, the stage is given back before they are
        multiplied.
        """
        tiles = layout.tiles_per_chunk // self.machine.plan.consumer_warps
        held = HeldTiles.of(tiles) if self._has_room_for_tiles(layout) else None
        with self.ring.use() as stage:
            self.timeline.stamp_first("first_chunk")
            if held is None:
                self._multiply_chunk(layout, chunk, place, stage, sums)
            else:
                self._hold_chunk(layout, chunk, place, stage, held)
        if held is not None:
            self._multiply_held(layout, chunk, held, sums)

    def _has_room_for_tiles(self, layout: MatrixLayout) -> bool:
        """Whether a warp's tiles of a chunk go to registers. Of several tokens not beside the sums of several M-tiles
        where a last chunk has fewer tiles: words spilled then (qwen3-4b, batch 4)."""
        is_crowded = self._sums_wait(layout) and self.columns.limit > 1
        is_uneven = layout.last_chunk_tiles < layout.tiles_per_chunk
        return self._groups(layout) == 1 and not self.machine.shape.formats and not (is_crowded and is_uneven)

    @staticmethod
    def _sums_wait(layout: MatrixLayout) -> bool:
        """Whether sums of several M-tiles are in registers from slice to slice."""
        return layout.slices > 1 and layout.waves > 1

    @contextmanager
    @ch.inline
    def _own_tiles(self, layout: MatrixLayout, chunk: ch.Expr) -> Iterator[tuple[ch.Expr, ch.Expr]]:
        """This warp's tiles of a chunk: (its number among them, its number in the chunk)."""
        machine = self.machine
        with ch.for_(layout.tiles_per_chunk // machine.plan.consumer_warps, unroll=True) as turn:
            pair = turn * machine.plan.consumer_warps + machine.warp
            full = layout.last_chunk_tiles == layout.tiles_per_chunk
            with nullcontext() if full else ch.if_(self._is_tile(layout, chunk, turn, pair)):
                yield turn, pair

    def _is_tile(self, layout: MatrixLayout, chunk: ch.Expr, turn: ch.Expr, pair: ch.Expr) -> Any:
        """Whether a chunk has this tile; not asked where the last one has as many and sums of several M-tiles wait:
        tiles held behind that question spilled (qwen3-4b)."""
        sure = layout.last_chunk_tiles // self.machine.plan.consumer_warps
        has_tile = pair < layout.chunk_tiles(chunk)
        return (turn < sure) | has_tile if sure and self._sums_wait(layout) else has_tile

    def _activations(self, layout: MatrixLayout, place: ch.Expr, pair: ch.Expr) -> Activations:
        """The vectors beside tile `pair` of the chunk whose number in shared memory is `place`."""
        vector = self.machine.region("vector", ty.u32x4)
        units_per_tile = layout.format.vector_units(layout.columns, self.columns.limit) * layout.halves
        units = vector + (place * layout.tiles_per_chunk + pair) * units_per_tile
        return Activations(self.columns, units, layout.halves)

    def _groups(self, layout: MatrixLayout) -> int:
        """Groups of 8 columns that a matrix is multiplied with."""
        return groups_of(self.columns.limit, layout.halves)

    @ch.function
    def _hold_chunk(self, layout: MatrixLayout, chunk: ch.Expr, place: ch.Expr, stage: Stage, held: HeldTiles) -> None:
        """This warp's tiles of a chunk, and what they are multiplied with, to registers."""
        fragments = Bf16Fragments(stage, self.machine.lane, layout.format)
        read = ch.var(ty.u32, 0)
        with self._own_tiles(layout, chunk) as (turn, pair):
            fragments.hold(pair, self._activations(layout, place, pair), held, turn, read)
        stage.has_read(read)

    @ch.function
    def _multiply_held(self, layout: MatrixLayout, chunk: ch.Expr, held: HeldTiles, sums: Any) -> None:
        """The products of what `_hold_chunk` brought."""
        with self._own_tiles(layout, chunk) as (turn, _):
            held.multiply(turn, sums)

    @ch.function
    def _multiply_chunk(self, layout: MatrixLayout, chunk: ch.Expr, place: ch.Expr, stage: Stage, sums: Any) -> None:
        """Chunk `chunk` of an M-tile by the vectors in shared memory, in which it is number `place`."""
        fragments = fragments_of(layout, self.columns.limit, stage, self.machine.lane)
        with self._own_tiles(layout, chunk) as (_, pair):
            fragments.multiply(pair, self._activations(layout, place, pair), sums)
        if layout.format.factor_bytes:
            with ch.if_(chunk == layout.chunks - 1):
                fragments.finish_rows(layout.last_chunk_tiles, self.columns, sums)
        fragments.finish_chunk()

    @ch.function
    def _reduce(self, layout: MatrixLayout, m_tile: ch.Expr, sums: Any, epilogue: Epilogue) -> None:
        """The end of an M-tile: the warps' sums meet, and those whose turn it is finish its rows."""
        machine, warps = self.machine, self.machine.plan.consumer_warps
        turn, finishers = self.turn, machine.plan.finishers
        reductions = machine.region("reductions", ty.f32) + turn.stage * (warps * machine.plan.warp_sums)
        self._lay_down(layout, reductions, sums)
        prim.warp_barrier()  # orders the lanes' sums before the arrival
        with ch.if_(machine.lane == 0):
            prim.mbarrier_arrive(self.summed + turn.stage)
        with ch.if_(machine.warp // finishers == self.finisher):
            prim.mbarrier_wait(self.summed + turn.stage, turn.parity)
            for slot in range(self.slots):
                column = ch.const(ty.u32, self.column_of_warp(slot), name="column")
                with self.columns.if_active(column):
                    self._finish_rows(layout, m_tile, reductions, column, slot, epilogue)
        turn.advance()
        self.finisher += 1
        with ch.if_(self.finisher == warps // finishers):
            self.finisher.set(0)

    @ch.function
    def _lay_down(self, layout: MatrixLayout, reductions: ch.Expr, sums: Any) -> None:
        """This warp's sums: [warp][column][row]. Lane 4g + t holds rows g and g + 8 of columns 2t and 2t + 1."""
        machine, tokens = self.machine, self.columns.limit
        if layout.is_narrow:
            return self._lay_down_halves(reductions, sums)
        row = machine.warp * machine.plan.warp_sums + machine.lane // 4
        for tile in range(self.columns.tiles):
            first = machine.lane % 4 * 2 + tile * COLUMNS
            with nullcontext() if tokens >= COLUMNS else ch.if_(first < tokens):
                for index in range(min(tokens, 2)):
                    place = row + (first + index) * machine.plan.column_sums
                    reductions[place] = sums[tile][index]
                    reductions[place + 8] = sums[tile][index + 2]

    @ch.inline
    def _lay_down_halves(self, reductions: ch.Expr, sums: Any) -> None:
        """The same of a narrow M-tile. Of what `sums` has, rows 0 to 7 by the first halves of the vectors and rows 8 to
        15 by the second are products of the matrix: the first half of a token is column `token` there, the second
        column `tokens + token`."""
        machine, tokens = self.machine, self.columns.limit
        row = machine.warp * machine.plan.warp_sums + machine.lane // 4
        for group in range(groups_of(tokens, 2)):
            first = machine.lane % 4 * 2 + group * COLUMNS
            with nullcontext() if 2 * tokens >= COLUMNS else ch.if_(first < 2 * tokens):
                for index in range(2):
                    half, token = self._half_and_token(group, index)
                    of_half = [sums[group][index], sums[group][index + 2]]
                    value = of_half[half] if isinstance(half, int) else ch.select(half == 0, *of_half)
                    reductions[row + token * machine.plan.column_sums + half * NARROW_ROWS] = value

    def _half_and_token(self, group: int, index: int) -> tuple[Any, Any]:
        """What column 2 * (lane % 4) + index of a group is."""
        tokens, column = self.columns.limit, self.machine.lane % 4 * 2 + index
        if tokens >= COLUMNS:
            half, before = divmod(group * COLUMNS, tokens)
            return half, column + before
        return (index, 0) if tokens == 1 else (column // tokens, column % tokens)

    @ch.function
    def _finish_rows(
        self, layout: MatrixLayout, m_tile: ch.Expr, reductions: ch.Expr, column: ch.Expr, slot: int, epilogue: Epilogue
    ) -> None:
        """Add the warps' sums of a column, in order: half of the warps on each half of the lanes."""
        machine, plan = self.machine, self.machine.plan
        row = machine.lane % M_TILE_ROWS
        half = machine.lane // M_TILE_ROWS
        half_sum = ch.var(ty.f32, 0.0)
        with ch.for_(plan.consumer_warps // 2, unroll=True) as other:
            warp = half * (plan.consumer_warps // 2) + other
            half_sum += reductions[warp * plan.warp_sums + column * plan.column_sums + row]
        row_sum = half_sum + prim.shuffle_xor_f32(half_sum, M_TILE_ROWS)
        if layout.is_narrow:
            row, row_sum = self._fold(row, row_sum)
        of_warp = machine.lane, column, slot
        epilogue(Rows(m_tile, m_tile // layout.blocks, row, *of_warp, row_sum, layout.tile_rows))

    @ch.inline
    def _fold(self, row: ch.Expr, row_sum: ch.Expr) -> tuple[Any, Any]:
        """Of a narrow M-tile: rows 8 to 15 are rows 0 to 7 by the other half of their columns."""
        return row % NARROW_ROWS, row_sum + prim.shuffle_xor_f32(row_sum, NARROW_ROWS)
