"""Symmetric codes of which two of every four columns are there, packed by `cheetah.models.formats.two_of_four_codes`.

One or two tokens multiply 4-bit codes as signed bytes, which are 16 times as large in the upper halves of theirs, by
the digits of the vector (`store_plain_digits`): integer tensor cores add exactly. Otherwise codes become bf16 numbers:
by bits 128 too large, less 136. Zero points cannot be taken away behind the products, as those of dense codes are:
which columns are there differs from row to row, so no sum of the vector says what is too much.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.formats.digits import DigitFragments
from cheetah.blocks.linear.formats.e4m3 import E4m3Fragments
from cheetah.blocks.linear.formats.integers import (
    LOW_NIBBLES,
    group_scales,
    make_fragment,
)
from cheetah.blocks.linear.formats.quantized import QuantizedFragments
from cheetah.blocks.linear.formats.two_of_four import sparse_operand
from cheetah.blocks.linear.fragments import Activations
from cheetah.lang import prim, ty
from cheetah.plan.formats import DIGIT_COUNT, SparseQuantizedTiles
from cheetah.plan.plan import COLUMNS

ZERO = ch.bits("TWICE_136", 0x43084308)
"""A code of 0 as bf16 numbers; the lowest bits are those of codes, of which two's complement flips one."""
HALVES, PARTS = 2, 2
"""Of a tile of 128 columns, and of a half: 32 columns each."""
UPPER_NIBBLES = 0xF0F0F0F0
FIRST_FOUR, OTHER_FOUR = 0x4140, 0x4342
"""Which bytes of a word, and of 0, are the codes of its two fours in the lower halves of bf16 numbers."""
OWN_AND_NEXT, NEXT_AND_OWN = 0x5410, 0x3276
"""The lower halves of two words, and the upper ones the other way round."""


class SparseCodes(QuantizedFragments):
    """A tile's codes and places."""

    format: SparseQuantizedTiles

    def load_codes(self, first: ch.Expr) -> ch.Expr:
        """16 bytes of this lane (u32x4)."""
        codes = ch.reinterpret(ty.ptr(ty.u32x4), first)
        words = ch.const(ty.u32x4, codes[self.lane], name="words")
        self.read(words.x)
        return words

    def load_places(self, first: ch.Expr, half: int = 0) -> ch.Expr:
        """A word of this lane (u32), of the 64 columns `half`."""
        of_lanes = ch.reinterpret(ty.ptr(ty.u32), first + (self.format.places_at + half * 128))
        places = ch.const(ty.u32, of_lanes[self.lane], name="places")
        self.read(places)
        return places


