"""What Gated DeltaNet makes of rows of its product, number by number."""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.lang import prim, ty

LENGTH_EPSILON = 1e-6
"""Added to the squares of a query or key before its length is taken, whatever the model's norms add."""
LINEAR_FROM = 20.0
"""log(1 + exp(x)) is x from here on."""
NEAR = 1 / 32
"""Below 0, where the polynomial of e to the power of a number errs by 3e-10."""


@ch.inline
def silu(value: ch.Expr) -> ch.Expr:
    number = ch.const(ty.f32, value, name="number")
    return prim.divide_f32(number, 1.0 + prim.exp_f32(-number))


@ch.inline
def mixed_channel(tokens: Any, taps: Any, index: int) -> ch.Expr:
    """A channel of a token and of the three before it, times its taps, which are half `index` of the four words of a
    pair of channels."""
    pairs = (taps.x, taps.y) if index == 0 else (taps.z, taps.w)
    factors = [half(pair) for pair in pairs for half in (prim.bf16x2_low, prim.bf16x2_high)]
    total: ch.Expr = tokens[0] * factors[0]
    for token, factor in zip(tokens[1:], factors[1:], strict=True):
        total = prim.fma_f32(token, factor, total)
    return total


@ch.inline
def kept_part(exponent: ch.Expr) -> ch.Expr:
    """e to the power of a number that is not above 0. Near 0 by a polynomial: what is kept of every token is
    multiplied thousands of times, and the fast exponential errs by 2e-7 to one side."""
    power = ch.const(ty.f32, exponent, name="power")
    near = ch.var(ty.f32, 1.0 / 24.0)
    for factor in (1.0 / 6.0, 0.5, 1.0, 1.0):
        near.set(prim.fma_f32(near, power, factor))
    kept = ch.select(power > -NEAR, near, prim.exp_f32(power))
    return kept


@ch.inline
def written_or_kept(raw: ch.Expr, is_written: ch.Expr, rate: ch.Expr, bias: ch.Expr) -> ch.Expr:
    """How much of a value is written to a head's memory, or how much of that is kept."""
    number = ch.var(ty.f32, raw)
    with ch.if_(is_written):
        number.set(prim.divide_f32(1.0, 1.0 + prim.exp_f32(-number)))
    with ch.else_():
        number += bias
        grown = prim.log_f32(1.0 + prim.exp_f32(number))
        number.set(kept_part(-rate * ch.select(number > LINEAR_FROM, number, grown)))
    return number
