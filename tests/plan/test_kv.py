"""The KV schedule: both goldens word for word, every invariant on random inputs, launches, caching and speed."""

from dataclasses import replace

import numpy as np
import pytest

from cheetah.plan import PlanError
from cheetah.plan.kv import Scheduling, Tile, kv_plan, schedule

from .schedules import ARRAYS, Case, check_invariants, plain_schedule, random_case


def plan_of(case: Case):
    return schedule(case.tiles, case.scheduling)


@pytest.mark.slow
def test_invariants_hold():
    draw = np.random.default_rng(1)
    for _ in range(1000):
        check_invariants(random_case(draw))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_for_twenty_thousand_inputs(seed):
    draw = np.random.default_rng([20_000, seed])
    for _ in range(5000):
        check_invariants(random_case(draw))


@pytest.mark.slow
def test_plans_are_those_of_the_algorithm_written_out_plainly():
    draw = np.random.default_rng(2)
    for _ in range(700):
        case = random_case(draw)
        plan, plain = plan_of(case), plain_schedule(case)
        assert {name: getattr(plan, name).tolist() for name in ARRAYS} == plain


@pytest.mark.slow
def test_the_same_tiles_give_the_same_bytes():
    draw = np.random.default_rng(3)
    for _ in range(300):
        case = random_case(draw)
        first, second = plan_of(case), plan_of(case)
        for name in ARRAYS:
            assert getattr(first, name).tobytes() == getattr(second, name).tobytes()
            assert getattr(first, name).dtype == np.int32


@pytest.mark.slow
def test_costs_change_only_the_assignment():
    draw = np.random.default_rng(4)
    for _ in range(300):
        case = random_case(draw)
        first = plan_of(case)
        second = schedule(case.tiles, replace(case.scheduling, row_cost=3, token_cost=5))
        assert sorted(first.items.tolist()) == sorted(second.items.tolist())
        assert first.merge_src.tolist() == second.merge_src.tolist()


@pytest.mark.slow
def test_a_fixed_chunk_cuts_each_tile_as_if_it_were_alone():
    draw = np.random.default_rng(5)
    for _ in range(200):
        case = random_case(draw, levels=1, fixed=True)
        together = plan_of(case)
        for tile in case.tiles:
            alone = schedule([tile], case.scheduling)
            cut = sorted(item[2:5] for item in together.items.tolist() if item[1] == tile.tile)
            assert cut == sorted(item[2:5] for item in alone.items.tolist())


def test_golden_1():
    plan = kv_plan([1000, 500, 100], 1, Scheduling(1, 4, align=1, minimum=1))
    assert plan.chunk == 400 and plan.partials == 5
    assert [plan.queue(block).tolist() for block in range(4)] == [
        [[0, 0, 0, 0, 400, 0, 1, 0]],
        [[0, 0, 0, 400, 800, 1, 1, 0]],
        [[0, 1, 0, 0, 400, 3, 1, 0]],
        [[0, 0, 0, 800, 1000, 2, 1, 0], [0, 1, 0, 400, 500, 4, 1, 0], [0, 2, 0, 0, 100, -1, 1, 0]],
    ]
    assert [plan.tokens(block) + len(plan.queue(block)) for block in range(4)] == [401, 401, 401, 403]
    assert plan.merges.tolist() == [[0, 0], [1, 0]]
    assert (plan.merge_indptr.tolist(), plan.merge_src.tolist()) == ([0, 3, 5], [0, 1, 2, 3, 4])


