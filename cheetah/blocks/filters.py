"""Filters of what may be sampled: top-k, top-p and min-p, found by all blocks together in a few exchanges.

Meaning: `kept` in `cheetah.models.sampling`. Let d be how far a token's logit over the temperature lies below the
highest: its weight is exp(-d), and all that the filters keep lies nearer than all that they do not. A draw from what
they keep is the token with the most noisy logit among it. So a *candidate*, the most noisy of all, is tested: how many
tokens are nearer, and what do they weigh? If too many, or too much, then neither it nor any that is further away is
kept, and the most noisy of the nearer ones is the next candidate. Mostly the first one passes.

Four *pivots* are weighed along with the candidate's distance. They bring the limit nearer, and bracket the distance of
the top-k's last token, because its weight is the whole of which top-p is a part. Between bounds of that whole most
candidates can be judged; for the others the bracket is narrowed until they can. A *round* is: each block weighs the
rows of the head that it made, publishes sixteen words, reads those of all, and comes to the same decision as all. Sums
are made in one order, so a larger set never weighs less. The result depends on the logits alone, not on the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.adjustments import Adjustments
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.linear.interface import Rows
from cheetah.blocks.linear.matvec import Matvec
from cheetah.lang import prim, ty
from cheetah.lang.primitives.exchange import UNITS
from cheetah.plan import M_TILE_ROWS
from cheetah.plan.kv.tables import CANCELLED_TOKEN, FILTER_ROUNDS, FILTERED, NO_TOKEN
from cheetah.plan.plan import FILTER_WORDS

PIVOTS = 4
TESTED = PIVOTS + 2
"""Distances at which a round weighs what is nearer: the candidate's (or the limit), the pivots, infinity."""
BEST, TOKEN, DISTANCE, NEAREST, SUMS = range(5)
"""Words of what a block publishes: its most noisy token, and of each tested distance how many are nearer, and weigh."""
UNITS_OF_BLOCK = FILTER_WORDS // 4
(PENDING, CHOSEN, HAS_CANDIDATE, HIGHEST, LIMIT, BELOW, ABOVE, LEAST, MOST, PIVOT) = range(10)
"""Words of what a block knows of a column. The last token of the top-k lies in BELOW <= d < ABOVE, or is the last of
all; the top-k weigh LEAST to MOST. From LIMIT on nothing is kept. From PIVOT on: the candidate's distance, pivots."""
FIRST_PIVOT = 1.0
OF_BLOCK, OF_ALL = range(2)
"""Whose words a group of warps lays down: those of its block's rows, or what it read of all blocks."""


