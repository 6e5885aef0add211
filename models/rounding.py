"""bf16 as numpy sees it: bits in uint16, values in float32, and rounding from one to the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.models.scratch import scratch

F32 = NDArray[np.float32]
Bits = NDArray[np.uint16]
Bytes = NDArray[np.uint8]
Rounding = Callable[[F32], F32]


def widen(tensor: NDArray[Any]) -> F32:
    """float32 values of a tensor: bf16 bits as uint16, or any floating dtype. Exact for bf16 and fp16."""
    if tensor.dtype == np.uint16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float32)


def round_to_bf16(x: F32) -> F32:
    """Values rounded to the nearest bf16, ties to even, as float32."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def as_bf16(x: Any) -> NDArray[np.uint16]:
    """The bits of numbers rounded to bf16."""
    return np.asarray(x).astype(ml_dtypes.bfloat16).view(np.uint16)


def round_to_e4m3(x: F32) -> F32:
    """The nearest values of e4m3, ties to even, at most 448, as float32."""
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def exact(x: F32) -> F32:
    """No rounding."""
    return x


F16_PIECE = 2**16
"""Numbers of f16 that are rounded at a time: their places in a table are 512 KB, which a core's cache has room for."""


def round_f16(numbers: Bits, out: Bits) -> None:
    """The bits of f16 numbers as those of the nearest bf16, ties to even; `out` may be the numbers' own memory."""
    table, places = _bf16_of_f16(), scratch("places in a table", (F16_PIECE,), np.intp)
    for first in range(0, numbers.size, F16_PIECE):
        piece = numbers[first : first + F16_PIECE]
        places[: piece.size] = piece  # of another type, numpy would make new ones
        np.take(table, places[: piece.size], out=out[first : first + piece.size], mode="clip")


@cache
def _bf16_of_f16() -> Bits:
    """By the bits of each f16: three times as fast as rounding (f16 is what many quantised checkpoints have beside)."""
    with np.errstate(invalid="ignore"):
        numbers = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(ml_dtypes.bfloat16)
    return np.asarray(numbers).view(np.uint16)
