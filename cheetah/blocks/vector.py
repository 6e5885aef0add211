"""The input of a matrix product: a vector brought into shared memory as bf16, in natural order, optionally normalised.

A unit is 8 elements: 16 bytes of shared memory, four payload words of an exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.plan import STRIP_ROWS

UNIT = 8
Read = Callable[[ch.Expr], Any]
"""Gives the four words (u32x4) of a unit."""


@ch.inline
def load_vector(machine: Machine, columns: int, available: int, read: Read) -> None:
    """Bring `columns` elements (a multiple of 32) into shared memory; those from `available` on are zero."""
    vector = machine.region("vector", ty.u32x4)
    with ch.for_(machine.thread, columns // UNIT, machine.math_threads) as unit:
        _read_unit(vector, unit, columns, available, read)
    machine.meet()


def _read_unit(vector: ch.Expr, unit: ch.Expr, columns: int, available: int, read: Read) -> None:
    if available >= columns:
        vector[unit] = read(unit)
        return
    with ch.if_(unit < available // UNIT):
        vector[unit] = read(unit)
    with ch.else_():
        vector[unit] = prim.make_u32x4(0, 0, 0, 0)


@ch.inline
def load_normalised(
    machine: Machine, columns: int, available: int, true_columns: int, epsilon: float, norm: ch.Expr, read: Read
) -> Any:
    """RMSNorm: x * weight into shared memory; returns 1/rms, which the products are multiplied by afterwards.

    The mean of squares runs over `true_columns` elements; padding is zero. `norm` points to the bf16 weights. The
    weights are loaded before the vector is waited for, and 1/rms stays off the path of the products.
    """
    vector = machine.region("vector", ty.u32x4)
    partial_sums = machine.region("partial_sums", ty.f32)
    squares = ch.var(ty.f32, 0.0)
    with ch.for_(machine.thread, columns // UNIT, machine.math_threads) as unit:
        weight = prim.load_constant_u32x4(norm + unit * UNIT)
        if available >= columns:
            words = read(unit)
            _normalise_unit(vector, unit, words, weight, squares)
        else:
            with ch.if_(unit < available // UNIT):
                words = read(unit)
                _normalise_unit(vector, unit, words, weight, squares)
            with ch.else_():
                vector[unit] = prim.make_u32x4(0, 0, 0, 0)
    warp_squares = prim.warp_sum_f32(squares)
    with ch.if_(machine.lane == 0):
        partial_sums[machine.warp] = warp_squares
    machine.meet()
    total = ch.var(ty.f32, 0.0)
    with ch.for_(machine.plan.math_warps, unroll=True) as other:
        total += partial_sums[other]
    scale = prim.rsqrt_f32(total * (1.0 / true_columns) + epsilon)
    return scale


@ch.inline
def _normalise_unit(vector: ch.Expr, unit: ch.Expr, words: ch.Expr, weight: ch.Expr, squares: Any) -> None:
    packed = []
    for member in "xyzw":
        low = prim.bf16x2_low(getattr(words, member))
        high = prim.bf16x2_high(getattr(words, member))
        squares += low * low + high * high
        weights = getattr(weight, member)
        packed.append(prim.pack_bf16x2(low * prim.bf16x2_low(weights), high * prim.bf16x2_high(weights)))
    vector[unit] = prim.make_u32x4(*packed)


def vector_words(rows: int, rows_per_strip: int = STRIP_ROWS) -> int:
    """Payload words (two bf16 each) of the output of a matrix whose strips give `rows_per_strip` elements."""
    return -(-rows // rows_per_strip) * rows_per_strip // 2
