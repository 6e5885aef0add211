"""Tokens of a pass by expert: each is put into the slots that it has with its experts, behind the choice of all.

A warp has a group of 8 slots. Which tokens are in it follows from how many tokens before them chose the expert, so
neither blocks nor their order matter. A group is 512 bytes side by side for every 32 columns, a lane a unit of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.experts.choice import LANES, of_lanes_before
from cheetah.blocks.prompt.choice import Choices
from cheetah.blocks.prompt.expert_tiles import ExpertTiles
from cheetah.blocks.prompt.finish import Scales
from cheetah.blocks.prompt.keys import PassTokens
from cheetah.blocks.prompt.machine import GROUP_BYTES, UNIT_BYTES, PassMachine
from cheetah.lang import prim, ty
from cheetah.plan.expert_slots import WORD_TOKENS
from cheetah.plan.index import ceil_div
from cheetah.plan.prompt import GROUP_TOKENS

AT_ONCE = 10
"""K-tiles of a slot, at most, of which a lane loads its unit before it stores one: no load passes a store that the
compiler cannot tell from it."""


@dataclass(frozen=True, eq=False)
class PassSort:
    """columns: of the launch (u32). input: of all tokens (u8), in token order, of k_tiles K-tiles; it goes to `into`,
    in the order of slots. slots: u32 [token][rank]; of columns that are no tokens, which nobody asks for, some.
    factors: f32x2 [slot], the scale of the token and the weight of the expert."""

    machine: PassMachine
    tokens: PassTokens
    columns: ch.Expr
    choices: Choices
    tiles: ExpertTiles
    scales: Scales
    input: ch.Expr
    into: ch.Expr
    slots: ch.Expr
    factors: ch.Expr
    k_tiles: int

    @property
    def _chosen(self) -> int:
        return self.tiles.slots.experts.chosen

    @ch.function
    def sort(self) -> None:
        """In the consumer role: the list of tiles, then all groups of slots of this block."""
        machine, warps = self.machine, self.machine.plan.consumer_warps
        self.tiles.make(self.choices.chosen, self.columns)
        self._number_others()
        first = machine.block * warps + machine.warp
        with ch.for_(first, self.tiles.group_count, machine.gpu.blocks * warps, unroll=1, name="group") as group:
            expert = ch.const(ty.u32, self.tiles.expert_of(group), name="expert")
            token, is_token = ch.var(ty.u32, 0), ch.var(ty.boolean, False)
            self._find(expert, group - self.tiles.first_groups[expert], token, is_token)
            with ch.if_(is_token):
                self._number(expert, group, token)
                self._copy(group, token)

    @ch.inline
    def _number_others(self) -> None:
        """Slots of columns that are no tokens: who adds a tile's rows reads those of all its columns."""
        machine, threads = self.machine, self.machine.consumer_threads
        first = machine.block * threads + machine.thread
        with ch.for_(first, self.columns, machine.gpu.blocks * threads, unroll=1, name="column") as column:
            with ch.if_(column % GROUP_TOKENS >= self.tokens.group(column // GROUP_TOKENS).count):
                with ch.for_(self._chosen, unroll=1, name="rank") as rank:
                    self.slots[column * self._chosen + rank] = 0

    @ch.inline
    def _find(self, expert: ch.Expr, number: Any, token: Any, is_token: Any) -> None:
        """The token in slot `lane % 8` of an expert's group `number`, if there is one: of the expert's tokens, which
        are bits of its words, the one with as many before it."""
        machine, room = self.machine, self.tiles.slots.words
        lane, each = machine.lane, ceil_div(room, LANES)
        first = ch.const(ty.u32, number * GROUP_TOKENS, name="first")
        there = ch.const(ty.u32, self.tiles.slots.words_of(self.columns), name="there")
        words, count = ch.array(ty.u32, each), ch.var(ty.u32, 0)
        for own in range(each):
            place = lane * each + own
            loaded = self.choices.chosen[expert * room + ch.minimum(place, there - 1)]
            words[own] = ch.select(place < there, loaded, ty.u32(0))
            count += prim.population_u32(words[own])
        before = ch.var(ty.u32, of_lanes_before(lane, count))
        total = ch.const(ty.u32, prim.warp_sum_u32(count), name="total")
        found = machine.region("chosen", ty.u32) + machine.warp * GROUP_TOKENS
        with ch.if_((before < first + GROUP_TOKENS) & (before + count > first)):
            with ch.for_(each, unroll=True, name="own") as own:
                left = ch.var(ty.u32, words[own])
                with ch.for_(prim.population_u32(words[own]), unroll=1, name="bit"):
                    lowest = ch.const(ty.u32, prim.population_u32((left & (~left + 1)) - 1), name="lowest")
                    with ch.if_(before - first < GROUP_TOKENS):  # also above 0, as whole numbers are
                        found[before - first] = (lane * each + own) * WORD_TOKENS + lowest
                    left &= left - 1
                    before += 1
        prim.warp_barrier()  # all of the group's tokens are found
        is_token.set(first + lane % GROUP_TOKENS < total)
        with ch.if_(is_token):
            token.set(found[lane % GROUP_TOKENS])
        prim.warp_barrier()  # and read, before those of the next group are

    @ch.inline
    def _number(self, expert: ch.Expr, group: ch.Expr, token: ch.Expr) -> None:
        """The slot that the lane's token has with the expert, and its factors, by the lane that has the rank."""
        lane, chosen = self.machine.lane, self._chosen
        slot = ch.const(ty.u32, group * GROUP_TOKENS + lane % GROUP_TOKENS, name="slot")
        with ch.for_(lane // GROUP_TOKENS, chosen, LANES // GROUP_TOKENS, unroll=1, name="rank") as rank:
            at = ch.const(ty.u32, token * chosen + rank, name="at")
            with ch.if_(self.choices.experts[at] == expert):
                self.slots[at] = slot
                factors: Any = ch.var(ty.f32x2)
                factors.x = self.scales.of_token(token)
                factors.y = self.choices.weights[at]
                ch.reinterpret(ty.ptr_mut(ty.f32x2), self.factors)[slot] = factors

    @ch.inline
    def _copy(self, group: ch.Expr, token: ch.Expr) -> None:
        """The token's activations to its slot; four lanes have it, a unit of every K-tile each."""
        lane, size = self.machine.lane, max(size for size in range(1, AT_ONCE + 1) if self.k_tiles % size == 0)
        source = self.input + self._place(token // GROUP_TOKENS, token % GROUP_TOKENS)
        into = self.into + self._place(group, lane % GROUP_TOKENS)
        data = ch.array(ty.u32x4, size)
        with ch.for_(0, self.k_tiles, size, unroll=1, name="k_tile") as k_tile:
            for index in range(size):
                tile = ty.u64(k_tile + index) * (self.machine.plan.groups * GROUP_BYTES)
                data[index] = ch.reinterpret(ty.ptr(ty.u32x4), source + tile)[0]
            for index in range(size):
                tile = ty.u64(k_tile + index) * (self.tiles.plan.groups * GROUP_BYTES)
                ch.reinterpret(ty.ptr_mut(ty.u32x4), into + tile)[0] = data[index]

    def _place(self, group: ch.Expr, in_group: ch.Expr) -> ch.Expr:
        """The byte of the lane's unit, in the first K-tile, of a token or slot of a group (u64)."""
        unit = self.machine.lane // GROUP_TOKENS
        return ty.u64(group) * GROUP_BYTES + ty.u64(unit * UNIT_BYTES + in_group * 16)
