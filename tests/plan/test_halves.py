"""Which parts of memory are chosen for one half of L2."""

from __future__ import annotations

import pytest

from cheetah.plan.halves import PAGE_BYTES, PART_BYTES, half_of, parts_in_half


def test_halves_alternate() -> None:
    assert [half_of(part) for part in range(16)] == [0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1]
    assert sum(half_of(part) for part in range(PAGE_BYTES // PART_BYTES)) == PAGE_BYTES // PART_BYTES // 2


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("count", range(1, 9))
def test_parts_lie_in_one_half_of_a_page_and_none_is_taken(count: int, half: int) -> None:
    taken = set(range(6)) | {9, 10}
    parts = parts_in_half(count, half, taken)
    assert len(parts) == count
    assert {half_of(part) for part in parts} == {half}
    assert taken.isdisjoint(parts)
    assert parts[-1] < PAGE_BYTES // PART_BYTES


def test_the_range_that_ends_first_is_chosen() -> None:
    assert [*parts_in_half(2, 0, ())] == [0, 3]
    assert [*parts_in_half(2, 1, ())] == [1, 2]
