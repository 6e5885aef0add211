"""The phases of a step: what is said of each in the text, what the host is told, and the meeting that ends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.machine import Machine
from cheetah.blocks.timeline import Timeline
from cheetah.lang import prim
from cheetah.plan.phases import PhaseNames, PhaseText


class Phases:
    """`with phase(text):` around what the roles do in a phase.

    step and layer are the present ones (device values that all roles see). `progress` is where each block tells the
    host how far it is, for a report if the launch hangs.
    """

    def __init__(
        self, machine: Machine, exchange: Exchange, timeline: Timeline, names: PhaseNames, progress: ch.Expr
    ) -> None:
        self.machine, self.exchange, self.timeline = machine, exchange, timeline
        self.names, self.progress = names, progress
        self.step: Any = None
        self.layer: Any = None

    @contextmanager
    def __call__(self, text: PhaseText) -> Iterator[None]:
        """The consumer role's part becomes a function of the phase's name, under a banner that says what it does, what
        it waits for and what it makes."""
        machine = self.machine
        with machine.producer:
            ch.comment(text.fetched or text.name)
        with machine.consumer, ch.outline(text.name, text.banner), machine.placed_anew():
            number = self.names.index(text.name, self.layer)
            self._note(ch.named(f"PHASE_{text.name.upper()}", number) if isinstance(number, int) else number)
            yield
            if text.meets:
                self.exchange.meet()

    def _note(self, phase: ch.Value) -> None:
        self._note_progress(self.step * ch.named("PHASES", self.names.count) + phase)
        self.timeline.stamp(phase, "begin")

    @ch.function
    def _note_progress(self, so_far: ch.Expr) -> None:
        """The phases of the launch that this block has begun before, for the host."""
        with ch.if_(self.machine.thread == 0):
            prim.store_relaxed_u32(self.progress + self.machine.block, so_far)
