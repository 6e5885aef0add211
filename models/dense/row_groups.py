"""Which rows of a checkpoint's tensors are the rows of a packed matrix, in groups of 8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.family import MatrixRows, QuantizedMatrix
from cheetah.models.formats.quantized import RowPlanes, rows_of_element
from cheetah.models.repacking import ScaleRows
from cheetah.models.rounding import Bits
from cheetah.plan import M_TILE_ROWS, MatrixLayout
from cheetah.plan.matrices import DELTA_ONLY
from cheetah.plan.products import Product, RowOrder
from cheetah.plan.world import Rank

GROUP_ROWS = 8  # an M-tile is two groups of 8 consecutive rows of one tensor: the rows g and g + 8 of an mma fragment


def product_of(config: ModelConfig, matrix: str) -> Product:
    """The product of a matrix, which layers of Gated DeltaNet alone may have."""
    return (config.shape if matrix in DELTA_ONLY else config).table.named(matrix)


@dataclass(frozen=True)
class _Run:
    """Groups `index`, `index + step`, ... (`count` of them): rows `first` on of tensor `source`, one after the other.

    rows: of the last group, if it is not a whole one; such a run is that group alone.
    """

    index: int
    step: int
    count: int
    source: int
    first: int
    rows: int

    def copy(self, plane: NDArray[Any], begin: int, places: NDArray[Any]) -> None:
        """The rows from `begin` on to their groups [count, 8, columns], or [count, 1, columns] of EIGHT_ROWS."""
        of_element = rows_of_element(plane)
        rows = self.rows // of_element
        values = plane[begin // of_element :][:rows]
        if self.rows == self.count * GROUP_ROWS:
            places[:] = values.reshape(self.count, GROUP_ROWS // of_element, -1)
        else:
            places[0, :rows] = values
            places[0, rows:] = np.zeros((), plane.dtype)


@dataclass(frozen=True)
class SourceRows:
    """Rows of tensor `source`: row `rows[i]` of it is row `places[i]` of some groups."""

    source: int
    places: NDArray[np.int64]
    rows: NDArray[np.int64]

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first of the tensor's rows, and the one behind the last."""
        return int(self.rows.min()), int(self.rows.max()) + 1


def _planes(rows: Bits | RowPlanes) -> tuple[NDArray[Any], ...]:
    return rows.planes if isinstance(rows, RowPlanes) else (rows,)


