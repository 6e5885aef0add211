"""Cached prefixes are found exactly, go in order of use, make way for sequences, and no page is ever lost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cheetah.errors import CheetahError
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.prefix_cache import PrefixCache


def computed(pool: PagePool, tokens: int, page_size: int = 4) -> CachedSequence:
    """A sequence of so many computed tokens."""
    sequence = CachedSequence(pool, page_size, context=1000)
    sequence.reserve(tokens)
    sequence.length = tokens
    return sequence


def test_whole_pages_are_found_but_never_the_complete_prompt() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, page_size=4)
    ids = list(range(14))
    sequence = computed(pool, 14)
    assert cache.insert(ids, sequence.pages) == 3 and len(cache) == 3
    assert [pool.count(page) for page in sequence.pages] == [2, 2, 2, 1]
    for length, pages in ((14, 3), (13, 3), (12, 2), (9, 2), (8, 1), (5, 1), (4, 0), (1, 0), (0, 0)):
        assert cache.lookup(ids[:length]) == (sequence.pages[:pages], 4 * pages)
    assert cache.lookup([*ids[:7], 99, *ids[8:]]) == (sequence.pages[:1], 4)
    assert cache.lookup([99, *ids]) == ([], 0)
    assert (cache.hits, cache.misses, cache.evicted) == (7, 4, 0)


def test_token_ids_of_any_kind_are_the_same_tokens() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, page_size=2)
    sequence = computed(pool, 4, 2)
    cache.insert(np.array([5, 6, 7, 8], np.int32), sequence.pages)
    assert cache.lookup((5, 6, 7, 8, 9)) == (sequence.pages, 4)
    assert cache.lookup(np.array([5, 6, 7, 8, 9], np.uint16)) == (sequence.pages, 4)


def test_tokens_with_equal_hashes_are_told_apart() -> None:
    """Python's hash of -1 is that of -2, and tuples hash by their elements."""
    pool = PagePool(8)
    cache = PrefixCache(pool, page_size=2)
    assert hash((-1, 3)) == hash((-2, 3))
    first, second = computed(pool, 2, 2), computed(pool, 2, 2)
    cache.insert([-1, 3], first.pages)
    assert cache.lookup([-2, 3, 0]) == ([], 0)
    cache.insert([-2, 3], second.pages)
    assert cache.lookup([-1, 3, 0]) == (first.pages, 2) and cache.lookup([-2, 3, 0]) == (second.pages, 2)


def test_the_same_page_tokens_after_other_tokens_are_another_page() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, page_size=2)
    first, second = computed(pool, 4, 2), computed(pool, 4, 2)
    cache.insert([1, 1, 2, 2], first.pages)
    assert cache.insert([3, 3, 2, 2], second.pages) == 2
    assert cache.lookup([3, 3, 2, 2, 0]) == (second.pages, 4)
    assert cache.lookup([2, 2, 0]) == ([], 0)


def test_pages_that_are_cached_stay_and_only_new_ones_are_added() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, page_size=4)
    first, again = computed(pool, 8), computed(pool, 12)
    cache.insert(range(8), first.pages)
    assert cache.insert(range(8), first.pages) == 0 and pool.count(first.pages[0]) == 2
    assert cache.insert(range(12), again.pages) == 1
    assert cache.lookup(range(13)) == ([*first.pages, again.pages[2]], 12)
    for sequence in (first, again):
        sequence.clear()
    assert pool.free_pages == 5
    cache.clear()
    assert pool.free_pages == 8 and len(cache) == 0 and cache.lookup(range(13)) == ([], 0)


def test_what_cannot_be_cached_is_refused_with_nothing_changed() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, page_size=2, capacity=2)
    sequence = computed(pool, 4, 2)
    cache.insert([1, 1, 2, 2], sequence.pages)
    for token_ids, pages, message in (
        ([7, 7, 8, 8], [2], "4 tokens fill 2 pages, but 1 pages are given"),
        ([7, 7, 8, 8], [6, 1], "page 1 holds other cached tokens"),
        ([1, 1, 8, 8], [0, 0], "page 0 holds other cached tokens"),
        ([7, 7, 8, 8], [2, 2], "page 2 holds other cached tokens"),
        ([7, 7, 8, 8], [6, 7], "page 6 is shared but nobody holds it"),
    ):
        with pytest.raises(CheetahError, match=message):
            cache.insert(token_ids, pages)
    assert cache.lookup([1, 1, 2, 2, 0]) == ([0, 1], 4) and cache.evicted == 0
    assert [pool.count(page) for page in range(8)] == [2, 2, 0, 0, 0, 0, 0, 0]
    with pytest.raises(CheetahError, match="has a prefix cache already"):
        PrefixCache(pool, page_size=2)
    with pytest.raises(CheetahError, match="cannot hold -1 pages"):
        PrefixCache(PagePool(2), page_size=2, capacity=-1)


