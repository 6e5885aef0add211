"""Vectors of the exchange that the copy engine brings into shared memory: pieces in flight together, in no register.

Behind the grid barrier one thread requests a vector in pieces, each with an mbarrier of its own, so that the first can
be worked on while the others land. Pieces belong to two halves, which are requested together or in turn. All blocks
read the same bytes: they stay in L2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.plan.plan import VECTOR_PIECES

PIECES_OF_HALF = VECTOR_PIECES // 2


class VectorCopies:
    """Copies to the region `vector`, half after half. All calls but `initialise` are the consumer role's."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._declare()

    @ch.inline
    def _declare(self) -> None:
        landed = self.machine.region("vector_barriers", ty.u64)
        self.landed = landed

    @ch.inline
    def initialise(self) -> None:
        """Set the barriers up, as `Ring.initialise`."""
        with ch.for_(VECTOR_PIECES, name="piece") as piece:
            prim.mbarrier_init(self.landed + piece, 1)

    @ch.inline
    def start(self) -> None:
        """Once a launch."""
        vector_parities = ch.var(ty.u32, 0)  # a bit for each piece
        self.parities, _ = vector_parities, None

    @contextmanager
    def requesting(self) -> Iterator[None]:
        """One thread requests halves within.

        What other blocks stored is there: they have fenced, a thread of this block acquired it, and a barrier of the
        block passed it on. This block's own reads and writes of the destination lie before that barrier. The fences
        here order all of that before the copies, each what its memory has seen: one fence for all memory waits for what
        is under way, half a microsecond beside the weights' requests (H200).
        """
        with ch.if_(self.machine.thread == 0):
            prim.fence_proxy_async_global()
            prim.fence_proxy_async_shared()
            yield

    def request(
        self, half: ch.Value, destination: ch.Expr, source: ch.Expr, size: ch.Value, piece_bytes: int, pieces: int
    ) -> None:
        """Copy `size` bytes as the first `pieces` of a half, in pieces of `piece_bytes`. The last ones may have none,
        and are waited for like the others."""
        source_bytes = ch.reinterpret(ty.ptr(ty.u8), source)
        for number in range(pieces):
            barrier = self.landed + (half * PIECES_OF_HALF + number)
            first = number * piece_bytes
            if isinstance(size, int) and size > first:
                self._request_piece(destination, source_bytes, first, min(piece_bytes, size - first), barrier)
            elif isinstance(size, int):
                prim.mbarrier_arrive(barrier)
            else:
                with ch.if_(size > first):
                    some = ch.minimum(size - first, piece_bytes)
                    self._request_piece(destination, source_bytes, first, some, barrier)
                with ch.else_():
                    prim.mbarrier_arrive(barrier)

    @staticmethod
    def _request_piece(destination: ch.Expr, source: ch.Expr, first: int, size: ch.Value, barrier: ch.Expr) -> None:
        prim.mbarrier_arrive_expect_tx(barrier, size)
        prim.bulk_copy_shared(destination + first, source + first, size, barrier)

    def wait(self, half: ch.Value, number: int) -> None:
        """Until a piece of a half has landed; every thread that reads of it waits."""
        index = half * PIECES_OF_HALF + number
        prim.mbarrier_wait(self.landed + index, self.parities >> index & 1)

    def end(self, half: ch.Value, pieces: int) -> None:
        """The first `pieces` of a half are waited for no more: they may be requested anew, behind a barrier of the
        consumer warps."""
        if pieces:
            self.parities ^= self._bits_of(half, pieces)

    @staticmethod
    def _bits_of(half: ch.Value, pieces: int) -> Any:
        """Those of the parities."""
        bits = (1 << pieces) - 1
        if not isinstance(half, int):
            return ty.u32(bits) << half * PIECES_OF_HALF
        first = half * PIECES_OF_HALF
        return ch.bits(f"PIECES_{first}_TO_{first + pieces - 1}", bits << first)


@dataclass(frozen=True, eq=False)
class CopySource:
    """A vector that is copied. place: the address of a unit of it. kind: as what it is published."""

    copies: VectorCopies
    place: Callable[[ch.Value], ch.Expr]
    kind: str
