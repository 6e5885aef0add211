"""Random weights of any shape in seconds: for timing, and for tests of shapes whose weights nobody wants to fetch.

Every tensor is a window into one endless repetition of a block of normal numbers, beginning where the tensor's name
says, so its values depend on (configuration, seed, name) alone. Matrices are scaled by 1/sqrt(inputs), which keeps
activations near 1 through any number of layers; norm weights lie near 1, biases around 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar
from zlib import crc32

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cheetah.models.config import ModelConfig
from cheetah.models.family import Rows
from cheetah.models.registry import family_of

Bits = npt.NDArray[np.uint16]
_Element = TypeVar("_Element", np.uint16, np.float32)

# Primes, so that no two rows of a matrix are the same: row lengths would have to divide them.
LARGE_BLOCK = 2**24 - 3
SMALL_BLOCK = 2**20 - 3
NORM_SPREAD = 0.1
BIAS_SPREAD = 0.5
BIAS_SUFFIX = ".bias"


def random_tensors(config: ModelConfig, seed: int = 0) -> RandomTensors:
    """A function from a tensor's name to its values, which also reads matrices in parts."""
    return RandomTensors(config, seed)


class RandomTensors:
    """The tensors of a configuration; the block is drawn when the first is asked for. Called with a tensor's name:
    its values, bf16 bits as uint16 in the tensor's shape."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self._shapes = family_of(config).tensor_shapes(config)
        self._size = LARGE_BLOCK if config.parameter_count > LARGE_BLOCK else SMALL_BLOCK
        self._seed = seed
        self._scaled: dict[int, Bits] = {}

    @cached_property
    def _normal(self) -> npt.NDArray[np.float32]:
        return np.random.default_rng(self._seed).standard_normal(self._size, dtype=np.float32)

    def __call__(self, name: str) -> Bits:
        shape, begin = self._shapes[name], self._begin(name)
        if len(shape) == 1:
            normal = _window(self._normal, begin, shape[0])
            is_bias = name.endswith(BIAS_SUFFIX)
            return _bits(np.float32(BIAS_SPREAD) * normal if is_bias else 1 + np.float32(NORM_SPREAD) * normal)
        return _window(self._block(shape[1]), begin, shape[0] * shape[1]).reshape(shape)

    def rows(self, name: str) -> Rows:
        """The matrix `name`, of which nothing is made but what is read."""
        rows, columns = self._shapes[name]
        return _RepeatedRows(self._block(columns), self._begin(name), (rows, columns))

    def _begin(self, name: str) -> int:
        return crc32(name.encode()) % self._size

    def _block(self, inputs: int) -> Bits:
        if inputs not in self._scaled:
            self._scaled[inputs] = _bits(self._normal * np.float32(inputs**-0.5))
        return self._scaled[inputs]


@dataclass(frozen=True)
class _RepeatedRows:
    """`Rows` of the matrix that the endless repetition of `block` gives from `begin` on."""

    block: Bits
    begin: int
    shape: tuple[int, int]

    def __getitem__(self, part: slice) -> Bits:
        first, stop, _ = part.indices(self.shape[0])
        pieces = []
        while first < stop:
            start = (self.begin + first * self.shape[1]) % len(self.block)
            count = max(1, min(stop - first, (len(self.block) - start) // self.shape[1]))
            rows = _window(self.block, start, count * self.shape[1])  # copied only where one row meets the block's end
            pieces.append(rows.reshape(count, self.shape[1]))
            first += count
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


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
