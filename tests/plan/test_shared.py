"""The shared-memory map: offsets, overlays, the budget and its table."""

import pytest

from cheetah.plan import PlanError, Region, SharedMap
from cheetah.plan.shared_memory import ring_regions, stages_that_fit


def test_regions_lie_in_order_aligned_and_apart():
    layout = SharedMap((Region("a", 10, 1), Region("b", 3, 128), Region("c", 8, 8)))
    assert layout.offsets == {"a": 0, "b": 128, "c": 136}
    assert layout.total_bytes == 144
    assert layout.offset("c") == 136


def test_regions_over_another_may_lie_one_after_the_other():
    layout = SharedMap((Region("base", 64, 32), Region("a", 32, over="base"), Region("b", 32, over="base", skip=32)))
    assert layout.offsets == {"base": 0, "a": 0, "b": 32}
    assert layout.total_bytes == 64


def test_a_region_over_another_costs_nothing():
    layout = SharedMap((Region("base", 64, 32), Region("first", 64, over="base"), Region("next", 4, 4)))
    assert layout.offsets == {"base": 0, "first": 0, "next": 64}
    assert layout.total_bytes == 68


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ([Region("a", 4), Region("a", 4)], "two regions are called 'a'"),
        ([Region("b", 4, over="a")], "'b' lies over 'a', which is not an earlier region"),
        (
            [Region("a", 8), Region("b", 12, over="a")],
            r"'b' \(12 bytes from byte 0 on.*does not fit over 'a' \(8 bytes",
        ),
        ([Region("a", 32), Region("b", 32, over="a", skip=16)], r"'b' \(32 bytes from byte 16 on.*over 'a' \(32 bytes"),
        ([Region("a", 32), Region("b", 8, over="a", skip=8)], "'b' .8 bytes from byte 8 on, alignment 16"),
        ([Region("a", 32), Region("b", 8, 8, over="a", skip=-8)], "'b' .8 bytes from byte -8 on"),
        ([Region("a", 8, 8), Region("b", 8, 16, over="a")], "alignment 16"),
    ],
)
def test_maps_that_contradict_themselves_are_refused(regions, message):
    with pytest.raises(PlanError, match=message):
        SharedMap(tuple(regions))


def test_bad_regions_and_unknown_names_are_refused():
    with pytest.raises(PlanError, match="'a': nbytes is 0"):
        Region("a", 0)
    with pytest.raises(PlanError, match="alignment is 24: give a power of two"):
        Region("a", 8, 24)
    with pytest.raises(PlanError, match="no region 'ring': there are a, b"):
        SharedMap((Region("a", 4), Region("b", 4))).offset("ring")


def test_the_budget_is_kept_and_the_error_shows_sum_fix_and_table():
    regions = (Region("ring", 3 * 65536), Region("vectors", 40 * 1024))
    assert SharedMap(regions, 232 * 1024).total_bytes == 232 * 1024
    with pytest.raises(PlanError) as error:
        SharedMap(regions, 227 * 1024)
    assert str(error.value).splitlines() == [
        "shared memory: 192 KB of ring + 40 KB of vectors = 232 KB; a block has 227 KB: use fewer or smaller stages, "
        "or fewer tokens",
        "  offset    bytes  region",
        "       0   196608  ring",
        "  196608    40960  vectors",
        "           237568  total",
        "           232448  a block has, 5120 too few",
    ]


def test_stages_that_fit_is_the_largest_number_that_does():
    for budget in range(9000, 40000, 500):
        for other in (1, 128, 5000):
            others = (Region("other", other, 128),)
            if 2 * (2048 + 16) + 128 + other > budget:
                continue
            stages = stages_that_fit(budget, 2048, others)
            SharedMap((*ring_regions(stages, 2048), *others), budget)
            with pytest.raises(PlanError):
                SharedMap((*ring_regions(stages + 1, 2048), *others), budget)


def test_less_than_two_stages_is_an_error_with_the_table():
    with pytest.raises(PlanError, match="(?s)a block has 20 KB.*ring_barriers.*other"):
        stages_that_fit(20 * 1024, 8192, (Region("other", 8192),))
