"""Where the time of a start goes: seconds by name, added up over threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """seconds: by the name of a stage, in the order in which stages ended first. Several threads may use one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Around a stage, or a part of one."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - started)

    def add(self, stage: str, seconds: float) -> None:
        """Seconds that were measured otherwise."""
        with self._lock:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
