"""4-bit weights by the integer tensor cores, exactly: a vector's elements as integers of 18 bits, cut into digits.

The elements of a K-tile are divided by a power of two, so that the largest has 18 bits; X is the nearest integer. A
byte of weights holds two columns, 16 qh + ql, and the products of both are

    16 (qh Xh + ql Xl) = byte * Xh + ql * (16 Xl - Xh)

so the loaded words are one A operand as they are, and their lower nibbles the other: one instruction for 8 weights.
Xh and 16 Xl - Xh are each three balanced digits of base 256, signed bytes that ride in columns 0, 2 and 4 of the eight
columns of an `mma`. The sums are exact; they become floats where a group is scaled, and the digits' sums are put
together at the end of an M-tile. What the zero point takes away are the same products with all weights 1.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import UNIT
from cheetah.blocks.linear.formats.integers import MIDDLE_NIBBLE, group_scales, group_zero_points
from cheetah.blocks.linear.formats.quantized import QuantizedFragments
from cheetah.blocks.linear.formats.sizes import BIAS, EXPONENT_AT, biased_exponent, power_of_two, stored_power
from cheetah.blocks.linear.fragments import Activations
from cheetah.lang import prim, ty
from cheetah.plan.formats import DIGIT_COUNT, DIGIT_UNITS, QUANTIZED_COLUMNS

LOWER_NIBBLES = 0x0F0F0F0F
BYTES_OF_ONES, LOWER_ONES = 0x11111111, 0x01010101
"""Two weights of 1 in each byte, and their lower nibbles."""
HIGH_COLUMNS, LOW_COLUMNS = (2, 6, 3, 7), (0, 4, 1, 5)
"""Which of a word's 8 columns is in the upper and in the lower nibble of each of its bytes."""
HALVES = 2
"""Of a tile: an `mma` has 32 bytes of a row, 64 columns."""
HALF_COLUMNS = QUANTIZED_COLUMNS // HALVES
POWER_WORD = 4 * (DIGIT_UNITS - 1)
"""The word of a tile's digits at which the power of two lies (f32)."""
TILE_LANES = QUANTIZED_COLUMNS // UNIT
"""Neighbouring lanes that convert the elements of a tile together, 8 each."""
ELEMENT_BITS = 18
ROUND_TO_INTEGER = 12582912.0
"""1.5 * 2^23: a float to which it is added ends in the nearest integer, from these bits on."""
INTEGER_ZERO = 0x4B400000
BALANCE = 0x00808080
"""Added, then flipped: makes three unsigned digits balanced ones."""


