"""Copies between any host memory and the device, through two pieces of pinned memory that take turns.

Pinned memory is what makes a copy truly asynchronous and fast; two pieces let the processor fill (or empty) one while
the copy engine works on the other. Small copies pay one memcpy and no wait. Who makes many bytes at once, as a loader
of weights does, makes them in pinned memory that is lent for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from cheetah.piece_ring import PieceRing
from cheetah.runtime.device.driver import Driver, DriverEvent, Stream
from cheetah.runtime.device.interface import DeviceError

PIECE_BYTES = 8 << 20
SHARED_COPY_BYTES = 2 << 20
COPIERS = max(1, min(4, (os.cpu_count() or 1) // 2))


class Staging:
    """wait(event): returns when the event has happened, and raises if the device has faulted."""

    def __init__(
        self, driver: Driver, stream: Stream, wait: Callable[[DriverEvent], None], piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._driver = driver
        self._stream = stream
        self._wait = wait
        self._pieces = [_Piece(driver, piece_bytes) for _ in range(2)]
        self._piece_bytes = piece_bytes
        self._turn = 0
        self._lent: NDArray[np.uint8] | None = None
        self._spare_events: list[DriverEvent] = []
        self._copiers: ThreadPoolExecutor | None = None  # idle threads cost nothing; they end with this object

    def upload(self, address: int, source: NDArray[np.uint8]) -> None:
        """Copy `source` to the device in the stream's order. It may be changed on return, before the copy is done; what
        lies in lent memory only when its ring says so."""
        if self._lent is not None and np.may_share_memory(self._lent, source):
            self._driver.copy_to_device(address, source, self._stream)
            return
        for start in range(0, len(source), self._piece_bytes):
            part = source[start : start + self._piece_bytes]
            piece = self._next_piece()
            self._wait_for(piece)  # an earlier upload may still be reading it
            self._copy(piece.memory[: len(part)], part)
            self._driver.copy_to_device(address + start, piece.memory[: len(part)], self._stream)
            self._mark(piece)

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[PieceRing]:
        """A ring of pinned memory whose pieces the device itself reads; DeviceError if there is one already. What ends
        in an error leaves it to the driver's end: nobody knows then what still reads it."""
        if self._lent is not None:
            raise DeviceError("a ring of this device's memory is in use: end it first")
        self._lent = self._driver.pinned(nbytes)
        try:
            yield PieceRing(self._lent, self._fence)
        finally:
            lent, self._lent = self._lent, None
        self._fence()()
        self._driver.unpin(lent)

    def _fence(self) -> Callable[[], None]:
        """Waits for all copies so far."""
        event = self._spare_events.pop() if self._spare_events else self._driver.new_event(timing=False)
        self._driver.record(event, self._stream)

        def wait() -> None:
            self._wait(event)
            self._spare_events.append(event)

        return wait

    def download(self, target: NDArray[np.uint8], address: int) -> None:
        """Fill `target` from the device, after all work of the stream so far."""
        under_way: list[tuple[_Piece, NDArray[np.uint8]]] = []
        for start in range(0, len(target), self._piece_bytes):
            part = target[start : start + self._piece_bytes]
            piece = self._next_piece()
            if len(under_way) == len(self._pieces):
                self._collect(*under_way.pop(0))
            self._wait_for(piece)
            self._driver.copy_to_host(piece.memory[: len(part)], address + start, self._stream)
            self._mark(piece)
            under_way.append((piece, part))
        for piece, part in under_way:
            self._collect(piece, part)

    def _collect(self, piece: _Piece, part: NDArray[np.uint8]) -> None:
        self._wait_for(piece)
        part[:] = piece.memory[: len(part)]

    def _copy(self, target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        """By several threads where it is much: one alone may be slower than the link to the GPU."""
        if len(source) < SHARED_COPY_BYTES:
            target[:] = source
            return
        if self._copiers is None:
            self._copiers = ThreadPoolExecutor(COPIERS, "upload")
        share = -(-len(source) // COPIERS)
        parts = [slice(start, start + share) for start in range(0, len(source), share)]
        for done in [self._copiers.submit(np.copyto, target[part], source[part]) for part in parts]:
            done.result()

    def _next_piece(self) -> _Piece:
        self._turn = (self._turn + 1) % len(self._pieces)
        return self._pieces[self._turn]

    def _mark(self, piece: _Piece) -> None:
        self._driver.record(piece.event, self._stream)
        piece.in_use = True

    def _wait_for(self, piece: _Piece) -> None:
        if piece.in_use:
            self._wait(piece.event)
            piece.in_use = False


class _Piece:
    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.memory = driver.pinned(nbytes)
        self.event = driver.new_event(timing=False)
        self.in_use = False
