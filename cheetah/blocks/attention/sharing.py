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

NEVER = 1 << 27
"""A tile number that no range of keys has."""


@dataclass(frozen=True, eq=False)
class Share:
    """How the warps share an item: this one has column tiles [column_group * width, (column_group + 1) * width), of
    `column_groups` groups, and of the `key_groups` its keys are those of number `key_group`. is_few: the item has one
    column tile."""

    width: int
    column_groups: Any
    key_groups: Any
    column_group: Any
    key_group: Any
    is_few: bool = False


class Sharing:
    """Deals items out to the warps of a block."""

    def __init__(self, machine: Machine, sizes: AttentionShape) -> None:
        self.machine, self.sizes = machine, sizes

    @property
    def most_key_groups(self) -> int:
        """So few that the next tile of a warp lies in a stage whose last pass has surely landed (see `ring`)."""
        plan = self.machine.plan
        return max(1, (plan.stages - plan.in_flight) * (self.sizes.stage_tokens // TILE_KEYS))

    @ch.inline
    def share_few(self) -> Share:
        """Deal an item of one column tile out to the warps."""
        machine, sizes = self.machine, self.sizes
        groups = min(sizes.warps, self.most_key_groups)
        key_group = machine.warp
        if groups < sizes.warps:
            key_group = ch.select(machine.warp < groups, machine.warp, ty.u32(NEVER))
        return Share(1, ty.u32(1), ty.u32(groups), ty.u32(0), key_group, is_few=True)

    @ch.inline
    def share(self, item: Item, width: int) -> Share:
        """Deal the item out to the warps. A warp beyond the last key group has no tile of keys."""
        machine, sizes = self.machine, self.sizes
        column_groups = ch.var(ty.u32, 1)
        for fewer, groups in pairwise(sizes.column_groups(width)):
            with ch.if_(item.rows > fewer * width * COLUMNS):
                column_groups.set(groups)
        key_groups = ch.minimum(sizes.warps // column_groups, self.most_key_groups)
        warp_group = machine.warp // column_groups
        column_group = machine.warp % column_groups
        key_group = ch.select(warp_group < key_groups, warp_group, ty.u32(NEVER))
        return Share(width, column_groups, key_groups, column_group, key_group)

    @ch.function
    def arrivals(self, share: Share, first_tile: ch.Expr, last_tile: ch.Expr) -> Any:
        """For how many warps this one gives back a stage with these tiles: those with a tile in it share out all."""
        warps = self.sizes.warps
        # None where the stage holds no tile, being that of the newest keys, which nobody gives back.
        tiles = ch.maximum(last_tile, first_tile + 1) - first_tile
        groups = ch.minimum(tiles, share.key_groups)
        members = groups * share.column_groups
        # The stage's first tile belongs to key group first_tile % key_groups, the next one to the next.
        index = (share.key_group + share.key_groups - first_tile % share.key_groups) % share.key_groups
        rank = index * share.column_groups + share.column_group
        each = self._quotient(warps, members)
        return each + ch.select(rank < warps - each * members, ty.u32(1), ty.u32(0))

    @staticmethod
    def _quotient(number: int, divisor: ch.Expr) -> Any:
        """number // divisor, which is from 1 to number: from a table, as division is a hundred cycles that a tile of
        keys waits for."""
        if number > 8:
            return number // divisor
        table = sum(number // value << 4 * (value - 1) for value in range(1, number + 1))
        return (ty.u32(table) >> ((divisor - 1) * 4)) & 15
