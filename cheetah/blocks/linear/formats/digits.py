"""4-bit weights by the integer tensor cores, exactly: a vector's elements as integers of 18 bits, cut into digits.

The elements of a K-tile are divided by a power of two, so that the largest has 18 bits; X is the nearest integer. A
byte of weights holds two columns, 16 qh + ql, and the products of both are

    16 (qh Xh + ql Xl) = byte * Xh + ql * (16 Xl - Xh)

so the loaded words are one A operand as they are, and their lower nibbles the other: one instruction for 8 weights.
Xh and 16 Xl - Xh are each three balanced digits of base 256, signed bytes: digit d of token n rides in column 2d + n of
the eight columns of an `mma`, so a second token costs the product nothing. The sums are exact; they become floats where
a group is scaled, and the digits' sums are put together at the end of an M-tile. What the zero point takes away are the
same products with all weights 1.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import UNIT, Columns
from cheetah.blocks.linear.formats.integers import MIDDLE_NIBBLE, group_scales, group_zero_points
from cheetah.blocks.linear.formats.quantized import QuantizedFragments
from cheetah.blocks.linear.formats.sizes import BIAS, EXPONENT_AT, exponent_of_warp, power_of_two, stored_power
from cheetah.blocks.linear.fragments import Activations, Beside
from cheetah.blocks.patterns import HIGH_HALVES, LOW_HALVES
from cheetah.lang import prim, ty
from cheetah.plan.formats import DIGIT_COUNT, DIGIT_UNITS, QUANTIZED_COLUMNS

LOWER_NIBBLES = ch.bits("LOWER_NIBBLES", 0x0F0F0F0F)
BYTES_OF_ONES, LOWER_ONES = ch.bits("BYTES_OF_ONES", 0x11111111), ch.bits("LOWER_ONES", 0x01010101)
"""Two weights of 1 in each byte, and their lower nibbles."""
HIGH_COLUMNS, LOW_COLUMNS = (2, 6, 3, 7), (0, 4, 1, 5)
"""Which of a word's 8 columns is in the upper and in the lower nibble of each of its bytes."""
HALVES = 2
"""Of a tile: an `mma` has 32 bytes of a row, 64 columns."""
HALF_COLUMNS = QUANTIZED_COLUMNS // HALVES
HALF_UNITS = DIGIT_COUNT * 4
"""16-byte units of the digits of half a tile and one token: for each digit and lane of four one."""
TILE_LANES = QUANTIZED_COLUMNS // UNIT
"""Neighbouring lanes that convert the elements of a tile and token, 8 each."""
DIGIT_BYTES, NUMBER_BYTES = DIGIT_UNITS * 16 // TILE_LANES, 16
"""Of a tile's digits and power of two, for each unit that they are made of; of the unit itself."""
WARP = 32
ELEMENT_BITS, PLAIN_BITS = 18, 21
BALANCE = ch.bits("BALANCE", 0x80808080)
"""What flips bytes that are 128 too large into two's complement."""
ROUND_HIGH, ROUND_LOW = float(2**23 + 0x408080), float(2**23 + 0x3C1010)
"""A float to which 2^23 and more is added ends in the nearest integer, here with what balances digits already added:
the lower two bytes of Xh + 0x408080 are digits 0 and 1, 128 too large each, the third is 64 more than digit 2. 16 times
0x3C1010 less 0x408080 is 0x3808080: so the bytes of 16 Xl - Xh are all 128 too large."""
TOP_OF_HIGH = ch.bits("TOP_OF_HIGH", 0x40404040)
"""What digit 2 of Xh still lacks of 128."""

LOW_BYTES_OF_PAIR, TOP_BYTES_OF_PAIR = ch.bits("LOW_BYTES_OF_PAIR", 0x5140), ch.bits("TOP_BYTES_OF_PAIR", 0x6262)
"""Of two words: their bytes 0 side by side and their bytes 1, and their bytes 2 twice."""


