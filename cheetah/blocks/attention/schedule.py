"""The KV plan as the kernel reads it: which items of attention a block works on, and which merges it makes.

The host made the plans of the launch from the sequence lengths (see `cheetah.plan.kv`); a step uses the last plan whose
first step is not after it. Where layers differ in what they see, each kind of them has plans of its own. Both roles
follow the same plan, so the producer lane fetches just what the consumer warps
expect. The records of a block's first items, and of each team's first merge with its sources, stay in shared memory
from one plan to the next: every layer would otherwise wait for three loads, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.advance import Advance, BySteps
from cheetah.blocks.by_layer import chosen
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.plan.index import ceil_div
from cheetah.plan.kv import ITEM_WORDS, KvPlanLayout
from cheetah.plan.kv.encoding import HEAD_LIMIT
from cheetah.plan.kv.tables import TILE_WORDS, TileRecord, names_of
from cheetah.plan.regions import KEPT_ITEM_BYTES, KEPT_ITEMS, KEPT_MERGE_BYTES, KEPT_SOURCES, kept_plan_bytes

WRITE_THROUGH = ch.bits("WRITE_THROUGH", 0xFFFFFFFF)
"""The first partial row of an item that gives the final output itself."""
_HEAD_LIMIT = ch.named("HEAD_LIMIT", HEAD_LIMIT)
TEAM_BARRIERS = 2
"""The named barrier of the first team; the next ones follow."""
MERGED_DIMS = 128
"""Dims of a row that a team merges together: 4 a lane."""
_OF_A_TILE = [name.replace("new", "newest") for name in names_of(TileRecord)]  # C++ has a `new` of its own
TILE_RECORD = ty.struct("TileRecord", **dict.fromkeys(_OF_A_TILE, ty.u32))
_OF_AN_ITEM = ("level", "tile", "head", "begin", "end", "partial", "rows", "unused")
ITEM_RECORD = ty.struct("ItemRecord", **dict.fromkeys(_OF_AN_ITEM, ty.u32))
"""Records of the launch's tables and of a plan: see `TileRecord` and `ITEM_WORDS`."""
KEPT_ITEM = ty.struct("KeptItem", item=ITEM_RECORD, tile=TILE_RECORD)
KEPT_MERGE = ty.struct(
    "KeptMerge",
    **dict.fromkeys(("head_and_chunk", "row", "begin", "end"), ty.u32),
    tile=TILE_RECORD,
    sources=ty.array(ty.u32, KEPT_SOURCES),
)
assert (KEPT_ITEM.bytes, KEPT_MERGE.bytes) == (KEPT_ITEM_BYTES, KEPT_MERGE_BYTES)


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
    """Keys [begin, end) of one KV head for the `rows` packed query rows of a tile; the range is rounded outward.

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
    """Packed row `row` of a tile and KV head: the states of `sources[begin:end]`, to be folded in this order. part:
    which of the row's `merge_parts`. first_chunk: the number of the first source's keys among the chunks of the
    sequence, where these have fixed ends, modulo FIRST_CHUNKS."""

    tile: Tile
    head: Any
    row: Any
    part: Any
    begin: Any
    end: Any
    first_chunk: Any


class Schedule:
    """The plans of a launch, and the one of the present step in each role. `tiles` are the launch's tile records.
    kinds: of layers; plan i of kind k is number i * kinds + k, of `plan_count`. kind: of the layer whose attention is
    being emitted. steps: how far sequences have come in a step.

    The consumer warps keep the records of the block's first items and of each warp's first merge in shared memory, from
    one plan to the next (`keep`): else every layer would wait for loads one after the other."""

    def __init__(
        self,
        machine: Machine,
        layout: KvPlanLayout,
        plans: ch.Expr,
        plan_count: ch.Expr,
        tiles: ch.Expr,
        kinds: int = 1,
        steps: Advance | None = None,
    ) -> None:
        self.steps = steps or BySteps()
        self.machine, self.layout, self.plans, self.plan_count = machine, layout, plans, plan_count
        self.tile_records, self.kinds = tiles, kinds
        self.plan_words = ch.named("PLAN_WORDS", layout.plan_words)
        self.kind: ch.Value = 0
        self._start()

    @ch.inline
    def _start(self) -> None:
        self.index = dict[str, list[Any]]()
        for role in (self.machine.producer, self.machine.consumer):
            with role:
                for kind in range(self.kinds):
                    plan_index = ch.var(ty.u32, kind)
                    self.index.setdefault(role.name, []).append(plan_index)

    @ch.inline
    def advance(self, role: ch.Role, step: ch.Expr) -> ch.Expr:
        """In a role: move on to the plans of `step`; steps only grow. Whether one is not that of the step before."""
        followed = self.steps.plan_step(step)
        return reduce(or_, [self._follow_plan(index, followed) for index in self.index[role.name]])

    def _index(self, role: ch.Role) -> Any:
        """The number of the present plan of the layer's kind."""
        return chosen(self.index[role.name], self.kind)

    @ch.function
    def _follow_plan(self, plan_index: Any, step: ch.Expr) -> ch.Expr:
        """Move on to the next plan if it begins in this step. Whether it is not the plan of the step before."""
        is_new = ch.var(ty.boolean, step == 0)
        following = plan_index + self.kinds
        with ch.if_(following < self.plan_count):
            first_step = prim.load_constant_u32(self.plans + following * self.plan_words)
            with ch.if_(first_step <= step):
                plan_index.set(following)
                is_new.set(True)
        return is_new

    def _place(self, role: ch.Role, section: str, index: ch.Value) -> ch.Expr:
        first = ch.named(f"PLAN_{section.upper()}", self.layout.sections.offsets[section])
        offset = ch.cast(ty.u32, index) + first
        place: ch.Expr = self.plans + (self._index(role) * self.plan_words + offset)
        return place

    def _word(self, role: ch.Role, section: str, index: ch.Value) -> ch.Expr:
        return prim.load_constant_u32(self._place(role, section, index))

    def _tile_of(self, tile: Any, step: ch.Value) -> Tile:
        """tile: what has the fields of TILE_RECORD."""
        cached = self.steps.cached(tile, step)
        return Tile(tile.first_column, tile.columns, tile.table, tile.offset, cached, tile.newest, tile.newest_column)

    # -- records at hand ----------------------------------------------------------------------------------------------

    @property
    def _kept(self) -> ch.Expr:
        """What is at hand of the plan of the layer's kind: how many items and merges there are, the records of the
        block's first items and one more, that of the first merge of each team."""
        plan = self.machine.plan
        kept_plan = ty.struct(
            "KeptPlan",
            **dict.fromkeys(("first_item", "last_item", "jobs", "jobs_of_head"), ty.u32),
            items=ty.array(KEPT_ITEM, KEPT_ITEMS + 1),
            merges=ty.array(KEPT_MERGE, plan.consumer_warps // plan.merge_warps),
        )
        assert kept_plan.bytes == kept_plan_bytes(plan)
        return ch.whole("kept_plans", self.machine.region("records", kept_plan))[self.kind]

    @property
    def _kept_merge(self) -> ch.Expr:
        """The record of the first merge of this warp's team."""
        return self._kept_merge_of(self.machine.warp)

    def _kept_merge_of(self, warp: ch.Expr) -> ch.Expr:
        return self._kept.merges[warp // self.machine.plan.merge_warps]

    def keep_all(self) -> None:
        """`keep_plan` of the plans of all kinds."""
        for kind in range(self.kinds):
            self.kind = kind
            self.keep_plan()

    @ch.function
    def keep_plan(self) -> None:
        """In the consumer role: bring the records of the present plan to shared memory. A barrier of the consumer warps
        must precede, if there were others, and follow."""
        machine = self.machine
        header = prim.load_constant_u32x4(self._place(machine.consumer, "header", 0))
        with ch.if_(machine.thread < KEPT_ITEMS):
            first_item = self._word(machine.consumer, "work_indptr", machine.block)
            last_item = self._word(machine.consumer, "work_indptr", machine.block + 1)
            with ch.if_(machine.thread == 0):
                numbers = first_item, last_item, self._jobs(header), self._jobs_of_head(header)
                for name, number in zip(("first_item", "last_item", "jobs", "jobs_of_head"), numbers, strict=True):
                    getattr(self._kept, name).set(number)
            with ch.if_(first_item + machine.thread < last_item):
                record = self._place(machine.consumer, "items", (first_item + machine.thread) * ITEM_WORDS)
                self._keep_item(ch.address_of(self._kept.items[machine.thread]), record)
        with ch.if_((self.team_warp == 0) & (self._first_job() < self._jobs(header))):
            self._keep_merge(self._first_job(), self._jobs_of_head(header), machine.warp, machine.lane)

    @ch.function
    def _keep_item(self, place: ch.Expr, record: ch.Expr) -> None:
        """An item's record and its tile's, in four units of 16 bytes, to a place of shared memory or in registers."""
        what = prim.load_constant_u32x4(record)
        tile = what.y
        units = ch.reinterpret(ty.ptr_mut(ty.u32x4), place)
        units[0] = what
        units[1] = prim.load_constant_u32x4(record + 4)
        self._keep_tile(ch.address_of(ch.pointee(place).tile), tile)

    @ch.function
    def _keep_tile(self, place: ch.Expr, index: ch.Expr) -> None:
        """A tile's record, in two units of 16 bytes."""
        record = self.tile_records + index * TILE_WORDS
        units = ch.reinterpret(ty.ptr_mut(ty.u32x4), place)
        units[0] = prim.load_constant_u32x4(record)
        units[1] = prim.load_constant_u32x4(record + 4)

    @ch.function
    def _keep_merge(self, job: ch.Expr, merge_rows: ch.Expr, warp: ch.Expr, lane: ch.Expr) -> None:
        """Called by a whole warp of the team."""
        merge = ch.address_of(self._kept_merge_of(warp))
        index, head, begin, end = self._merge_words(job // merge_rows)
        with ch.if_(lane == 0):
            ch.reinterpret(ty.ptr_mut(ty.u32x4), merge)[0] = prim.make_u32x4(head, job % merge_rows, begin, end)
            self._keep_tile(ch.address_of(ch.pointee(merge).tile), index)
        with ch.if_(lane < ch.minimum(end - begin, KEPT_SOURCES)):
            ch.pointee(merge).sources[lane] = self._source(begin + lane)

    # -- items and merges ---------------------------------------------------------------------------------------------

    @contextmanager
    @ch.inline
    def items(self, role: ch.Role, step: ch.Value) -> Iterator[Item]:
        """The items of this block, in order."""
        if role is self.machine.consumer:
            with self._kept_items(step) as item:
                yield item
            return
        first_item = self._word(role, "work_indptr", self.machine.block)
        last_item = self._word(role, "work_indptr", self.machine.block + 1)
        with ch.for_(first_item, last_item, unroll=1) as index:
            units = ch.array(ty.u32x4, KEPT_ITEM_BYTES // 16)
            record = ch.reinterpret(ty.ptr_mut(KEPT_ITEM), ch.address_of(units[0]))
            self._keep_item(record, self._place(role, "items", index * ITEM_WORDS))
            yield self._item_of(ch.pointee(record), step)

    @contextmanager
    @ch.inline
    def _kept_items(self, step: ch.Value) -> Iterator[Item]:
        """The same in the consumer role, where the records are at hand. Those of later items share a place."""
        machine = self.machine
        first_item = ch.const(ty.u32, self._kept.first_item)
        with ch.for_(first_item, ch.const(ty.u32, self._kept.last_item, name="last_item"), unroll=1) as number:
            index = number - first_item
            record = ch.address_of(self._kept.items[ch.minimum(index, KEPT_ITEMS)])
            with ch.if_(index >= KEPT_ITEMS):
                machine.meet()  # all have used the last one
                with ch.if_(machine.thread == 0):
                    self._keep_item(record, self._place(machine.consumer, "items", number * ITEM_WORDS))
                machine.meet()
            yield self._item_of(ch.pointee(record), step)

    def _item_of(self, kept: ch.Expr, step: ch.Value) -> Item:
        """kept: a KEPT_ITEM, of which two numbers that are often needed are read once."""
        kv_head = ch.const(ty.u32, kept.item.head, name="kv_head")
        begin = ch.const(ty.u32, kept.item.begin, name="begin")
        return Item(self._tile_of(kept.tile, step), kv_head, begin, kept.item.end, kept.item.partial, kept.item.rows)

    @property
    def team(self) -> ch.Expr:
        """The number of this warp's team: the warps that merge a row together."""
        return self.machine.warp // self.machine.plan.merge_warps

    @property
    def team_warp(self) -> ch.Expr:
        """The number of this warp in its team."""
        return self.machine.warp % self.machine.plan.merge_warps

    def meet_team(self) -> None:
        """The warps of the team meet."""
        prim.named_barrier(self.team + TEAM_BARRIERS, ch.named("TEAM_THREADS", self.machine.plan.merge_warps * 32))

    def _jobs(self, header: ch.Expr) -> ch.Expr:
        """The merges of a plan, as many for each split head as the one with most has."""
        return header.z * self._jobs_of_head(header)

    def _jobs_of_head(self, header: ch.Expr) -> ch.Expr:
        return header.w * self.merge_parts

    @property
    def merge_parts(self) -> int:
        """Parts of a row, each of which is merged by itself: a lane has 4 dims of one."""
        return ceil_div(self.machine.shape.head_dim, MERGED_DIMS)

    @property
    def has_items(self) -> ch.Expr:
        """In the consumer role: whether this block has items in the present plan."""
        any_item: ch.Expr = self._kept.first_item < self._kept.last_item
        return any_item

    @property
    def has_merges(self) -> ch.Expr:
        """In the consumer role: whether any block has merges in the present plan."""
        any_job: ch.Expr = self._kept.jobs > 0
        return any_job

    @contextmanager
    @ch.inline
    def merges(self) -> Iterator[Merge]:
        """In the consumer role, the merges of this warp's team: a row of a split head each, or a part of one, dealt
        round to the blocks, then to their teams. Then the block's warps meet, if there was any merge at all."""
        machine = self.machine
        jobs = ch.const(ty.u32, self._kept.jobs)
        jobs_of_head = ch.const(ty.u32, self._kept.jobs_of_head)
        together = machine.gpu.blocks * (machine.plan.consumer_warps // machine.plan.merge_warps)
        record = ch.address_of(self._kept_merge)
        first_job = self._first_job()
        with ch.for_(first_job, jobs, together, unroll=1) as job:
            with ch.if_(job != first_job):
                self._replace_merge(job, jobs_of_head)
            merge = self._merge_of(ch.pointee(record))
            with ch.if_(ch.pointee(record).row < merge.tile.columns * (machine.shape.group * self.merge_parts)):
                yield merge
        with ch.if_(first_job + together < jobs):
            self._replace_merge(first_job, jobs_of_head)
        with ch.if_(jobs > 0):
            machine.meet()

    def _merge_of(self, kept: ch.Expr) -> Merge:
        """kept: a KEPT_MERGE."""
        row_and_part = kept.row // self.merge_parts, kept.row % self.merge_parts
        head, first_chunk = kept.head_and_chunk % _HEAD_LIMIT, kept.head_and_chunk // _HEAD_LIMIT
        return Merge(self._tile_of(kept.tile, 0), head, *row_and_part, kept.begin, kept.end, first_chunk)

    @ch.function
    def _replace_merge(self, job: ch.Expr, merge_rows: ch.Expr) -> None:
        """The record at hand becomes that of another merge of this team."""
        self.meet_team()  # all have used the last one
        with ch.if_(self.team_warp == 0):
            self._keep_merge(job, merge_rows, self.machine.warp, self.machine.lane)
        self.meet_team()

    def _first_job(self) -> ch.Expr:
        return self.team * self.machine.gpu.blocks + self.machine.block

    @ch.inline
    def _merge_words(self, merge: ch.Expr) -> tuple[Any, Any, Any, Any]:
        """Tile, head, first and last source of a merge."""
        role = self.machine.consumer
        index = self._word(role, "merges", merge * 2)
        head = self._word(role, "merges", merge * 2 + 1)
        begin = self._word(role, "merge_indptr", merge)
        end = self._word(role, "merge_indptr", merge + 1)
        return index, head, begin, end

    @ch.function
    def sources(self, merge: Merge, first: ch.Expr, every: ch.Expr, count: ch.Expr) -> ch.Expr:
        """`count` sources of a merge, numbers `first`, `first + every`, ... Lane n: the n-th of them, or the last: the
        partial row of the tile's first packed row."""
        index = first + ch.minimum(self.machine.lane, count - 1) * every
        source = ch.var(ty.u32)
        with ch.if_(index < KEPT_SOURCES):
            source.set(self._kept_merge.sources[index])
        with ch.else_():
            source.set(self._source(merge.begin + index))
        return source

    def _source(self, index: ch.Value) -> ch.Expr:
        return self._word(self.machine.consumer, "merge_src", index)