class Filters:
    """The filters of a launch's sequences. `weighed`: f32 [batch, vocab, 2], each row written and read by the block
    that makes its logit."""

    def __init__(self, matvec: Matvec, exchange: Exchange, adjustments: Adjustments, weighed: ch.Expr) -> None:
        self.matvec, self.machine, self.columns = matvec, matvec.machine, matvec.columns
        self.exchange, self.adjustments, self.weighed = exchange, adjustments, weighed

    @property
    def is_asked(self) -> Any:
        """Whether any sequence of the launch is filtered."""
        return self.adjustments.asked(FILTERED)

    @ch.function
    def keep(self, rows: Rows, token: ch.Expr, scaled: ch.Expr, noisy: ch.Expr) -> None:
        """Write a logit down, as it is compared without filters: one row a lane."""
        is_filtered = (self.adjustments.of(rows.column, "options") & FILTERED) != 0
        with ch.if_(is_filtered & (rows.lane < M_TILE_ROWS)):
            with ch.if_(self.adjustments.is_sampled(rows.column)):
                place = (self.adjustments.row(rows.column) + token) * 2
                self.weighed[place] = scaled
                self.weighed[place + 1] = noisy

    @ch.inline
    def choose(self, epoch: ch.Expr) -> None:
        """Put the filtered columns' tokens into the region `chosen`. A barrier of the consumer warps must lie between
        the head and this; it ends with one.

        Rounds take turns with two vectors: a block that publishes round r + 2 has read all blocks' words of round
        r + 1, and each of them was published after its block had read those of round r. Each round has its epoch; the
        first has that of the candidates, which lie in a vector of their own."""
        self._clear()
        self.machine.meet()
        with ch.for_(FILTER_ROUNDS + 1, unroll=1, name="round") as number:
            with ch.if_(self._is_done()):
                ch.break_()
            self._weigh_all(epoch + number, number)
            self.exchange.meet()
            self._judge_all(epoch + number, number)
            self.machine.meet()

    @ch.function
    def _clear(self) -> None:
        """Which columns are to be filtered; of those nothing is known: their distances are minus their numbers."""
        with self._columns_of_first_group() as column:
            pending = ch.var(ty.u32, 0)
            with ch.if_(column < self.columns.count):
                is_filtered = (self.adjustments.of(column, "options") & FILTERED) != 0
                is_chosen = self.machine.region("chosen", ty.u32)[column] < CANCELLED_TOKEN
                with ch.if_(is_filtered & is_chosen & self.adjustments.is_sampled(column)):
                    pending.set(1)
            with ch.if_(self.machine.lane == 0):
                state = self._state(column)
                state[PENDING] = pending
                state[HIGHEST] = prim.float_bits(ty.f32(0.0))
                for word in range(PIVOTS + 1):
                    state[PIVOT + word] = prim.float_bits(ty.f32(math.inf))

    @ch.function
    def _is_done(self) -> Any:
        """Whether every column has its token; the same on every thread."""
        pending = ch.var(ty.u32, 0)
        with ch.for_(self.machine.lane, self.columns.limit, 32, unroll=1) as column:
            pending |= self._state(column)[PENDING]
        with ch.for_(5, unroll=1) as level:
            pending |= prim.shuffle_xor_u32(pending, ty.u32(16) >> level)
        return pending == 0

    # What a block weighs and publishes --------------------------------------------------------------------------------

    @ch.function
    def _weigh_all(self, epoch: ch.Expr, number: ch.Value) -> None:
        """A round up to the exchange: every warp weighs its rows, the first of a column's warps publishes."""
        machine = self.machine
        with self._columns_of_warp() as column:
            with ch.if_(self._state(column)[PENDING] != 0):
                self._weigh(column)
        machine.meet()
        with self._columns_of_first_group() as column:
            with ch.if_(self._state(column)[PENDING] != 0):
                word = self._add_groups(column, OF_BLOCK)
                with ch.if_(machine.lane < FILTER_WORDS):
                    place = (self._vector(column, number) + machine.block) * FILTER_WORDS + machine.lane
                    self.exchange.publish("filters", place, word, epoch)

    @ch.function
    def _weigh(self, column: ch.Expr) -> None:
        """This warp's rows of a column: what is nearer than each tested distance, into the region `filter_sums`."""
        machine, head = self.machine, self.adjustments.head
        sums = ch.array(ty.f32, 2 * TESTED, zero=True)
        best = ch.var(ty.f32, -math.inf)
        best_token = ch.var(ty.u32, NO_TOKEN)
        best_distance = ch.var(ty.f32, math.inf)
        nearest = ch.var(ty.f32, math.inf)
        highest = self._number(column, HIGHEST)
        tested = [ch.const(ty.f32, self._number(column, PIVOT + i), name="tested") for i in range(PIVOTS + 1)]
        pairs = ch.reinterpret(ty.ptr(ty.f32x2), self.weighed) + self.adjustments.row(column)
        first = machine.warp // self._finishers * 32 + machine.lane
        position = head.position(machine.block)
        with ch.for_(first, head.waves * M_TILE_ROWS, self._groups * 32, unroll=2) as row:
            token = head.m_tile(row // M_TILE_ROWS, position) * M_TILE_ROWS + row % M_TILE_ROWS
            with ch.if_(token < head.rows):
                pair = pairs[token]
                distance = highest - pair.x
                weight = prim.exp_f32(-distance)
                nearest.set(ch.select(distance < nearest, distance, nearest))
                for number, limit in enumerate([*tested, math.inf]):
                    with ch.if_(distance < limit):
                        sums[2 * number] += 1.0
                        sums[2 * number + 1] += weight
                with ch.if_((distance < tested[0]) & (pair.y > best)):
                    best.set(pair.y)
                    best_token.set(token)
                    best_distance.set(distance)
        self._lay_down(column, sums, best, best_token, best_distance, nearest)

    @ch.function
    def _lay_down(
        self, column: ch.Expr, sums: Any, best: Any, best_token: Any, best_distance: Any, nearest: Any
    ) -> None:
        """The warp's sums and its best, a word each, in shared memory: [column, group, word]."""
        machine = self.machine
        for mask in (16, 8, 4, 2, 1):
            self._take_lane(mask, best, best_token, best_distance)
            other = prim.shuffle_xor_f32(nearest, mask)
            nearest.set(ch.select(other < nearest, other, nearest))
        words = self._sums(column, machine.warp // self._finishers, OF_BLOCK)
        total = self._sum_of_lanes(sums)
        with ch.if_((machine.lane % 2 == 0) & (machine.lane < 4 * TESTED)):
            words[SUMS + machine.lane // 2] = prim.float_bits(total)
        self._lay_down_best(words, best, best_token, best_distance, nearest)

    @ch.function
    def _lay_down_best(
        self, words: ch.Expr, best: ch.Expr, token: ch.Expr, distance: ch.Expr, nearest: ch.Expr
    ) -> None:
        with ch.if_(self.machine.lane == 0):
            words[BEST] = prim.float_bits(best)
            words[TOKEN] = token
            words[DISTANCE] = prim.float_bits(distance)
            words[NEAREST] = prim.float_bits(nearest)

    @ch.function
    def _sum_of_lanes(self, sums: Any) -> Any:
        """Number l // 2 of the sums over all lanes, on lane l: lanes that meet share out what they add."""
        lane, kept = self.machine.lane, [sums[number] for number in range(2 * TESTED)]
        for mask in (16, 8, 4, 2):
            half = mask // 2
            others = [kept[number] if number < len(kept) else ty.f32(0.0) for number in range(2 * half)]
            kept = []
            for number in range(half):
                first, second = others[number], others[number + half]
                is_upper = (lane & mask) != 0
                given = ch.const(ty.f32, ch.select(is_upper, first, second), name="given")
                own = ch.const(ty.f32, ch.select(is_upper, second, first), name="own")
                kept.append(ch.const(ty.f32, own + prim.shuffle_xor_f32(given, mask), name="both"))
        total = kept[0] + prim.shuffle_xor_f32(kept[0], 1)
        return total

    @ch.function
    def _add_groups(self, column: ch.Expr, whose: int) -> Any:
        """Word number `lane` of what a column's groups have laid down, together, in order."""
        lane = self.machine.lane % FILTER_WORDS
        chosen = ch.var(ty.u32, 0)
        for group in range(1, self._groups):
            words, so_far = self._sums(column, group, whose), self._sums(column, chosen, whose)
            other, best = prim.bits_float(words[BEST]), prim.bits_float(so_far[BEST])
            with ch.if_((other > best) | ((other == best) & (words[TOKEN] < so_far[TOKEN]))):
                chosen.set(group)
        word = ch.var(ty.u32, self._sums(column, chosen, whose)[lane])
        with ch.if_(lane >= NEAREST):
            total = ch.var(ty.f32, prim.bits_float(self._sums(column, 0, whose)[lane]))
            for group in range(1, self._groups):
                other = prim.bits_float(self._sums(column, group, whose)[lane])
                total.set(ch.select(lane == NEAREST, ch.minimum(total, other), total + other))
            word.set(prim.float_bits(total))
        return word

    # What all blocks decide -------------------------------------------------------------------------------------------

    @ch.function
    def _read(self, column: ch.Expr, epoch: ch.Expr, number: ch.Value) -> None:
        """This warp's share of all blocks' words of a column, together, into the region `filter_sums`.

        Lane l reads units l, l + 32, ... of the groups in turn: the same unit of different blocks, of which there are
        four."""
        machine = self.machine
        sums = ch.array(ty.f32, 4, zero=True)
        best = ch.var(ty.f32, -math.inf)
        token = ch.var(ty.u32, NO_TOKEN)
        distance = ch.var(ty.f32, math.inf)
        nearest = ch.var(ty.f32, math.inf)
        units, stride = machine.gpu.blocks * UNITS_OF_BLOCK, 32 * self._groups
        data = ch.array(ty.u32x4, UNITS)
        own = machine.warp // self._finishers * 32 + machine.lane
        with ch.for_(own, units, stride * UNITS, unroll=1) as first:
            count = ch.minimum((units - first + (stride - 1)) // stride, ty.u32(UNITS))
            unit = self._vector(column, number) * UNITS_OF_BLOCK + first
            self.exchange.read_units("filters", data, unit, stride, count, epoch)
            with ch.for_(UNITS, unroll=True) as place:
                with ch.if_(place < count):
                    self._take_unit(data[place], sums, best, token, distance, nearest)
        for mask in (16, 8, 4):
            self._take_lane(mask, best, token, distance)
            other = prim.shuffle_xor_f32(nearest, mask)
            nearest.set(ch.select(other < nearest, other, nearest))
            for word in range(4):
                sums[word] += prim.shuffle_xor_f32(sums[word], mask)
        words = self._sums(column, machine.warp // self._finishers, OF_ALL)
        with ch.if_((machine.lane > 0) & (machine.lane < UNITS_OF_BLOCK)):
            for word in range(4):
                words[machine.lane * 4 + word] = prim.float_bits(sums[word])
        self._lay_down_best(words, best, token, distance, nearest)

    @ch.function
    def _take_unit(self, unit: Any, sums: Any, best: Any, token: Any, distance: Any, nearest: Any) -> None:
        """One unit of one block: a first one for the best, another for the sums; the rest of it nobody looks at."""
        for word, value in enumerate((unit.x, unit.y, unit.z, unit.w)):
            sums[word] += prim.bits_float(value)
        other = prim.bits_float(unit.x)
        with ch.if_((other > best) | ((other == best) & (unit.y < token))):
            best.set(other)
            token.set(unit.y)
            distance.set(prim.bits_float(unit.z))
        nearest.set(ch.select(prim.bits_float(unit.w) < nearest, prim.bits_float(unit.w), nearest))

    @ch.function
    def _take_lane(self, mask: int, best: Any, token: Any, distance: Any) -> None:
        """The better of this lane's candidate and that of lane ^ mask; the lower id on ties."""
        other = prim.shuffle_xor_f32(best, mask)
        other_token = prim.shuffle_xor_u32(token, mask)
        other_distance = prim.shuffle_xor_f32(distance, mask)
        with ch.if_((other > best) | ((other == best) & (other_token < token))):
            best.set(other)
            token.set(other_token)
            distance.set(other_distance)

    @ch.function
    def _judge_all(self, epoch: ch.Expr, number: ch.Value) -> None:
        """The end of a round: a column's warps read what all blocks published, and the first of them decides."""
        with self._columns_of_warp() as column:
            with ch.if_(self._state(column)[PENDING] != 0):
                self._read(column, epoch, number)
        self.machine.meet()
        with self._columns_of_first_group() as column:
            with ch.if_(self._state(column)[PENDING] != 0):
                word = self._add_groups(column, OF_ALL)
                token = prim.shuffle_u32(word, TOKEN)
                distance, nearest, *sums = (
                    prim.bits_float(prim.shuffle_u32(word, lane)) for lane in range(DISTANCE, FILTER_WORDS)
                )
                prim.warp_barrier()  # every lane has seen that the column is pending before lane 0 says otherwise
                with ch.if_(self.machine.lane == 0):
                    with ch.if_(number == 0):
                        self._begin(column, token, distance, nearest)
                    with ch.else_():
                        self._judge(column, token, distance, sums[0::2], sums[1::2])

    @ch.function
    def _begin(self, column: ch.Expr, token: ch.Expr, distance: ch.Expr, nearest: ch.Expr) -> None:
        """The highest number, the first candidate and the first pivots. Distances were minus the numbers so far."""
        state = self._state(column)
        limit = prim.bits_float(self.adjustments.of(column, "reach"))
        top_p = prim.bits_float(self.adjustments.of(column, "top_p"))
        keeps_all_near = (self.adjustments.of(column, "top_k") == 0) & (top_p >= 1.0)
        known = {HIGHEST: -nearest, LIMIT: limit, BELOW: 0.0, ABOVE: math.inf, LEAST: 1.0, MOST: math.inf}
        for word, number in known.items():
            state[word] = prim.float_bits(number)
        for number in range(1, PIVOTS + 1):
            state[PIVOT + number] = prim.float_bits(FIRST_PIVOT * 2**number)
        self._propose(column, token, distance - nearest, limit)
        with ch.if_((token == NO_TOKEN) | (keeps_all_near & (state[HAS_CANDIDATE] != 0))):
            state[PENDING] = 0  # the token that is chosen without filters
        with ch.else_():
            self.machine.region("chosen", ty.u32)[column] = NO_TOKEN

    @ch.function
    def _propose(self, column: ch.Expr, token: ch.Expr, distance: ch.Expr, limit: ch.Expr) -> None:
        """A candidate, if it lies below the limit: else there is none, and the next round looks for one below it."""
        state = self._state(column)
        is_near = (token != NO_TOKEN) & (distance < limit)
        state[HAS_CANDIDATE] = ch.select(is_near, ty.u32(1), ty.u32(0))
        state[CHOSEN] = token
        state[PIVOT] = prim.float_bits(ch.select(is_near, distance, limit))

    @ch.function
    def _judge(self, column: ch.Expr, token: ch.Expr, distance: ch.Expr, counts: Any, weights: Any) -> None:
        """What a round's sums say: of the bracket, the limit, the candidate; then what the next round weighs."""
        state = self._state(column)
        top_k = ch.var(ty.f32, ty.f32(self.adjustments.of(column, "top_k")))
        with ch.if_((top_k == 0.0) | (top_k > counts[-1])):
            top_k.set(counts[-1])
        top_p = prim.bits_float(self.adjustments.of(column, "top_p"))
        self._bracket(column, top_k, counts, weights)
        limit = self._lower_limit(column, top_k, top_p, counts, weights)
        with ch.if_((state[HAS_CANDIDATE] == 0) | (self._number(column, PIVOT) >= limit)):
            self._propose(column, token, distance, limit)
        with ch.else_():
            # Fewer than top_k are nearer. Whether they weigh less than top_p of the whole may be open still.
            with ch.if_((top_p >= 1.0) | (weights[0] < top_p * self._number(column, LEAST))):
                state[PENDING] = 0
                self.machine.region("chosen", ty.u32)[column] = state[CHOSEN]
        self._place_pivots(column, limit)

    @ch.function
    def _bracket(self, column: ch.Expr, top_k: ch.Expr, counts: Any, weights: Any) -> None:
        """Narrow down where the top-k end, and what they weigh."""
        state = self._state(column)
        below, above = ch.var(ty.f32, self._number(column, BELOW)), ch.var(ty.f32, self._number(column, ABOVE))
        least, most = ch.var(ty.f32, self._number(column, LEAST)), ch.var(ty.f32, self._number(column, MOST))
        for number in range(TESTED):
            at = self._number(column, PIVOT + number) if number < TESTED - 1 else ty.f32(math.inf)
            with ch.if_((counts[number] >= top_k) & (at <= above)):
                above.set(at)
                most.set(weights[number])
            with ch.if_((counts[number] <= top_k) & (at >= below)):
                below.set(at)
                least.set(weights[number])
        middle = (below + above) * 0.5
        with ch.if_((above < math.inf) & ((middle <= below) | (middle >= above))):
            least.set(most)  # no number lies between the two: the last of the top-k and all that tie are at `below`
        state[BELOW], state[ABOVE] = prim.float_bits(below), prim.float_bits(above)
        state[LEAST], state[MOST] = prim.float_bits(least), prim.float_bits(most)

    @ch.function
    def _lower_limit(self, column: ch.Expr, top_k: ch.Expr, top_p: ch.Expr, counts: Any, weights: Any) -> Any:
        """From a distance on nothing is kept if too many are nearer, or if they weigh too much."""
        limit = ch.var(ty.f32, self._number(column, LIMIT))
        most = self._number(column, MOST)
        for number in range(PIVOTS + 1):
            at = self._number(column, PIVOT + number)
            is_out = (counts[number] >= top_k) | ((top_p < 1.0) & (weights[number] >= top_p * most))
            with ch.if_(is_out & (at < limit)):
                limit.set(at)
        self._state(column)[LIMIT] = prim.float_bits(limit)
        return limit

    @ch.function
    def _place_pivots(self, column: ch.Expr, limit: ch.Expr) -> None:
        """Evenly where the answer lies: in the bracket while it is open, then below the limit. Without an upper end,
        each twice as far as the one before."""
        state = self._state(column)
        is_open = self._number(column, LEAST) < self._number(column, MOST)
        low = ch.var(ty.f32, ch.select(is_open, self._number(column, BELOW), ty.f32(0.0)))
        high = ch.var(ty.f32, ch.select(is_open, self._number(column, ABOVE), limit))
        for number in range(1, PIVOTS + 1):
            evenly = low + (high - low) * (number / (PIVOTS + 1))
            doubling = (low + FIRST_PIVOT) * 2.0**number
            at = ch.select(high < math.inf, evenly, doubling)
            state[PIVOT + number] = prim.float_bits(at)

    # Who has which column -------------------------------------------------------------------------------------------

    @property
    def _finishers(self) -> int:
        return self.machine.plan.consumer_warps // self._groups

    @property
    def _groups(self) -> int:
        """Warps that share a column's rows."""
        return max(1, self.machine.plan.consumer_warps // self.columns.limit)

    def _columns_of_warp(self) -> AbstractContextManager[Any]:
        """The columns of which this warp weighs rows: those that it finishes in every product."""
        first = self.machine.warp % self._finishers
        return ch.for_(first, self.columns.limit, self._finishers, unroll=1, name="column")

    @contextmanager
    def _columns_of_first_group(self) -> Iterator[Any]:
        """The columns that this warp decides about."""
        with ch.if_(self.machine.warp < self._finishers), self._columns_of_warp() as column:
            yield column

    def _state(self, column: ch.Expr) -> Any:
        """Words of a column: u32, or the bits of f32."""
        return self.machine.region("filters", ty.u32) + column * FILTER_WORDS

    def _number(self, column: ch.Expr, word: int) -> Any:
        return prim.bits_float(self._state(column)[word])

    def _sums(self, column: ch.Expr, group: ch.Value, whose: int) -> Any:
        """Words of a column that a group of warps has laid down: of this block's rows, or of what it read."""
        place = (column * self._groups + group) * 2 + whose
        return self.machine.region("filter_sums", ty.u32) + place * FILTER_WORDS

    def _vector(self, column: ch.Expr, number: ch.Value) -> Any:
        """The first of all blocks' places of a column in the vector of a round."""
        return (ch.cast(ty.u32, number) % 2 * self.columns.limit + column) * self.machine.gpu.blocks
