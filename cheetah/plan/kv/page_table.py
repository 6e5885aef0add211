"""Page tables as three int32 arrays: which pages of a pool hold the keys and values of each request (FlashInfer 3.1.1).

`indptr` [requests + 1], `indices` [indptr[requests]], `last_page_len` [requests]. Request b has the n = indptr[b+1] -
indptr[b] pages indices[indptr[b]:indptr[b+1]]; all are full but the last, which holds last_page_len[b] tokens (0 if n
is 0). Token t of b lies in page indices[indptr[b] + t // page_size], slot t % page_size. Pages may be shared.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.index import ceil_div

Int32Array = npt.NDArray[np.int32]
LENGTH_LIMIT = 2**31 - 2**16
"""Lengths are below this, so that a rounded one is still an int32."""


class PageTable(NamedTuple):
    """The three arrays, in the order in which `check_page_table` and the rest take them."""

    indptr: Int32Array
    indices: Int32Array
    last_page_len: Int32Array


def page_table(page_lists: Sequence[Sequence[int]], lengths: Sequence[int], page_size: int) -> PageTable:
    """The arrays for requests of `lengths` tokens; request b's lie in `page_lists[b]`, of which it may use a part.

    PlanError if a list has too few pages.
    """
    require_positive("page table", page_size=page_size)
    if len(page_lists) != len(lengths):
        raise PlanError(f"page table: {len(page_lists)} lists of pages for {len(lengths)} lengths: give one each")
    used: list[Sequence[int]] = []
    for request, (pages, length) in enumerate(zip(page_lists, lengths, strict=True)):
        needed = ceil_div(length, page_size)
        if length < 0 or len(pages) < needed:
            raise PlanError(
                f"page table: request {request} has {length} tokens and {len(pages)} pages of {page_size}: give 0 or "
                f"more tokens and a page for each {page_size} of them"
            )
        used.append(pages[:needed])
    indptr = np.cumsum([0, *map(len, used)], dtype=np.int64).astype(np.int32)
    indices = np.array([page for pages in used for page in pages], np.int32)
    last = np.array([length and (length - 1) % page_size + 1 for length in lengths], np.int32)
    return PageTable(indptr, indices, last)


def check_page_table(indptr: Any, indices: Any, last_page_len: Any, pages: int, page_size: int) -> None:
    """PlanError unless the arrays are a page table over a pool of `pages` pages, every page id and length in range.

    All three must be int32 numpy arrays of one dimension: int64 ones are refused, not converted.
    """
    require_positive("page table", pages=pages, page_size=page_size)
    for name, array in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
        _check_array(name, array)
    _check_indptr(indptr, len(indices))
    _check_indices(indptr, indices, pages)
    _check_last_page_len(indptr, last_page_len, page_size)


def page_counts(indptr: Int32Array) -> npt.NDArray[np.int64]:
    """int64 [requests]: how many pages each request has."""
    ends = indptr.astype(np.int64)
    return ends[1:] - ends[:-1]


def lengths_of(indptr: Int32Array, last_page_len: Int32Array, page_size: int) -> npt.NDArray[np.int64]:
    """int64 [requests]: how many tokens each request of a checked page table has."""
    counts = page_counts(indptr)
    return np.where(counts > 0, page_size * (counts - 1) + last_page_len, 0)


def _check_array(name: str, array: Any) -> None:
    if not isinstance(array, np.ndarray):
        raise PlanError(f"page table: {name} is a {type(array).__name__}: give a numpy array of int32")
    if array.dtype != np.int32:
        raise PlanError(f"page table: {name} is {array.dtype}: give int32, e.g. {name}.astype(np.int32)")
    if array.ndim != 1:
        raise PlanError(f"page table: {name} has shape {array.shape}: give one dimension")


def _check_indptr(indptr: Int32Array, indices: int) -> None:
    if not len(indptr) or indptr[0] != 0:
        found = f"begins with {indptr[0]}" if len(indptr) else "is empty"
        raise PlanError(f"page table: indptr {found}: give 0 and then the end of each request's pages")
    falls = np.flatnonzero(indptr[1:] < indptr[:-1])
    if falls.size:
        request = int(falls[0])
        raise PlanError(
            f"page table: indptr decreases from {indptr[request]} to {indptr[request + 1]} at request {request}: give "
            f"ends that do not decrease"
        )
    if indptr[-1] != indices:
        raise PlanError(f"page table: indptr ends with {indptr[-1]}, but indices has {indices} pages: make them equal")


def _check_indices(indptr: Int32Array, indices: Int32Array, pages: int) -> None:
    outside = np.flatnonzero((indices < 0) | (indices >= pages))
    if outside.size:
        at = int(outside[0])
        request = int(np.searchsorted(indptr, at, side="right")) - 1
        raise PlanError(
            f"page table: indices[{at}] (request {request}) is page {indices[at]}, outside the pool: give 0 to "
            f"{pages - 1}"
        )


def _check_last_page_len(indptr: Int32Array, last_page_len: Int32Array, page_size: int) -> None:
    counts = page_counts(indptr)
    if len(last_page_len) != len(counts):
        raise PlanError(
            f"page table: last_page_len has {len(last_page_len)} entries for {len(counts)} requests: give one each"
        )
    lowest, highest = np.where(counts > 0, 1, 0), np.where(counts > 0, page_size, 0)
    wrong = np.flatnonzero((last_page_len < lowest) | (last_page_len > highest))
    if wrong.size:
        request = int(wrong[0])
        allowed = f"1 to {page_size}" if counts[request] else "0"
        raise PlanError(
            f"page table: last_page_len[{request}] is {last_page_len[request]} with {counts[request]} pages of "
            f"{page_size}: give {allowed}"
        )
    lengths = lengths_of(indptr, last_page_len, page_size)
    if len(lengths) and lengths.max() >= LENGTH_LIMIT:
        request = int(lengths.argmax())
        raise PlanError(f"page table: request {request} has {lengths[request]} tokens: at most {LENGTH_LIMIT - 1}")
