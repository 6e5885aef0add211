"""The tiles of a launch and the plans that its steps follow: each step's own plan, and attention when carried out."""

from dataclasses import dataclass

import numpy as np
import pytest

from cheetah.plan import Plan, PlanError
from cheetah.plan.formats import KV_TILE_TOKENS
from cheetah.plan.kv import (
    KvPlanLayout,
    LaunchTile,
    Scheduling,
    kv_plan,
    kv_plans_for_launch,
    launch_tiles,
    max_plans,
    most_tiles,
    schedule,
)
from cheetah.plan.kv.tables import TileRecord

from .schedules import ARRAYS
from .shapes import LLAMA_8B

PAGES = 64
"""Pages of a sequence; a record's table divided by it is the sequence whose pages are read."""


def current(plans, step):
    """The plan that a step follows."""
    return [plan for first, plan in plans if first <= step][-1]


def random_launch_tiles(draw):
    """Tiles of one or two levels, some with a window whose begin moves."""
    tiles, row = [], 0
    for _ in range(draw.integers(1, 6)):
        rows, stride = int(draw.integers(1, 9)), int(draw.integers(0, 40))
        length, new = int(draw.integers(0, 400)), int(draw.integers(0, 40))
        lowest = int(draw.integers(0, min(90, length + new) + 1))
        window = {}
        if draw.random() < 0.4:
            window = {"begin": int(draw.integers(-200, length + new + 1)), "begin_stride": int(draw.integers(0, 40))}
        tiles.append(LaunchTile(1, rows, row, length, stride, new, lowest=lowest, **window))
        row += rows
    if draw.random() < 0.5:
        tiles.insert(0, LaunchTile(0, row, 0, int(draw.integers(0, 300)), 0, 0))
    return tiles


@pytest.mark.slow
def test_a_launch_holds_the_plan_of_each_of_its_steps():
    draw = np.random.default_rng(1)
    for _ in range(80):
        tiles, steps = random_launch_tiles(draw), int(draw.integers(1, 40))
        scheduling = Scheduling(2, int(draw.choice([1, 4, 132])), chunk=int(draw.choice([0, 64])))
        plans = kv_plans_for_launch(tiles, steps, scheduling)
        firsts = [first for first, _ in plans]
        assert firsts[0] == 0 and firsts == sorted(set(firsts)) and firsts[-1] < steps
        assert all(one is not two for (_, one), (_, two) in zip(plans, plans[1:], strict=False)), "each is another plan"
        for step in range(steps):
            alone = schedule([tile.at(number, step) for number, tile in enumerate(tiles)], scheduling)
            for name in ARRAYS:
                assert np.array_equal(getattr(current(plans, step), name), getattr(alone, name)), (step, name)


@pytest.mark.slow
def test_there_are_never_more_plans_than_promised():
    draw = np.random.default_rng(2)
    reached = 0
    for _ in range(200):
        tiles, steps = random_launch_tiles(draw), int(draw.integers(1, 65))
        stride = max(1, *(max(tile.stride, tile.begin_stride) for tile in tiles))
        windows = any(tile.begin_stride for tile in tiles)
        count = len(kv_plans_for_launch(tiles, steps, Scheduling(1, 4)))
        most = max_plans(steps, 16, len(tiles), stride, windows)
        assert count <= most
        reached += count == most
    assert reached > 16, "the promise is no wild guess"


def decoding(*lengths):
    """Sequences that decode one token a step, one tile of 4 packed rows each, after so many tokens."""
    return [LaunchTile(0, 4, 4 * number, length, 1, 1) for number, length in enumerate(lengths)]


def test_a_plan_changes_exactly_where_a_rounded_length_does():
    scheduling = Scheduling(2, 4)
    plans = kv_plans_for_launch(decoding(30), 20, scheduling)
    assert [first for first, _ in plans] == [0, 2, 18]
    several = kv_plans_for_launch(decoding(30, 0, 7), 20, scheduling)
    assert [first for first, _ in several] == [0, 2, 9, 16, 18]
    assert len(several) <= max_plans(20, tiles=3)
    assert current(several, 11) is kv_plan([42, 12, 19], 4, Scheduling(2, 4)), "decode is the plan of the lengths"
    window = [LaunchTile(0, 4, 0, length=100, stride=1, new=1, begin=93, begin_stride=1)]
    assert [first for first, _ in kv_plans_for_launch(window, 20, scheduling)] == [0, 3, 12, 19]
    assert kv_plans_for_launch(decoding(30), 20, scheduling, furthest=True) == [(0, plans[-1][1])]