def test_a_short_pool_takes_the_least_recently_used_leaves() -> None:
    pool = PagePool(6)
    cache = PrefixCache(pool, page_size=1)
    for ids in ([1, 2, 3], [1, 4], [5, 6]):
        sequence = computed(pool, len(ids), 1)
        cache.insert(ids, sequence.pages)
        sequence.clear()
    assert len(cache) == 6 and pool.available_pages == 6  # 1 of [1, 4] was not kept a second time
    pages = {ids[-1]: cache.lookup([*ids, 0])[0][-1] for ids in ([1, 4], [5, 6], [5], [1, 2, 3], [1, 2], [1])}
    for count, gone in ((1, {4}), (2, {4, 6, 5}), (1, {4, 6, 5, 3}), (2, {1, 2, 3, 4, 5, 6})):
        pool.take(count)
        assert {token for token, page in pages.items() if page not in cache} == gone and cache.evicted == len(gone)


def test_pages_that_a_sequence_holds_are_not_evicted() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, page_size=4)
    ids = list(range(12))
    sequence = computed(pool, 12)
    cache.insert(ids, sequence.pages)
    sequence.clear()
    reader = CachedSequence(pool, 4, context=100)
    reader.adopt(*cache.lookup(ids))  # two pages
    with pytest.raises(
        CheetahError, match="1 of 4 pages free, 3 are needed; sequences hold 2, the prefix cache alone 1"
    ):
        pool.take(3)
    assert cache.evicted == 0
    pool.take(2)
    assert cache.evicted == 1 and cache.lookup(ids) == (reader.pages, 8)


def test_pages_above_one_that_is_in_use_go_when_nothing_else_is_left() -> None:
    """Two sequences computed the same first page; the cache keeps the first one's, and the other's second page."""
    pool = PagePool(4)
    cache = PrefixCache(pool, page_size=4)
    first, second = computed(pool, 4), computed(pool, 8)
    cache.insert(range(4), first.pages)
    cache.insert(range(8), second.pages)
    first.clear()
    assert pool.free_pages == 1 and pool.available_pages == 2
    taken = pool.take(2)
    assert cache.evicted == 2 and len(cache) == 0 and pool.count(second.pages[1]) == 1
    pool.give_back(taken)
    second.clear()
    assert pool.free_pages == 4


def test_leaves_go_before_pages_above_one_that_is_in_use() -> None:
    pool = PagePool(5)
    cache = PrefixCache(pool, page_size=4)
    first, second, leaf = computed(pool, 4), computed(pool, 8), computed(pool, 4)
    cache.insert(range(4), first.pages)
    cache.insert(range(8), second.pages)
    cache.insert(range(9, 13), leaf.pages)
    pages = first.pages + leaf.pages
    first.clear()
    leaf.clear()
    for kept in ([pages[0]], []):
        pool.take(pool.free_pages + 1)
        assert [page for page in pages if page in cache] == kept


def test_at_capacity_old_pages_make_room_and_what_does_not_fit_is_left_out() -> None:
    pool = PagePool(12)
    cache = PrefixCache(pool, page_size=1, capacity=3)
    one, two, three = computed(pool, 2, 1), computed(pool, 3, 1), computed(pool, 5, 1)
    cache.insert([1, 2], one.pages)
    assert cache.insert([1, 3, 4], two.pages) == 2 and cache.evicted == 1, "the page before the new ones stays"
    assert cache.lookup([1, 3, 4, 0])[1] == 3 and cache.lookup([1, 2, 0])[1] == 1
    assert cache.insert([5, 6, 7, 8, 9], three.pages) == 3 and cache.lookup([5, 6, 7, 8, 9, 0]) == (three.pages[:3], 3)
    assert len(cache) == 3
    for sequence in (one, two, three):
        sequence.clear()
    assert pool.free_pages == 9


def test_without_capacity_nothing_is_kept() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, page_size=1, capacity=0)
    assert cache.insert([1, 2], computed(pool, 2, 1).pages) == 0 and cache.lookup([1, 2, 3]) == ([], 0)
    assert len(cache) == 0 and pool.count(0) == 1


class Model:
    """What a cache of limited capacity should hold: prefixes, as tuples of tokens, by when they were last used."""

    def __init__(self, page_size: int, capacity: int) -> None:
        self.page_size, self.capacity, self.clock = page_size, capacity, 0
        self.used: dict[tuple[int, ...], tuple[int, int]] = {}

    def cached(self, ids: list[int], pages: int) -> int:
        """How many leading pages are cached, up to `pages`; they are used."""
        found = 0
        while found < pages and self.prefix(ids, found + 1) in self.used:
            found += 1
        self.use(ids, found)
        return found

    def use(self, ids: list[int], pages: int) -> None:
        self.clock += 1
        for number in range(1, pages + 1):
            self.used[self.prefix(ids, number)] = (self.clock, -number)

    def insert(self, ids: list[int]) -> None:
        pages = len(ids) // self.page_size
        found = self.cached(ids, pages)
        own = {self.prefix(ids, number) for number in range(1, found + 1)}
        while len(self.used) + pages - found > self.capacity and set(self.used) - own:
            del self.used[min(set(self.used) - own, key=lambda prefix: self.used[prefix])]
        self.use(ids, found + min(pages - found, self.capacity - len(self.used)))

    def evict(self) -> None:
        del self.used[min(self.used, key=lambda prefix: self.used[prefix])]

    def prefix(self, ids: list[int], pages: int) -> tuple[int, ...]:
        return tuple(ids[: pages * self.page_size])


