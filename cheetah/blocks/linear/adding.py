"""The adder role: the consumer warps' sums of an M-tile added up, times the scale of their column, to an epilogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.epilogue import PublishedRows
from cheetah.blocks.linear.interface import ColumnScale, Epilogue, Rows
from cheetah.blocks.linear.matrix import RecordedShare, record_of, recorded
from cheetah.blocks.linear.reductions import Reductions
from cheetah.blocks.linear.share import Share
from cheetah.blocks.ring import RingCursor
from cheetah.lang import prim, ty
from cheetah.plan import M_TILE_ROWS, MatrixLayout
from cheetah.plan.formats import NARROW_ROWS


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

    def learn(self, slot: int, column: ch.Expr) -> None:
        """Before the products are waited for."""
        self._learn_scale(self.factors[slot], column, self.scale.arguments)

    @ch.function
    def _learn_scale(self, scale: Any, column: ch.Expr, arguments: tuple[Any, ...]) -> None:
        """The scale of a column, once the block has its input, unless it is known."""
        with ch.if_(scale == 0.0):  # the same in all lanes
            prim.mbarrier_wait(self.loaded, self.parity)
            scale.set(self.scale.of(column, arguments))


class Adding:
    """The adding warps of a kernel: they finish all its products. All calls are the adder role's but where one says
    otherwise."""

    def __init__(self, reductions: Reductions) -> None:
        self.reductions = reductions
        self.machine, self.columns = reductions.machine, reductions.columns
        self._start()

    @ch.inline
    def _start(self) -> None:
        """A cursor over the reductions, and the parity of `loaded`."""
        with self.machine.adder:
            adding = ch.var(ty.u32, 0)
            adding_parity = ch.var(ty.u32, 0)
            loaded_parity = ch.var(ty.u32, 0)
            self.turn = RingCursor(adding, adding_parity, self.machine.plan.reductions)
            self.loaded_parity, _ = loaded_parity, None

    # -- which columns a warp finishes -----------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Pairs of columns that an adding warp has."""
        plan = self.machine.plan
        return plan.column_pairs // plan.finishers

    @property
    def group(self) -> ch.Expr:
        """Which of the groups that take M-tiles in turn this warp is in."""
        return self.machine.adder_number // self.machine.plan.finishers

    def column_of(self, slot: int) -> Any:
        """This lane's column of a slot."""
        plan = self.machine.plan
        if plan.tokens == 1:
            return ty.u32(0)
        pair = self.machine.adder_number % plan.finishers + slot * plan.finishers
        return ch.const(ty.u32, self.column_of_pair(pair), name="column")

    def column_of_pair(self, pair: ch.Expr) -> ch.Value:
        """In any role: this lane's column of a pair of them."""
        return pair * 2 + self.machine.lane // M_TILE_ROWS if self.machine.plan.tokens > 1 else 0

    def _if_ours(self) -> ch.if_:
        """Whether the M-tile whose turn it is, is this warp's group's to finish: each has a reduction of its own."""
        return ch.if_(self.machine.plan.finishing_groups == 1 or self.turn.stage == self.group)

    # -- finishing -------------------------------------------------------------------------------------------------

    @ch.inline
    def finish(
        self, share: Share, epilogue: Epilogue, scale: ColumnScale | None = None, dealt: ch.Expr | None = None
    ) -> None:
        """The rows of the block's M-tiles of a matrix, as the consumer warps hand them over, times the scale of their
        column. dealt: of a matrix whose M-tiles are dealt by bytes which of them lies in a slot (u32)."""
        arguments = epilogue.arguments if isinstance(epilogue, PublishedRows) else ()
        if arguments and type(share) is Share and scale is None and dealt is None:
            self._finish_matrix(share.matrix, record_of(share.matrix), epilogue, arguments)
            return
        with ch.outline(f"finish_{share.matrix.name}", share.about_finish):
            self._finish(share, epilogue, scale, arguments, dealt)

    @ch.function
    def _finish_matrix(
        self, layout: MatrixLayout, matrix: ch.Expr, epilogue: Epilogue, arguments: tuple[Any, ...]
    ) -> None:
        """The block's M-tiles of a matrix: the warps' sums added up, the rows finished."""
        share = RecordedShare(self.machine, recorded(layout, matrix, ("m_tiles", "start")), layout)
        self._finish(share, epilogue, None, arguments)

    @ch.inline
    def _finish(
        self,
        share: Share,
        epilogue: Epilogue,
        scale: ColumnScale | None,
        arguments: tuple[Any, ...],
        dealt: ch.Expr | None = None,
    ) -> None:
        share.begin(self.machine.adder)
        position, turn = share.position, self.turn
        with share.if_any(position):
            scaling = None if scale is None else self._begin_scaling(scale)
            for m_tile in share.m_tiles(position):
                with self._if_ours():
                    own = m_tile
                    if dealt is not None:
                        own = ch.const(ty.u32, prim.load_constant_u32(dealt + m_tile), name="own_tile")
                    self._take(share.matrix, own, epilogue, scaling, arguments)
                turn.advance()
            if scaling is not None:
                self._end_scaling()
        share.end(self.machine.adder)

    @ch.inline
    def end_step(self) -> None:
        """Once a step: this warp has finished all its M-tiles of the step."""
        prim.warp_barrier()  # orders what the lanes have stored before the arrival
        with ch.if_(self.machine.lane == 0):
            prim.mbarrier_arrive(self.reductions.step_added)

    @ch.inline
    def _begin_scaling(self, scale: ColumnScale) -> Scaling:
        prim.warp_barrier()  # no lane waits for an earlier input any more
        with ch.if_(self.machine.lane == 0):
            prim.mbarrier_arrive(self.reductions.loaded)
        factors = [ch.var(ty.f32, 0.0, name="scale") for _ in range(self.slots)]
        return Scaling(scale, factors, self.reductions.loaded, self.loaded_parity)

    @ch.inline
    def _end_scaling(self) -> None:
        """Who had nothing to scale waits too, and none comes to the next input before all have come to this one: a
        parity tells two neighbouring ones apart only."""
        prim.mbarrier_wait(self.reductions.loaded, self.loaded_parity)
        self.loaded_parity.set(self.loaded_parity ^ 1)

    @ch.inline
    def _take(
        self,
        layout: MatrixLayout,
        m_tile: ch.Expr,
        epilogue: Epilogue,
        scaling: Scaling | None,
        arguments: tuple[Any, ...],
    ) -> None:
        """An M-tile that this warp finishes, or its columns of it."""
        machine, turn = self.machine, self.turn
        for slot in range(self.slots):
            self._finish_rows(layout, m_tile, self.column_of(slot), slot, epilogue, scaling, arguments)
        prim.warp_barrier()  # orders the lanes' reads, and what they have stored, before the arrival
        with ch.if_(machine.lane == 0):
            prim.mbarrier_arrive(self.reductions.taken + turn.stage)

    @ch.function
    def _finish_rows(
        self,
        layout: MatrixLayout,
        m_tile: ch.Expr,
        column: ch.Expr,
        slot: int,
        epilogue: Epilogue,
        scaling: Scaling | None,
        arguments: tuple[Any, ...],
    ) -> None:
        """The rows of a slot, with what of it is worked out before the sums are there."""

        def row_sum() -> ch.Expr:
            if scaling is not None:
                scaling.learn(slot, column)
            total = self._sum_of_row(column, first=slot == 0)
            if layout.is_narrow:
                total = self._fold(total)
            return total if scaling is None else total * scaling.factors[slot]

        if not isinstance(epilogue, PublishedRows):
            return epilogue(self.rows(layout, m_tile, column, slot, row_sum))
        with epilogue.known_by(arguments) as known:
            known(self.rows(layout, m_tile, column, slot, row_sum))

    @ch.inline
    def rows(
        self, layout: MatrixLayout, m_tile: ch.Expr, column: ch.Expr, slot: int, row_sum: Callable[[], Any]
    ) -> Rows:
        """In any role: what a warp has of an M-tile, of each lane's column."""
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

    # -- adding up -------------------------------------------------------------------------------------------------

    @ch.inline
    def _fold(self, row_sum: ch.Expr) -> ch.Expr:
        """Of a narrow M-tile: rows 8 to 15 are rows 0 to 7 by the other half of their columns."""
        return row_sum + prim.shuffle_xor_f32(row_sum, NARROW_ROWS)

    @ch.function
    def _sum_of_row(self, column: ch.Expr, first: bool) -> ch.Expr:
        """Add the warps' sums: of the first half of the warps and of the second half, each in order, then both. The
        `first` time for an M-tile, wait for them."""
        plan, lane = self.machine.plan, self.machine.lane
        half = plan.consumer_warps // 2
        reduction = self.reductions.at(self.turn)
        if plan.tokens == 1:
            own = reduction + (lane // M_TILE_ROWS * (self.machine.warp_sums * half) + lane % M_TILE_ROWS)
        else:
            own = reduction + (column // 2 * plan.pair_sums + lane)
        if first:
            prim.mbarrier_wait(self.reductions.summed + self.turn.stage, self.turn.parity)
        total = self._sum_of_warps(own, half)
        if plan.tokens == 1:
            return total + prim.shuffle_xor_f32(total, M_TILE_ROWS)
        return total + self._sum_of_warps(own + self.machine.warp_sums * half, half)

    @ch.inline
    def _sum_of_warps(self, own: ch.Expr, warps: int) -> ch.Expr:
        """What lies at `own` of so many neighbouring warps' sums."""
        total = ch.var(ty.f32, 0.0)
        with ch.for_(warps, unroll=True, name="other") as other:
            total += own[other * self.machine.warp_sums]
        return total
