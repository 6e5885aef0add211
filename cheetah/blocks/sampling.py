"""The end of a step: every block's best candidate, the grid's choice, and the rendezvous of all blocks.

Greedy takes the highest logit, the lowest id on ties. With a temperature, Gumbel noise is added to logit / temperature:
the highest sum is a sample from the softmax (Gumbel-max). The noise of a token id at a position is a pure function of
the seed (Philox4x32-10, counter (id, position, 0, 0)), so draws depend neither on the block nor on the launch. What
sequences ask for besides lies in `adjustments` (before any logits are compared) and in `filters` (after).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.adjustments import Adjustments
from cheetah.blocks.columns import NO_TOKEN, POSITION, SEED_HIGH, SEED_LOW, TEMPERATURE
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.filters.filters import Filters
from cheetah.blocks.host_words import HostWords
from cheetah.blocks.linear.adding import Adding
from cheetah.blocks.linear.interface import Rows
from cheetah.blocks.timeline import NO_TIMELINE, Timeline
from cheetah.lang import prim, ty
from cheetah.plan import M_TILE_ROWS
from cheetah.plan.kv.tables import BIASED, MASKED, PENALISED

PHILOX_MULTIPLIERS = ch.bits("PHILOX_MULTIPLIER_0", 0xD2511F53), ch.bits("PHILOX_MULTIPLIER_1", 0xCD9E8D57)
PHILOX_WEYL = ch.bits("PHILOX_WEYL_0", 0x9E3779B9), ch.bits("PHILOX_WEYL_1", 0xBB67AE85)
PHILOX_ROUNDS = 10
WARP_LANES, ROWS_LANES = 32, M_TILE_ROWS
"""Lanes of a warp, and of those that have the rows of one column of an M-tile."""


@ch.inline
def philox_word(counter: ch.Expr, position: ch.Expr, seed: ch.Expr) -> ch.Expr:
    """The first output word of Philox4x32-10 (Salmon et al., SC 2011)."""
    c0 = ch.var(ty.u32, counter)
    c1 = ch.var(ty.u32, position)
    c2 = ch.var(ty.u32, 0)
    c3 = ch.var(ty.u32, 0)
    k0 = ch.var(ty.u32, ty.u32(seed))
    k1 = ch.var(ty.u32, ty.u32(seed >> 32))
    with ch.for_(PHILOX_ROUNDS, unroll=True):
        high0 = prim.multiply_high_u32(PHILOX_MULTIPLIERS[0], c0)
        high1 = prim.multiply_high_u32(PHILOX_MULTIPLIERS[1], c2)
        low0 = c0 * PHILOX_MULTIPLIERS[0]
        low1 = c2 * PHILOX_MULTIPLIERS[1]
        c0.set(high1 ^ c1 ^ k0)
        c1.set(low1)
        c2.set(high0 ^ c3 ^ k1)
        c3.set(low0)
        k0 += PHILOX_WEYL[0]
        k1 += PHILOX_WEYL[1]
    return c0


@ch.function
def gumbel(token: ch.Expr, position: ch.Expr, seed: ch.Expr) -> ch.Expr:
    """-log(-log u), u = ((word >> 9) + 0.5) / 2^23: exact in f32, and never 0 or 1."""
    word = philox_word(token, position, seed)
    uniform = (ty.f32(word >> 9) + 0.5) * 2.0**-23
    return -prim.log_f32(-prim.log_f32(uniform))


class Sampler:
    """Keeps each lane's best candidates over the M-tiles of the head, then finds the grid's, for every token.

    An adding warp sees the same columns in every M-tile that it finishes, so its lanes keep one candidate a slot of
    theirs, and lay them down at the end of the head; the rest is the consumer warps'.
    adjustments, filters: what sequences may ask for; a launch in which none does takes none of their way. host: who
    ends sequences inside of a launch.
    """

    def __init__(
        self,
        adding: Adding,
        exchange: Exchange,
        vocab: int,
        timeline: Timeline = NO_TIMELINE,
        adjustments: Adjustments | None = None,
        filters: Filters | None = None,
        host: HostWords | None = None,
    ) -> None:
        self.machine, self.columns, self.adding = adding.machine, adding.columns, adding
        self.exchange, self.vocab, self.timeline = exchange, ch.named("VOCAB", vocab), timeline
        self.adjustments, self.filters, self.host = adjustments, filters, host
        self.token_ids: ch.Expr | None = None
        """Of a head that drafts: which tokens its rows stand for; None: they are all."""
        self.ahead = 1
        """How far behind a column's position the token is that is chosen: 2 of a head that drafts, which has no first
        token, so that a column's position is that of the token before its own."""

    @property
    def places(self) -> int:
        """Candidates of a block in the exchange: one a column, two at least, since two make a unit."""
        return max(self.columns.limit, 2)

    @ch.inline
    def start(self) -> None:
        """In the adder role: no candidate yet."""
        self.best, self.best_token = [], []
        for _ in range(self.adding.slots):
            best = ch.var(ty.f32, -math.inf)
            best_token = ch.var(ty.u32, NO_TOKEN)
            self.best.append(best)
            self.best_token.append(best_token)

    @ch.function
    def consider(self, rows: Rows, logit: ch.Expr) -> None:
        """In the adder role, by lanes that own a row: take an M-tile's logits in. A lane sees ascending ids, so `>`
        keeps the lowest on ties."""
        columns = self.columns
        token = self._token(rows.m_tile * M_TILE_ROWS + rows.row)
        candidate = ch.var(ty.f32, logit)
        if self.adjustments is not None:
            with ch.if_(self.adjustments.asked(MASKED | BIASED | PENALISED) & (token < self.vocab)):
                candidate.set(self.adjustments.adjust(rows.column, token, candidate))
        temperature = prim.bits_float(columns.state(rows.column, TEMPERATURE))
        with ch.if_(temperature > 0.0):
            seed = ty.u64(columns.state(rows.column, SEED_HIGH)) << 32 | ty.u64(columns.state(rows.column, SEED_LOW))
            position = columns.state(rows.column, POSITION) + self.ahead
            scaled = prim.divide_f32(candidate, temperature)
            candidate.set(scaled + gumbel(token, position, seed))
            if self.filters is not None:
                with ch.if_(self.filters.is_asked & (token < self.vocab)):
                    self.filters.keep_weighed(rows, token, scaled, candidate)
        with ch.if_((token < self.vocab) & (candidate > self.best[rows.slot])):
            self.best[rows.slot].set(candidate)
            self.best_token[rows.slot].set(token)

    def _token(self, row: ch.Expr) -> ch.Expr:
        """Which token a row of the head stands for."""
        if self.token_ids is None:
            return row
        return ch.const(ty.u32, prim.load_constant_u32(self.token_ids + row), name="token")

    @ch.inline
    def choose(self, epoch: ch.Expr, step: ch.Expr) -> None:
        """In the consumer role, behind `lay_down` in the adder role: leave the grid's best token of every column in the
        region `chosen`, NO_TOKEN where no logit is a number above -infinity; ends with a barrier of the consumer warps.

        Every block publishes here in every step, even if it has no candidate: with release, and all blocks' words are
        read with acquire. So after it each block sees what every block wrote in this step, its keys and values above
        all.

        Steps take turns with two vectors. A block without an M-tile or a key publishes nothing else, so nobody waits
        for it before publishing the next step's candidate, over one that it may not have read yet; but nobody comes
        two steps ahead of it, for its own candidate of the step between is needed.
        """
        machine = self.machine
        groups = machine.plan.finishing_groups
        first_word = (step % 2 * machine.world.blocks) * (2 * self.places)
        # What the adding warps have laid down, and stored of logits, keys and values.
        self.adding.reductions.wait_for_step(step)
        machine.meet()  # the head's input is used no more: the blocks' candidates may lie over it
        if self.filters is not None:
            self.filters.publish(epoch, step)
        for column in self._columns_of_warp():
            best, best_token = self._best_of("warp_candidates", column, self.columns.limit, groups)
            with ch.if_(machine.lane < 2 * self.places // self.columns.limit):
                # Value and token; with one column, twice.
                told = prim.float_bits(best), best_token
                if self.host is not None:
                    told = self.host.instead_of(column, best, best_token)
                word = ch.select(machine.lane % 2 == 0, *told)
                place = first_word + (machine.number * self.places + column) * 2 + machine.lane
                self.exchange.publish_release("candidates", place, word, epoch)
        hosts = [] if self.host is None else [self.host]
        answers = [host.ask() for host in hosts]
        self.exchange.meet()
        self._gather(first_word // 4, epoch)
        machine.meet()
        for host, answer in zip(hosts, answers, strict=True):
            host.take(answer)  # all columns' candidates are published: it counts from the next step on
        self.timeline.stamp_here("ready")
        chosen = machine.chosen
        for column in self._columns_of_warp():
            _, best_token = self._best_of("candidates", column, self.places, machine.world.blocks)
            with ch.if_(machine.lane == 0):
                chosen[column] = best_token
        machine.meet()
        if self.filters is not None:
            self.filters.choose(epoch, step)
        self._count_chosen()

    def _count_chosen(self) -> None:
        """One warp: a column a lane. Where drafts are verified, it is not known yet which tokens are right."""
        if self.adjustments is not None and not self.machine.plan.drafts:
            with ch.if_(self.adjustments.asked(PENALISED) & (self.machine.warp == 0)), ch.outline("count_chosen"):
                chosen = self.machine.chosen
                with ch.for_(self.machine.lane, self.columns.count, 32, unroll=1, name="column") as column:
                    self.adjustments.count(column, chosen[column])

    def _columns_of_warp(self) -> Iterator[Any]:
        """The columns whose candidates this warp compares."""
        warps, limit = self.machine.plan.consumer_warps, self.columns.limit
        for first in range(0, limit, warps):
            column = self.machine.warp + first
            with ch.if_(first + warps <= limit or column < limit):
                yield column

    @ch.inline
    def lay_down(self) -> None:
        """In the adder role, at the end of the head: each warp's best of its columns, in shared memory: [group,
        column]."""
        with ch.outline("lay_down_candidates"):
            words = self.machine.region("warp_candidates", ty.u32)
            for slot in range(self.adding.slots):
                self._best_of_lanes(self.best[slot], self.best_token[slot], ROWS_LANES)
                lane = self.machine.lane if self.columns.limit == 1 else self.machine.lane % ROWS_LANES
                with ch.if_(lane == 0):
                    place = (self.adding.group * self.columns.limit + self.adding.column_of(slot)) * 2
                    words[place] = prim.float_bits(self.best[slot])
                    words[place + 1] = self.best_token[slot]
            self.adding.end_step()

    @ch.function
    def _gather(self, first_unit: ch.Expr, epoch: ch.Expr) -> None:
        """All blocks' candidates into shared memory, as they lie in the exchange."""
        machine = self.machine
        units = machine.region("candidates", ty.u32x4)
        count = machine.world.blocks * self.places // 2
        with ch.for_(machine.thread, count, machine.consumer_threads, unroll=1) as other:
            units[other] = self.exchange.read4_acquire("candidates", first_unit + other, epoch)

    def _best_of(self, region: str, column: ch.Expr, stride: int, count: int) -> tuple[Any, Any]:
        """The best of a column's `count` candidates in a region, on every lane of the warp."""
        candidates = self.machine.region(region, ty.u32x2) + column
        best: tuple[Any, Any] = self._best_candidate(candidates, ch.argument(stride), ch.argument(count))
        return best

    @ch.function
    def _best_candidate(self, candidates: ch.Expr, stride: ch.Expr, count: ch.Expr) -> tuple[Any, Any]:
        """The best of `count` candidates that lie `stride` apart, on every lane of the warp."""
        best = ch.var(ty.f32, -math.inf)
        best_token = ch.var(ty.u32, NO_TOKEN)
        with ch.for_(self.machine.lane, count, 32, unroll=1) as other:
            candidate = candidates[other * stride]
            self._take(best, best_token, prim.bits_float(candidate.x), candidate.y)
        self._best_of_lanes(best, best_token, WARP_LANES)
        return best, best_token

    def _best_of_lanes(self, best: ch.Expr, best_token: ch.Expr, lanes: int) -> None:
        """The best candidate of so many neighbouring lanes, on all of them."""
        self._best_of_levels(best, best_token, ch.argument(lanes.bit_length() - 1))

    @ch.function
    def _best_of_levels(self, best: Any, best_token: Any, levels: ch.Expr) -> None:
        """The best candidate of 2^levels neighbouring lanes, on all of them; the lowest id on ties."""
        with ch.for_(levels, unroll=1) as level:
            mask = ty.u32(1) << (levels - 1 - level)
            other = prim.shuffle_xor_f32(best, mask)
            other_token = prim.shuffle_xor_u32(best_token, mask)
            self._take(best, best_token, other, other_token)

    @ch.inline
    def _take(self, best: Any, best_token: Any, other: ch.Expr, other_token: ch.Expr) -> None:
        with ch.if_((other > best) | ((other == best) & (other_token < best_token))):
            best.set(other)
            best_token.set(other_token)
