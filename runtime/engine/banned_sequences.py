"""Sequences of ids that a completion shall not have: a watcher that forbids the last id of each, where it would follow
the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from cheetah.runtime.engine.watching import MASK_BITS, Mask, allows


class BannedSequences:
    """Watches one completion; `sequences` have two ids or more. What the prompt ends with does not count."""

    def __init__(self, sequences: Sequence[Sequence[int]], vocab_size: int):
        self._sequences = [(tuple(ids[:-1]), ids[-1]) for ids in sequences]
        self._last: deque[int] = deque(maxlen=max(len(before) for before, _ in self._sequences))
        self._words = -(-vocab_size // MASK_BITS)
        self.mask: Mask | None = None

    def after(self, token_id: int) -> None:
        self._last.append(token_id)
        self.mask = self._mask_behind(tuple(self._last))

    def forced(self) -> Sequence[int]:
        return ()

    def ahead(self, token_ids: Sequence[int]) -> list[Mask | None]:
        made, masks = tuple(self._last), [self.mask]
        for token in token_ids:
            if not allows(masks[-1], token):
                break
            made = (*made, token)
            masks.append(self._mask_behind(made))
        return masks[1:]

    def _mask_behind(self, made: tuple[int, ...]) -> Mask | None:
        banned = [last for before, last in self._sequences if made[-len(before) :] == before]
        return self._all_but(banned) if banned else None

    def _all_but(self, token_ids: Sequence[int]) -> Mask:
        mask = np.full(self._words, 0xFFFFFFFF, np.uint32)
        for token in token_ids:
            mask[token // MASK_BITS] &= ~np.uint32(1 << token % MASK_BITS)
        return mask
