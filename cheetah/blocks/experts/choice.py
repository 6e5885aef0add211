"""Which experts each column of a step is given to, with which weight; and the list of all that some column chose.

Every block makes the same choice for itself, of the same words: the logits of the router's product, f32. A warp has a
column, its lanes so many neighbouring experts each. It takes the highest logit, of equal ones the lowest expert's, as
often as a column chooses; logits are compared as whole numbers, and one that is no number is below all others, so that
a column always has as many experts as it chooses, each once. An expert's *rank* is its place among those of its column,
in ascending order: where `gated` has what the column's experts make, word for word the same in every layer.

What stands in shared memory: `expert_ranks`, u8 [column][expert], NO_RANK where the column did not choose it, also in
columns that are not in use; `expert_weights`, f32 [column][rank], and behind them each column's weight of the expert
that every token has, if there is one; and the list (`cheetah.blocks.made_list`) of all that some column chose,
ascending. The three are made and followed together.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
from cheetah.blocks.exchange import Published
from cheetah.blocks.filters.columns import number_of, ordered
from cheetah.blocks.linear.epilogue import Biases, PublishedRows
from cheetah.blocks.linear.interface import Rows
from cheetah.blocks.made_list import MadeList
from cheetah.blocks.timeline import NO_TIMELINE, Timeline
from cheetah.lang import prim, ty
from cheetah.lang.primitives.exchange import UNITS
from cheetah.plan.index import ceil_div
from cheetah.plan.products import EXPERT_LIST, Experts, logit_words

NO_RANK = ch.named("NO_RANK", 255)
"""In `expert_ranks`: the column did not choose the expert."""
WORDS = 4
"""Of a unit of an exchange."""
LANES = 32
NO_NUMBER = 1
"""The key of a logit that is no number: below those of all numbers, above that of an expert that there is not."""


class PublishedLogits(PublishedRows):
    """The router's rows, with their biases, f32 [column][expert], with those that fill its last M-tile."""

    def __init__(self, into: Published, experts: Experts, biases: Biases | None = None) -> None:
        self.into, self.experts, self.biases = into, experts, biases

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.into.name,)

    @ch.inline
    def __call__(self, rows: Rows) -> None:
        place = rows.column * logit_words(self.experts) + rows.m_tile * rows.count + rows.row
        store = self.into.publish_later(place)
        bias = None if self.biases is None else ch.const(ty.f32, self.biases.of(rows), name="bias")
        logit = ch.const(ty.f32, rows.sum() if bias is None else rows.sum() + bias, name="logit")
        with ch.if_(rows.is_own):
            store(prim.float_bits(logit))


