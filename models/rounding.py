"""bf16 as numpy sees it: bits in uint16, values in float32, and rounding from one to the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Bits = NDArray[np.uint16]
Rounding = Callable[[F32], F32]


def widen(tensor: NDArray[Any]) -> F32:
    """float32 values of a tensor: bf16 bits as uint16, or any floating dtype. Exact for bf16 and fp16."""
    if tensor.dtype == np.uint16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float32)


def round_to_bf16(x: F32) -> F32:
    """Finite values rounded to the nearest bf16, ties to even, as float32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    even = (bits >> 16) & 1
    return ((bits + 0x7FFF + even) & np.uint32(0xFFFF0000)).view(np.float32)


def round_to_e4m3(x: F32) -> F32:
    """The nearest values of e4m3, ties to even, at most 448, as float32."""
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def exact(x: F32) -> F32:
    """No rounding."""
    return x
