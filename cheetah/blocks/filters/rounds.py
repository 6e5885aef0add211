"""Rounds: where the blocks' short lists are not enough to filter by, all blocks weigh all their tokens, several times.

As with the lists a candidate is judged by how many tokens are nearer to the highest of all, and what they weigh. Four
*pivots* are weighed along with the candidate's distance. They bring the limit nearer, and bracket the distance of the
top-k's last token, because its weight is the whole of which top-p is a part. Between bounds of that whole most
candidates can be judged; for the others the bracket is narrowed until they can. A *round* is: each block weighs the
rows of the head that it made, publishes sixteen words, reads those of all, and comes to the same decision as all. Sums
are made in one order, so a larger set never weighs less. The result depends on the logits alone, not on the rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import NO_TOKEN
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.filters.columns import TESTED, WarpColumns, best_of_warp, highest_of_warp
from cheetah.lang import prim, ty
from cheetah.plan.kv.tables import FILTER_ROUNDS
from cheetah.plan.regions import FILTER_WORDS

PIVOTS = TESTED - 2
BEST, TOKEN, DISTANCE = range(3)
SUMS = 4
"""Words of what a block publishes: its most noisy token that is near enough and how far away that is, and of each
tested distance how many are nearer, and weigh."""
UNITS_OF_BLOCK = FILTER_WORDS // 4
FIRST_PIVOT = 1.0
OF_BLOCK, OF_ALL = range(2)
"""Whose words a group of warps lays down: those of its block's rows, or what it read of all blocks."""


@dataclass(frozen=True, eq=False)
class Tested:
    """Of a lane: a distance, and how many tokens are nearer, and what they weigh (f32)."""

    at: ch.Expr
    count: ch.Expr
    weight: ch.Expr


@dataclass(frozen=True, eq=False)
class Known:
    """Variables of what is known of a column: see the words of these names."""

    limit: Any
    below: Any
    above: Any
    least: Any
    most: Any


