"""bf16 weights of which some blocks of 16 x 32 are there: each meets the part of the vector it names.

A K-tile of some of every four is packed by `cheetah.models.formats.blocks`, and is a warp's. Its blocks are multiplied
in the order of columns, so sums are those of the dense matrix where a warp has the same columns. Lots of an M-tile's
blocks, packed by `cheetah.models.formats.block_rows`, fill a stage each, and the warps take their blocks in turn.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.formats.bf16 import LANE_LOADS
from cheetah.blocks.linear.fragments import Activations, Fragments
from cheetah.lang import prim, ty
from cheetah.plan.formats import LOT_COUNT_AT, LOT_LINE_BYTES, BlockRows, BlockTiles


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


class LotFragments(Fragments):
    """Lots of an M-tile's blocks, whichever these are."""

    format: BlockRows

    @ch.inline
    def declare(self) -> None:
        lot = self.stage.address
        have_read = ch.var(ty.u32, 0)
        self.lot, self.have_read = lot, have_read

    def finish_chunk(self) -> None:
        self.stage.has_read(self.have_read)

    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        raise NotImplementedError("all warps share a lot: see multiply_share")

    @ch.inline
    def multiply_share(
        self, warp: ch.Expr, warps: int, activations: Activations, blocks: tuple[Any, Any] | None, sums: Any
    ) -> ch.Expr:
        """sums [groups, 4] += this warp's blocks of the stage's lot x activations, which begin with those of the first
        of `blocks`, numbers [first, end), or of block 0; others are left out. Gives the number of the block behind the
        lot."""
        about = ch.const(ty.u32, about_lot(self.lot), name="about")
        self.have_read ^= about
        numbers = ch.reinterpret(ty.ptr(ty.u16), self.lot)
        fragments = ch.reinterpret(ty.ptr(ty.u32x4), self.lot + LOT_LINE_BYTES)
        units = activations.units
        with ch.for_(warp, about & 0xFFFF, warps, unroll=2, name="block") as block:
            number = ch.const(ty.u32, ty.u32(numbers[block]) - (0 if blocks is None else blocks[0]), name="number")
            low = fragments[block * LANE_LOADS + self.lane]
            high = fragments[block * LANE_LOADS + (32 + self.lane)]
            self.have_read ^= number ^ low.x ^ high.x
            with ch.if_(True if blocks is None else number < blocks[1] - blocks[0]):
                for group in range(activations.groups):
                    values = activations.operand(units, group, number)
                    prim.mma_bf16(sums[group], low, values.x, values.y)
                    prim.mma_bf16(sums[group], high, values.z, values.w)
        return about >> 16


def about_lot(lot: ch.Expr) -> ch.Expr:
    """How many blocks a lot has, and above it the number of the block behind it (u32)."""
    words = ch.reinterpret(ty.ptr(ty.u32), lot)
    return words[LOT_COUNT_AT // 2]
