"""Which consumer warps work on which column while its token is filtered, and how a warp finds the highest number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.adjustments import Adjustments
from cheetah.blocks.columns import CANCELLED_TOKEN, NO_TOKEN, Columns
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.lang.primitives.exchange import UNITS
from cheetah.plan.index import ceil_div
from cheetah.plan.kv.tables import FILTERED
from cheetah.plan.regions import FILTER_WORDS

SIGN, ALL_BITS = ch.bits("SIGN", 1 << 31), ch.bits("ALL_BITS", 0xFFFFFFFF)
TESTED = 6
"""Distances at which a round weighs what is nearer: that of the candidate (or the limit), four pivots, infinity."""
FILTER_STATE = ty.struct(
    "FilterState",
    **dict.fromkeys(("filtered", "open", "chosen", "has_candidate"), ty.u32),
    **dict.fromkeys(("highest", "limit", "below", "above", "least", "most"), ty.f32),
    tested=ty.array(ty.f32, TESTED),
)
"""What a block knows of a column: whether it is filtered in this step, and whether the lists leave it open. Of an open
one: the candidate, and whether there is one; the highest number of all. The last token of the top-k lies in
below <= d < above, or is the last of all; the top-k weigh `least` to `most`. From `limit` on nothing is kept."""
assert FILTER_STATE.bytes == FILTER_WORDS * 4


@ch.function
def ordered(number: ch.Expr) -> ch.Expr:
    """A u32 for an f32 that is not NaN: the larger the number, the larger the word."""
    bits = ch.const(ty.u32, prim.float_bits(number), name="bits")
    return ch.select((bits & SIGN) != 0, bits ^ ALL_BITS, bits | SIGN)


@ch.function
def number_of(word: ch.Expr) -> ch.Expr:
    """The f32 that `ordered` made `word` of."""
    return prim.bits_float(ch.select((word & SIGN) != 0, word ^ SIGN, word ^ ALL_BITS))


@ch.function
def highest_of_warp(number: ch.Expr) -> ch.Expr:
    """The highest of the lanes' numbers (f32, none NaN), on every lane."""
    return number_of(prim.warp_maximum_u32(ordered(number)))


@ch.function
def best_of_warp(lane: ch.Expr, best: Any, token: Any, number: Any) -> None:
    """The best of the lanes' candidates, the lowest id on ties, and the number beside it, on every lane."""
    key = ordered(best)
    top = prim.warp_maximum_u32(key)
    lowest = prim.warp_maximum_u32(ch.select(key == top, token ^ NO_TOKEN, ty.u32(0))) ^ NO_TOKEN
    source = prim.warp_maximum_u32(ch.select((key == top) & (token == lowest), lane, ty.u32(0)))
    best.set(number_of(top))
    token.set(lowest)
    number.set(prim.bits_float(prim.shuffle_u32(prim.float_bits(number), source)))


@dataclass(frozen=True, eq=False)
class WarpColumns:
    """The columns of a consumer warp while their tokens are filtered: where a step has fewer columns than a block has
    consumer warps, `groups` warps share one."""

    columns: Columns
    adjustments: Adjustments

    @property
    def machine(self) -> Machine:
        return self.columns.machine

    @property
    def groups(self) -> int:
        """Warps that share a column."""
        return max(1, self.machine.plan.consumer_warps // self.columns.limit)

    @property
    def finishers(self) -> int:
        """Warps that have columns of their own; with several groups each has one at most."""
        return self.machine.plan.consumer_warps // self.groups

    @property
    def lanes(self) -> int:
        """Lanes that share a column."""
        return ch.named("COLUMN_LANES", 32 * self.groups)

    @property
    def group(self) -> ch.Expr:
        return self.machine.warp // self.finishers

    @property
    def slot(self) -> ch.Expr:
        """The place of what a warp and those that share its column keep of the column that they work on."""
        return self.machine.warp % self.finishers

    @contextmanager
    def of_warp(self) -> Iterator[Any]:
        """The columns of this warp, shared or not."""
        with ch.for_(self.slot, self.columns.limit, self.finishers, unroll=1, name="column") as column:
            yield column
            if self.columns.limit > self.finishers:
                prim.warp_barrier()  # the next column's words lie where lanes may still read this one's

    @contextmanager
    def of_first_group(self) -> Iterator[Any]:
        """The columns that this warp decides about."""
        with ch.if_(self.machine.warp < self.finishers), self.of_warp() as column:
            yield column

    def state(self, column: ch.Expr) -> Any:
        """What a block knows of a column (FILTER_STATE)."""
        return ch.whole("filter_states", self.machine.region("filters", FILTER_STATE))[column]

    @ch.function
    def begin(self, column: ch.Expr) -> Any:
        """Whether a column's token is sampled in this step, and filtered (0 or 1); it is written down."""
        filtered = ch.var(ty.u32, 0)
        with ch.if_(column < self.columns.count):
            options = ch.const(ty.u32, self.adjustments.of(column, "options"), name="options")
            with ch.if_(((options & FILTERED) != 0) & self.adjustments.is_sampled(column)):
                filtered.set(1)
        with ch.if_((self.group == 0) & (self.machine.lane == 0)):
            self.state(column).filtered = filtered
            self.state(column).open = 0
        return filtered

    def is_filtered(self, column: ch.Expr) -> Any:
        """What `begin` said of it."""
        return self.state(column).filtered != 0

    def is_chosen(self, column: ch.Expr) -> Any:
        """Whether a filtered column's most noisy token has been chosen, to be judged."""
        return self.is_filtered(column) & (self.machine.chosen[column] < CANCELLED_TOKEN)

    @contextmanager
    @ch.inline
    def reading(
        self, exchange: Exchange, vector: str, first_unit: ch.Expr, units: int, epoch: ch.Expr
    ) -> Iterator[tuple[Any, Any]]:
        """What is inside is done for each of this warp's share of `units` units of a vector: (number, u32x4).

        Lane l of the first group has units l, l + 32 * groups, ...; where there is no more, it reads the last one
        again. If it read nothing then, what it has read before would be kept for it, in registers, through all phases:
        8B with 4 tokens would spill 80 bytes."""
        stride = self.lanes
        rounds = ceil_div(ceil_div(units, stride), UNITS)
        count = ceil_div(units, stride * rounds)
        data = ch.array(ty.u32x4, UNITS)
        places = ch.array(ty.u32, UNITS)
        own = self.group * 32 + self.machine.lane
        with ch.for_(own, own + rounds * count * stride, count * stride, unroll=1, name="first") as first:
            with ch.for_(count, unroll=True) as index:
                places[index] = (first_unit + ch.minimum(first + index * stride, ty.u32(units - 1))) * 4
            exchange.read_places(vector, data, places, count, epoch)
            with ch.for_(count, unroll=True) as index, ch.if_(first + index * stride < units):
                yield first + index * stride, data[index]
