"""Turns on one GPU between processes that compile at the same time: tuning is not to be disturbed by others' work.

Compiling needs only the CPU and goes on side by side; the GPU is taken at its end, before the first step runs.
"""

from __future__ import annotations

import fcntl
import importlib
from contextlib import suppress
from pathlib import Path
from typing import Any


class GpuTurn:
    """A lock on a file, taken at the end of each of torch's compilations. Without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w") if path else None
        if self._file:
            with suppress(ImportError, AttributeError):  # without it, tuning is a little less quiet
                callbacks = importlib.import_module("torch._dynamo.callback")
                callbacks.callback_handler.register_end_callback(self._after_compilation)

    def take(self) -> None:
        """Waits until no other process has the turn."""
        if self._file:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def give_back(self) -> None:
        """Lets the next one in; also where it was never taken."""
        if self._file:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _after_compilation(self, *_: Any) -> None:
        self.take()