def test_a_launch_of_no_steps_or_from_a_negative_length_is_refused():
    with pytest.raises(PlanError, match="steps is 0"):
        kv_plans_for_launch(decoding(10), 0, Scheduling(2, 4))
    with pytest.raises(PlanError, match="length -1"):
        decoding(-1)
    with pytest.raises(PlanError, match="launch tile: stride is -1"):
        LaunchTile(0, 4, 0, length=10, stride=-1, new=1)
    with pytest.raises(PlanError, match="it begins at key 12 and has 11 keys at step 0"):
        LaunchTile(0, 4, 0, length=10, stride=1, new=1, lowest=12)


def test_a_sequence_is_a_tile_and_a_long_one_several():
    records, tiles = launch_tiles([(100, 1, 0), (7, 10, 1)], group=4, tile_columns=4, pages_per_sequence=PAGES)
    assert records == [
        TileRecord(0, 1, 0, 0, 100, 1, 1, 0),
        TileRecord(1, 4, PAGES, 0, 7, 10, 4, 1),
        TileRecord(5, 4, PAGES, 0, 7, 10, 8, 1),
        TileRecord(9, 2, PAGES, 0, 7, 10, 10, 1),
    ]
    assert [(tile.level, tile.first_row, tile.rows) for tile in tiles] == [
        (0, 0, 4),
        (0, 4, 16),
        (0, 20, 16),
        (0, 36, 8),
    ]
    assert [(tile.at(0, 2).begin, tile.at(0, 2).end) for tile in tiles] == [(0, 103), (0, 31), (0, 35), (0, 37)]


def test_a_shared_prefix_is_read_by_tiles_of_level_0():
    sequences = [(40, 1, 0), (64, 2, 1), (50, 5, 3), (90, 1, 8), (32, 1, 9)]
    records, tiles = launch_tiles(sequences, 4, 4, PAGES, shared=[(1, 2, 48)])
    assert records[:3] == [
        TileRecord(1, 2, PAGES, 0, 48, 0, 0, 1),
        TileRecord(3, 4, PAGES, 0, 48, 0, 0, 3),
        TileRecord(7, 1, PAGES, 0, 48, 0, 0, 7),
    ], "cut where the sequences' own tiles end, of at most 4 columns"
    assert [tile.level for tile in tiles] == [0] * 3 + [1] * 6
    assert [(tile.at(0, 0).begin, tile.at(0, 0).end) for tile in tiles[3:]] == [
        *((0, 41), (48, 66), (48, 54), (48, 55), (0, 91), (0, 33)),
    ]
    assert records[3:] == launch_tiles(sequences, 4, 4, PAGES)[0], "records do not tell where a tile begins"


@dataclass(frozen=True)
class Launch:
    """A random launch: sequences and prefixes as `launch_tiles` takes them."""

    sequences: list
    shared: list
    columns: int

    @classmethod
    def draw(cls, draw, batch=6, longest=90):
        per_step = [int(draw.choice([1, 1, 2, 5, 9])) for _ in range(draw.integers(1, batch + 1))]
        firsts = np.cumsum([0, *per_step]).tolist()
        shared, first = [], 0
        while first < len(per_step):
            count = int(draw.integers(1, 4))
            if draw.random() < 0.6 and first + count <= len(per_step):
                shared.append((first, count, 16 * int(draw.integers(1, 4))))
            first += count
        least = {first + i: prefix for first, count, prefix in shared for i in range(count)}
        lengths = [int(draw.integers(least.get(b, 0), longest)) for b in range(len(per_step))]
        return cls(list(zip(lengths, per_step, firsts, strict=False)), shared, firsts[-1])

    def keys(self, draw, most, heads, dim):
        """Keys of every sequence; those of a prefix are the first member's. [sequences, most, heads, dim]"""
        keys = draw.standard_normal((len(self.sequences), most, heads, dim))
        for first, count, prefix in self.shared:
            keys[first : first + count, :prefix] = keys[first, :prefix]
        return keys


