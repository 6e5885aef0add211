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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import UNIT, UNITS_PER_TILE, Columns
from cheetah.blocks.exchange import Published
from cheetah.blocks.experts.choice import NO_RANK, Choice
from cheetah.blocks.linear.epilogue import HALF, GatedRows, PublishedRows, gated_of, place_of, publishing
from cheetah.blocks.linear.formats.vectors import store_unit
from cheetah.blocks.linear.fragments import Activations, groups_of
from cheetah.blocks.linear.interface import Around, ColumnScale, Epilogue, Prologue, Rows
from cheetah.blocks.linear.matvec import Matvec
from cheetah.blocks.linear.parts import Arrival, Part
from cheetah.blocks.linear.prologue import Slices, VectorPart, bring_units, clear_behind, load_vector
from cheetah.blocks.linear.share import OwnTile, Run, Share
from cheetah.blocks.machine import Machine
from cheetah.blocks.made_list import MadeList
from cheetah.lang import prim, ty
from cheetah.plan import M_TILE_ROWS, MatrixLayout
from cheetah.plan.formats import BF16, BY_WARPS
from cheetah.plan.index import ceil_div
from cheetah.plan.plan import COLUMNS


@dataclass(frozen=True, eq=False)
class ChosenRows(GatedRows):
    """activation(gate) * up times the column's weight, published at the rank that the expert has to the column.
    biases: of gate and up, bf16 [expert][row of the matrix], if they have some."""

    choice: Choice
    matrix: MatrixLayout
    biases: ch.Expr | None = None

    @ch.inline
    def __call__(self, rows: Rows) -> None:
        choice, matrix, gpu = self.choice, self.matrix, self.machine.rank
        number = matrix.of_rank(rows.m_tile, gpu)
        expert = choice.list.entry(number // matrix.m_tiles)
        rank = ch.const(ty.u32, choice.rank(rows.column, expert), name="rank")
        first = rank * (matrix.all_m_tiles * HALF) + matrix.of_all(number % matrix.m_tiles, gpu) * HALF
        chosen = replace(rows, is_own=rows.is_own & (rank != NO_RANK))
        publish = publishing(self.machine, self.into, chosen, first, HALF)
        bias = self._bias(expert, number, rows.row)
        value = ch.const(ty.f32, rows.sum() if bias is None else rows.sum() + bias, name="value")
        weight = ch.const(ty.f32, choice.weight(rows.column, rank), name="weight")  # known behind the sums
        gated = gated_of(value, self.activation)
        weighted = ch.const(ty.f32, gated * weight, name="weighted")
        publish(weighted)

    def _bias(self, expert: ch.Expr, number: ch.Expr, row: ch.Expr) -> Any:
        """Of the lane's row, in the M-tile of that number on its rank; known before that is waited for."""
        if self.biases is None:
            return None
        m_tile = self.matrix.of_all(number % self.matrix.m_tiles, self.machine.rank)
        place = (expert * self.matrix.all_m_tiles + m_tile) * M_TILE_ROWS + row
        return ch.const(ty.f32, prim.bf16_to_f32(self.biases[place]), name="bias")


@dataclass(frozen=True, eq=False)
class SharedRows(PublishedRows):
    """What the expert that every token has makes, times the column's weight of it, onto the residual: of the rows that
    the block owns, before what the chosen experts make is added to them and published."""

    machine: Machine
    choice: Choice

    @property
    def makes(self) -> tuple[str, ...]:
        return ()

    @ch.inline
    def __call__(self, rows: Rows) -> None:
        place, residual = place_of(self.machine, rows), self.machine.region("residual", ty.f32)
        value = ch.const(ty.f32, rows.sum(), name="value")
        weight = ch.const(ty.f32, self.choice.shared_weight(rows.column), name="weight")  # known behind the sums
        with ch.if_(rows.is_own):
            residual[place] = prim.fma_f32(value, weight, residual[place])


@dataclass(frozen=True, eq=False)
class WeighedBiases:
    """Of the experts' last matrices: those of a column's experts, each times the column's weight, ascending. biases:
    bf16 [expert][row], `rows` of each."""

    choice: Choice
    biases: ch.Expr
    rows: int

    @ch.inline
    def of(self, rows: Rows) -> Any:
        choice, row = self.choice, rows.m_tile * rows.count + rows.row
        total = ch.var(ty.f32, 0.0)
        if choice.columns.limit == 1:
            for number in range(choice.experts.chosen):
                bias = prim.bf16_to_f32(self.biases[choice.list.entry(number) * self.rows + row])
                total.set(total + choice.weight(0, ty.u32(number)) * bias)
            return total
        with ch.for_(choice.list.count, unroll=1, name="slot") as slot:
            expert = ch.const(ty.u32, choice.list.entry(slot), name="expert")
            rank = ch.const(ty.u32, choice.rank(rows.column, expert), name="rank")
            with ch.if_(rank != NO_RANK):
                total += choice.weight(rows.column, rank) * prim.bf16_to_f32(self.biases[expert * self.rows + row])
        return total


@dataclass(frozen=True, eq=False)
class RankedActivations(Activations):
    """What columns have of an expert beside a K-tile: `units` of rank 0, from which lie `offsets` units those of a
    lane's column of each group; zeros where `is_chosen` is false."""

    offsets: tuple[Any, ...] = ()
    is_chosen: tuple[Any, ...] = ()

    def operand(self, units: ch.Expr, group: int, part: int = 0) -> ch.Expr:
        values = ch.const(ty.u32x4, super().operand(units + self.offsets[group], group, part), name="values")
        words = (ch.select(self.is_chosen[group], getattr(values, word), ty.u32(0)) for word in "xyzw")
        return ch.const(ty.u32x4, prim.make_u32x4(*words), name="operand")


@dataclass(frozen=True, eq=False)
class RankedPart(Part):
    """The input of an expert: of each group of 8 columns how many units from those of rank 0 a lane's column has what
    it has of it, and whether it has anything."""

    offsets: tuple[Any, ...] = ()
    is_chosen: tuple[Any, ...] = ()

    def vectors(self, columns: Columns, matrix: MatrixLayout, tile: ch.Expr) -> Activations:
        of_first = Part.vectors(self, columns, matrix, tile)
        if not self.is_chosen:
            return replace(of_first, units=of_first.units + self.offsets[0])
        kept = of_first.units, matrix.halves, of_first.sums
        return RankedActivations(columns, *kept, self.offsets, self.is_chosen)


@dataclass(frozen=True, eq=False)
class AllParts(Prologue):
    """The input of `Added`: of every column what its experts made, rank after rank, `width` elements each. It comes
    whole, before the list's first entry; a part of it belongs to each entry."""

    choice: Choice
    source: Published
    width: int

    @property
    def machine(self) -> Any:
        return self.choice.machine

    @property
    def waits(self) -> tuple[str, ...]:
        return (self.source.name,)

    @property
    def most(self) -> int:
        """The highest rank."""
        return self.choice.experts.chosen - 1

    def begin(self, matrix: MatrixLayout, arrival: Arrival) -> None:
        columns, elements = self.choice.columns, self.width * self.choice.experts.chosen
        units, room = (width // UNIT * columns.limit for width in (self.width, matrix.padded_columns))
        kind = matrix.vector_kind(columns.limit)
        part = VectorPart(elements, elements, kind=kind, part_units=units, part_room=room, name="all_parts")
        with arrival.awaited():
            self._clear_behind(units, room)
            load_vector(columns, part, self.source)

    def _clear_behind(self, units: int, room: int) -> None:
        """What lies behind the units of every rank, up to where the next one begins."""
        machine, gap, count = self.choice.machine, room - units, self.choice.experts.chosen
        if not gap:
            return
        vector = machine.region("vector", ty.u32x4)
        with ch.for_(machine.thread, gap * count, machine.consumer_threads, unroll=1, name="padding") as number:
            vector[number // gap * room + units + number % gap] = prim.make_u32x4(0, 0, 0, 0)

    @ch.inline
    def parts(self, matrix: MatrixLayout, arrival: Arrival) -> Iterator[Part]:
        count = ch.const(ty.u32, self.choice.list.count, name="count")
        first, step = (self.machine.warp, self.machine.plan.consumer_warps) if self._is_by_warps(matrix) else (0, 1)
        with ch.for_(first, count, step, unroll=1, name="slot") as slot:
            offsets, is_chosen = self._ranked(matrix, slot)
            part = RankedPart(0, matrix.chunks, is_last=False, offsets=offsets, is_chosen=is_chosen)
            yield replace(part, ahead=slot) if self._is_by_warps(matrix) else part
        if self._is_by_warps(matrix):
            arrival.ring.skip(count)

    def _is_by_warps(self, matrix: MatrixLayout) -> bool:
        """Whether warps have entries of the list, each all of an expert's columns, and not each warp columns of every
        expert: of a single token, where that would be a K-tile at most, and all of a block's M-tiles are in the ring
        together. Not where kernels of more tokens are to make the same bits."""
        plan = self.machine.plan
        is_short = matrix.chunks == matrix.waves == 1 and matrix.k_tiles <= plan.consumer_warps
        fits = self.choice.columns.limit == 1 and self.choice.experts.chosen <= plan.stages
        is_free = bool(matrix.format.factor_bytes) and not matrix.by_numbers and not matrix.sums_bytes(1)
        return is_short and fits and is_free

    @ch.inline
    def _ranked(self, matrix: MatrixLayout, slot: ch.Expr) -> tuple[tuple[ch.Expr, ...], tuple[ch.Expr, ...]]:
        """Where this lane's columns have what they have of an entry of the list; see `RankedPart`."""
        limit = self.choice.columns.limit
        units = matrix.k_tiles * matrix.vector_units(limit)
        if limit == 1:
            return (ch.const(ty.u32, slot * units, name="offset"),), ()
        ranks = self._ranks(slot, groups_of(limit, matrix.halves), min(limit * matrix.halves, COLUMNS))
        offsets = tuple(ch.const(ty.u32, ch.minimum(rank, self.most) * units, name="offset") for rank in ranks)
        return offsets, tuple(ch.const(ty.boolean, rank != NO_RANK, name="is_chosen") for rank in ranks)

    @ch.inline
    def _ranks(self, slot: ch.Expr, groups: int, among: int) -> list[ch.Expr]:
        """The ranks that an entry of the list has to this lane's columns, one of each group, of `among` in a warp."""
        choice, limit = self.choice, self.choice.columns.limit
        expert = ch.const(ty.u32, choice.list.entry(slot), name="expert")
        ranks = []
        for group in range(groups):
            column = (choice.machine.lane // UNITS_PER_TILE % among + group * COLUMNS) % limit
            ranks.append(ch.const(ty.u32, choice.rank(column, expert), name="rank"))
        return ranks


@dataclass(frozen=True, eq=False)
class PartsInTurn(AllParts):
    """The same of several columns where it does not fit into shared memory whole. Of every column `kept` ranks are
    there, those that come next; where some column is through with its own, the next ones of all are brought. Or, with
    `kept` 1, a slice of a rank at a time, of the columns that chose the entry's expert.

    A thread reads the same words of every rank each time, whenever that is, as a vector of tagged words wants it."""

    kept: int = 1

    def begin(self, matrix: MatrixLayout, arrival: Arrival) -> None:
        """Nothing: what is brought, is brought for an entry of the list."""

    @ch.inline
    def parts(self, matrix: MatrixLayout, arrival: Arrival) -> Iterator[Part]:
        choice, tiles = self.choice, self.choice.columns.tiles
        assert matrix.vector_kind(choice.columns.limit) not in BY_WARPS, matrix
        count = ch.const(ty.u32, choice.list.count, name="count")
        of_slice = [matrix.slice_range(index) for index in range(ceil_div(matrix.chunks, matrix.slice_chunks))]
        units = matrix.k_tiles * matrix.vector_units(choice.columns.limit)
        passed = [ch.var(ty.u32, 0, name="passed") for _ in range(tiles)]  # ranks of the lane's columns
        there = [ch.var(ty.u32, 0, name="there") for _ in range(tiles)]  # of those in shared memory the first
        with ch.for_(count, unroll=1, name="slot") as slot:
            ranks = self._ranks(slot, tiles, min(choice.columns.limit, COLUMNS))
            is_chosen = [ch.const(ty.boolean, rank != NO_RANK, name="is_chosen") for rank in ranks]
            if matrix.slices == 1:
                with ch.if_((slot == 0) | self._lacks(ranks, is_chosen, there)):
                    for first, rank in zip(there, passed, strict=True):
                        first.set(rank)
                    self._bring(matrix, slot, there, of_slice[0], arrival)
            for index, (first_chunk, end) in enumerate(of_slice):
                if matrix.slices > 1:
                    self._bring(matrix, slot, ranks, (first_chunk, end), arrival, is_first=index == 0)
                offsets = [
                    ch.const(ty.u32, ch.minimum(rank - first, self.kept - 1) * units, name="offset")
                    if self.kept > 1
                    else ch.argument(0)
                    for rank, first in zip(ranks, there, strict=True)
                ]
                halves = groups_of(choice.columns.limit, matrix.halves)
                yield RankedPart(
                    *(first_chunk, end),
                    is_last=False,
                    begins=index == 0,
                    ends=index == len(of_slice) - 1,
                    offsets=tuple(offsets[group % tiles] for group in range(halves)),
                    is_chosen=tuple(is_chosen[group % tiles] for group in range(halves)),
                )
            for rank, own, chosen in zip(passed, ranks, is_chosen, strict=True):
                with ch.if_(chosen):
                    rank.set(own + 1)

    @ch.inline
    def _lacks(self, ranks: list[ch.Expr], is_chosen: list[ch.Expr], there: list[Any]) -> ch.Expr:
        """Whether some column's part is not there. All warps find the same: each has all columns among its lanes."""
        lacks = ch.var(ty.u32, 0)
        for rank, chosen, first in zip(ranks, is_chosen, there, strict=True):
            with ch.if_(chosen & (rank - first >= self.kept)):
                lacks.set(1)
        return prim.warp_maximum_u32(lacks) != 0

    @ch.inline
    def _bring(
        self,
        matrix: MatrixLayout,
        slot: ch.Expr,
        ranks: Sequence[Any],
        chunks: tuple[int, int],
        arrival: Arrival,
        is_first: bool = True,
    ) -> None:
        """Chunks [first, end) of `kept` ranks from the first of each column on, of ranks that there are; when all have
        multiplied what was there before."""
        columns, machine = self.choice.columns, self.choice.machine
        elements = matrix.tiles_per_chunk * matrix.tile_columns
        first, end = chunks[0] * elements, min(chunks[1] * elements, matrix.padded_columns)
        kind = matrix.vector_kind(columns.limit)
        part = VectorPart(end - first, min(end, self.width) - first, kind=kind)
        machine.meet()
        with arrival.awaited(False):
            if is_first:
                self._wait_for_first(slot)
            own, source = ranks[0], replace(self.source, one_waits=False)
            for tile in range(1, columns.tiles):
                own = ch.select(machine.warp % columns.tiles == tile, ranks[tile], own)
            own = ch.const(ty.u32, own, name="own_rank")
            with ch.for_(self.kept, unroll=1, name="turn") as turn:
                rank = ch.const(ty.u32, own + turn, name="rank")
                at = turn * (part.elements // UNIT * columns.limit)
                with ch.if_(rank <= self.most):
                    begin = (rank * (self.width // UNIT) + first // UNIT) * columns.limit
                    bring_units(columns, replace(part, first_unit=begin, at=at), source)
                clear_behind(columns, replace(part, at=at))
        machine.meet()
        if is_first:
            with ch.if_(slot == 0):
                arrival.timeline.stamp_here("ready")

    @ch.inline
    def _wait_for_first(self, slot: ch.Expr) -> None:
        """A lane for its warp, for a word that it reads of its column's first rank, before all lanes poll."""
        columns = self.choice.columns
        assert self.source.wait is not None
        is_used = True if columns.limit <= COLUMNS else columns.of_thread() < columns.count
        with ch.if_(slot == 0):
            self.source.wait(columns.machine.thread, is_used)


@dataclass(frozen=True, eq=False)
class Brought(Prologue):
    """An input that lies in shared memory already, in a region, with the scales of its columns."""

    inner: Prologue
    region: str

    @property
    def waits(self) -> tuple[str, ...]:
        return self.inner.waits

    def scale_of_products(self) -> ColumnScale | None:
        return self.inner.scale_of_products()

    def begin(self, matrix: MatrixLayout, arrival: Arrival) -> None:
        assert self.scale_of_products() is not None, matrix.name
        arrival.tell_loaded()

    def parts(self, matrix: MatrixLayout, arrival: Arrival) -> Iterator[Part]:
        yield Part(0, matrix.chunks, region=self.region)


@dataclass(frozen=True, eq=False)
class Weighing(Around):
    """An input behind which the first warp says what the chosen experts weigh: by the scale of its products."""

    choice: Choice

    @ch.inline
    def begin(self, matrix: MatrixLayout, arrival: Arrival) -> None:
        scale = self.scale_of_products()
        assert scale is not None, matrix.name
        self.inner.begin(matrix, arrival)
        with ch.if_(self.choice.machine.warp == 0):
            self.choice.weigh_kept(ch.const(ty.f32, scale.of(ch.argument(0), scale.arguments), name="scale"))
        self.choice.list.finish_told()


# -- which M-tiles ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dealt(Share):
    """The M-tiles of all matrices of the list, dealt to the blocks one after another. The plan sees to it that each has
    one. goes_on: whether adding warps follow the list behind it."""

    list: MadeList
    goes_on: bool = False

    @property
    def about_fetch(self) -> str:
        return f"The block's M-tiles of the chosen experts' {self.matrix.name}, once they are chosen."

    @property
    def about_finish(self) -> str:
        return f"The block's M-tiles of the chosen experts' {self.matrix.name}: sums added up, rows finished."

    def begin(self, role: ch.Role) -> None:
        self.list.begin_following(role)

    def end(self, role: ch.Role) -> None:
        """The producer lane follows the list on in `Added`, and adding warps where that asks for it."""
        if role is self.machine.adder and not self.goes_on:
            self.list.finish_following(role)

    def if_any(self, position: ch.Expr) -> ch.if_:
        return ch.if_(True)

    @ch.inline
    def m_tiles(self, position: ch.Expr) -> Iterator[ch.Expr]:
        """M-tile t of the list's entry s is number s * m_tiles + t."""
        end = ch.const(ty.u32, self.list.count * self.matrix.m_tiles, name="end")
        with ch.for_(position, end, self.matrix.blocks, unroll=1, name="number") as number:
            yield number

    @ch.inline
    def runs(self, position: ch.Expr) -> Iterator[Run]:
        matrix = self.matrix
        for number in self.m_tiles(position):
            expert = ch.const(ty.u32, self.list.entry(number // matrix.m_tiles), name="expert")
            m_tile = ch.const(ty.u32, number % matrix.m_tiles, name="m_tile")
            yield Run(m_tile, m_tile % matrix.blocks, 0, matrix.chunks, expert)

    def strips(self, position: ch.Expr) -> Iterator[Sequence[OwnTile]]:
        for number in self.m_tiles(position):
            yield [OwnTile(True, number < self.matrix.blocks, False)]


@dataclass(frozen=True, eq=False)
class Added(Share):
    """A block's rows of every matrix of the list, entry by entry; their sums stay in registers from the first to the
    last. asks: whether adding warps ask for the list's experts."""

    list: MadeList
    asks: bool = False

    @property
    def about_fetch(self) -> str:
        return f"The block's M-tiles of every chosen expert's {self.matrix.name}, expert by expert."

    def end(self, role: ch.Role) -> None:
        if role is self.machine.producer or self.asks:
            self.list.finish_following(role)

    @ch.inline
    def runs(self, position: ch.Expr) -> Iterator[Run]:
        with ch.for_(self.list.count, unroll=1, name="slot") as slot:
            expert = ch.const(ty.u32, self.list.entry(slot), name="expert")
            for run in super().runs(position):
                yield replace(run, expert=expert)

    @property
    def sums_wait(self) -> bool:
        return True

    @property
    def is_of_several(self) -> bool:
        return True


class ExpertProducts:
    """Products of a kernel whose matrices are of experts, beside its others, `linear`. dealt: those that have the
    router's input too, which is converted for them where they take it otherwise. has_biases: all of them. beside: the
    matrix between, of the same input, if there is one."""

    def __init__(
        self,
        linear: Matvec,
        choice: Choice,
        dealt: MatrixLayout,
        has_biases: bool = False,
        beside: MatrixLayout | None = None,
    ) -> None:
        self.linear, self.choice, self.list, self.dealt = linear, choice, choice.list, dealt
        self.has_biases = has_biases
        self._last = beside if beside is not None and beside.format == BF16 else None
        """What is multiplied with the input as it is, behind the router."""
        self.machine, self.columns = linear.machine, linear.columns

    def route(self, matrix: MatrixLayout, prologue: Prologue, epilogue: Epilogue) -> None:
        """The router times the input, which every block brings, whether it owns rows of the router or not: `deal` then
        finds it in shared memory, and waits for nothing behind the choice.

        The adding warps are told of it where the product begins, and those of a block that owns no rows never: there
        nobody would wait for them, and the next input could be told of before they have come to this one."""
        assert isinstance(prologue, Slices), matrix.name
        with self.machine.consumer, self.linear.arrival.awaited():
            prologue.load(matrix, 0)
        self.linear(matrix, Brought(prologue, "vector"), epilogue)
        if self._converts and self._last is None:
            with self.machine.consumer:
                self._convert(matrix)

    def beside(self, matrix: MatrixLayout, prologue: Prologue, epilogue: Epilogue) -> None:
        """Another matrix times the router's input, which is there; that is converted behind it where it takes bf16."""
        if self._last is None and self._converts:
            with self.machine.consumer:
                self.machine.meet()  # all have converted what they brought
        self.linear(matrix, Brought(prologue, "vector" if self._last or not self._converts else "dealt"), epilogue)
        if self._last is not None and self._converts:
            with self.machine.consumer:
                self._convert(matrix)

    def deal(self, matrix: MatrixLayout, prologue: Prologue, epilogue: Epilogue) -> None:
        """The matrices of the list's experts times the input, M-tile by M-tile. The input is there, see `route`; or,
        where the router is fused, it is brought now, and it becomes known what the experts weigh."""
        brought: Prologue = Brought(prologue, "dealt" if self._converts else "vector")
        if self.choice.is_fused:
            assert isinstance(prologue, Slices) and isinstance(prologue.source, Published), matrix.name
            late = replace(prologue, source=replace(prologue.source, late_warps=1))  # the one that chooses
            brought = Weighing(late, self.choice)
        self.linear.of_share(Dealt(self.machine, matrix, self.list, self.has_biases), brought, epilogue)

    def add(self, matrix: MatrixLayout, prologue: Prologue, epilogue: Epilogue) -> None:
        """The sum, over the list's experts, of their matrices times what each column has of them."""
        self.linear.of_share(Added(self.machine, matrix, self.list, self.has_biases), prologue, epilogue)

    @property
    def _converts(self) -> bool:
        """Whether experts take the router's input otherwise, or with more padding."""
        return self.dealt.format != BF16

    @ch.function
    def _convert(self, router: MatrixLayout) -> None:
        """What the router has multiplied, as experts take it, by all consumer threads; they meet before it is read,
        behind the choice. Where units keep their places, each stays with its thread."""
        machine, limit, kind = self.machine, self.columns.limit, self.dealt.vector_kind(self.columns.limit)
        vector, dealt = machine.region("vector", ty.u32x4), machine.region("dealt", ty.u32x4)
        there, units = (one.padded_columns // UNIT * limit for one in (router, self.dealt))
        with ch.for_(machine.thread, there, machine.consumer_threads, unroll=1, name="unit") as unit:
            words = ch.const(ty.u32x4, vector[unit], name="words")
            store_unit(self.columns, dealt, unit, words, kind)
        if there < units:
            with ch.for_(machine.thread + there, units, machine.consumer_threads, unroll=1, name="padding") as unit:
                dealt[unit] = prim.make_u32x4(0, 0, 0, 0)
