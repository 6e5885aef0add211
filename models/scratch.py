"""Memory that a thread uses again and again: new memory costs a page fault for every 4 KB."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_of_thread = threading.local()


def scratch(purpose: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array of this thread for one purpose: what is in it is not said, and the next call for it overwrites it."""
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    memories: dict[str, NDArray[np.uint8]] = _of_thread.__dict__
    memory = memories.get(purpose)
    if memory is None or memory.nbytes < nbytes:
        memory = memories[purpose] = np.empty(nbytes, np.uint8)
    return memory[:nbytes].view(kind).reshape(shape)
