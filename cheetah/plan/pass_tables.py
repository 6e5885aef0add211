"""What a pass reads, in the words that its kernel reads: parts of sequences side by side, each in columns of its own.

A *segment* is some neighbouring tokens of one sequence. It begins at a column that is a multiple of 16, a row of
attention's operands, so fewer than 16 columns are left empty between two. No product and no row of attention looks at
another's columns, and keys are taken in tiles that are counted from position 0: so a token's bits depend neither on
what else is in the pass nor on how its prompt was cut into passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cheetah.plan.errors import PlanError
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.plan import Plan
from cheetah.plan.prompt import GROUP_TOKENS, PassPlan

SEGMENT_COLUMNS = 16
"""A segment begins at a multiple of it."""
TABLE_WORDS = 4
"""Of a row of each table; see `PassTables`."""

I32 = NDArray[np.int32]


@dataclass(frozen=True)
class Segment:
    """`count` tokens of a sequence, the first at position `start`: so many are cached. sequence: row of the page
    tables."""

    sequence: int
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def columns(self) -> int:
        """With the empty ones behind it."""
        return round_up(self.count, SEGMENT_COLUMNS)


@dataclass(frozen=True)
class PassTables:
    """The tables of a launch, i32, as long as there is room for; what is not used is zero.

    ids [columns]: token ids.
    groups [columns / 8, 4]: of 8 columns, the position of the first, how many are tokens (the first ones), the word at
        which the page table of their sequence begins, and the row of the workspace's keys for position 0.
    segments [columns / 16, 4]: tokens cached before it, its own, its page table, its row for position 0.
    tiles [columns / 16, 4]: what attention reads together, with most keys first: first column, position, tokens, row
        for position 0.
    column_count, segment_count, tile_count: those in use.
    """

    ids: I32
    groups: I32
    segments: I32
    tiles: I32
    column_count: int
    segment_count: int
    tile_count: int


@dataclass(frozen=True)
class PassRoom:
    """What a kernel has room for: columns, and rows of keys in its workspace, of key_tile together.

    tile_tokens: of a sequence that attention reads together. pages_per_sequence: words of a page table."""

    columns: int
    key_rows: int
    key_tile: int
    tile_tokens: int
    pages_per_sequence: int

    def rows_of(self, segment: Segment) -> int:
        """Rows of keys that a segment takes, with what is cached before it."""
        return round_up(segment.end, self.key_tile)

    def has_room_for(self, segments: Sequence[Segment]) -> bool:
        """Whether one pass can read them."""
        columns = sum(segment.columns for segment in segments)
        return columns <= self.columns and sum(map(self.rows_of, segments)) <= self.key_rows

    def tables(self, segments: Sequence[Segment], ids: Sequence[Sequence[int]]) -> PassTables:
        """The tables of a pass over `segments`, whose tokens are `ids`; PlanError where they do not fit."""
        self._check(segments, ids)
        columns = np.zeros(self.columns, np.int32)
        groups = np.zeros((self.columns // GROUP_TOKENS, TABLE_WORDS), np.int32)
        rows = np.zeros((self.columns // SEGMENT_COLUMNS, TABLE_WORDS), np.int32)
        tiles: list[tuple[int, ...]] = []
        column = first_row = 0
        for number, (segment, tokens) in enumerate(zip(segments, ids, strict=True)):
            table = segment.sequence * self.pages_per_sequence
            columns[column : column + segment.count] = tokens
            for done in range(0, segment.count, GROUP_TOKENS):
                in_group = min(GROUP_TOKENS, segment.count - done)
                groups[(column + done) // GROUP_TOKENS] = segment.start + done, in_group, table, first_row
            rows[number] = segment.start, segment.count, table, first_row
            tiles.extend(self._tiles(segment, column, first_row))
            column += segment.columns
            first_row += self.rows_of(segment)
        tiles.sort(key=lambda tile: -(tile[1] + tile[2]))
        of_tiles = np.zeros_like(rows)
        of_tiles[: len(tiles)] = tiles
        return PassTables(columns, groups, rows, of_tiles, column, len(segments), len(tiles))

    def _tiles(self, segment: Segment, column: int, first_row: int) -> Iterator[tuple[int, int, int, int]]:
        for done in range(0, segment.count, self.tile_tokens):
            yield column + done, segment.start + done, min(self.tile_tokens, segment.count - done), first_row

    def _check(self, segments: Sequence[Segment], ids: Sequence[Sequence[int]]) -> None:
        for segment, tokens in zip(segments, ids, strict=True):
            if segment.count < 1 or segment.start < 0 or len(tokens) != segment.count:
                raise PlanError(f"{segment} of a pass has {len(tokens)} ids: give one a token, and a token or more")
        if not segments or not self.has_room_for(segments):
            columns = sum(segment.columns for segment in segments)
            raise PlanError(
                f"a pass over {len(segments)} segments takes {columns} columns and {sum(map(self.rows_of, segments))} "
                f"rows of keys; there are {self.columns} and {self.key_rows}: give it one segment or more, and fewer"
            )


def pass_room(plan: Plan, pass_plan: PassPlan, head_dim: int) -> PassRoom:
    """That of a pass beside the decode kernel of `plan`."""
    rows = key_rows(plan.max_context, pass_plan.tokens, pass_plan.key_tile)
    tile_tokens, pages = pass_plan.attention_tokens(head_dim), plan.pages_per_sequence
    return PassRoom(pass_plan.tokens, rows, pass_plan.key_tile, tile_tokens, pages)


def key_rows(max_context: int, columns: int, key_tile: int) -> int:
    """Rows of keys with which any one sequence can be read, and any number of prompts of which nothing is cached."""
    return round_up(max_context, key_tile) + ceil_div(columns, SEGMENT_COLUMNS) * key_tile