class DigitFragments(QuantizedFragments):
    """int4 tiles of every group, for one or two tokens."""

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        first = self.tiles + tile * self.format.tile_bytes
        codes = ch.reinterpret(ty.ptr(ty.u32x4), first)
        digits, tokens = activations.units, activations.columns.limit
        powers = self._powers(digits, tokens)
        loads = self._load(codes, digits, tokens)
        for group in range(self.format.groups):
            products = ch.array(ty.i32, 4, zero=True, name="products")
            ones = ch.array(ty.i32, 4, zero=True, name="ones")
            for words, lower, values in self._operands(loads, group):
                prim.mma_u8_s8(products, words, values[0], values[1])
                prim.mma_u8_s8(ones, _all(BYTES_OF_ONES), values[0], values[1])
                prim.mma_u8_s8(products, lower, values[2], values[3])
                prim.mma_u8_s8(ones, _all(LOWER_ONES), values[2], values[3])
            self._add(first, group, powers, products, ones, sums[0])

    def _powers(self, digits: ch.Expr, tokens: int) -> list[Any]:
        """Of every token, the power of two behind its digits."""
        behind = ch.reinterpret(ty.ptr(ty.f32), digits) + HALVES * HALF_UNITS * tokens * 4
        return [ch.const(ty.f32, behind[token], name="power") for token in range(tokens)]

    def _load(self, codes: ch.Expr, digits: ch.Expr, tokens: int) -> list[tuple[Any, Any, Any]]:
        """Of each half of the tile: the codes, their lower nibbles, and the digits of this lane's column."""
        loads = []
        for half in range(HALVES):
            words = ch.const(ty.u32x4, codes[self.lane + half * 32], name="words")
            self.read(words.x)
            # Columns 6 and 7 have digits too, which nobody asks for; of a single token so have the odd ones.
            column = ch.minimum(self.lane // (8 // tokens), DIGIT_COUNT * tokens - 1)
            unit = (half * HALF_UNITS * tokens + column * 4) + self.lane % 4
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

    def _add(
        self, first: ch.Expr, group: int, powers: list[Any], products: ch.Expr, ones: ch.Expr, sums: ch.Expr
    ) -> None:
        """Rows g and g + 8 of every token, of the digit that this lane's columns are of."""
        points: tuple[Any, Any] = (ty.i32(MIDDLE_NIBBLE), ty.i32(MIDDLE_NIBBLE))
        if self.format.is_asymmetric:
            pair = group_zero_points(self, first, group)
            points = ch.cast(ty.i32, pair & 0xFF), ch.cast(ty.i32, pair >> 8)
        scales = group_scales(self, first, group) if self.format.group_columns is not None else None
        for row, point in enumerate(points):
            for token, power in enumerate(powers):
                index = 2 * row + token
                value = ty.f32(products[index] - point * ones[index])
                factor = power if scales is None else power * scales[row]
                sums[index] = prim.fma_f32(factor, value, sums[index])

    @ch.inline
    def finish_rows(self, tiles: int, columns: Columns, sums: Any, numbers: Beside | None = None) -> None:
        """The digits' sums become a number, which all four lanes of a row have then. Where each lane has a part of
        something else, that goes with its digit."""
        factors = self.row_factors(tiles)
        digit = self.lane % 4
        weight = ch.select(digit < DIGIT_COUNT, prim.bits_float((ty.u32(BIAS) + digit * 8) << EXPONENT_AT), 0.0)
        for row, factor in enumerate(factors):
            for index in range(2 * row, 2 * row + columns.limit):
                of_digit = ch.const(ty.f32, sums[0][index] * weight, name="of_digit")
                if numbers is not None:
                    part = prim.fma_f32(of_digit, factor, numbers.part(index % 2, row))
                    of_pair = ch.const(ty.f32, part + prim.shuffle_xor_f32(part, 1), name="of_pair")
                    sums[0][index] = of_pair + prim.shuffle_xor_f32(of_pair, 2)
                    continue
                of_pair = ch.const(ty.f32, of_digit + prim.shuffle_xor_f32(of_digit, 1), name="of_pair")
                sums[0][index] = (of_pair + prim.shuffle_xor_f32(of_pair, 2)) * factor


@ch.function
def store_digits(
    lane: ch.Expr, vector: ch.Expr, unit: ch.Expr, words: ch.Expr, tokens: int, with_numbers: bool = False
) -> None:
    """Unit `unit` of the vectors of so many tokens (8 bf16 elements) as digits. All lanes of a warp call it, with
    neighbouring units, lane 0 with the first of a tile; elements of one token that they have share a power of two.

    with_numbers: the units themselves, in their order, follow behind a tile's digits."""
    pairs = [getattr(words, member) for member in "xyzw"]
    within = lane % (TILE_LANES * tokens)
    token = ch.const(ty.u32, within // 4 % tokens, name="token")
    exponent = exponent_of_warp(pairs, token, tokens)
    scale = ch.const(ty.f32, power_of_two(ELEMENT_BITS - 1, exponent), name="scale")
    elements = [element for pair in pairs for element in (prim.bf16x2_low(pair), prim.bf16x2_high(pair))]
    high = [_integer(elements[column], scale, ROUND_HIGH) for column in HIGH_COLUMNS]
    low = [_integer(elements[column], scale, ROUND_LOW) for column in LOW_COLUMNS]
    of_nibbles = [ch.const(ty.u32, left * 16 - right, name="both") for left, right in zip(low, high, strict=True)]
    # No division, and a product that does not wrap, since it is signed: what units share is worked out once.
    tiles = ch.reinterpret(ty.ptr_mut(ty.u8), vector)
    unit_bytes = DIGIT_BYTES + NUMBER_BYTES if with_numbers else DIGIT_BYTES
    tile = ch.reinterpret(ty.ptr_mut(ty.u32), tiles + ch.cast(ty.i32, unit - within) * unit_bytes)
    part = within // (4 * tokens)
    half = part // HALVES * (HALF_UNITS * tokens * 4)
    place = ch.const(ty.u32, half + token * 16 + unit % 4 * 4 + part % HALVES, name="place")
    for which, numbers in enumerate((high, of_nibbles)):
        for digit, word in enumerate(_digits(numbers, TOP_OF_HIGH if which == 0 else 0)):
            tile[place + (digit * tokens * 16 + which * 2)] = word
    with ch.if_(within == token * 4):
        # and a 16th, of the formula
        tile[HALVES * HALF_UNITS * tokens * 4 + token] = stored_power(exponent, ELEMENT_BITS - 1 + 4)
    if with_numbers:
        ch.reinterpret(ty.ptr_mut(ty.u32x4), tile)[DIGIT_UNITS * tokens + within] = words


@ch.function
def store_plain_digits(lane: ch.Expr, vector: ch.Expr, unit: ch.Expr, words: ch.Expr, tokens: int) -> None:
    """The same for weights of which two of every four are there. A tile is eight rows of 16 columns for each digit and
    token, two behind one another for each 32 columns: of these the first has their groups of four 0, 4, 1 and 5, the
    second 2, 6, 3 and 7, as weights have them."""
    pairs = [getattr(words, member) for member in "xyzw"]
    within = lane % (TILE_LANES * tokens)
    token = ch.const(ty.u32, within // 4 % tokens, name="token")
    exponent = exponent_of_warp(pairs, token, tokens)
    scale = ch.const(ty.f32, power_of_two(PLAIN_BITS - 1, exponent), name="scale")
    elements = [element for pair in pairs for element in (prim.bf16x2_low(pair), prim.bf16x2_high(pair))]
    numbers = [_integer(element, scale, ROUND_HIGH) for element in elements]
    tiles = ch.reinterpret(ty.ptr_mut(ty.u8), vector)
    tile = ch.reinterpret(ty.ptr_mut(ty.u32), tiles + ch.cast(ty.i32, unit - within) * DIGIT_BYTES)
    row = within // (4 * tokens) * 2 + unit % 2
    place = ch.const(ty.u32, (row * (DIGIT_COUNT * tokens) + token) * 4 + unit % 4 // 2, name="place")
    for group in range(2):
        for digit, word in enumerate(_digits(numbers[4 * group :][:4], TOP_OF_HIGH)):
            tile[place + (digit * tokens * 4 + group * 2)] = word
    with ch.if_(within == token * 4):
        # and a 16th: codes are in the upper half of their bytes
        tile[HALVES * HALF_UNITS * tokens * 4 + token] = stored_power(exponent, PLAIN_BITS - 1 + 4)


def _integer(element: ch.Expr, scale: ch.Expr, base: float) -> ch.Expr:
    """The nearest integer and `base`, in the lower 24 bits."""
    return ch.const(ty.u32, prim.float_bits(prim.fma_f32(element, scale, base)), name="element")


def _digits(numbers: list[Any], lacks: int) -> list[Any]:
    """The words of digits 0, 1 and 2 of four numbers, a byte each. Their bytes are 128 too large, or, the upper ones,
    `lacks` less."""
    pairs = [numbers[:2], numbers[2:]]
    low = [ch.const(ty.u32, prim.byte_permute(*pair, LOW_BYTES_OF_PAIR), name="low") for pair in pairs]
    top = [ch.const(ty.u32, prim.byte_permute(*pair, TOP_BYTES_OF_PAIR), name="top") for pair in pairs]
    of_digits = ((low, LOW_HALVES), (low, HIGH_HALVES), (top, LOW_HALVES))
    words = [prim.byte_permute(*both, halves) for both, halves in of_digits]
    if lacks:
        words[2] = words[2] + lacks
    return [word ^ BALANCE for word in words]


def _members(values: ch.Expr) -> tuple[Any, ...]:
    return tuple(getattr(values, member) for member in "xyzw")


def _all(word: int) -> ch.Expr:
    return prim.make_u32x4(*(ty.u32(word),) * 4)
