"""Matrix times vectors on tensor cores: the weights are the 16-row operand of `mma.m16n8k16`, tokens its 8 columns.

The producer lane brings the block's M-tiles chunk by chunk; in each chunk every consumer warp multiplies its K-tiles
and keeps partial sums of the M-tile's 16 rows. At the end of an M-tile it lays them down in a *reduction* and goes on
with the next one. Adding warps, which do nothing else, add them up in the order of the warps and finish the rows: few
columns one warp by itself, in turn with the others, many columns all of them.

A reduction has two mbarriers: at `summed` every consumer warp arrives when its sums are there, at `taken` the warps
that have added them up. The consumer warps wait for the others only where they come round to a reduction again, and at
the end of a product, until all its rows are finished. At the mbarrier `loaded` one thread arrives when the block has an
input whose products are to be scaled, and every adding warp when it comes to those.

Where the vectors of several tokens do not fit into shared memory whole, the matrix is multiplied slice by slice: all
the block's M-tiles by the first part of the vectors, then by the next, with the sums of all its M-tiles in registers.
The parts are waited for one by one, so the first is multiplied before the last one exists.

The loops over M-tiles and chunks stay (almost) rolled: unrolled, the kernel is twice as long and no faster (H200).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
from cheetah.blocks.linear.formats import accumulators_of, fragments_class, fragments_of
from cheetah.blocks.linear.fragments import Activations, Held, groups_of
from cheetah.blocks.linear.interface import ColumnScale, Epilogue, Linear, Parts, Prologue, Rows
from cheetah.blocks.ring import Ring, RingCursor, Stage
from cheetah.blocks.timeline import NO_TIMELINE, Timeline
from cheetah.lang import prim, ty
from cheetah.plan import M_TILE_ROWS, MatrixLayout
from cheetah.plan.formats import BF16, NARROW_ROWS
from cheetah.plan.plan import COLUMNS

HALF = M_TILE_ROWS // 2
Place = Any
"""Where the vectors beside a chunk are in shared memory: its number among those that they lie beside one after another,
or what gives, for a tile of the chunk, the vectors beside it."""


@dataclass(frozen=True, eq=False)
class Scaling:
    """The scales of the columns that an adding warp finishes: `factors` of its slots, 0 until they are learned with the
    first M-tile that it finishes of a product. So nobody waits for them who has nothing to publish behind it.

    They are looked for once the block has its input (`loaded`, in its phase `parity`): before, polls would crowd the
    memory, and behind the grid barrier only the consumer warps know."""

    scale: ColumnScale
    factors: list[Any]
    loaded: ch.Expr
    parity: ch.Expr

    @ch.inline
    def learn(self, slot: int, column: ch.Expr) -> None:
        """Before the products are waited for."""
        with ch.if_(self.factors[slot] == 0.0):  # the same in all lanes
            prim.mbarrier_wait(self.loaded, self.parity)
            self.factors[slot].set(self.scale.of(column))


class Matvec(Linear):
    """The products of a kernel: they share the ring and the reductions."""

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

    def __call__(self, matrix: MatrixLayout, prologue: Prologue, epilogue: Epilogue, when: ch.Value = True) -> None:
        with self.machine.producer, ch.if_(when):
            self.copy(matrix)
        with self.machine.consumer:
            prologue.prepare()
            with ch.if_(when):
                self.multiply(matrix, prologue)
                self.timeline.stamp_here("done")
        with self.machine.adding(), ch.if_(when):
            self.finish(matrix, epilogue, prologue.scale_of_products())

    @ch.inline
    def _start(self) -> None:
        """A cursor over the reductions in each of the two roles that take them in turn."""
        plan = self.machine.plan
        summed = self.machine.region("reduction_barriers", ty.u64)
        taken = summed + plan.reductions
        step_added = taken + plan.reductions
        loaded = step_added + 1
        self.summed, self.taken, self.step_added, self.loaded = summed, taken, step_added, loaded
        with self.machine.consumer:
            turn = ch.var(ty.u32, 0)
            turn_parity = ch.var(ty.u32, 0)
            self.turn = RingCursor(turn, turn_parity, plan.reductions)
        with self.machine.adder:
            adding = ch.var(ty.u32, 0)
            adding_parity = ch.var(ty.u32, 0)
            loaded_parity = ch.var(ty.u32, 0)
            self.adding, self.loaded_parity = RingCursor(adding, adding_parity, plan.reductions), loaded_parity

    @ch.inline
    def initialise(self) -> None:
        """Set the barriers up, as `Ring.initialise`."""
        plan = self.machine.plan
        with ch.for_(plan.reductions, name="reduction") as reduction:
            prim.mbarrier_init(self.summed + reduction, plan.consumer_warps)
            prim.mbarrier_init(self.taken + reduction, plan.finishers)
        prim.mbarrier_init(self.step_added, plan.adding_warps)
        prim.mbarrier_init(self.loaded, 1 + plan.adding_warps)

    # -- which columns an adding warp finishes ---------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Pairs of columns that an adding warp has."""
        plan = self.machine.plan
        return plan.column_pairs // plan.finishers

    @property
    def group(self) -> Any:
        """In the adder role: which of the groups that take M-tiles in turn this warp is in."""
        return self.machine.adder_number // self.machine.plan.finishers

    def column_of(self, slot: int) -> Any:
        """In the adder role: this lane's column of a slot."""
        plan = self.machine.plan
        pair = self.machine.adder_number % plan.finishers + slot * plan.finishers
        return ch.const(ty.u32, self.column_of_pair(pair), name="column")

    def column_of_pair(self, pair: ch.Expr) -> Any:
        """This lane's column of a pair of them."""
        return pair * 2 + self.machine.lane // M_TILE_ROWS if self.machine.plan.tokens > 1 else 0

    def _if_ours(self) -> ch.if_:
        """Whether the M-tile whose turn it is, is this warp's group's to finish: each has a reduction of its own."""
        return ch.if_(self.machine.plan.finishing_groups == 1 or self.adding.stage == self.group)

    # -- the end of a step -----------------------------------------------------------------------------------------

    @ch.inline
    def end_step(self) -> None:
        """In the adder role, once a step: this warp has finished all its M-tiles of the step."""
        prim.warp_barrier()  # orders what the lanes have stored before the arrival
        with ch.if_(self.machine.lane == 0):
            prim.mbarrier_arrive(self.step_added)

    @ch.inline
    def wait_for_step(self, step: ch.Expr) -> None:
        """In the consumer role: all adding warps have called `end_step`."""
        prim.mbarrier_wait(self.step_added, step % 2)

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
                most = self.machine.plan.in_flight_of(layout.is_once)
                with self.ring.fill(chunk_bytes, most=most) as (destination, barrier):
                    prim.bulk_copy(destination, source, chunk_bytes, barrier)

    @ch.function
    def skip(self, layout: MatrixLayout) -> None:
        """In the consumer role: use up the block's chunks of a matrix that were fetched in vain."""
        with ch.for_(layout.position(self.machine.block), layout.m_tiles, layout.blocks, unroll=1):
            with ch.for_(layout.chunks, unroll=1):
                self.ring.discard()

    @ch.inline
    def multiply(self, layout: MatrixLayout, prologue: Prologue) -> None:
        """In the consumer role: multiply the block's M-tiles by the vectors that the prologue brings.

        A block without an M-tile loads nothing and waits for nobody.
        """
        machine = self.machine
        self.ring.uses(layout.name)
        position = layout.position(machine.block)
        with self._if_any(layout, position):
            parts = prologue.parts(layout)
            if layout.slices == 1:
                self._multiply_whole(layout, position, prologue)
            elif parts is not None:
                self._multiply_parts(layout, position, parts)
            else:
                self._multiply_sliced(layout, position, prologue)
            # All rows are finished, for which every consumer warp has handed its sums over: everybody has read the
            # vectors, what the epilogues write is seen, and what they read may be replaced.
            self._wait_until_taken()

    @ch.inline
    def _multiply_whole(self, layout: MatrixLayout, position: ch.Expr, prologue: Prologue) -> None:
        self._load(layout, prologue, 0)
        with ch.for_(position, layout.m_tiles, layout.blocks, unroll=1) as m_tile:
            sums = ch.array(ty.f32, accumulators_of(layout, self.columns.limit), 4, zero=True)
            if layout.waves > 1:
                with ch.if_(m_tile + layout.blocks >= layout.m_tiles):  # the last one: the next wait is near
                    self.ring.begin_waiting()
            with ch.for_(layout.chunks, unroll=2) as chunk:
                self._use_chunk(layout, chunk, chunk, sums, m_tile < layout.blocks)
            self.timeline.stamp_here("last_chunk")
            self._hand_over(layout, sums)

    @ch.inline
    def _multiply_sliced(self, layout: MatrixLayout, position: ch.Expr, prologue: Prologue) -> None:
        """Slices outside, M-tiles inside."""
        sums = self._sums_of_waves(layout)
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
                        self._use_chunk(layout, chunk, chunk - first, sums[wave], wave == 0)
        self._hand_over_waves(layout, position, sums)

    @ch.inline
    def _multiply_parts(self, layout: MatrixLayout, position: ch.Expr, parts: Parts) -> None:
        """The same with slices that come while the one before is multiplied."""
        sums = self._sums_of_waves(layout)
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
                        self._use_chunk(layout, chunk, chunk - first + place, sums[wave], wave == 0)
            parts.release(part)
        self._hand_over_waves(layout, position, sums)

    def _sums_of_waves(self, layout: MatrixLayout) -> list[Any]:
        """Of all the block's M-tiles, where they wait from slice to slice."""
        accumulators = accumulators_of(layout, self.columns.limit)
        return [ch.array(ty.f32, accumulators, 4, zero=True, name="sums") for _ in range(layout.waves)]

    def _hand_over_waves(self, layout: MatrixLayout, position: ch.Expr, sums: list[Any]) -> None:
        self.timeline.stamp_here("last_chunk")
        for wave in range(layout.waves):
            with self._has_m_tile(layout, position, wave):
                self._hand_over(layout, sums[wave])

    def _load(self, layout: MatrixLayout, prologue: Prologue, index: int) -> None:
        self.ring.begin_waiting()
        prologue.load(layout, index)
        if prologue.scale_of_products() is not None:
            assert layout.slices == 1, layout.name
            with ch.if_(self.machine.thread == 0):
                prim.mbarrier_arrive(self.loaded)
        self.ring.end_waiting()
        if index == 0:
            self.timeline.stamp_here("ready")

    @staticmethod
    def _if_any(layout: MatrixLayout, position: ch.Expr) -> ch.if_:
        """Whether this block has M-tiles of a matrix."""
        return ch.if_(layout.m_tiles >= layout.blocks or position < layout.m_tiles)

    @staticmethod
    def _has_m_tile(layout: MatrixLayout, position: ch.Expr, wave: int) -> ch.if_:
        """Whether this block, which has M-tiles, has one in a wave; surely in all but the last."""
        full = layout.wave_width(wave) == layout.blocks or wave == 0
        return ch.if_(full or position + wave * layout.blocks < layout.m_tiles)

    @ch.inline
    def _use_chunk(self, layout: MatrixLayout, chunk: ch.Expr, place: ch.Expr, sums: Any, is_first: ch.Value) -> None:
        """The next stage, chunk `chunk` of an M-tile, by the vectors in shared memory, in which it is number `place`.
        is_first: whether this is the block's first M-tile that is multiplied by them.

        Where a warp has registers for its tiles, the stage is given back before they are multiplied.
        """
        if layout.sums_bytes(self.columns.limit) and is_first is not False:
            with ch.if_(layout.waves == 1 or is_first):
                self._sum_chunk(layout, chunk, place)
        held = self._room_for_tiles(layout)
        with self.ring.use() as stage:
            self.timeline.stamp_first("first_chunk")
            if held is None:
                self._multiply_chunk(layout, chunk, place, stage, sums)
            else:
                self._hold_chunk(layout, chunk, place, stage, held)
        if held is not None:
            self._multiply_held(layout, chunk, held, sums)

    def _room_for_tiles(self, layout: MatrixLayout) -> Held | None:
        """Registers for a warp's tiles of a chunk. Not for bf16 tiles where other weights are quantised, and not beside
        the sums of several M-tiles where a last chunk has fewer tiles: words spilled then (qwen3-4b)."""
        is_mixed = layout.format is BF16 and bool(self.machine.model.formats)
        is_crowded = layout.last_chunk_tiles < layout.tiles_per_chunk and self._sums_wait(layout)
        if self._groups(layout) > 1 or is_mixed or is_crowded:
            return None
        tiles = layout.tiles_per_chunk // self.machine.plan.consumer_warps
        return fragments_class(layout, self.columns.limit).room(layout.format, tiles)

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
            with ch.if_(full or self._is_tile(layout, chunk, turn, pair)):
                yield turn, pair

    def _is_tile(self, layout: MatrixLayout, chunk: ch.Expr, turn: ch.Expr, pair: ch.Expr) -> Any:
        """Whether a chunk has this tile; not asked where the last one has as many and sums of several M-tiles wait:
        tiles held behind that question spilled (qwen3-4b)."""
        sure = layout.last_chunk_tiles // self.machine.plan.consumer_warps
        has_tile = pair < layout.chunk_tiles(chunk)
        return (turn < sure) | has_tile if sure and self._sums_wait(layout) else has_tile

    def _activations(self, layout: MatrixLayout, place: Place, pair: ch.Expr) -> Activations:
        """The vectors beside tile `pair` of the chunk whose number in shared memory is `place`."""
        if callable(place):
            given: Activations = place(pair)
            return given
        vector = self.machine.region("vector", ty.u32x4)
        tile = place * layout.tiles_per_chunk + pair
        units = vector + tile * layout.vector_units(self.columns.limit)
        sums_bytes = layout.sums_bytes(self.columns.limit)
        sums = self.machine.region("vector_sums", ty.f32) + tile * (sums_bytes // 4) if sums_bytes else None
        return Activations(self.columns, units, layout.halves, sums)

    def _groups(self, layout: MatrixLayout) -> int:
        """Groups of 8 columns that a matrix is multiplied with."""
        return groups_of(self.columns.limit, layout.halves)

    @ch.function
    def _hold_chunk(self, layout: MatrixLayout, chunk: ch.Expr, place: ch.Expr, stage: Stage, held: Held) -> None:
        """This warp's tiles of a chunk, and what they are multiplied with, to registers."""
        fragments = fragments_of(layout, self.columns.limit, stage, self.machine.lane)
        fragments.begin_holding()
        with self._own_tiles(layout, chunk) as (turn, pair):
            fragments.hold(pair, self._activations(layout, place, pair), held, turn)
        if layout.format.factor_bytes:
            with ch.if_(chunk == layout.chunks - 1):
                fragments.hold_factors(layout.last_chunk_tiles, held)
        fragments.finish_chunk()

    @ch.function
    def _multiply_held(self, layout: MatrixLayout, chunk: ch.Expr, held: Held, sums: Any) -> None:
        """The products of what `_hold_chunk` brought."""
        with self._own_tiles(layout, chunk) as (turn, _):
            held.multiply(turn, sums)
        if layout.format.factor_bytes:
            with ch.if_(chunk == layout.chunks - 1):
                held.finish_rows(sums)

    @ch.function
    def _sum_chunk(self, layout: MatrixLayout, chunk: ch.Expr, place: ch.Expr) -> None:
        """What zero points need of this warp's vectors beside a chunk."""
        fragments = fragments_class(layout, self.columns.limit)
        with self._own_tiles(layout, chunk) as (_, pair):
            fragments.sum_vectors(self._activations(layout, place, pair), self.machine.lane, layout.format)
        prim.warp_barrier()  # all lanes read what the first four have stored

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
    def _hand_over(self, layout: MatrixLayout, sums: Any) -> None:
        """The end of an M-tile: this warp's sums to the adding warps."""
        machine, turn = self.machine, self.turn
        prim.mbarrier_wait(self.taken + turn.stage, turn.parity ^ 1)
        reduction = ch.const(ty.ptr_mut(ty.f32), self._reduction_of(turn), name="reduction")
        self._lay_down(layout, reduction, sums)
        prim.warp_barrier()  # orders the lanes' sums before the arrival
        with ch.if_(machine.lane == 0):
            prim.mbarrier_arrive(self.summed + turn.stage)
        turn.advance()

    @ch.function
    def _wait_until_taken(self) -> None:
        """What was handed over so far is added up and finished: the last M-tile of every reduction, oldest first."""
        with ch.for_(self.machine.plan.reductions, unroll=1):
            prim.mbarrier_wait(self.taken + self.turn.stage, self.turn.parity ^ 1)
            self.turn.advance()
        self.turn.parity ^= 1  # once round the reductions: where it was

    @ch.inline
    def finish(self, layout: MatrixLayout, epilogue: Epilogue, scale: ColumnScale | None = None) -> None:
        """In the adder role: the rows of the block's M-tiles of a matrix, as the consumer warps hand them over, times
        the scale of their column."""
        about = f"The block's M-tiles of {layout.name}: the warps' sums added up, the rows finished."
        with ch.outline(f"finish_{layout.name}", about):
            position, turn = layout.position(self.machine.block), self.adding
            with self._if_any(layout, position):
                scaling = None if scale is None else self._begin_scaling(scale)
                with ch.for_(position, layout.m_tiles, layout.blocks, unroll=1) as m_tile:
                    with self._if_ours():
                        self._take(layout, m_tile, epilogue, scaling)
                    turn.advance()
                if scaling is not None:
                    self._end_scaling()

    @ch.inline
    def _begin_scaling(self, scale: ColumnScale) -> Scaling:
        prim.warp_barrier()  # no lane waits for an earlier input any more
        with ch.if_(self.machine.lane == 0):
            prim.mbarrier_arrive(self.loaded)
        factors = [ch.var(ty.f32, 0.0, name="scale") for _ in range(self.slots)]
        return Scaling(scale, factors, self.loaded, self.loaded_parity)

    @ch.inline
    def _end_scaling(self) -> None:
        """Who had nothing to scale waits too, and none comes to the next input before all have come to this one: a
        parity tells two neighbouring ones apart only."""
        prim.mbarrier_wait(self.loaded, self.loaded_parity)
        self.loaded_parity.set(self.loaded_parity ^ 1)

    @ch.inline
    def _take(self, layout: MatrixLayout, m_tile: ch.Expr, epilogue: Epilogue, scaling: Scaling | None) -> None:
        """An M-tile that this warp finishes, or its columns of it."""
        machine, turn = self.machine, self.adding
        for slot in range(self.slots):
            self._finish_rows(layout, m_tile, self.column_of(slot), slot, epilogue, scaling)
        prim.warp_barrier()  # orders the lanes' reads, and what they have stored, before the arrival
        with ch.if_(machine.lane == 0):
            prim.mbarrier_arrive(self.taken + turn.stage)

    @ch.function
    def _lay_down(self, layout: MatrixLayout, reduction: ch.Expr, sums: Any) -> None:
        """This warp's sums: [warp][pair of columns][column of the pair][row]. Lane 4g + t holds rows g and g + 8 of
        columns 2t and 2t + 1."""
        machine, plan = self.machine, self.machine.plan
        own = machine.warp * plan.warp_sums + machine.lane // 4
        if layout.is_narrow:
            return self._lay_down_halves(reduction, own, sums)
        for tile in range(self.columns.tiles):
            pair = machine.lane % 4 + tile * (COLUMNS // 2)
            with ch.if_(plan.tokens >= COLUMNS or pair < plan.column_pairs):
                for index in range(min(plan.tokens, 2)):
                    place = own + pair * plan.pair_sums + index * M_TILE_ROWS
                    reduction[place] = sums[tile][index]
                    reduction[place + HALF] = sums[tile][index + 2]

    @ch.inline
    def _lay_down_halves(self, reduction: ch.Expr, own: ch.Expr, sums: Any) -> None:
        """The same of a narrow M-tile. Of what `sums` has, rows 0 to 7 by the first halves of the vectors and rows 8 to
        15 by the second are products of the matrix: the first half of a token is column `token` there, the second
        column `tokens + token`."""
        machine, tokens = self.machine, self.columns.limit
        for group in range(groups_of(tokens, 2)):
            first = machine.lane % 4 * 2 + group * COLUMNS
            with ch.if_(2 * tokens >= COLUMNS or first < 2 * tokens):
                for index in range(2):
                    half, place = self._half_and_place(group, index)
                    of_half = [sums[group][index], sums[group][index + 2]]
                    value = of_half[half] if isinstance(half, int) else ch.select(half == 0, *of_half)
                    reduction[own + place + half * NARROW_ROWS] = value

    def _half_and_place(self, group: int, index: int) -> tuple[Any, Any]:
        """What column 2 * (lane % 4) + index of a group is: a half, and where its token's sums lie."""
        tokens, pairs = self.columns.limit, self.machine.plan.column_pairs
        if tokens == 1:
            return index, 0
        pair, first = self.machine.lane % 4, index * M_TILE_ROWS
        if tokens >= COLUMNS:
            half, before = divmod(group * COLUMNS, tokens)
            return half, (pair + before // 2) * self.machine.plan.pair_sums + first
        return pair // pairs, pair % pairs * self.machine.plan.pair_sums + first

    @ch.function
    def _finish_rows(
        self,
        layout: MatrixLayout,
        m_tile: ch.Expr,
        column: ch.Expr,
        slot: int,
        epilogue: Epilogue,
        scaling: Scaling | None,
    ) -> None:
        """The rows of a slot, with what of it is worked out before the sums are there."""

        def row_sum() -> Any:
            if scaling is not None:
                scaling.learn(slot, column)
            total = self._sum_of_row(column, first=slot == 0)
            if layout.is_narrow:
                total = self._fold(total)
            return total if scaling is None else total * scaling.factors[slot]

        epilogue(self.rows(layout, m_tile, column, slot, row_sum))

    @ch.inline
    def rows(
        self, layout: MatrixLayout, m_tile: ch.Expr, column: ch.Expr, slot: int, row_sum: Callable[[], Any]
    ) -> Rows:
        """What a warp has of an M-tile, of each lane's column."""
        lane, count = self.machine.lane, layout.tile_rows
        row = lane % count
        if self.columns.limit == 1:
            is_own = lane < count
        else:
            is_own = column < self.columns.count
            if layout.is_narrow:
                is_own = is_own & (lane % M_TILE_ROWS < count)
        of_all = layout.of_all(m_tile, self.machine.rank)
        return Rows(of_all, m_tile // layout.blocks, row, column, is_own, slot, row_sum, count)

    @ch.inline
    def _fold(self, row_sum: ch.Expr) -> Any:
        """Of a narrow M-tile: rows 8 to 15 are rows 0 to 7 by the other half of their columns."""
        return row_sum + prim.shuffle_xor_f32(row_sum, NARROW_ROWS)

    @ch.inline
    def _sum_of_row(self, column: ch.Expr, first: bool) -> Any:
        """Add the warps' sums: of the first half of the warps and of the second half, each in order, then both. The
        `first` time for an M-tile, wait for them."""
        plan, lane = self.machine.plan, self.machine.lane
        half = plan.consumer_warps // 2
        reduction = self._reduction_of(self.adding)
        if plan.tokens == 1:
            own = reduction + (lane // M_TILE_ROWS * (half * plan.warp_sums) + lane % M_TILE_ROWS)
        else:
            own = reduction + (column // 2 * plan.pair_sums + lane)
        if first:
            prim.mbarrier_wait(self.summed + self.adding.stage, self.adding.parity)
        low = self._sum_of_warps(own, half)
        if plan.tokens == 1:
            return low + prim.shuffle_xor_f32(low, M_TILE_ROWS)
        return low + self._sum_of_warps(own + half * plan.warp_sums, half)

    @ch.inline
    def _sum_of_warps(self, own: ch.Expr, warps: int) -> Any:
        """What lies at `own` of so many neighbouring warps' sums."""
        total = ch.var(ty.f32, 0.0)
        with ch.for_(warps, unroll=True, name="other") as other:
            total += own[other * self.machine.plan.warp_sums]
        return total

    def _reduction_of(self, turn: RingCursor) -> Any:
        plan = self.machine.plan
        return self.machine.region("reductions", ty.f32) + turn.stage * (plan.consumer_warps * plan.warp_sums)
