"""Time stamps of every phase, for finding where a step's time goes. Left out of the kernel altogether when off."""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.lang import prim, ty

EVENTS = ("begin", "ready", "done", "first_chunk", "last_chunk", "attended")
"""What thread 0 of a block sees of a phase.

begin: the phase begins and waits for its input. ready: the input is there. done: the block's last part is published, or
about to be by another warp. first_chunk: the first chunk of weights, or of keys and values, has landed. last_chunk: the
last one has been multiplied. attended: of attention alone, the block's items are done and its merges begin. What does
not happen in a phase is not stamped: an event before `begin` is one of an earlier step."""


class Timeline:
    """Stamps in nanoseconds: u64 [blocks, phases, events], of the launch's last step. All calls are the consumer
    role's."""

    def __init__(self, machine: Any, stamps: Any, phases: int) -> None:
        self.machine, self.stamps, self.phases = machine, stamps, phases  # a Machine, unless stamps is None
        self.phase: Any = None
        self.noted: Any = None

    @ch.inline
    def stamp(self, phase: ch.Value, event: str) -> None:
        """Note the time of an event of a phase. `begin` makes it the present one, of which the others below tell."""
        if self.stamps is None:
            return
        if event == "begin":
            noted = ch.var(ty.u32, 0)
            self.phase, self.noted = phase, noted
        with ch.if_(self.machine.thread == 0):
            self._store(phase, event)

    def stamp_here(self, event: str) -> None:
        """An event of the present phase; the last time that it happens counts."""
        if self.stamps is not None:
            self.stamp(self.phase, event)

    @ch.inline
    def stamp_first(self, event: str) -> None:
        """An event of the present phase; the first time that it happens counts."""
        if self.stamps is None:
            return
        bit = 1 << EVENTS.index(event)
        with ch.if_((self.machine.thread == 0) & ((self.noted & bit) == 0)):
            self.noted |= bit
            self._store(self.phase, event)

    def _store(self, phase: ch.Value, event: str) -> None:
        place = (self.machine.block * self.phases + phase) * len(EVENTS) + EVENTS.index(event)
        self.stamps[place] = prim.global_timer()


NO_TIMELINE = Timeline(None, None, 0)
"""Stamps nothing and adds nothing to the kernel."""