@pytest.mark.parametrize("seed", range(20))
def test_it_holds_what_a_simple_model_holds(seed: int) -> None:
    """Random insertions, lookups and shortages; between them nobody but the cache holds a page."""
    draw = random.Random(seed)
    page_size, capacity = draw.randint(1, 3), draw.randint(3, 12)
    pool = PagePool(40)
    cache, model = PrefixCache(pool, page_size, capacity), Model(page_size, capacity)
    for _ in range(150):
        ids = [draw.randrange(2) for _ in range(draw.randint(0, 6 * page_size))]
        action = draw.random()
        if action < 0.4:
            sequence = computed(pool, len(ids), page_size)
            cache.insert(ids, sequence.pages)
            sequence.clear()
            model.insert(ids)
        elif action < 0.8:
            assert cache.lookup(ids)[1] == page_size * model.cached(ids, (max(len(ids), 1) - 1) // page_size)
        elif model.used:
            pool.give_back(pool.take(pool.free_pages + 1))
            model.evict()
        assert len(cache) == len(model.used) == pool.pages - pool.free_pages
    cache.clear()
    assert pool.free_pages == 40


def converse(seed: int) -> tuple[int, int, int]:
    """Random conversations in a small pool, with memory contents. How many appends were refused, prefixes found and
    pages evicted.

    They begin with a cached prefix, go on, fork, drop tokens, are kept in the cache and end. After each action all
    sequences must read their own tokens and every page must be counted right. What is refused must be refused without
    a cache too.
    """
    draw = random.Random(seed)
    page_size, pages = draw.choice([1, 2, 3]), draw.randint(6, 16)
    pool = PagePool(pages, draw.sample(range(pages), pages))
    cache = PrefixCache(pool, page_size, draw.choice([None, None, 4]))
    memory = np.full((pages, page_size), -1)
    tokens: dict[CachedSequence, list[int]] = {}
    refused = 0

    def read(page_ids: list[int], length: int) -> list[int]:
        return memory[page_ids].reshape(-1)[:length].tolist() if page_ids else []

    def append(sequence: CachedSequence, new: list[int]) -> None:
        """As a launch does: room, copies, tokens. Says no only if sequences, without the cache, leave too little."""
        nonlocal refused
        total = sequence.length + len(new)
        first, last = sequence.length // page_size, -(-total // page_size)
        others = {page for each in tokens if each is not sequence for page in each.pages}
        needed = last - len(sequence.pages) + len(others & set(sequence.pages[first:]))
        room = pages - len(others | set(sequence.pages))
        before = (list(sequence.pages), sequence.length, pool.free_pages, len(cache))
        try:
            sequence.reserve(total)
        except CheetahError:
            refused += 1
            assert needed > room and before == (sequence.pages, sequence.length, pool.free_pages, len(cache))
            return
        assert needed <= room
        for source, target in pool.take_copies():
            memory[target] = memory[source]
        for token in new:
            memory[sequence.pages[sequence.length // page_size], sequence.length % page_size] = token
            sequence.length += 1
        tokens[sequence] += new

    for _ in range(200):
        action = draw.random()
        if not tokens or (action < 0.15 and len(tokens) < 5):
            prompt = [draw.randrange(2) for _ in range(draw.randint(1, 5 * page_size))]
            sequence = CachedSequence(pool, page_size, 1000)
            found, length = cache.lookup(prompt)
            assert read(found, length) == prompt[:length]
            sequence.adopt(found, length)
            tokens[sequence] = prompt[:length]
            append(sequence, prompt[length:])
            continue
        sequence = draw.choice(list(tokens))
        if action < 0.5:
            append(sequence, [draw.randrange(2) for _ in range(draw.randint(1, 3))])
        elif action < 0.6 and len(tokens) < 5:
            tokens[sequence.fork()] = list(tokens[sequence])
        elif action < 0.7:
            sequence.truncate(draw.randint(0, sequence.length))
            del tokens[sequence][sequence.length :]
        elif action < 0.85:
            cache.insert(tokens[sequence], sequence.pages)
        else:
            sequence.clear()
            del tokens[sequence]
        for each, own in tokens.items():
            assert read(each.pages, each.length) == own
        held = [page for each in tokens for page in each.pages] + [page for page in range(pages) if page in cache]
        assert [pool.count(page) for page in range(pages)] == [held.count(page) for page in range(pages)]
        assert pool.free_pages == pages - len(set(held)) and len(cache) <= cache.capacity
    for each in tokens:
        each.clear()
    cache.clear()
    assert pool.free_pages == pages and not any(map(pool.count, range(pages)))
    return refused, cache.hits, cache.evicted


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_sequences_over_a_cache_read_their_own_tokens_and_no_page_is_lost(first: int) -> None:
    totals = np.sum([converse(seed) for seed in range(first, first + 10)], axis=0)
    assert (totals > 20).all(), f"refused, found, evicted {totals}: some of it was hardly tried"