def state_of(query, keys):
    """Attention of one query over keys that are their own values: output and log-sum-exp, (0, -inf) over none."""
    if not len(keys):
        return np.zeros_like(query), -np.inf
    logits = keys @ query
    weights = np.exp(logits - logits.max())
    return weights @ keys / weights.sum(), logits.max() + np.log(weights.sum())


def carried_out(plan, records, keys, queries, group, step):
    """What a kernel makes of a plan, row by row: every (column, head) once. NaN is what nobody wrote."""
    output = np.full_like(queries, np.nan)
    partial = [None] * plan.partial_rows

    def place(tile, head, row):
        column = records[tile].first_column + row // group
        return column, head * group + row % group

    for _, tile, head, begin, end, first, rows, _ in plan.items.tolist():
        record = records[tile]
        cached = record.length + step * record.stride
        for row in range(rows):
            column, query = place(tile, head, row)
            causal = cached + 1 + column - record.new_column if record.new else cached
            seen = keys[record.table // PAGES, begin : min(end, causal), head]
            state = state_of(queries[column, query], seen)
            if first >= 0:
                assert partial[first + row] is None, "two items have a partial row"
                partial[first + row] = state
            else:
                assert np.isnan(output[column, query]).all(), "written twice"
                output[column, query] = state[0]
    for merge, (tile, head) in enumerate(plan.merges.tolist()):
        for row in range(records[tile].columns * group):
            sources = plan.merge_src[plan.merge_indptr[merge] : plan.merge_indptr[merge + 1]]
            states = [partial[source + row] for source in sources]
            weights = np.exp([lse - max(lse for _, lse in states) for _, lse in states])
            assert np.isnan(output[place(tile, head, row)]).all(), "written twice"
            output[place(tile, head, row)] = weights @ [out for out, _ in states] / weights.sum()
    return output


@pytest.mark.slow
def test_a_plan_carried_out_is_attention():
    """Several levels, chunks by rule and fixed, tiles of several sequences and sequences of several tiles."""
    draw = np.random.default_rng(3)
    group, heads, steps = 2, 2, 4
    for _ in range(12):
        launch, columns = Launch.draw(draw), int(draw.integers(1, 7))
        records, tiles = launch_tiles(launch.sequences, group, columns, PAGES, launch.shared)
        keys = launch.keys(draw, 256, heads, 4)
        chunk = int(draw.choice([0, 16, 32]))
        scheduling = Scheduling(heads, int(draw.choice([2, 7, 32])), minimum=16, chunk=chunk)
        plans = kv_plans_for_launch(tiles, steps, scheduling)
        for step in range(steps):
            queries = draw.standard_normal((launch.columns, heads * group, 4))
            found = carried_out(current(plans, step), records, keys, queries, group, step)
            for b, (length, per_step, first_column) in enumerate(launch.sequences):
                for number, head in np.ndindex(per_step, heads * group):
                    seen = keys[b, : length + step * per_step + number + 1, head // group]
                    expected, _ = state_of(queries[first_column + number, head], seen)
                    np.testing.assert_allclose(found[first_column + number, head], expected, atol=1e-12)


def test_every_launch_of_a_kernel_fits_its_layout():
    """Any sequences that a plan admits, with prefixes or without, for the plan's longest contexts."""
    draw = np.random.default_rng(4)
    group, kv_heads = 4, 8
    for tokens in (1, 2, 8, 16, 64):
        for fixed in (0, 256):
            batch = min(tokens, 8)
            plan = Plan(consumer_warps=8, stage_bytes=16384, stages=4, batch=batch, tokens=tokens, kv_chunk=fixed)
            layout = KvPlanLayout.for_step(plan, LLAMA_8B, 132)
            most = max_plans(64, KV_TILE_TOKENS, layout.tiles, plan.tokens)
            for _ in range(12):
                launch = Launch.draw(draw, batch, longest=plan.max_context - 64)
                if launch.columns > tokens:
                    continue
                shared = launch.shared if layout.levels > 1 else ()
                columns = plan.tile_columns(LLAMA_8B)
                records, tiles = launch_tiles(launch.sequences, group, columns, plan.pages_per_sequence, shared)
                assert len(tiles) <= layout.tiles
                steps = max(1, min(64, 64 // launch.columns))
                plans = kv_plans_for_launch(tiles, steps, Scheduling(kv_heads, 132, chunk=plan.kv_chunk))
                assert layout.encode_launch(plans).shape == (len(plans), layout.plan_words) and len(plans) <= most


def test_most_tiles_is_reached_and_not_passed():
    draw = np.random.default_rng(5)
    for batch, tokens, columns in ((1, 1, 1), (2, 16, 4), (3, 64, 16), (8, 8, 1), (8, 64, 16)):
        spare = tokens - batch
        cuts = [[spare] * (batch - 1), *draw.integers(0, spare + 1, (200, batch - 1)).tolist()]
        counts = []
        for cut in cuts:  # the first: one sequence has all that the others need not
            per_step = (1 + np.diff([0, *sorted(cut), spare])).tolist()
            sequences = list(zip([100] * batch, per_step, np.cumsum([0, *per_step]).tolist(), strict=False))
            counts.append(len(launch_tiles(sequences, 4, columns, PAGES)[0]))
            both = launch_tiles(sequences, 4, columns, PAGES, [(b, 1, 16) for b in range(batch)])[0]
            assert len(both) <= most_tiles(batch, tokens, columns, levels=2)
        assert max(counts) == counts[0] == most_tiles(batch, tokens, columns)


@pytest.mark.parametrize(
    ("sequences", "shared", "message"),
    [
        ([(9, 0, 0)], [], "sequence 0: per_step is 0"),
        ([(-9, 1, 0)], [], "length -9 is out of range"),
        ([(9, 4, 0), (9, 1, 3)], [], "sequence 1 begins at column 3 and the one before ends at 4"),
        (
            [(90, 1, 0)],
            [(0, 2, 16)],
            r"the prefix of 2 sequences from sequence 0 on: name sequences that are there \(1\)",
        ),
        ([(90, 1, 0), (90, 1, 1)], [(0, 2, 16), (1, 1, 32)], "each in one prefix at most"),
        ([(90, 1, 0), (90, 1, 1)], [(0, 2, 24)], "has 24 keys: share a multiple of 16"),
        ([(90, 1, 0), (90, 1, 1)], [(0, 2, 0)], "has 0 keys"),
        ([(90, 1, 0), (40, 1, 1)], [(0, 2, 48)], "has 48 keys and one of them only 40"),
        ([(90, 1, 0), (90, 1, 2)], [(0, 2, 48)], "their columns are not neighbours"),
    ],
)
def test_impossible_launches_are_refused(sequences, shared, message):
    with pytest.raises(PlanError, match=message):
        launch_tiles(sequences, 4, 4, PAGES, shared)


@pytest.mark.parametrize("window", [1, 2, 17, 300])
def test_the_tiles_of_a_window_have_what_their_queries_see_and_nothing_before(window: int) -> None:
    sequences, group, columns = [(0, 1, 0), (100, 5, 1), (7, 8, 6)], 2, 3
    records, tiles = launch_tiles(sequences, group, columns, PAGES, window=window)
    plain, whole = launch_tiles(sequences, group, columns, PAGES)
    assert records == plain, "where keys lie does not change"
    for step in range(40):
        for number, (record, tile) in enumerate(zip(records, tiles, strict=True)):
            found, without = tile.at(number, step), whole[number].at(number, step)
            first_query = record.length + step * record.stride + record.first_column - record.new_column
            assert found.begin == max(0, first_query + 1 - window)
            assert (found.end, found.rows, found.first_row) == (without.end, without.rows, without.first_row)


def test_a_window_shares_no_prefix() -> None:
    with pytest.raises(PlanError, match="a prefix that sequences share leaves a window of 40 keys: share none"):
        launch_tiles([(64, 1, 0), (70, 1, 1)], 1, 8, PAGES, shared=[(0, 2, 64)], window=40)
