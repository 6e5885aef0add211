"""Ctrl-C between two pieces of work, never in the middle of one.

A KeyboardInterrupt may be raised between any two bytecodes of the main thread. Bookkeeping that must not be cut in two
(pages, lengths, the order of a device's work) is done within `deferred()`, which raises it afterwards. What takes long
in there asks `is_pending()` and ends early.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _Deferral:
    """Notes an interrupt, and has the second one raised at once: whatever runs may hang."""

    def __init__(self) -> None:
        self.is_pending = False
        self.handler = signal.getsignal(signal.SIGINT)

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.is_pending:
            self.pass_on(frame)
        self.is_pending = True

    def pass_on(self, frame: FrameType | None = None) -> None:
        """What the interrupt would have done."""
        assert callable(self.handler)
        self.handler(signal.SIGINT, frame)


_deferrals: list[_Deferral] = []
"""Of the main thread, the innermost last: no other thread is ever interrupted."""


@contextmanager
def deferred() -> Iterator[None]:
    """Within, an interrupt waits until the end, but for a second one. It is then what it would have been: by default
    a KeyboardInterrupt. Other threads are not interrupted; nothing is done for them."""
    deferral = _Deferral()
    if not _is_main_thread() or not callable(deferral.handler):  # ignored, or the end of the process
        yield
        return
    _deferrals.append(deferral)
    signal.signal(signal.SIGINT, deferral.note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, deferral.handler)
        _deferrals.pop()
        if deferral.is_pending:
            deferral.pass_on()


def is_pending() -> bool:
    """Whether an interrupt waits for the end of what this thread does."""
    return _is_main_thread() and any(deferral.is_pending for deferral in _deferrals)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
