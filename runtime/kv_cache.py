"""Which pages of the KV pool hold which tokens of which sequence.

The pool is `[layers, pages, 2, kv_heads, page_size, head_dim]`; one page id covers all layers and heads of `page_size`
tokens. Token t of a sequence lies in page `table[t // page_size]`, slot `t % page_size`. Pure bookkeeping: knows
nothing of devices. Sequences are independent objects over one pool, so that more of them can be added.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` tokens need."""
    return -(-tokens // page_size)


class PagePool:
    """Hands out page ids 0 .. pages-1, in the order given (ascending by default)."""

    def __init__(self, pages: int, order: Iterable[int] | None = None):
        self.pages = pages
        self._free = list(range(pages) if order is None else order)
        if sorted(self._free) != list(range(pages)):
            raise ValueError(f"order must name each page 0..{pages - 1} once")

    @property
    def free_pages(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages, or CheetahError with none taken."""
        if count > len(self._free):
            raise CheetahError(f"the KV pool has {len(self._free)} of {self.pages} pages free, {count} are needed")
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, pages: Iterable[int]) -> None:
        """Frees pages; the last ones given back are the first to be handed out again."""
        self._free = [*pages, *self._free]


class CachedSequence:
    """The cached tokens of one sequence.

    `length` tokens are in the cache. `context` is how many there may be at most, `context_reason` says whose limit it
    is (for the error).
    """

    def __init__(self, pool: PagePool, page_size: int, context: int, context_reason: str = "max_context"):
        self._pool = pool
        self._page_size = page_size
        self.context = context
        self._context_reason = context_reason
        self.pages: list[int] = []
        self.length = 0

    def reserve(self, tokens: int) -> bool:
        """Makes room for `tokens` tokens in all; true if the page table changed. Refuses more than the context, and
        more pages than the pool has, with nothing changed."""
        self.check_fits(tokens)
        missing = pages_for(tokens, self._page_size) - len(self.pages)
        if missing <= 0:
            return False
        self.pages += self._pool.take(missing)
        return True

    def check_fits(self, tokens: int) -> None:
        """CheetahError if `tokens` tokens are more than the context."""
        if tokens > self.context:
            raise CheetahError(f"{tokens} tokens do not fit the context of {self.context} ({self._context_reason})")

    def clear(self) -> None:
        """Forgets all tokens and gives the pages back."""
        self._pool.give_back(self.pages)
        self.pages, self.length = [], 0

    def table(self, entries: int) -> npt.NDArray[np.int32]:
        """The page table, int32 [entries]; entries without a page are -1, so that a stray read is noticed."""
        table = np.full(entries, -1, np.int32)
        table[: len(self.pages)] = self.pages
        return table
