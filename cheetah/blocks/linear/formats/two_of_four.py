"""bf16 weights of which two of every four columns are there: sparse tensor cores choose what of the vector they meet.

A K-tile is the A operands of two `mma.sp.m16n8k32`, 16 bytes a lane each, and the places of their weights. Which lanes
give the places is part of the instruction: a word of each lane is enough for both. The B operand has the columns of the
vector in their own order: lane t has words t, 4 + t, ... of 32, of which neighbouring lanes share four columns, so
loads of whole matrices bring it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import UNITS_PER_TILE
from cheetah.blocks.linear.fragments import Activations, Held, WholeRead
from cheetah.lang import prim, ty
from cheetah.plan.formats import SKEWED_TOKENS, SparseTiles, TileFormat
from cheetah.plan.plan import COLUMNS

HALVES = 2
"""Of a K-tile: products, of 32 columns."""
HALF_LOADS = 32
"""16-byte words of a half: one a lane."""


def sparse_operand(activations: Activations, group: int, half: int) -> ch.Expr:
    """32 columns of the vectors of a group as operand B. Called by a whole warp."""
    lane, tokens = activations.columns.machine.lane, activations.columns.limit
    first = half * (UNITS_PER_TILE * tokens) + group * (COLUMNS * UNITS_PER_TILE)
    column = lane % COLUMNS if tokens >= COLUMNS else lane % COLUMNS % tokens
    unit: Any = lane // COLUMNS
    if tokens % SKEWED_TOKENS == 0:  # as `unit_place`
        unit = unit ^ column // 2 ^ first // 8 % UNITS_PER_TILE
    row = unit + first if tokens == 1 else column * UNITS_PER_TILE + unit + first
    return ch.const(ty.u32x4, prim.load_rows_b16(activations.units + row), name="values")


@dataclass(frozen=True, eq=False)
class HeldSparseTiles(Held):
    """Of 16 x 64 weights, 9 registers each, and 8 of operands."""

    weights: Any
    places: Any
    values: Any

    @classmethod
    @ch.inline
    def of(cls, tiles: int) -> HeldSparseTiles:
        """Room for so many."""
        weights = ch.array(ty.u32x4, tiles, HALVES)
        places = ch.array(ty.u32, tiles)
        values = ch.array(ty.u32x4, tiles, HALVES)
        return cls(weights, places, values)

    def multiply(self, index: ch.Expr, sums: ch.Expr) -> None:
        for half in range(HALVES):
            prim.mma_2of4_bf16(half)(sums[0], self.weights[index][half], self.values[index][half], self.places[index])


class SparseFragments(WholeRead):
    """Tiles packed by `cheetah.models.formats.two_of_four`."""

    format: SparseTiles

    @classmethod
    def room(cls, format: TileFormat, tiles: int) -> HeldSparseTiles:
        return HeldSparseTiles.of(tiles)

    @ch.inline
    def hold(self, tile: ch.Expr, activations: Activations, held: HeldSparseTiles, index: ch.Expr) -> None:
        weights, places = self._load(tile)
        held.places[index] = places
        for half in range(HALVES):
            held.weights[index][half] = weights[half]
            held.values[index][half] = sparse_operand(activations, 0, half)

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        weights, places = self._load(tile)
        for group in range(activations.groups):
            for half in range(HALVES):
                values = sparse_operand(activations, group, half)
                prim.mma_2of4_bf16(half)(sums[group], weights[half], values, places)

    def _load(self, tile: ch.Expr) -> tuple[list[Any], Any]:
        """The weights of each half, and the places of both."""
        first = self.tiles + tile * self.format.tile_bytes
        fragments = ch.reinterpret(ty.ptr(ty.u32x4), first)
        of_lanes = ch.reinterpret(ty.ptr(ty.u32), first + self.format.places_at)
        weights = [
            ch.const(ty.u32x4, fragments[self.lane + half * HALF_LOADS], name="weights") for half in range(HALVES)
        ]
        places = ch.const(ty.u32, of_lanes[self.lane], name="places")
        for word in (*(words.x for words in weights), places):
            self.have_read ^= word
        return weights, places
