"""A router that is fused with the projection before it: the logits of experts without the vector that a router reads.

A router W reads the residual behind attention, h + O a, times its norm's weights D, and over its rms. But rows of W D
times the residual before attention, and of W D O times attention's output, are logits times that rms, which is
positive: it does not change which are highest, and the weights of those that are chosen learn it later. So every block
has a row of an expert, or of some, made of the two when weights were loaded (`cheetah.models.dense.fused_router`), and
multiplies it with what its threads bring for M-tiles of other matrices anyway: in the phase of q, k and v the residual,
which is published times the weights of the norm before (the row is over these), in that of o attention's output. Logits
are published before o is multiplied, and the choice is made while its rows are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.exchange import Published
from cheetah.blocks.linear.interface import Around
from cheetah.blocks.linear.parts import Arrival
from cheetah.blocks.linear.prologue import LINE_BYTES
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.plan import MatrixLayout
from cheetah.plan.products import Experts, logit_words


@dataclass(frozen=True, eq=False)
class RowsBeside:
    """A part of the block's rows times a vector, by the threads that bring that. rows: where each begins, for the
    vector's first element (bf16). ends: whether it is their second part; what a thread has of the first waits in the
    region `routed`, and what every warp has of both is then in `routed_sums`, a row behind the other."""

    machine: Machine
    rows: tuple[ch.Expr, ...]
    ends: bool

    def begin(self) -> Any:
        return ch.array(ty.f32, len(self.rows), zero=True, name="routed_here")

    @ch.inline
    def load(self, first: ch.Expr, stride: int, count: int) -> Any:
        loaded = ch.array(ty.u32x4, count, len(self.rows), name="row_units")
        for number, row in enumerate(self.rows):
            units = ch.reinterpret(ty.ptr(ty.u32x4), row)
            with ch.for_(count, unroll=True, name="index") as index:
                loaded[index][number] = units[first + index * stride]
        return loaded

    @ch.inline
    def add(self, kept: Any, words: ch.Expr, loaded: Any) -> None:
        of_vector = ch.const(ty.u32x4, words, name="words")
        for number in range(len(self.rows)):
            of_row = ch.const(ty.u32x4, loaded[number], name="of_row")
            for member in "xyzw":
                left, right = getattr(of_vector, member), getattr(of_row, member)
                kept[number] = prim.fma_f32(prim.bf16x2_low(left), prim.bf16x2_low(right), kept[number])
                kept[number] = prim.fma_f32(prim.bf16x2_high(left), prim.bf16x2_high(right), kept[number])

    @ch.inline
    def end(self, kept: Any) -> None:
        machine = self.machine
        routed, sums = machine.region("routed", ty.f32), machine.region("routed_sums", ty.f32)
        for number in range(len(self.rows)):
            place = machine.thread + number * machine.consumer_threads
            if not self.ends:
                routed[place] = kept[number]
                continue
            total = ch.const(ty.f32, prim.warp_sum_f32(kept[number] + routed[place]), name="of_warp")
            with ch.if_(machine.lane == 0):
                sums[machine.warp + number * machine.plan.consumer_warps] = total


@ch.function
def prefetch_row(machine: Machine, row: ch.Expr, size_bytes: int) -> None:
    """In the consumer role: bring a row into L2, before the phases in which nobody is to wait for it; by the last
    warps, since the first one has to choose."""
    lines = ch.reinterpret(ty.ptr(ty.u8), row)
    first = (machine.consumer_threads - 1 - machine.thread) * LINE_BYTES
    with ch.for_(first, size_bytes, machine.consumer_threads * LINE_BYTES, unroll=1, name="offset") as offset:
        prim.prefetch_l2(lines + offset)


@dataclass(frozen=True, eq=False)
class Routing(Around):
    """The input of o, beside which the block's logits are made: the last consumer warp publishes them, with zeros in
    the words that nobody's logit is in. position: of the block among `owners`, those with M-tiles of o, to which
    experts are dealt one by one."""

    machine: Machine
    into: Published
    experts: Experts
    position: ch.Expr
    owners: int

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.into.name,)

    @ch.inline
    def begin(self, matrix: MatrixLayout, arrival: Arrival) -> None:
        self.inner.begin(matrix, arrival)  # ends with a barrier of the consumer warps
        with ch.if_(self.machine.warp == self.machine.plan.consumer_warps - 1):
            self._publish()

    @ch.function
    def _publish(self) -> None:
        """The block's logits, of what all warps have of them."""
        machine, warps, words = self.machine, self.machine.plan.consumer_warps, logit_words(self.experts)
        sums, lane = machine.region("routed_sums", ty.f32), machine.lane
        for first in range(0, words, self.owners):
            logit: Any = ty.f32(0.0)
            if first < self.experts.count:
                own = sums[ch.minimum(lane, warps - 1) + first // self.owners * warps]
                logit = prim.warp_sum_f32(ch.select(lane < warps, own, ty.f32(0.0)))
            word = self.position + first
            with ch.if_((lane == 0) & (word < words)):
                self.into.publish(word, prim.float_bits(ch.select(word < self.experts.count, logit, ty.f32(0.0))))
