"""Whose turn a GPU is, among the processes of a test run: many tests', or one that needs it alone; and who has models
of many GB there."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TextIO

LARGE_MIB = 60_000
"""What a test of large models may take: 8B in float32 and in bf16, with what its allocator keeps."""


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


@contextmanager
def large_place(folder: Path, places: int) -> Iterator[None]:
    """Hold one of the places of tests whose models take many GB: the first that is free, or else wait for one. Whoever
    waits should not hold a turn."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [(folder / f"gpu.large.{number}").open("a") for number in range(places)]
    try:
        if not any(map(_is_taken, files)):
            fcntl.flock(files[os.getpid() % places], fcntl.LOCK_EX)
        yield
    finally:
        for file in files:
            file.close()


def _is_taken(file: TextIO) -> bool:
    """Whether it was free, and is ours now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def large_places() -> int:
    """How many a GPU has room for; one where nobody says how large it is."""
    if shutil.which("nvidia-smi") is None:
        return 1
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return max(1, min(map(int, found), default=0) // LARGE_MIB)
