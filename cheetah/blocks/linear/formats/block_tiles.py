"""bf16 weights of which some blocks of 16 x 32 are there: each meets the part of the vector it names.

A K-tile of some of every four is packed by `cheetah.models.formats.blocks`, and is a warp's. Its blocks are multiplied
in the order of columns, so sums are those of the dense matrix where a warp has the same columns. Lots of an M-tile's
blocks, packed by `cheetah.models.formats.block_rows`, fill a stage each, and the warps take their blocks in turn.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.formats.bf16 import LANE_LOADS
from cheetah.blocks.linear.fragments import Activations, WholeRead
from cheetah.lang import prim, ty
from cheetah.plan.formats import LOT_BLOCKS, LOT_COUNT_AT, LOT_LINE_BYTES, BlockRows, BlockTiles
from cheetah.plan.index import ceil_div


class BlockFragments(WholeRead):
    """Tiles of 16 x 128."""

    format: BlockTiles

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


class LotFragments(WholeRead):
    """Lots of an M-tile's blocks, whichever these are."""

    format: BlockRows

    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        raise NotImplementedError("all warps share a lot: see multiply_share")

    @ch.inline
    def multiply_share(
        self, warp: ch.Expr, warps: int, activations: Activations, blocks: tuple[Any, Any] | None, sums: Any
    ) -> ch.Expr:
        """sums [groups, 4] += this warp's blocks of the stage's lot x activations, which begin with those of the first
        of `blocks`, numbers [first, end), or of block 0; others are left out. Gives the number of the block behind the
        lot.

        Whatever a lot may have is loaded before it is known how many blocks it has: what lies behind the last one is of
        a lot before, and meets nothing."""
        about = ch.const(ty.u32, about_lot(self.tiles), name="about")
        self.have_read ^= about
        numbers = ch.reinterpret(ty.ptr(ty.u16), self.tiles)
        fragments = ch.reinterpret(ty.ptr(ty.u32x4), self.tiles + LOT_LINE_BYTES)
        units, loaded = activations.units, []
        for turn in range(ceil_div(LOT_BLOCKS, warps)):
            block = ch.const(ty.u32, warp + turn * warps, name="block")
            is_there: Any = block < (about & 0xFFFF)
            place = block if LOT_BLOCKS % warps == 0 else ch.minimum(block, LOT_BLOCKS - 1)
            number = ch.const(ty.u32, ty.u32(numbers[place]) - (0 if blocks is None else blocks[0]), name="number")
            if blocks is not None:
                is_own = ch.const(ty.boolean, number < blocks[1] - blocks[0], name="is_own")
                number = ch.const(ty.u32, ch.select(is_own, number, ty.u32(0)), name="own_number")
                is_there = is_there & is_own
            low = ch.const(ty.u32x4, fragments[place * LANE_LOADS + self.lane], name="low")
            high = ch.const(ty.u32x4, fragments[place * LANE_LOADS + (32 + self.lane)], name="high")
            self.have_read ^= number ^ low.x ^ high.x
            values = [activations.operand(units, group, number) for group in range(activations.groups)]
            loaded.append((is_there, low, high, [ch.const(ty.u32x4, one, name="values") for one in values]))
        for is_there, low, high, values in loaded:
            with ch.if_(is_there):
                for group, value in enumerate(values):
                    prim.mma_bf16(sums[group], low, value.x, value.y)
                    prim.mma_bf16(sums[group], high, value.z, value.w)
        return about >> 16


def about_lot(lot: ch.Expr) -> ch.Expr:
    """How many blocks a lot has, and above it the number of the block behind it (u32)."""
    words = ch.reinterpret(ty.ptr(ty.u32), lot)
    return words[LOT_COUNT_AT // 2]