class Rounds:
    """The rounds of the columns that the lists leave open. `weighed`: f32 [batch, vocab, 2], see `Filters`."""

    def __init__(self, warps: WarpColumns, exchange: Exchange, weighed: ch.Expr) -> None:
        self.warps, self.exchange, self.weighed = warps, exchange, weighed
        self.machine, self.adjustments = warps.machine, warps.adjustments

    @ch.function
    def begin_rounds(self, column: ch.Expr, highest: ch.Expr, distance: ch.Expr) -> None:
        """One warp: a column is left open. The first candidate is the token in the region `chosen`, so far from the
        highest number of all. Where no token is found it stays without one."""
        chosen = self.machine.chosen
        token = ch.const(ty.u32, chosen[column], name="token")
        limit = prim.bits_float(self.adjustments.of(column, "reach"))
        prim.warp_barrier()  # every lane knows the token before lane 0 takes it away
        self._propose(column, token, distance, limit)
        with ch.if_(self.machine.lane == 0):
            self._store(column, Known(limit, ty.f32(0.0), ty.f32(math.inf), ty.f32(1.0), ty.f32(math.inf)))
            self._state(column).highest = highest
            for index in range(1, PIVOTS + 1):
                self._state(column).tested[index] = FIRST_PIVOT * 2**index
            self._state(column).tested[PIVOTS + 1] = math.inf
            self._state(column).open = 1
            chosen[column] = NO_TOKEN

    @ch.inline
    def run(self, epoch: ch.Expr) -> None:
        """Put the tokens of the columns that are left open into the region `chosen`. A barrier of the consumer warps
        must lie between what left them open and this, and between this and what reads the tokens.

        Rounds take turns with two vectors: a block that publishes round r + 2 has read all blocks' words of round
        r + 1, and each of them was published after its block had read those of round r. Each round has its epoch; the
        one before the first is that of the candidates."""
        with ch.for_(FILTER_ROUNDS, unroll=1, name="round") as index:
            with ch.if_(self._is_done()):
                ch.break_()
            self._weigh_all(epoch + 1 + index, index)
            self.exchange.meet()
            self._judge_all(epoch + 1 + index, index)
            self.machine.meet()

    @ch.function
    def _is_done(self) -> Any:
        """Whether every column has its token; the same on every thread."""
        pending = ch.var(ty.u32, 0)
        with ch.for_(self.machine.lane, self.warps.columns.limit, 32, unroll=1) as column:
            pending |= self._state(column).open
        with ch.for_(5, unroll=1) as level:
            pending |= prim.shuffle_xor_u32(pending, ty.u32(16) >> level)
        return pending == 0

    # What a block weighs and publishes --------------------------------------------------------------------------------

    @ch.function
    def _weigh_all(self, epoch: ch.Expr, index: ch.Value) -> None:
        """A round up to the exchange: every warp weighs its rows, the first of a column's warps publishes."""
        machine = self.machine
        with self.warps.of_warp() as column:
            with ch.if_(self._is_open(column)):
                self._weigh_rows(column)
        machine.meet()
        with self.warps.of_first_group() as column:
            with ch.if_(self._is_open(column)):
                word = self._add_groups(column, ch.argument(OF_BLOCK))
                with ch.if_(machine.lane < FILTER_WORDS):
                    word_index = (self._vector(column, index) + machine.number) * FILTER_WORDS + machine.lane
                    self.exchange.publish("filters", word_index, word, epoch)

    @ch.function
    def _weigh_rows(self, column: ch.Expr) -> None:
        """This warp's rows of a column: what is nearer than each tested distance, into the region `filter_sums`."""
        machine, head = self.machine, self.adjustments.head
        sums = ch.array(ty.f32, 2 * TESTED, zero=True)
        best = ch.var(ty.f32, -math.inf)
        best_token = ch.var(ty.u32, NO_TOKEN)
        best_distance = ch.var(ty.f32, math.inf)
        highest = ch.const(ty.f32, self._state(column).highest, name="highest")
        tested = ch.array(ty.f32, TESTED)
        with ch.for_(PIVOTS + 1, unroll=True) as index:
            tested[index] = self._state(column).tested[index]
        tested[PIVOTS + 1] = math.inf
        pairs = ch.reinterpret(ty.ptr(ty.f32x2), self.weighed) + self.adjustments.weighed_row(column)
        first = self.warps.group * 32 + machine.lane
        position = head.position(machine.block)
        with ch.for_(first, self.adjustments.own_rows, self.warps.lanes, unroll=2) as row:
            token = self.adjustments.token_of_row(row, position)
            with ch.if_(self.adjustments.has_row(row, position, token)):
                pair = pairs[token]
                distance = highest - pair.x
                weight = prim.exp_f32(-distance)
                with ch.for_(TESTED, unroll=True) as index, ch.if_(distance < tested[index]):
                    sums[2 * index] += 1.0
                    sums[2 * index + 1] += weight
                with ch.if_((distance < tested[0]) & (pair.y > best)):
                    best.set(pair.y)
                    best_token.set(token)
                    best_distance.set(distance)
        self._lay_weights_down(column, sums, best, best_token, best_distance)

    @ch.function
    def _lay_weights_down(self, column: ch.Expr, sums: Any, best: Any, best_token: Any, best_distance: Any) -> None:
        """The warp's sums and its best, a word each, in shared memory: [column, group, word]."""
        machine = self.machine
        best_of_warp(machine.lane, best, best_token, best_distance)
        words = self._sums(column, self.warps.group, OF_BLOCK)
        total = self._sum_of_lanes(sums)
        with ch.if_((machine.lane % 2 == 0) & (machine.lane < 4 * TESTED)):
            words[SUMS + machine.lane // 2] = prim.float_bits(total)
        self._lay_down_best(words, best, best_token, best_distance)

    @ch.function
    def _lay_down_best(self, words: ch.Expr, best: ch.Expr, token: ch.Expr, distance: ch.Expr) -> None:
        with ch.if_(self.machine.lane == 0):
            words[BEST] = prim.float_bits(best)
            words[TOKEN] = token
            words[DISTANCE] = prim.float_bits(distance)

    @ch.function
    def _sum_of_lanes(self, sums: Any) -> Any:
        """Number l // 2 of the sums over all lanes, on lane l: lanes that meet share out what they add."""
        kept = ch.array(ty.f32, 8)
        with ch.for_(2 * TESTED - 8, unroll=True) as index:
            kept[index] = self._shared_out(sums[index], sums[8 + index], ch.argument(16))
        with ch.for_(2 * TESTED - 8, 8, unroll=True) as index:
            kept[index] = self._shared_out(sums[index], ch.argument(0.0), ch.argument(16))
        for half in (4, 2, 1):
            with ch.for_(half, unroll=True) as index:
                kept[index] = self._shared_out(kept[index], kept[index + half], ch.argument(2 * half))
        return kept[0] + prim.shuffle_xor_f32(kept[0], 1)

    @ch.function
    def _shared_out(self, first: ch.Expr, second: ch.Expr, mask: ch.Expr) -> Any:
        """One of two numbers, this lane's and that of the lane that it meets, which has the sum of the other: the
        second where the lane has this bit."""
        is_upper = (self.machine.lane & mask) != 0
        given = ch.const(ty.f32, ch.select(is_upper, first, second), name="given")
        own = ch.const(ty.f32, ch.select(is_upper, second, first), name="own")
        return own + prim.shuffle_xor_f32(given, mask)

    @ch.function
    def _add_groups(self, column: ch.Expr, whose: ch.Expr) -> Any:
        """Word number `lane` of what a column's groups have laid down, together, in order."""
        lane = self.machine.lane % FILTER_WORDS
        chosen = ch.var(ty.u32, 0)
        total = ch.var(ty.f32, 0.0)
        with ch.for_(self.warps.groups, unroll=1, name="group") as group:
            words, so_far = self._sums(column, group, whose), self._sums(column, chosen, whose)
            other, best = prim.bits_float(words[BEST]), prim.bits_float(so_far[BEST])
            with ch.if_((other > best) | ((other == best) & (words[TOKEN] < so_far[TOKEN]))):
                chosen.set(group)
            with ch.if_(lane >= SUMS):
                total += prim.bits_float(words[lane])
        return ch.select(lane >= SUMS, prim.float_bits(total), self._sums(column, chosen, whose)[lane])

    # What all blocks decide -------------------------------------------------------------------------------------------

    @ch.function
    def _read_sums(self, column: ch.Expr, epoch: ch.Expr, index: ch.Value) -> None:
        """This warp's share of all blocks' words of a column, together, into the region `filter_sums`.

        Lane l reads units l, l + 32, ... of the groups in turn: the same unit of different blocks, of which there are
        four."""
        machine = self.machine
        sums = ch.array(ty.f32, 4, zero=True)
        best = ch.var(ty.f32, -math.inf)
        token = ch.var(ty.u32, NO_TOKEN)
        distance = ch.var(ty.f32, math.inf)
        units, first_unit = machine.world.blocks * UNITS_OF_BLOCK, self._vector(column, index) * UNITS_OF_BLOCK
        with self.warps.reading(self.exchange, "filters", first_unit, units, epoch) as (_, unit):
            self._take_unit(unit, sums, best, token, distance)
        with ch.if_(machine.lane % UNITS_OF_BLOCK != 0):
            best.set(-math.inf)  # what was in the first words of its units was no candidate
            token.set(NO_TOKEN)
        best_of_warp(machine.lane, best, token, distance)
        with ch.for_(3, unroll=1) as level:
            with ch.for_(4, unroll=True) as word:
                sums[word] += prim.shuffle_xor_f32(sums[word], ty.u32(16) >> level)
        words = self._sums(column, self.warps.group, OF_ALL)
        with ch.if_((machine.lane > 0) & (machine.lane < UNITS_OF_BLOCK)):
            with ch.for_(4, unroll=True) as word:
                words[machine.lane * 4 + word] = prim.float_bits(sums[word])
        self._lay_down_best(words, best, token, distance)

    @ch.function
    def _take_unit(self, unit: Any, sums: Any, best: Any, token: Any, distance: Any) -> None:
        """One unit of one block: a first one for the best, another for the sums; the rest of it nobody looks at."""
        for word, value in enumerate((unit.x, unit.y, unit.z, unit.w)):
            sums[word] += prim.bits_float(value)
        other = prim.bits_float(unit.x)
        with ch.if_((other > best) | ((other == best) & (unit.y < token))):
            best.set(other)
            token.set(unit.y)
            distance.set(prim.bits_float(unit.z))

    @ch.function
    def _judge_all(self, epoch: ch.Expr, index: ch.Value) -> None:
        """The end of a round: a column's warps read what all blocks published, and the first of them decides."""
        with self.warps.of_warp() as column:
            with ch.if_(self._is_open(column)):
                self._read_sums(column, epoch, index)
        self.machine.meet()
        with self.warps.of_first_group() as column:
            with ch.if_(self._is_open(column)):
                word = self._add_groups(column, ch.argument(OF_ALL))
                self._judge_sums(column, word)

    @ch.function
    def _judge_sums(self, column: ch.Expr, word: ch.Expr) -> None:
        """One warp: what a round's sums say of the bracket, the limit, the candidate; then what the next round weighs.
        Lane i < 6 has tested distance i. word: number `lane` of the sums."""
        lane = self.machine.lane
        top_k = ch.var(ty.f32, ty.f32(self.adjustments.of(column, "top_k")))
        top_p = ch.const(ty.f32, prim.bits_float(self.adjustments.of(column, "top_p")), name="top_p")
        token, distance = prim.shuffle_u32(word, TOKEN), prim.bits_float(prim.shuffle_u32(word, DISTANCE))
        index = ch.const(ty.u32, ch.minimum(lane, ty.u32(TESTED - 1)), name="index")
        count = prim.bits_float(prim.shuffle_u32(word, index * 2 + SUMS))
        weight = prim.bits_float(prim.shuffle_u32(word, index * 2 + (SUMS + 1)))
        of_candidate = prim.bits_float(prim.shuffle_u32(word, SUMS + 1))
        of_all = prim.bits_float(prim.shuffle_u32(word, FILTER_WORDS - 2))
        at = ch.const(ty.f32, self._state(column).tested[index], name="at")
        tested = Tested(at, count, weight)
        with ch.if_((top_k == 0.0) | (top_k > of_all)):
            top_k.set(of_all)
        known = self._known(column)
        candidate = ch.const(ty.f32, self._state(column).tested[0], name="candidate")
        has_candidate = self._state(column).has_candidate != 0
        prim.warp_barrier()  # every lane has read the state before lane 0 writes it
        self._narrow(known, top_k, top_p, tested)
        with ch.if_(~has_candidate | (candidate >= known.limit)):
            self._propose(column, token, distance, known.limit)
        with ch.else_():
            # Fewer than top_k are nearer. Whether they weigh less than top_p of the whole may be open still.
            with ch.if_((lane == 0) & ((top_p >= 1.0) | (of_candidate < top_p * known.least))):
                self._state(column).open = 0
                self.machine.chosen[column] = self._state(column).chosen
        self._keep_known(column, known)

    @ch.inline
    def _known(self, column: ch.Expr) -> Known:
        """What is known of a column so far."""
        limit = ch.var(ty.f32, self._state(column).limit)
        below = ch.var(ty.f32, self._state(column).below)
        above = ch.var(ty.f32, self._state(column).above)
        least = ch.var(ty.f32, self._state(column).least)
        most = ch.var(ty.f32, self._state(column).most)
        return Known(limit, below, above, least, most)

    def _store(self, column: ch.Expr, known: Known) -> None:
        """Write down what is known of a column."""
        for name, value in vars(known).items():
            getattr(self._state(column), name).set(value)

    @ch.function
    def _narrow(self, known: Known, top_k: ch.Expr, top_p: ch.Expr, tested: Tested) -> None:
        """Narrow down where the top-k end, and what they weigh; then from where on nothing is kept, because too many
        are nearer, or weigh too much. The further, the more, so the bounds of a warp are those of its lanes."""
        holds_all, holds_no_more = tested.count >= top_k, tested.count <= top_k
        for bound, of_lane in ((known.above, tested.at), (known.most, tested.weight)):
            bound.set(-highest_of_warp(-ch.select(holds_all, ch.minimum(bound, of_lane), bound)))
        for bound, of_lane in ((known.below, tested.at), (known.least, tested.weight)):
            bound.set(highest_of_warp(ch.select(holds_no_more, ch.maximum(bound, of_lane), bound)))
        middle = (known.below + known.above) * 0.5
        with ch.if_((known.above < math.inf) & ((middle <= known.below) | (middle >= known.above))):
            known.least.set(known.most)  # no number lies between: the last of the top-k and its ties are at `below`
        is_out = holds_all | ((top_p < 1.0) & (tested.weight >= top_p * known.most))
        known.limit.set(-highest_of_warp(-ch.select(is_out, ch.minimum(known.limit, tested.at), known.limit)))

    @ch.function
    def _propose(self, column: ch.Expr, token: ch.Expr, distance: ch.Expr, limit: ch.Expr) -> None:
        """A candidate, if it lies below the limit: else there is none, and the next round looks for one below it."""
        is_near = (token != NO_TOKEN) & (distance < limit)
        with ch.if_(self.machine.lane == 0):
            self._state(column).has_candidate = ch.select(is_near, ty.u32(1), ty.u32(0))
            self._state(column).chosen = token
            self._state(column).tested[0] = ch.select(is_near, distance, limit)

    @ch.function
    def _keep_known(self, column: ch.Expr, known: Known) -> None:
        """Write down what is known, and the next pivots: evenly where the answer lies, in the bracket while it is open,
        then below the limit. Without an upper end, each twice as far as the one before."""
        lane = self.machine.lane
        is_open = known.least < known.most
        low = ch.var(ty.f32, ch.select(is_open, known.below, ty.f32(0.0)))
        high = ch.var(ty.f32, ch.select(is_open, known.above, known.limit))
        evenly = low + (high - low) * (ty.f32(lane) * (1 / (PIVOTS + 1)))
        doubling = (low + FIRST_PIVOT) * ty.f32(ty.u32(1) << lane)
        with ch.if_((lane > 0) & (lane <= PIVOTS)):
            self._state(column).tested[lane] = ch.select(high < math.inf, evenly, doubling)
        with ch.if_(lane == 0):
            self._store(column, known)

    # Where things lie -------------------------------------------------------------------------------------------------

    def _state(self, column: ch.Expr) -> Any:
        """What the block knows of a column."""
        return self.warps.state(column)

    def _is_open(self, column: ch.Expr) -> Any:
        return self._state(column).open != 0

    def _sums(self, column: ch.Expr, group: ch.Value, whose: ch.Value) -> ch.Expr:
        """Words of a column that a group of warps has laid down: of this block's rows, or of what it read."""
        row = (column * self.warps.groups + group) * 2 + whose
        return self.machine.region("filter_sums", ty.u32) + row * FILTER_WORDS

    def _vector(self, column: ch.Expr, index: ch.Value) -> ch.Expr:
        """The first of all blocks' words of a column in the vector of a round."""
        return (ch.cast(ty.u32, index) % 2 * self.warps.columns.limit + column) * self.machine.world.blocks