class RowGroups:
    """The rows of a matrix in M-tile order, as groups of 8: tensor `source`, rows `first` .. `first + count` - 1.

    A group with fewer than 8 rows (at a tensor's end) is filled up with zero rows. part: which groups are of rows that
    lie near one another in a tensor, a number for each, where a tensor has several such parts; by default the tensor's.
    step: from one row of a group to the next; other than 1 only of a single tensor's whole groups.
    """

    def __init__(
        self,
        source: NDArray[np.int64],
        first: NDArray[np.int64],
        count: NDArray[np.int64],
        part: NDArray[np.int64] | None = None,
        step: int = 1,
    ) -> None:
        self.step = step
        self.source, self.first, self.count = source.tolist(), first.tolist(), count.tolist()
        self._part = self.source if part is None else part.tolist()

    def __len__(self) -> int:
        return len(self.source)

    @lru_cache(maxsize=4096)  # noqa: B019 - as for `_reads`
    def rows(self, groups: range) -> tuple[SourceRows, ...]:
        """What some groups have of each tensor, or part of one, of which they have a row."""
        some = slice(groups.start, groups.stop)
        source, part, first, count = (np.array(one[some]) for one in (self.source, self._part, self.first, self.count))
        of_group = np.arange(GROUP_ROWS)
        row, is_there = first[:, None] + self.step * of_group, of_group < count[:, None]
        numbers, indices = np.unique(part, return_index=True)
        found = (
            (index, (is_there & (part == number)[:, None]).reshape(-1))
            for number, index in zip(numbers, indices, strict=True)
        )
        return tuple(
            SourceRows(int(source[index]), np.flatnonzero(mine), row.reshape(-1)[mine])
            for index, mine in found
            if mine.any()
        )

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the rows are those of a single tensor as they come."""
        return not any(self.source) and self.first == list(range(0, len(self) * GROUP_ROWS, GROUP_ROWS))

    def chosen(self, groups: range | NDArray[np.int64]) -> RowGroups:
        """Some of the groups; those behind the last have no rows."""
        numbers = np.asarray(groups)
        kept = np.minimum(numbers, len(self) - 1)
        source, first, count, part = (np.array(one)[kept] for one in (self.source, self.first, self.count, self._part))
        return RowGroups(source, first, np.where(numbers < len(self), count, 0), part, self.step)

    def gather(
        self, tensors: Sequence[MatrixRows | QuantizedMatrix | ScaleRows], rows: Bits | RowPlanes, groups: range
    ) -> None:
        """Copy some groups into `rows` [8 times as many, at least the tensors' columns]; padding columns stay."""
        if self.step != 1:
            return self._gather_apart(tensors, rows, groups)
        for source, first, stop, runs in self._reads(groups.start, groups.stop):
            values = tensors[source][first:stop]
            for target, plane in zip(_planes(rows), _planes(values), strict=True):
                places = target.reshape(-1, GROUP_ROWS // rows_of_element(plane), target.shape[1])
                for run in runs:
                    of_group = places[run.index - groups.start :: run.step, :, : plane.shape[1]]
                    run.copy(plane, run.first - first, of_group[: run.count])

    def _gather_apart(self, tensors: Sequence[Any], rows: Bits | RowPlanes, groups: range) -> None:
        """The same of rows that are no neighbours: what lies among them is read too."""
        (wanted,) = self.rows(groups)
        first, stop = wanted.span
        values = tensors[wanted.source][first:stop]
        for target, plane in zip(_planes(rows), _planes(values), strict=True):
            target[wanted.places, : plane.shape[1]] = plane[wanted.rows - first]

    @lru_cache(maxsize=4096)  # noqa: B019 - a matrix has few blocks, and the groups themselves are kept as long
    def _reads(self, begin: int, stop: int) -> tuple[tuple[int, int, int, tuple[_Run, ...]], ...]:
        """What groups `begin` .. `stop` - 1 need: tensor, its first row and the one behind its last, and the runs that
        are there. What lies side by side is read at once, and what no run needs not at all."""
        reads = list[tuple[int, int, int, tuple[_Run, ...]]]()
        for source in sorted({self.source[index] for index in range(begin, stop)}):
            runs = sorted((run for run in self._runs(begin, stop) if run.source == source), key=lambda run: run.first)
            together = list[_Run]()
            for run, after in zip(runs, [*runs[1:], None], strict=True):
                together.append(run)
                if after is None or after.first != run.first + run.rows:
                    reads.append((source, together[0].first, run.first + run.rows, tuple(together)))
                    together = []
        return tuple(reads)

    def _runs(self, begin: int, stop: int) -> tuple[_Run, ...]:
        """Groups `begin` .. `stop` - 1 in as few runs as there are: a copy each, so that Python does little."""
        runs, done = list[_Run](), set[int]()
        for index in range(begin, stop):
            if index in done:
                continue
            step, count = max(
                ((step, self._length(index, step, stop, done)) for step in (1, 2)), key=lambda run: run[1]
            )
            done.update(range(index, index + count * step, step))
            rows = count * GROUP_ROWS if count > 1 else self.count[index]
            runs.append(_Run(index, step, count, self.source[index], self.first[index], rows))
        return tuple(runs)

    def _length(self, index: int, step: int, stop: int, done: set[int]) -> int:
        count, after = 1, index + step
        while (
            after < stop
            and after not in done
            and self.count[index] == self.count[after] == GROUP_ROWS
            and self.source[after] == self.source[index]
            and self.first[after] == self.first[index] + count * GROUP_ROWS
        ):
            count, after = count + 1, after + step
        return count


def groups_of(layout: MatrixLayout, m_tiles: range) -> range:
    """The groups of 8 rows that some M-tiles of a matrix have."""
    of_tile = layout.tile_rows // GROUP_ROWS
    return range(m_tiles.start * of_tile, m_tiles.stop * of_tile)


@lru_cache(maxsize=64)
def row_groups(config: ModelConfig, matrix: str) -> RowGroups:
    """How the rows of `matrix` are made from its tensors."""
    product = product_of(config, matrix)
    parts = _parts(config, product)
    if product.order is RowOrder.GROUPS:
        return _of_plain_parts(parts)
    if product.order is RowOrder.HEADS:
        orders = [config.rotary_order, config.rotary_order, None, None][: len(parts)]
        return _joined([_head_groups(part, config.head_dim, order) for part, order in zip(parts, orders, strict=True)])
    if product.order is RowOrder.PAIRS:
        gate, up = (_plain_groups(part) for part in parts)
        source, first, count = (np.stack(pair, axis=1).reshape(-1) for pair in zip(gate, up, strict=True))
        if matrix in config.interleaved:
            return RowGroups(source, first, count, step=parts[0].step)
        return RowGroups(source, first, count, np.arange(len(source)) % 2)
    (part,) = parts
    return RowGroups(*_plain_groups(part, M_TILE_ROWS))


@lru_cache(maxsize=64)
def rank_groups(config: ModelConfig, layout: MatrixLayout, rank: Rank) -> RowGroups:
    """Those that a rank has of the rows of the matrix of a layout."""
    whole = row_groups(config, layout.name)
    if rank.size == 1:
        return whole
    product = product_of(config, layout.name)
    if product.order is RowOrder.HEADS:
        return whole.chosen(_groups_of_heads(config, rank))
    if product.name in DELTA_ONLY:
        return _of_plain_parts([*_delta_parts(config, product, rank)])
    if product.is_own:
        return whole
    count = layout.m_tiles * layout.tile_rows // GROUP_ROWS
    return whole.chosen(range(rank.number * count, (rank.number + 1) * count))


def _of_plain_parts(parts: Sequence[_Part]) -> RowGroups:
    """Rows of parts, each in groups of its own, up to whole M-tiles."""
    groups = [_plain_groups(part) for part in parts]
    if sum(len(first) for _, first, _ in groups) % 2:
        groups[-1] = _plain_groups(parts[-1], GROUP_ROWS * (len(groups[-1][0]) + 1))
    return _joined(groups)


def _delta_parts(config: ModelConfig, product: Product, rank: Rank) -> Iterator[_Part]:
    """What a rank's heads have of the rows of a product of Gated DeltaNet."""
    heads = config.shape.delta
    assert heads is not None
    for part in _parts(config, product):
        is_mixed = part.rows == heads.channels
        for own in heads.channels_of(rank) if is_mixed else (rank.part(part.rows),):
            yield replace(part, first=part.first + own.start, rows=len(own))


def _groups_of_heads(config: ModelConfig, rank: Rank) -> NDArray[np.int64]:
    """The groups of the joined q, k and v that are of a rank's heads."""
    of_head = config.head_dim // GROUP_ROWS
    queries, kv = rank.part(config.query_heads), rank.part(config.kv_heads)
    keys, values = (config.query_heads + np.array(kv) + count for count in (0, config.kv_heads))
    gates = config.query_heads + 2 * config.kv_heads + np.array(queries)
    heads = np.concatenate([np.array(queries), keys, values, *([gates] if config.layer.attention.gated else [])])
    return (heads[:, None] * of_head + np.arange(of_head)).reshape(-1)


def rotated_rows(config: ModelConfig) -> NDArray[np.int64]:
    """Which row of q's and k's tensors, one after the other, is each of the packed matrix."""
    parts, order = _parts(config, config.table.heads)[:2], config.rotary_order
    groups = [_head_groups(part, config.head_dim, order)[1] for part in parts]
    starts = np.concatenate([groups[0], groups[1] + (0 if parts[1].first else parts[0].rows)])
    return (starts[:, None] + np.arange(GROUP_ROWS)).reshape(-1)


@dataclass(frozen=True)
class _Part:
    """Rows of a product that are of one source: `rows` of tensor `tensor`, from row `first` on, each `step` behind the
    one before. of_others: rows of another source behind those of each head."""

    tensor: int
    first: int
    rows: int
    step: int = 1
    of_others: int = 0


def _parts(config: ModelConfig, product: Product) -> list[_Part]:
    """Where the sources of a product lie: each a tensor, or one behind the other in a single one."""
    parts = [_Part(index, 0, source.rows) for index, source in enumerate(product.sources)]
    if product.order is RowOrder.HEADS and config.layer.attention.gated:  # a head's query, then its gate
        query, *others, gate = parts
        query = replace(query, of_others=config.head_dim)
        return [query, *others, replace(gate, tensor=0, first=config.head_dim, of_others=config.head_dim)]
    if product.name not in config.fused:
        return parts
    if product.name in config.interleaved:
        return [replace(part, tensor=0, first=index, step=len(parts)) for index, part in enumerate(parts)]
    firsts = np.cumsum([0, *(part.rows for part in parts)]).tolist()
    return [_Part(0, first, part.rows) for first, part in zip(firsts, parts, strict=False)]


_Groups = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Of groups of rows the tensor, the first row and how many there are."""


def _plain_groups(part: _Part, multiple: int = GROUP_ROWS) -> _Groups:
    """The rows as they come, with groups of none up to a multiple of rows."""
    rows = np.arange(0, -(-part.rows // multiple) * multiple, GROUP_ROWS, dtype=np.int64)
    return np.full_like(rows, part.tensor), part.first + part.step * rows, np.clip(part.rows - rows, 0, GROUP_ROWS)


def _head_groups(part: _Part, head_dim: int, order: NDArray[np.int64] | None) -> _Groups:
    """M-tile j of a rotated head, whose dims lie in an order: dims 8j.. then dims D/2 + 8j.., so that both of a rotated
    pair lie in one lane. order: None of heads that are not rotated."""
    dims = np.arange(0, head_dim, GROUP_ROWS, dtype=np.int64)
    if order is not None:
        dims = order[dims].reshape(2, -1).T.reshape(-1)
    heads = np.arange(part.rows // head_dim, dtype=np.int64) * (head_dim + part.of_others)
    first = part.first + (heads[:, None] + dims).reshape(-1)
    return np.full_like(first, part.tensor), first, np.full_like(first, GROUP_ROWS)


def _joined(groups: Sequence[_Groups]) -> RowGroups:
    part = np.repeat(np.arange(len(groups)), [len(one[0]) for one in groups])
    source, first, count = (np.concatenate(arrays) for arrays in zip(*groups, strict=True))
    return RowGroups(source, first, count, part)
