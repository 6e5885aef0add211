"""Page tables mean what they say, and what is no page table is refused by place and value."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cheetah.plan.errors import PlanError
from cheetah.plan.kv.page_table import (
    PageTable,
    check_page_table,
    lengths_of,
    page_counts,
    page_table,
)


@pytest.mark.slow
@given(st.data(), st.integers(1, 9), st.lists(st.integers(0, 60), max_size=6))
def test_tokens_are_found_where_their_pages_are(data: st.DataObject, page_size: int, lengths: list[int]) -> None:
    lists = [data.draw(st.lists(st.integers(0, 99), min_size=61, max_size=61)) for _ in lengths]
    table = page_table(lists, lengths, page_size)
    check_page_table(*table, pages=100, page_size=page_size)
    assert lengths_of(table.indptr, table.last_page_len, page_size).tolist() == lengths
    assert page_counts(table.indptr).tolist() == [-(-length // page_size) for length in lengths]
    for request, length in enumerate(lengths):
        pages = table.indices[table.indptr[request] : table.indptr[request + 1]]
        assert pages.tolist() == lists[request][: -(-length // page_size)]


def good() -> PageTable:
    """Three requests of 9, 0 and 4 tokens in pages of 4."""
    return page_table([[3, 1, 7], [], [5]], [9, 0, 4], 4)


def test_a_good_table() -> None:
    table = good()
    assert [array.tolist() for array in table] == [[0, 3, 3, 4], [3, 1, 7, 5], [1, 0, 4]]
    assert {array.dtype for array in table} == {np.dtype(np.int32)}
    check_page_table(*table, pages=8, page_size=4)
    check_page_table(*page_table([], [], 4), pages=8, page_size=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indptr": np.array([0, 3, 3, 4])}, r"indptr is int64: give int32, e.g. indptr.astype\(np.int32\)"),
        ({"indices": np.array([3, 1, 7, 5])}, "indices is int64: give int32"),
        ({"last_page_len": np.array([1, 0, 4], np.uint32)}, "last_page_len is uint32: give int32"),
        ({"indices": [3, 1, 7, 5]}, "indices is a list: give a numpy array of int32"),
        ({"indices": [[3, 1, 7, 5]]}, r"indices has shape \(1, 4\): give one dimension"),
        ({"indptr": []}, "indptr is empty"),
        ({"indptr": [1, 3, 3, 4]}, "indptr begins with 1: give 0"),
        ({"indptr": [0, 3, 2, 4]}, "indptr decreases from 3 to 2 at request 1"),
        ({"indptr": [0, -1, 3, 4]}, "indptr decreases from 0 to -1 at request 0"),
        ({"indptr": [0, 3, 3, 5]}, "indptr ends with 5, but indices has 4 pages"),
        ({"indptr": [0, 3, 3, 3]}, "indptr ends with 3, but indices has 4 pages"),
        ({"indices": [3, 1, 8, 5]}, r"indices\[2\] \(request 0\) is page 8, outside the pool: give 0 to 7"),
        ({"indices": [3, 1, 7, -1]}, r"indices\[3\] \(request 2\) is page -1"),
        ({"last_page_len": [1, 0]}, "last_page_len has 2 entries for 3 requests"),
        ({"last_page_len": [0, 0, 4]}, r"last_page_len\[0\] is 0 with 3 pages of 4: give 1 to 4"),
        ({"last_page_len": [1, 0, 5]}, r"last_page_len\[2\] is 5 with 1 pages of 4: give 1 to 4"),
        ({"last_page_len": [1, 1, 4]}, r"last_page_len\[1\] is 1 with 0 pages of 4: give 0"),
        ({"last_page_len": [1, -1, 4]}, r"last_page_len\[1\] is -1 with 0 pages of 4: give 0"),
    ],
)
def test_what_is_no_page_table_is_refused(changes: dict[str, Any], message: str) -> None:
    arrays: dict[str, Any] = {**good()._asdict(), **changes}
    if "list" not in message:
        arrays = {
            name: np.array(array, np.int32) if isinstance(array, list) else array for name, array in arrays.items()
        }
    with pytest.raises(PlanError, match=message):
        check_page_table(**arrays, pages=8, page_size=4)


def test_a_length_beyond_int32_is_refused() -> None:
    table = PageTable(np.array([0, 2], np.int32), np.zeros(2, np.int32), np.array([1], np.int32))
    check_page_table(*table, pages=1, page_size=2**30)
    with pytest.raises(PlanError, match="request 0 has 2147483648 tokens"):
        check_page_table(*table, pages=1, page_size=2**31 - 1)


@pytest.mark.parametrize(("pages", "page_size"), [(0, 4), (8, 0)])
def test_the_pool_must_be_one(pages: int, page_size: int) -> None:
    with pytest.raises(PlanError, match="give a whole number of at least 1"):
        check_page_table(*good(), pages=pages, page_size=page_size)


def test_a_table_that_does_not_fit_its_lengths_is_refused() -> None:
    with pytest.raises(PlanError, match="request 1 has 5 tokens and 1 pages of 4"):
        page_table([[1], [2]], [4, 5], 4)
    with pytest.raises(PlanError, match="1 lists of pages for 2 lengths"):
        page_table([[1]], [4, 5], 4)
