"""Pages are counted, tables follow, pages that others hold are copied, and nothing changes when there is no room."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cheetah.errors import CheetahError
from cheetah.manifest import NO_PAGE
from cheetah.runtime.engine.kv_cache import (
    CachedSequence,
    PageCopy,
    PagePool,
    PagesExhausted,
    pages_for,
    shared_prefix,
)
from cheetah.runtime.engine.states import StatePool


@given(st.integers(0, 200), st.integers(1, 64))
def test_pages_hold_the_tokens_and_not_one_page_more(tokens: int, page_size: int) -> None:
    pages = pages_for(tokens, page_size)
    assert pages * page_size >= tokens > (pages - 1) * page_size or tokens == pages == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=30), st.permutations(range(12)))
def test_no_page_is_ever_held_twice(requests: list[tuple[int, int]], order: list[int]) -> None:
    pool = PagePool(12, order)
    sequences = [CachedSequence(pool, 4, context=40) for _ in range(3)]
    for which, tokens in requests:
        if tokens == 0:
            sequences[which].clear()
            continue
        before = list(sequences[which].pages)
        try:
            sequences[which].reserve(tokens)
        except CheetahError:
            assert sequences[which].pages == before
        assert sequences[which].pages[: len(before)] == before, "a page moved under cached tokens"
    held = [page for sequence in sequences for page in sequence.pages]
    assert len(held) == len(set(held)) and len(held) + pool.free_pages == 12


def test_reserve_says_when_the_table_changes() -> None:
    sequence = CachedSequence(PagePool(4), page_size=16, context=64)
    assert [sequence.reserve(tokens) for tokens in (1, 16, 17, 10)] == [True, False, True, False]
    assert sequence.table(4).tolist() == [0, 1, -1, -1]


def test_the_context_is_refused_with_its_reason() -> None:
    sequence = CachedSequence(PagePool(4), page_size=16, context=50, context_reason="max_position_embeddings")
    with pytest.raises(CheetahError, match=r"51 tokens do not fit the context of 50 \(max_position_embeddings\)"):
        sequence.reserve(51)
    assert sequence.pages == []


def test_an_empty_pool_is_refused_with_its_numbers() -> None:
    with pytest.raises(CheetahError, match="1 of 2 pages free, 2 are needed"):
        pool = PagePool(2)
        pool.take(1)
        pool.take(2)


def test_an_order_must_name_every_page() -> None:
    with pytest.raises(ValueError, match="once"):
        PagePool(3, [0, 1, 1])


def test_a_page_is_free_when_all_who_hold_it_gave_it_back() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    pool.share(pages)
    assert [pool.count(page) for page in range(3)] == [2, 2, 0]
    pool.give_back(pages)
    assert pool.free_pages == 1 and pool.count(pages[0]) == 1
    pool.give_back([pages[1], pages[0]])
    assert pool.free_pages == 3 and pool.take(3) == [1, 0, 2]


def test_what_a_draft_model_has_read_of_a_page_is_forgotten_when_it_is_taken_anew() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    pool.note_drafted(pages[:1])
    pool.give_back(pages)
    assert [pool.is_drafted(page) for page in pages] == [True, False], "as long as a prefix cache may give it again"
    assert not any(map(pool.is_drafted, pool.take(3)))


def test_what_would_spoil_the_counts_is_refused_by_page_with_nothing_changed() -> None:
    pool = PagePool(4)
    pool.take(2)
    for call, pages, message in (
        (pool.give_back, [0, 2], "page 2 is given back 1 times, but held 0 times"),
        (pool.give_back, [0, 1, 1], "page 1 is given back 2 times, but held 1 times"),
        (pool.share, [0, 3], "page 3 is shared but nobody holds it"),
        (pool.share, [0, 4], "page 4 is not in the pool: its pages are 0 to 3"),
        (pool.give_back, [0, -1], "page -1 is not in the pool"),
    ):
        with pytest.raises(CheetahError, match=message):
            call(pages)
    with pytest.raises(CheetahError, match="page -1 is not in the pool"):
        pool.count(-1)
    assert [pool.count(page) for page in range(4)] == [1, 1, 0, 0] and pool.free_pages == 2


class KeptPages:
    """A page cache of single pages, oldest first."""

    def __init__(self, pool: PagePool, pages: list[int]) -> None:
        self.pool, self.pages = pool, pages
        pool.cache = self

    def pages_held_alone(self) -> int:
        return sum(self.pool.count(page) == 1 for page in self.pages)

    def evict(self, count: int) -> int:
        alone = [page for page in self.pages if self.pool.count(page) == 1][:count]
        for page in alone:
            self.forget(page)
        return len(alone)

    def __contains__(self, page: object) -> bool:
        return page in self.pages

    def forget(self, page: int) -> None:
        if page in self.pages:
            self.pages.remove(page)
            self.pool.give_back([page])


def test_the_cache_gives_pages_up_before_a_request_is_refused_and_only_as_many_as_needed() -> None:
    pool = PagePool(6)
    kept = KeptPages(pool, pool.take(4))
    pool.share([2])  # by a sequence as well
    assert (pool.free_pages, pool.available_pages) == (2, 5)
    pool.take(3)
    assert kept.pages == [1, 2, 3]
    refusal = (
        "the KV pool has 0 of 6 pages free, 3 are needed; sequences hold 4, the prefix cache alone 2 that it would "
        "give up: use fewer sequences at a time (a smaller n), shorter ones, or a plan with a larger max_context or "
        "batch"
    )
    with pytest.raises(CheetahError) as caught:
        pool.take(3)
    assert str(caught.value) == refusal and kept.pages == [1, 2, 3], "nothing is given up for nothing"


def test_a_fork_shares_its_pages_and_only_the_partial_one_is_copied() -> None:
    pool = PagePool(8)
    first = CachedSequence(pool, page_size=4, context=32)
    first.reserve(16)
    first.length = 10
    second = first.fork()
    assert (second.pages, second.length, second.context) == ([0, 1, 2], 10, 32), "pages reserved ahead are not shared"
    assert not second.reserve(10) and second.pages == [0, 1, 2], "nothing will be written"
    assert second.reserve(11) and second.pages == [0, 1, 4]
    assert pool.take_copies() == [PageCopy(source=2, target=4)] and pool.take_copies() == []
    assert not first.reserve(11) and pool.take_copies() == [], "nobody else holds its page any more"
    assert [pool.count(page) for page in range(5)] == [2, 2, 1, 1, 1]
    first.clear()
    second.clear()
    assert pool.free_pages == 8


def test_a_fork_at_a_page_edge_copies_nothing() -> None:
    pool = PagePool(8)
    first = CachedSequence(pool, page_size=4, context=32)
    first.reserve(8)
    first.length = 8
    second = first.fork()
    assert not second.reserve(8) and second.reserve(9) and first.reserve(9)
    assert pool.take_copies() == [] and (first.pages, second.pages) == ([0, 1, 3], [0, 1, 2])


def test_a_shared_page_without_own_tokens_is_replaced_and_not_copied() -> None:
    pool = PagePool(8)
    first = CachedSequence(pool, page_size=4, context=32)
    first.reserve(8)
    first.length = 8
    second = first.fork()
    first.length = 4  # dropped without giving the page back
    assert first.reserve(5) and first.pages == [0, 2] and second.pages == [0, 1]
    assert pool.take_copies() == []


def test_copies_are_made_in_the_order_in_which_they_arose() -> None:
    """The source of one is given back and becomes the target of the next, before either is made."""
    contents = Contents(pages=4, page_size=4, order=[0, 1, 2, 3])
    pool = contents.pool
    first, other = (CachedSequence(pool, page_size=4, context=32) for _ in range(2))
    for sequence, tokens in ((first, [1, 2]), (other, [3, 4])):
        sequence.reserve(2)
        contents.write(sequence, tokens)
    second, another = first.fork(), other.fork()
    second.reserve(3)
    first.clear()
    another.reserve(3)
    assert pool._copies == [PageCopy(0, 2), PageCopy(1, 0)]
    contents.copy()
    assert contents.read(second) == [1, 2] and contents.read(another) == contents.read(other) == [3, 4]


def test_truncated_tokens_give_their_pages_back() -> None:
    pool = PagePool(8)
    sequence = CachedSequence(pool, page_size=4, context=32)
    sequence.reserve(20)
    sequence.length = 14
    sequence.truncate(9)
    assert (sequence.pages, sequence.length, pool.free_pages) == ([0, 1, 2], 9, 5)
    for tokens in (10, -1):
        with pytest.raises(CheetahError, match=f"cannot truncate a sequence of 9 tokens to {tokens}"):
            sequence.truncate(tokens)
    sequence.truncate(0)
    assert pool.free_pages == 8


def test_a_refused_copy_on_write_changes_nothing() -> None:
    pool = PagePool(3)
    first = CachedSequence(pool, page_size=4, context=32)
    first.reserve(10)
    first.length = 10
    second = first.fork()
    with pytest.raises(CheetahError, match="0 of 3 pages free, 1 are needed; sequences hold 3"):
        second.reserve(11)
    assert second.pages == first.pages == [0, 1, 2] and pool.take_copies() == []
    assert [pool.count(page) for page in range(3)] == [2, 2, 2]


def test_a_page_that_only_the_cache_shares_needs_no_copy_where_there_is_no_room_for_one() -> None:
    pool = PagePool(2)
    sequence = CachedSequence(pool, page_size=4, context=8)
    sequence.reserve(8)
    pool.share([0, 1])
    kept = KeptPages(pool, [0, 1])
    sequence.length = 6
    assert not sequence.reserve(8) and sequence.pages == [0, 1]
    assert kept.pages == [0] and pool.take_copies() == []


def test_adopting_begins_an_empty_sequence_with_full_pages() -> None:
    pool = PagePool(8)
    pages = pool.take(2)
    sequence = CachedSequence(pool, page_size=4, context=11)
    for tokens, message in ((7, "7 tokens do not fill 2 pages: adopt 8 tokens"), (9, "9 tokens do not fill 2 pages")):
        with pytest.raises(CheetahError, match=message):
            sequence.adopt(pages, tokens)
    with pytest.raises(CheetahError, match="12 tokens do not fit the context of 11"):
        sequence.adopt([*pages, 2], 12)
    with pytest.raises(CheetahError, match="page 2 is shared but nobody holds it"):
        sequence.adopt([pages[0], 2], 8)
    sequence.adopt(pages, 8)
    assert (sequence.pages, sequence.length, pool.count(0)) == ([0, 1], 8, 2)
    with pytest.raises(CheetahError, match="a sequence that has 8 tokens cannot adopt 8: clear it first"):
        sequence.adopt(pages, 8)
    pool.give_back(pages)
    assert sequence.reserve(9) and sequence.table(4).tolist() == [0, 1, 2, -1] and pool.take_copies() == []


def test_the_shared_prefix_is_whole_pages_that_all_have_filled() -> None:
    pool = PagePool(16)
    first = CachedSequence(pool, page_size=4, context=64)
    first.reserve(14)
    first.length = 14
    forks = [first.fork() for _ in range(2)]
    assert shared_prefix([]) == 0 and shared_prefix([first]) == 12
    assert shared_prefix([first, *forks]) == 12, "the page they share in part is not whole"
    forks[0].truncate(7)
    assert shared_prefix([first, *forks]) == 4 and shared_prefix([first, forks[1]]) == 12
    forks[1].length = 5
    forks[1].reserve(6)
    assert shared_prefix([first, forks[1]]) == 4
    other = CachedSequence(pool, page_size=4, context=64)
    other.reserve(12)
    other.length = 12
    assert shared_prefix([other, first]) == 0


class Contents:
    """What a device would hold: pages of numbers, to which sequences append, with every copy made as it is noted."""

    def __init__(self, pages: int, page_size: int, order: list[int]) -> None:
        self.pool, self.page_size = PagePool(pages, order), page_size
        self.memory = np.full((pages, page_size), -1)

    def copy(self) -> None:
        for source, target in self.pool.take_copies():
            self.memory[target] = self.memory[source]

    def write(self, sequence: CachedSequence, tokens: list[int]) -> None:
        """Appends tokens that were reserved; the copies are made."""
        for token in tokens:
            page = sequence.pages[sequence.length // self.page_size]
            self.memory[page, sequence.length % self.page_size] = token
            sequence.length += 1

    def read(self, sequence: CachedSequence) -> list[int]:
        return [int(token) for page in sequence.pages for token in self.memory[page]][: sequence.length]


@pytest.mark.parametrize("seed", range(40))
def test_every_sequence_keeps_its_own_tokens_whatever_the_others_do(seed: int) -> None:
    """Random appends (several sequences before the copies are made), forks, truncations and ends, in a small pool."""
    draw = random.Random(seed)
    page_size = draw.choice([1, 2, 3, 4, 8])
    pages = draw.randint(6, 14)
    contents = Contents(pages, page_size, draw.sample(range(pages), pages))
    pool = contents.pool
    sequences = [CachedSequence(pool, page_size, 5 * page_size)]
    tokens: dict[CachedSequence, list[int]] = {sequences[0]: []}
    for _ in range(150):
        sequence, action = draw.choice(sequences), draw.random()
        if action < 0.5:
            launched: dict[CachedSequence, list[int]] = {}
            for each in draw.sample(sequences, draw.randint(1, len(sequences))):
                before = (list(each.pages), each.length, pool.free_pages)
                new = [draw.randrange(1000) for _ in range(draw.randint(1, 3))]
                try:
                    each.reserve(each.length + len(new) + draw.choice([0, 0, page_size]))
                except CheetahError:
                    assert before == (each.pages, each.length, pool.free_pages)
                else:
                    launched[each] = new
            contents.copy()
            for each, new in launched.items():
                contents.write(each, new)
                tokens[each] += new
        elif action < 0.7 and len(sequences) < 5:
            sequences.append(sequence.fork())
            tokens[sequences[-1]] = list(tokens[sequence])
        elif action < 0.9:
            sequence.truncate(draw.randint(0, sequence.length))
            del tokens[sequence][sequence.length :]
        elif len(sequences) > 1:
            sequence.clear()
            sequences.remove(sequence)
        for each in sequences:
            assert contents.read(each) == tokens[each]
        held = [page for each in sequences for page in each.pages]
        assert [pool.count(page) for page in range(pages)] == [held.count(page) for page in range(pages)]
        assert pool.free_pages == pages - len(set(held))
    for each in sequences:
        each.clear()
    assert pool.free_pages == pages


def test_pages_that_a_window_left_behind_are_given_back_once_and_stay_behind() -> None:
    pool = PagePool(8)
    sequence = CachedSequence(pool, 4, 40)
    sequence.reserve(18)
    sequence.length = 18
    fork = sequence.fork()
    sequence.drop_before(11)
    assert sequence.pages == [NO_PAGE, NO_PAGE, 2, 3, 4] and pool.free_pages == 3, "the fork holds them still"
    sequence.drop_before(3)
    sequence.drop_before(11)
    assert [pool.count(page) for page in range(5)] == [1, 1, 2, 2, 2]
    fork.clear()
    assert pool.free_pages == 5 and sequence.table(7).tolist() == [NO_PAGE, NO_PAGE, 2, 3, 4, NO_PAGE, NO_PAGE]
    other = sequence.fork()
    assert other.pages == sequence.pages and pool.count(4) == 2
    sequence.reserve(24)
    assert len(sequence.pages) == 6 and NO_PAGE not in sequence.pages[2:]
    with pytest.raises(CheetahError, match="cannot truncate a sequence to 6 tokens: their pages were given back"):
        other.truncate(6)
    other.truncate(12)
    assert other.pages == sequence.pages[:3]
    other.truncate(0)
    assert not other.pages
    sequence.clear()
    assert pool.free_pages == 8


def test_sequences_have_states_of_their_own_as_long_as_they_have_pages() -> None:
    pool = PagePool(8, states=StatePool(2))
    first = CachedSequence(pool, 4, 32)
    assert first.state is None and first.reserve(3) and first.state == 0
    first.length = 3
    second = first.fork()
    assert second.state == 1 and pool.states.take_copies() == [(0, 1)] and pool.states.take_copies() == []
    with pytest.raises(PagesExhausted, match="all 2 states are held"):
        CachedSequence(pool, 4, 32).reserve(1)
    with pytest.raises(PagesExhausted, match="all 2 states are held"):
        first.fork()
    free = pool.free_pages
    with pytest.raises(CheetahError, match="it remembers 3 at once"):
        first.truncate(2)
    with pytest.raises(CheetahError, match="give the state behind them too"):
        CachedSequence(pool, 4, 32).adopt(first.pages, 4)
    second.go_back(3)
    assert second.length == 3
    second.go_back(2)  # it forgets all of them
    third = CachedSequence(pool, 4, 32)
    assert (second.length, second.state, pool.free_pages) == (0, None, free) and third.reserve(2) and third.state == 1
