"""What an item of attention loads: its queries, and the newest keys and values that it has, from the exchange into
shared memory; and where heads have norms, those keys and values from there into the cache.

In steps of one token a thread asks for its unit before it is waited for. Else all that an item has is loaded together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.head_norms import RawHead, RawHeads, packed
from cheetah.blocks.attention.port import AttentionPort
from cheetah.blocks.attention.schedule import Item
from cheetah.blocks.attention.tile import AttentionProduct, AttentionShape, KeyRows
from cheetah.blocks.attention.variants import Variant
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.plan.formats import KV_TILE_TOKENS as TILE_KEYS
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.plan import COLUMNS


@dataclass(frozen=True, eq=False)
class LoadedUnit:
    """A unit of what an item loads: its number among all that are loaded together; whether it is one of a query (a bool
    where that is known beforehand), or of a newest value; its number among the newest keys, or the newest values."""

    number: Any
    is_query: Any
    is_value: Any
    newest: Any


@dataclass(frozen=True, eq=False)
class Asked:
    """A unit that a thread has asked for: where it is published, the place of its words, what finishing it needs; of
    the newest key or value, which it is."""

    raw: RawHead
    words: Any
    weights: Any
    newest: Any = None


class ItemLoads:
    """Loads of items, by all consumer warps unless said otherwise. row_context: what a variant's function can ask about
    (tile, KV head, packed row)."""

    def __init__(
        self,
        machine: Machine,
        sizes: AttentionShape,
        port: AttentionPort,
        variant: Variant,
        product: AttentionProduct,
        row_context: Callable[..., Mapping[str, Callable[[], Any]]],
    ) -> None:
        self.machine, self.sizes, self.port = machine, sizes, port
        self.variant, self.product, self._row_context = variant, product, row_context

    @property
    def asks(self) -> bool:
        """Whether units are asked for before they are waited for: in steps of one token, where a thread has one of the
        queries at most, and a lane one of the newest key or value. The warp that attends these brings them then, when
        its cached keys are done: they are published behind the queries."""
        sizes, plan = self.sizes, self.machine.plan
        queries_fit = sizes.max_rows <= COLUMNS and sizes.max_rows * sizes.head_units <= self.machine.consumer_threads
        newest_fit = plan.tokens * sizes.head_units * 2 <= 32
        return self.port.asks and queries_fit and newest_fit and self.variant.query_transform is None

    @ch.inline
    def ask_queries(self, item: Item) -> Asked:
        """Each thread its unit of the queries; the last for those beyond, in warps that have any."""
        heads, query_units = self.port.heads, item.rows * self.sizes.head_units
        index = ch.minimum(self.machine.thread, query_units - 1)
        query_column, query_head = self._query_head(item, index)
        raw = RawHead(query_column, query_head, index % self.sizes.head_units)
        asked = Asked(raw, self.port.asked(), None if heads is None else heads.weights(raw))
        with ch.if_(self.machine.warp * 32 < query_units):
            self.port.ask(asked.words, raw)
        return asked

    @ch.function
    def settle_queries(self, item: Item, asked: Asked, epoch: ch.Expr) -> None:
        """The queries that were asked for to shared memory."""
        machine, heads = self.machine, self.port.heads
        query_units = item.rows * self.sizes.head_units
        with ch.if_(machine.warp * 32 < query_units):
            words = self.port.settle(asked.words, asked.raw, epoch)
            if heads is not None:
                words = prim.make_u32x4(*packed(heads.finish(asked.raw, words, asked.weights)))
            with ch.if_(machine.thread < query_units):
                self.machine.region("queries", ty.u32x4)[machine.thread] = words
        machine.meet()

    @ch.inline
    def ask_newest(self, item: Item, newest_begin: ch.Expr, newest: ch.Expr, owns: ch.Expr) -> Asked:
        """Each lane its unit of the newest key or value, the last for those beyond, in the warp that owns them."""
        heads, newest_units = self.port.heads, newest * self.sizes.head_units
        index = ch.minimum(self.machine.lane, newest_units * 2 - 1)
        unit = self._newest_unit_of(index, newest_units)
        raw = self._raw_head(item, newest_begin, unit)
        asked = Asked(raw, self.port.asked(), None if heads is None else heads.weights(raw), unit)
        with ch.if_(owns):
            self.port.ask(asked.words, raw)
        return asked

    @ch.function
    def bring_newest(self, newest: ch.Expr, asked: Asked, epoch: ch.Expr) -> None:
        """By the warp that attends them: the newest key and value, which were asked for, to shared memory."""
        heads, unit, raw = self.port.heads, asked.newest, asked.raw
        words = self.port.settle(asked.words, raw, epoch)
        values = None if heads is None else heads.finish(raw, words, asked.weights)
        with ch.if_(self.machine.lane < newest * (self.sizes.head_units * 2)):
            if heads is None:
                self._store_newest(unit, words)
            else:
                self._keep_newest(heads, unit, raw, values)
        prim.warp_barrier()  # orders the lanes' stores before their reads

    @ch.function
    def load_item(self, item: Item, newest_begin: ch.Expr, newest: ch.Expr, epoch: ch.Expr) -> None:
        """Bring the item's queries to shared memory, and those newest keys and values that it has."""
        if self.port.heads is not None:
            self._load_raw(self.port.heads, item, newest_begin, newest, epoch)
            return
        machine, sizes = self.machine, self.sizes
        queries = machine.region("queries", ty.u32x4)
        if self.variant.query_transform is not None:
            self._load_transformed(item, queries, epoch)
        query_units = item.rows * sizes.head_units if self.variant.query_transform is None else ty.u32(0)
        newest_units = newest * sizes.head_units if self.port.has_newest else ty.u32(0)
        with ch.for_(machine.thread, query_units + newest_units * 2, machine.consumer_threads, unroll=1) as index:
            with ch.if_(index < query_units):
                row = index // sizes.head_units
                queries[index] = self._query_unit(item, row, index % sizes.head_units, epoch)
            if self.port.has_newest:
                with ch.else_():
                    self._load_newest_unit(item, newest_begin, index - query_units, newest_units, epoch)
        machine.meet()

    @ch.inline
    def _load_raw(self, heads: RawHeads, item: Item, newest_begin: ch.Expr, newest: ch.Expr, epoch: ch.Expr) -> None:
        """The same of heads that are finished by who reads them: units of the queries, the newest keys, the values.

        A warp takes whole heads; its lanes beyond the last unit repeat that one and keep nothing.
        """
        machine, sizes = self.machine, self.sizes
        query_units = item.rows * sizes.head_units
        key_end = query_units + newest * sizes.head_units
        units = key_end + newest * sizes.head_units
        with ch.for_(machine.warp * 32, units, machine.consumer_threads, unroll=1) as first:
            own = first + machine.lane
            index = ch.minimum(own, units - 1)
            is_value = index >= key_end
            newest_unit = index - ch.select(is_value, key_end, query_units)
            unit = LoadedUnit(index, index < query_units, is_value, newest_unit)
            raw = self._raw_head(item, newest_begin, unit)
            weights = heads.weights(raw)  # asked for before the wait
            values = heads.finish(raw, self.port.unit(raw, epoch), weights)
            with ch.if_(own < units):
                self._keep_unit(heads, unit, raw, values)
        machine.meet()

    @ch.inline
    def _newest_unit_of(self, index: ch.Expr, newest_units: ch.Expr) -> LoadedUnit:
        """Unit `index` of the newest keys, then of the newest values."""
        is_value = index >= newest_units
        newest_unit = index - ch.select(is_value, newest_units, ty.u32(0))
        return LoadedUnit(index, False, is_value, newest_unit)

    @ch.inline
    def _raw_head(self, item: Item, newest_begin: ch.Expr, unit: LoadedUnit) -> RawHead:
        """Where a unit is published."""
        sizes, shape, tile = self.sizes, self.machine.shape, item.tile
        newest_column = tile.new_column + (newest_begin - tile.cached) + unit.newest // sizes.head_units
        kv_head = shape.heads + ch.select(unit.is_value, ty.u32(shape.kv_heads), ty.u32(0)) + item.head
        place = unit.number % sizes.head_units
        if unit.is_query is False:
            return RawHead(newest_column, kv_head, place)
        query_column, query_head = self._query_head(item, unit.number)
        column = ch.select(unit.is_query, query_column, newest_column)
        head = ch.select(unit.is_query, query_head, kv_head)
        return RawHead(column, head, place)

    @ch.inline
    def _query_head(self, item: Item, index: ch.Expr) -> tuple[Any, Any]:
        """Column and head of unit `index` of the queries."""
        group = self.sizes.group
        row = index // self.sizes.head_units
        query_column = item.tile.first_column + row // group
        query_head = item.head * group + row % group
        return query_column, query_head

    @ch.inline
    def _keep_unit(self, heads: RawHeads, unit: LoadedUnit, raw: RawHead, values: Any) -> None:
        """A finished unit to the item's queries, or to its newest keys and values, as the cache has them."""
        with ch.if_(unit.is_query):
            self.machine.region("queries", ty.u32x4)[unit.number] = prim.make_u32x4(*packed(values))
        with ch.else_():
            self._keep_newest(heads, unit, raw, values)

    @ch.inline
    def _keep_newest(self, heads: RawHeads, unit: LoadedUnit, raw: RawHead, values: Any) -> None:
        words = heads.stored(values, raw)
        place = self._newest_place(unit)
        if self.sizes.codes:
            place[0] = words[0]
            place[1] = words[1]
        else:
            place[0] = prim.make_u32x4(*words)

    def _newest_place(self, unit: LoadedUnit) -> Any:
        """Where a unit of the newest keys or values lies: two words of codes (u32*), or one of bf16 (u32x4*)."""
        keys, values = self.newest_rows(ty.u32 if self.sizes.codes else ty.u32x4)
        return ch.select(unit.is_value, values, keys) + unit.newest * (2 if self.sizes.codes else 1)

    @ch.function
    def append_newest(self, heads: RawHeads, item: Item, newest_begin: ch.Expr, newest: ch.Expr) -> None:
        """Put the item's newest keys and values into the cache, if their column is one of the tile's own: of the tiles
        that read it, one. It is done when the item's output is published: nobody waits for the cache in this step, and
        no warp for another's stores to it."""
        machine, sizes = self.machine, self.sizes
        newest_units = newest * sizes.head_units
        turns = ceil_div(machine.plan.tokens * 2 * sizes.head_units, machine.consumer_threads)
        words = ch.array(ty.u32, turns, 2 if sizes.codes else 4, name="words")
        for turn in range(turns):
            index = machine.thread + turn * machine.consumer_threads
            with ch.if_(index < newest_units * 2):
                self._take_newest(self._newest_unit_of(index, newest_units), words[turn])
        machine.meet()  # what comes next is laid over these
        for turn in range(turns):
            index = machine.thread + turn * machine.consumer_threads
            with ch.if_(index < newest_units * 2):
                raw = self._raw_head(item, newest_begin, self._newest_unit_of(index, newest_units))
                with ch.if_(raw.column - item.tile.first_column < item.tile.columns):
                    heads.append([words[turn][word] for word in range(2 if sizes.codes else 4)], raw)

    @ch.inline
    def _take_newest(self, unit: LoadedUnit, words: Any) -> None:
        """The words of a unit of the newest keys or values."""
        place = self._newest_place(unit)
        if self.sizes.codes:
            words[0] = place[0]
            words[1] = place[1]
        else:
            read = place[0]
            for word, member in enumerate("xyzw"):
                words[word] = getattr(read, member)

    @ch.inline
    def _query_unit(self, item: Item, row: ch.Expr, unit: ch.Expr, epoch: ch.Expr) -> Any:
        group = self.sizes.group
        column = item.tile.first_column + row // group
        return self.port.query_unit(column, item.head * group + row % group, unit, epoch)

    @ch.inline
    def _load_transformed(self, item: Item, queries: ch.Expr, epoch: ch.Expr) -> None:
        """Both units of rotated pairs together, through the variant's query_transform."""
        machine, sizes = self.machine, self.sizes
        half = sizes.head_units // 2
        with ch.for_(machine.thread, item.rows * half, machine.consumer_threads, unroll=1) as index:
            row = index // half
            unit = index % half
            near = self._query_unit(item, row, unit, epoch)
            far = self._query_unit(item, row, unit + half, epoch)
            values = self._row_context(item.tile, item.head, row)
            new_near, new_far = self.product.transform_queries(near, far, unit, values)
            queries[row * sizes.head_units + unit] = new_near
            queries[row * sizes.head_units + unit + half] = new_far

    @ch.function
    def _load_newest_unit(
        self, item: Item, newest_begin: ch.Expr, index: ch.Expr, newest_units: ch.Expr, epoch: ch.Expr
    ) -> None:
        """Unit `index` of the newest keys, then of the newest values: as rows of a stage have them, bf16 or codes."""
        sizes = self.sizes
        unit = self._newest_unit_of(index, newest_units)
        column = item.tile.new_column + (newest_begin - item.tile.cached) + unit.newest // sizes.head_units
        words = self.port.newest_unit(column, item.head, unit.is_value, unit.newest % sizes.head_units, epoch)
        self._store_newest(unit, words)

    @ch.inline
    def _store_newest(self, unit: LoadedUnit, words: Any) -> None:
        """A finished unit (u32x4) of the newest keys or values."""
        place = self._newest_place(unit)
        if not self.sizes.codes:
            place[0] = words
            return
        place[0] = self._codes(words.x) | (self._codes(words.y) << 16)
        place[1] = self._codes(words.z) | (self._codes(words.w) << 16)

    @staticmethod
    def _codes(pair: ch.Expr) -> ch.Expr:
        """Two e4m3 codes of a bf16 pair; exact, since the numbers come from codes."""
        return prim.e4m3x2_from_f32(prim.bf16x2_low(pair), prim.bf16x2_high(pair))

    @ch.function
    def join_newest(self, rows: KeyRows, row: ch.Expr, newest: ch.Expr) -> None:
        """By the warp that attends the tile: the newest keys and values that belong to a tile which begins with cached
        ones, behind those, to rows `row` and following of its stage."""
        units = self.row_bytes // 16
        count = ch.minimum(newest, TILE_KEYS - row % TILE_KEYS) * units
        own = [ch.reinterpret(ty.ptr_mut(ty.u32x4), stage) + row * units for stage in (rows.keys, rows.values)]
        for place, given in zip(own, self.newest_rows(ty.u32x4), strict=True):
            with ch.for_(self.machine.lane, count, 32, unroll=1, name="unit") as unit:
                place[unit] = given[unit]
        prim.fence_proxy_async_shared()  # the next copy into the stage lands behind these stores
        prim.warp_barrier()  # orders the lanes' stores before their reads

    @property
    def row_bytes(self) -> int:
        """Bytes of a key, or a value."""
        return self.sizes.head_dim * (1 if self.sizes.codes else 2)

    def newest_rows(self, element: ty.Type) -> tuple[Any, Any]:
        """Pointers to the newest keys and to the newest values."""
        values = round_up(self.machine.plan.tokens, TILE_KEYS) * self.sizes.head_dim * 2
        keys = self.machine.region("newest", element)
        return keys, keys + values // element.bytes
