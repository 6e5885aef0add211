"""What a vector that phases exchange looks like in memory, for who looks at what a kernel has published."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cheetah.models.rounding import F32, widen

TAG_BITS = np.uint32(0x40004000)
"""Of a tagged word, in the highest bit of either exponent; see `cheetah.blocks.exchange_kinds`."""


@dataclass(frozen=True, eq=False)
class ExchangedVector:
    """A vector that phase `phase` makes. is_own: whether each rank has its own part of it. begins: whether it is
    published once more in a step, before the first layer, of the tokens' embeddings.

    stores, before: how often a layer stores to its words, and how many stores of others come before its own of the
    first layer. places: int64 [columns, words], the numbers of the 4-byte words of the buffer with a column's payload,
    in the order of its elements. powers: what pairs of bf16 come times, as powers of two, in turn; None where each word
    is a number in f32. is_sum: whether these are parts of one number.
    """

    name: str
    phase: str
    places: NDArray[np.int64]
    is_own: bool
    begins: bool
    powers: tuple[int, int] | None = None
    is_tagged: bool = False
    is_sum: bool = False
    stores: int = 1
    before: int = 0

    def turn(self, step: int, layers: int, layer: int) -> int:
        """Which store to its words, from 0, leaves it there: of a layer, or (-1) of the embedding."""
        first = self.before + self.begins
        return step * (layers * self.stores + self.begins) + first + layer * self.stores

    def numbers(self, words: NDArray[np.uint32]) -> F32:
        """What a column's words stand for."""
        if self.powers is None:
            numbers: F32 = words.view(np.float32)
            return np.asarray(numbers.sum(keepdims=True)) if self.is_sum else numbers
        pairs = widen((words & ~TAG_BITS if self.is_tagged else words).view(np.uint16)).reshape(-1, 2)
        powers = np.array(self.powers)[np.arange(len(pairs)) % 2]
        return np.asarray(np.ldexp(pairs, -powers[:, None]), np.float32).reshape(-1)
