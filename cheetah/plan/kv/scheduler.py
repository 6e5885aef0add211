"""The load-balanced scheduler of attention: which block reads which keys, and how the partial states are merged.

FlashInfer's (MLSys 2025, Algorithm 1, appendices D.1 and D.2) with our decisions: the work list counts heads, constants
are integers, and nothing depends on arrival. Pure host arithmetic; the same tiles give the same bytes. Keys, lengths
and ranges count tokens.

A *tile* is a range of query rows that read one range of keys. The tiles of the last level write outputs; a tile of an
earlier level holds a prefix that several of those share. All levels are in one work list, with one chunk length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapreplace

import numpy as np
import numpy.typing as npt

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.kv.page_table import Int32Array

Int64Array = npt.NDArray[np.int64]
ITEM_WORDS = 8
"""Words of an item: level, tile, head, begin, end, first partial row or -1, rows, 0."""
WRITE_THROUGH = -1
"""The first partial row of an item that writes the final output itself."""
EVEN_LENGTHS = 3
"""Of so many tiles, the longest, a chunk length that divides them evenly is tried."""
TILE_ROWS, TILES_IN_TIME = 8, 2
"""Rows that are multiplied by keys together, and of how many such tiles while memory brings the keys: more rows cost
time of their own (8B on an H200, 512 keys: 7.9 us with 4 rows, 15.8 with 32)."""
MOST_KEYS = 2**31 - 2**16
"""Keys of a tile are fewer, so that every word of a plan is an int32."""


@dataclass(frozen=True)
class Tile:
    """Query rows that read one range of keys: `rows` packed rows per KV head see keys [begin, end) of the tile.

    The rows of a step are numbered through (packed: column * group + head in the group), and the tile's are `first_row`
    and the next ones. No two tiles of a level share a row. A tile of an earlier level covers the tiles of the last
    level whose rows lie within its own; every one of its rows belongs to one of those.
    """

    level: int
    tile: int
    rows: int
    begin: int
    end: int
    first_row: int = 0

    def rounded(self, align: int) -> Tile:
        """The same tile with its range rounded outward to multiples of `align`."""
        begin, end = self.begin // align * align, round_up(self.end, align)
        is_rounded = begin == self.begin and end == self.end
        return self if is_rounded else Tile(self.level, self.tile, self.rows, begin, end, self.first_row)

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows

    def covers(self, other: Tile) -> bool:
        """Whether every row of `other` is one of this tile's."""
        return self.first_row <= other.first_row and other.end_row <= self.end_row


