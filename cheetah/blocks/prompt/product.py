"""Packed weights times the vectors of many tokens: 64 rows a warpgroup by `tile_tokens` tokens, on `wgmma`.

The packed fragments of decoding are operand A as they are: warp w of a warpgroup loads those of its M-tile, 16 bytes a
lane for each 16 of k, and the activations of the tile, in token order (`cheetah.plan.prompt`), are operand B. Products
of one stage are issued while those of the one before are under way; a stage is given back when they are over. So two
sets of A registers take turns.

Tiles are dealt to the blocks with the tokens inside: blocks that share a row of weights work on it side by side. Those
of experts, whose weights are shared by few tokens, are dealt with the rows inside: blocks share the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.prompt.cases import (
    ACCUMULATORS,
    Case,
    Finish,
    Given,
    Sums,
    TilePlace,
    by_finish,
    by_format,
    if_one_of,
    in_phases,
    is_one_of,
    of_phase,
    row_tile_and_part,
)
from cheetah.blocks.prompt.copies import TileCopies
from cheetah.blocks.prompt.expert_tiles import SlotTile
from cheetah.blocks.prompt.lists import StageLists
from cheetah.blocks.prompt.machine import ACCUMULATOR_BYTES, GROUP_BYTES, UNIT_BYTES, PassMachine
from cheetah.blocks.prompt.ring import TileRing
from cheetah.blocks.prompt.weights import STEPS_PER_TILE, pair_fragments, stage_weights
from cheetah.lang import prim, ty
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import M_TILE_ROWS, TileFormat
from cheetah.plan.prompt import STAGE_TILES


@dataclass(frozen=True)
class Turn:
    """Of the stages of an M-tile the second, fourth ... or the others: number 0 for the first one."""

    number: int
    name: str


EVEN, ODD = Turn(0, "even_stages"), Turn(1, "odd_stages")
PINNED_CASES = 6
"""Of so many products, some of experts, ptxas is not shown how the number of a phase's stages follows from the phase.
It made branches of that while products were under way, and for their sake waited for every `wgmma` of the kernel by
itself (C7513)."""
LOADED_AT_ONCE = 4
"""Groups of tokens for which a finish loads what it needs before it goes on."""


class TileProduct:
    """The products of a pass. token_tiles: of this launch (u32), the same in all roles."""

    def __init__(self, machine: PassMachine, ring: TileRing, token_tiles: ch.Expr) -> None:
        self.machine, self.ring, self.token_tiles = machine, ring, token_tiles
        self.copies = TileCopies(machine, ring, token_tiles)
        self.residual_groups = self.copies.residual_groups

    def __call__(self, matrix: MatrixLayout, given: Given, finish: Finish) -> None:
        """All tiles of a matrix, in all roles."""
        with self.machine.weights:
            self.copies.bring_weights(matrix, given)
        with self.machine.activations:
            self.copies.bring_activations(matrix, given)
        with self.machine.consumer:
            self.multiply([Case(matrix, given, finish)])

    # -- products ---------------------------------------------------------------------------------------------------

    @ch.function
    def multiply(self, cases: Sequence[Case], phase: ch.Expr | None = None) -> None:
        """In the consumer role: the product of `phase`. All share one main loop: with one for each, a kernel took four
        times as long to compile, and ptxas found no registers for its accumulators."""
        plan = self.machine.plan
        row_tiles = of_phase(
            phase, {case.phase: plan.row_tiles(case.matrix, case.given.height) * case.given.parts for case in cases}
        )
        height = of_phase(phase, {case.phase: case.given.height or plan.tile_m_tiles for case in cases})
        parts = of_phase(phase, {case.phase: case.given.parts for case in cases})
        with self.machine.tiles(row_tiles, self._token_tiles(phase, cases)) as tile:
            row_tile, part = row_tile_and_part(self._row(phase, cases, tile, row_tiles), parts)
            token_tile = tile % self.token_tiles
            m_tile = row_tile * height + self.machine.warp
            sums = ch.array(ty.f32, plan.tile_groups * ACCUMULATORS)
            for finish, its in by_finish(cases):
                with in_phases(phase, its, cases):
                    of_slots = self._slots(its, tile, row_tiles)
                    finish.begin(row_tile, token_tile if of_slots is None else of_slots.first_group)
            factors = self._load_factors(phase, cases, m_tile, tile, row_tiles)
            self._sum_tile(phase, cases, sums, self._lists(phase, cases, m_tile, part, factors))
            self._scale_rows(sums, factors)
            for finish, its in by_finish(cases):
                with in_phases(phase, its, cases):
                    m_tiles = of_phase(phase, {case.phase: case.matrix.full_m_tiles for case in its})
                    before = 0 if isinstance(part, int) else part * m_tiles
                    if any(case.given.height for case in its):
                        m_tiles = ch.minimum(ty.u32(0) + m_tiles, (row_tile + 1) * height)
                    place = TilePlace(m_tile, m_tiles, token_tile, before, self._slots(its, tile, row_tiles))
                    self.finish_tile(finish, its[0].adds, place, sums)
                    finish.end(row_tile, token_tile)

    def _token_tiles(self, phase: ch.Expr | None, cases: Sequence[Case]) -> Any:
        """Tiles of tokens, or of slots, that the product of the phase has."""
        count: Any = self.token_tiles
        for case in cases:
            if case.given.tiles is not None:
                count = ch.select(is_one_of(phase, [case.phase]), case.given.tiles.count, count)
        return count

    def _row(self, phase: ch.Expr | None, cases: Sequence[Case], tile: ch.Expr, row_tiles: ch.Expr) -> Any:
        """The row of tiles of a tile: of tokens those come first, of slots the rows."""
        row = tile // self.token_tiles
        for case in cases:
            if case.given.tiles is not None:
                row = ch.select(is_one_of(phase, [case.phase]), tile % row_tiles, row)
        return row

    @staticmethod
    def _slots(its: Sequence[Case], tile: ch.Expr, row_tiles: ch.Expr) -> SlotTile | None:
        """The slots of a tile of experts; None of tokens."""
        tiles = its[0].given.tiles
        return None if tiles is None else tiles.tile(tile // row_tiles)

    @ch.inline
    def _load_factors(
        self, phase: ch.Expr | None, cases: Sequence[Case], m_tile: ch.Expr, tile: Any, row_tiles: Any
    ) -> Any:
        """What rows g and g + 8 are multiplied by in the end (f32 [2]), 1 in a matrix without factors; None where all
        are."""
        if not any(case.matrix.format.factor_bytes for case in cases):
            return None
        factors = ch.array(ty.f32, 2)
        for case in cases:
            with in_phases(phase, [case], cases):
                if not case.matrix.format.factor_bytes:
                    for index in range(2):
                        factors[index] = ty.f32(1.0)
                    continue
                place = case.given.weights + self._factors_at(case.matrix, ch.minimum(m_tile, case.matrix.m_tiles - 1))
                if (slots := self._slots([case], tile, row_tiles)) is not None:
                    place = place + ty.u64(slots.expert) * case.matrix.expert_bytes
                of_rows = ch.reinterpret(ty.ptr(ty.f32), place)
                for index in range(2):
                    factors[index] = of_rows[self.machine.lane // 4 + index * (M_TILE_ROWS // 2)]
        return factors

    @staticmethod
    def _factors_at(matrix: MatrixLayout, m_tile: ch.Expr) -> Any:
        """Byte of an M-tile's factors, behind its last K-tile (u64)."""
        wave, position = m_tile // matrix.blocks, m_tile % matrix.blocks
        chunk = matrix.chunk_address(matrix.chunks - 1, position, matrix.wave_width(wave))
        return matrix.wave_address(ty.u64(wave)) + ty.u64(chunk + matrix.last_chunk_tiles * matrix.format.tile_bytes)

    @ch.inline
    def _scale_rows(self, sums: Any, factors: Any) -> None:
        if factors is None:
            return
        with ch.for_(self.machine.plan.tile_groups, unroll=True, name="group") as group:
            for index in range(ACCUMULATORS):
                sums[group * ACCUMULATORS + index] *= factors[index // 2]

    def _lists(
        self, phase: ch.Expr | None, cases: Sequence[Case], m_tile: ch.Expr, part: Any, factors: Any
    ) -> TileLists | None:
        """Those of this warp's M-tile; None where no matrix has some."""
        if not any(case.matrix.format.list_units for case in cases):
            return None
        stages = of_phase(phase, {case.phase: case.k_tiles // STAGE_TILES for case in cases})
        return TileLists(StageLists.of(self.machine, part * stages), m_tile, factors)

    @ch.inline
    def _sum_tile(
        self, phase: ch.Expr | None, cases: Sequence[Case], sums: Any, lists: TileLists | None = None
    ) -> None:
        """All of k, a stage at a time.

        The first stage stands apart, because its first product surely does not read the sums. With one that may, they
        are alive to ptxas from the kernel's beginning on, beside whatever else its phases need."""
        even = ch.array(ty.u32x4, STAGE_TILES * STEPS_PER_TILE)
        odd = ch.array(ty.u32x4, STAGE_TILES * STEPS_PER_TILE)
        previous = ch.var(ty.u32, 0)
        paired = of_phase(phase, {case.phase: int(case.matrix.is_narrow) for case in cases})
        operands = StageOperands(self.machine, phase, cases, paired, lists)
        first = self._first_tiles(cases)
        left = {case.phase: case.k_tiles - first for case in cases}
        rests = {index: tiles % (2 * STAGE_TILES) for index, tiles in left.items()}
        self._multiply_first_stage(operands, sums, even, previous, first)
        pairs = of_phase(phase, {index: tiles // (2 * STAGE_TILES) for index, tiles in left.items()})
        if len(cases) >= PINNED_CASES and any(case.given.tiles is not None for case in cases):
            pairs = prim.renewed_u32(ty.u32(0) + pairs)
        with ch.for_(pairs, unroll=1):
            self._multiply_stage(operands, sums, odd, previous, STAGE_TILES, ODD)
            self._multiply_stage(operands, sums, even, previous, STAGE_TILES, EVEN)
        for rest in sorted({rest for rest in rests.values() if rest}):
            with if_one_of(phase, [index for index in rests if rests[index] == rest], list(rests)):
                for index, done in enumerate(range(0, rest, STAGE_TILES)):
                    fragments = (odd, even)[index]
                    tiles = min(STAGE_TILES, rest - done)
                    self._multiply_stage(operands, sums, fragments, previous, tiles, (ODD, EVEN)[index])
        prim.wgmma_wait_all()
        self.ring.release(previous)

    @staticmethod
    def _first_tiles(cases: Sequence[Case]) -> int:
        """K-tiles of the first stage of each case."""
        first = {min(STAGE_TILES, case.k_tiles) for case in cases}
        assert len(first) == 1, "the sizes of a pass were checked"
        return first.pop()

    @ch.function
    def _multiply_first_stage(
        self, operands: StageOperands, sums: Any, fragments: Any, previous: Any, tiles: int
    ) -> None:
        """The same of the first stage, before which there is none to wait for."""
        self._issue_stage(operands, sums, fragments, previous, tiles, EVEN, is_first=True)

    @ch.function
    def _multiply_stage(
        self, operands: StageOperands, sums: Any, fragments: Any, previous: Any, tiles: int, turn: Turn
    ) -> None:
        """Issue the products of a stage's K-tiles, then wait for those of the stage before and give that back."""
        self._issue_stage(operands, sums, fragments, previous, tiles, turn, is_first=False)

    @ch.inline
    def _issue_stage(
        self,
        operands: StageOperands,
        sums: Any,
        fragments: Any,
        previous: Any,
        tiles: int,
        turn: Turn,
        *,
        is_first: bool,
    ) -> None:
        ring, plan = self.ring, self.machine.plan
        steps = tiles * STEPS_PER_TILE
        stage = ch.const(ty.u32, ring.using.stage, name="stage")
        ring.wait()
        memory = ring.memory + stage * ring.stage_bytes
        operands.load(memory, ring.memory + previous * ring.stage_bytes, turn.number, steps, fragments)
        # The registers were loaded before the products read them.
        prim.wgmma_fence()
        descriptor = prim.matrix_descriptor(memory + ring.weights_bytes, UNIT_BYTES, GROUP_BYTES)
        for step in range(steps):
            tile, half = divmod(step, STEPS_PER_TILE)
            first_byte = tile * self.machine.activation_tile_bytes + half * 2 * UNIT_BYTES
            accumulate = 0 if is_first and step == 0 else 1
            prim.wgmma_bf16(plan.tile_tokens)(sums, fragments[step], descriptor + first_byte // 16, accumulate)
        prim.wgmma_commit()
        if not is_first:
            prim.wgmma_wait_but_one()  # the stage before, and the registers that go with it, are read
            ring.release(previous)
        previous.set(stage)
        ring.using.advance()

    # -- finishing --------------------------------------------------------------------------------------------------

    @ch.function
    def _add_residual(self, sums: Any, first: ch.Expr, finish: Finish) -> None:
        """Sums of the groups of tokens from `first` on, which the next stage has."""
        ring, groups = self.ring, self.residual_groups
        stage = ch.const(ty.u32, ring.using.stage, name="stage")
        ring.wait()
        own = ring.memory + stage * ring.stage_bytes + self.machine.warp * (groups * ACCUMULATOR_BYTES)
        words = ch.reinterpret(ty.ptr(ty.f32x4), own)
        last = ch.var(ty.f32, 0.0)
        with ch.for_(groups, unroll=True, name="group") as group:
            added = words[group * 32 + self.machine.lane]
            place = (group + first) * ACCUMULATORS
            for index, member in enumerate("xyzw"):
                if finish.scales_sums:
                    sums[place + index] = finish.scaled_sum(sums[place + index], group + first, index) + getattr(
                        added, member
                    )
                else:
                    sums[place + index] += getattr(added, member)
            last += added.x
        prim.wait_for_u32(prim.float_bits(last))  # came of every load of the stage
        ring.release(stage)
        ring.using.advance()

    def groups_at_once(self, adds: bool) -> int:
        """Groups of tokens of a tile that are finished together."""
        return self.residual_groups if adds else self.machine.plan.tile_groups

    @ch.inline
    def finish_tile(self, finish: Finish, adds: bool, place: TilePlace, sums: Any) -> None:
        """All groups of tokens; where the sums are added to something, as many at a time as a stage brings."""
        groups = self.machine.plan.tile_groups
        count = self.groups_at_once(adds)
        if finish.looks:
            with ch.if_(place.m_tile < place.m_tiles):
                self._look(finish, place, sums)
            finish.has_looked()
        for first in range(0, groups, count):
            if adds:
                self._add_residual(sums, ch.argument(first), finish)
            with ch.if_(place.m_tile < place.m_tiles):
                self._finish_groups(finish, place, sums, ch.argument(first), count)
            if finish.is_pushed:
                self.machine.hand_on()

    @ch.function
    def _look(self, finish: Finish, place: TilePlace, sums: Any) -> None:
        of_rows = finish.load_rows(place.m_tile)
        with ch.for_(self.machine.plan.tile_groups, unroll=True, name="group") as group:
            finish.look(self._sums(place, sums, group, of_rows))

    @ch.function
    def _finish_groups(self, finish: Finish, place: TilePlace, sums: Any, first: ch.Expr, count: int) -> None:
        if place.slots is not None:
            of_rows = finish.load_rows_of(place.m_tile, place.slots.expert)
            with ch.for_(first, first + count, unroll=True, name="group") as group, ch.if_(group < place.slots.groups):
                finish.finish(self._sums(place, sums, group, of_rows))
            return
        of_rows = finish.load_rows(place.m_tile)
        at_once = next(size for size in range(LOADED_AT_ONCE, 0, -1) if count % size == 0)
        with ch.for_(first, first + count, at_once, unroll=True, name="group") as group:
            of_pass = place.token_tile * self.machine.plan.tile_groups + group
            loaded = [finish.load_group(place.m_tile, of_pass + index) for index in range(at_once)]
            for index, of_group in enumerate(loaded):
                finish.finish(self._sums(place, sums, group + index, of_rows, of_group))

    def _sums(self, place: TilePlace, sums: Any, group: Any, of_rows: Any, of_group: Any = None) -> Sums:
        first, second, third, fourth = (
            ch.const(ty.f32, sums[group * ACCUMULATORS + index], name="sum") for index in range(ACCUMULATORS)
        )
        of_tile = place.token_tile * self.machine.plan.tile_groups if place.slots is None else place.slots.first_group
        in_tile = ch.const(ty.u32, group, name="in_tile")
        of_pass = ch.const(ty.u32, of_tile + in_tile, name="of_pass")
        values = first, second, third, fourth
        return Sums(place.m_tile + place.before, of_pass, in_tile, values, of_rows, of_group)


@dataclass(frozen=True, eq=False)
class StageOperands:
    """The weights of full stages as operands A, in the consumer role: each format's in its own way. paired: whether the
    phase's M-tiles are pairs of narrow ones. lists: of matrices that have some."""

    machine: PassMachine
    phase: ch.Expr | None
    cases: Sequence[Case]
    paired: Any
    lists: TileLists | None = None

    @ch.inline
    def load(self, stage: Any, before: Any, turn: int, steps: int, fragments: Any) -> None:
        """`steps` operands of this warp's M-tile, see `StageWeights`; those of two narrow M-tiles as those of one.
        before: the stage before, which is not given back yet."""
        self._load_as_one_of(by_format(self.cases), (stage, before), turn, steps, fragments)
        if steps == STAGE_TILES * STEPS_PER_TILE:  # narrow M-tiles have no less
            pair_fragments(fragments, self.paired)
        if self.lists is not None:
            for case in self.cases:
                if case.matrix.format.list_units:
                    with in_phases(self.phase, [case], self.cases):
                        self.lists.put(case, steps, fragments)

    def _load_as_one_of(
        self, formats: Sequence[tuple[TileFormat, list[Case]]], stages: tuple[Any, Any], turn: int, *how: Any
    ) -> None:
        """The present phase's format is one of these. The last is not asked for: a way around all of them would keep
        the registers of the stage before alive."""
        (format, its), *others = formats
        if not others:
            weights = stage_weights(format, self.machine.lane, self.machine.plan.whole_tiles)
            weights.load(stages[turn % weights.stages_of_tile], self.machine.warp, turn, *how)
            return
        with in_phases(self.phase, its, self.cases):
            self._load_as_one_of([(format, its)], stages, turn, *how)
        with ch.else_():
            self._load_as_one_of(others, stages, turn, *how)


@dataclass(frozen=True, eq=False)
class TileLists:
    """The lists of a warp's M-tile; factors: as `_load_factors` gives them."""

    lists: StageLists
    m_tile: ch.Expr
    factors: Any

    def put(self, case: Case, steps: int, fragments: Any) -> None:
        """Among a stage's operands of a case."""
        factors = self.factors if case.matrix.format.factor_bytes else None
        self.lists.put(case.matrix, case.given.weights, self.m_tile, steps, fragments, factors)
