"""The KV schedule: both goldens word for word, every invariant on random inputs, launches, caching and speed."""

import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cheetah.plan import PlanError, kv_plan, kv_plans_for_launch
from cheetah.plan.kv import Scheduling, Tile, _cached_plan, max_plans, schedule

LENGTHS = [1, 3, 15, 16, 17, 54, 97, 199, 512, 1177, 2048, 8191, 16384, 33001]

inputs = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.one_of(st.sampled_from([0, *LENGTHS]), st.integers(0, 11000)), max_size=8),
        "kv_heads": st.sampled_from([1, 2, 3, 4, 8, 16]),
        "blocks": st.sampled_from([1, 2, 4, 7, 16, 132]),
        "group": st.sampled_from([1, 2, 3, 4, 7, 8]),
        "constants": st.sampled_from([(1, 1), (16, 64), (16, 16), (64, 128), (5, 15)]),
        "costs": st.sampled_from([(1, 1), (128, 2), (1, 7)]),
    }
)


def plan_of(case, chunk=None):
    align, minimum = case["constants"]
    row_cost, token_cost = case["costs"]
    sizes = (case["kv_heads"], case["blocks"], case["group"])
    return kv_plan(case["lengths"], *sizes, align, minimum, row_cost, token_cost, chunk)


def check_invariants(case):
    plan = plan_of(case)
    check_every_key_once(case, plan)
    check_slots_and_merges(plan)
    check_bounds(case, plan)
    check_balance(case, plan)


