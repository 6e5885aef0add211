"""The norm of what each head of Gated DeltaNet makes, by who reads it: no block has a whole head.

Beside its columns of a head a block publishes the sum of their squares. Who brings the vector that the next product
takes brings the sums of a unit's head too, and multiplies the unit by 1/rms on the way to shared memory. In layers with
attention the same product takes the vector as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import UNITS_PER_TILE, Columns
from cheetah.blocks.exchange import Published
from cheetah.lang import prim, ty
from cheetah.lang.primitives.exchange import UNITS
from cheetah.plan import VECTOR_COLUMNS
from cheetah.plan.delta import DIMS, PARTS, DeltaHeads


@dataclass(frozen=True, eq=False)
class NormedHeads:
    """A vector as a `Source` of products: normalised head by head where `is_delta` says so, else as it is published.
    squares: [column][head][part]."""

    columns: Columns
    values: Published
    squares: Published
    heads: DeltaHeads
    epsilon: float
    is_delta: Any

    copied = None

    @property
    def name(self) -> str:
        return self.values.name

    @property
    def wait(self) -> Callable[[ch.Expr, ch.Value], None]:
        return self._wait

    @ch.inline
    def _wait(self, unit: ch.Expr, when: ch.Value) -> None:
        """Where there are squares, all lanes wait for those first."""
        wait = self.values.wait
        if wait is not None:
            with ch.if_(self.is_delta == False):  # noqa: E712 (a device comparison)
                wait(unit, when)

    @ch.inline
    def read(self, data: Any, unit: ch.Expr, count: int) -> None:
        """Units `unit`, `unit + consumer_threads`, ... into an array."""
        threads = self.columns.machine.consumer_threads
        scales = ch.array(ty.f32, UNITS)
        with ch.if_(self.is_delta), ch.for_(count, unroll=True) as index:
            scales[index] = self._inverse_rms(unit + index * threads)
        self.values.read(data, unit, count)
        with ch.if_(self.is_delta), ch.for_(count, unroll=True) as index:
            words = ch.const(ty.u32x4, data[index], name="words")
            pairs = [self._scaled(getattr(words, member), scales[index]) for member in "xyzw"]
            data[index] = prim.make_u32x4(*pairs)

    @ch.function
    def _inverse_rms(self, unit: Any) -> ch.Expr:
        """1/rms of the head that a unit, in fragment order, belongs to."""
        limit = self.columns.limit
        head = unit // (UNITS_PER_TILE * limit * (DIMS // VECTOR_COLUMNS))
        column = unit // UNITS_PER_TILE % limit
        first = (column * self.heads.value_heads + head) * (PARTS // 4)
        exchange, name, epoch = self.squares.exchange, self.squares.name, self.squares.epoch
        total = ch.var(ty.f32, 0.0)
        for index in range(PARTS // 4):
            words = ch.const(ty.u32x4, exchange.read4(name, first + index, epoch), name="words")
            for member in "xyzw":
                total += prim.bits_float(getattr(words, member))
        return prim.rsqrt_f32(prim.fma_f32(total, 1.0 / DIMS, self.epsilon))

    def _scaled(self, pair: Any, scale: Any) -> Any:
        return prim.pack_bf16x2(prim.bf16x2_low(pair) * scale, prim.bf16x2_high(pair) * scale)
