"""Random tiles for the scheduler, its invariants, and the algorithm once more, written out plainly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from cheetah.plan.kv import KvPlanLayout, Scheduling, Tile, schedule

ARRAYS = ("items", "work_indptr", "merges", "merge_indptr", "merge_src")
LENGTHS = [0, 1, 3, 15, 16, 17, 54, 97, 199, 512, 1177, 2048, 8191, 16384, 33001]


@dataclass(frozen=True)
class Case:
    """Tiles and constants of one plan; `levels` is how many levels the tiles have."""

    tiles: tuple[Tile, ...]
    scheduling: Scheduling

    @property
    def levels(self) -> int:
        return 1 + max((tile.level for tile in self.tiles), default=0)

    @property
    def last(self) -> list[Tile]:
        """The tiles of the last level."""
        return [tile for tile in self.tiles if tile.level == self.levels - 1]

    @property
    def layout(self) -> KvPlanLayout:
        """The smallest layout that promises room."""
        rounded = [tile.rounded(self.scheduling.align) for tile in self.tiles]
        level_rows = max((sum(t.rows for t in self.tiles if t.level == n) for n in range(self.levels)), default=0)
        return KvPlanLayout(
            self.scheduling.blocks,
            self.scheduling.kv_heads,
            tiles=max(1, len(self.tiles)),
            tile_rows=max((tile.rows for tile in self.tiles), default=1),
            levels=self.levels,
            chunk=self.scheduling.chunk,
            max_keys=max([1, *(tile.end for tile in rounded)]),
            level_rows=level_rows,
        )


def random_case(draw: np.random.Generator, levels: int | None = None, fixed: bool | None = None) -> Case:
    """Up to 8 tiles in the last level, up to 3 levels, with chunks by rule or of fixed length."""
    levels = int(draw.integers(1, 4)) if levels is None else levels
    fixed = bool(draw.random() < 0.3) if fixed is None else fixed
    align, minimum = ((1, 1), (16, 64), (16, 16), (64, 128), (5, 15))[draw.integers(5)]
    row_cost, token_cost = ((1, 1), (128, 2), (1, 7))[draw.integers(3)]
    kv_heads, blocks = int(draw.choice([1, 2, 3, 4, 8, 16])), int(draw.choice([1, 2, 4, 7, 16, 132]))
    tiles = random_tiles(draw, levels)
    chunk = 0
    if fixed:
        keys = kv_heads * sum(tile.length for tile in tiles)
        chunk = align * int(1 + keys // (align * draw.integers(1, 300)))
    light = {"first_light": int(draw.integers(blocks)), "light_blocks": int(draw.integers(blocks))}
    scheduling = Scheduling(kv_heads, blocks, align, minimum, row_cost, token_cost, chunk, **light)
    return Case(tuple(tiles), scheduling)


def random_tiles(draw: np.random.Generator, levels: int) -> list[Tile]:
    """Tiles of the last level in a row, with gaps; above them, at each level, some runs of them share a prefix."""
    last: list[Tile] = []
    row = 0
    for number in range(int(draw.integers(levels > 1, 9))):
        row += int(draw.integers(0, 3))
        rows = int(draw.choice([1, 2, 3, 4, 8, 16]))
        last.append(Tile(levels - 1, 2 * number, rows, *random_range(draw), first_row=row))
        row += rows
    above = [tile for level in range(levels - 1) for tile in random_prefixes(draw, level, last)]
    return sorted(above + last, key=lambda tile: (tile.level, tile.tile))


def random_range(draw: np.random.Generator) -> tuple[int, int]:
    length = int(draw.choice(LENGTHS)) if draw.random() < 0.3 else int(draw.integers(0, 11000))
    begin = 0 if draw.random() < 0.5 else int(draw.integers(0, 300))
    return begin, begin + length


def random_prefixes(draw: np.random.Generator, level: int, last: list[Tile]) -> list[Tile]:
    """Tiles over runs of neighbours that have no gap between them."""
    found = []
    first = 0
    while first < len(last):
        after = first + 1
        while after < len(last) and last[after].first_row == last[after - 1].end_row and draw.random() < 0.6:
            after += 1
        if draw.random() < 0.7:
            rows = last[after - 1].end_row - last[first].first_row
            found.append(Tile(level, 100 * level + first, rows, *random_range(draw), last[first].first_row))
        first = after
    return found


def plain_schedule(case: Case) -> dict[str, list]:
    """Algorithm 1 with nothing clever."""
    sizes, levels = case.scheduling, case.levels
    tiles = [tile.rounded(sizes.align) for tile in case.tiles]
    total = sizes.kv_heads * sum(tile.length for tile in tiles)
    chunk = sizes.chunk or max(sizes.minimum, sizes.align * -(-total // (sizes.blocks * sizes.align)))
    items, merges, first_partial = [], [], 0
    for tile in tiles:
        edges = range(0, tile.end, chunk) if sizes.chunk else range(tile.begin, tile.end, chunk)
        cuts = [tile.begin, *(edge for edge in edges if edge > tile.begin)]
        covered = any(above.level < tile.level == levels - 1 and above.covers(tile) for above in tiles)
        partial = len(cuts) > 1 or covered or tile.level < levels - 1
        for head in range(sizes.kv_heads):
            for begin, end in zip(cuts, [*cuts[1:], tile.end], strict=True):
                slot = first_partial if partial else -1
                first_partial += tile.rows if partial else 0
                items.append([tile.level, tile.tile, head, begin, end, slot, tile.rows, 0])
            if partial and tile.level == levels - 1:
                merges.append((tile, head))
    first_rows = {(tile.level, tile.tile): tile.first_row for tile in tiles}
    sources = [sources_of(tile, head, items, tiles, first_rows) for tile, head in merges]
    queues = plain_queues(items, sizes)
    return {
        "items": [item for queue in queues for item in queue],
        "work_indptr": starts(queues),
        "merges": [[tile.tile, head] for tile, head in merges],
        "merge_indptr": starts(sources),
        "merge_src": [row for rows in sources for row in rows],
    }


def sources_of(tile: Tile, head: int, items: list, tiles: list[Tile], first_rows: dict) -> list[int]:
    """The items are still in (level, tile, head, chunk) order."""
    over = {(tile.level, tile.tile)} | {(t.level, t.tile) for t in tiles if t.level < tile.level and t.covers(tile)}
    return [
        item[5] + tile.first_row - first_rows[item[0], item[1]]
        for item in items
        if (item[0], item[1]) in over and item[2] == head
    ]


def cost_of(item: Sequence[int], sizes: Scheduling) -> int:
    """Two tiles of 8 rows are multiplied while memory brings the keys, further ones take time of their own."""
    tiles = max(2, -(-item[6] // 8))
    return sizes.row_cost * item[6] + sizes.token_cost * (item[4] - item[3]) * tiles // 2


def plain_queues(items: list, sizes: Scheduling) -> list[list]:
    queues: list[list] = [[] for _ in range(sizes.blocks)]
    heap = [(0, block) for block in range(sizes.blocks)]
    first = sizes.first_light if len(items) <= sizes.light_blocks else 0
    for item in sorted(items, key=lambda item: (item[3] - item[4], item[0], item[1], item[2], item[3])):
        cost, block = heappop(heap)
        queues[(block + first) % sizes.blocks].append(item)
        heappush(heap, (cost + cost_of(item, sizes), block))
    return queues


def starts(parts: list) -> list[int]:
    return [0, *np.cumsum([len(part) for part in parts], dtype=int).tolist()]


def check_invariants(case: Case) -> None:
    """Everything that a plan promises, of one case."""
    plan = schedule(case.tiles, case.scheduling)
    in_order = plan.items[np.lexsort(plan.items[:, [3, 2, 1, 0]].T)].astype(np.int64)
    check_every_key_once(case, plan, in_order)
    check_partials(case, plan, in_order)
    check_merges(case, plan, in_order)
    check_bounds(case, plan)
    check_balance(case, plan)


def check_every_key_once(case, plan, items):
    """`items` are sorted by (level, tile, head, begin)."""
    heads = case.scheduling.kv_heads
    is_first = np.ones(len(items), bool)
    is_first[1:] = (items[1:, :3] != items[:-1, :3]).any(axis=1)
    is_last = np.append(is_first[1:], True)[: len(items)]
    rounded = [tile.rounded(case.scheduling.align) for tile in case.tiles]
    words = np.array([(t.level, t.tile, t.rows, t.begin, t.end) for t in rounded], np.int64).reshape(-1, 5)
    tiles = np.repeat(words, heads, axis=0)
    assert np.array_equal(items[is_first][:, :2], tiles[:, :2]), "each tile has an item"
    assert np.array_equal(items[is_first][:, 2], np.tile(np.arange(heads), len(rounded))), "and each head"
    assert np.array_equal(items[is_first][:, 3], tiles[:, 3]) and np.array_equal(items[is_last][:, 4], tiles[:, 4])
    assert np.array_equal(items[1:, 3][~is_first[1:]], items[:-1, 4][~is_first[1:]]), "no gap and no overlap"
    lengths = items[:, 4] - items[:, 3]
    is_whole = ~is_last & ~is_first if case.scheduling.chunk else ~is_last
    assert (lengths[is_whole] == plan.chunk).all() and (lengths <= plan.chunk).all()
    assert (lengths[~is_first] > 0).all() and (items[:, 7] == 0).all()
    assert np.array_equal(items[:, 6], np.repeat(tiles[:, 2], np.diff(np.flatnonzero(np.append(is_first, True)))))
    if case.scheduling.chunk:
        assert plan.chunk == case.scheduling.chunk
        assert (items[~is_last, 4] % plan.chunk == 0).all(), "a chunk ends where its place says"
        begins = {(tile.tile, tile.level): tile.begin for tile in rounded}
        chunks = [begins[tile, case.levels - 1] // plan.chunk for tile, _ in plan.merges.tolist()]
        assert plan.first_chunks is not None and plan.first_chunks.tolist() == chunks


def check_partials(case, plan, items):
    """Numbered in order; what is split, or has two levels, or is a prefix is partial, and nothing else."""
    above = [tile for tile in case.tiles if tile.level < case.levels - 1]
    merged = {(t.level, t.tile) for t in above} | {
        (tile.level, tile.tile) for tile in case.last if any(prefix.covers(tile) for prefix in above)
    }
    names = [tuple(item) for item in items[:, :3].tolist()]
    split = {one for one, two in zip(names, names[1:], strict=False) if one == two}
    partial = np.array([name in split or name[:2] in merged for name in names], bool)
    assert np.array_equal(items[:, 5] >= 0, partial) and (items[~partial, 5] == -1).all()
    rows = items[partial, 6]
    assert np.array_equal(items[partial, 5], np.cumsum(rows) - rows)
    assert (plan.partials, plan.partial_rows) == (partial.sum(), rows.sum())


def check_merges(case, plan, items):
    """Every partial row is folded exactly once, into its own row and head, in the order of the work list."""
    first_rows = {(tile.level, tile.tile): tile.first_row for tile in case.tiles}
    last = {tile.tile: tile for tile in case.last}
    partial = items[items[:, 5] >= 0]
    owner = np.repeat(np.arange(len(partial)), partial[:, 6])
    firsts = np.array([first_rows[level, tile] for level, tile in partial[:, :2].tolist()], np.int64)
    absolute = np.arange(len(owner)) - partial[owner, 5] + firsts[owner]
    merges = plan.merges.tolist()
    assert merges == sorted(merges)
    counts = np.diff(plan.merge_indptr)
    rows = np.repeat(np.array([last[tile].rows for tile, _ in merges], np.int64), counts)
    first_row = np.repeat(np.array([last[tile].first_row for tile, _ in merges], np.int64), counts)
    head = np.repeat(plan.merges[:, 1], counts)
    sources = plan.merge_src.astype(np.int64)
    items_read = owner[sources]
    assert np.array_equal(absolute[sources], first_row) and np.array_equal(partial[items_read, 2], head)
    assert np.array_equal(items_read, owner[sources + rows - 1]), "the rows of a source are neighbours"
    merge = np.repeat(np.arange(len(merges)), counts)
    assert (np.diff(items_read)[merge[1:] == merge[:-1]] > 0).all(), "ascending by (level, chunk)"
    folded = np.repeat(sources - np.cumsum(rows) + rows, rows) + np.arange(rows.sum())
    assert np.array_equal(np.sort(folded), np.arange(plan.partial_rows)), "each partial row exactly once"
    assert plan.merge_rows == rows.max(initial=0) and plan.source_count == len(sources) == plan.merge_indptr[-1]


def check_bounds(case, plan):
    sizes, pairs = case.scheduling, len(case.tiles) * case.scheduling.kv_heads
    case.layout.check(plan)
    replace(case.layout, level_rows=0).check(plan)
    assert (plan.work_indptr[0], plan.work_indptr[-1], plan.blocks) == (0, plan.item_count, sizes.blocks)
    if not sizes.chunk:
        assert plan.chunk >= sizes.minimum and plan.item_count <= pairs + 2 * sizes.blocks
    if not sizes.chunk and case.levels == 1:
        assert plan.partials < 2 * sizes.blocks and plan.merge_count <= min(pairs, sizes.blocks)


def check_balance(case, plan):
    sizes = case.scheduling
    lengths = (plan.items[:, 4] - plan.items[:, 3]).astype(np.int64)
    costs = np.array([cost_of(item, sizes) for item in plan.items.tolist()], np.int64)
    block = np.repeat(np.arange(sizes.blocks), np.diff(plan.work_indptr))
    loads = np.bincount(block, costs, minlength=sizes.blocks)
    largest = costs.max(initial=0)
    assert loads.max() <= loads.mean() + (1 - 1 / sizes.blocks) * largest + 1e-6
    assert loads.max() - loads.min() <= largest
    assert (np.diff(lengths)[block[1:] == block[:-1]] <= 0).all(), "a queue is in the order of assignment"
