"""Pages are handed out once, tables follow, and nothing changes when there is no room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cheetah.errors import CheetahError
from cheetah.runtime.kv_cache import CachedSequence, PagePool, pages_for


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
