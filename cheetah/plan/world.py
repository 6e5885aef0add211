"""Which blocks make a step together: all blocks of all GPUs that exchange vectors, today those of one GPU.

`Gpu.blocks` is a grid: what a block shares with the others of its GPU, as items of attention. `World.blocks` are all
that exchange: matrices are dealt to them, and candidates come from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from cheetah.plan.errors import require_positive
from cheetah.plan.gpu import Gpu
from cheetah.plan.index import Index


@dataclass(frozen=True)
class World:
    """`size` GPUs, each with a rank from 0 on; `blocks` of all together."""

    size: int
    blocks: int

    def __post_init__(self) -> None:
        require_positive("World", size=self.size, blocks=self.blocks)

    def number(self, block: Index, rank: int) -> Index:
        """Which of all blocks the one of a rank's grid is; also for device expressions."""
        return block if rank == 0 else block + rank * (self.blocks // self.size)


def alone(gpu: Gpu) -> World:
    """A GPU by itself."""
    return World(1, gpu.blocks)
