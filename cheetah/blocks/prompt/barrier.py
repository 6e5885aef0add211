"""The grid barrier between the phases of a pass: who copies activations waits for it, who copies weights does not.

A counter that only grows: every block adds one at the end of a phase, behind a barrier of its consumer warps, and its
first thread waits for all blocks before the next phase begins; so nobody adds twice for one phase, also where a block
has nothing to do in it. What a phase stores is read by others' bulk copies: each thread fences behind its stores, and
the lane that copies behind its wait.

Several GPUs have a counter each. A block adds to all of them, and waits for its own GPU's, which so counts all blocks:
who has waited sees what any of them stored, wherever it did.
"""

from __future__ import annotations

from collections.abc import Sequence

from cheetah import lang as ch
from cheetah.blocks.prompt.machine import PassMachine
from cheetah.lang import prim, ty
from cheetah.lang.primitive import GPU_SCOPE, SYSTEM_SCOPE


class PassBarrier:
    """counters: u64 in global memory, this GPU's, then those of the others; before: what each stands at when the launch
    begins (u64), the same for all."""

    def __init__(self, machine: PassMachine, counters: Sequence[ch.Expr], before: ch.Expr) -> None:
        self.machine, self.counters = machine, tuple(counters)
        self.scope = GPU_SCOPE if len(self.counters) == 1 else SYSTEM_SCOPE
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
        machine.hand_on()
        self.dues[0] += machine.world.blocks
        with ch.if_(machine.thread == 0):
            for counter in self.counters:
                prim.add_release_u64(counter, 1, scope=self.scope)

    @ch.inline
    def end_pushes(self) -> None:
        """In the pushes role: the same of what it has stored, before the block counts itself."""
        prim.fence_proxy_async()
        self.machine.hand_on()

    @ch.inline
    def begin_phase(self) -> None:
        """In the consumer role: all blocks have ended the phase before."""
        with ch.if_(self.machine.thread == 0):
            prim.wait_at_least_u64(self.counters[0], self.dues[0], scope=self.scope)
        self.machine.meet()

    @ch.inline
    def skip_phase(self) -> None:
        """In the activations role: a phase for which it copies nothing."""
        self.dues[1] += self.machine.world.blocks

    @ch.inline
    def begin_copies(self) -> None:
        """In the activations role: the same, for bulk copies."""
        self.dues[1] += self.machine.world.blocks
        prim.wait_at_least_u64(self.counters[0], self.dues[1], scope=self.scope)
        prim.fence_proxy_async()
