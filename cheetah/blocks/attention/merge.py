"""Merging partial states of different blocks: a row whose keys were split is folded by a team of warps.

Each warp of the team folds every so many-th state in the plan's order, the first one those results in the order of the
warps. They pass through the region `attention`, which is free between the items and the next phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.schedule import Merge, Schedule
from cheetah.blocks.attention.tile import LOG2_E
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.lang.primitives.exchange import UNITS

LSE_WORDS = 4
"""A partial state's LSE is stored four times, so that it is one unit of an exchange."""
MERGED_TOGETHER = 5
"""Partial states that a warp waits for together; one more unit is for their LSEs. A sequence's keys, split among 132
blocks and 8 heads, are 17 states at most, so that four warps wait once."""
FOLDED_UNITS = 33
"""Units of a warp's folded state while its team folds them: 4 dims of a lane each, then the highest LSE and weight."""


def partial_words(head_dim: int) -> int:
    """Payload words of one row of a partial state: O in f32, then the LSE."""
    return head_dim + LSE_WORDS


class Merger:
    """The merges of a schedule, in the consumer role: what is merged, a lane's 4 dims of a row, goes to `finish`, as
    (tile, head, row, dim_pair, low, high, lse, epoch) for either pair. Without `softmax` the states are sums."""

    def __init__(
        self, machine: Machine, exchange: Exchange, schedule: Schedule, softmax: bool, finish: Callable[..., None]
    ) -> None:
        self.machine, self.exchange, self.schedule, self.softmax = machine, exchange, schedule, softmax
        self.head_dim = machine.head_dim
        self.lanes = self.head_dim // schedule.merge_parts // 4
        self.finish = finish

    @ch.inline
    def merge(self, epoch: ch.Expr) -> None:
        """In the consumer role: fold the partial states of the rows that are this warp's team's. Each warp folds every
        so many-th in the plan's order, the first one those results in the order of the warps; of few it does all alone.
        States that are the identity, behind the others, change no bit."""
        schedule = self.schedule
        with schedule.merges() as merge:
            folded = Folded(self.softmax)
            sources = merge.end - merge.begin
            if self.is_windowed:
                self._fold_by_team(merge, folded, epoch)
            else:
                with ch.if_(sources <= self.machine.plan.merge_warps):  # of one state a warp the result is the same
                    with ch.if_(schedule.team_warp == 0):
                        self._fold_sources(merge, ch.argument(0), ch.argument(1), folded, epoch)
                with ch.else_():
                    self._fold_by_team(merge, folded, epoch)
            with ch.if_(schedule.team_warp == 0):
                self._finish_merge(merge, folded, epoch)

    @property
    def is_windowed(self) -> bool:
        """Whether the first state of a row is not always that of its sequence's first chunk, and chunks have fixed
        ends: then a warp folds those whose place in the sequence says so, also where there are few, so that a state
        that is the identity, before the others, changes no bit."""
        plan = self.machine.plan
        return plan.kv_chunk > 0 and self.machine.shape.windows_in(plan.max_context) != (None,)

    @ch.inline
    def _fold_by_team(self, merge: Merge, folded: Folded, epoch: ch.Expr) -> None:
        schedule, warps = self.schedule, self.machine.plan.merge_warps
        start = schedule.team_warp
        if self.is_windowed:
            start = (schedule.team_warp + warps - merge.first_chunk % warps) % warps
        self._fold_sources(merge, start, ch.argument(warps), folded, epoch)
        self._lay_down_folded(folded)
        schedule.meet_team()
        with ch.if_(schedule.team_warp == 0):
            self._fold_team(folded)

    def _merge_lane(self, merge: Merge) -> Any:
        """Which 4 dims of a row are this lane's; the lanes beyond them do the same again."""
        return merge.part * self.lanes + self.machine.lane % self.lanes

    @ch.function
    def _fold_sources(self, merge: Merge, start: ch.Expr, every: ch.Expr, folded: Folded, epoch: ch.Expr) -> None:
        """Sources `start`, `start + every`, ...: those that are waited for together, one after the other."""
        own = (merge.end - merge.begin + (every - 1) - start) // every
        with ch.for_(0, own, MERGED_TOGETHER, unroll=1) as first:
            count = ch.minimum(own - first, MERGED_TOGETHER)
            states = self._read_states(merge, self.schedule.sources(merge, start + first * every, every, count), epoch)
            with ch.for_(MERGED_TOGETHER, unroll=True) as index:
                with ch.if_(index < count):
                    lse = prim.bits_float(prim.shuffle_u32(states[0].x, index)) if self.softmax else None
                    values = [prim.bits_float(getattr(states[index + 1], member)) for member in "xyzw"]
                    folded.add(values, lse, ch.argument(1.0))

    @ch.inline
    def _read_states(self, merge: Merge, sources: ch.Expr, epoch: ch.Expr) -> ch.Expr:
        """Element 0: the LSE of the state that has the lane's number. Element n + 1: the lane's 4 dims of state n;
        where there are fewer, the last one stands for the missing: a number that is known keeps registers free."""
        states = ch.array(ty.u32x4, UNITS)
        indices = ch.array(ty.u32, UNITS)
        row_units = partial_words(self.head_dim) // 4
        indices[0] = ((sources + merge.row) * row_units + self.head_dim // 4) * 4
        with ch.for_(MERGED_TOGETHER, unroll=True) as index:
            source = prim.shuffle_u32(sources, index)
            indices[index + 1] = ((source + merge.row) * row_units + self._merge_lane(merge)) * 4
        self.exchange.read_places("partials", states, indices, MERGED_TOGETHER + 1, epoch)
        return states

    def _folded_address(self, warp: ch.Expr) -> ch.Expr:
        """Where (u32x4*) a warp's folded state lies while its team meets: a unit of every lane, then what all share."""
        return self.machine.region("attention", ty.u32x4) + warp * FOLDED_UNITS

    @ch.function
    def _lay_down_folded(self, folded: Folded) -> None:
        """This warp's folded state, for the first warp of its team."""
        address = self._folded_address(self.machine.warp)
        address[self.machine.lane] = prim.make_u32x4(*(prim.float_bits(folded.sums[word]) for word in range(4)))
        if self.softmax:
            with ch.if_(self.machine.lane == 0):
                words = prim.float_bits(folded.highest), prim.float_bits(folded.weight_sum)
                address[FOLDED_UNITS - 1] = prim.make_u32x4(*words, 0, 0)

    @ch.function
    def _fold_team(self, folded: Folded) -> None:
        """What the other warps of the team laid down, into the first one's."""
        machine = self.machine
        with ch.for_(1, machine.plan.merge_warps, unroll=True) as index:
            address = self._folded_address(machine.warp + index)
            part = address[machine.lane]
            values = [prim.bits_float(getattr(part, member)) for member in "xyzw"]
            if self.softmax:
                shared = address[FOLDED_UNITS - 1]
                folded.add(values, prim.bits_float(shared.x), prim.bits_float(shared.y))
            else:
                folded.add(values, None, None)

    @ch.function
    def _finish_merge(self, merge: Merge, folded: Folded, epoch: ch.Expr) -> None:
        """The row's output, from the state that all its sources were folded into: 4 dims a lane."""
        inverse, lse = folded.result()
        with ch.if_(self.machine.lane < self.lanes), ch.for_(2, unroll=True) as pair:
            dim_pair = self._merge_lane(merge) * 2 + pair
            low, high = (folded.sums[pair * 2 + word] * inverse for word in range(2))
            self.finish(merge.tile, merge.head, merge.row, dim_pair, low, high, lse, epoch)


class Folded:
    """States folded by one lane, in its 4 dims: the highest LSE, the sum of weights, sums that are not yet divided by
    it. Logarithms are natural. Without softmax there are only the sums."""

    def __init__(self, softmax: bool) -> None:
        self.softmax = softmax
        self._declare()

    @ch.inline
    def _declare(self) -> None:
        highest = ch.var(ty.f32, -math.inf)
        weight_sum = ch.var(ty.f32, 0.0)
        sums = ch.array(ty.f32, 4, zero=True)
        self.highest, self.weight_sum, self.sums = highest, weight_sum, sums

    @ch.function
    def add(self, values: Sequence[ch.Expr], lse: Any, weight: Any) -> None:
        """One more: `values` of a state with this LSE, or sums of several with the highest and the sum of weights."""
        if not self.softmax:
            for word in range(4):
                self.sums[word] = self.sums[word] + values[word]
            return
        new_highest = prim.maximum_f32(self.highest, lse)
        base = ch.select(new_highest == -math.inf, ty.f32(0.0), new_highest)
        shrink = prim.exp2_f32((self.highest - base) * LOG2_E)
        grow = prim.exp2_f32((lse - base) * LOG2_E)
        self.highest.set(new_highest)
        self.weight_sum.set(prim.fma_f32(self.weight_sum, shrink, grow * weight))
        for word in range(4):
            self.sums[word] = prim.fma_f32(self.sums[word], shrink, grow * values[word])

    @ch.inline
    def result(self) -> tuple[Any, Any]:
        """What the sums are to be multiplied by, and the LSE."""
        if not self.softmax:
            return 1.0, ty.f32(0.0)
        inverse = ch.select(self.weight_sum == 0.0, ty.f32(0.0), prim.divide_f32(1.0, self.weight_sum))
        lse = ch.select(self.weight_sum == 0.0, -math.inf, self.highest + prim.log_f32(self.weight_sum))
        return inverse, lse
