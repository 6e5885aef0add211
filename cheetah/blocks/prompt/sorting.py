"""Tokens of a pass by expert: each is put into the slots that it has with its experts, behind the choice of all.

A token's slot with an expert follows from how many tokens before it chose that expert, so neither blocks nor their
order matter. A warp has a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.experts.choice import LANES
from cheetah.blocks.prompt.choice import Choices
from cheetah.blocks.prompt.expert_tiles import ExpertTiles
from cheetah.blocks.prompt.finish import Scales
from cheetah.blocks.prompt.keys import PassTokens
from cheetah.blocks.prompt.machine import PassMachine
from cheetah.lang import prim, ty
from cheetah.plan.expert_slots import WORD_TOKENS
from cheetah.plan.prompt import GROUP_BYTES, GROUP_TOKENS, UNIT_BYTES

UNITS = GROUP_BYTES // UNIT_BYTES
"""Of a token and 32 columns, 16 bytes each."""
AT_ONCE = 8
"""Of a token's experts, and of its units, for which a lane loads before it goes on."""


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
        """In the consumer role: the list of tiles, then all tokens of this block."""
        machine, warps = self.machine, self.machine.plan.consumer_warps
        self.tiles.make(self.choices.chosen, self.columns)
        first = machine.block * warps + machine.warp
        with ch.for_(first, self.columns, machine.gpu.blocks * warps, unroll=1, name="token") as token:
            place = self.tokens.group(token // GROUP_TOKENS)
            slot = ch.var(ty.u32, 0)  # of the rank that is the lane's number
            with ch.if_(token % GROUP_TOKENS < place.count):
                self._find(token, slot)
                self._copy(token, slot)
            with ch.if_(machine.lane < self._chosen):
                self.slots[token * self._chosen + machine.lane] = slot

    @ch.inline
    def _find(self, token: ch.Expr, slot: Any) -> None:
        """A lane has the slot of a rank, and leaves its factors."""
        lane, chosen, tiles = self.machine.lane, self._chosen, self.tiles
        at = token * chosen + ch.minimum(lane, chosen - 1)
        own = ch.const(ty.u32, ch.minimum(self.choices.experts[at], tiles.limit - 1), name="own")
        with ch.for_(chosen, unroll=min(chosen, AT_ONCE), name="rank") as rank:
            expert = ch.const(ty.u32, prim.shuffle_u32(own, rank), name="expert")
            before = ch.const(ty.u32, self._before(token, expert), name="before")
            slot.set(ch.select(lane == rank, before, slot))
        slot.set(tiles.first_groups[own] * GROUP_TOKENS + slot)
        with ch.if_(lane < chosen):
            factors: Any = ch.var(ty.f32x2)
            factors.x = self.scales.of_token(token)
            factors.y = self.choices.weights[at]
            ch.reinterpret(ty.ptr_mut(ty.f32x2), self.factors)[slot] = factors

    @ch.inline
    def _before(self, token: ch.Expr, expert: ch.Expr) -> ch.Expr:
        """How many tokens before this one chose the expert: without a branch, so that the loads of several experts are
        under way together."""
        room, last = self.tiles.slots.words, token // WORD_TOKENS
        words = self.choices.chosen + expert * room
        of_last = (ty.u32(1) << (token % WORD_TOKENS)) - 1
        count = ch.var(ty.u32, 0)
        for first in range(0, room, LANES):
            place = ch.const(ty.u32, self.machine.lane + first, name="place")
            counted = ch.select(place < last, ty.u32(0xFFFFFFFF), ch.select(place == last, of_last, ty.u32(0)))
            count += prim.population_u32(words[ch.minimum(place, room - 1)] & counted)
        return prim.warp_sum_u32(count)

    @ch.inline
    def _copy(self, token: ch.Expr, slot: ch.Expr) -> None:
        """The token's activations to all its slots; a lane has units of 16 bytes."""
        lane = self.machine.lane
        with ch.for_(self._chosen, unroll=1, name="rank") as rank:
            to = ch.const(ty.u32, prim.shuffle_u32(slot, rank), name="to")
            with ch.for_(lane, self.k_tiles * UNITS, LANES, unroll=AT_ONCE, name="unit") as unit:
                source = self.input + self._place(unit, token, self.machine.plan.groups)
                destination = self.into + self._place(unit, to, self.tiles.plan.groups)
                loaded = ch.reinterpret(ty.ptr(ty.u32x4), source)[0]
                ch.reinterpret(ty.ptr_mut(ty.u32x4), destination)[0] = loaded

    @staticmethod
    def _place(unit: ch.Expr, token: ch.Expr, groups: int) -> ch.Expr:
        """The byte of a unit of a token, or of a slot, in a buffer of so many groups (u64)."""
        group = ty.u64(unit // UNITS * groups + token // GROUP_TOKENS)
        return group * GROUP_BYTES + ty.u64(unit % UNITS * UNIT_BYTES + token % GROUP_TOKENS * 16)
