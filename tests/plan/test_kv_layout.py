"""The device form of a KV plan: where its words lie, what it has room for, and what it refuses."""

import numpy as np
import pytest

from cheetah.plan import GPUS, PlanError, default_plan
from cheetah.plan.kv import KvPlanLayout, LaunchTile, Scheduling, Tile, by_turns, kv_plan, kv_plans_for_launch, schedule
from cheetah.plan.kv.encoding import FIRST_CHUNKS, HEAD_LIMIT, NO_STEP

from .schedules import ARRAYS, random_case
from .shapes import LLAMA_8B


def read(layout, words, name, shape):
    """What a kernel would read: `shape` words from the section's offset."""
    return words[layout.sections.offsets[name] :][: int(np.prod(shape))].reshape(shape)


def test_sections_have_the_offsets_of_the_format():
    layout = KvPlanLayout(blocks=132, kv_heads=8, tiles=1, tile_rows=4)
    assert (layout.max_items, layout.max_merges, layout.max_sources) == (272, 8, 264)
    assert layout.max_partial_rows == 4 * 264
    assert layout.sections.offsets == {
        "header": 0,
        "work_indptr": 64,  # 133 words in 192
        "items": 256,  # 272 * 8 words
        "merge_indptr": 2432,  # 9 words in 64
        "merges": 2496,  # 16 words in 64
        "merge_src": 2560,  # 264 words in 320
    }
    assert layout.plan_words == 2880


