"""Work that goes on in a thread of its own while its caller does something else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Result = TypeVar("_Result")


def started(work: Callable[[], _Result]) -> Callable[[], _Result]:
    """Begin `work`; what is given back waits for its end, and gives its result or raises its error."""
    pool = ThreadPoolExecutor(1, "background")
    future = pool.submit(work)
    pool.shutdown(wait=False)  # the thread ends with its work
    return future.result