class WarpChoice:
    """How a warp chooses the experts of a token, each lane among `of_lane` neighbouring ones. machine: which has lanes.
    normalised: a token's weights are of the softmax of its own experts alone, not of all."""

    def __init__(self, machine: Any, experts: Experts, normalised: bool) -> None:
        self.machine, self.experts, self.normalised = machine, experts, normalised

    @property
    def of_lane(self) -> int:
        """Experts that a lane has of a token's, whole units of logits."""
        return ceil_div(self.experts.count, LANES * WORDS) * WORDS

    @ch.inline
    def take(self, own: int, first: ch.Expr, word: Any, logits: Any, keys: Any) -> None:
        """One of the lane's logits, and a key that is as large as it is."""
        logit = ch.const(ty.f32, prim.bits_float(word), name="logit")
        key = ordered(ch.select(logit == 0.0, 0.0, logit))  # there are two zeros
        key = ch.select(logit == logit, key, ty.u32(NO_NUMBER))
        keys[own] = ch.select(first + own < self.experts.count, key, ty.u32(0))
        logits[own] = logit

    @ch.inline
    def pick(self, keys: Any, chosen: Any, highest: Any) -> Any:
        """The token's experts, as a bit of `chosen` for each of the lane's, and their highest logit. Returns how many
        of them lanes before this one have (u32)."""
        each, lane = self.of_lane, self.machine.lane
        places = ch.array(ty.u32, each)
        self._sort(keys, places)
        before = ch.var(ty.u32, 0)
        with ch.for_(self.experts.chosen, unroll=1, name="round") as round_:
            top = prim.warp_maximum_u32(keys[0])
            lowest = prim.warp_maximum_u32(ch.select(keys[0] == top, LANES - lane, ty.u32(0)))
            with ch.if_(round_ == 0):
                highest.set(number_of(top))
            before += ch.select(lowest > LANES - lane, ty.u32(1), ty.u32(0))
            with ch.if_(lowest == LANES - lane):
                chosen |= ty.u32(1) << places[0]
                with ch.for_(each - 1, unroll=True, name="own") as own:
                    keys[own] = keys[own + 1]
                    places[own] = places[own + 1]
                keys[each - 1] = 0
        return before

    @ch.inline
    def _sort(self, keys: Any, places: Any) -> None:
        """The lane's keys, the largest first, of equal ones the first; `places` is where each was."""
        each = self.of_lane
        with ch.for_(each, unroll=True, name="own") as own:
            places[own] = own
        with ch.for_(each, unroll=True, name="turn") as turn, ch.for_(turn % 2, each - 1, 2, unroll=True) as own:
            with ch.if_(keys[own + 1] > keys[own]):
                key = ch.const(ty.u32, keys[own + 1], name="key")
                place = ch.const(ty.u32, places[own + 1], name="place")
                keys[own + 1] = keys[own]
                places[own + 1] = places[own]
                keys[own] = key
                places[own] = place

    @ch.inline
    def weigh(self, first: ch.Expr, chosen: Any, highest: ch.Expr, weights: Any, total: Any) -> None:
        """Of logits become what they weigh, and of `total` what all that count weigh together."""
        of_lane = ch.var(ty.f32, 0.0)
        with ch.for_(self.of_lane, unroll=True, name="own") as own:
            weight = ch.const(ty.f32, prim.exp_f32(weights[own] - highest), name="weight")
            counts = has(chosen, own) if self.normalised else first + own < self.experts.count
            with ch.if_(counts):
                of_lane += weight
            weights[own] = weight
        total.set(prim.warp_sum_f32(of_lane))

    @ch.function
    def before(self, chosen: ch.Expr, bits: int) -> ch.Expr:
        """How many experts the lanes before this one have chosen, a bit of `chosen` for each."""
        own = ch.var(ty.u32, 0)
        with ch.for_(bits, unroll=True, name="bit") as bit:
            own += (chosen >> bit) & 1
        return of_lanes_before(self.machine.lane, own)


