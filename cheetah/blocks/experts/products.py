"""The products of a step's experts: of the list of those that some column chose, made on the device, all three roles
take the same M-tiles.

Up to the middle of a feed-forward (`Dealt`), M-tile t of the list's entry s is number s * m_tiles + t, and numbers are
dealt to the blocks one after another: no expert belongs to a block. Every column is multiplied by every expert of the
list; what becomes of it is published for those that chose the expert, at the expert's rank (`ChosenRows`).

From there back to the residual (`Added`), a block has its rows of all experts, whose sums stay in registers from the
list's first entry to its last. A column that did not choose an expert adds zeros, exactly: so what a column's sums are,
in which order, does not depend on the others. K-tile k of every expert is multiplied by the same warp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import UNIT, UNITS_PER_TILE, Columns
from cheetah.blocks.exchange import Published
from cheetah.blocks.experts.choice import NO_RANK, Choice
from cheetah.blocks.linear.epilogue import HALF, GatedRows, gated_of, publishing
from cheetah.blocks.linear.formats import accumulators_of
from cheetah.blocks.linear.formats.vectors import store_unit
from cheetah.blocks.linear.fragments import Activations
from cheetah.blocks.linear.interface import Epilogue, Prologue, Rows
from cheetah.blocks.linear.matvec import Matvec
from cheetah.blocks.linear.prologue import VectorPart, load_vector
from cheetah.lang import prim, ty
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import BF16_VECTOR
from cheetah.plan.plan import COLUMNS


@dataclass(frozen=True, eq=False)
class AllParts(Prologue):
    """The input of `Added`, whole: of every column what its experts made, rank after rank, `width` elements each."""

    choice: Choice
    source: Published
    width: int

    @property
    def columns(self) -> Columns:
        return self.choice.columns

    @property
    def waits(self) -> tuple[str, ...]:
        return (self.source.name,)

    def load(self, matrix: MatrixLayout, index: int) -> None:
        elements, kind = self.width * self.choice.experts.chosen, matrix.vector_kind(self.columns.limit)
        load_vector(self.columns, VectorPart(elements, elements, kind=kind), self.source)


@dataclass(frozen=True, eq=False)
class ChosenRows(GatedRows):
    """activation(gate) * up times the column's weight, published at the rank that the expert has to the column."""

    choice: Choice
    matrix: MatrixLayout

    @ch.inline
    def __call__(self, rows: Rows) -> None:
        choice, m_tiles = self.choice, self.matrix.m_tiles
        expert = choice.list.entry(rows.m_tile // m_tiles)
        rank = ch.const(ty.u32, choice.rank(rows.column, expert), name="rank")
        first = rank * (m_tiles * HALF) + rows.m_tile % m_tiles * HALF
        chosen = replace(rows, is_own=rows.is_own & (rank != NO_RANK))
        publish = publishing(self.machine, self.into, chosen, first, HALF)
        weight = ch.const(ty.f32, choice.weight(rows.column, rank), name="weight")
        value = ch.const(ty.f32, rows.sum(), name="value")
        gated = gated_of(value, self.activation)
        weighted = ch.const(ty.f32, gated * weight, name="weighted")
        publish(weighted)


@dataclass(frozen=True, eq=False)
class RankedActivations(Activations):
    """What columns have of an expert beside a K-tile: `units` of rank 0, from which lie `offsets` units those of a
    lane's column of each group; zeros where `is_chosen` is false."""

    offsets: tuple[Any, ...] = ()
    is_chosen: tuple[Any, ...] = ()

    def operand(self, units: ch.Expr, group: int, part: int = 0) -> Any:
        values = ch.const(ty.u32x4, super().operand(units + self.offsets[group], group, part), name="values")
        words = (ch.select(self.is_chosen[group], getattr(values, word), ty.u32(0)) for word in "xyzw")
        return ch.const(ty.u32x4, prim.make_u32x4(*words), name="operand")


class ExpertProducts:
    """Products of a kernel whose matrices are of experts, beside its others, `linear`. dealt: those that have the
    router's input too, which is converted for them where they take it otherwise."""

    def __init__(self, linear: Matvec, choice: Choice, dealt: MatrixLayout) -> None:
        self.linear, self.choice, self.list, self.dealt = linear, choice, choice.list, dealt
        self.machine, self.columns, self.ring = linear.machine, linear.columns, linear.ring

    def route(self, matrix: MatrixLayout, prologue: Prologue, epilogue: Epilogue) -> None:
        """The router times the input, which every block brings, whether it owns rows of the router or not: `deal` then
        finds it in shared memory, and waits for nothing behind the choice."""
        with self.machine.producer:
            self.linear.copy(matrix)
        with self.machine.consumer:
            prologue.prepare()
            self._bring(matrix, prologue)
            self._multiply_router(matrix)
            if self._converts:
                self._convert(matrix)
            self.linear.timeline.stamp_here("done")
        with self.machine.adding():
            self.linear.finish(matrix, epilogue, prologue.scale_of_products())

    def deal(self, matrix: MatrixLayout, prologue: Prologue, epilogue: Epilogue) -> None:
        """The matrices of the list's experts times the input, M-tile by M-tile. The input is there, see `route`."""
        with self.machine.producer:
            self._copy_dealt(matrix)
        with self.machine.consumer:
            self._multiply_dealt(matrix)
            self.linear.timeline.stamp_here("done")
        with self.machine.adding():
            self._finish_dealt(matrix, epilogue, prologue)

    def add(self, matrix: MatrixLayout, prologue: Prologue, epilogue: Epilogue) -> None:
        """The sum, over the list's experts, of their matrices times what each column has of them."""
        assert matrix.slices == 1 and matrix.padded_columns == matrix.columns, matrix
        with self.machine.producer:
            self._copy_added(matrix)
        with self.machine.consumer:
            prologue.prepare()
            self._multiply_added(matrix, prologue)
            self.linear.timeline.stamp_here("done")
        with self.machine.adding():
            self.linear.finish(matrix, epilogue)

    # -- which M-tiles ---------------------------------------------------------------------------------------------

    @contextmanager
    @ch.inline
    def _dealt(self, matrix: MatrixLayout) -> Iterator[Any]:
        """The numbers of the M-tiles that are dealt to this block. The plan sees to it that there is one."""
        position = matrix.position(self.machine.block)
        end = ch.const(ty.u32, self.list.count * matrix.m_tiles, name="end")
        with ch.for_(position, end, matrix.blocks, unroll=1, name="number") as number:
            yield number

    @ch.inline
    def _copy_m_tile(self, matrix: MatrixLayout, expert: ch.Expr, m_tile: ch.Expr) -> None:
        """All chunks of an expert's M-tile."""
        linear, wave = self.linear, m_tile // matrix.blocks
        own = ty.u64(expert) * matrix.expert_bytes + matrix.wave_address(ty.u64(wave))
        begin = ch.const(ty.ptr(ty.u8), linear.weights + (linear.layer_offset + matrix.offset + own), name="begin")
        width = ch.const(ty.u32, matrix.wave_width(wave), name="width")
        with ch.for_(matrix.chunks, unroll=1, name="chunk") as chunk:
            chunk_bytes = matrix.chunk_bytes(chunk)
            source = begin + ty.u64(matrix.chunk_address(chunk, m_tile % matrix.blocks, width))
            with self.ring.fill(chunk_bytes) as (destination, barrier):
                prim.bulk_copy(destination, source, chunk_bytes, barrier)

    # -- the input of the router, and of those that are dealt --------------------------------------------------------

    @property
    def _converts(self) -> bool:
        return self.dealt.vector_kind(self.columns.limit) != BF16_VECTOR

    @ch.function
    def _convert(self, router: MatrixLayout) -> None:
        """What the router has multiplied, as experts take it, by all consumer threads; they meet before it is read,
        behind the choice."""
        machine, limit, kind = self.machine, self.columns.limit, self.dealt.vector_kind(self.columns.limit)
        vector, dealt = machine.region("vector", ty.u32x4), machine.region("dealt", ty.u32x4)
        there, units = (one.padded_columns // UNIT * limit for one in (router, self.dealt))
        with ch.for_(machine.thread, there, machine.consumer_threads, unroll=1, name="unit") as unit:
            words = ch.const(ty.u32x4, vector[unit], name="words")
            store_unit(self.columns, dealt, unit, words, kind)
        if there < units:
            with ch.for_(machine.thread + there, units, machine.consumer_threads, unroll=1, name="padding") as unit:
                dealt[unit] = prim.make_u32x4(0, 0, 0, 0)

    def _beside_dealt(self, chunk: ch.Expr) -> Any:
        """For `Matvec`: the vectors beside a tile of a chunk."""
        matrix, limit = self.dealt, self.columns.limit
        if not self._converts:
            return chunk

        def vectors(pair: ch.Expr) -> Activations:
            tile = chunk * matrix.tiles_per_chunk + pair
            units = self.machine.region("dealt", ty.u32x4) + tile * matrix.vector_units(limit)
            return Activations(self.columns, units, matrix.halves, self._sums_beside(matrix, tile))

        return vectors

    def _sums_beside(self, matrix: MatrixLayout, tile: Any) -> Any:
        """Where what zero points need of the vectors beside a K-tile is kept, if they need anything."""
        sums_bytes = matrix.sums_bytes(self.columns.limit)
        return self.machine.region("vector_sums", ty.f32) + tile * (sums_bytes // 4) if sums_bytes else None

    @ch.inline
    def _sum_vectors(self, matrix: MatrixLayout, beside: Callable[[ch.Expr], Any]) -> None:
        """What zero points need of all vectors beside an M-tile."""
        if matrix.sums_bytes(self.columns.limit):
            with ch.for_(matrix.chunks, unroll=1) as chunk:
                self.linear._sum_chunk(matrix, chunk, beside(chunk))

    # -- dealt -----------------------------------------------------------------------------------------------------

    @ch.inline
    def _copy_dealt(self, matrix: MatrixLayout) -> None:
        self.ring.fills(matrix.name)
        about = f"The block's M-tiles of the chosen experts' {matrix.name}, once they are chosen."
        with ch.outline(f"fetch_{matrix.name}", about):
            self.list.begin_following(self.machine.producer)
            with self._dealt(matrix) as number:
                expert = ch.const(ty.u32, self.list.entry(number // matrix.m_tiles), name="expert")
                m_tile = ch.const(ty.u32, number % matrix.m_tiles, name="m_tile")
                self._copy_m_tile(matrix, expert, m_tile)

    @ch.inline
    def _bring(self, matrix: MatrixLayout, prologue: Prologue) -> None:
        self.ring.begin_waiting()
        prologue.load(matrix, 0)
        self.ring.end_waiting()
        self.linear.timeline.stamp_here("ready")

    @ch.inline
    def _multiply_router(self, matrix: MatrixLayout) -> None:
        linear, position = self.linear, matrix.position(self.machine.block)
        self.ring.uses(matrix.name)
        with linear._if_any(matrix, position):
            self._tell_loaded()
            with ch.for_(position, matrix.m_tiles, matrix.blocks, unroll=1):
                self._multiply_m_tile(matrix, lambda chunk: chunk)
            linear._wait_until_taken()

    @ch.inline
    def _tell_loaded(self) -> None:
        """The adding warps may look for the input's scale."""
        with ch.if_(self.machine.thread == 0):
            prim.mbarrier_arrive(self.linear.loaded)

    @ch.inline
    def _multiply_m_tile(self, matrix: MatrixLayout, beside: Callable[[ch.Expr], Any]) -> None:
        linear = self.linear
        sums = ch.array(ty.f32, accumulators_of(matrix, self.columns.limit), 4, zero=True)
        with ch.for_(matrix.chunks, unroll=2) as chunk:
            linear._use_chunk(matrix, chunk, beside(chunk), sums, False)
        linear.timeline.stamp_here("last_chunk")
        linear._hand_over(matrix, sums)

    @ch.inline
    def _multiply_dealt(self, matrix: MatrixLayout) -> None:
        linear = self.linear
        self.ring.uses(matrix.name)
        self._tell_loaded()
        self._sum_vectors(matrix, self._beside_dealt)
        with self._dealt(matrix):
            self._multiply_m_tile(matrix, self._beside_dealt)
        linear._wait_until_taken()

    @ch.inline
    def _finish_dealt(self, matrix: MatrixLayout, epilogue: Epilogue, prologue: Prologue) -> None:
        linear, scale = self.linear, prologue.scale_of_products()
        assert scale is not None, matrix.name
        about = f"The block's M-tiles of the chosen experts' {matrix.name}: sums added up, rows finished."
        with ch.outline(f"finish_{matrix.name}", about):
            self.list.begin_following(self.machine.adder)
            scaling, turn = linear._begin_scaling(scale), linear.adding
            with self._dealt(matrix) as number:
                with linear._if_ours():
                    linear._take(matrix, number, epilogue, scaling)
                turn.advance()
            linear._end_scaling()
            self.list.finish_following(self.machine.adder)

    # -- added -----------------------------------------------------------------------------------------------------

    @ch.inline
    def _copy_added(self, matrix: MatrixLayout) -> None:
        self.ring.fills(matrix.name)
        about = f"The block's M-tiles of every chosen expert's {matrix.name}, expert by expert."
        with ch.outline(f"fetch_{matrix.name}", about):
            position = matrix.position(self.machine.block)
            with ch.for_(self.list.count, unroll=1, name="slot") as slot:
                expert = ch.const(ty.u32, self.list.entry(slot), name="expert")
                with ch.for_(position, matrix.m_tiles, matrix.blocks, unroll=1) as m_tile:
                    self._copy_m_tile(matrix, expert, m_tile)
            self.list.finish_following(self.machine.producer)

    @ch.inline
    def _multiply_added(self, matrix: MatrixLayout, prologue: Prologue) -> None:
        linear = self.linear
        self.ring.uses(matrix.name)
        position = matrix.position(self.machine.block)
        with linear._if_any(matrix, position):
            self._bring(matrix, prologue)
            sums = linear._sums_of_waves(matrix)
            count = ch.const(ty.u32, self.list.count, name="count")
            with ch.for_(count, unroll=1, name="slot") as slot:
                offsets, is_chosen = self._ranked(matrix, slot)
                beside = functools.partial(self._beside, matrix, offsets, is_chosen)
                self._sum_vectors(matrix, beside)
                for wave in range(matrix.waves):
                    with linear._has_m_tile(matrix, position, wave), self._added_to(matrix, sums[wave]) as own:
                        with ch.for_(matrix.chunks, unroll=2) as chunk:
                            linear._use_chunk(matrix, chunk, beside(chunk), own, False)
            linear._hand_over_waves(matrix, position, sums)
            linear._wait_until_taken()

    @ch.inline
    def _ranked(self, matrix: MatrixLayout, slot: ch.Expr) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """How many units from those of rank 0 this lane's columns have what they have of an expert, and whether they
        have anything; of each group of 8 columns."""
        limit = self.columns.limit
        units = matrix.k_tiles * matrix.vector_units(limit)
        if limit == 1:
            return (ch.const(ty.u32, slot * units, name="offset"),), ()
        expert = ch.const(ty.u32, self.list.entry(slot), name="expert")
        ranks = []
        for group in range(self.linear._groups(matrix)):
            among = min(limit * matrix.halves, COLUMNS)
            column = (self.machine.lane // UNITS_PER_TILE % among + group * COLUMNS) % limit
            ranks.append(ch.const(ty.u32, self.choice.rank(column, expert), name="rank"))
        most = self.choice.experts.chosen - 1
        offsets = tuple(ch.const(ty.u32, ch.minimum(rank, most) * units, name="offset") for rank in ranks)
        return offsets, tuple(ch.const(ty.boolean, rank != NO_RANK, name="is_chosen") for rank in ranks)

    @contextmanager
    @ch.inline
    def _added_to(self, matrix: MatrixLayout, sums: Any) -> Iterator[Any]:
        """Sums of an expert, that are added to those of all: by themselves where its rows have factors of their own."""
        if not matrix.format.factor_bytes:
            yield sums
            return
        own = ch.array(ty.f32, accumulators_of(matrix, self.columns.limit), 4, zero=True, name="own")
        yield own
        for group in range(self.linear._groups(matrix)):
            for index in range(4):
                sums[group][index] = sums[group][index] + own[group][index]

    def _beside(self, matrix: MatrixLayout, offsets: Any, is_chosen: Any, chunk: ch.Expr) -> Any:
        """For `Matvec`: the vectors beside a tile of a chunk."""
        each = matrix.vector_units(self.columns.limit)

        def vectors(pair: ch.Expr) -> Activations:
            tile = chunk * matrix.tiles_per_chunk + pair
            units = self.machine.region("vector", ty.u32x4) + tile * each
            kept = self._sums_beside(matrix, tile)
            if not is_chosen:
                return Activations(self.columns, units + offsets[0], matrix.halves, kept)
            return RankedActivations(self.columns, units, matrix.halves, kept, offsets, is_chosen)

        return vectors
