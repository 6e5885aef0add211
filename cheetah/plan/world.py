"""Which blocks make a step together: all blocks of all GPUs that exchange vectors.

`Gpu.blocks` is a grid: what a block shares with the others of its GPU, as M-tiles and items of attention.
`World.blocks` are all that exchange: candidates come from each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.gpu import Gpu
from cheetah.plan.index import Index


@dataclass(frozen=True)
class World:
    """`size` GPUs, each with a rank from 0 on; `blocks` of all together."""

    size: int
    blocks: int

    def __post_init__(self) -> None:
        require_positive("World", size=self.size, blocks=self.blocks)

    def number(self, block: Index, rank: Index) -> Index:
        """Which of all blocks the one of a rank's grid is; also for device expressions."""
        return block if self.size == 1 else rank * (self.blocks // self.size) + block


@dataclass(frozen=True)
class Rank:
    """One of `size` GPUs that make steps together."""

    number: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.size:
            raise PlanError(f"Rank: {self.number} of {self.size}: give 0 to {self.size - 1}")

    def part(self, count: int) -> range:
        """Its of `count` things: as many as the others have, or, where there are fewer things than GPUs, the one that
        it has with others."""
        first = self.number * count // self.size
        return range(first, first + max(1, count // self.size))


def world_of(gpu: Gpu) -> World:
    """The GPUs of a machine."""
    return World(gpu.ranks, gpu.ranks * gpu.blocks)
