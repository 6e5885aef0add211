"""A ring of memory: no piece lies over another that is taken, or that is still read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cheetah.piece_ring import ALIGNMENT, PieceRing

SIZE = 8 * ALIGNMENT


@given(st.lists(st.integers(0, SIZE // 2), max_size=40), st.integers(1, 4))
def test_pieces_that_are_in_use_lie_apart(sizes: list[int], ahead: int) -> None:
    """`ahead` pieces are taken at a time, where there is room; a fence lets go when it is waited for."""
    memory = np.zeros(SIZE, np.uint8)
    in_use: dict[int, tuple[int, int]] = {}
    taken: list[int] = []

    def fence() -> object:
        number = taken.pop(0)
        return lambda: in_use.pop(number)

    ring = PieceRing(memory, fence)  # type: ignore[arg-type]
    for number, nbytes in enumerate(sizes):
        while len(taken) >= ahead or (piece := ring.take(nbytes)) is None:
            assert taken, "nothing is taken: there is room"
            ring.give_back()
        begin = piece.ctypes.data - memory.ctypes.data if nbytes else 0
        assert piece.nbytes == nbytes and begin % ALIGNMENT == 0
        end = begin + nbytes
        assert all(end <= first or last <= begin for first, last in in_use.values() if nbytes and first < last)
        in_use[number] = begin, end
        taken.append(number)


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="a piece of 2049 bytes does not fit a ring of 2048"):
        PieceRing(np.zeros(SIZE, np.uint8)).take(SIZE + 1)
