"""The way of sums from the consumer warps to the adding warps.

At the end of an M-tile the consumer warps lay their partial sums of its 16 rows down in a *reduction* and go on with
the next one. Adding warps, which do nothing else, add them up in the order of the warps and finish the rows: few
columns one warp by itself, in turn with the others, many columns all of them (see `adding`).

A reduction has two mbarriers: at `summed` every consumer warp arrives when its sums are there, at `taken` the warps
that have added them up. The consumer warps wait for the others only where they come round to a reduction again, and at
the end of a product, until all its rows are finished.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
from cheetah.blocks.linear.fragments import groups_of
from cheetah.blocks.ring import RingCursor
from cheetah.lang import prim, ty
from cheetah.plan import M_TILE_ROWS, MatrixLayout
from cheetah.plan.formats import NARROW_ROWS
from cheetah.plan.plan import COLUMNS

HALF = M_TILE_ROWS // 2


class Reductions:
    """The reductions of a kernel, in the consumer role, and the barriers between it and the adder role.

    step_added: at which every adding warp arrives once a step. loaded: at which one thread arrives when the block has
    an input whose products are to be scaled, and every adding warp when it comes to those.
    """

    def __init__(self, columns: Columns) -> None:
        self.machine, self.columns = columns.machine, columns
        self._start()

    @ch.inline
    def _start(self) -> None:
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

    @ch.inline
    def initialise(self) -> None:
        """Set the barriers up, as `Ring.initialise`."""
        plan = self.machine.plan
        with ch.for_(plan.reductions, name="reduction") as reduction:
            prim.mbarrier_init(self.summed + reduction, plan.consumer_warps)
            prim.mbarrier_init(self.taken + reduction, plan.finishers)
        prim.mbarrier_init(self.step_added, plan.adding_warps)
        prim.mbarrier_init(self.loaded, 1 + plan.adding_warps)

    def at(self, turn: RingCursor) -> ch.Expr:
        """Where the sums of a reduction lie (f32)."""
        plan = self.machine.plan
        first: ch.Expr = turn.stage * (self.machine.warp_sums * plan.consumer_warps)
        return self.machine.region("reductions", ty.f32) + first

    @ch.function
    def hand_over(self, layout: MatrixLayout, sums: Any) -> None:
        """The end of an M-tile: this warp's sums to the adding warps."""
        machine, turn = self.machine, self.turn
        prim.mbarrier_wait(self.taken + turn.stage, turn.parity ^ 1)
        reduction = ch.const(ty.ptr_mut(ty.f32), self.at(turn), name="reduction")
        self._lay_sums_down(layout, reduction, sums)
        prim.warp_barrier()  # orders the lanes' sums before the arrival
        with ch.if_(machine.lane == 0):
            prim.mbarrier_arrive(self.summed + turn.stage)
        turn.advance()

    @ch.function
    def wait_until_taken(self) -> None:
        """What was handed over so far is added up and finished: the last M-tile of every reduction, oldest first."""
        with ch.for_(self.machine.plan.reductions, unroll=1):
            prim.mbarrier_wait(self.taken + self.turn.stage, self.turn.parity ^ 1)
            self.turn.advance()
        self.turn.parity ^= 1  # once round the reductions: where it was

    @ch.inline
    def wait_for_step(self, step: ch.Expr) -> None:
        """All adding warps have come to the end of the step, see `Adding.end_step`."""
        prim.mbarrier_wait(self.step_added, step % 2)

    @ch.function
    def _lay_sums_down(self, layout: MatrixLayout, reduction: ch.Expr, sums: Any) -> None:
        """This warp's sums: [warp][pair of columns][column of the pair][row]. Lane 4g + t holds rows g and g + 8 of
        columns 2t and 2t + 1."""
        machine, plan = self.machine, self.machine.plan
        own = machine.warp * machine.warp_sums + machine.lane // 4
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
