"""Products of few tokens, cut along k so that more blocks have work, and the phase that adds their parts.

Each part's sums are stored, f32 in accumulator order, and behind a meeting of all blocks added in order, behind what
they are added to: so the bits are the same whoever was first. In that phase tiles have fewer tokens, for the same
reason as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.prompt.machine import ACCUMULATOR_BYTES, PassMachine
from cheetah.blocks.prompt.product import (
    ACCUMULATORS,
    Case,
    Finish,
    Sums,
    TilePlace,
    TileProduct,
    by_finish,
    in_phases,
    of_phase,
)
from cheetah.lang import prim, ty
from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.prompt import GROUP_TOKENS

HALF = M_TILE_ROWS // 2


def _place(machine: PassMachine, m_tile: ch.Expr, group: ch.Expr) -> Any:
    """Where a lane's sums of an M-tile and a group of tokens lie in accumulator order, in units of 16 bytes."""
    first = (ty.u64(m_tile) * machine.plan.groups + ty.u64(group)) * (ACCUMULATOR_BYTES // 16)
    return first + ty.u64(machine.lane)


@dataclass(frozen=True, eq=False)
class StoreParts(Finish):
    """The sums as they are: f32 [part][M-tile][group of tokens][lane][4]."""

    machine: PassMachine
    into: ch.Expr

    @ch.inline
    def finish(self, sums: Sums) -> None:
        kept = ch.var(ty.f32x4)
        for member, value in zip("xyzw", sums.values, strict=True):
            setattr(kept, member, value)
        place = _place(self.machine, sums.m_tile, sums.group)
        ch.reinterpret(ty.ptr_mut(ty.f32x4), self.into)[place] = kept


@dataclass(frozen=True, eq=False)
class AddParts:
    """The phase that adds: parts of k, or what a token's experts made, in order. product: with fewer tokens a tile;
    parts: what StoreParts left; residual: what the sums of cases that add are added to (f32 in accumulator order)."""

    product: TileProduct
    parts: ch.Expr
    residual: ch.Expr

    @ch.function
    def finish(self, cases: Sequence[Case], phase: ch.Expr) -> None:
        """In the consumer role: the sums of the product of `phase`, finished as its case says."""
        machine, product = self.product.machine, self.product
        plan = machine.plan
        row_tiles = of_phase(phase, {case.phase: plan.row_tiles(case.matrix) for case in cases})
        with product.tiles(row_tiles) as tile:
            row_tile = tile // product.token_tiles
            token_tile = tile % product.token_tiles
            m_tile = row_tile * plan.tile_m_tiles + machine.warp
            sums = ch.array(ty.f32, plan.tile_groups * ACCUMULATORS, zero=True)
            for finish, its in by_finish(cases):
                with in_phases(phase, its, cases):
                    m_tiles = of_phase(phase, {case.phase: case.matrix.full_m_tiles for case in its})
                    place = TilePlace(m_tile, m_tiles, token_tile)
                    with ch.if_(m_tile < m_tiles):
                        self._load(place, its, phase, sums)
                    finish.begin(row_tile, token_tile)
                    product.finish_tile(finish, False, place, sums)
                    finish.end(row_tile, token_tile)

    @ch.inline
    def _load(self, place: TilePlace, its: Sequence[Case], phase: ch.Expr, sums: Any) -> None:
        multiplier = its[0].finish.multiplier
        if its[0].adds and multiplier == 1:
            self._add(self.residual, place.m_tile, place.token_tile, sums)
        ranked = [case for case in its if case.given.ranked is not None]
        of_parts = [case for case in its if case.given.ranked is None]
        if of_parts:
            with in_phases(phase, of_parts, its):
                self._add_parts(place, of_parts, phase, sums)
        for case in ranked:
            with in_phases(phase, [case], its):
                self._add_ranks(place, case.given.ranked, sums)
        if its[0].adds and multiplier != 1:
            with ch.for_(self.product.machine.plan.tile_groups * ACCUMULATORS, unroll=True, name="sum") as index:
                sums[index] = sums[index] * multiplier
            self._add(self.residual, place.m_tile, place.token_tile, sums)

    @ch.inline
    def _add_parts(self, place: TilePlace, its: Sequence[Case], phase: ch.Expr, sums: Any) -> None:
        parts = of_phase(phase, {case.phase: case.given.parts for case in its})
        with ch.for_(parts, unroll=2, name="part") as part:
            self._add(self.parts, part * place.m_tiles + place.m_tile, place.token_tile, sums)

    @ch.inline
    def _add_ranks(self, place: TilePlace, ranked: Any, sums: Any) -> None:
        """What the experts of this lane's tokens made, by rank: ascending, whoever else is in the pass."""
        lane, groups = self.product.machine.lane, self.product.machine.plan.tile_groups
        row, words = place.m_tile * M_TILE_ROWS + lane // 4, ranked.width // 2
        # The ranks outside: so the rows of all of the lane's tokens are on their way together.
        with ch.for_(ranked.chosen, unroll=4, name="rank") as rank, ch.for_(groups, unroll=True, name="group") as group:
            for index in range(2):
                token = (place.token_tile * groups + group) * GROUP_TOKENS + lane % 4 * 2 + index
                at = ch.const(ty.u32, token * ranked.chosen + rank, name="at")
                made = ty.u64(ranked.slots[at]) * words + ty.u64(place.m_tile * HALF + lane // 4)
                pair = ch.const(ty.u32, ranked.rows[made], name="pair")
                for half, value in enumerate((prim.bf16x2_low(pair), prim.bf16x2_high(pair))):
                    added = value + self._bias(ranked, at, row + half * HALF)
                    sums[group * ACCUMULATORS + half * 2 + index] += added

    @staticmethod
    def _bias(ranked: Any, of_rank: ch.Expr, row: ch.Expr) -> Any:
        """What a token's expert adds to a row, times its weight."""
        if ranked.biases is None:
            return 0
        bias = prim.bf16_to_f32(ranked.biases[ranked.experts[of_rank] * ranked.width + row])
        return ranked.weights[of_rank] * bias

    @ch.inline
    def _add(self, source: ch.Expr, m_tile: Any, token_tile: Any, sums: Any) -> None:
        machine = self.product.machine
        groups = machine.plan.tile_groups
        words = ch.reinterpret(ty.ptr(ty.f32x4), source)
        with ch.for_(groups, unroll=True, name="group") as group:
            added = words[_place(machine, m_tile, token_tile * groups + group)]
            for index, member in enumerate("xyzw"):
                sums[group * ACCUMULATORS + index] += getattr(added, member)
