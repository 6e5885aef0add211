"""Short lists: the tokens nearest to a block's highest, which mostly are enough to filter by.

Beside its candidates each block publishes, of a filtered column, the few of its tokens with the highest logits over the
temperature, with and without noise; the highest number that it left out; what all its tokens weigh; and how its most
noisy token stood without noise. Every block reads them all. Whatever is nearer to the highest of all than the highest
that anybody left out is then known completely, and in most steps what is to be decided lies there: a draw from what is
kept is the most noisy token among it, so a candidate is judged by how many tokens are nearer, and what they weigh; if
it is out, so is all that is further away, and the most noisy of the nearer ones is the next candidate. What the lists
leave open is found in `rounds`.

All blocks add the same numbers in the same order, so all decide alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import NO_TOKEN
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.filters.columns import WarpColumns, best_of_warp, highest_of_warp, ordered
from cheetah.lang import prim, ty
from cheetah.plan import M_TILE_ROWS
from cheetah.plan.regions import LIST_ROW_WORDS, listed_tokens

UNIT_WORDS = 4
SCALED, NOISY, TOKEN, MORE = range(UNIT_WORDS)
"""Words of a listed token; what else a block says stands in the last word of its first three."""
WEIGHT, LEFT_OUT, BEST_SCALED = range(3)
"""Of all the block's tokens together, relative to its highest; the highest number that is not listed; that of the most
noisy token of all."""
ROWS_AT_ONCE = 4
SEARCH_STEPS = 64
UNDECIDED = ch.bits("UNDECIDED", 0xFFFFFFFF)
LEFT_OPEN = ch.bits("LEFT_OPEN", 0xFFFFFFFE)
AS_IT_IS = ch.bits("AS_IT_IS", 0xFFFFFFFD)
"""Instead of the index of a listed token."""
Leave = Callable[[Any, Any, Any], None]
"""What a warp does with a column that the lists leave open; given the column, the highest number of all, and how far
below it that of the most noisy token lies."""


@dataclass(frozen=True, eq=False)
class FiltersAsked:
    """A sequence's filters; see `SequenceRecord`."""

    top_k: ch.Expr
    top_p: ch.Expr
    reach: ch.Expr


NEAREST = ty.struct(
    "Nearest",
    **{"first": ty.f32, "first_noisy": ty.f32, "first_token": ty.u32},
    **{"second": ty.f32, "second_noisy": ty.f32, "second_token": ty.u32},
    **{"left_out": ty.f32, "weight": ty.f32},
    **{"best": ty.f32, "best_token": ty.u32, "best_scaled": ty.f32},
)
"""The two nearest tokens that a lane has seen, without and with noise; the highest number that it left out; what all
weigh; its most noisy token, with noise and without."""


class NearestOfLane:
    """A variable of that."""

    @ch.inline
    def __init__(self) -> None:
        nearest = ch.var(NEAREST)
        self.nearest, self.first = nearest, (nearest.first, nearest.first_noisy, nearest.first_token)
        self.second = nearest.second, nearest.second_noisy, nearest.second_token
        self.best = nearest.best, nearest.best_token, nearest.best_scaled
        self._clear()

    @ch.function
    def _clear(self) -> None:
        """No token yet."""
        for name, type_ in NEAREST.members:
            nothing = 0.0 if name == "weight" else -math.inf if type_ == ty.f32 else NO_TOKEN
            getattr(self.nearest, name).set(nothing)

    @ch.function
    def take(self, scaled: ch.Expr, noisy: ch.Expr, token: ch.Expr) -> None:
        """One more token; NaN is as if it were not there."""
        above_first = ch.const(ty.boolean, scaled > self.nearest.first, name="above_first")
        above_second = ch.const(ty.boolean, scaled > self.nearest.second, name="above_second")
        dropped = ch.select(above_second, self.nearest.second, scaled)
        self.nearest.left_out.set(ch.maximum(self.nearest.left_out, dropped))
        for first, second, new in zip(self.first, self.second, (scaled, noisy, token), strict=True):
            second.set(ch.select(above_first, first, ch.select(above_second, new, second)))
            first.set(ch.select(above_first, new, first))

    @ch.function
    def weigh_token(self, scaled: ch.Expr, noisy: ch.Expr, token: ch.Expr) -> None:
        """Before `take`: the token's weight, all relative to the lane's highest, and whether it is the most noisy."""
        first = self.first[0]
        with ch.if_(scaled > -math.inf):
            highest = ch.maximum(first, scaled)
            before = self.nearest.weight * prim.exp_f32(first - highest)
            self.nearest.weight.set(before + prim.exp_f32(scaled - highest))
            with ch.if_(noisy > self.nearest.best):
                for variable, value in zip(self.best, (noisy, token, scaled), strict=True):
                    variable.set(value)

    @ch.inline
    def pop(self) -> None:
        """The second becomes the first."""
        for first, second in zip(self.first, self.second, strict=True):
            first.set(second)
        self.second[0].set(-math.inf)
        self.second[2].set(NO_TOKEN)


