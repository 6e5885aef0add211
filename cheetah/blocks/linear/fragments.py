"""What a weight format is to a product: K-tiles in a stage that are multiplied with activations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import UNITS_PER_TILE, Columns
from cheetah.blocks.ring import Stage
from cheetah.lang import ty
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import BY_WARPS, TileFormat
from cheetah.plan.index import ceil_div
from cheetah.plan.plan import COLUMNS


@dataclass(frozen=True, eq=False)
class Activations:
    """The vectors of all columns, from the K-tile's first element on, in fragment order (u32x4 units). halves: of the
    K-tile, see `MatrixLayout`; the vectors' second halves are columns behind those of the first. sums: where what is
    kept of them for zero points lies (f32), of formats that keep something."""

    columns: Columns
    units: ch.Expr
    halves: int = 1
    sums: Any = None

    @property
    def groups(self) -> int:
        """Groups of 8 columns."""
        return groups_of(self.columns.limit, self.halves)

    def operand(self, units: ch.Expr, group: int, part: Any = 0) -> ch.Expr:
        """This lane's 8 elements of the tile's 32 columns number `part`, of a column of `group` (8 columns each): that
        of lane / 4, or one that stands for it where there are fewer. `units` is this, named."""
        lane, tokens = self.columns.machine.lane, self.columns.limit * self.halves
        first = part * (UNITS_PER_TILE * tokens)
        if tokens == 1:
            return units[lane % UNITS_PER_TILE + first]
        unit = lane % (UNITS_PER_TILE * min(tokens, COLUMNS)) + group * (COLUMNS * UNITS_PER_TILE)
        return units[unit + first]


def tile_units(matrix: MatrixLayout, tokens: int) -> int:
    """16-byte units that the vectors of so many tokens beside a K-tile take, under a name in the text."""
    kind = matrix.vector_kind(tokens)
    of_kind = f"{kind.replace(' ', '_').upper()}_" if kind in BY_WARPS else ""
    return ch.named(f"{of_kind}UNITS_OF_{matrix.tile_columns}_COLUMNS", matrix.vector_units(tokens))


def groups_of(tokens: int, halves: int = 1) -> int:
    """Groups of 8 columns, each an accumulator of a product, of so many tokens' vectors in so many parts."""
    return ceil_div(tokens * halves, COLUMNS)


class Beside(ABC):
    """What is added to the sums of an M-tile's K-tiles: of each row a part in each of the four lanes of the row."""

    @abstractmethod
    def part(self, column: int, row: int) -> ch.Expr:
        """This lane's, of a column of the step and row g (0) or g + 8 (1)."""

    @abstractmethod
    def finish(self) -> None:
        """The four lanes' parts together, to the sums."""


class Held(ABC):
    """A warp's tiles of a chunk in registers, and the operands of 8 columns that they are multiplied with."""

    @abstractmethod
    def multiply(self, index: ch.Expr, sums: Any) -> None:
        """sums [chains, 4] += tile `index` of them."""

    def finish_rows(self, sums: Any) -> None:  # noqa: B027 - not every format says something of rows
        """The same as `Fragments.finish_rows`, by what `Fragments.hold_factors` brought."""


class Fragments(ABC):
    """The K-tiles of one format in a full stage, as a warp reads them. Emits code in the consumer role."""

    @classmethod
    def sum_vectors(cls, activations: Activations, lane: ch.Expr, format: Any) -> None:
        """Keep at `activations.sums` what the product of any M-tile needs of a K-tile's vectors, for zero points.
        Called by a whole warp; only for formats with `sums_bytes`."""
        raise NotImplementedError(f"weight format {format.name} has no zero points")

    def __init__(self, stage: Stage, lane: ch.Expr, format: TileFormat) -> None:
        self.stage, self.lane, self.format = stage, lane, format
        self.declare()

    @classmethod
    def chains(cls, format: TileFormat, groups: int) -> int:
        """Sums of an M-tile and group of columns that are kept side by side, so that one product need not wait for
        another; `finish_rows` adds them up."""
        return 1

    @abstractmethod
    def declare(self) -> None:
        """Name where the stage's tiles begin."""

    @abstractmethod
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        """sums [chains * groups, 4] += tile number `tile` of the stage x activations; tells the stage what it has
        read."""

    @classmethod
    def room(cls, format: TileFormat, tiles: int) -> Held | None:
        """Registers for so many tiles of a warp; None: the format's are multiplied while the stage is held."""
        return None

    def begin_holding(self) -> None:  # noqa: B027 - most have declared what they need
        """Before the first `hold` of a chunk."""

    def hold(self, tile: ch.Expr, activations: Activations, held: Any, index: ch.Expr) -> None:
        """Tile `tile` of the stage becomes number `index` of those held. Only for formats with `room`."""
        raise NotImplementedError(f"weight format {self.format.name} holds no tiles")

    def hold_factors(self, tiles: int, held: Any) -> None:  # noqa: B027 - not every format says something of rows
        """The factors behind the last of so many tiles of the stage become those that `held.finish_rows` takes."""

    def finish_chunk(self) -> None:  # noqa: B027 - most tell it tile by tile
        """Behind the last tile of a chunk: tell the stage what has been read, if nobody has."""

    def finish_rows(self, tiles: int, columns: Columns, sums: Any, numbers: Beside | None = None) -> None:
        """sums [groups of columns, 4] *= the factors of their rows, which lie behind the last `tiles` K-tiles of an
        M-tile; of several chains the first becomes the sum of all. Tells the stage what it has read. Then the sums of
        `numbers` are added. Only for formats with `factor_bytes`."""
        raise NotImplementedError(f"weight format {self.format.name} says nothing of rows")


class WholeRead(Fragments):
    """Those that tell the stage once, behind a chunk's last tile, what has been read: `have_read` depends on all of
    it."""

    @ch.inline
    def declare(self) -> None:
        tiles = self.stage.address
        have_read = ch.var(ty.u32, 0)
        self.tiles, self.have_read = tiles, have_read

    def finish_chunk(self) -> None:
        self.stage.has_read(self.have_read)
