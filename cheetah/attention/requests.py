"""The requests of a plan: their rows of q, their page tables, and prefixes that several of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cheetah.attention.errors import AttentionError
from cheetah.attention.program import COLUMN_FIELDS, AttentionSpec
from cheetah.plan.kv import Tile
from cheetah.plan.kv.page_table import Int32Array, lengths_of
from cheetah.plan.kv.tables import TileRecord


@dataclass(frozen=True)
class Prefix:
    """A level of prefixes that neighbouring requests share: one page-table entry a group (FlashInfer, 3.1.2).

    groups: (first request, requests) of each group, ascending. kv_offset: absolute position of the level's first key,
    of each group; None: behind the levels before. The three arrays are as in `plan`, a row a group.
    """

    indptr: Int32Array
    indices: Int32Array
    last_page_len: Int32Array
    groups: Sequence[tuple[int, int]]
    kv_offset: Sequence[int] | None = None


class RequestTables:
    """The tiles of all levels, their records, and one page table for all, from the callers' arrays."""

    def __init__(
        self,
        spec: AttentionSpec,
        rows: Int32Array,
        own: tuple[Int32Array, Int32Array, Int32Array],
        prefixes: Sequence[Prefix],
        kv_offset: Sequence[int] | None,
    ) -> None:
        self.spec, self.rows = spec, rows
        self.requests = len(rows) - 1
        self.counts = np.diff(rows)
        self.records: list[TileRecord] = []
        self.tiles: list[Tile] = []
        arrays = [(prefix.indptr, prefix.indices, prefix.last_page_len) for prefix in prefixes] + [own]
        starts = np.cumsum([0, *(len(indices) for _, indices, _ in arrays)])
        self.page_table = np.concatenate([indices for _, indices, _ in arrays]).astype(np.int32)
        self.offsets, self.lengths = self._key_ranges(arrays, prefixes, kv_offset)
        self.cuts = [self._cut(int(a), int(b)) for a, b in zip(rows, rows[1:], strict=False)]
        for level, prefix in enumerate(prefixes):
            lengths = lengths_of(prefix.indptr, prefix.last_page_len, spec.page_size)
            for group, (first, count) in enumerate(prefix.groups):
                table = int(starts[level] + prefix.indptr[group])
                offset = int(self.offsets[level, first])
                for begin, end in self._joined(first, count):
                    self._add(level, begin, end, table, offset, int(lengths[group]))
        lengths = lengths_of(own[0], own[2], spec.page_size)
        for request in range(self.requests):
            table = int(starts[-2] + own[0][request])
            for begin, end in self.cuts[request]:
                self._add(len(prefixes), begin, end, table, int(self.offsets[-1, request]), int(lengths[request]))

    def _key_ranges(
        self, arrays: Sequence[tuple[Int32Array, ...]], prefixes: Sequence[Prefix], kv_offset: Sequence[int] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each level and request the absolute position of its first key, and of each request all its keys."""
        offsets = np.zeros((len(arrays), self.requests), np.int64)
        ends = np.zeros(self.requests, np.int64)
        for level, prefix in enumerate(prefixes):
            self._check_groups(prefix)
            lengths = lengths_of(prefix.indptr, prefix.last_page_len, self.spec.page_size)
            for group, (first, count) in enumerate(prefix.groups):
                members = slice(first, first + count)
                if len(set(ends[members].tolist())) > 1:
                    raise AttentionError(f"level {level}: the requests of group {group} differ before it")
                offsets[level, members] = ends[first] if prefix.kv_offset is None else prefix.kv_offset[group]
                ends[members] = offsets[level, first] + lengths[group]
        offsets[-1] = ends if kv_offset is None else np.asarray(kv_offset, np.int64)
        own = lengths_of(arrays[-1][0], arrays[-1][2], self.spec.page_size)
        return offsets, offsets[-1] + own

    def _check_groups(self, prefix: Prefix) -> None:
        if len(prefix.groups) != len(prefix.last_page_len):
            raise AttentionError(f"{len(prefix.groups)} groups for {len(prefix.last_page_len)} prefixes: give one each")
        end = 0
        for first, count in prefix.groups:
            if first < end or count < 1 or first + count > self.requests:
                raise AttentionError(
                    f"group ({first}, {count}): give neighbouring requests of {self.requests}, ascending"
                )
            end = first + count

    def _cut(self, begin: int, end: int) -> list[tuple[int, int]]:
        size = self.spec.tile_columns
        return [(first, min(first + size, end)) for first in range(begin, end, size)]

    def _joined(self, first: int, count: int) -> list[tuple[int, int]]:
        """Columns of tiles that take whole tiles of these requests together."""
        joined: list[tuple[int, int]] = []
        for begin, end in [cut for request in range(first, first + count) for cut in self.cuts[request]]:
            if joined and end - joined[-1][0] <= self.spec.tile_columns:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        return joined

    def _add(self, level: int, begin: int, end: int, table: int, offset: int, length: int) -> None:
        """A tile of columns [begin, end) over `length` keys from absolute position `offset` on."""
        variant, group = self.spec.variant, self.spec.shape.group
        positions = self.positions()[begin:end]
        last = max(0, min(length, int(positions.max()) + 1 - offset)) if variant.causal else length
        first = 0
        if variant.window is not None:
            first = min(last, max(0, int(positions.min()) - variant.window - offset))
        number = len(self.tiles)
        self.records.append(TileRecord(begin, end - begin, table, offset, length, 0, 0, 0))
        self.tiles.append(Tile(level, number, (end - begin) * group, first, last, begin * group))

    def positions(self) -> NDArray[np.int64]:
        """Of each column, the absolute position of its query; -1 where it sees nothing."""
        request, number = self._owners()
        positions: NDArray[np.int64] = np.maximum(self.lengths[request] - self.counts[request] + number, -1)
        return positions

    def _owners(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        request = np.repeat(np.arange(self.requests), self.counts)
        return request, np.arange(len(request)) - self.rows[request]

    def columns(self) -> Int32Array:
        """int32 [columns, 4]: see COLUMN_FIELDS."""
        request, number = self._owners()
        words = {"request": request, "query": number, "position": self.positions(), "keys": self.lengths[request]}
        return np.stack([words[name] for name in COLUMN_FIELDS], axis=1).astype(np.int32)
