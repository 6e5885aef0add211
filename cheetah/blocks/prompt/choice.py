"""Which experts each token of a pass is given to, with which weights: as a step chooses (`cheetah.blocks.experts`).

A warp has a token, a block the tokens of a word; so a word, which has a bit for each of its tokens that chose an
expert, is made by one block. Columns that are no tokens choose nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.experts.choice import LANES, WORDS, WarpChoice, has
from cheetah.blocks.prompt.keys import PassTokens
from cheetah.blocks.prompt.machine import PassMachine
from cheetah.lang import prim, ty
from cheetah.plan.expert_slots import WORD_TOKENS, ExpertSlots
from cheetah.plan.products import logit_words
from cheetah.plan.prompt import GROUP_TOKENS


@dataclass(frozen=True, eq=False)
class Choices:
    """What tokens chose. chosen: u32 [expert][word], a bit for each token; experts (u32), weights (f32) [token][rank],
    a token's experts ascending."""

    chosen: ch.Expr
    experts: ch.Expr
    weights: ch.Expr


@dataclass(frozen=True, eq=False)
class PassChoice:
    """logits: f32 [token][expert], with those that fill the router's last M-tile. columns: of the launch (u32)."""

    machine: PassMachine
    room: ExpertSlots
    tokens: PassTokens
    columns: ch.Expr
    logits: ch.Expr
    choices: Choices
    of_warp: WarpChoice

    @ch.function
    def choose(self) -> None:
        """In the consumer role: for all tokens of this block's words."""
        machine, plan = self.machine, self.machine.plan
        words = self.room.words_of(self.columns)
        with ch.for_(machine.block, words, machine.gpu.blocks, unroll=1, name="word") as word:
            with ch.for_(machine.warp, WORD_TOKENS, plan.consumer_warps, unroll=1, name="in_word") as in_word:
                self._choose(word * WORD_TOKENS + in_word, in_word)
            machine.meet()  # all of the word's tokens have chosen
            self._store_word(word)
            machine.meet()  # everybody has read before the next word's tokens choose

    @property
    def _masks(self) -> ch.Expr:
        """Of a word, u32 [token][lane]: a bit for each of the lane's experts."""
        return self.machine.region("chosen", ty.u32)

    @ch.inline
    def _choose(self, token: Any, in_word: ch.Expr) -> None:
        """A warp's token: its experts and their weights."""
        of_warp, lane = self.of_warp, self.machine.lane
        token = ch.const(ty.u32, token, name="token")
        first = ch.const(ty.u32, lane * of_warp.of_lane, name="first")
        chosen = ch.var(ty.u32, 0)  # a bit for each of the lane's experts
        with ch.if_(token < self.columns):
            place = self.tokens.group(token // GROUP_TOKENS)
            with ch.if_(token % GROUP_TOKENS < place.count):
                weights, keys = ch.array(ty.f32, of_warp.of_lane), ch.array(ty.u32, of_warp.of_lane)
                highest, total = ch.var(ty.f32, 0.0), ch.var(ty.f32, 1.0)
                self._load(token, first, weights, keys)
                before = of_warp.pick(keys, chosen, highest)
                of_warp.weigh(first, chosen, highest, weights, total)
                self._number(token, first, chosen, before, weights, total)
        self._masks[in_word * LANES + lane] = chosen

    @ch.inline
    def _load(self, token: ch.Expr, first: ch.Expr, logits: Any, keys: Any) -> None:
        """The lane's logits, and keys that are as large as they are."""
        padded = logit_words(self.room.experts)
        rows = ch.reinterpret(ty.ptr(ty.u32), self.logits)
        for unit in range(self.of_warp.of_lane // WORDS):
            place = token * padded + ch.minimum(first + unit * WORDS, padded - WORDS)
            data = ch.const(ty.u32x4, ch.reinterpret(ty.ptr(ty.u32x4), rows + place)[0], name="data")
            for number, word in enumerate("xyzw"):
                self.of_warp.take(unit * WORDS + number, first, getattr(data, word), logits, keys)

    @ch.inline
    def _number(
        self, token: ch.Expr, first: ch.Expr, chosen: ch.Expr, before: ch.Expr, weights: Any, total: ch.Expr
    ) -> None:
        """The token's experts by rank, and what they weigh."""
        of_warp = self.of_warp
        rank = ch.var(ty.u32, token * self.room.experts.chosen + before)
        with ch.for_(of_warp.of_lane, unroll=True, name="own") as own, ch.if_(has(chosen, own)):
            self.choices.experts[rank] = first + own
            self.choices.weights[rank] = prim.divide_f32(weights[own], total)
            rank += 1

    @ch.inline
    def _store_word(self, word: ch.Expr) -> None:
        """A thread an expert: which tokens of the word chose it."""
        machine, each, count = self.machine, self.of_warp.of_lane, self.room.experts.count
        threads = machine.consumer_threads
        with ch.for_(machine.thread, count, threads, unroll=1, name="expert") as expert:
            chose = ch.var(ty.u32, 0)
            with ch.for_(WORD_TOKENS, unroll=8, name="in_word") as in_word:
                mask = ch.const(ty.u32, self._masks[in_word * LANES + expert // each], name="mask")
                chose |= ((mask >> (expert % each)) & 1) << in_word
            self.choices.chosen[expert * self.room.words + word] = chose
