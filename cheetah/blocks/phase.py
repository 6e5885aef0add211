"""The phases of a step: what is said of each in the text, what the host is told, and the meeting that ends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.machine import Machine
from cheetah.blocks.timeline import Timeline
from cheetah.lang import prim

BANNER_WIDTH = 100


@dataclass(frozen=True)
class PhaseNames:
    """The phases of a step in order: those of every layer, layer by layer, then those that come once."""

    of_layer: tuple[str, ...]
    once: tuple[str, ...]
    layers: int

    @property
    def count(self) -> int:
        return self.layers * len(self.of_layer) + len(self.once)

    @property
    def names(self) -> tuple[str, ...]:
        """As reports call them."""
        layers = tuple(f"layer {layer} {phase}" for layer in range(self.layers) for phase in self.of_layer)
        return (*layers, *self.once)

    def index(self, name: str, layer: Any) -> Any:
        """The number of a phase in the step; `layer` may be a device value, and does not count for those that come
        once."""
        if name in self.of_layer:
            return layer * len(self.of_layer) + self.of_layer.index(name)
        return self.count - len(self.once) + self.once.index(name)


class Phases:
    """`with phase("o", "projection onto the residual"):` around what the roles do in a phase.

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
    def __call__(
        self, name: str, about: str, *, waits: str, makes: str, fetched: str = "", meets: bool = True
    ) -> Iterator[None]:
        """The consumer role's part becomes a function of that name, under a banner that says what it does (`about`),
        what it waits for and what it makes. fetched: what the producer role does, if not the same. meets: whether a
        vector is exchanged at the end, between its writers here and its readers in the next phase."""
        machine = self.machine
        banner = f"---- phase {name} ".ljust(BANNER_WIDTH, "-")
        with machine.producer:
            ch.comment(fetched or name)
        said = f"{banner}\n{about}\nWaits for: {waits}.\nMakes: {makes}."
        with machine.consumer, ch.outline(name, said), machine.placed_anew():
            self._note(self.names.index(name, self.layer))
            yield
            if meets:
                self.exchange.meet()

    @ch.inline
    def _note(self, phase: ch.Value) -> None:
        with ch.if_(self.machine.thread == 0):
            prim.store_relaxed_u32(self.progress + self.machine.block, self.step * self.names.count + phase)
        self.timeline.stamp(phase, "begin")
