"""Sections of a memory: each begins where the one before ends, rounded up to its alignment."""

import pytest

from cheetah.plan.sections import Sections


@pytest.mark.parametrize(
    ("sections", "offsets", "end"),
    [
        (Sections({}), {}, 0),
        (Sections({}, start=5), {}, 5),
        (Sections({"a": 3, "b": 4}), {"a": 0, "b": 3}, 7),
        (Sections({"a": 3, "b": 0, "c": 16}, 8, start=9), {"a": 16, "b": 24, "c": 24}, 40),
        (Sections({"a": 3, "b": 4, "c": 1}, {"a": 16, "b": 2, "c": 1}, start=1), {"a": 16, "b": 20, "c": 24}, 25),
    ],
)
def test_where_sections_begin_and_end(sections, offsets, end):
    assert (sections.offsets, sections.end) == (offsets, end)


def test_together_they_are_a_multiple_of_their_alignment():
    assert Sections({"a": 3, "b": 9}, 8).total == 24
    assert Sections({"a": 3, "b": 5}, 8).total == 16