@dataclass(frozen=True)
class Scheduling:
    """The constants of the scheduler: align and minimum are A and M, the costs alpha and beta, chunk is F.

    A `chunk` above 0 fixes where chunks end: at its multiples, so that a key's chunk depends on nothing but its place,
    not on other tiles, nor on where a tile begins. `item_cost` is what
    an item costs whatever its length, in keys: then the chunk length may also be one that divides a tile evenly, if
    the busiest block is done earlier so (8 x 8192 keys: no items of 224 keys beside those of 3984). The
    `light_blocks` blocks from `first_light` on, behind the last block the first one, have less to do before attention:
    they get the items where there are as many of them.
    """

    kv_heads: int
    blocks: int
    align: int = 16
    minimum: int = 64
    row_cost: int = 1
    token_cost: int = 1
    chunk: int = 0
    item_cost: int = 0
    first_light: int = 0
    light_blocks: int = 0

    def __post_init__(self) -> None:
        may_be_zero = ("chunk", "item_cost", "first_light", "light_blocks")
        positive = {name: value for name, value in vars(self).items() if name not in may_be_zero or value != 0}
        require_positive("KV plan", **positive)
        for name in ("minimum", "chunk"):
            value = getattr(self, name)
            if value % self.align:
                raise PlanError(f"KV plan: {name} is {value}: give a multiple of align, {self.align}")

    def chunk_length(self, tokens: int) -> int:
        """L for `tokens` keys over all tiles of one KV head: an even share of a block, at least `minimum`."""
        even = self.align * ceil_div(tokens * self.kv_heads, self.blocks * self.align)
        return self.chunk or max(self.minimum, even)

    def chunk_lengths(self, lengths: Sequence[int]) -> list[int]:
        """The chunk lengths to choose from for tiles of these rounded lengths: L, and longer ones that divide a tile,
        of the longest also one into a chunk less, which leaves blocks to others."""
        usual = self.chunk_length(sum(lengths))
        if self.chunk or not self.item_cost:
            return [usual]
        longest = sorted({length for length in lengths if length > usual}, reverse=True)[:EVEN_LENGTHS]
        counts = [(length, length // usual) for length in longest]
        if counts and counts[0][1] > 1:
            counts.append((longest[0], counts[0][1] - 1))
        even = {self.align * ceil_div(length, count * self.align) for length, count in counts}
        return [usual, *sorted(even - {usual})]


@dataclass(frozen=True, eq=False)
class KvPlan:
    """One schedule. All arrays are int32 and read-only.

    `items[work_indptr[b]:work_indptr[b+1]]` is the queue of block b. Every item that does not write through has `rows`
    partial rows of its own. Merge m makes the output of (tile, head) = `merges[m]`, a tile of the last level: its row r
    folds the states in the partial rows `merge_src[merge_indptr[m]:merge_indptr[m+1]]` + r, in that order, which is
    ascending by (level, chunk). Ranges are rounded outward: the kernel clips them to the true ones. first_chunks: of
    each merge, the number of its tile's first chunk in the sequence where chunks have fixed ends, else 0.
    """

    items: Int32Array
    work_indptr: Int32Array
    merges: Int32Array
    merge_indptr: Int32Array
    merge_src: Int32Array
    chunk: int
    first_chunks: Int32Array | None = None

    @property
    def item_count(self) -> int:
        return len(self.items)

    @property
    def merge_count(self) -> int:
        return len(self.merges)

    @property
    def source_count(self) -> int:
        """States that are folded, over all merges; a state of a shared prefix counts once for each."""
        return len(self.merge_src)

    @cached_property
    def partials(self) -> int:
        """Items whose states are merged."""
        return int((self.items[:, 5] != WRITE_THROUGH).sum())

    @cached_property
    def partial_rows(self) -> int:
        """Partial rows in use."""
        return int(self.items[self.items[:, 5] != WRITE_THROUGH, 6].sum())

    @cached_property
    def tile_rows(self) -> int:
        """The most rows of a tile."""
        return int(self.items[:, 6].max(initial=0))

    @cached_property
    def merge_rows(self) -> int:
        """The most rows of a tile that is merged."""
        last_level = self.items[:, 0] == self.items[:, 0].max(initial=0)
        return int(self.items[last_level & (self.items[:, 5] != WRITE_THROUGH), 6].max(initial=0))

    @property
    def blocks(self) -> int:
        return len(self.work_indptr) - 1

    def queue(self, block: int) -> Int32Array:
        """The items of `block`, in the order in which it works on them."""
        return self.items[self.work_indptr[block] : self.work_indptr[block + 1]]

    def tokens(self, block: int) -> int:
        """Keys that `block` reads, over all its items."""
        queue = self.queue(block)
        return int((queue[:, 4] - queue[:, 3]).sum())


def schedule(tiles: Sequence[Tile], scheduling: Scheduling) -> KvPlan:
    """The plan for tiles of any number of levels, ascending by (level, tile). PlanError if ranges or rows are wrong."""
    lengths = [tile.rounded(scheduling.align).length for tile in tiles]
    tables = [_Tiles.of(tiles, scheduling, chunk) for chunk in scheduling.chunk_lengths(lengths)]
    items, owners, order, table = min(
        ((*_assigned(table, scheduling), table) for table in tables),
        key=lambda made: _busiest(made[0], made[1], made[2], scheduling),
    )
    by_block = np.argsort(owners, kind="stable")  # a block keeps the order of assignment
    merges, merge_indptr, merge_src = table.merges()
    return KvPlan(
        items=_int32(items[order[by_block]]),
        work_indptr=_int32(_starts(np.bincount(owners, minlength=scheduling.blocks))),
        merges=_int32(merges),
        merge_indptr=_int32(merge_indptr),
        merge_src=_int32(merge_src),
        chunk=table.chunk,
        first_chunks=_int32(table.first_chunks()) if scheduling.chunk else None,
    )


@lru_cache(maxsize=1024)
def cached_schedule(tiles: tuple[Tile, ...], scheduling: Scheduling) -> KvPlan:
    """`schedule`, which remembers its plans: give rounded tiles, and the same ones give the same object."""
    return schedule(tiles, scheduling)


@dataclass(frozen=True, eq=False)
class _Tiles:
    """The tiles as columns of int64, one entry a tile, with ranges rounded and cut into `chunks` chunks each. `edge` is
    where a tile's chunks are counted from: its first one begins with it.

    covers[u, t]: t is of the last level and u, of an earlier one, covers it. Partial rows are numbered in (level, tile,
    head, chunk) order; `first_partial` is a tile's first one.
    """

    level: Int64Array
    number: Int64Array
    rows: Int64Array
    begin: Int64Array
    end: Int64Array
    first_row: Int64Array
    kv_heads: int
    chunk: int
    edge: Int64Array
    chunks: Int64Array
    covers: npt.NDArray[np.bool_]
    partial: npt.NDArray[np.bool_]
    first_partial: Int64Array

    @classmethod
    def of(cls, tiles: Sequence[Tile], scheduling: Scheduling, chunk: int) -> _Tiles:
        _check_order_and_ranges(tiles)
        words = [(tile.level, tile.tile, tile.rows, tile.begin, tile.end, tile.first_row) for tile in tiles]
        level, number, rows, begin, end, first_row = np.array(words, np.int64).reshape(-1, 6).T
        begin = begin // scheduling.align * scheduling.align
        end = -(-end // scheduling.align) * scheduling.align
        edge = begin // chunk * chunk if scheduling.chunk else begin
        chunks = np.maximum(1, -(-(end - edge) // chunk))
        covers = _coverage(level, rows, first_row)
        # What is alone in one chunk and one level writes the output itself.
        partial = (chunks > 1) | covers.any(axis=0) | (level < level.max(initial=0))
        partial_rows = np.where(partial, scheduling.kv_heads * chunks * rows, 0)
        kv_heads, first_partial = scheduling.kv_heads, _starts(partial_rows)[:-1]
        ranges = level, number, rows, begin, end, first_row
        return cls(*ranges, kv_heads, chunk, edge, chunks, covers, partial, first_partial)

    def items(self) -> Int64Array:
        """The work list in (level, tile, head, chunk) order, [items, 8]."""
        counts = self.kv_heads * self.chunks
        tile = np.repeat(np.arange(len(counts)), counts)
        in_tile = np.arange(len(tile)) - np.repeat(_starts(counts)[:-1], counts)
        head, chunk = np.divmod(in_tile, self.chunks[tile])
        begin = self.edge[tile] + chunk * self.chunk
        items = np.zeros((len(tile), ITEM_WORDS), np.int64)
        items[:, 0], items[:, 1], items[:, 2] = self.level[tile], self.number[tile], head
        items[:, 3], items[:, 4] = np.maximum(begin, self.begin[tile]), np.minimum(begin + self.chunk, self.end[tile])
        first_row = self.first_partial[tile] + in_tile * self.rows[tile]
        items[:, 5], items[:, 6] = np.where(self.partial[tile], first_row, WRITE_THROUGH), self.rows[tile]
        return items

    def merges(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The (tile, head) pairs of the last level that are not written through, and starts and rows of the sources."""
        merged = np.flatnonzero(self.partial & (self.level == self.level.max(initial=0)))
        sources = [self._sources(int(tile)) for tile in merged]
        pairs = np.empty((len(merged), self.kv_heads, 2), np.int64)
        pairs[:, :, 0], pairs[:, :, 1] = self.number[merged, None], np.arange(self.kv_heads)
        starts = _starts(np.repeat(np.array([rows.shape[1] for rows in sources], np.int64), self.kv_heads))
        return (
            pairs.reshape(-1, 2),
            starts,
            np.concatenate([np.empty(0, np.int64), *(rows.ravel() for rows in sources)]),
        )

    def first_chunks(self) -> Int64Array:
        """Of each merge, the number of the first chunk of its tile, of chunks with fixed ends."""
        merged = self.partial & (self.level == self.level.max(initial=0))
        return np.repeat(self.edge[merged] // self.chunk, self.kv_heads)

    def _sources(self, tile: int) -> Int64Array:
        """Where the states of this tile's first row lie, ascending by (level, chunk), [heads, sources]."""
        parts = []
        for source in (*np.flatnonzero(self.covers[:, tile]), tile):
            count = int(self.chunks[source])
            first = self.first_partial[source] + self.first_row[tile] - self.first_row[source]
            rows = first + self.rows[source] * np.arange(self.kv_heads * count)
            parts.append(rows.reshape(self.kv_heads, count))
        return np.concatenate(parts, axis=1)


def _check_order_and_ranges(tiles: Sequence[Tile]) -> None:
    before = None
    for tile in tiles:
        place = f"KV plan: tile {tile.tile} of level {tile.level}"
        if before is not None and (tile.level, tile.tile) <= before:
            raise PlanError(f"{place} follows tile {before[1]} of level {before[0]}: sort the tiles by (level, tile)")
        if not 0 <= tile.begin <= tile.end < MOST_KEYS:
            raise PlanError(f"{place} has keys [{tile.begin}, {tile.end}): give 0 <= begin <= end < {MOST_KEYS}")
        if min(tile.level, tile.tile, tile.first_row) < 0 or tile.rows < 1:
            raise PlanError(f"{place} has {tile.rows} rows from row {tile.first_row} on: give at least 1, from 0 on")
        before = tile.level, tile.tile


def _coverage(level: Int64Array, rows: Int64Array, first_row: Int64Array) -> npt.NDArray[np.bool_]:
    """covers[u, t] of `_Tiles`. PlanError unless a row is one tile's of a level, and also one's of the last level."""
    end_row = first_row + rows
    in_order = np.lexsort((first_row, level))
    neighbours = level[in_order[1:]] == level[in_order[:-1]]
    if (neighbours & (first_row[in_order[1:]] < end_row[in_order[:-1]])).any():
        raise PlanError("KV plan: two tiles of a level share a row: give each its own first_row")
    last = level == level.max(initial=0)
    covers = np.zeros((len(level), len(level)), np.bool_)
    for tile in np.flatnonzero(~last):
        covers[tile] = last & (first_row[tile] <= first_row) & (end_row <= end_row[tile])
        if int(rows[covers[tile]].sum()) != rows[tile]:
            raise PlanError(
                f"KV plan: rows {first_row[tile]} to {end_row[tile] - 1} of level {level[tile]} are not those of whole "
                f"tiles of level {level.max()}: cut the tile where they end"
            )
    return covers


def _assigned(table: _Tiles, scheduling: Scheduling) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The items, the block of each in the order of assignment, and that order."""
    items = table.items()
    return (items, *_assign(items, scheduling))


def _busiest(items: Int64Array, owners: Int64Array, order: Int64Array, scheduling: Scheduling) -> int:
    """The largest cost of a block."""
    costs = np.zeros(scheduling.blocks, np.int64)
    np.add.at(costs, owners, _costs(items, scheduling)[order])
    return int(costs.max())


def _costs(items: Int64Array, scheduling: Scheduling) -> Int64Array:
    lengths = items[:, 4] - items[:, 3]
    in_time = np.maximum(-(-items[:, 6] // TILE_ROWS), TILES_IN_TIME)
    keys = scheduling.token_cost * lengths * in_time // TILES_IN_TIME
    return scheduling.item_cost + scheduling.row_cost * items[:, 6] + keys


def _assign(items: Int64Array, scheduling: Scheduling) -> tuple[Int64Array, Int64Array]:
    """The block of each item, in the order of assignment, and that order.

    The longest item is next, equal ones in (level, tile, head, chunk) order, and goes to the least (cost, block),
    where few are counted from the first of the light blocks.
    """
    lengths = items[:, 4] - items[:, 3]
    order = np.argsort(-lengths, kind="stable")
    blocks = scheduling.blocks
    heap = list(range(blocks))  # cost * blocks + block: whole numbers compare faster than pairs
    keys = []
    for cost in _costs(items, scheduling)[order].tolist():
        keys.append(heap[0])
        heapreplace(heap, heap[0] + blocks * cost)
    first = scheduling.first_light if len(keys) <= scheduling.light_blocks else 0
    return np.array([(key + first) % blocks for key in keys], np.int64), order


def _starts(counts: Int64Array) -> Int64Array:
    """0 and the running sums."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _int32(values: Int64Array) -> Int32Array:
    array = values.astype(np.int32)
    array.setflags(write=False)
    return array
