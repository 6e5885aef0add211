"""Elements of a vector brought to one size: how large the largest of some lanes is, and powers of two as floats."""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.lang import prim, ty

BIAS, EXPONENT_AT = ch.named("EXPONENT_BIAS", 127), 23
SIZES_OF_PAIR, NAN = ch.bits("SIZES_OF_PAIR", 0x7FFF7FFF), ch.bits("NAN_BITS", 0x7FC00000)
LEAST_EXPONENT, NO_NUMBER = 32, ch.named("NO_NUMBER", 255)
"""Biased exponents: below the first all elements are as good as zero, the other is that of infinity and NaN."""


def biased_exponent(pairs: list[Any], masks: tuple[int, ...]) -> ch.Expr:
    """The biased exponent of the largest bf16 element of the words `pairs` of all lanes that the masks reach, or
    LEAST_EXPONENT. Called by whole warps."""
    most = ch.var(ty.u32, _largest(pairs), name="largest")
    for mask in masks:
        most.set(ch.maximum(most, prim.shuffle_xor_u32(most, mask)))
    return ch.const(ty.u32, most >> EXPONENT_AT, name="exponent")


def exponent_of_warp(pairs: list[Any], token: ch.Expr, tokens: int) -> ch.Expr:
    """The biased exponent of the largest bf16 element that the warp's lanes have in the words `pairs`, of a lane's
    token, or LEAST_EXPONENT."""
    of_lane = ch.const(ty.u32, _largest(pairs), name="of_lane")
    if tokens == 1:
        most = prim.warp_maximum_u32(of_lane)
    else:
        first, second = (
            ch.const(ty.u32, prim.warp_maximum_u32(ch.select(token == index, of_lane, ty.u32(0))), name="most")
            for index in range(2)
        )
        most = ch.select(token == 0, first, second)
    return ch.const(ty.u32, most >> EXPONENT_AT, name="exponent")


def _largest(pairs: list[Any]) -> ch.Expr:
    """The largest bf16 element of some words, without its sign, or one of LEAST_EXPONENT, in the upper half of a word;
    what lies below changes no exponent. Halves are compared in pairs, which takes half as many instructions."""
    largest: Any = ch.bits("LEAST_SIZE", LEAST_EXPONENT << EXPONENT_AT - 16)
    for pair in pairs:
        larger = ch.const(ty.u32, prim.maximum_u16x2(pair & SIZES_OF_PAIR, largest), name="larger")
        largest = larger
    return prim.maximum_u16x2(largest << 16, largest)


def power_of_two(largest: int, exponent: ch.Expr) -> ch.Expr:
    """What elements are multiplied by so that the one of that biased exponent has the exponent `largest` (f32)."""
    return prim.bits_float((ty.u32(2 * BIAS + largest) - exponent) << EXPONENT_AT)


def raised(words: ch.Expr, power: int, of_second: int) -> ch.Expr:
    """The bf16 pairs of a unit (u32x4) times 2^power, every second one times 2^of_second instead."""
    factors = [_factors(power), _factors(of_second)]
    pairs = zip("xyzw", factors * 2, strict=True)
    return prim.make_u32x4(*(prim.multiply_bf16x2(getattr(words, member), factor) for member, factor in pairs))


def raised_pair(pair: ch.Expr, number: ch.Expr, power: int, of_second: int) -> ch.Expr:
    """The same of a bf16 pair by itself, number `number` of a unit."""
    if power == of_second:
        return prim.multiply_bf16x2(pair, _factors(power))
    return prim.multiply_bf16x2(pair, ch.select(number % 2 == 0, ty.u32(_factors(power)), ty.u32(_factors(of_second))))


def _factors(exponent: int) -> int:
    """2^exponent twice, as bf16."""
    return ch.bits(f"PAIR_OF_TWO_TO_{exponent}".replace("-", "MINUS_"), (int(BIAS) + exponent << 7) * 0x00010001)


def stored_power(exponent: ch.Expr, largest: int) -> ch.Expr:
    """The bits of the inverse; NaN where an element was no number."""
    return ch.select(exponent == NO_NUMBER, ty.u32(NAN), (exponent - largest) << EXPONENT_AT)
