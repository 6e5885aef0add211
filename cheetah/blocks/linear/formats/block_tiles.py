"""bf16 weights of which some blocks of 16 x 32 are there: each meets the part of the vector it names.

A K-tile of some of every four is packed by `cheetah.models.formats.blocks`, and is a warp's. Its blocks are multiplied
in the order of columns, so sums are those of the dense matrix where a warp has the same columns. A window of however
many, packed by `cheetah.models.formats.block_rows`, is a chunk, whose blocks the warps take in turn.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.formats.bf16 import LANE_LOADS
from cheetah.blocks.linear.fragments import Activations, Fragments
from cheetah.lang import prim, ty
from cheetah.plan.formats import WINDOW_LINE_BYTES, BlockRows, BlockTiles

NUMBERS_AT = 4
"""In a window's line, behind the word of its blocks."""


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


class WindowFragments(Fragments):
    """Windows of 16 x 1024."""

    format: BlockRows

    @ch.inline
    def declare(self) -> None:
        window = self.stage.address
        have_read = ch.var(ty.u32, 0)
        self.window, self.have_read = window, have_read

    def finish_chunk(self) -> None:
        self.stage.has_read(self.have_read)

    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        raise NotImplementedError("all warps share a window: see multiply_share")

    @ch.inline
    def multiply_share(self, warp: ch.Expr, warps: int, activations: Activations, sums: Any) -> None:
        """sums [groups, 4] += this warp's blocks of the stage's window x activations."""
        there = ch.reinterpret(ty.ptr(ty.u32), self.window)[0]
        self.have_read ^= there
        count = prim.population_u32(there)
        numbers = self.window + NUMBERS_AT
        fragments = ch.reinterpret(ty.ptr(ty.u32x4), self.window + WINDOW_LINE_BYTES)
        units = activations.units
        with ch.for_(warp, count, warps, unroll=2, name="block") as block:
            number = ty.u32(numbers[block])
            low = fragments[block * LANE_LOADS + self.lane]
            high = fragments[block * LANE_LOADS + (32 + self.lane)]
            self.have_read ^= number ^ low.x ^ high.x
            for group in range(activations.groups):
                values = activations.operand(units, group, number)
                prim.mma_bf16(sums[group], low, values.x, values.y)
                prim.mma_bf16(sums[group], high, values.z, values.w)
