"""The end of a step: every block's best candidate, the grid's choice, and the rendezvous of all blocks.

Greedy takes the highest logit, the lowest id on ties. With a temperature, Gumbel noise is added to logit / temperature:
the highest sum is a sample from the softmax (Gumbel-max). The noise of a token id at a position is a pure function of
the seed (Philox4x32-10, counter (id, position, 0, 0)), so draws depend neither on the block nor on the launch.
"""

from __future__ import annotations

import math
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.machine import Machine
from cheetah.blocks.matvec import Rows
from cheetah.blocks.timeline import NO_TIMELINE, Timeline
from cheetah.lang import prim, ty
from cheetah.plan import STRIP_ROWS

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
NOBODY = 0xFFFFFFFF


@ch.inline
def philox_word(counter: ch.Expr, position: ch.Expr, seed: ch.Expr) -> Any:
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


@ch.inline
def gumbel(token: ch.Expr, position: ch.Expr, seed: ch.Expr) -> Any:
    """-log(-log u), u = ((word >> 9) + 0.5) / 2^23: exact in f32, and never 0 or 1."""
    word = philox_word(token, position, seed)
    uniform = (ty.f32(word >> 9) + 0.5) * 2.0**-23
    noise = -prim.log_f32(-prim.log_f32(uniform))
    return noise


class Sampler:
    """Keeps each lane's best candidate over the strips of the head, then finds the grid's."""

    def __init__(self, machine: Machine, exchange: Exchange, vocab: int, timeline: Timeline = NO_TIMELINE) -> None:
        self.machine, self.exchange, self.vocab, self.timeline = machine, exchange, vocab, timeline

    @ch.inline
    def start(self) -> None:
        """No candidate yet."""
        best = ch.var(ty.f32, -math.inf)
        best_token = ch.var(ty.u32, NOBODY)
        self.best, self.best_token = best, best_token

    @ch.inline
    def consider(self, rows: Rows, logit: ch.Expr, temperature: ch.Expr, seed: ch.Expr, position: ch.Expr) -> None:
        """Take a strip's logits in: one row a lane. A lane sees ascending ids, so `>` keeps the lowest on ties."""
        token = rows.strip * STRIP_ROWS + rows.row
        candidate = ch.var(ty.f32, logit)
        with ch.if_(temperature > 0.0):
            candidate.set(prim.divide_f32(logit, temperature) + gumbel(token, position, seed))
        with ch.if_((token < self.vocab) & (candidate > self.best)):
            self.best.set(candidate)
            self.best_token.set(token)

    @ch.inline
    def choose(self, epoch: ch.Expr, step: ch.Expr) -> None:
        """Leave the grid's best token in the first word of the region `candidates`, for thread 0 to read.

        Every block publishes here in every step, even if it has no candidate: with release, and all blocks' words are
        read with acquire. So after it each block sees what every block wrote in this step, its keys and values above
        all.

        Steps take turns with two vectors. A block without a strip or a key publishes nothing else, so nobody waits
        for it before publishing the next step's candidate, over one that it may not have read yet; but nobody comes
        two steps ahead of it, for its own candidate of the step between is needed.
        """
        machine = self.machine
        candidates = machine.region("candidates", ty.u32x2)
        first_unit = step % 2 * machine.gpu.blocks
        self._best_of_warp(self.best, self.best_token)
        words = ch.reinterpret(ty.ptr_mut(ty.u32), candidates)
        with ch.if_(machine.lane == 0):
            words[machine.warp * 2] = prim.float_bits(self.best)
            words[machine.warp * 2 + 1] = self.best_token
        machine.meet()
        with ch.if_(machine.warp == 0):
            self._read_candidates(machine.plan.math_warps)
            with ch.if_(machine.lane < 4):
                # Four words make a unit: value, token, and two that nobody reads.
                word = ch.select(machine.lane == 0, prim.float_bits(self.best), self.best_token)
                self.exchange.publish_release(
                    "candidates", (first_unit + machine.block) * 4 + machine.lane, word, epoch
                )
        self.exchange.meet()
        self._gather(words, first_unit, epoch)
        machine.meet()
        self.timeline.stamp_here("ready")
        with ch.if_(machine.warp == 0):
            self._read_candidates(machine.gpu.blocks)
            with ch.if_(machine.lane == 0):
                words[0] = self.best_token

    @ch.inline
    def _gather(self, words: ch.Expr, first_unit: ch.Expr, epoch: ch.Expr) -> None:
        machine = self.machine
        if machine.plan.sync == "flags":
            machine.meet()  # warp 0 has read the warps' candidates before they are overwritten
        with ch.for_(machine.thread, machine.gpu.blocks, machine.math_threads, unroll=1) as other:
            unit = self.exchange.read4_acquire("candidates", first_unit + other, epoch)
            words[other * 2] = unit.x
            words[other * 2 + 1] = unit.y

    @ch.inline
    def _read_candidates(self, count: int) -> None:
        """Warp 0: the best of `count` candidates in shared memory, on every lane."""
        machine = self.machine
        candidates = machine.region("candidates", ty.u32x2)
        self.best.set(-math.inf)
        self.best_token.set(NOBODY)
        with ch.for_(machine.lane, count, 32, unroll=1) as other:
            candidate = candidates[other]
            self._take(prim.bits_float(candidate.x), candidate.y)
        self._best_of_warp(self.best, self.best_token)

    @ch.inline
    def _best_of_warp(self, best: Any, best_token: Any) -> None:
        with ch.for_(5, unroll=1) as level:
            mask = ty.u32(16) >> level
            other = prim.shuffle_xor_f32(best, mask)
            other_token = prim.shuffle_xor_u32(best_token, mask)
            self._take(other, other_token)

    @ch.inline
    def _take(self, other: ch.Expr, other_token: ch.Expr) -> None:
        with ch.if_((other > self.best) | ((other == self.best) & (other_token < self.best_token))):
            self.best.set(other)
            self.best_token.set(other_token)
