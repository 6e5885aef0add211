"""Pieces of what a checkpoint becomes: memory that a few threads fill, and who takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cheetah.models.formats import Bytes
from cheetah.plan.repacking import Repacking

BLOCK_BYTES = 4 * 2**20
"""About what a thread packs at a time: some milliseconds of work in a few dozen operations, for threads wait for each
other's between any two."""
PIECE_BYTES = 16 * 2**20
"""About what one call of `write` gets, or one wave of M-tiles where that is more."""

Job = Callable[[Bytes], None]
"""Fills its share of a piece's memory."""


STAGING = "staging"
"""Among the buffers of pieces, the memory of a device that packs."""


@dataclass(frozen=True)
class Piece:
    """`nbytes` at `offset` of `buffer`, which the jobs make together. work: what a device is to do behind it."""

    buffer: str
    offset: int
    nbytes: int
    jobs: tuple[Job, ...]
    work: Repacking | None = None

    @property
    def packed_bytes(self) -> int:
        """Of the kernel's buffers, so many are written with it."""
        staged = 0 if self.work is None else self.work.packed_bytes
        return staged if self.buffer == STAGING else self.nbytes


def ranges(count: int, size: int) -> list[range]:
    """0 .. count - 1 in ranges of `size`, the last perhaps shorter."""
    return [range(first, min(count, first + size)) for first in range(0, count, size)]
