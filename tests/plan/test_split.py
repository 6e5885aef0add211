"""Every strip has exactly one owner, and shares differ by at most one strip."""

import pytest

from cheetah.plan import PlanError, Split

SMALL = [(strips, blocks, start) for strips in range(1, 26) for blocks in range(1, 10) for start in range(blocks)]


def test_every_strip_is_owned_exactly_once():
    for strips, blocks, start in SMALL:
        split = Split(strips, blocks, start)
        dealt = sorted(strip for block in range(blocks) for strip in split.owned(block))
        assert dealt == list(range(strips)), split


def test_owner_agrees_with_owned_and_with_the_rule():
    for strips, blocks, start in SMALL:
        split = Split(strips, blocks, start)
        for strip in range(strips):
            owner = split.owner(strip)
            assert strip in split.owned(owner)
            assert (owner + start) % blocks == strip % blocks == split.position(owner)


def test_counts_widths_and_rounds_agree():
    for strips, blocks, start in SMALL:
        split = Split(strips, blocks, start)
        counts = [split.count(block) for block in range(blocks)]
        assert sum(counts) == strips == sum(split.width(round) for round in range(split.rounds))
        assert max(counts) - min(counts) <= 1
        assert max(counts) == split.rounds
        assert split.imbalance == pytest.approx(max(counts) / (sum(counts) / blocks) - 1)


def test_start_moves_the_first_strip():
    assert [Split(5, 4, start).owner(0) for start in range(4)] == [0, 3, 2, 1]
    assert list(Split(5, 4, 1).owned(3)) == [0, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "Split: strips is 0: give a whole number of at least 1"),
        ((4, 0), "Split: blocks is 0"),
        ((4, 4, 4), "Split: start is 4 with 4 blocks: give 0 to 3"),
        ((4, 4, -1), "start is -1"),
        ((4.0, 4), "strips is 4.0"),
    ],
)
def test_impossible_splits_are_refused(arguments, message):
    with pytest.raises(PlanError, match=message):
        Split(*arguments)


def test_strips_and_blocks_that_do_not_exist_are_refused():
    with pytest.raises(PlanError, match="strip 5 does not exist: there are strips 0 to 4"):
        Split(5, 4).owner(5)
    with pytest.raises(PlanError, match="block 4 does not exist: there are blocks 0 to 3"):
        Split(5, 4).owned(4)
