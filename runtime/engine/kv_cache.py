"""Which pages of the KV pool hold which tokens of which sequence.

The pool is `[layers, pages, 2, kv_heads, page_size, head_dim]`; one page id covers all layers and heads of `page_size`
tokens. Token t of a sequence lies in page `table[t // page_size]`, slot `t % page_size`. Sequences are independent
objects over one pool. They may hold the same page, as long as nobody writes to it: pages are counted, and whoever is
about to write to a page that others hold gets a copy of it. Pure bookkeeping: knows nothing of devices, so it only
notes which copies are to be made (`PagePool.take_copies`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.manifest import NO_PAGE
from cheetah.runtime.engine.states import StatePool


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` tokens need."""
    return -(-tokens // page_size)


class PagesExhausted(CheetahError):
    """More pages are asked for than are free, or held by the prefix cache alone."""


class PageCopy(NamedTuple):
    """Page `target` is to become a copy of page `source`, in all layers."""

    source: int
    target: int


class PageCache(Protocol):
    """What keeps pages for later and gives them up when the pool has no others; see `prefix_cache`."""

    def pages_held_alone(self) -> int:
        """How many pages nobody else holds: `evict` frees as many, if asked to."""

    def evict(self, count: int) -> int:
        """Frees `count` pages, or as many as it holds alone; says how many."""

    def __contains__(self, page: object) -> bool:
        """Does it hold this page?"""

    def forget(self, page: int) -> None:
        """Gives this page up, whoever else holds it, and what is of no use without it; nothing if it has it not."""


class PagePool:
    """Hands out page ids 0 .. pages-1, in the order given (ascending by default), and counts who holds each.

    Whoever takes or shares a page gives it back once; it is free when all have. Every method either does all that is
    asked or raises with nothing changed. `cache`, if set, is asked to give pages up before a request is refused.
    states: those of its sequences, where they have some.
    """

    def __init__(self, pages: int, order: Iterable[int] | None = None, states: StatePool | None = None):
        self.pages, self.states = pages, states or StatePool()
        self.cache: PageCache | None = None
        self._free = list(range(pages) if order is None else order)
        if sorted(self._free) != list(range(pages)):
            raise ValueError(f"order must name each page 0..{pages - 1} once")
        self._counts = [0] * pages
        self._copies: list[PageCopy] = []
        self._drafted: set[int] = set()

    @property
    def free_pages(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    @property
    def available_pages(self) -> int:
        """How many pages `take` can hand out: the free ones, and those that the cache alone holds."""
        return self.free_pages + self._held_by_cache_alone()

    def count(self, page: int) -> int:
        """How many hold the page; 0 if it is free."""
        if not 0 <= page < self.pages:
            self._check_ids([page])
        return self._counts[page]

    def take(self, count: int) -> list[int]:
        """`count` pages, each held once. PagesExhausted if there are not as many, with none taken and none evicted."""
        if count > self.free_pages:
            self._evict_for(count)
        taken, self._free = self._free[:count], self._free[count:]
        for page in taken:
            self._counts[page] = 1
        self._drafted.difference_update(taken)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One holder more for each of these pages. CheetahError names a page that nobody holds."""
        pages = list(pages)
        self._check_ids(pages)
        for page in pages:
            if not self._counts[page]:
                raise CheetahError(f"page {page} is shared but nobody holds it: share pages before they are given back")
        for page in pages:
            self._counts[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One holder less for each of these pages; the last ones freed are the first to be handed out again.

        CheetahError names a page that is given back more often than it is held.
        """
        pages = list(pages)
        self._check_ids(pages)
        for page, times in Counter(pages).items():
            if times > self._counts[page]:
                held = self._counts[page]
                raise CheetahError(f"page {page} is given back {times} times, but held {held} times: give it back once")
        freed = []
        for page in pages:
            self._counts[page] -= 1
            if not self._counts[page]:
                freed.append(page)
        self._free = [*freed, *self._free]

    def note_drafted(self, pages: Iterable[int]) -> None:
        """A draft model has read all tokens of these pages too; it holds until a page is taken anew."""
        self._drafted.update(pages)

    def is_drafted(self, page: int) -> bool:
        """Whether a draft model's keys of a page's tokens are there."""
        return page in self._drafted

    def note_copy(self, source: int, target: int) -> None:
        """Notes that `target` must become a copy of `source` before the next launch."""
        self._copies.append(PageCopy(source, target))

    def take_copies(self) -> list[PageCopy]:
        """The page copies to make now, in this order and before the next launch; after that they are forgotten.

        The order matters: a page may be the source of one and, given back meanwhile, the target of a later one.
        """
        copies, self._copies = self._copies, []
        return copies

    def _check_ids(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not 0 <= page < self.pages:
                raise CheetahError(f"page {page} is not in the pool: its pages are 0 to {self.pages - 1}")

    def _held_by_cache_alone(self) -> int:
        return self.cache.pages_held_alone() if self.cache is not None else 0

    def _evict_for(self, count: int) -> None:
        """Has the cache free what `count` pages lack, or refuses."""
        cached, missing = self._held_by_cache_alone(), count - self.free_pages
        if self.cache is None or missing > cached:
            raise PagesExhausted(
                f"the KV pool has {self.free_pages} of {self.pages} pages free, {count} are needed; sequences hold "
                f"{self.pages - self.free_pages - cached}, the prefix cache alone {cached} that it would give up: use "
                f"fewer sequences at a time (a smaller n), shorter ones, or a plan with a larger max_context or batch"
            )
        freed = self.cache.evict(missing)
        assert freed >= missing, f"the cache freed {freed} pages of {cached} that it said it holds alone"


class CachedSequence:
    """The cached tokens of one sequence.

    `length` tokens are in the cache, in `pages` (NO_PAGE: given back, because a window left it behind); a launch's new
    tokens are added to `length` by whoever launched it. `state` is the number of what it remembers of them, where
    sequences have that beside their pages.
    `context` is how many there may be at most, `context_reason` says whose limit it is (for the error). Every method
    either does all that is asked or raises CheetahError with nothing changed. `clear` it when it is not needed any
    more: its pages stay taken until then.
    """

    def __init__(self, pool: PagePool, page_size: int, context: int, context_reason: str = "max_context"):
        self.pool = pool
        self.page_size = page_size
        self.context = context
        self._context_reason = context_reason
        self.pages: list[int] = []
        self.length = 0
        self.state: int | None = None

    def reserve(self, tokens: int) -> bool:
        """Makes room for `tokens` tokens in all, of which those from `length` on will be written; true if the page
        table changed.

        Pages that would be written to and that others hold are replaced by pages of its own. Where such a page has
        tokens of this sequence, a copy is noted: make `pool.take_copies()` on the device before the launch. Refuses
        more than the context, and more pages than the pool has.
        """
        self.check_fits(tokens)
        if tokens <= self.length:
            return False
        lacks_state = self.pool.states.count > 0 and self.state is None
        if lacks_state and not self.pool.states.free:
            raise PagesExhausted(f"all {self.pool.states.count} states are held by sequences: use fewer at a time")
        is_changed = self._reserve_pages(tokens)
        if lacks_state:
            self.state = self.pool.states.take()
        return is_changed

    def _reserve_pages(self, tokens: int) -> bool:
        missing = max(0, pages_for(tokens, self.page_size) - len(self.pages))
        shared = self._shared_to_write(tokens)
        if not missing and not shared:
            return False
        if shared and self._privatise_for_room(shared, missing):
            shared = self._shared_to_write(tokens)
        taken = self.pool.take(missing + len(shared))
        for index, page in zip(shared, taken, strict=False):
            self._replace(index, page)
        self.pages += taken[len(shared) :]
        return bool(taken)

    def fork(self) -> CachedSequence:
        """Another sequence with the same tokens, in the same pages. Both can go on, each its own way."""
        other = CachedSequence(self.pool, self.page_size, self.context, self._context_reason)
        pages = self.pages[: pages_for(self.length, self.page_size)]
        self.pool.share(page for page in pages if page != NO_PAGE)
        other.pages, other.length = pages, self.length
        if self.state is not None and self.length:
            other._copy_state(self.state)
        return other

    def _copy_state(self, source: int) -> None:
        if not self.pool.states.free:
            self.clear()
            raise PagesExhausted(f"all {self.pool.states.count} states are held by sequences: use fewer at a time")
        self.state = self.pool.states.take()
        self.pool.states.note_copy(source, self.state)

    def adopt(self, pages: Sequence[int], tokens: int, state: int | None = None) -> None:
        """Begins an empty sequence with `tokens` tokens that full pages of others hold, such as a cached prefix. state:
        what is remembered of just these, of which it gets a copy, where sequences have states."""
        if self.pages or self.length:
            raise CheetahError(f"a sequence that has {self.length} tokens cannot adopt {tokens}: clear it first")
        if tokens != len(pages) * self.page_size:
            capacity = len(pages) * self.page_size
            raise CheetahError(f"{tokens} tokens do not fill {len(pages)} pages: adopt {capacity} tokens, full pages")
        if tokens and self.pool.states.count and state is None:
            raise CheetahError("what a sequence remembers of its tokens is in no page: give the state behind them too")
        self.check_fits(tokens)
        if tokens and state is not None:
            self._copy_state(state)
        self.pool.share(pages)
        self.pages, self.length = list(pages), tokens

    def drop_before(self, token: int) -> None:
        """Gives back the pages whose tokens all come before number `token`: nobody reads them any more.

        What is left goes on as before, and can be truncated to nothing or to `token` tokens and more.
        """
        gone = min(token // self.page_size, len(self.pages))
        self._give_back(self.pages[:gone])
        self.pages[:gone] = [NO_PAGE] * gone

    def take_copies(self) -> list[PageCopy]:
        """The pool's copies that are due before a launch of this sequence; see there."""
        return self.pool.take_copies()

    def truncate(self, tokens: int) -> None:
        """Drops the tokens from number `tokens` on, such as rejected drafts, and gives back pages that have none left,
        also those reserved ahead."""
        if not 0 <= tokens <= self.length:
            raise CheetahError(f"cannot truncate a sequence of {self.length} tokens to {tokens}: give 0 to its length")
        if self.state is not None and 0 < tokens < self.length:
            raise CheetahError(f"cannot truncate a sequence to {tokens} tokens: it remembers {self.length} at once")
        kept = pages_for(tokens, self.page_size)
        if kept and self.pages[kept - 1] == NO_PAGE:
            raise CheetahError(f"cannot truncate a sequence to {tokens} tokens: their pages were given back")
        self._give_back(self.pages[kept:])
        self.pages, self.length = self.pages[:kept], tokens

    def go_back(self, tokens: int) -> None:
        """Forgets the tokens from number `tokens` on, and all where it remembers them at once: they are read again."""
        if self.state is None:
            self.truncate(tokens)
        elif tokens < self.length:
            self.clear()

    def check_fits(self, tokens: int) -> None:
        """CheetahError if `tokens` tokens are more than the context."""
        if tokens > self.context:
            raise CheetahError(f"{tokens} tokens do not fit the context of {self.context} ({self._context_reason})")

    def clear(self) -> None:
        """Forgets all tokens and gives the pages back."""
        self._give_back(self.pages)
        self.pages, self.length = [], 0
        if self.state is not None:
            self.pool.states.give_back(self.state)
            self.state = None

    def table(self, entries: int) -> npt.NDArray[np.int32]:
        """The page table, int32 [entries]; entries without a page are NO_PAGE."""
        table = np.full(entries, NO_PAGE, np.int32)
        table[: len(self.pages)] = self.pages
        return table

    def _give_back(self, pages: Iterable[int]) -> None:
        self.pool.give_back(page for page in pages if page != NO_PAGE)

    def _shared_to_write(self, tokens: int) -> list[int]:
        """Which of its pages, as places in the table, hold tokens `length` .. `tokens`-1 and are held by others too."""
        written = range(self.length // self.page_size, min(len(self.pages), pages_for(tokens, self.page_size)))
        return [index for index in written if self.pool.count(self.pages[index]) > 1]

    def _privatise_for_room(self, shared: Sequence[int], missing: int) -> bool:
        """Where the pool is short, has the cache forget pages that it shares with this sequence alone; whether it did.

        They need no copy then, so that what fits without a cache also fits with one.
        """
        cache = self.pool.cache
        short = missing + len(shared) - self.pool.available_pages
        if cache is None or short <= 0:
            return False
        pages = [self.pages[index] for index in shared]
        only_cached = [page for page in pages if page in cache and self.pool.count(page) == 2]
        if short > len(only_cached):
            return False
        for page in only_cached:
            cache.forget(page)
        return True

    def _replace(self, index: int, page: int) -> None:
        shared = self.pages[index]
        if index * self.page_size < self.length:
            self.pool.note_copy(shared, page)
        self.pool.give_back([shared])
        self.pages[index] = page


def shared_prefix(sequences: Sequence[CachedSequence]) -> int:
    """How many leading tokens these sequences have in the same pages: whole pages, filled in every one of them.

    Such tokens can be read once for all (level 0 of a KV plan). 0 for no sequences; all whole pages for one.
    """
    if not sequences:
        return 0
    page_size = sequences[0].page_size
    full = min(sequence.length // page_size for sequence in sequences)
    same = (len(set(pages)) == 1 for pages in islice(zip(*[one.pages for one in sequences], strict=False), full))
    return page_size * next((number for number, is_same in enumerate(same) if not is_same), full)
