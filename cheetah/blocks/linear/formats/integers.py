"""Weights of 4 and 8 bits as bf16 numbers: a code in the lowest bits of one is the code times 2^-133, up to 255.

So an AND makes two numbers of a word. Nibbles that lie 4 bits higher are 16 times too large, which the vector takes
back (STAGGERED). What is too much, the zero point, is taken away behind the products, times the group's sum of the
vector (see `vector_sums`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.formats.quantized import PARTS, ChainedFragments, QuantizedFragments, sum_of
from cheetah.blocks.linear.formats.vector_sums import keep_sums, kept_sums
from cheetah.blocks.linear.fragments import Activations
from cheetah.lang import prim, ty
from cheetah.plan.formats import INTEGER_SCALE_BYTES, RAISED_BY, ZERO_POINT_BYTES

LOW_NIBBLES, HIGH_NIBBLES = ch.bits("LOW_NIBBLES", 0x000F000F), ch.bits("HIGH_NIBBLES", 0x00F000F0)
LOW_BYTES = ch.bits("LOW_BYTES", 0x00FF00FF)
"""Of each half of a word."""
NEGATIVE, BOTH_HALVES = ch.bits("NEGATIVE", 0x80008000), ch.bits("BOTH_HALVES", 0x00010001)
MIDDLE_NIBBLE, MIDDLE_BYTE = 8, 128
CODES_SMALLER_BY = 133
"""The last bit of a bf16 stands for 2^-133."""


class IntegerFragments(ChainedFragments):
    """The groups of a tile: their scales, their zero points, and what is too much."""

    middle: int
    """The zero point where there is none for each group."""
    codes_smaller_by = CODES_SMALLER_BY
    smaller_by = CODES_SMALLER_BY - RAISED_BY

    def scales(self, first: ch.Expr, index: int) -> tuple[Any, Any] | None:
        if self.format.group_columns is None:
            return None
        return group_scales(self, first, index)

    @classmethod
    @ch.inline
    def sum_vectors(cls, activations: Activations, lane: ch.Expr, format: Any) -> None:
        ones, units = cls._of_one_code((1, 1), 0, "ones"), activations.units
        parts = PARTS // format.groups
        for index in range(format.groups):
            for group in range(activations.columns.tiles):
                chains = [ch.array(ty.f32, 4, zero=True, name="vector_sums") for _ in range(parts)]
                for part, products in enumerate(chains):
                    values = activations.operand(units, group, index * parts + part)
                    prim.mma_bf16(products, ones, values.x, values.y)
                    prim.mma_bf16(products, ones, values.z, values.w)
                of_columns = [sum_of([products[column] for products in chains]) for column in range(2)]
                keep_sums(activations, index, group, lane, of_columns)

    def beyond_zero(
        self, activations: Activations, first: ch.Expr, index: int, group: int, totals: list[Any]
    ) -> list[Any]:
        points = [float(one) if isinstance(one, int) else ty.f32(one) for one in self._points(first, index)]
        kept = kept_sums(activations, index, group, self.lane)
        of_columns = kept.x, kept.y
        taken = [(-points[number // 2], of_columns[number % 2]) for number in range(len(totals))]
        return [prim.fma_f32(*factors, total) for factors, total in zip(taken, totals, strict=True)]

    def excess(self, first: ch.Expr, index: int) -> ch.Expr:
        return self._of_one_code(self._points(first, index), NEGATIVE, "excess")

    def _points(self, first: ch.Expr, index: int) -> tuple[Any, Any]:
        """The zero points of group `index`, of rows g and g + 8 (u32): the middle where groups have none."""
        if not self.format.is_asymmetric:
            return self.middle, self.middle
        pair = group_zero_points(self, first, index)
        return pair & 0xFF, pair >> 8

    @abstractmethod
    def codes_of(self, part: int) -> tuple[Any, Any]:
        """A operands of the codes of a part: of this lane's first four columns, and of its others."""

    @classmethod
    def _of_one_code(cls, of_rows: tuple[Any, Any], sign: int, name: str) -> ch.Expr:
        """The A operand whose codes are all the same in rows g, and in rows g + 8."""
        pairs = [(code, factor) for factor in (1, cls.second_factor) for code in of_rows]
        return make_fragment([cls._twice(code, factor, sign, name) for code, factor in pairs], name)

    @staticmethod
    def _twice(code: Any, factor: int, sign: int, name: str) -> Any:
        """A code, so many times as large, in both halves of a word."""
        word = code * (BOTH_HALVES * factor) | sign
        return ch.bits(f"{name}_of_{code * factor}".upper(), word) if isinstance(word, int) else word


class Int4Fragments(IntegerFragments):
    """A word is 8 columns of a row: nibble j column 2j, nibble j + 4 column 2j + 1."""

    parts_of_load = 2
    middle = MIDDLE_NIBBLE
    second_factor = 16

    def codes_of(self, part: int) -> tuple[Any, Any]:
        rows = words_of_part(self.words, part)
        low, high = (make_fragment(nibbles(*(row >> shift if shift else row for row in rows))) for shift in (0, 8))
        return low, high


class Int8Fragments(IntegerFragments):
    """A word is 4 columns of a row: bytes 0 and 2 the first two, bytes 1 and 3 the others."""

    middle = MIDDLE_BYTE

    def codes_of(self, part: int) -> tuple[Any, Any]:
        words = self.words[part]
        return self._fragment(words.x, words.y), self._fragment(words.z, words.w)

    def _fragment(self, *rows: Any) -> ch.Expr:
        return make_fragment([(row >> shift if shift else row) & LOW_BYTES for shift in (0, 8) for row in rows])


def words_of_part(words: Sequence[Any], part: int) -> tuple[Any, Any]:
    """The words of 4-bit codes that a part has of rows g and g + 8."""
    of_pair = words[part // 2]
    return (of_pair.x, of_pair.y) if part % 2 == 0 else (of_pair.z, of_pair.w)


def group_scales(tiles: QuantizedFragments, first: ch.Expr, index: int) -> tuple[Any, Any]:
    """The scales of group `index` of the tile at `first`, of rows g and g + 8."""
    pairs = ch.reinterpret(ty.ptr(ty.u32), first + (tiles.format.scales_at + index * INTEGER_SCALE_BYTES))
    pair = ch.const(ty.u32, pairs[tiles.lane // 4], name="scale_pair")
    tiles.read(pair)
    return prim.f16x2_low(pair), prim.f16x2_high(pair)


def group_zero_points(tiles: QuantizedFragments, first: Any, index: int) -> ch.Expr:
    """Its zero points: that of row g in the lower byte, that of row g + 8 above (u32)."""
    pairs = ch.reinterpret(ty.ptr(ty.u16), first + (tiles.format.zero_points_at + index * ZERO_POINT_BYTES))
    pair = ch.const(ty.u32, ty.u32(pairs[tiles.lane // 4]), name="zero_points")
    tiles.read(pair)
    return pair


def nibbles(*rows: Any) -> list[Any]:
    """The lower two nibbles of each half of the rows' words, as bf16 numbers: the lowest of all, then the others."""
    return [row & mask for mask in (LOW_NIBBLES, HIGH_NIBBLES) for row in rows]


def make_fragment(words: Sequence[Any], name: str = "fragment") -> ch.Expr:
    """An A operand: two columns of row g and of row g + 8, then the two columns behind them."""
    return ch.const(ty.u32x4, prim.make_u32x4(*words), name=name)
