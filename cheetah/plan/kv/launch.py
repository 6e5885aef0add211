"""The tiles of attention in a launch of several steps, and the KV plans that its steps follow.

What a tile sees grows with every step; a plan is for rounded ranges and holds until one of them changes. So the plan of
a step depends on what its tiles see, and not on how steps are grouped into launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import index

import numpy as np

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.index import ceil_div
from cheetah.plan.kv.scheduler import MOST_KEYS, KvPlan, Scheduling, Tile, cached_schedule
from cheetah.plan.kv.tables import TileRecord


@dataclass(frozen=True)
class LaunchTile:
    """What a tile of `rows` packed rows from `first_row` on sees in the steps of a launch; its number is its place.

    At step s: keys [max(lowest, begin + s * begin_stride), length + s * stride + new) of the tile, none if that is
    empty. `length` keys are there before the launch, `stride` more with every step, and `new` are the step's own.
    begin: the first key that is seen at step 0; below `lowest` as long as a window has not left that behind. most: more
    keys there never are, however many steps are made.
    """

    level: int
    rows: int
    first_row: int
    length: int
    stride: int
    new: int
    begin: int = 0
    begin_stride: int = 0
    lowest: int = 0
    most: int = MOST_KEYS

    def __post_init__(self) -> None:
        whole_length(self.length)
        require_positive("launch tile", rows=self.rows)
        for name in ("level", "first_row", "stride", "new", "begin_stride", "lowest"):
            if getattr(self, name) < 0:
                raise PlanError(f"launch tile: {name} is {getattr(self, name)}: give 0 or more")
        if max(self.lowest, self.begin) > self.length + self.new:
            begin, end = max(self.lowest, self.begin), self.length + self.new
            raise PlanError(f"launch tile: it begins at key {begin} and has {end} keys at step 0: begin there at most")

    def at(self, number: int, step: int) -> Tile:
        """The tile of that number at a step, with the exact range."""
        end = min(self.length + step * self.stride + self.new, self.most)
        begin = min(max(self.lowest, self.begin + step * self.begin_stride), end)
        return Tile(self.level, number, self.rows, begin, end, self.first_row)


def kv_plans_for_launch(
    tiles: Sequence[LaunchTile], steps: int, scheduling: Scheduling, *, furthest: bool = False
) -> list[tuple[int, KvPlan]]:
    """(first step, plan) for a launch of `steps` steps; tile i of the plans is `tiles[i]`, which ascend by level.

    A plan is valid until a rounded begin or end changes. furthest: the last one alone, for all steps.
    """
    require_positive("KV plans of a launch", steps=steps)

    def plan_at(step: int) -> KvPlan:
        seen = (tile.at(number, step).rounded(scheduling.align) for number, tile in enumerate(tiles))
        return cached_schedule(tuple(seen), scheduling)

    changes = _changes(tiles, steps, scheduling.align)
    return [(0, plan_at(changes[-1]))] if furthest else [(step, plan_at(step)) for step in changes]


def _changes(tiles: Sequence[LaunchTile], steps: int, align: int) -> list[int]:
    """The steps at which a rounded range is another than the step before; step 0 is one."""
    names = ("length", "stride", "new", "begin", "begin_stride", "lowest", "most")
    words = np.array([[getattr(tile, name) for name in names] for tile in tiles], np.int64).reshape(-1, len(names))
    length, stride, new, begin, begin_stride, lowest, most = words.T
    step = np.arange(steps)[:, None]
    ends = np.minimum(length + step * stride + new, most)
    begins = np.minimum(np.maximum(lowest, begin + step * begin_stride), ends)
    rounded = np.concatenate([begins // align, -(-ends // align)], axis=1)
    changed = (rounded[1:] != rounded[:-1]).any(axis=1)
    return [0, *(np.flatnonzero(changed) + 1).tolist()]


def max_plans(steps: int, align: int = 16, tiles: int = 1, stride: int = 1, windows: bool = False) -> int:
    """The most plans that `kv_plans_for_launch` returns, for tiles that grow by up to `stride` keys a step.

    windows: begins move as well, by up to `stride` keys.
    """
    changes = tiles * ceil_div((steps - 1) * stride, align)
    return min(steps, 1 + (2 * changes if windows else changes))


def launch_tiles(
    sequences: Sequence[tuple[int, int, int]],
    group: int,
    tile_columns: int,
    pages_per_sequence: int,
    shared: Sequence[tuple[int, int, int]] = (),
    align: int = 16,
    window: int | None = None,
    most: int = MOST_KEYS,
    whole: bool = False,
) -> tuple[list[TileRecord], list[LaunchTile]]:
    """The tiles of a launch, at most `tile_columns` columns each: records and what they see, in the order of numbers.

    sequences: (tokens before the launch, columns a step, first column) in the order of columns; sequence b has row b of
    the page table. shared: (first sequence, sequences, prefix) where neighbours begin with the same `prefix` keys, a
    multiple of `align`: those are read once for all, by tiles of level 0, which come first; all the sequences' own
    tiles, in the order of columns, are then of level 1 and theirs begin behind the prefix. Keys count from the start of
    the sequence everywhere. The shared keys are read from the pages of the first of the sequences. window: so many keys
    a query sees, its own included: a tile's keys begin at the first that its first query sees. Then nothing is shared.
    most: keys of a sequence; where a launch has steps for more, its plans are for no more. whole: a column sees all of
    its sequence in the step, also those behind it.
    """
    require_positive("launch tiles", group=group, tile_columns=tile_columns, pages_per_sequence=pages_per_sequence)
    _check_columns(sequences)
    _check_shared(sequences, shared, align)
    if window is not None and shared:
        raise PlanError(f"launch tiles: a prefix that sequences share leaves a window of {window} keys: share none")
    prefixes = {first + i: prefix for first, count, prefix in shared for i in range(count)}
    made: list[tuple[TileRecord, LaunchTile]] = []
    for first, count, prefix in sorted(shared):
        for column, columns in _prefix_columns(sequences[first : first + count], tile_columns):
            record = TileRecord(column, columns, first * pages_per_sequence, 0, prefix, 0, 0, column)
            made.append((record, _launch_tile(record, group, level=0)))
    for number, (length, per_step, first_column) in enumerate(sequences):
        for begin, end in _cut(per_step, tile_columns):
            table = number * pages_per_sequence
            new = per_step if whole else end
            record = TileRecord(first_column + begin, end - begin, table, 0, length, per_step, new, first_column)
            tile = replace(_launch_tile(record, group, 1 if shared else 0, prefixes.get(number, 0)), most=most)
            if window is not None:
                tile = replace(tile, begin=length + begin + 1 - window, begin_stride=per_step)
            made.append((record, tile))
    return [record for record, _ in made], [tile for _, tile in made]


def most_tiles(batch: int, tokens: int, tile_columns: int, levels: int = 1) -> int:
    """The most tiles that `launch_tiles` gives for up to `batch` sequences with `tokens` columns together.

    Only whole tiles' worth of columns beyond a sequence's first makes another; a prefix's tile covers one at least.
    """
    return levels * (batch + (tokens - batch) // tile_columns)


def _launch_tile(record: TileRecord, group: int, level: int, begin: int = 0) -> LaunchTile:
    rows, first_row = record.columns * group, record.first_column * group
    return LaunchTile(level, rows, first_row, record.length, record.stride, record.new, begin)


def _cut(columns: int, tile_columns: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the tiles of a sequence's columns: all full but the last."""
    for begin in range(0, columns, tile_columns):
        yield begin, min(begin + tile_columns, columns)


