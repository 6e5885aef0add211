"""The input of a matrix product: a vector brought into shared memory as bf16, in natural order, optionally normalised.

A unit is 8 elements: 16 bytes of shared memory, four payload words of an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.lang.primitives.exchange import UNITS
from cheetah.plan import STRIP_ROWS

UNIT = 8
LINE_BYTES = 128
Read = Callable[[Any, ch.Expr, int], None]
"""Puts units (u32x4) `unit`, `unit + math_threads`, ... into an array: (array of UNITS, unit, how many)."""
Wait = Callable[[ch.Expr], None]
"""Lets one lane of a warp wait for its unit before all lanes read: called by whole warps with each lane's first unit.

While a vector is awaited, polling all of it crowds the memory: 32 times fewer polls are worth 3 % on 1B (H200)."""


@ch.inline
def load_vector(machine: Machine, columns: int, available: int, read: Read, wait: Wait | None = None) -> None:
    """Bring `columns` elements (a multiple of 32) into shared memory; those from `available` on are zero."""
    vector = machine.region("vector", ty.u32x4)
    for batch in _batches(machine, available // UNIT):
        first, data, count = batch.first, batch.data, batch.count
        batch.wait(wait)
        read(data, first, count)
        with _each(machine, first, count) as (number, unit):
            vector[unit] = data[number]
    _zero_rest(machine, vector, columns, available)
    machine.meet()


@ch.inline
def load_normalised(
    machine: Machine,
    columns: int,
    available: int,
    true_columns: int,
    epsilon: float,
    norm: ch.Expr,
    read: Read,
    wait: Wait | None = None,
) -> Any:
    """RMSNorm: x * weight into shared memory; returns 1/rms, which the products are multiplied by afterwards.

    The mean of squares runs over `true_columns` elements; padding is zero. `norm` points to the bf16 weights. They are
    loaded before the vector is waited for, and 1/rms stays off the path of the products.
    """
    vector = machine.region("vector", ty.u32x4)
    partial_sums = machine.region("partial_sums", ty.f32)
    squares = ch.var(ty.f32, 0.0)
    for batch in _batches(machine, available // UNIT):
        first, data, count = batch.first, batch.data, batch.count
        weights = ch.array(ty.u32x4, UNITS)
        with _each(machine, first, count) as (number, unit):
            weights[number] = prim.load_constant_u32x4(norm + unit * UNIT)
        batch.wait(wait)
        read(data, first, count)
        with _each(machine, first, count) as (number, unit):
            _normalise_unit(vector, unit, data[number], weights[number], squares)
    _zero_rest(machine, vector, columns, available)
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
def prefetch(machine: Machine, source: ch.Expr, size_bytes: int) -> None:
    """Bring `size_bytes` of global memory into L2, a line a block: a cold line under full load takes microseconds."""
    lines = ch.reinterpret(ty.ptr(ty.u8), source)
    with ch.if_(machine.thread == 0):
        with ch.for_(machine.block * LINE_BYTES, size_bytes, machine.gpu.blocks * LINE_BYTES, unroll=1) as offset:
            prim.prefetch_l2(lines + offset)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Units `first`, `first + math_threads`, ... of a thread: `count` of them, for the array `data`.

    leads: the vector's first batch, and every thread has it, so that whole warps can wait together.
    """

    first: ch.Expr
    data: Any
    count: int
    leads: bool

    def wait(self, wait: Wait | None) -> None:
        if self.leads and wait is not None:
            wait(self.first)


def _batches(machine: Machine, units: int) -> Iterator[_Batch]:
    """The thread's units, at most UNITS at a time."""
    threads = machine.math_threads
    each = units // threads  # of every thread; some have one more
    begin = 0
    while begin * threads < units:
        size = max(1, min(UNITS, each - begin))
        full = (begin + size) * threads <= units
        with nullcontext() if full else ch.if_(machine.thread + begin * threads < units):
            first = ch.const(ty.u32, machine.thread + begin * threads, name="first_unit")
            yield _Batch(first, ch.array(ty.u32x4, UNITS, name="units"), size, full and begin == 0)
        begin += size


@contextmanager
def _each(machine: Machine, first: ch.Expr, count: int) -> Iterator[tuple[ch.Expr, ch.Expr]]:
    """(number in the array, unit) of each of the batch."""
    with ch.for_(count, unroll=True, name="number") as number:
        yield number, first + number * machine.math_threads


@ch.inline
def _zero_rest(machine: Machine, vector: ch.Expr, columns: int, available: int) -> None:
    """The padding between the vector and a multiple of 32 elements."""
    if available < columns:
        with ch.for_(machine.thread + available // UNIT, columns // UNIT, machine.math_threads, unroll=1) as unit:
            vector[unit] = prim.make_u32x4(0, 0, 0, 0)


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
