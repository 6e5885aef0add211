"""bf16 weights: a K-tile is the A operands of two `mma.m16n8k16`, 16 bytes a lane each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.fragments import Activations, Fragments, Held
from cheetah.lang import prim, ty
from cheetah.plan.formats import BF16, TileFormat

LANE_LOADS = BF16.tile_bytes // 16
"""16-byte words of a tile: the lanes' of its first half, then those of its second."""


@dataclass(frozen=True, eq=False)
class HeldTiles(Held):
    """Of 16 x 32 weights, 8 registers each."""

    weights: Any
    values: Any

    @classmethod
    @ch.inline
    def of(cls, tiles: int) -> HeldTiles:
        """Room for so many."""
        weights = ch.array(ty.u32x4, tiles, 2)
        values = ch.array(ty.u32x4, tiles)
        return cls(weights, values)

    def multiply(self, index: ch.Expr, sums: ch.Expr) -> None:
        weights, values = self.weights[index], self.values[index]
        prim.mma_bf16(sums[0], weights[0], values.x, values.y)
        prim.mma_bf16(sums[0], weights[1], values.z, values.w)


class Bf16Fragments(Fragments):
    """Tiles of 16 x 32, packed by `cheetah.models.formats.bf16`."""

    @ch.inline
    def declare(self) -> None:
        fragments = ch.reinterpret(ty.ptr(ty.u32x4), self.stage.address)
        self.fragments = fragments
        self.have_read: Any = None

    @classmethod
    def room(cls, format: TileFormat, tiles: int) -> HeldTiles:
        return HeldTiles.of(tiles)

    def begin_holding(self) -> None:
        self.have_read = ch.var(ty.u32, 0, name="read")

    @ch.inline
    def hold(self, tile: ch.Expr, activations: Activations, held: HeldTiles, index: ch.Expr) -> None:
        first = self.fragments[tile * LANE_LOADS + self.lane]
        second = self.fragments[tile * LANE_LOADS + 32 + self.lane]
        held.weights[index][0] = first
        held.weights[index][1] = second
        held.values[index] = activations.operand(activations.units, 0)
        self._read(first.x ^ second.x)

    def _read(self, word: ch.Expr) -> None:
        self.have_read ^= word

    def finish_chunk(self) -> None:
        if self.have_read is not None:
            self.stage.has_read(self.have_read)

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        first = self.fragments[tile * LANE_LOADS + self.lane]
        second = self.fragments[tile * LANE_LOADS + 32 + self.lane]
        units = activations.units
        for group in range(activations.groups):
            values = activations.operand(units, group)
            prim.mma_bf16(sums[group], first, values.x, values.y)
            prim.mma_bf16(sums[group], second, values.z, values.w)
        self.stage.has_read(first.x ^ second.x)
