"""Which M-tiles of a matrix a block gets, where M-tiles differ in bytes and any block may have any of them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def dealt(sizes: Sequence[int], blocks: int) -> list[int]:
    """The M-tile of each slot, the slots of the block at position p being p, p + blocks, ...: as many for every block
    as if M-tiles were dealt in turn, and bytes as equal as the largest M-tile first, to whoever has least, makes them.
    A block has its M-tiles in ascending order. sizes: bytes of each M-tile."""
    room = [len(range(position, len(sizes), blocks)) for position in range(blocks)]
    least = [(0, position) for position in range(min(blocks, len(sizes)))]
    own: list[list[int]] = [[] for _ in range(blocks)]
    for m_tile in sorted(range(len(sizes)), key=lambda one: (-sizes[one], one)):
        nbytes, position = heapq.heappop(least)
        own[position].append(m_tile)
        if len(own[position]) < room[position]:
            heapq.heappush(least, (nbytes + sizes[m_tile], position))
    found = [0] * len(sizes)
    for position, m_tiles in enumerate(own):
        found[position::blocks] = sorted(m_tiles)
    return found
