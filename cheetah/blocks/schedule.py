"""The KV plan as the kernel reads it: which items of attention a block works on, and which merges it makes.

The host made the plans of the launch from the sequence lengths (see `cheetah.plan.kv`); a step uses the last plan whose
first step is not after it. Both roles follow the same plan, so the copy lane fetches just what the math warps expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.plan.kv import ITEM_WORDS, KvPlanLayout
from cheetah.plan.tables import TILE_WORDS

WRITE_THROUGH = 0xFFFFFFFF
"""The first partial row of an item that gives the final output itself."""


@dataclass(frozen=True, eq=False)
class Tile:
    """Columns [first_column, first_column + columns) and the keys that they read; device values, see `TileRecord`.

    cached: how many of the tile's keys are in the cache in this step. The `new` ones after them are those of the step's
    columns from new_column on.
    """

    first_column: Any
    columns: Any
    table: Any
    offset: Any
    cached: Any
    new: Any
    new_column: Any


@dataclass(frozen=True, eq=False)
class Item:
    """Keys [begin, end) of one KV head for the `rows` fused query rows of a tile; the range is rounded outward.

    partial: the first of its rows of partial states, or WRITE_THROUGH.
    """

    tile: Tile
    head: Any
    begin: Any
    end: Any
    partial: Any
    rows: Any


@dataclass(frozen=True, eq=False)
class Merge:
    """Fused row `row` of a tile and KV head: the states of `sources[begin:end]`, to be folded in this order."""

    tile: Tile
    head: Any
    row: Any
    begin: Any
    end: Any


class Schedule:
    """The plans of a launch, and the one of the present step in each role. `tiles` are the launch's tile records.

    keeps_first: the math warps find the records of the block's first item in the region `first_item`, where
    `keep_first` puts them once a step; else every layer would wait for three loads one after the other.
    """

    def __init__(
        self,
        machine: Machine,
        layout: KvPlanLayout,
        plans: ch.Expr,
        plan_count: ch.Expr,
        tiles: ch.Expr,
        keeps_first: bool = False,
    ) -> None:
        self.machine, self.layout, self.plans, self.plan_count = machine, layout, plans, plan_count
        self.tile_records, self.keeps_first = tiles, keeps_first
        self._start()

    @ch.inline
    def _start(self) -> None:
        self.index = {}
        for role in self.machine.roles:
            with role:
                plan_index = ch.var(ty.u32, 0)
                self.index[role.name] = plan_index

    @ch.inline
    def advance(self, role: ch.Role, step: ch.Expr) -> None:
        """Move on to the plan of `step`; steps only grow."""
        following = self.index[role.name] + 1
        with ch.if_(following < self.plan_count):
            first_step = prim.load_constant_u32(self.plans + following * self.layout.plan_words)
            with ch.if_(first_step <= step):
                self.index[role.name].set(following)

    def _place(self, role: ch.Role, section: str, index: ch.Value) -> ch.Expr:
        offset = ch.cast(ty.u32, index) + self.layout.offsets[section]
        return self.plans + (self.index[role.name] * self.layout.plan_words + offset)

    def _word(self, role: ch.Role, section: str, index: ch.Value) -> Any:
        return prim.load_constant_u32(self._place(role, section, index))

    @ch.inline
    def _tile(self, number: ch.Expr, step: ch.Value) -> Tile:
        """A tile record, in two loads of 16 bytes."""
        record = self.tile_records + number * TILE_WORDS
        place = prim.load_constant_u32x4(record)
        keys = prim.load_constant_u32x4(record + 4)
        return self._tile_of(place, keys, step)

    @staticmethod
    def _tile_of(place: ch.Expr, keys: ch.Expr, step: ch.Value) -> Tile:
        cached = keys.x + keys.y * ch.cast(ty.u32, step)
        return Tile(place.x, place.y, place.z, place.w, cached, keys.z, keys.w)

    @ch.inline
    def keep_first(self) -> None:
        """In the math role, after `advance`: the block's items' numbers and the records of the first. A barrier of the
        math warps must follow."""
        machine = self.machine
        kept = machine.region("first_item", ty.u32x4)
        with ch.if_(machine.thread == 0):
            first_item = self._word(machine.math, "work_indptr", machine.block)
            last_item = self._word(machine.math, "work_indptr", machine.block + 1)
            kept[4] = prim.make_u32x4(first_item, last_item, 0, 0)
            with ch.if_(first_item < last_item):
                record = self._place(machine.math, "items", first_item * ITEM_WORDS)
                what = prim.load_constant_u32x4(record)
                tile = self.tile_records + what.y * TILE_WORDS
                kept[0] = what
                kept[1] = prim.load_constant_u32x4(record + 4)
                kept[2] = prim.load_constant_u32x4(tile)
                kept[3] = prim.load_constant_u32x4(tile + 4)

    @contextmanager
    @ch.inline
    def items(self, role: ch.Role, step: ch.Value) -> Iterator[Item]:
        """The items of this block, in order."""
        if self.keeps_first and role is self.machine.math:
            with self._kept_items(step) as item:
                yield item
            return
        first_item = self._word(role, "work_indptr", self.machine.block)
        last_item = self._word(role, "work_indptr", self.machine.block + 1)
        with ch.for_(first_item, last_item, unroll=1) as number:
            record = self._place(role, "items", number * ITEM_WORDS)
            what = prim.load_constant_u32x4(record)
            rest = prim.load_constant_u32x4(record + 4)
            yield Item(self._tile(what.y, step), what.z, what.w, rest.x, rest.y, rest.z)

    @contextmanager
    @ch.inline
    def _kept_items(self, step: ch.Value) -> Iterator[Item]:
        """The same where the first item's records are at hand: one pointer or another, so that the code stands once."""
        machine = self.machine
        kept = ch.reinterpret(ty.ptr(ty.u32x4), machine.region("first_item", ty.u32x4))
        numbers = kept[4]
        with ch.for_(numbers.x, numbers.y, unroll=1) as number:
            record = ch.var(ty.ptr(ty.u32x4), kept)
            tile = ch.var(ty.ptr(ty.u32x4), kept + 2)
            with ch.if_(number != numbers.x):
                place = self._place(machine.math, "items", number * ITEM_WORDS)
                record.set(ch.reinterpret(ty.ptr(ty.u32x4), place))
                tile.set(ch.reinterpret(ty.ptr(ty.u32x4), self.tile_records + record[0].y * TILE_WORDS))
            what = record[0]
            rest = record[1]
            yield Item(self._tile_of(tile[0], tile[1], step), what.z, what.w, rest.x, rest.y, rest.z)

    @contextmanager
    @ch.inline
    def merges(self, role: ch.Role) -> Iterator[Merge]:
        """The merges of this warp: a row of a split head each, dealt round to the blocks, then to their warps."""
        machine = self.machine
        header = prim.load_constant_u32x4(self._place(role, "header", 0))
        merge_count = header.z
        merge_rows = header.w
        first_job = machine.warp * machine.gpu.blocks + machine.block
        jobs = machine.gpu.blocks * machine.plan.math_warps
        with ch.for_(first_job, merge_count * merge_rows, jobs, unroll=1) as job:
            merge = job // merge_rows
            row = job % merge_rows
            number = self._word(role, "merges", merge * 2)
            head = self._word(role, "merges", merge * 2 + 1)
            first_source = self._word(role, "merge_indptr", merge)
            last_source = self._word(role, "merge_indptr", merge + 1)
            tile = self._tile(number, 0)
            with ch.if_(row < tile.columns * machine.shape.group):
                yield Merge(tile, head, row, first_source, last_source)

    def source(self, role: ch.Role, index: ch.Value) -> Any:
        """Number `index` in the order of folding: the partial row of the tile's first fused row."""
        return self._word(role, "merge_src", index)
