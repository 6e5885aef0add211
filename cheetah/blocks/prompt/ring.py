"""The stages through which weights and activations of a pass flow: two roles fill each, the warpgroups use it.

* full[s]: two arrivals, each of which announces what its role brings, and those bytes.
* empty[s]: one arrival a consumer warp, when the products that read the stage are over.

A stage is [weights: M-tile by M-tile, 64 columns each][activations: K-tile by K-tile]; behind the last k of a tile the
same stages may bring what its sums are added to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.prompt.machine import PassMachine
from cheetah.blocks.ring import RingCursor
from cheetah.lang import prim, ty
from cheetah.plan.formats import BF16, TileFormat

ROLES_THAT_FILL = 2
WEIGHTS_BARRIER = 2


class TileRing:
    """Stages, their barriers, and a cursor for each role. format: of the weights; of several the widest."""

    def __init__(self, machine: PassMachine, format: TileFormat = BF16) -> None:
        self.machine, self.format = machine, format
        self.stages = machine.plan.stages
        self.weights_bytes = ch.named("STAGE_WEIGHTS_BYTES", machine.plan.weights_bytes(format))
        self.stage_bytes = ch.named("STAGE_BYTES", machine.plan.stage_bytes(format))
        self._declare()

    @ch.inline
    def _declare(self) -> None:
        full = self.machine.region("ring_barriers", ty.u64)
        empty = full + self.stages
        ring = self.machine.region("ring", ty.u8)
        self.full, self.empty, self.memory = full, empty, ring

    @ch.inline
    def initialise(self) -> None:
        """Set the barriers up; one thread does, and a block barrier must follow before anyone uses them."""
        with ch.for_(self.stages) as stage:
            prim.mbarrier_init(self.full + stage, ROLES_THAT_FILL)
            prim.mbarrier_init(self.empty + stage, self.machine.plan.consumer_warps)

    @ch.inline
    def start(self) -> None:
        """Give each role its cursor."""
        # A fresh barrier's previous phase has parity 1: the first pass finds every stage empty at once.
        with self.machine.weights:
            weights_stage = ch.var(ty.u32, 0)
            weights_parity = ch.var(ty.u32, 1)
            self.of_weights = RingCursor(weights_stage, weights_parity, self.stages)
        with self.machine.activations:
            activations_stage = ch.var(ty.u32, 0)
            activations_parity = ch.var(ty.u32, 1)
            self.of_activations = RingCursor(activations_stage, activations_parity, self.stages)
        with self.machine.consumer:
            stage = ch.var(ty.u32, 0)
            parity = ch.var(ty.u32, 0)
            self.using = RingCursor(stage, parity, self.stages)

    @contextmanager
    @ch.inline
    def fill_weights(self, announced: Any, lanes: Any) -> Iterator[tuple[ch.Expr, ch.Expr]]:
        """In the weights role, in its first `lanes` lanes: the next stage, empty and with `announced` bytes of weights,
        of which each of these lanes brings some, or there are none. The others pass the stage by."""
        cursor = self.of_weights
        barrier = self.full + cursor.stage
        with ch.if_(self.machine.weights_lane < lanes):
            prim.mbarrier_wait(self.empty + cursor.stage, cursor.parity)
            with ch.if_(self.machine.weights_lane == 0):
                prim.mbarrier_arrive_expect_tx(barrier, announced)
            yield self.memory + cursor.stage * self.stage_bytes, barrier
        cursor.advance()

    @ch.inline
    def end_weights(self) -> None:
        """In the weights role, when a tile's stages are filled: lanes that passed some by wait for the others. Else
        they would look at a stage of a later tile too early or too late, since a parity tells two neighbouring passes
        over the ring apart only. Who fills a stage is waited for by whoever uses it, and cannot fall behind."""
        prim.warp_barrier()
        if (warps := self.machine.plan.weights_warps) > 1:
            prim.named_barrier(WEIGHTS_BARRIER, 32 * warps)

    @contextmanager
    @ch.inline
    def fill_activations(self, announced: Any) -> Iterator[tuple[ch.Expr, ch.Expr]]:
        """In the activations role: the next stage, empty and with `announced` bytes of activations."""
        cursor = self.of_activations
        barrier = self.full + cursor.stage
        prim.mbarrier_wait(self.empty + cursor.stage, cursor.parity)
        prim.mbarrier_arrive_expect_tx(barrier, announced)
        yield self.memory + cursor.stage * self.stage_bytes, barrier
        cursor.advance()

    @ch.inline
    def wait(self) -> None:
        """In the consumer role: until the next stage is full."""
        prim.mbarrier_wait(self.full + self.using.stage, self.using.parity)

    @ch.inline
    def release(self, stage: ch.Expr) -> None:
        """In the consumer role: this warp has read a stage, and what read it is over."""
        prim.warp_barrier()  # orders every lane's reads of the stage before the arrival
        with ch.if_(self.machine.lane == 0):
            prim.mbarrier_arrive(self.empty + stage)
