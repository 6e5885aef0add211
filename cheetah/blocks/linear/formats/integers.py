"""Weights of 4 and 8 bits: the low bits of a bf16 near 128 (or 2048) are a nibble, so one LOP3 makes two numbers.

bf16 holds 128 .. 143 exactly: the nibble q of a word whose upper bits are those of 128 is the number 128 + q. What is
too much (128 + zero point) goes through the same tensor cores with the opposite sign: another `mma` whose weights are
all -(128 + z). It costs less than sums of the vector would, and the rounding of the large numbers cancels.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.formats.quantized import PARTS, ChainedFragments, QuantizedFragments
from cheetah.lang import prim, ty
from cheetah.plan.formats import INTEGER_SCALE_BYTES, ZERO_POINT_BYTES

NIBBLES = 0x000F000F
"""The lowest nibble of each half of a word."""
UNITS = 0x43004300
"""128 in each half: with a nibble 128 + q."""
SIXTEENS = 0x45004500
"""2048 in each half: with a nibble 2048 + 16 q."""
NEGATIVE = 0x80008000
BOTH_HALVES = 0x00010001
MIDDLE_NIBBLE = 8


class IntegerFragments(ChainedFragments):
    """The groups of a tile: their scales, their zero points, and what is too much."""

    parts_of_load: int
    """Parts whose codes come with one load of 16 bytes a lane."""

    def load(self, first: Any) -> None:
        codes = ch.reinterpret(ty.ptr(ty.u32x4), first)
        loads = range(PARTS // self.parts_of_load)
        self.words = [ch.const(ty.u32x4, codes[self.lane + number * 32], name="words") for number in loads]
        for words in self.words:
            self.read(words.x)

    def scales(self, first: Any, number: int) -> tuple[Any, Any] | None:
        self.excess = self._excess(first, number)
        if self.format.group_columns is None:
            return None
        return group_scales(self, first, number)

    def fragments_of(self, first: Any, number: int, part: int) -> tuple[list[Any], list[Any]]:
        left, right = self.codes_of(part)
        return [*left, *self.excess], [*right, *self.excess]

    @abstractmethod
    def codes_of(self, part: int) -> tuple[list[Any], list[Any]]:
        """A operands whose sum are the codes of a part and what is too much: of this lane's first four columns, and of
        its others."""

    @abstractmethod
    def excess_of(self, zero_point: Any) -> list[Any]:
        """The words whose sum takes away what is too much, for the zero point of a row (u32)."""

    @abstractmethod
    def middle_excess(self) -> list[int]:
        """The same where every zero point is the middle code."""

    def _excess(self, first: Any, number: int) -> list[Any]:
        """A operands of a group that take away what is too much."""
        if not self.format.is_asymmetric:
            return [make_fragment(*(word,) * 4, name="excess") for word in self.middle_excess()]
        pair = group_zero_points(self, first, number)
        of_rows = zip(self.excess_of(pair & 0xFF), self.excess_of(pair >> 8), strict=True)
        return [make_fragment(low, high, low, high, name="excess") for low, high in of_rows]


class Int4Fragments(IntegerFragments):
    """A word is 8 columns of a row: nibble j column 2j, nibble j + 4 column 2j + 1."""

    parts_of_load = 2

    def codes_of(self, part: int) -> tuple[list[Any], list[Any]]:
        words = self.words[part // 2]
        rows = (words.x, words.y) if part % 2 == 0 else (words.z, words.w)

        def fragment(number: int) -> Any:
            return make_fragment(*(nibbles(row, number + more, UNITS) for more in range(2) for row in rows))

        return [fragment(0)], [fragment(2)]

    def excess_of(self, zero_point: Any) -> list[Any]:
        return [zero_point * BOTH_HALVES | (UNITS | NEGATIVE)]

    def middle_excess(self) -> list[int]:
        return [UNITS | NEGATIVE | MIDDLE_NIBBLE * BOTH_HALVES]


class Int8Fragments(IntegerFragments):
    """A word is 4 columns of a row: bytes 0 and 2 the first two, bytes 1 and 3 the others; the nibbles of each go
    through the tensor cores by themselves."""

    parts_of_load = 1

    def codes_of(self, part: int) -> tuple[list[Any], list[Any]]:
        words = self.words[part]
        return self._fragments(words.x, words.y), self._fragments(words.z, words.w)

    def _fragments(self, *rows: Any) -> list[Any]:
        def fragment(nibble: int, magic: int) -> Any:
            return make_fragment(*(nibbles(row, nibble + more, magic) for more in (0, 2) for row in rows))

        return [fragment(0, UNITS), fragment(1, SIXTEENS)]

    def excess_of(self, zero_point: Any) -> list[Any]:
        low, high = zero_point & 0xF, zero_point >> 4
        return [low * BOTH_HALVES | (UNITS | NEGATIVE), high * BOTH_HALVES | (SIXTEENS | NEGATIVE)]

    def middle_excess(self) -> list[int]:
        # 128 + 2048 + 128, which is one bf16
        return [SIXTEENS | NEGATIVE | 2 * MIDDLE_NIBBLE * BOTH_HALVES]


def group_scales(tiles: QuantizedFragments, first: Any, number: int) -> tuple[Any, Any]:
    """The scales of group `number` of the tile at `first`, of rows g and g + 8."""
    pairs = ch.reinterpret(ty.ptr(ty.u32), first + (tiles.format.scales_at + number * INTEGER_SCALE_BYTES))
    pair = ch.const(ty.u32, pairs[tiles.lane // 4], name="scale_pair")
    tiles.read(pair)
    return prim.f16x2_low(pair), prim.f16x2_high(pair)


def group_zero_points(tiles: QuantizedFragments, first: Any, number: int) -> Any:
    """Its zero points: that of row g in the lower byte, that of row g + 8 above (u32)."""
    pairs = ch.reinterpret(ty.ptr(ty.u16), first + (tiles.format.zero_points_at + number * ZERO_POINT_BYTES))
    pair = ch.const(ty.u32, ty.u32(pairs[tiles.lane // 4]), name="zero_points")
    tiles.read(pair)
    return pair


def nibbles(word: Any, number: int, magic: int) -> Any:
    """Nibble `number` of each half of a word, as bf16 numbers that are `magic` with it at the end."""
    return prim.and_or_u32(word >> 4 * number if number else word, NIBBLES, magic)


def make_fragment(row: Any, next_row: Any, row_behind: Any, next_row_behind: Any, name: str = "fragment") -> Any:
    """An A operand: two columns of row g and of row g + 8, then the two columns behind them."""
    return ch.const(ty.u32x4, prim.make_u32x4(row, next_row, row_behind, next_row_behind), name=name)