class DigitFragments(QuantizedFragments):
    """int4 tiles of every group, for one token."""

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        first = self.tiles + tile * self.format.tile_bytes
        codes = ch.reinterpret(ty.ptr(ty.u32x4), first)
        digits = activations.units
        power = ch.reinterpret(ty.ptr(ty.f32), digits)[POWER_WORD]
        loads = self._load(codes, digits)
        for group in range(self.format.groups):
            products = ch.array(ty.i32, 4, zero=True, name="products")
            ones = ch.array(ty.i32, 4, zero=True, name="ones")
            for words, lower, values in self._operands(loads, group):
                prim.mma_u8_s8(products, words, values[0], values[1])
                prim.mma_u8_s8(ones, _all(BYTES_OF_ONES), values[0], values[1])
                prim.mma_u8_s8(products, lower, values[2], values[3])
                prim.mma_u8_s8(ones, _all(LOWER_ONES), values[2], values[3])
            self._add(first, group, power, products, ones, sums[0])

    def _load(self, codes: Any, digits: Any) -> list[tuple[Any, Any, Any]]:
        """Of each half of the tile: the codes, their lower nibbles, and the digits of this lane's column."""
        loads = []
        for half in range(HALVES):
            words = ch.const(ty.u32x4, codes[self.lane + half * 32], name="words")
            self.read(words.x)
            # Columns 6 and 7 have digits too, which nobody asks for.
            unit = (half * DIGIT_COUNT * 4 + ch.minimum(self.lane // 8, DIGIT_COUNT - 1) * 4) + self.lane % 4
            values = ch.const(ty.u32x4, digits[unit], name="values")
            nibbles = (getattr(words, member) & LOWER_NIBBLES for member in "xyzw")
            lower = ch.const(ty.u32x4, prim.make_u32x4(*nibbles), name="lower")
            loads.append((words, lower, values))
        return loads

    def _operands(self, loads: list[tuple[Any, Any, Any]], group: int) -> list[tuple[Any, Any, tuple[Any, ...]]]:
        """What of the halves belongs to a group: both, one, or one with half of its digits, the others 0."""
        columns = self.format.columns // self.format.groups
        if columns >= HALF_COLUMNS:
            count = columns // HALF_COLUMNS
            return [(words, lower, _members(values)) for words, lower, values in loads[group * count :][:count]]
        words, lower, values = loads[group // 2]
        x, y, z, w = _members(values)
        zero = ty.u32(0)
        return [(words, lower, (x, zero, z, zero) if group % 2 == 0 else (zero, y, zero, w))]

    def _add(self, first: Any, group: int, power: Any, products: Any, ones: Any, sums: Any) -> None:
        """Rows g and g + 8, of the digit that this lane's even column is of."""
        points: tuple[Any, Any] = (ty.i32(MIDDLE_NIBBLE), ty.i32(MIDDLE_NIBBLE))
        if self.format.is_asymmetric:
            pair = group_zero_points(self, first, group)
            points = ch.cast(ty.i32, pair & 0xFF), ch.cast(ty.i32, pair >> 8)
        scales = group_scales(self, first, group) if self.format.group_columns is not None else None
        for number, point in ((0, points[0]), (2, points[1])):
            value = ty.f32(products[number] - point * ones[number])
            factor = power if scales is None else power * scales[number // 2]
            sums[number] = sums[number] + factor * value

    @ch.inline
    def finish_rows(self, tiles: int, groups: int, sums: Any) -> None:
        """The digits' sums become a number, which lane 4g has then, and the other three too."""
        low, high = self.row_factors(tiles)
        digit = self.lane % 4
        weight = ch.select(digit < DIGIT_COUNT, prim.bits_float((ty.u32(BIAS) + digit * 8) << EXPONENT_AT), 0.0)
        for number, factor in ((0, low), (2, high)):
            of_digit = ch.const(ty.f32, sums[0][number] * weight, name="of_digit")
            of_pair = ch.const(ty.f32, of_digit + prim.shuffle_xor_f32(of_digit, 1), name="of_pair")
            sums[0][number] = (of_pair + prim.shuffle_xor_f32(of_pair, 2)) * factor


@ch.function
def store_digits(vector: ch.Expr, unit: ch.Expr, words: ch.Expr) -> None:
    """Unit `unit` of a vector (8 bf16 elements) as digits. All lanes of a warp call it, with neighbouring units."""
    pairs = [getattr(words, member) for member in "xyzw"]
    exponent = biased_exponent(pairs, (1, 2, 4, 8))
    scale = ch.const(ty.f32, power_of_two(ELEMENT_BITS - 1, exponent), name="scale")
    elements = [
        ch.const(ty.u32, prim.float_bits(element * scale + ROUND_TO_INTEGER) - INTEGER_ZERO, name="element")
        for pair in pairs
        for element in (prim.bf16x2_low(pair), prim.bf16x2_high(pair))
    ]
    of_bytes = [elements[column] for column in HIGH_COLUMNS]
    of_nibbles = [elements[low] * 16 - elements[high] for low, high in zip(LOW_COLUMNS, HIGH_COLUMNS, strict=True)]
    tile = ch.reinterpret(ty.ptr_mut(ty.u32), vector + unit // TILE_LANES * DIGIT_UNITS)
    part = unit % TILE_LANES // 4
    place = ch.const(ty.u32, part // HALVES * (DIGIT_COUNT * 16) + unit % 4 * 4 + part % HALVES, name="place")
    for which, numbers in enumerate((of_bytes, of_nibbles)):
        for digit, word in enumerate(_digits(numbers)):
            tile[place + (digit * 16 + which * 2)] = word
    with ch.if_(unit % TILE_LANES == 0):
        # and a 16th, of the formula
        tile[POWER_WORD] = stored_power(exponent, ELEMENT_BITS - 1 + 4)


def _digits(numbers: list[Any]) -> list[Any]:
    """The words of digits 0, 1 and 2 of four numbers (two's complement of up to 23 bits), a byte each."""
    balanced = [ch.const(ty.u32, (number + BALANCE) ^ BALANCE, name="balanced") for number in numbers]
    words = []
    for digit in range(DIGIT_COUNT):
        pairs = [prim.byte_permute(*balanced[first : first + 2], digit | (4 + digit) << 4) for first in (0, 2)]
        words.append(prim.byte_permute(*pairs, 0x5410))
    return words


def _members(values: Any) -> tuple[Any, ...]:
    return tuple(getattr(values, member) for member in "xyzw")


def _all(word: int) -> Any:
    return prim.make_u32x4(*(ty.u32(word),) * 4)