def test_golden_2():
    plan = kv_plan([1000, 500, 100], 4, Scheduling(2, 8))
    assert (plan.chunk, plan.item_count, plan.partials) == (416, 12, 10)
    assert [plan.queue(block)[:, 1:6].tolist() for block in range(8)] == [
        [[0, 0, 0, 416, 0]],
        [[0, 0, 416, 832, 4]],
        [[0, 1, 0, 416, 12]],
        [[0, 1, 416, 832, 16]],
        [[1, 0, 0, 416, 24]],
        [[1, 1, 0, 416, 32]],
        [[0, 0, 832, 1008, 8], [2, 0, 0, 112, -1], [1, 0, 416, 512, 28]],
        [[0, 1, 832, 1008, 20], [2, 1, 0, 112, -1], [1, 1, 416, 512, 36]],
    ]
    costs = [plan.tokens(block) + 4 * len(plan.queue(block)) for block in range(8)]
    assert costs == [420] * 6 + [396] * 2
    assert plan.merge_src.tolist() == list(range(0, 40, 4)), "four rows each"
    assert (plan.merges.tolist(), plan.merge_indptr.tolist()) == ([[0, 0], [0, 1], [1, 0], [1, 1]], [0, 3, 6, 8, 10])


def test_no_keys_at_all_still_gives_every_row_an_item():
    plan = kv_plan([0, 0], 4, Scheduling(2, 4))
    assert plan.items[:, 1:6].tolist() == [[0, 0, 0, 0, -1], [0, 1, 0, 0, -1], [1, 0, 0, 0, -1], [1, 1, 0, 0, -1]]
    assert kv_plan([], 4, Scheduling(2, 4)).item_count == 0


def test_a_window_is_rounded_outward():
    plan = schedule([Tile(0, 0, 4, 37, 50)], Scheduling(kv_heads=1, blocks=2))
    assert plan.items[:, 3:5].tolist() == [[32, 64]]


def test_golden_of_two_levels():
    """Two sequences under one prefix of 128 keys, the second with no keys of its own; a third is alone."""
    tiles = [
        Tile(0, 0, 8, 0, 128, first_row=0),
        Tile(1, 1, 4, 128, 161, first_row=0),
        Tile(1, 2, 4, 128, 128, first_row=4),
        Tile(1, 3, 4, 0, 40, first_row=8),
    ]
    plan = schedule(tiles, Scheduling(kv_heads=1, blocks=3))
    assert plan.chunk == 80, "an even share of 128 + 48 + 0 + 48 keys"
    assert [plan.queue(block).tolist() for block in range(3)] == [
        [[0, 0, 0, 0, 80, 0, 8, 0]],
        [[0, 0, 0, 80, 128, 8, 8, 0], [1, 2, 0, 128, 128, 20, 4, 0]],
        [[1, 1, 0, 128, 176, 16, 4, 0], [1, 3, 0, 0, 48, -1, 4, 0]],
    ]
    assert plan.merges.tolist() == [[1, 0], [2, 0]]
    assert (plan.merge_indptr.tolist(), plan.merge_src.tolist()) == ([0, 3, 6], [0, 8, 16, 4, 12, 20])
    assert (plan.partials, plan.partial_rows, plan.source_count, plan.merge_rows) == (4, 24, 6, 4)


def test_levels_are_folded_in_order():
    """Three levels, the first two over other runs of rows; the one tile in no prefix is written through."""
    tiles = [
        Tile(0, 0, 6, 0, 32, first_row=0),
        Tile(1, 1, 3, 32, 48, first_row=3),
        Tile(2, 2, 3, 48, 50, first_row=0),
        Tile(2, 3, 3, 48, 60, first_row=3),
        Tile(2, 4, 3, 0, 60, first_row=6),
    ]
    plan = schedule(tiles, Scheduling(kv_heads=2, blocks=4))
    first_rows = {tuple(item[1:3]): item[5] for item in plan.items.tolist()}
    assert [first_rows[tile, 0] for tile in range(5)] == [0, 12, 18, 24, -1]
    assert plan.merges.tolist() == [[2, 0], [2, 1], [3, 0], [3, 1]]
    assert plan.merge_src.tolist() == [0, 18, 6, 21, 0 + 3, 12, 24, 6 + 3, 15, 27]
    assert plan.merge_indptr.tolist() == [0, 2, 4, 7, 10]


