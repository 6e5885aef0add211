"""What the quantised formats share: 16 x 128 codes a K-tile, sums that are scaled, and a factor a row at the end.

Codes become bf16 numbers exactly, by bits, and are multiplied by the bf16 vector on tensor cores; scales come after the
products, in float32. So nothing but the order of the sums is rounded. (Codes that are scaled first and rounded to bf16
would be a thousand times less exact.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.fragments import Activations, Fragments
from cheetah.lang import prim, ty
from cheetah.plan.formats import M_TILE_ROWS, QUANTIZED_COLUMNS, VECTOR_COLUMNS, QuantizedTiles

PARTS = QUANTIZED_COLUMNS // VECTOR_COLUMNS
"""Parts of a tile that each need 8 activations of a lane."""


class QuantizedFragments(Fragments):
    """Tiles packed by `cheetah.models.formats.quantized_tiles`. Lane 4g + t works on rows g and g + 8."""

    format: QuantizedTiles

    @ch.inline
    def declare(self) -> None:
        tiles = self.stage.address
        self.tiles = tiles

    @ch.inline
    def finish_rows(self, tiles: int, groups: int, sums: Any) -> None:
        factors = ch.reinterpret(ty.ptr(ty.f32), self.tiles + tiles * self.format.tile_bytes)
        row = self.lane // 4
        low, high = factors[row], factors[row + M_TILE_ROWS // 2]
        for group in range(groups):
            for number in range(4):
                sums[group][number] = sums[group][number] * (low if number < 2 else high)
        self.stage.has_read(prim.float_bits(low) ^ prim.float_bits(high))

    def begin_tile(self, tile: ch.Expr) -> Any:
        """The first byte of a tile; the words that were read of it are counted from here."""
        self._words: list[Any] = []
        return self.tiles + tile * self.format.tile_bytes

    def end_tile(self) -> None:
        """Tell the stage what was read."""
        word = self._words[0]
        for other in self._words[1:]:
            word = word ^ other
        self.stage.has_read(word)

    def read(self, word: Any) -> Any:
        """A word (u32) that a load from the stage gave."""
        self._words.append(word)
        return word

    def operands(self, activations: Activations, units: Any, part: int) -> Iterator[tuple[int, Any]]:
        """(group of columns, this lane's 8 elements) of a part of the tile."""
        for group in range(activations.columns.tiles):
            yield group, activations.operand(units, group, part)

    @contextmanager
    def scaled(self, sums: Any, groups: int, scales: tuple[Any, Any]) -> Iterator[Any]:
        """Sums [groups, 4] of a group of weights: what the body adds to them counts times the scales (of rows g and
        g + 8)."""
        of_group = ch.array(ty.f32, groups, 4, zero=True, name="of_group")
        yield of_group
        for group in range(groups):
            for number in range(4):
                sums[group][number] = sums[group][number] + scales[number // 2] * of_group[group][number]
