"""Random weights of any shape in seconds: for timing, and for tests of shapes whose weights nobody wants to fetch.

Every tensor is a window into one endless repetition of a block of normal numbers, beginning where the tensor's name
says, so its values depend on (configuration, seed, name) alone. Matrices are scaled by 1/sqrt(inputs), which keeps
activations near 1 through any number of layers; norm weights lie near 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from zlib import crc32

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cheetah.models.llama.config import LlamaConfig
from cheetah.models.llama.weights import tensor_shapes

Bits = npt.NDArray[np.uint16]
_Element = TypeVar("_Element", np.uint16, np.float32)

# Primes, so that no two rows of a matrix are the same: row lengths would have to divide them.
LARGE_BLOCK = 2**24 - 3
SMALL_BLOCK = 2**20 - 3
NORM_SPREAD = 0.1


def random_tensors(config: LlamaConfig, seed: int = 0) -> Callable[[str], Bits]:
    """A function from a tensor's name to its values, bf16 bits as uint16 in the tensor's shape."""
    shapes = tensor_shapes(config)
    size = LARGE_BLOCK if config.parameter_count > LARGE_BLOCK else SMALL_BLOCK
    normal = np.random.default_rng(seed).standard_normal(size, dtype=np.float32)
    scaled: dict[int, Bits] = {}

    def block_for(inputs: int) -> Bits:
        if inputs not in scaled:
            scaled[inputs] = _bits(normal * np.float32(inputs**-0.5))
        return scaled[inputs]

    def tensor(name: str) -> Bits:
        shape = shapes[name]
        begin = crc32(name.encode()) % size
        if len(shape) == 1:
            return _bits(1 + np.float32(NORM_SPREAD) * _window(normal, begin, shape[0]))
        return _window(block_for(shape[1]), begin, shape[0] * shape[1]).reshape(shape)

    return tensor


def _bits(values: npt.NDArray[np.float32]) -> Bits:
    return np.asarray(values.astype(ml_dtypes.bfloat16)).view(np.uint16)


def _window(block: npt.NDArray[_Element], begin: int, count: int) -> npt.NDArray[_Element]:
    """`count` elements of the endless repetition of `block`, from `begin` on."""
    if begin + count <= len(block):
        return block[begin : begin + count]
    window = np.empty(count, dtype=block.dtype)
    done = 0
    while done < count:
        part = block[(begin + done) % len(block) :][: count - done]
        window[done : done + len(part)] = part
        done += len(part)
    return window
