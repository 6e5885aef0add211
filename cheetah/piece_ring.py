"""Host memory for what is made in pieces and handed out in order: a ring, used again and again.

New memory costs a page fault for every 4 KB, and memory that a GPU may read costs more. Pieces are taken and given back
in one order, so the room for the next is always behind the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Fence = Callable[[], Callable[[], None]]
"""Called when a piece is given back: gives what waits until its bytes have been read."""

ALIGNMENT = 256


@dataclass
class _Piece:
    """Bytes [begin, end) of the ring. is_read: None as long as it is taken; then waits until it may be overwritten."""

    begin: int
    end: int
    is_read: Callable[[], None] | None = None


class PieceRing:
    """Pieces of `memory`, whose first byte is aligned."""

    def __init__(self, memory: Bytes, fence: Fence = lambda: lambda: None) -> None:
        self._memory, self._fence = memory, fence
        self._pieces = deque[_Piece]()

    def take(self, nbytes: int) -> Bytes | None:
        """uint8 [nbytes], whatever is in it; None if a piece must be given back first. ValueError if it never fits."""
        if nbytes > self._memory.nbytes:
            raise ValueError(f"a piece of {nbytes} bytes does not fit a ring of {self._memory.nbytes}")
        room = max(nbytes, 1)  # two pieces never begin at one place
        while (begin := self._room(room)) is None:
            if (is_read := self._pieces[0].is_read) is None:
                return None
            is_read()
            self._pieces.popleft()
        self._pieces.append(_Piece(begin, begin + -(-room // ALIGNMENT) * ALIGNMENT))
        return self._memory[begin : begin + nbytes]

    def give_back(self) -> None:
        """The piece that was taken first of those that are taken may be overwritten as soon as the fence says."""
        next(piece for piece in self._pieces if piece.is_read is None).is_read = self._fence()

    def _room(self, nbytes: int) -> int | None:
        """Where so many bytes are free behind the last piece, or at the ring's beginning."""
        if not self._pieces:
            return 0
        oldest, newest = self._pieces[0].begin, self._pieces[-1]
        if newest.begin < oldest:
            return newest.end if newest.end + nbytes <= oldest else None
        if newest.end + nbytes <= self._memory.nbytes:
            return newest.end
        return 0 if nbytes <= oldest else None


Lend = Callable[[int], AbstractContextManager[PieceRing]]
"""A size in bytes -> a ring of that size, for as long as the context lasts."""


def ordinary_memory(nbytes: int) -> AbstractContextManager[PieceRing]:
    """A ring that nobody but the processor reads."""
    return nullcontext(PieceRing(np.empty(nbytes, np.uint8)))