class Choice(WarpChoice):
    """The experts of all columns of a step."""

    def __init__(self, columns: Columns, experts: Experts, normalised: bool, timeline: Timeline = NO_TIMELINE) -> None:
        super().__init__(columns.machine, experts, normalised)
        self.columns, self.timeline = columns, timeline
        self.is_fused = bool(columns.machine.plan.fused_router)
        self.list = MadeList(self.machine, EXPERT_LIST, experts.most(columns.limit), experts.count)

    @property
    def ranks(self) -> Any:
        return self.machine.region("expert_ranks", ty.u8)

    @property
    def weights(self) -> Any:
        return self.machine.region("expert_weights", ty.f32)

    def rank(self, column: ch.Expr, expert: ch.Expr) -> ch.Expr:
        """The rank (u32) that an expert has to a column, or NO_RANK."""
        return ch.cast(ty.u32, self.ranks[column * self.experts.count + expert])

    def weight(self, column: Any, rank: Any) -> Any:
        """A column's weight (f32) of its expert of a rank; NO_RANK gives some weight."""
        return self.weights[column * self.experts.chosen + ch.minimum(rank, self.experts.chosen - 1)]

    def shared_weight(self, column: Any) -> Any:
        """A column's weight (f32) of the expert that every token has; 0 of one that is not in use."""
        return self.weights[self.experts.chosen * self.columns.limit + column]

    # -- making it -------------------------------------------------------------------------------------------------

    @ch.inline
    def make(self, routes: Published) -> None:
        """In the consumer role: wait for the logits of all columns in use, and choose.

        Of a single column a warp makes the list by itself, and tells of it before it knows what the experts weigh:
        their weights are read behind sums that it has a part in."""
        machine, limit = self.machine, self.columns.limit
        self.list.begin_making()
        if limit == 1:
            if not self.is_fused:
                machine.meet()  # what all have brought for experts is there
            with ch.if_(machine.warp == 0):
                self._choose(ch.argument(0), routes)
            if not self.is_fused:  # else all read it behind what they bring meanwhile
                self.list.finish_told()
            return
        with ch.for_(machine.warp, limit, machine.plan.consumer_warps, unroll=1, name="column") as column:
            self._choose(column, routes)
        machine.meet()  # all columns' ranks are there
        with ch.if_(machine.warp == 0):
            self._list_union()
        self.list.finish_making()

    @ch.function
    def _choose(self, column: ch.Expr, routes: Published) -> None:
        """A warp's column: its experts' ranks and weights; none of one that is not in use."""
        each, lane = self.of_lane, self.machine.lane
        first = ch.const(ty.u32, lane * each, name="first")
        chosen, before = ch.var(ty.u32, 0), ch.var(ty.u32, 0)  # a bit for each of the lane's experts; of lanes before
        weights, highest = ch.array(ty.f32, each), ch.var(ty.f32, 0.0)
        shared = ch.var(ty.f32, 0.0) if self.experts.shared else None
        with self.columns.if_active(column):
            keys = ch.array(ty.u32, each)
            logit = self._load(column, first, routes, weights, keys)
            if shared is not None:
                shared.set(prim.divide_f32(ty.f32(1.0), 1.0 + prim.exp_f32(-logit)))
            before.set(self.pick(keys, chosen, highest))
        self._number(column, first, chosen, before)
        if self.columns.limit == 1:
            self.list.tell()
        if shared is not None:
            with ch.if_(lane == 0):
                self.weights[self.experts.chosen * self.columns.limit + column] = shared
        with self.columns.if_active(column):
            if self.is_fused:
                self._keep_logits(chosen, before, weights)
            else:
                self._keep_weights(column, first, chosen, before, highest, weights)
        prim.warp_barrier()  # orders what the lanes have stored before what the first one tells of it

    @ch.inline
    def _load(self, column: ch.Expr, first: ch.Expr, routes: Published, logits: Any, keys: Any) -> Any:
        """The lane's logits, and keys that are as large as they are. Returns that of the expert that every token has,
        if there is one (f32)."""
        units, padded = self.of_lane // WORDS, logit_words(self.experts)
        has_shared = int(self.experts.shared > 0)
        assert units + has_shared <= UNITS, self.experts
        places, data = ch.array(ty.u32, UNITS), ch.array(ty.u32x4, UNITS)
        for unit in range(units):
            places[unit] = column * padded + ch.minimum(first + unit * WORDS, padded - WORDS)
        if has_shared:
            places[units] = column * padded + self.experts.shared_logit
        routes.read_places(data, places, units + has_shared)
        self.timeline.stamp_here("ready")
        for unit in range(units):
            for number, word in enumerate("xyzw"):
                own = unit * WORDS + number
                self.take(own, first, getattr(data[unit], word), logits, keys)
        return prim.bits_float(data[units].x) if has_shared else None

    @ch.inline
    def _number(self, column: ch.Expr, first: ch.Expr, chosen: ch.Expr, before: ch.Expr) -> None:
        """Ranks of the column's experts; those of the only column are the list, too."""
        count, words = self.experts.count, self.list.words if self.columns.limit == 1 else None
        ranks = self.ranks + column * count
        if words is not None:
            with ch.if_(self.machine.lane == 0):
                words[0] = self.experts.chosen
        rank = ch.var(ty.u32, before)
        with ch.for_(self.of_lane, unroll=True, name="own") as own, ch.if_(first + own < count):
            with ch.if_(has(chosen, own)):
                ranks[first + own] = ch.cast(ty.u8, rank)
                if words is not None:
                    words[rank + 1] = first + own
                rank += 1
            with ch.else_():
                ranks[first + own] = NO_RANK

    @ch.inline
    def _keep_weights(
        self, column: ch.Expr, first: ch.Expr, chosen: ch.Expr, before: ch.Expr, highest: ch.Expr, weights: Any
    ) -> None:
        """What the column's experts weigh, by rank."""
        total = ch.var(ty.f32, 1.0)
        self.weigh(first, chosen, highest, weights, total)
        rank = ch.var(ty.u32, column * self.experts.chosen + before)
        with ch.for_(self.of_lane, unroll=True, name="own") as own, ch.if_(has(chosen, own)):
            self.weights[rank] = prim.divide_f32(weights[own], total)
            rank += 1

    @ch.inline
    def _keep_logits(self, chosen: ch.Expr, before: ch.Expr, logits: Any) -> None:
        """The logits of the only column's experts, by rank, in the place of what they weigh."""
        rank = ch.var(ty.u32, before)
        with ch.for_(self.of_lane, unroll=True, name="own") as own, ch.if_(has(chosen, own)):
            self.weights[rank] = logits[own]
            rank += 1

    @ch.function
    def weigh_kept(self, scale: ch.Expr) -> None:
        """By the first consumer warp: what the only column's experts weigh, once it is known what their logits are to
        be multiplied with. A lane an expert."""
        chosen, lane = self.experts.chosen, self.machine.lane
        assert self.normalised and chosen <= LANES
        logit, key, weight = ch.var(ty.f32, 0.0), ch.var(ty.u32, 0), ch.var(ty.f32, 0.0)
        with ch.if_(lane < chosen):
            logit.set(self.weights[lane])
            key.set(ordered(logit))
        highest = ch.const(ty.f32, number_of(prim.warp_maximum_u32(key)), name="highest")
        with ch.if_(lane < chosen):
            weight.set(prim.exp_f32((logit - highest) * scale))
        total = ch.const(ty.f32, prim.warp_sum_f32(weight), name="total")
        with ch.if_(lane < chosen):
            self.weights[lane] = prim.divide_f32(weight, total)
        prim.warp_barrier()  # orders what the lanes have stored before the sums that the warp hands over

    @ch.function
    def _list_union(self) -> None:
        """One warp: all experts that some column chose, ascending."""
        count, lane, words = self.experts.count, self.machine.lane, self.list.words
        each = ceil_div(count, LANES)
        first = ch.const(ty.u32, lane * each, name="first")
        chosen = ch.var(ty.u32, 0)
        with ch.for_(self.columns.limit, unroll=1, name="column") as column:
            with ch.for_(each, unroll=True, name="own") as own, ch.if_(first + own < count):
                with ch.if_(self.rank(column, first + own) != NO_RANK):
                    chosen |= ty.u32(1) << own
        slot = ch.var(ty.u32, self.before(chosen, each))
        with ch.for_(each, unroll=True, name="own") as own, ch.if_(has(chosen, own)):
            words[slot + 1] = first + own
            slot += 1
        with ch.if_(lane == LANES - 1):
            words[0] = slot


@ch.inline
def of_lanes_before(lane: ch.Expr, own: ch.Expr) -> ch.Expr:
    """The sum of what the warp's lanes before this one have (u32)."""
    total = ch.var(ty.u32, own)
    with ch.for_(5, unroll=1, name="level") as level:
        distance = ch.const(ty.u32, ty.u32(1) << level, name="distance")
        other = prim.shuffle_u32(total, (lane + LANES - distance) % LANES)
        total += ch.select(lane >= distance, other, ty.u32(0))
    return total - own


def has(chosen: ch.Expr, own: ch.Expr) -> ch.Expr:
    """Whether a bit is set."""
    return ((chosen >> own) & 1) != 0
