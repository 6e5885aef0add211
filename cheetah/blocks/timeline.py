"""Time stamps of every phase, for finding where a step's time goes. Left out of the kernel altogether when off."""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.machine import Machine
from cheetah.lang import prim

EVENTS = ("begin", "ready", "done")
"""A phase begins (and waits for its input), has its input ready, and has published its last part."""


class Timeline:
    """Stamps in nanoseconds: u64 [blocks, phases, events], of the launch's last step."""

    def __init__(self, machine: Machine, stamps: Any, phases: int) -> None:
        self.machine, self.stamps, self.phases = machine, stamps, phases

    @ch.inline
    def stamp(self, phase: ch.Value, event: str) -> None:
        """Thread 0 notes the time of an event of a phase."""
        if self.stamps is None:
            return
        with ch.if_(self.machine.thread == 0):
            place = (self.machine.block * self.phases + phase) * len(EVENTS) + EVENTS.index(event)
            self.stamps[place] = prim.global_timer()