def check_every_key_once(case, plan):
    align = case["constants"][0]
    taken = {}
    for level, tile, head, begin, end, _, rows, zero in plan.items.tolist():
        assert (level, rows, zero) == (0, case["group"], 0)
        taken.setdefault((tile, head), []).append((begin, end))
    assert set(taken) == {(b, h) for b in range(len(case["lengths"])) for h in range(case["kv_heads"])}
    for (tile, _), ranges in taken.items():
        ranges.sort()
        assert ranges[0][0] == 0 and ranges[-1][1] == -(-case["lengths"][tile] // align) * align
        assert all(before[1] == after[0] for before, after in zip(ranges, ranges[1:], strict=False))
        assert all(end - begin == plan.chunk for begin, end in ranges[:-1])
        assert len(ranges) == 1 or 0 < ranges[-1][1] - ranges[-1][0] <= plan.chunk


def check_slots_and_merges(plan):
    by_slot = {item[5]: item for item in plan.items.tolist() if item[5] >= 0}
    split = {}
    for item in plan.items.tolist():
        split.setdefault((item[1], item[2]), []).append(item)
    assert sorted(by_slot) == list(range(plan.partials)) == sorted(plan.merge_src.tolist())
    in_order = sorted(by_slot.values(), key=lambda item: (item[0], item[1], item[2], item[3]))
    assert [item[5] for item in in_order] == list(range(plan.partials)), "numbered before the sort"
    merged = {}
    for m, (tile, head) in enumerate(plan.merges.tolist()):
        slots = plan.merge_src[plan.merge_indptr[m] : plan.merge_indptr[m + 1]].tolist()
        merged[tile, head] = [tuple(by_slot[slot][1:4]) for slot in slots]
    assert list(merged) == sorted(merged)
    for (tile, head), items in split.items():
        if len(items) == 1:
            assert items[0][5] == -1 and (tile, head) not in merged, "an unsplit tile is written through"
        else:
            assert merged[tile, head] == sorted((tile, head, item[3]) for item in items), "ascending by chunk"
    assert plan.merge_indptr[-1] == plan.partials


def check_bounds(case, plan):
    blocks, tiles = case["blocks"], len(case["lengths"]) * case["kv_heads"]
    assert plan.partials < 2 * blocks
    assert plan.merge_count <= min(tiles, blocks)
    assert plan.item_count <= tiles + 2 * blocks
    assert plan.work_indptr.tolist() == sorted(plan.work_indptr.tolist())
    assert (plan.work_indptr[0], plan.work_indptr[-1], plan.blocks) == (0, plan.item_count, blocks)


def check_balance(case, plan):
    row_cost, token_cost = case["costs"]
    costs = [row_cost * item[6] + token_cost * (item[4] - item[3]) for item in plan.items.tolist()]
    bounds = plan.work_indptr.tolist()
    loads = [sum(costs[first:last]) for first, last in zip(bounds, bounds[1:], strict=False)]
    largest = max(costs, default=0)
    mean = sum(loads) / len(loads)
    assert max(loads) <= mean + (1 - 1 / len(loads)) * largest + 1e-6
    assert max(loads) - min(loads) <= largest
    for first, last in zip(bounds, bounds[1:], strict=False):
        lengths = [int(item[4] - item[3]) for item in plan.items[first:last]]
        assert lengths == sorted(lengths, reverse=True), "a queue is in the order of assignment"


@settings(max_examples=500, deadline=None)
@given(inputs)
def test_invariants_hold(case):
    check_invariants(case)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(inputs)
def test_invariants_hold_for_twenty_thousand_inputs(case):
    check_invariants(case)


@settings(max_examples=200, deadline=None)
@given(inputs)
def test_same_lengths_give_the_same_bytes(case):
    first = plan_of(case)
    _cached_plan.cache_clear()
    second = plan_of(case)
    assert first is not second
    for name in ("items", "work_indptr", "merges", "merge_indptr", "merge_src"):
        assert getattr(first, name).tobytes() == getattr(second, name).tobytes()
        assert getattr(first, name).dtype == np.int32


@settings(max_examples=200, deadline=None)
@given(inputs)
def test_costs_change_only_the_assignment(case):
    first, second = plan_of(case), plan_of({**case, "costs": (3, 5)})
    assert sorted(first.items.tolist()) == sorted(second.items.tolist())
    assert first.merge_src.tolist() == second.merge_src.tolist()


@settings(max_examples=50, deadline=None)
@given(inputs)
def test_a_fixed_chunk_cuts_each_request_as_if_it_were_alone(case):
    chunk = case["constants"][0] * 64
    together = plan_of(case, chunk)
    check_every_key_once(case, together)
    for tile, length in enumerate(case["lengths"]):
        alone = plan_of({**case, "lengths": [length]}, chunk)
        cut = sorted(item[2:5] for item in together.items.tolist() if item[1] == tile)
        assert cut == sorted(item[2:5] for item in alone.items.tolist())


def test_golden_1():
    plan = kv_plan([1000, 500, 100], kv_heads=1, blocks=4, group=1, align=1, minimum=1)
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
    plan = kv_plan([1000, 500, 100], kv_heads=2, blocks=8, group=4)
    assert (plan.chunk, plan.item_count, plan.partials) == (416, 12, 10)
    assert [plan.queue(block)[:, 1:6].tolist() for block in range(8)] == [
        [[0, 0, 0, 416, 0]],
        [[0, 0, 416, 832, 1]],
        [[0, 1, 0, 416, 3]],
        [[0, 1, 416, 832, 4]],
        [[1, 0, 0, 416, 6]],
        [[1, 1, 0, 416, 8]],
        [[0, 0, 832, 1008, 2], [2, 0, 0, 112, -1], [1, 0, 416, 512, 7]],
        [[0, 1, 832, 1008, 5], [2, 1, 0, 112, -1], [1, 1, 416, 512, 9]],
    ]
    costs = [plan.tokens(block) + 4 * len(plan.queue(block)) for block in range(8)]
    assert costs == [420] * 6 + [396] * 2


def test_no_keys_at_all_still_gives_every_row_an_item():
    plan = kv_plan([0, 0], kv_heads=2, blocks=4, group=4)
    assert plan.items[:, 1:6].tolist() == [[0, 0, 0, 0, -1], [0, 1, 0, 0, -1], [1, 0, 0, 0, -1], [1, 1, 0, 0, -1]]
    assert kv_plan([], kv_heads=2, blocks=4, group=4).item_count == 0


def test_a_window_is_rounded_outward():
    plan = schedule([Tile(0, 0, 4, 37, 50)], Scheduling(kv_heads=1, blocks=2))
    assert plan.items[:, 3:5].tolist() == [[32, 64]]
    with pytest.raises(PlanError, match="several levels are not supported"):
        schedule([Tile(1, 0, 4, 0, 50)], Scheduling(kv_heads=1, blocks=2))


def test_balance_over_132_blocks_is_as_published():
    for batch, limit in ((1, 1.13), (2, 1.06), (4, 1.03), (8, 1.02)):
        worst = []
        for length in range(520, 16384, 331):
            plan = kv_plan([length] * batch, 8, 132, 4)
            tokens = [plan.tokens(block) for block in range(132)]
            worst.append(max(tokens) / (sum(tokens) / 132))
        assert np.mean(worst) < limit, (batch, np.mean(worst))


@settings(max_examples=100, deadline=None)
@given(before=st.integers(0, 3000), steps=st.integers(1, 80), blocks=st.sampled_from([1, 4, 132]))
def test_a_launch_holds_the_plan_of_each_of_its_steps(before, steps, blocks):
    plans = kv_plans_for_launch(before, steps, kv_heads=2, blocks=blocks, group=4)
    firsts = [first for first, _ in plans]
    assert firsts[0] == 0 and firsts == sorted(set(firsts)) and firsts[-1] < steps
    assert len(plans) <= max_plans(steps)
    for step in range(steps):
        current = [plan for first, plan in plans if first <= step][-1]
        alone = kv_plan([before + step + 1], 2, blocks, 4)
        assert current.items.tobytes() == alone.items.tobytes(), "grouping into launches changes nothing"
        assert current.items[:, 4].max() >= before + step + 1


def test_a_plan_changes_exactly_where_a_rounded_length_does():
    plans = kv_plans_for_launch(30, 20, kv_heads=2, blocks=4, group=4)
    assert [first for first, _ in plans] == [0, 2, 18]
    several = kv_plans_for_launch([30, 0, 7], 20, kv_heads=2, blocks=4, group=4)
    assert [first for first, _ in several] == [0, 2, 9, 16, 18]
    assert len(several) <= max_plans(20, batch=3)


def test_plans_are_cached_by_rounded_length_and_cannot_be_changed():
    plan = kv_plan([1001], 8, 132, 4)
    assert kv_plan([1008], 8, 132, 4) is plan
    assert kv_plan([1009], 8, 132, 4) is not plan
    with pytest.raises(ValueError, match="read-only"):
        plan.items[0, 0] = 1


def test_a_plan_takes_under_a_millisecond():
    times = []
    for length in range(8000, 8320, 16):
        _cached_plan.cache_clear()
        start = time.perf_counter()
        kv_plan([length], 8, 132, 4)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3, "about 0.13 ms is usual"


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
        kv_plan(**{"lengths": [10], "kv_heads": 2, "blocks": 4, "group": 4, **change})


def test_a_launch_of_no_steps_or_from_a_negative_length_is_refused():
    with pytest.raises(PlanError, match="steps is 0"):
        kv_plans_for_launch(10, 0, kv_heads=2, blocks=4, group=4)
    with pytest.raises(PlanError, match="length -1"):
        kv_plans_for_launch(-1, 3, kv_heads=2, blocks=4, group=4)
