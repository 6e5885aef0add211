"""How the consumer warps share out an item: column tiles of 8 packed rows, and tiles of 16 keys in turn."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.schedule import Item
from cheetah.blocks.attention.tile import AttentionShape
from cheetah.blocks.machine import Machine
from cheetah.lang import ty
from cheetah.plan.formats import KV_TILE_TOKENS as TILE_KEYS
from cheetah.plan.plan import COLUMNS

NEVER = ch.bits("NEVER", 1 << 27)
"""A tile number that no range of keys has."""


@dataclass(frozen=True, eq=False)
class Share:
    """How the warps share an item: this one has column tiles [column_group * width, (column_group + 1) * width), of
    `column_groups` groups, and each `key_groups`-th tile of keys from number `first_tile` of the item on. is_few: the
    item has one column tile."""

    width: int
    column_groups: Any
    key_groups: Any
    column_group: Any
    first_tile: Any
    is_few: bool = False

    @property
    def name(self) -> str:
        """What the text tells functions of it by."""
        return "few" if self.is_few else "many"


class Sharing:
    """Deals items out to the warps of a block."""

    def __init__(self, machine: Machine, sizes: AttentionShape) -> None:
        self.machine, self.sizes = machine, sizes

    @property
    def shares_stages(self) -> bool:
        """Whether a warp waits only for stages in which it has a tile, and arrives for others: where its next one lies
        in a stage whose last pass has surely landed (see `ring`). Else every warp waits for every stage."""
        plan = self.machine.plan
        return (plan.stages - plan.in_flight) * (self.sizes.stage_tokens // TILE_KEYS) >= self.sizes.warps

    @ch.inline
    def share_few(self, item: Item) -> Share:
        """Deal an item of one column tile out to the warps."""
        groups = ty.u32(self.sizes.warps)
        return Share(1, ty.u32(1), groups, ty.u32(0), self._first_tile(item, self.machine.warp, groups), is_few=True)

    @ch.inline
    def share(self, item: Item, width: int) -> Share:
        """Deal the item out to the warps. A warp beyond the last key group has no tile of keys."""
        machine, sizes = self.machine, self.sizes
        column_groups = ch.var(ty.u32, 1)
        for fewer, groups in pairwise(sizes.column_groups(width)):
            with ch.if_(item.rows > fewer * width * COLUMNS):
                column_groups.set(groups)
        key_groups = sizes.warps // column_groups
        warp_group = machine.warp // column_groups
        column_group = machine.warp % column_groups
        first_tile = self._first_tile(item, warp_group, key_groups)
        if any(sizes.warps % groups for groups in sizes.column_groups(width)):
            first_tile = ch.select(warp_group < key_groups, first_tile, ty.u32(NEVER))
        return Share(width, column_groups, key_groups, column_group, first_tile)

    @staticmethod
    def _first_tile(item: Item, key_group: ch.Expr, key_groups: ch.Expr) -> Any:
        """The first tile of an item that is a key group's. Tiles are dealt out by where they lie in the sequence, so
        that a window that begins earlier changes no other tile's warp."""
        return (key_group + key_groups - item.begin // TILE_KEYS % key_groups) % key_groups

    @ch.function
    def arrivals(self, share: Share, first_tile: ch.Expr, last_tile: ch.Expr) -> ch.Expr:
        """For how many warps this one gives back a stage with these tiles: those with a tile in it share out all. Where
        stages are not shared out, for itself."""
        if not self.shares_stages:
            return ty.u32(1)
        warps = self.sizes.warps
        # None where the stage holds no tile, being that of the newest keys, which nobody gives back.
        tiles = ch.maximum(last_tile, first_tile + 1) - first_tile
        groups = ch.minimum(tiles, share.key_groups)
        members = groups * share.column_groups
        # The stage's first tile is that of the group whose first one is first_tile % key_groups, the next of the next.
        index = (share.first_tile + share.key_groups - first_tile % share.key_groups) % share.key_groups
        rank = index * share.column_groups + share.column_group
        each = self._quotient(warps, members)
        return each + ch.select(rank < warps - each * members, ty.u32(1), ty.u32(0))

    @staticmethod
    def _quotient(number: int, divisor: ch.Expr) -> ch.Expr:
        """number // divisor, which is from 1 to number: from a table, as division is a hundred cycles that a tile of
        keys waits for."""
        if number > 8:
            return number // divisor
        table = sum(number // value << 4 * (value - 1) for value in range(1, number + 1))
        return (ty.u32(ch.bits(f"QUOTIENTS_OF_{number}", table)) >> ((divisor - 1) * 4)) & 15
