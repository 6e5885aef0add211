"""The phases of a kernel as plain data: how reports count them, and what the kernel's text says of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BANNER_WIDTH = 100


@dataclass(frozen=True)
class PhaseNames:
    """The phases of a step in order: those of every layer, layer by layer, then those that come once. delta: of the
    `delta_layers`, as many, in the place of the others'."""

    of_layer: tuple[str, ...]
    once: tuple[str, ...]
    layers: int
    delta: tuple[str, ...] = ()
    delta_layers: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return self.layers * len(self.of_layer) + len(self.once)

    @property
    def names(self) -> tuple[str, ...]:
        """As reports call them."""
        layers = tuple(
            f"layer {layer} {phase}"
            for layer in range(self.layers)
            for phase in (self.delta if layer in self.delta_layers else self.of_layer)
        )
        return (*layers, *self.once)

    def index(self, name: str, layer: Any) -> Any:
        """The number of a phase in the step; `layer` may be a device value, and does not count for those that come
        once."""
        for of_layer in (self.of_layer, self.delta):
            if name in of_layer:
                return layer * len(of_layer) + of_layer.index(name)
        return self.count - len(self.once) + self.once.index(name)


@dataclass(frozen=True)
class PhaseText:
    """What a kernel's text says of a phase. waits, makes: vectors. fetched: what the producer role does, if not the
    same. meets: whether a vector is exchanged at the end, between its writers here and its readers in the next
    phase."""

    name: str
    about: str
    waits: tuple[str, ...]
    makes: tuple[str, ...]
    fetched: str = ""
    meets: bool = True

    @property
    def banner(self) -> str:
        banner = f"---- phase {self.name} ".ljust(BANNER_WIDTH, "-")
        vectors = {"Waits for": self.waits, "Makes": self.makes}
        said = [f"{what}: {', '.join(names)}." for what, names in vectors.items() if names]
        return "\n".join([banner, self.about, *said])
