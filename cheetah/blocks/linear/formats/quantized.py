"""What the quantised formats share: 16 x 128 codes a K-tile, sums that are scaled, and a factor a row at the end.

Codes become bf16 numbers exactly, by bits, and are multiplied by the bf16 vector on tensor cores; scales come after the
products, in float32. So nothing but the order of the sums is rounded. (Codes that are scaled first and rounded to bf16
would be a thousand times less exact.) The bits of a code in the lowest places of a bf16 are a number, mostly a
subnormal one, that is the code times a power of two: `smaller_by`. Tensor cores take it as it is; that the product does
not become too small, the vector is raised (`RAISED_BY`), and the row's factor takes both back.

An `mma` waits for the one before it if both add to the same sums: so the four parts of a tile have sums of their own,
unless there are several groups of columns to work on in turn. The stage is told once a chunk what has been read, so
that the loads of a tile can be issued before the tile before it is done with.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
from cheetah.blocks.linear.fragments import Activations, Beside, WholeRead
from cheetah.lang import prim, ty
from cheetah.plan.formats import M_TILE_ROWS, QUANTIZED_COLUMNS, VECTOR_COLUMNS, QuantizedTiles

PARTS = QUANTIZED_COLUMNS // VECTOR_COLUMNS
"""Parts of a tile that each need 8 activations of a lane."""
CHAINS = 4
"""So many `mma` in flight at least: each takes about as long as issuing four."""


class QuantizedFragments(WholeRead):
    """Tiles packed by `cheetah.models.formats.quantized_tiles`. Lane 4g + t works on rows g and g + 8."""

    format: QuantizedTiles
    codes_smaller_by = 0
    """The power of two that codes lack as the numbers that are multiplied."""
    second_factor = 1
    """How many times too large the codes of every second pair are beside the others."""
    smaller_by = 0
    """The power of two that sums lack, by what codes and vector are."""

    @ch.inline
    def finish_rows(self, tiles: int, columns: Columns, sums: Any, numbers: Beside | None = None) -> None:
        low, high = self.row_factors(tiles)
        for group in range(columns.tiles):
            for index in range(4):
                sums[group][index] = sums[group][index] * (low if index < 2 else high)
        if numbers is not None:
            numbers.finish()

    @ch.inline
    def row_factors(self, tiles: int) -> tuple[Any, Any]:
        """Of rows g and g + 8, behind the last of so many tiles of the stage."""
        factors = ch.reinterpret(ty.ptr(ty.f32), self.tiles + int(tiles) * self.format.tile_bytes)
        row = self.lane // 4
        low = factors[row]
        high = factors[row + M_TILE_ROWS // 2]
        self.read(prim.float_bits(low))
        self.read(prim.float_bits(high))
        return (low * 2.0**self.smaller_by, high * 2.0**self.smaller_by) if self.smaller_by else (low, high)

    def exact_scales(self, first: Any, index: int) -> tuple[Any, Any] | None:
        """The scales of group `index` of the tile, of rows g and g + 8, as pairs of bf16 (u32), where a code times
        them is a bf16 number; else None."""
        return None

    def read(self, word: ch.Expr) -> None:
        """A load from the stage gave this word (u32)."""
        self.have_read ^= word


class ChainedFragments(QuantizedFragments):
    """Codes that become bf16 numbers."""

    parts_of_load = 1
    """Parts whose codes come with one load of 16 bytes a lane."""

    @property
    def scaled_groups(self) -> int:
        """Groups of a tile's columns whose products are scaled."""
        return self.format.groups

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        first = self.tiles + tile * self.format.tile_bytes
        units = activations.units
        self.load(first)
        groups = self.scaled_groups
        parts = PARTS // groups
        for index in range(groups):
            of_group = range(index * parts, (index + 1) * parts)
            scales = self.scales(first, index)
            for group, chains in enumerate(self._multiply_parts(of_group, activations, units)):
                totals = [sum_of([chain[number] for chain in chains]) for number in range(4)]
                numbers = self.beyond_zero(activations, first, index, group, totals)
                for number, value in enumerate(numbers):
                    total = sums[group][number]
                    scaled = None if scales is None else scales[number // 2]
                    sums[group][number] = total + value if scaled is None else prim.fma_f32(scaled, value, total)

    def load(self, first: ch.Expr) -> None:
        """Load the codes of the tile that begins at `first`."""
        codes = ch.reinterpret(ty.ptr(ty.u32x4), first)
        loads = range(PARTS // self.parts_of_load)
        self.words = [ch.const(ty.u32x4, codes[self.lane + index * 32], name="words") for index in loads]
        for words in self.words:
            self.read(words.x)
        self.begin_parts(first, 0)

    def begin_parts(self, first: Any, part: int) -> None:  # noqa: B027 - most codes say all
        """The parts whose codes are loaded are those from number `part` on of the tile whose others lie by `first`."""

    @abstractmethod
    def codes_of(self, part: int) -> tuple[Any, Any]:
        """A operands of the codes of a part: of this lane's first four columns, and of its others."""

    @abstractmethod
    def scales(self, first: Any, index: int) -> tuple[Any, Any] | None:
        """The scales of group `index` of the tile, of rows g and g + 8; None: the rows' factors say all."""

    def excess(self, first: ch.Expr, index: int) -> Any:
        """The A operand of the zero points of group `index` with the opposite sign; None: codes say all."""
        return None

    def beyond_zero(
        self, activations: Activations, first: ch.Expr, index: int, group: int, totals: list[Any]
    ) -> list[Any]:
        """The sums of this lane's four products of group `index`, with what zero points take away."""
        return totals

    def _multiply_parts(self, parts: range, activations: Activations, units: ch.Expr) -> list[list[Any]]:
        """[groups of columns][chains] sums of the parts."""
        groups = activations.columns.tiles
        count = max(1, min(len(parts), CHAINS // groups))
        chains = [[ch.array(ty.f32, 4, zero=True, name="products") for _ in range(groups)] for _ in range(count)]
        for part in parts:
            left, right = self.codes_of(part)
            for group, products in enumerate(chains[part % count]):
                values = activations.operand(units, group, part)
                prim.mma_bf16(products, left, values.x, values.y)
                prim.mma_bf16(products, right, values.z, values.w)
        return [list(of_group) for of_group in zip(*chains, strict=True)]


def sum_of(values: Sequence[Any]) -> Any:
    """All of them, in order."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
