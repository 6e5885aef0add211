"""Whose turn a GPU is, among the processes of a test run: many tests', or one that needs it alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def gpu_turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Hold the GPU together with others, or `alone`, by locks on files of a folder that all processes have.

    Everybody comes by a gate, where those who wait to be alone stay until the others have left: so nobody who comes
    later is let in before them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "gpu.lock").open("a") as turn:
        with (folder / "gpu.gate").open("a") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