class ShortLists:
    """The short lists of a launch's filtered columns. `weighed`: f32 [batch, vocab, 2], see `Filters`."""

    def __init__(self, warps: WarpColumns, exchange: Exchange, weighed: ch.Expr) -> None:
        self.warps, self.exchange, self.weighed = warps, exchange, weighed
        self.machine, self.adjustments = warps.machine, warps.adjustments

    @property
    def length(self) -> int:
        """Tokens of a block's list."""
        return listed_tokens(self.machine.plan.tokens, self.machine.world.size)

    @property
    def units(self) -> int:
        """Listed tokens of all blocks."""
        return self.machine.world.blocks * self.length

    # What a block publishes -------------------------------------------------------------------------------------------

    @ch.inline
    def publish(self, epoch: ch.Expr, step: ch.Expr) -> None:
        """Every block's list of every filtered column. A barrier of the consumer warps must lie between the head and
        this. Steps take turns with two vectors, as with the candidates."""
        warps = self.warps
        with warps.of_warp() as column, ch.if_(warps.begin(column) != 0):
            self._list_rows(column)
            if warps.groups == 1:
                self._publish_list(column, epoch, step)
        if warps.groups > 1:
            self.machine.meet()
            with warps.of_first_group() as column, ch.if_(warps.is_filtered(column)):
                self._join_lists()
                self._publish_list(column, epoch, step)

    @ch.function
    def _list_rows(self, column: ch.Expr) -> None:
        """A list of this warp's rows of a column."""
        machine, head = self.machine, self.adjustments.head
        nearest = NearestOfLane()
        pairs = ch.reinterpret(ty.ptr(ty.f32x2), self.weighed) + self.adjustments.weighed_row(column)
        position = head.position(machine.block)
        stride = self.warps.lanes
        own = self.warps.group * 32 + machine.lane
        with ch.for_(own, self.adjustments.own_rows, stride * ROWS_AT_ONCE, unroll=1) as first:
            scaled, noisy = (ch.array(ty.f32, ROWS_AT_ONCE, name=name) for name in ("scaled", "noisy"))
            tokens = ch.array(ty.u32, ROWS_AT_ONCE)
            with ch.for_(ROWS_AT_ONCE, unroll=True) as index:
                row = first + index * stride
                token = self.adjustments.token_of_row(row, position)
                tokens[index] = token
                scaled[index] = -math.inf
                noisy[index] = -math.inf
                with ch.if_(self.adjustments.has_row(row, position, token)):
                    scaled[index] = pairs[token].x
                    noisy[index] = pairs[token].y
            with ch.for_(ROWS_AT_ONCE, unroll=True) as index:
                nearest.weigh_token(scaled[index], noisy[index], tokens[index])
                nearest.take(scaled[index], noisy[index], tokens[index])
        highest = ch.var(ty.f32, nearest.first[0])
        self._lay_list_down(nearest, highest, self._row(self.warps.group))

    @ch.function
    def _join_lists(self) -> None:
        """The lists of a column's warps become one, in the place of the first."""
        lane = self.machine.lane
        nearest = NearestOfLane()
        highest = ch.var(ty.f32, -math.inf)
        with ch.if_(lane < self.warps.groups):
            words = self._row(lane)
            highest.set(prim.bits_float(words[SCALED]))
            nearest.nearest.weight.set(prim.bits_float(words[WEIGHT * UNIT_WORDS + MORE]))
            nearest.nearest.left_out.set(prim.bits_float(words[LEFT_OUT * UNIT_WORDS + MORE]))
            nearest.best[0].set(prim.bits_float(words[self.length * UNIT_WORDS]))
            nearest.best[1].set(words[self.length * UNIT_WORDS + 1])
            nearest.best[2].set(prim.bits_float(words[BEST_SCALED * UNIT_WORDS + MORE]))
        with ch.for_(lane, self.warps.groups * self.length, 32, unroll=1) as index:
            words = self._row(index // self.length) + index % self.length * UNIT_WORDS
            nearest.take(prim.bits_float(words[SCALED]), prim.bits_float(words[NOISY]), words[TOKEN])
        prim.warp_barrier()  # every lane has read its part before the first list is written over
        self._lay_list_down(nearest, highest, self._row(0))

    @ch.function
    def _lay_list_down(self, nearest: NearestOfLane, highest: ch.Expr, words: ch.Expr) -> None:
        """The nearest tokens of a warp's lanes and what all of theirs weigh, in shared memory. highest: that to which
        a lane's weight is relative."""
        lane = self.machine.lane
        above = highest_of_warp(highest)
        part = ch.var(ty.f32, 0.0)
        with ch.if_(highest > -math.inf):
            part.set(nearest.nearest.weight * prim.exp_f32(highest - above))
        weight = prim.warp_sum_f32(part)
        best_of_warp(lane, *nearest.best)
        with ch.for_(self.length, unroll=1, name="rank") as rank:
            own_key = ordered(nearest.first[0])
            top_key = prim.warp_maximum_u32(own_key)
            turn = prim.warp_maximum_u32(ch.select(own_key == top_key, 32 - lane, ty.u32(0)))
            with ch.if_(turn + lane == 32):
                words[rank * UNIT_WORDS + SCALED] = prim.float_bits(nearest.first[0])
                words[rank * UNIT_WORDS + NOISY] = prim.float_bits(nearest.first[1])
                words[rank * UNIT_WORDS + TOKEN] = nearest.first[2]
                nearest.pop()
        left_out = highest_of_warp(ch.maximum(nearest.nearest.left_out, nearest.first[0]))
        with ch.if_(lane == 0):
            words[WEIGHT * UNIT_WORDS + MORE] = prim.float_bits(weight)
            words[LEFT_OUT * UNIT_WORDS + MORE] = prim.float_bits(left_out)
            words[BEST_SCALED * UNIT_WORDS + MORE] = prim.float_bits(nearest.best[2])
            words[self.length * UNIT_WORDS] = prim.float_bits(nearest.best[0])
            words[self.length * UNIT_WORDS + 1] = nearest.best[1]

    @ch.function
    def _publish_list(self, column: ch.Expr, epoch: ch.Expr, step: ch.Expr) -> None:
        """The block's list, a word a lane."""
        machine = self.machine
        prim.warp_barrier()  # the list is written
        with ch.if_(machine.lane < self.length * UNIT_WORDS):
            index = (self._vector(column, step) + machine.number * self.length) * UNIT_WORDS + machine.lane
            self.exchange.publish("short_lists", index, self._row(0)[machine.lane], epoch)
        prim.warp_barrier()  # it is read: the warp's next column may lie over it

    # What all blocks decide -------------------------------------------------------------------------------------------

    @ch.inline
    def choose(self, epoch: ch.Expr, step: ch.Expr, leave: Leave) -> None:
        """The tokens of the filtered columns into the region `chosen`, where the most noisy token of all stands.
        A barrier of the consumer warps must follow."""
        warps = self.warps
        with warps.of_warp() as column, ch.if_(warps.is_chosen(column)):
            self._read_lists(column, epoch, step)
            if warps.groups == 1:
                self._decide(column, epoch, step, leave)
        if warps.groups > 1:
            self.machine.meet()
            with warps.of_first_group() as column, ch.if_(warps.is_chosen(column)):
                self._decide(column, epoch, step, leave)

    @ch.function
    def _read_lists(self, column: ch.Expr, epoch: ch.Expr, step: ch.Expr) -> None:
        """This warp's share of all blocks' lists of a column, into the region `listed`, and what they say besides.

        The lists' lengths divide a warp, so each lane reads the same rank of every list that it reads."""
        machine, head = self.machine, self.adjustments.head
        listed = ch.reinterpret(ty.ptr_mut(ty.f32), self._listed)
        highest = ch.var(ty.f32, -math.inf)
        weight = ch.var(ty.f32, 0.0)
        role = machine.lane % self.length
        m_tile = ch.const(ty.u32, machine.chosen[column] // M_TILE_ROWS, name="m_tile")
        first_unit = self._vector(column, step)
        with self.warps.reading(self.exchange, "short_lists", first_unit, self.units, epoch) as (unit, words):
            listed[unit * 2] = prim.bits_float(words.x)
            listed[unit * 2 + 1] = prim.bits_float(words.y)
            is_owner = head.position_of_all(unit // self.length) == head.position_of_owner(m_tile)
            with ch.if_((role < BEST_SCALED) | ((role == BEST_SCALED) & is_owner)):
                more = prim.bits_float(words.w)
                self._add(highest, weight, ch.select(role == WEIGHT, prim.bits_float(words.x), more), more)
        with ch.for_(5, unroll=1) as level:
            mask = ty.u32(16) >> level
            with ch.if_(mask >= self.length):
                other, other_weight = prim.shuffle_xor_f32(highest, mask), prim.shuffle_xor_f32(weight, mask)
                self._add(highest, weight, other, other_weight)
        with ch.if_(machine.lane <= BEST_SCALED):
            words = self._row(self.warps.group)
            words[machine.lane * 2] = prim.float_bits(highest)
            words[machine.lane * 2 + 1] = prim.float_bits(weight)
        if self.warps.groups == 1:
            prim.warp_barrier()  # what the lanes laid down is read by all

    @ch.inline
    def _add(self, highest: Any, weight: Any, other: ch.Expr, other_weight: ch.Expr) -> None:
        """Two sums of weights, each relative to the highest of what it sums, become one."""
        both = ch.const(ty.f32, ch.maximum(highest, other), name="both")
        with ch.if_(both > -math.inf):
            weight.set(weight * prim.exp_f32(highest - both) + other_weight * prim.exp_f32(other - both))
            highest.set(both)

    @ch.function
    def _weight_said(self) -> tuple[Any, Any]:
        """What a column's warps have read: the highest number that blocks say, and what all their tokens weigh."""
        lane = self.machine.lane
        highest = ch.var(ty.f32, -math.inf)
        part = ch.var(ty.f32, 0.0)
        with ch.if_(lane < self.warps.groups):
            highest.set(prim.bits_float(self._row(lane)[WEIGHT * 2]))
            part.set(prim.bits_float(self._row(lane)[WEIGHT * 2 + 1]))
        above = highest_of_warp(highest)
        with ch.if_(highest > -math.inf):
            part *= prim.exp_f32(highest - above)
        return above, prim.warp_sum_f32(part)

    @ch.function
    def _highest_said(self, what: ch.Expr) -> ch.Expr:
        """The highest number that blocks say of `what`, of those that a column's warps have read."""
        lane = self.machine.lane
        highest = ch.var(ty.f32, -math.inf)
        with ch.if_(lane < self.warps.groups):
            highest.set(prim.bits_float(self._row(lane)[what * 2]))
        return highest_of_warp(highest)

    @ch.function
    def _nearer(self, highest: ch.Expr, limit: ch.Expr) -> tuple[Any, Any, Any, Any]:
        """Of the listed tokens whose distance is below the limit: how many, what they weigh, the index of the most
        noisy one (`units` if there is none), and how many are as noisy as that."""
        listed, lane = self._listed, self.machine.lane
        count = ch.var(ty.u32, 0)
        weight = ch.var(ty.f32, 0.0)
        best = ch.var(ty.f32, -math.inf)
        best_index = ch.var(ty.u32, self.units)
        ties = ch.var(ty.u32, 0)
        with ch.for_(lane, self.units, 32, unroll=4, name="index") as index:
            distance = highest - listed[index].x
            with ch.if_(distance < limit):
                noisy = listed[index].y
                count += 1
                weight += prim.exp_f32(-distance)
                with ch.if_(noisy == best):
                    ties += 1
                with ch.if_(noisy > best):
                    best.set(noisy)
                    best_index.set(index)
                    ties.set(1)
        own_key = ordered(best)
        is_best = own_key == prim.warp_maximum_u32(own_key)
        total_count = prim.warp_sum_u32(count)
        total_weight = prim.warp_sum_f32(weight)
        found = self.units - prim.warp_maximum_u32(ch.select(is_best, self.units - best_index, ty.u32(0)))
        total_ties = prim.warp_sum_u32(ch.select(is_best, ties, ty.u32(0)))
        return total_count, total_weight, found, total_ties

    @ch.function
    def _weigh_top(self, highest: ch.Expr, known: ch.Expr, top_k: ch.Expr) -> tuple[Any, Any]:
        """What the `top_k` nearest tokens weigh, with all that tie with the last of them, and 1; if fewer lie below the
        distance `known`, what these weigh, and 0."""
        listed, lane = self._listed, self.machine.lane
        low = ch.var(ty.f32, 0.0)
        high = ch.var(ty.f32, known)
        at = ch.var(ty.f32, known)
        least = ch.var(ty.f32, 0.0)
        found = ch.var(ty.u32, 0)
        with ch.for_(SEARCH_STEPS, unroll=1):
            count = ch.var(ty.u32, 0)
            weight = ch.var(ty.f32, 0.0)
            with ch.for_(lane, self.units, 32, unroll=2, name="index") as index:
                distance = highest - listed[index].x
                with ch.if_(distance < at):
                    count += 1
                    weight += prim.exp_f32(-distance)
            total = prim.warp_sum_u32(count)
            total_weight = prim.warp_sum_f32(weight)
            with ch.if_((total >= top_k) | (at == known)):
                least.set(total_weight)
            with ch.if_(total < top_k):
                low.set(at)
            with ch.else_():
                high.set(at)
                found.set(1)
            at.set(ch.select(high < math.inf, (low + high) * 0.5, low * 2.0 + 1.0))
            with ch.if_((found == 0) | (total == top_k) | (at <= low) | (at >= high)):
                ch.break_()
        return least, found

    @ch.function
    def _decide(self, column: ch.Expr, epoch: ch.Expr, step: ch.Expr, leave: Leave) -> None:
        """One warp: judge candidates, from the most noisy one on."""
        of = self.adjustments.of
        reach, top_p = (ch.const(ty.f32, prim.bits_float(of(column, name)), name=name) for name in ("reach", "top_p"))
        top_k = ch.const(ty.u32, of(column, "top_k"), name="top_k")
        highest, whole = self._weight_said()
        left_out = self._highest_said(ch.argument(LEFT_OUT))
        best_scaled = self._highest_said(ch.argument(BEST_SCALED))
        known = ch.const(ty.f32, ch.select(left_out > -math.inf, highest - left_out, math.inf), name="known")
        judged = self._judge_lists(highest, whole, highest - best_scaled, known, FiltersAsked(top_k, top_p, reach))
        with ch.if_(judged == LEFT_OPEN):
            leave(column, highest, highest - best_scaled)
        with ch.if_(judged < self.units):
            unit = self.exchange.read4("short_lists", self._vector(column, step) + judged, epoch)
            prim.warp_barrier()  # every lane has looked at the token before lane 0 puts another in its place
            with ch.if_(self.machine.lane == 0):
                self.machine.chosen[column] = unit.z

    @ch.function
    def _judge_lists(
        self, highest: ch.Expr, all_weigh: ch.Expr, distance: ch.Expr, known: ch.Expr, asked: FiltersAsked
    ) -> ch.Expr:
        """The index of the token that is taken, or AS_IT_IS for the most noisy one of all, which has this `distance`,
        or LEFT_OPEN. All tokens that are nearer than `known` are listed.

        The limit is where the lists end at first: the most noisy token below it is the first candidate, if all from
        there on are out, or if it is the most noisy one of all. Then the limit is the candidate's distance."""
        most = ch.const(ty.u32, ch.select(asked.top_k == 0, ty.u32(NO_TOKEN), asked.top_k), name="most")
        judged = ch.var(ty.u32, UNDECIDED)
        candidate = ch.var(ty.u32, UNDECIDED)
        limit = ch.var(ty.f32, ch.minimum(asked.reach, known))
        least = ch.var(ty.f32, ch.select(asked.top_k == 0, all_weigh, ty.f32(-1.0)))
        whole = ch.var(ty.f32, all_weigh)
        with ch.if_((asked.top_k == 0) & (asked.top_p >= 1.0) & (distance < asked.reach)):
            judged.set(AS_IT_IS)
        with ch.for_(SEARCH_STEPS, unroll=1):
            with ch.if_(judged != UNDECIDED):
                ch.break_()
            count, weight, following, ties = self._nearer(highest, limit)
            with ch.if_(candidate == UNDECIDED):
                is_out = (count >= most) | ((asked.top_p < 1.0) & (weight >= asked.top_p * whole))
                with ch.if_((distance >= limit) & (known < asked.reach) & ~is_out):
                    judged.set(LEFT_OPEN)
            with ch.else_(), ch.if_(count < most):
                with ch.if_((asked.top_p >= 1.0) | (weight < asked.top_p * (weight + prim.exp_f32(-limit)))):
                    judged.set(candidate)  # it is of the whole itself
                with ch.else_():
                    with ch.if_(least < 0.0):
                        top, found = self._weigh_top(highest, known, asked.top_k)
                        least.set(top)
                        with ch.if_((found != 0) | (known == math.inf)):
                            whole.set(top)
                    with ch.if_(weight < asked.top_p * least):
                        judged.set(candidate)
                    with ch.else_(), ch.if_(weight < asked.top_p * whole):
                        judged.set(LEFT_OPEN)
            with ch.if_(judged == UNDECIDED):
                with ch.if_((following == self.units) | (ties > 1)):
                    judged.set(LEFT_OPEN)
                with ch.else_():
                    is_best = (candidate == UNDECIDED) & (distance < limit)
                    candidate.set(ch.select(is_best, ty.u32(AS_IT_IS), following))
                    limit.set(highest - self._listed[following].x)
        return judged

    # Where things lie -------------------------------------------------------------------------------------------------

    def _row(self, group: ch.Value) -> ch.Expr:
        """Words of the column that this warp works on: a group's list, then what it has read of all lists."""
        row = self.warps.slot * self.warps.groups + group
        return self.machine.region("list_rows", ty.u32) + row * ch.named("LIST_ROW_WORDS", LIST_ROW_WORDS)

    @property
    def _listed(self) -> ch.Expr:
        """All listed tokens of the column that this warp works on: their numbers without and with noise."""
        return self.machine.region("listed", ty.f32x2) + self.warps.slot * self.units

    def _vector(self, column: ch.Expr, step: ch.Expr) -> ch.Expr:
        """The first of all blocks' units of a column."""
        return (step % 2 * self.warps.columns.limit + column) * self.units
