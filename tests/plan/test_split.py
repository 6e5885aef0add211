"""Every M-tile has exactly one owner, and shares differ by at most one M-tile."""

import pytest

from cheetah.plan import PlanError
from cheetah.plan.split import Split

SMALL = [(m_tiles, blocks, start) for m_tiles in range(1, 26) for blocks in range(1, 10) for start in range(blocks)]


def test_every_m_tile_is_owned_exactly_once():
    for m_tiles, blocks, start in SMALL:
        split = Split(m_tiles, blocks, start)
        dealt = sorted(m_tile for block in range(blocks) for m_tile in split.owned(block))
        assert dealt == list(range(m_tiles)), split


def test_owner_agrees_with_owned_and_with_the_rule():
    for m_tiles, blocks, start in SMALL:
        split = Split(m_tiles, blocks, start)
        for m_tile in range(m_tiles):
            owner = split.owner(m_tile)
            assert m_tile in split.owned(owner)
            assert (owner + start) % blocks == m_tile % blocks == split.position(owner)


def test_counts_widths_and_rounds_agree():
    for m_tiles, blocks, start in SMALL:
        split = Split(m_tiles, blocks, start)
        counts = [split.count(block) for block in range(blocks)]
        assert sum(counts) == m_tiles == sum(split.width(wave) for wave in range(split.waves))
        assert max(counts) - min(counts) <= 1
        assert max(counts) == split.waves
        assert split.imbalance == pytest.approx(max(counts) / (sum(counts) / blocks) - 1)


def test_start_moves_the_first_m_tile():
    assert [Split(5, 4, start).owner(0) for start in range(4)] == [0, 3, 2, 1]
    assert list(Split(5, 4, 1).owned(3)) == [0, 4]


def test_the_blocks_that_the_last_wave_leaves_out_lie_side_by_side():
    assert [Split(8, 5, start).light_from for start in range(5)] == [3, 2, 1, 0, 4]
    assert Split(8, 5).light_blocks == 2
    assert (Split(10, 5, 3).light_from, Split(10, 5, 3).light_blocks) == (0, 0)
    split = Split(8, 5, 4)
    assert [split.count((split.light_from + number) % 5) for number in range(5)] == [1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "Split: m_tiles is 0: give a whole number of at least 1"),
        ((4, 0), "Split: blocks is 0"),
        ((4, 4, 4), "Split: start is 4 with 4 blocks: give 0 to 3"),
        ((4, 4, -1), "start is -1"),
        ((4.0, 4), "m_tiles is 4.0"),
    ],
)
def test_impossible_splits_are_refused(arguments, message):
    with pytest.raises(PlanError, match=message):
        Split(*arguments)


def test_m_tiles_and_blocks_that_do_not_exist_are_refused():
    with pytest.raises(PlanError, match="M-tile 5 does not exist: there are M-tiles 0 to 4"):
        Split(5, 4).owner(5)
    with pytest.raises(PlanError, match="block 4 does not exist: there are blocks 0 to 3"):
        Split(5, 4).owned(4)
