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
from cheetah.blocks.prompt.cases import ACCUMULATORS, Case, Finish, Sums, TilePlace, by_finish, in_phases, of_phase
from cheetah.blocks.prompt.finish import TokenWeights
from cheetah.blocks.prompt.machine import ACCUMULATOR_BYTES, PassMachine
from cheetah.blocks.prompt.product import TileProduct
from cheetah.lang import prim, ty
from cheetah.plan.expert_slots import SUMMED_TOKENS, SUMS_PADDING
from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.prompt import GROUP_TOKENS

HALF = M_TILE_ROWS // 2
UNIT_ROWS, UNITS_OF_M_TILE = 4, 2
"""Of an expert's rows for a slot 16 bytes are rows g and g + 8 of an M-tile, for four g."""
RANKS_AT_ONCE = 8
"""Experts of a token whose rows are on their way together, at most."""


def slots_at_once(chosen: int) -> tuple[int, int]:
    """Of how many of a token's experts slots are loaded together, and how many by one load."""
    together = next(count for count in range(min(chosen, RANKS_AT_ONCE), 0, -1) if chosen % count == 0)
    return together, next(each for each in (4, 2, 1) if together % each == 0)


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
class AddWeighed(StoreParts):
    """The residual stream again (`into`), to which the sums were added, each token's times its weight: what comes next
    adds to it before anybody takes it."""

    weights: TokenWeights

    @property
    def scales_sums(self) -> bool:
        return True

    def begin(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        self.weights.load(token_tile)

    def scaled_sum(self, value: Any, in_tile: Any, index: Any) -> Any:
        return self.weights.weighed(value, in_tile, index)


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
        with machine.tiles(row_tiles, product.token_tiles) as tile:
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
                    for case in its:
                        if case.given.ranked is not None:
                            with in_phases(phase, [case], its):
                                self._add_ranks(place, case.given.ranked, finish.multiplier, sums)
                    finish.begin(row_tile, token_tile)
                    product.finish_tile(finish, False, place, sums)
                    finish.end(row_tile, token_tile)

    @ch.inline
    def _load(self, place: TilePlace, its: Sequence[Case], phase: ch.Expr, sums: Any) -> None:
        multiplier = its[0].finish.multiplier
        if its[0].adds and multiplier == 1:
            self._add(self.residual, place.m_tile, place.token_tile, sums)
        of_parts = [case for case in its if case.given.ranked is None]
        if of_parts:
            with in_phases(phase, of_parts, its):
                self._add_parts(place, of_parts, phase, sums)
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
    def _add_ranks(self, place: TilePlace, ranked: Any, multiplier: float, sums: Any) -> None:
        """What the experts of a tile's tokens made, by rank: ascending, whoever else is in the pass. By all warps, of
        SUMMED_TOKENS tokens at a time, in two ways: first four lanes' rows of a token lie side by side, so that whole
        lines of memory come; then each lane has those of its M-tile, through shared memory."""
        machine = self.product.machine
        plan = machine.plan
        units = plan.tile_m_tiles * UNITS_OF_M_TILE
        number = ch.const(ty.u32, machine.warp * 32 + machine.lane, name="number")
        token, unit = ch.const(ty.u32, number // units, name="of_half"), ch.const(ty.u32, number % units, name="unit")
        m_tile = (place.m_tile - machine.warp) + unit // UNITS_OF_M_TILE
        row = ch.const(ty.u32, m_tile * M_TILE_ROWS + unit % UNITS_OF_M_TILE * UNIT_ROWS, name="row")
        halves = plan.tile_tokens // SUMMED_TOKENS
        totals = ch.array(ty.f32, halves * 2 * UNIT_ROWS, zero=True)
        first = ch.const(ty.u32, place.token_tile * plan.tile_tokens + token, name="first_token")
        with ch.if_(m_tile < place.m_tiles):
            self._sum_ranks(ranked, first, row, halves, totals)
        kept = machine.region("expert_sums", ty.f32)
        stride = plan.tile_m_tiles * M_TILE_ROWS + SUMS_PADDING
        for half in range(halves):
            if half:
                machine.meet()  # everybody has read the tokens before
            fours = ch.reinterpret(ty.ptr_mut(ty.f32x4), kept + (token * stride + unit * (2 * UNIT_ROWS)))
            for index in range(2 * UNIT_ROWS // 4):
                four = ch.var(ty.f32x4)
                for member, letter in enumerate("xyzw"):
                    setattr(four, letter, totals[half * 2 * UNIT_ROWS + index * 4 + member])
                fours[index] = four
            machine.meet()  # all rows of these tokens are summed; the end of the tile is another meeting
            pairs = ch.reinterpret(ty.ptr(ty.f32x2), kept)
            for group in range(SUMMED_TOKENS // GROUP_TOKENS):
                for index in range(2):
                    of_token = (group * GROUP_TOKENS + machine.lane % 4 * 2 + index) * stride
                    pair = ch.const(
                        ty.f32x2, pairs[(of_token + machine.warp * M_TILE_ROWS) // 2 + machine.lane // 4], name="pair"
                    )
                    at = (half * (SUMMED_TOKENS // GROUP_TOKENS) + group) * ACCUMULATORS + index
                    for below, value in enumerate((pair.x, pair.y)):
                        sums[at + 2 * below] += value if multiplier == 1 else value * multiplier

    @ch.inline
    def _sum_ranks(self, ranked: Any, first: ch.Expr, row: ch.Expr, halves: int, totals: Any) -> None:
        """Of a token of each half rows g and g + 8 for UNIT_ROWS neighbouring g, over its experts. row: the first."""
        together, each = slots_at_once(ranked.chosen)
        vector: Any = {4: ty.u32x4, 2: ty.u32x2, 1: ty.u32}[each]
        words = ranked.width // 2
        word = row // M_TILE_ROWS * HALF + row % M_TILE_ROWS
        with ch.for_(0, ranked.chosen, together, unroll=1, name="rank") as rank:
            # All slots are loaded before a row is, and all rows before one is added: so they are on their way together.
            slots, made = ch.array(ty.u32, halves * together), ch.array(ty.u32x4, halves * together)
            with ch.for_(halves, unroll=True) as half, ch.for_(together // each, unroll=True, name="some") as some:
                at = (first + half * SUMMED_TOKENS) * ranked.chosen + rank + some * each
                found = ch.const(vector, ch.reinterpret(ty.ptr(vector), ranked.slots + at)[0], name="found")
                for index in range(each):
                    slots[half * together + some * each + index] = found if each == 1 else getattr(found, "xyzw"[index])
            with ch.for_(halves * together, unroll=True, name="index") as index:
                rows = ranked.rows + (ty.u64(slots[index]) * words + ty.u64(word))
                made[index] = ch.reinterpret(ty.ptr(ty.u32x4), rows)[0]
            with ch.for_(halves, unroll=True) as half, ch.for_(together, unroll=True, name="own") as own:
                at = ch.const(ty.u32, (first + half * SUMMED_TOKENS) * ranked.chosen + rank + own, name="at")
                unit = ch.const(ty.u32x4, made[half * together + own], name="rows_of_expert")
                for index, member in enumerate("xyzw"):
                    pair = getattr(unit, member)
                    for below, value in enumerate((prim.bf16x2_low(pair), prim.bf16x2_high(pair))):
                        added = value
                        if ranked.biases is not None:
                            added = value + self._bias(ranked, at, row + (index + below * HALF))
                        totals[half * (2 * UNIT_ROWS) + (2 * index + below)] += added

    @staticmethod
    def _bias(ranked: Any, of_rank: ch.Expr, row: Any) -> Any:
        """What a token's expert adds to a row, times its weight."""
        bias = prim.bf16_to_f32(ranked.biases[ranked.experts[of_rank] * ranked.bias_width + row])
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
