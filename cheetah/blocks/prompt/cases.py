"""A product of a pass as its roles see it: what it is of, what becomes of its sums, and which of them a phase has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.prompt.expert_tiles import ExpertTiles, SlotTile
from cheetah.lang import ty
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import TileFormat
from cheetah.plan.prompt import PassPlan

ACCUMULATORS = 4
"""Of a lane, for its M-tile and a group of 8 tokens."""


@dataclass(frozen=True, eq=False)
class Sums:
    """What a lane has of an M-tile and a group of 8 tokens: with g = lane / 4, t = lane % 4, rows g, g, g + 8, g + 8 of
    tokens 2t, 2t + 1, 2t, 2t + 1. group counts those of the pass, in_tile those of the tile. of_rows, of_group: what
    `Finish.load_rows` and `load_group` gave."""

    m_tile: ch.Expr
    group: ch.Expr
    in_tile: ch.Expr
    values: tuple[Any, Any, Any, Any]
    of_rows: Any = None
    of_group: Any = None


class Finish:
    """What becomes of the sums of a tile. All calls are the consumer role's, by whole warps. multiplier: of sums that
    are added to something. is_pushed: what it stores is this GPU's alone, and warps that push bring it to others."""

    multiplier: float = 1.0
    is_pushed: bool = False

    @property
    def name(self) -> str:
        """What the text tells functions of it by: those of StoreHeads are `..._of_heads`."""
        words = re.findall(r"[A-Z][a-z]*", type(self).__name__)
        return "_".join(words[words[0] == "Store" and len(words) > 1 :]).lower()

    @property
    def scales_sums(self) -> bool:
        """Whether sums that are added to something are multiplied before."""
        return self.multiplier != 1

    def scaled_sum(self, value: Any, in_tile: Any, index: Any) -> Any:
        """Accumulator `index` of a group of the tile's tokens, multiplied."""
        return value * self.multiplier

    def begin(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        """Called by all consumer warps when a tile begins."""

    def load_rows(self, m_tile: ch.Expr) -> Any:
        """Called for every M-tile that there is before its groups are: load what they share."""

    def load_rows_of(self, m_tile: ch.Expr, expert: ch.Expr) -> Any:
        """The same of an expert's M-tile."""
        return self.load_rows(m_tile)

    def load_group(self, m_tile: ch.Expr, group: ch.Expr) -> Any:
        """Called for some groups of tokens before the first of them is finished, so that what is loaded for them is
        waited for once: no load passes a store that the compiler cannot tell from it."""

    def look(self, sums: Sums) -> None:
        """Called for every M-tile that there is and each group of tokens, before any is finished, if `looks`."""

    def has_looked(self) -> None:
        """Called by all consumer warps between the last `look` and the first `finish`, if `looks`."""

    @property
    def looks(self) -> bool:
        """Whether the sums are looked at twice."""
        return False

    def finish(self, sums: Sums) -> None:
        """Called for every M-tile that there is and each group of tokens."""
        raise NotImplementedError

    def end(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        """Called by all consumer warps when the tile is finished."""


@dataclass(frozen=True, eq=False)
class Given:
    """Where the operands of a product lie: its weights, in the packed ones (u8) at an offset (u64); its input in token
    order (u8), and what the sums are added to, in accumulator order (f32), if anything. parts: of k, each with tiles of
    its own. height: M-tiles of a tile, where it has fewer than there is room for. tiles: of slots, where weights and
    input are those of experts. ranked: what they made, where that is to be added."""

    packed: ch.Expr
    offset: ch.Expr
    input: ch.Expr
    residual: ch.Expr | None = None
    parts: int = 1
    height: int | None = None
    tiles: ExpertTiles | None = None
    ranked: Ranked | None = None

    @property
    def weights(self) -> ch.Expr:
        return self.packed + self.offset


@dataclass(frozen=True, eq=False)
class Ranked:
    """What experts made: rows, as `StoreBySlot` has them, of `width`, of the slots (u32 [token][rank]) of a token's
    `chosen` experts. biases: of the experts' rows, bf16 [expert][bias_width] from the first row of this GPU on, which
    count as the rows do: times the weight (f32 [token][rank]) of the expert (u32 [token][rank]); None without."""

    slots: ch.Expr
    rows: ch.Expr
    width: int
    chosen: int
    experts: ch.Expr | None = None
    weights: ch.Expr | None = None
    biases: ch.Expr | None = None
    bias_width: int = 0


@dataclass(frozen=True, eq=False)
class Case:
    """A product as the warpgroups see it. phase: in which of the phases that share their code. Cases with the same
    `finish` share it. The sums of part p of M-tile m are finished as those of M-tile p * m_tiles + m."""

    matrix: MatrixLayout
    given: Given
    finish: Finish
    phase: int = 0

    @property
    def adds(self) -> bool:
        """Whether its sums are added to something."""
        return self.given.residual is not None

    @property
    def k_tiles(self) -> int:
        """Of a part, of 32 columns."""
        return PassPlan.vector_tiles(self.matrix) // self.given.parts


@dataclass(frozen=True, eq=False)
class TilePlace:
    """A warp's M-tile of a tile, how many there are, and the tile's tokens, or the slots in their place; how many
    M-tiles of earlier parts are counted before."""

    m_tile: Any
    m_tiles: Any
    token_tile: Any
    before: Any = 0
    slots: SlotTile | None = None


def row_tile_and_part(index: ch.Expr, parts: Any) -> tuple[Any, Any]:
    """The parts of a row of tiles lie side by side."""
    return (index, 0) if isinstance(parts, int) and parts == 1 else (index // parts, index % parts)


def of_phase(phase: ch.Expr | None, values: Mapping[int, int]) -> Any:
    """The value of the present phase; a number where all have the same."""
    (_, chosen), *others = values.items()
    if len(set(values.values())) == 1 or phase is None:
        return chosen
    picked: Any = ty.u32(chosen)
    for index, value in others:
        picked = ch.select(phase == index, ty.u32(value), picked)
    return picked


def by_finish(cases: Sequence[Case]) -> list[tuple[Finish, list[Case]]]:
    """The cases that share a way to finish."""
    finishes = {id(case.finish): case.finish for case in cases}
    return [(finish, [case for case in cases if case.finish is finish]) for finish in finishes.values()]


def by_format(cases: Sequence[Case]) -> list[tuple[TileFormat, list[Case]]]:
    """The cases whose weights are in one format."""
    formats = dict.fromkeys(case.matrix.format for case in cases)
    return [(format, [case for case in cases if case.matrix.format == format]) for format in formats]


def in_phases(phase: ch.Expr | None, its: Sequence[Case], cases: Sequence[Case]) -> ch.if_:
    return if_one_of(phase, [case.phase for case in its], [case.phase for case in cases])


def if_one_of(phase: ch.Expr | None, numbers: Sequence[int], there_are: Sequence[int]) -> ch.if_:
    """If the present phase is one of `numbers`; nothing to ask where they are all that there are."""
    if phase is None or len(numbers) == len(there_are):
        return ch.if_(True)
    return ch.if_(is_one_of(phase, numbers))


def is_one_of(phase: ch.Expr | None, numbers: Sequence[int]) -> Any:
    """Whether the present phase is one of `numbers`; with none of them, or no phases, whether there are any."""
    if phase is None or not numbers:
        return bool(numbers)
    is_one = phase == numbers[0]
    for index in numbers[1:]:
        is_one = is_one | (phase == index)
    return is_one
