"""What a finished tile gives the next product, brought to the other GPUs' memories by two warps of their own.

The warpgroups that multiply store a tile to this GPU's memory alone, a word or two a lane: the 16 bytes of a token and
unit are four M-tiles' or two's, so of several warps. Stored so to another GPU, most of what a line takes on the link is
empty, and who multiplies waits for the link. The tile's columns lie side by side in token order: two warps behind a
meeting of the block load them from there, 16 bytes a lane, and store them as whole lines, while the next tile is
multiplied.

They meet the consumer warps whenever some groups of a tile that they push are finished, and at the end of every phase:
who tells others that a block has ended a phase comes behind both. Where a phase has one tile a block all blocks push at
once and the link takes longest: so the first groups of tokens are on their way while the others are finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cheetah import lang as ch
from cheetah.blocks.prompt.machine import GROUP_BYTES, PassMachine
from cheetah.lang import prim, ty
from cheetah.plan.index import ceil_div

LOADED_AT_ONCE = 4
"""16 bytes each: a lane that copies keeps 40 registers."""
UNIT = 16


@dataclass(frozen=True, eq=False)
class Pushed:
    """Of a product what is pushed. into: where its columns lie in token order (u8), on this GPU first; m_tiles: of a
    rank; of_k_tile: M-tiles whose columns fill a K-tile, which divide those of a tile and of a rank; groups: of tokens
    that are finished, and pushed, together."""

    into: Sequence[ch.Expr]
    m_tiles: int
    of_k_tile: int
    groups: int


class Pushes:
    """The role that pushes. token_tiles: of this launch (u32), the same in all roles."""

    def __init__(self, machine: PassMachine, token_tiles: ch.Expr) -> None:
        self.machine, self.token_tiles = machine, token_tiles

    def push(self, pushed: Pushed) -> None:
        """All tiles of a product, each when its block has stored it."""
        machine, plan = self.machine, self.machine.plan
        row_tiles = ceil_div(pushed.m_tiles, plan.tile_m_tiles)
        with machine.tiles(row_tiles, self.token_tiles) as tile:
            first = ch.const(ty.u32, tile // self.token_tiles * plan.tile_m_tiles, name="first_m_tile")
            count = ch.minimum(ty.u32(pushed.m_tiles) - first, plan.tile_m_tiles) // pushed.of_k_tile
            k_tile = machine.of_all(first, pushed.m_tiles) // pushed.of_k_tile
            first_group = tile % self.token_tiles * plan.tile_groups
            own, *others = pushed.into
            with ch.for_(0, plan.tile_groups, pushed.groups, unroll=1, name="group") as group:
                machine.hand_on()
                with ch.for_(count, unroll=1, name="pushed") as index:
                    begin = ty.u64((k_tile + index) * plan.groups + (first_group + group)) * GROUP_BYTES
                    begin = ch.const(ty.u64, begin + ty.u64(machine.pushing_thread * UNIT), name="begin")
                    self._copy(own + begin, [other + begin for other in others], pushed.groups)

    @ch.inline
    def _copy(self, source: ch.Expr, places: Sequence[ch.Expr], groups: int) -> None:
        """This thread's part of a K-tile of some groups of tokens."""
        step = self.machine.pushing_threads * UNIT
        total = groups * GROUP_BYTES // step
        at_once = next(count for count in range(LOADED_AT_ONCE, 0, -1) if total % count == 0)
        with ch.for_(0, total * step, at_once * step, unroll=1, name="offset") as offset:
            units = ch.array(ty.u32x4, at_once)
            for index in range(at_once):
                units[index] = ch.reinterpret(ty.ptr(ty.u32x4), source + (offset + index * step))[0]
            for place in places:
                for index in range(at_once):
                    unit = ch.reinterpret(ty.ptr_mut(ty.u32x4), place + (offset + index * step))
                    prim.store_to_peer_u32x4(unit, units[index])
