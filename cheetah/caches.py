"""The folder in which compiled kernels and their texts are kept from one run to the next."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def cache_folder() -> Path:
    """$CHEETAH_CACHE, else $XDG_CACHE_HOME/cheetah, else ~/.cache/cheetah; absolute, for compilers run elsewhere."""
    if own := os.environ.get("CHEETAH_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "cheetah"
    return Path.home() / ".cache" / "cheetah"


@contextlib.contextmanager
def held(lock: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a file against other threads and processes; `on_wait` is called once if somebody else holds it.

    Where its folder cannot be written or has no locks, nothing is held: two may then compile the same text, which
    costs time and nothing else.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            # O_NONBLOCK: to open a pipe of that name would wait for a reader; instead it fails.
            descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, descriptor)
            _flock(descriptor, on_wait)
        yield


def _flock(descriptor: int, on_wait: Callable[[], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
