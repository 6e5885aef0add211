"""bf16 weights of which some of every four blocks of 16 x 32 are there: each meets the part of the vector it names.

A K-tile is packed by `cheetah.models.formats.blocks`. Its blocks are multiplied in the order of columns, so sums are
those of the dense matrix where a warp has the same columns.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.formats.bf16 import LANE_LOADS
from cheetah.blocks.linear.fragments import Activations, Fragments
from cheetah.lang import prim, ty
from cheetah.plan.formats import BlockTiles


class BlockFragments(Fragments):
    """Tiles of 16 x 128."""

    format: BlockTiles

    @ch.inline
    def declare(self) -> None:
        tiles = self.stage.address
        have_read = ch.var(ty.u32, 0)
        self.tiles, self.have_read = tiles, have_read

    def finish_chunk(self) -> None:
        self.stage.has_read(self.have_read)

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        first = self.tiles + tile * self.format.tile_bytes
        fragments = ch.reinterpret(ty.ptr(ty.u32x4), first)
        of_tile = ch.reinterpret(ty.ptr(ty.u32), first + self.format.numbers_at)
        numbers = ch.const(ty.u32, of_tile[0], name="numbers")
        self.have_read ^= numbers
        units = activations.units
        for block in range(self.format.kept):
            low = ch.const(ty.u32x4, fragments[block * LANE_LOADS + self.lane], name="low")
            high = ch.const(ty.u32x4, fragments[block * LANE_LOADS + 32 + self.lane], name="high")
            self.have_read ^= low.x ^ high.x
            number = ch.const(ty.u32, numbers >> 8 * block & 3, name="number")
            for group in range(activations.groups):
                values = ch.const(ty.u32x4, activations.operand(units, group, number), name="values")
                prim.mma_bf16(sums[group], low, values.x, values.y)
                prim.mma_bf16(sums[group], high, values.z, values.w)
