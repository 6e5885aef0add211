"""Who needs the host between two tokens: watchers of a completion, which hear each token before the next is sampled.

While a completion with watchers decodes, launches have one step, for all who take part; it changes no bit of the
others. Between two launches each watcher hears the token and says which tokens may come next. Where tokens are drafted,
the step takes several, each chosen among those that watchers would allow behind the drafts before it. Grammars, words
of several tokens that are banned, and whatever else depends on what was made, are watchers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint32]
"""uint32 [ceil(vocab / 32)]: a bit for each token, the lowest first. Never written to once it was given away."""

MASK_BITS = 32


class TokenWatcher(Protocol):
    """Watches one completion, in the thread that makes the engine's steps.

    It is told of each token that goes on, once and in order, whatever launches the completion took part in: ids that
    are read again, after its pages were given to another, are not told again.
    """

    @property
    def mask(self) -> Mask | None:
        """Which tokens may be sampled next; None for any."""

    def forced(self) -> Sequence[int]:
        """What must come next, if anything must: to be drafted, so it may be wrong."""

    def ahead(self, token_ids: Sequence[int]) -> list[Mask | None]:
        """Which tokens could be sampled behind each of these, if they were made; up to one that may not be, or behind
        which nothing comes. Nobody is told of them."""

    def after(self, token_id: int) -> None:
        """A token was made, and another will be. CheetahError ends the completion, as failed, with its message."""


NewWatcher = Callable[[], TokenWatcher]
"""Makes the watcher of a completion that has no tokens yet; each completion of a request has its own."""


def mask_of_all(masks: Iterable[Mask | None]) -> Mask | None:
    """What all of them allow; None where none of them forbids anything."""
    found = [mask for mask in masks if mask is not None]
    if len(found) < 2:
        return found[0] if found else None
    return np.asarray(np.bitwise_and.reduce(found), np.uint32)


def allows(mask: Mask | None, token: int) -> bool:
    """Whether a mask allows a token."""
    return mask is None or bool(mask[token // MASK_BITS] >> np.uint32(token % MASK_BITS) & 1)


def allows_one_beside(mask: Mask, token_ids: Sequence[int]) -> bool:
    """Whether a mask allows any other token than these."""
    rest = mask.copy()
    for token in token_ids:
        if token // MASK_BITS < len(rest):
            rest[token // MASK_BITS] &= ~np.uint32(1 << token % MASK_BITS)
    return bool(rest.any())
