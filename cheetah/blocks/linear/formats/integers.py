"""Weights of 4 and 8 bits: the low bits of a bf16 near 128 (or 2048) are a nibble, so one LOP3 makes two numbers.

bf16 holds 128 .. 143 exactly: the nibble q of a word whose upper bits are those of 128 is the number 128 + q. What is
too much (128 + zero point) goes through the same tensor cores with the opposite sign: another `mma` whose weights are
all -(128 + z). It costs less than sums of the vector would, and the rounding of the large numbers cancels.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.formats.quantized import PARTS, QuantizedFragments
from cheetah.blocks.linear.fragments import Activations
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


class IntegerFragments(QuantizedFragments):
    """The groups of a tile: their scales, their zero points, and what is too much."""

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        first = self.begin_tile(tile)
        groups, format = activations.columns.tiles, self.format
        units = activations.units
        parts = PARTS // format.groups
        for number in range(format.groups):
            excess = self._excess(first, number)
            of_group = range(number * parts, (number + 1) * parts)
            if format.group_columns is None:
                self._multiply_parts(first, of_group, activations, units, excess, sums)
            else:
                with self.scaled(sums, groups, self._scales(first, number)) as products:
                    self._multiply_parts(first, of_group, activations, units, excess, products)
        self.end_tile()

    def _multiply_parts(
        self, first: Any, parts: range, activations: Activations, units: Any, excess: list[Any], sums: Any
    ) -> None:
        for part in parts:
            left, right = self.fragments_of_part(first, part)
            for group, values in self.operands(activations, units, part):
                for fragment in (*left, *excess):
                    prim.mma_bf16(sums[group], fragment, values.x, values.y)
                for fragment in (*right, *excess):
                    prim.mma_bf16(sums[group], fragment, values.z, values.w)

    def fragments_of_part(self, first: Any, part: int) -> tuple[list[Any], list[Any]]:
        """The A operands whose sum are the codes of a part and what is too much: of this lane's first four columns, and
        of its others."""
        raise NotImplementedError

    def excess_of(self, zero_point: Any) -> list[Any]:
        """The words whose sum takes away what is too much, for the zero point of a row (u32)."""
        raise NotImplementedError

    def middle_excess(self) -> list[int]:
        """The same where every zero point is the middle code."""
        raise NotImplementedError

    def _excess(self, first: Any, number: int) -> list[Any]:
        """A operands of a group that take away what is too much."""
        if not self.format.is_asymmetric:
            return [make_fragment(*(word,) * 4, name="excess") for word in self.middle_excess()]
        zero_points = ch.reinterpret(ty.ptr(ty.u16), first + (self.format.zero_points_at + number * ZERO_POINT_BYTES))
        pair = self.read(ch.const(ty.u32, ty.u32(zero_points[self.lane // 4]), name="zero_points"))
        of_rows = zip(self.excess_of(pair & 0xFF), self.excess_of(pair >> 8), strict=True)
        return [make_fragment(low, high, low, high, name="excess") for low, high in of_rows]

    def _scales(self, first: Any, number: int) -> tuple[Any, Any]:
        """Of rows g and g + 8."""
        scales = ch.reinterpret(ty.ptr(ty.u32), first + (self.format.scales_at + number * INTEGER_SCALE_BYTES))
        pair = self.read(ch.const(ty.u32, scales[self.lane // 4], name="scale_pair"))
        low = ch.const(ty.f32, prim.f16x2_low(pair), name="scale")
        high = ch.const(ty.f32, prim.f16x2_high(pair), name="next_scale")
        return low, high


class Int4Fragments(IntegerFragments):
    """A word is 8 columns of a row: nibble j column 2j, nibble j + 4 column 2j + 1. One load has two parts."""

    def fragments_of_part(self, first: Any, part: int) -> tuple[list[Any], list[Any]]:
        if part % 2 == 0:
            words = ch.reinterpret(ty.ptr(ty.u32x4), first)[self.lane + part // 2 * 32]
            self.read(words.x)
            self._second = words.z, words.w
            return self._fragments(words.x, words.y)
        return self._fragments(*self._second)

    def _fragments(self, row: Any, next_row: Any) -> tuple[list[Any], list[Any]]:
        def fragment(number: int) -> Any:
            pairs = [nibbles(word, number + more, UNITS) for more in range(2) for word in (row, next_row)]
            return make_fragment(*pairs)

        return [fragment(0)], [fragment(2)]

    def excess_of(self, zero_point: Any) -> list[Any]:
        return [zero_point * BOTH_HALVES | (UNITS | NEGATIVE)]

    def middle_excess(self) -> list[int]:
        return [UNITS | NEGATIVE | MIDDLE_NIBBLE * BOTH_HALVES]


class Int8Fragments(IntegerFragments):
    """A word is 4 columns of a row: bytes 0 and 2 the first two, bytes 1 and 3 the others; the nibbles of each go
    through the tensor cores by themselves."""

    def fragments_of_part(self, first: Any, part: int) -> tuple[list[Any], list[Any]]:
        words = ch.reinterpret(ty.ptr(ty.u32x4), first)[self.lane + part * 32]
        self.read(words.x)
        return self._fragments(words.x, words.y), self._fragments(words.z, words.w)

    def _fragments(self, row: Any, next_row: Any) -> list[Any]:
        def fragment(nibble: int, magic: int) -> Any:
            pairs = [nibbles(word, nibble + more, magic) for more in (0, 2) for word in (row, next_row)]
            return make_fragment(*pairs)

        return [fragment(0, UNITS), fragment(1, SIXTEENS)]

    def excess_of(self, zero_point: Any) -> list[Any]:
        low, high = zero_point & 0xF, zero_point >> 4
        return [low * BOTH_HALVES | (UNITS | NEGATIVE), high * BOTH_HALVES | (SIXTEENS | NEGATIVE)]

    def middle_excess(self) -> list[int]:
        # 128 + 2048 + 128, which is one bf16
        return [SIXTEENS | NEGATIVE | 2 * MIDDLE_NIBBLE * BOTH_HALVES]


def nibbles(word: Any, number: int, magic: int) -> Any:
    """Nibble `number` of each half of a word, as bf16 numbers that are `magic` with it at the end."""
    return ((word >> 4 * number if number else word) & NIBBLES) | magic


def make_fragment(row: Any, next_row: Any, row_behind: Any, next_row_behind: Any, name: str = "fragment") -> Any:
    """An A operand: two columns of row g and of row g + 8, then the two columns behind them."""
    return ch.const(ty.u32x4, prim.make_u32x4(row, next_row, row_behind, next_row_behind), name=name)
