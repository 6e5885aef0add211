"""The tiles of a pass' products of experts: a list that every block makes for itself, of what all tokens chose.

A tile is up to as many groups of slots of one expert as a tile of tokens has (`cheetah.plan.expert_slots`). The list
has the expert of every tile, expert after expert. It lies in shared memory, as those of steps do
(`cheetah.blocks.made_list`); followers are the two roles that copy, which run ahead of the warpgroups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.experts.choice import LANES, of_lanes_before
from cheetah.blocks.made_list import MadeList
from cheetah.blocks.prompt.machine import PassMachine
from cheetah.lang import prim, ty
from cheetah.plan.expert_slots import LOADED_WORDS, ExpertSlots
from cheetah.plan.index import ceil_div
from cheetah.plan.products import EXPERT_LIST
from cheetah.plan.prompt import GROUP_TOKENS, PassPlan


@dataclass(frozen=True, eq=False)
class SlotTile:
    """A tile of an expert's slots: the expert, its first group, and how many groups it has."""

    expert: Any
    first_group: Any
    groups: Any


class ExpertTiles(MadeList):
    """The list of a layer's tiles."""

    def __init__(self, machine: PassMachine, room: ExpertSlots) -> None:
        super().__init__(machine, EXPERT_LIST, room.tiles, room.experts.count)
        self.slots = room
        self.declare()

    @property
    def followers(self) -> int:
        """The warps that bring weights, and the lane that brings activations."""
        return 1 + int(self.machine.plan.weights_warps)

    def is_lane(self, role: ch.Role) -> bool:
        """Activations are brought by a single lane."""
        return role is self.machine.activations

    @property
    def plan(self) -> PassPlan:
        """Of slots in the place of tokens."""
        return self.slots.of_slots

    def tile(self, index: ch.Expr) -> SlotTile:
        """The tile that is entry `index` of the list."""
        expert = ch.const(ty.u32, self.entry(index), name="expert")
        before = ch.const(ty.u32, (index - self._first_tiles[expert]) * self.plan.tile_groups, name="before")
        first = ch.const(ty.u32, ch.minimum(self.first_groups[expert] + before, self.slots.groups), name="first_group")
        groups = ch.const(ty.u32, ch.minimum(self._groups[expert] - before, self.plan.tile_groups), name="groups")
        return SlotTile(expert, first, groups)

    @property
    def group_count(self) -> ch.Expr:
        """Groups of all experts' slots, at most as many as there is room for."""
        count = self.first_groups[self.limit - 1] + self._groups[self.limit - 1]
        bounded: ch.Expr = ch.minimum(count, self.slots.groups)
        return bounded

    @ch.inline
    def expert_of(self, group: ch.Expr) -> ch.Expr:
        """Whose slots a group is of; by a whole warp."""
        lane, each = self.machine.lane, ceil_div(self.limit, LANES)
        found = ch.var(ty.u32, 0)
        with ch.for_(each, unroll=True, name="own") as own:
            expert = ch.const(ty.u32, ch.minimum(lane * each + own, self.limit - 1), name="expert")
            with ch.if_(group - self.first_groups[expert] < self._groups[expert]):  # also not before them
                found.set(expert)
        return prim.warp_maximum_u32(found)

    # -- making it --------------------------------------------------------------------------------------------------

    @property
    def _groups(self) -> Any:
        """Of each expert's slots (u32 [expert])."""
        return self.machine.region("expert_places", ty.u32)

    @property
    def first_groups(self) -> Any:
        """The first group of each expert's slots (u32 [expert])."""
        return self._groups + self.limit

    @property
    def _first_tiles(self) -> Any:
        """The first of each expert's tiles (u32 [expert])."""
        return self._groups + 2 * self.limit

    @ch.function
    def make(self, chosen: ch.Expr, columns: ch.Expr) -> None:
        """In the consumer role: of the words of all experts (see `Choices`)."""
        machine = self.machine
        self.begin_making()
        words = ch.const(ty.u32, self.slots.words_of(columns), name="words")
        with ch.for_(machine.thread, self.limit, machine.consumer_threads, unroll=1, name="expert") as expert:
            of_expert = ch.reinterpret(ty.ptr(ty.u32x4), chosen + expert * self.slots.words)
            count = ch.var(ty.u32, 0)
            with ch.for_(words // LOADED_WORDS, unroll=4, name="index") as index:
                word = ch.const(ty.u32x4, of_expert[index], name="word")
                for member in "xyzw":
                    count += prim.population_u32(getattr(word, member))
            self._groups[expert] = (count + (GROUP_TOKENS - 1)) // GROUP_TOKENS
        machine.meet()  # every expert's tokens are counted
        with ch.if_(machine.warp == 0):
            self._deal()
        self.finish_making()

    def _tiles_of(self, expert: ch.Expr) -> Any:
        return (self._groups[expert] + (self.plan.tile_groups - 1)) // self.plan.tile_groups

    @ch.inline
    def _deal(self) -> None:
        """One warp: where each expert's slots and tiles begin, and the list; a lane has neighbouring experts."""
        lane, each = self.machine.lane, ceil_div(self.limit, LANES)
        begin = ch.const(ty.u32, ch.minimum(lane * each, self.limit), name="begin")
        end = ch.const(ty.u32, ch.minimum(begin + each, self.limit), name="end")
        groups, tiles = ch.var(ty.u32, 0), ch.var(ty.u32, 0)
        with ch.for_(begin, end, unroll=1, name="expert") as expert:
            groups += self._groups[expert]
            tiles += self._tiles_of(expert)
        groups_before = of_lanes_before(lane, groups)
        group = ch.var(ty.u32, groups_before)
        tiles_before = of_lanes_before(lane, tiles)
        tile = ch.var(ty.u32, tiles_before)
        with ch.for_(begin, end, unroll=1, name="expert") as expert:
            self.first_groups[expert] = group
            self._first_tiles[expert] = tile
            group += self._groups[expert]
            last = ch.const(ty.u32, tile + self._tiles_of(expert), name="last")
            with ch.for_(tile, last, unroll=1, name="index") as index:
                self.words[index + 1] = expert
            tile.set(last)
        with ch.if_(lane == LANES - 1):
            self.words[0] = tile