def _prefix_columns(members: Sequence[tuple[int, int, int]], tile_columns: int) -> list[tuple[int, int]]:
    """(first column, columns) of the tiles of a prefix: as many of the members' own tiles each as there is room for."""
    found: list[tuple[int, int]] = []
    for _, per_step, first_column in members:
        for begin, end in _cut(per_step, tile_columns):
            columns = end - begin
            if found and found[-1][1] + columns <= tile_columns:
                found[-1] = found[-1][0], found[-1][1] + columns
            else:
                found.append((first_column + begin, columns))
    return found


def _check_columns(sequences: Sequence[tuple[int, int, int]]) -> None:
    next_column = 0
    for number, (_, per_step, first_column) in enumerate(sequences):
        require_positive(f"launch tiles: sequence {number}", per_step=per_step)
        if first_column < next_column:
            raise PlanError(
                f"launch tiles: sequence {number} begins at column {first_column} and the one before ends at "
                f"{next_column}: give sequences in the order of columns"
            )
        next_column = first_column + per_step


def _check_shared(
    sequences: Sequence[tuple[int, int, int]], shared: Sequence[tuple[int, int, int]], align: int
) -> None:
    taken: set[int] = set()
    for first, count, prefix in shared:
        place = f"launch tiles: the prefix of {count} sequences from sequence {first} on"
        members = range(first, first + count)
        if count < 1 or first < 0 or members.stop > len(sequences) or not taken.isdisjoint(members):
            raise PlanError(f"{place}: name sequences that are there ({len(sequences)}), each in one prefix at most")
        taken.update(members)
        if prefix < 1 or prefix % align:
            raise PlanError(
                f"{place} has {prefix} keys: share a multiple of {align}, so that no chunk holds both sides"
            )
        shortest = min(sequences[member][0] for member in members)
        if shortest < prefix:
            raise PlanError(f"{place} has {prefix} keys and one of them only {shortest}: share no more than that")
        ends = [sequences[member][1] + sequences[member][2] for member in members]
        if any(sequences[member][2] != end for member, end in zip(members[1:], ends, strict=False)):
            raise PlanError(f"{place}: their columns are not neighbours")


def whole_length(length: int) -> int:
    """`length` as an int; PlanError unless it is a whole number of tokens that the words of a plan can hold."""
    try:
        value = index(length)
    except TypeError:
        raise PlanError(f"KV plan: length {length!r} is not a whole number of tokens") from None
    if not 0 <= value < MOST_KEYS:
        raise PlanError(f"KV plan: length {value} is out of range: give 0 to {MOST_KEYS - 1} tokens")
    return value
