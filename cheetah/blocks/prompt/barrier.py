"""The grid barrier between the phases of a pass: who copies activations waits for it, who copies weights does not.

A counter that only grows: every block adds one at the end of a phase, behind a barrier of its consumer warps, and its
first thread waits for all blocks before the next phase begins; so nobody adds twice for one phase, also where a block
has nothing to do in it. What a phase stores is read by others' bulk copies: each thread fences behind its stores, and
the lane that copies behind its wait.
"""

from __future__ import annotations

from cheetah import lang as ch
from cheetah.blocks.prompt.machine import PassMachine
from cheetah.lang import prim, ty


class PassBarrier:
    """counter: u64 in global memory; before: what it stands at when the launch begins (u64), the same for all."""

    def __init__(self, machine: PassMachine, counter: ch.Expr, before: ch.Expr) -> None:
        self.machine, self.counter = machine, counter
        self._declare(before)

    @ch.inline
    def _declare(self, before: ch.Expr) -> None:
        with self.machine.consumer:
            arrivals_due = ch.var(ty.u64, before)
            self.dues = [arrivals_due]
        with self.machine.activations:
            copies_due = ch.var(ty.u64, before)
            self.dues.append(copies_due)

    @ch.inline
    def end_phase(self) -> None:
        """In the consumer role: what this block has stored is seen by whoever passes the next `wait` or `ready`."""
        machine = self.machine
        ch.comment("grid barrier")
        prim.fence_proxy_async()  # others' bulk copies read what was stored
        machine.meet()
        self.dues[0] += machine.world.blocks
        with ch.if_(machine.thread == 0):
            prim.add_release_u64(self.counter, 1)

    @ch.inline
    def begin_phase(self) -> None:
        """In the consumer role: all blocks have ended the phase before."""
        with ch.if_(self.machine.thread == 0):
            prim.wait_at_least_u64(self.counter, self.dues[0])
        self.machine.meet()

    @ch.inline
    def skip_phase(self) -> None:
        """In the activations role: a phase for which it copies nothing."""
        self.dues[1] += self.machine.world.blocks

    @ch.inline
    def begin_copies(self) -> None:
        """In the activations role: the same, for bulk copies."""
        self.dues[1] += self.machine.world.blocks
        prim.wait_at_least_u64(self.counter, self.dues[1])
        prim.fence_proxy_async()