def test_balance_over_132_blocks_is_as_published():
    for batch, limit in ((1, 1.13), (2, 1.06), (4, 1.03), (8, 1.02)):
        worst = []
        for length in range(520, 16384, 331):
            plan = kv_plan([length] * batch, 4, Scheduling(8, 132))
            tokens = [plan.tokens(block) for block in range(132)]
            worst.append(max(tokens) / (sum(tokens) / 132))
        assert np.mean(worst) < limit, (batch, np.mean(worst))


def test_plans_are_cached_by_rounded_length_and_cannot_be_changed():
    plan = kv_plan([1001], 4, Scheduling(8, 132))
    assert kv_plan([1008], 4, Scheduling(8, 132)) is plan
    assert kv_plan([1009], 4, Scheduling(8, 132)) is not plan
    with pytest.raises(ValueError, match="read-only"):
        plan.items[0, 0] = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [-1]}, "length -1 is out of range"),
        ({"lengths": [1.5]}, "length 1.5 is not a whole number of tokens"),
        ({"lengths": [2**31]}, "length 2147483648 is out of range"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"blocks": 0}, "blocks is 0"),
        ({"group": 0}, "group is 0"),
        ({"align": 0}, "align is 0"),
        ({"minimum": 72}, "minimum is 72: give a multiple of align, 16"),
        ({"chunk": 8}, "chunk is 8: give a multiple of align, 16"),
    ],
)
def test_impossible_requests_are_refused(change, message):
    with pytest.raises(PlanError, match=message):
        given = {"lengths": [10], "group": 4, "kv_heads": 2, "blocks": 4, **change}
        kv_plan(given.pop("lengths"), given.pop("group"), Scheduling(**given))


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ([Tile(1, 0, 4, 0, 9), Tile(0, 1, 4, 0, 9)], r"tile 1 of level 0 follows tile 0 of level 1: sort the tiles"),
        ([Tile(0, 0, 4, 9, 8)], r"tile 0 of level 0 has keys \[9, 8\): give 0 <= begin <= end"),
        ([Tile(0, 0, 4, -1, 8)], r"keys \[-1, 8\)"),
        ([Tile(0, 0, 0, 0, 8)], "has 0 rows from row 0 on: give at least 1"),
        ([Tile(0, 0, 4, 0, 9), Tile(0, 1, 4, 0, 9, first_row=3)], "two tiles of a level share a row"),
        ([Tile(0, 0, 4, 0, 9, 1), Tile(1, 1, 4, 0, 9, 0)], "rows 1 to 4 of level 0 are not those of whole tiles"),
        ([Tile(0, 0, 6, 0, 9, 0), Tile(1, 1, 4, 0, 9, 0), Tile(1, 2, 4, 0, 9, 4)], "rows 0 to 5 of level 0"),
        ([Tile(0, 0, 9, 0, 9, 0), Tile(1, 1, 4, 0, 9, 0), Tile(1, 2, 4, 0, 9, 4)], "cut the tile where they end"),
    ],
)
def test_impossible_tiles_are_refused(tiles, message):
    with pytest.raises(PlanError, match=message):
        schedule(tiles, Scheduling(kv_heads=2, blocks=4))


def test_few_items_go_to_the_blocks_that_have_less_to_do() -> None:
    tiles = [Tile(0, b, 1, 0, 64 * (b + 1), b) for b in range(3)]
    usual = schedule(tiles, Scheduling(kv_heads=2, blocks=16, minimum=64 * 3))

    def items(first: int, light: int):
        return schedule(tiles, Scheduling(2, 16, minimum=64 * 3, first_light=first, light_blocks=light))

    assert [len(items(10, 6).queue(block)) for block in range(16)] == [0] * 10 + [1] * 6
    np.testing.assert_array_equal(items(10, 6).items, usual.items)
    assert [len(items(13, 6).queue(block)) for block in range(16)] == [1] * 3 + [0] * 10 + [1] * 3
    np.testing.assert_array_equal(items(10, 5).work_indptr, usual.work_indptr)