def test_an_encoded_plan_reads_back():
    draw = np.random.default_rng(1)
    for first_step in range(200):
        case = random_case(draw)
        plan, layout = schedule(case.tiles, case.scheduling), case.layout
        words = layout.encode(plan, first_step)
        assert words.dtype == np.int32 and words.shape == (layout.plan_words,) and layout.plan_words % 64 == 0
        header = [first_step, plan.item_count, plan.merge_count, plan.merge_rows]
        assert words[:64].tolist() == header + [0] * 60
        used = 64
        for name in ARRAYS:
            values, found = getattr(plan, name), read(layout, words, name, getattr(plan, name).shape)
            if name == "merges":
                first = np.zeros(len(values)) if plan.first_chunks is None else plan.first_chunks
                assert np.array_equal(found[:, 1] // HEAD_LIMIT, first % FIRST_CHUNKS), "where its keys begin"
                found = found % [2**31, HEAD_LIMIT]
            assert np.array_equal(found, values), name
            used += layout.sections.sizes[name]
        assert used <= layout.plan_words


def test_a_launch_is_encoded_row_by_row():
    layout = KvPlanLayout(blocks=4, kv_heads=2, tiles=1, tile_rows=4)
    plans = kv_plans_for_launch([LaunchTile(0, 4, 0, 30, 1, 1)], 20, Scheduling(2, 4))
    words = layout.encode_launch(plans)
    assert words.shape == (3, layout.plan_words) and words[:, 0].tolist() == [0, 2, 18]
    assert np.array_equal(words[1], layout.encode(plans[1][1], 2))


def test_a_fixed_chunk_needs_room_for_the_longest_tiles():
    layout = KvPlanLayout(blocks=4, kv_heads=2, tiles=3, tile_rows=5, chunk=64, max_keys=1000)
    assert (layout.max_items, layout.max_merges, layout.max_sources) == (96, 6, 96)
    assert layout.max_partial_rows == 96 * 5
    fewer = KvPlanLayout(blocks=4, kv_heads=2, tiles=3, tile_rows=5, chunk=64, max_keys=1000, level_rows=7)
    assert fewer.max_partial_rows == 2 * 16 * 7
    plan = kv_plan([1000] * 3, 5, Scheduling(2, 4, chunk=64))
    layout.check(plan)
    assert (plan.item_count, plan.partial_rows) == (96, 480), "the limits are reached"


def test_several_levels_have_room_for_every_tile_to_be_partial():
    layout = KvPlanLayout(blocks=132, kv_heads=8, tiles=9, tile_rows=32, levels=2, level_rows=32)
    assert (layout.max_items, layout.max_merges) == (336, 72)
    assert layout.max_partial_rows == 264 * 32 + 8 * (32 + 32)
    assert layout.max_sources == 2 * 72 + 9 * 132, "a prefix's states count once for every tile under it"
    plain = KvPlanLayout(blocks=132, kv_heads=8, tiles=9, tile_rows=32, levels=2)
    assert plain.max_partial_rows == 264 * 32 + 8 * 9 * 32


def test_a_long_prefix_has_more_sources_than_partial_states():
    """Eight tiles under a prefix that every block works on: the case that `max_sources` is for."""
    tiles = [Tile(0, 0, 32, 0, 16384), *(Tile(1, 1 + b, 4, 16384, 16385, 4 * b) for b in range(8))]
    plan = schedule(tiles, Scheduling(kv_heads=8, blocks=132))
    layout = KvPlanLayout(blocks=132, kv_heads=8, tiles=9, tile_rows=32, levels=2, level_rows=32)
    layout.check(plan)
    assert plan.source_count > layout.max_items >= plan.partials


def test_a_step_of_a_kernel_has_one_layout():
    def layout_of(**choices):
        plan = default_plan(GPUS["h200"], LLAMA_8B, **choices)
        return plan, KvPlanLayout.for_step(plan, LLAMA_8B, 132)

    plan, one = layout_of()
    assert (one.tiles, one.tile_rows, one.levels, one.chunk) == (1, 4, 1, 0)
    plan, eight = layout_of(batch=8, tokens=8)
    assert (eight.tiles, eight.tile_rows, eight.levels, eight.level_rows) == (16, 16, 2, 32)
    plan, prompt = layout_of(batch=2, tokens=16, kv_chunk=256)
    assert (prompt.tiles, prompt.tile_rows, prompt.levels, prompt.chunk) == (5, 16, 1, 256)
    assert prompt.max_keys == plan.max_context + 16


@pytest.mark.parametrize(
    ("layout", "plan", "message"),
    [
        ({}, kv_plan([10], 4, Scheduling(2, 8)), "the plan is for 8 blocks and this layout for 4"),
        (
            {},
            kv_plan([10], 5, Scheduling(2, 4)),
            r"5 rows in a tile and the layout room for 4 \(1 tiles of 4 rows, 2 KV heads",
        ),
        ({}, kv_plan([10] * 8, 4, Scheduling(2, 4)), "16 items and the layout room for 10"),
        ({}, kv_plan([1000], 4, Scheduling(2, 4, chunk=16)), r"126 items and the layout room for 10 .*chunks by rule"),
        ({"tiles": 9}, kv_plan([30], 4, Scheduling(2, 4, chunk=16)), None),
        ({"tiles": 60}, kv_plan([1000], 4, Scheduling(2, 4, chunk=16)), "126 sources and the layout room for 8"),
        (
            {"chunk": 16, "max_keys": 100},
            kv_plan([113], 4, Scheduling(2, 4, chunk=16)),
            r"16 items .* for 14 .*at most 100 keys",
        ),
        (
            {"tiles": 8, "level_rows": 20, "chunk": 16, "max_keys": 32},
            kv_plan([32] * 6, 4, Scheduling(2, 4, chunk=16)),
            "partial rows",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(layout, plan, message):
    made = KvPlanLayout(**{"blocks": 4, "kv_heads": 2, "tiles": 1, "tile_rows": 4, **layout})
    if message is None:
        made.encode(plan, 0)
    else:
        with pytest.raises(PlanError, match=message):
            made.encode(plan, 0)


def test_impossible_layouts_are_refused():
    with pytest.raises(PlanError, match="tile_rows is 0"):
        KvPlanLayout(4, 2, 1, 0)
    with pytest.raises(PlanError, match="chunks of 64 keys and max_keys is 0: give the most keys of a tile"):
        KvPlanLayout(4, 2, 1, 4, chunk=64)


def test_plans_of_kinds_stand_by_turns_over_tiles_of_their_own():
    layout = KvPlanLayout(blocks=4, kv_heads=2, tiles=1, tile_rows=4)
    few, many = (
        layout.encode_launch(kv_plans_for_launch([LaunchTile(0, 4, 0, keys, 1, 1)], 20, Scheduling(2, 4)), tile)
        for tile, keys in enumerate((3, 301))
    )
    assert (len(few), len(many)) == (2, 3) and few[0, 0] == many[0, 0] == 0
    items = many[0, layout.sections.offsets["items"] :][: many[0, 1] * 8].reshape(-1, 8)
    merges = many[0, layout.sections.offsets["merges"] :][: many[0, 2] * 2].reshape(-1, 2)
    assert len(items) > len(merges) == 2 and set(items[:, 1]) == set(merges[:, 0]) == {1}
    words = by_turns([few, many])
    assert words.shape == (6, layout.plan_words)
    assert np.array_equal(words[[0, 2]], few) and np.array_equal(words[[1, 3, 5]], many)
    assert words[4, 0] == NO_STEP > 2**30
    assert by_turns([few]) is few