class SparseDigits(SparseCodes, DigitFragments):
    """int4, one or two tokens."""

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        first = self.tiles + tile * self.format.tile_bytes
        digits, tokens = activations.units, activations.columns.limit
        powers = self._powers(digits, tokens)
        words = self.load_codes(first)
        upper = [getattr(words, member) & UPPER_NIBBLES for member in "xyzw"]
        lower = [getattr(words, member) << 4 & UPPER_NIBBLES for member in "xyzw"]
        operands = [make_fragment(upper, "upper"), make_fragment(lower, "lower")]
        places = [self.load_places(first, half) for half in range(HALVES)]
        values = [self._digits(digits, half, tokens) for half in range(HALVES)]
        each = HALVES // self.format.groups
        for group in range(self.format.groups):
            products = ch.array(ty.i32, 4, zero=True, name="products")
            for half in range(group * each, (group + 1) * each):
                prim.mma_2of4_s8(products, operands[half], values[half], places[half])
            self._add_products(first, group, powers, products, sums[0])

    def _digits(self, digits: Any, half: int, tokens: int) -> ch.Expr:
        """Operand B of 64 columns: column 2d + n has digit d of token n, or of one token both have it."""
        column = ch.minimum(self.lane % COLUMNS // (2 // tokens), DIGIT_COUNT * tokens - 1)
        row = self.lane // COLUMNS + half * 4
        return ch.const(ty.u32x4, prim.load_rows_b16(digits + (row * (DIGIT_COUNT * tokens) + column)), name="values")

    def _add_products(self, first: Any, group: int, powers: list[Any], products: Any, sums: Any) -> None:
        """Rows g and g + 8 of every token, of the digit that this lane's columns are of."""
        scales = group_scales(self, first, group) if self.format.group_columns is not None else None
        for row in range(2):
            for token, power in enumerate(powers):
                index = 2 * row + token
                factor = power if scales is None else power * scales[row]
                sums[index] = prim.fma_f32(factor, ty.f32(products[index]), sums[index])


class SparseInt4(SparseCodes):
    """int4 by numbers."""

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        first = self.tiles + tile * self.format.tile_bytes
        words = self.load_codes(first)
        places = [self._by_products(self.load_places(first, half)) for half in range(HALVES)]
        spread = [
            [self._spread(getattr(words, member), four) for member in "xyzw"] for four in (FIRST_FOUR, OTHER_FOUR)
        ]
        each = HALVES // self.format.groups
        for index in range(self.format.groups):
            scales = group_scales(self, first, index) if self.format.group_columns is not None else None
            for group in range(activations.groups):
                chains = []
                for half in range(index * each, (index + 1) * each):
                    products = ch.array(ty.f32, 4, zero=True, name="products")
                    for part in range(PARTS):
                        fragment = self._fragment(spread, half, part)
                        values = sparse_operand(activations, group, half * PARTS + part)
                        prim.mma_2of4_bf16(part)(products, fragment, values, places[half])
                    chains.append(products)
                for number in range(4):
                    value = chains[0][number] if len(chains) == 1 else chains[0][number] + chains[1][number]
                    total = sums[group][number]
                    scaled = None if scales is None else scales[number // 2]
                    sums[group][number] = total + value if scaled is None else prim.fma_f32(scaled, value, total)

    @staticmethod
    def _spread(word: ch.Expr, four: int) -> ch.Expr:
        return ch.const(ty.u32, prim.byte_permute(word, ty.u32(0), four), name="spread")

    @staticmethod
    def _fragment(spread: list[list[Any]], half: int, part: int) -> ch.Expr:
        """Operand A of 32 columns: of a four its rows g and g + 8, then of the other."""
        words = [of_four[2 * part + row] for of_four in spread for row in range(2)]
        shifted = [word >> 4 if half == 0 else word for word in words]
        return make_fragment([prim.subtract_bf16x2(word & LOW_NIBBLES ^ ZERO, ty.u32(ZERO)) for word in shifted])

    def _by_products(self, places: ch.Expr) -> ch.Expr:
        """Places as products of 32 columns take them: a lane of two has those of rows g and g + 8 and of 16 columns."""
        differing = ch.const(ty.u32, (places ^ places >> 4) & 0x00F000F0, name="differing")
        apart = ch.const(ty.u32, places ^ differing ^ differing << 4, name="apart")
        sorted_ = ch.const(ty.u32, prim.byte_permute(apart, apart, 0x3120), name="sorted")
        other = prim.shuffle_xor_u32(sorted_, 1)
        halves = ch.select(self.lane % 2 == 0, ty.u32(OWN_AND_NEXT), ty.u32(NEXT_AND_OWN))
        return ch.const(ty.u32, prim.byte_permute(sorted_, other, halves), name="of_products")


class SparseE4m3(SparseCodes):
    """e4m3 with a scale a row."""

    smaller_by = E4m3Fragments.smaller_by

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        first = self.tiles + tile * self.format.tile_bytes
        words, places = self.load_codes(first), self.load_places(first)
        fragments = [E4m3Fragments.fragment(words.x, words.y), E4m3Fragments.fragment(words.z, words.w)]
        for group in range(activations.groups):
            for part, fragment in enumerate(fragments):
                prim.mma_2of4_bf16(part)(sums[group], fragment, sparse_operand(activations, group, part), places)
