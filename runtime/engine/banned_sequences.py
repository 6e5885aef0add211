"""Sequences of ids that a completion shall not have: a watcher that forbids the last id of each, where it would follow
the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from cheetah.runtime.engine.watching import MASK_BITS, Mask


class BannedSequences:
    """Watches one completion; `sequences` have two ids or more. What the prompt ends with does not count."""

    def __init__(self, sequences: Sequence[Sequence[int]], vocab_size: int):
        self._sequences = [(tuple(ids[:-1]), ids[-1]) for ids in sequences]
        self._last: deque[int] = deque(maxlen=max(len(before) for before, _ in self._sequences))
        self._words = -(-vocab_size // MASK_BITS)
        self.mask: Mask | None = None

    def after(self, token_id: int) -> None:
        self._last.append(token_id)
        made = tuple(self._last)
        banned = [last for before, last in self._sequences if made[-len(before) :] == before]
        self.mask = self._all_but(banned) if banned else None

    def _all_but(self, token_ids: Sequence[int]) -> Mask:
        mask = np.full(self._words, 0xFFFFFFFF, np.uint32)
        for token in token_ids:
            mask[token // MASK_BITS] &= ~np.uint32(1 << token % MASK_BITS)
        return mask
