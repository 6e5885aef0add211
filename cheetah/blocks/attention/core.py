"""Attention over a paged KV cache: states, split over all blocks, merged by the composition operator.

An attention state over a set of keys is (O, LSE): the softmax-weighted mean of the values and the logarithm of the sum
of exponentials (FlashInfer, 2.2). Logits are kept in base 2 inside the kernel (times log2 e) and stored as natural
LSE. Without softmax the state is O, the sum of weighted values, and states are added.

An item is a range of keys of one KV head for a tile of packed query rows: row i * group + (h mod group) is query i of
the tile and head h. 8 rows ride in the n = 8 dimension of the products, so the consumer warps share out the tile's
groups of 8 rows (*column tiles*), and those with the same rows (a *key group* each) take tiles of 16 keys in turn, each
with a state of its own. The newest keys, which come from the exchange and not from the cache, are further such tiles.
The block folds the states of the key groups in ascending order and publishes the output, or a partial state where the
keys were split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.cache import CACHED_KEYS, KvCache
from cheetah.blocks.attention.fold import Folder
from cheetah.blocks.attention.head_norms import RawHead, RawHeads, packed
from cheetah.blocks.attention.merge import LSE_WORDS, Merger, partial_words
from cheetah.blocks.attention.port import AttentionPort
from cheetah.blocks.attention.schedule import Item, Schedule, Tile
from cheetah.blocks.attention.sharing import Share, Sharing
from cheetah.blocks.attention.tile import (
    AttentionShape,
    Queries,
    Rows,
    TileProduct,
    WarpState,
)
from cheetah.blocks.attention.variants import CAUSAL, Variant
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.machine import Machine
from cheetah.blocks.ring import Ring
from cheetah.blocks.timeline import NO_TIMELINE, Timeline
from cheetah.lang import prim, ty
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.plan import COLUMNS
from cheetah.plan.plan import KV_TILE_TOKENS as TILE_KEYS

__all__ = ["LSE_WORDS", "Attention", "AttentionPort", "AttentionShape", "partial_words"]


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


class Attention:
    """The attention core of a kernel: `copy` in the producer role, `attend` and then `merge` in the consumer role.

    parameters: an object with the variant's own kernel parameters as attributes. tile_columns: the most columns of a
    tile, if fewer than the plan allows.
    """

    def __init__(
        self,
        machine: Machine,
        ring: Ring,
        exchange: Exchange,
        schedule: Schedule,
        cache: KvCache,
        port: AttentionPort,
        timeline: Timeline = NO_TIMELINE,
        variant: Variant = CAUSAL,
        parameters: Any = None,
        tile_columns: int | None = None,
    ) -> None:
        self.machine, self.ring, self.exchange, self.schedule = machine, ring, exchange, schedule
        self.cache, self.port, self.timeline, self.variant = cache, port, timeline, variant
        plan, shape = machine.plan, machine.shape
        self.sizes = AttentionShape(
            shape.group,
            shape.head_dim,
            plan.consumer_warps,
            plan.kv_stage_tokens(shape.head_dim),
            (tile_columns or plan.tile_columns(shape.group)) * shape.group,
            plan.kv_dtype == "e4m3",
        )
        self.product = TileProduct(machine, self.sizes, variant, parameters)
        self.sharing = Sharing(machine, self.sizes)
        self.folder = Folder(machine, exchange, self.sizes, variant.softmax, self.finish)

    # -- items ----------------------------------------------------------------------------------------------------

    def copy(self, layer: ch.Value, step: ch.Value) -> None:
        """In the producer role: fetch the cached keys and values of this block's items."""
        self._copy_items(layer, step)

    @ch.function
    def _copy_items(self, layer: ch.Value, step: ch.Value) -> None:
        """The cached keys and values of this block's items, one item after the other."""
        with self.schedule.items(self.machine.producer, step) as item:
            end = ch.minimum(item.end, item.tile.cached)
            self.cache.copy_tokens(self.ring, layer, item.head, item.tile.table, item.begin, end)

    @ch.inline
    def attend(self, step: ch.Value, epoch: ch.Expr) -> None:
        """In the consumer role: compute this block's items."""
        with self.schedule.items(self.machine.consumer, step) as item:
            cached_end = ch.minimum(item.end, item.tile.cached)
            newest_begin = ch.maximum(item.begin, item.tile.cached)
            newest_end = ch.minimum(item.end, item.tile.cached + item.tile.new)
            newest = ch.select(newest_begin < newest_end, newest_end - newest_begin, ty.u32(0))
            keys = (cached_end, newest_begin, newest, epoch)
            asked = self._ask_queries(item) if self.asks else None
            work = self._work(item, 1) if self.sizes.max_rows <= COLUMNS else None  # looked up before the wait
            if asked is None:
                self._load_item(item, newest_begin, newest, epoch)
            else:
                self._settle_queries(item, asked, epoch)
            self.timeline.stamp_first("ready")
            self.ring.uses(CACHED_KEYS)
            if work is not None:
                self._attend_rows(item, *work, *keys)
            else:
                with ch.if_(item.rows <= COLUMNS):
                    self._attend_rows(item, *self._work(item, 1), *keys)
                with ch.else_():
                    self._attend_rows(item, *self._work(item, 2), *keys)
            if self.port.heads is not None:
                self._append_newest(self.port.heads, item, newest_begin, newest)

    @ch.inline
    def _work(self, item: Item, width: int) -> tuple[Share, list[Queries]]:
        """This warp's share of an item, with `width` column tiles a warp, and what it knows of their rows. Two of them
        share what is read and wait together; an item of few rows would waste the second."""
        share = self.sharing.share(item, width)
        return share, [self._queries(item, share.column_group * width + index) for index in range(width)]

    @ch.function
    def _attend_rows(
        self,
        item: Item,
        share: Share,
        queries: Sequence[Queries],
        cached_end: ch.Expr,
        newest_begin: ch.Expr,
        newest: ch.Expr,
        epoch: ch.Expr,
    ) -> None:
        """This warp's share of an item whose queries are there."""
        states = [self.product.new_state() for _ in queries]
        self._attend_keys(item, cached_end, newest_begin, newest, epoch, share, queries, states)
        self.folder.fold(item, share, states, epoch)

    # -- queries, and the newest keys and values --------------------------------------------------------------------

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
    def _ask_queries(self, item: Item) -> Asked:
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
    def _settle_queries(self, item: Item, asked: Asked, epoch: ch.Expr) -> None:
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
    def _ask_newest(self, item: Item, newest_begin: ch.Expr, newest: ch.Expr, owns: ch.Expr) -> Asked:
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
    def _bring_newest(self, newest: ch.Expr, asked: Asked, epoch: ch.Expr) -> None:
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
    def _load_item(self, item: Item, newest_begin: ch.Expr, newest: ch.Expr, epoch: ch.Expr) -> None:
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
        keys, values = self._newest_rows(ty.u32 if self.sizes.codes else ty.u32x4)
        return ch.select(unit.is_value, values, keys) + unit.newest * (2 if self.sizes.codes else 1)

    @ch.function
    def _append_newest(self, heads: RawHeads, item: Item, newest_begin: ch.Expr, newest: ch.Expr) -> None:
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
    def _codes(pair: ch.Expr) -> Any:
        """Two e4m3 codes of a bf16 pair; exact, since the numbers come from codes."""
        return prim.e4m3x2_from_f32(prim.bf16x2_low(pair), prim.bf16x2_high(pair))

    def _newest_rows(self, element: ty.Type) -> tuple[Any, Any]:
        """Pointers to the newest keys and to the newest values."""
        values = round_up(self.machine.plan.tokens, TILE_KEYS) * self.sizes.head_dim * 2
        keys = self.machine.region("newest", element)
        return keys, keys + values // element.bytes

    @ch.inline
    def _queries(self, item: Item, column_tile: ch.Expr) -> Queries:
        """What this warp needs of its 8 rows: the operand of the products, read when needed, and what its columns see.

        Rows beyond the item's are whatever lies there: they have columns of their own, which see no key. Those that no
        item has are read as the last that one has, which costs nothing.
        """
        machine, sizes = self.machine, self.sizes
        shared = machine.region("queries", ty.u32x4)
        row = ch.minimum(column_tile * COLUMNS + machine.lane // 4, sizes.max_rows - 1)
        query = shared + row * sizes.head_units

        def unit(part: int) -> Any:
            return query[sizes.key_unit(part, machine.lane % 4)]

        limits = ch.array(ty.u32, 2)
        contexts = []
        for index in range(2):
            packed = column_tile * COLUMNS + machine.lane % 4 * 2 + index
            present = ch.minimum(packed, item.rows - 1)
            limits[index] = ch.select(packed < item.rows, self._limit(item, present), ty.u32(0))
            contexts.append(self._row_context(item.tile, item.head, present, self.variant.needs_query_context))
        scale = self._codes_scale(item.head, value=False)
        return Queries(unit, limits, scale, tuple(contexts), self._token_context(item), item.tile.offset)

    @ch.inline
    def _limit(self, item: Item, row: ch.Expr) -> Any:
        """The first key of the tile that a packed row does not see."""
        end = ch.minimum(item.end, item.tile.cached + item.tile.new)
        if not self.variant.causal:
            return end
        position = self.port.position(item.tile.first_column + row // self.sizes.group)
        following = position + 1
        visible = ch.select(following > item.tile.offset, following - item.tile.offset, ty.u32(0))
        return ch.minimum(end, visible)

    @ch.inline
    def _codes_scale(self, kv_head: ch.Expr, value: bool) -> Any:
        if not self.sizes.codes:
            return None
        scale = self.port.scale(kv_head, value)
        return scale

    @ch.inline
    def _row_context(
        self, tile: Tile, kv_head: ch.Expr, row: ch.Expr, wanted: bool = True
    ) -> Mapping[str, Callable[[], Any]]:
        """What a variant's function can ask about a packed row. Looked up here once, if at all."""
        if not wanted:
            return {}
        column = tile.first_column + row // self.sizes.group
        head = kv_head * self.sizes.group + row % self.sizes.group
        return {
            "request": lambda: self.port.request(column),
            "query": lambda: self.port.query(column),
            "position": lambda: self.port.position(column),
            "keys": lambda: self.port.keys(column),
            "head": lambda: head,
            "kv_head": lambda: kv_head,
        }

    @ch.inline
    def _token_context(self, item: Item) -> Mapping[str, Callable[[], Any]]:
        """What a function can ask about a key or a value: of the tile's last column."""
        if self.variant.key_transform is None and self.variant.value_transform is None:
            return {}
        column = item.tile.first_column + (item.tile.columns - 1)
        return {
            "request": lambda: self.port.request(column),
            "position": lambda: self.port.position(column),
            "keys": lambda: self.port.keys(column),
            "kv_head": lambda: item.head,
        }

    # -- keys and values ----------------------------------------------------------------------------------------------

    @ch.function
    def _attend_keys(
        self,
        item: Item,
        end: ch.Expr,
        newest_begin: ch.Expr,
        newest: ch.Expr,
        epoch: ch.Expr,
        share: Share,
        queries: Sequence[Queries],
        states: Sequence[WarpState],
    ) -> None:
        """This warp's tiles of 16 keys: of the cached ones [item.begin, end), then of the newest, as if they were in
        one more stage: so the code of a tile stands in the kernel once.

        A warp waits only for stages in which it has a tile.
        """
        machine, sizes, port = self.machine, self.sizes, self.port
        begin = item.begin
        stage_tiles = sizes.stage_tokens // TILE_KEYS
        cached = ch.select(begin < end, end - begin, ty.u32(0))
        tiles = (cached + (TILE_KEYS - 1)) // TILE_KEYS
        all_tiles = tiles + (newest + (TILE_KEYS - 1)) // TILE_KEYS if port.has_newest else tiles
        tile = ch.var(ty.u32, share.key_group)
        asked = None
        if self.asks:
            asked = self._ask_newest(item, newest_begin, newest, (newest > 0) & (tile == tiles % share.key_groups))
        with ch.while_(tile < all_tiles):
            stage = tile // stage_tiles
            first_tile = ch.var(ty.u32, stage * stage_tiles)
            last_tile = ch.var(ty.u32, ch.minimum(first_tile + stage_tiles, tiles))
            first_key = ch.var(ty.u32, begin + stage * sizes.stage_tokens)
            count = ch.var(ty.u32, ch.minimum(end - first_key, sizes.stage_tokens))
            is_cached = tile < tiles
            arrivals = self.sharing.arrivals(share, first_tile, last_tile)
            with self.ring.use_ahead(stage, arrivals, is_cached) as taken:
                keys = ch.var(ty.ptr_mut(ty.u8), taken.address)
                values = ch.var(ty.ptr_mut(ty.u8), taken.address + machine.plan.kv_values_at(machine.shape.head_dim))
                self.timeline.stamp_first("first_chunk")
                if port.has_newest:
                    with ch.if_(tile >= tiles):
                        if asked is not None:
                            self._bring_newest(newest, asked, epoch)
                        newest_keys, newest_values = self._newest_rows(ty.u8)
                        first_tile.set(tiles)
                        last_tile.set(all_tiles)
                        first_key.set(newest_begin)
                        count.set(newest)
                        keys.set(newest_keys)
                        values.set(newest_values)
                rows = Rows(keys, values, sizes.codes)
                with ch.while_(tile < last_tile):
                    row = (tile - first_tile) * TILE_KEYS
                    self.product.attend(rows, row, count - row, first_key + row, queries, states)
                    tile += share.key_groups
                for state in states:  # a sum of all that was read
                    taken.has_read(prim.float_bits(state.output[0][0]))
                self.timeline.stamp_here("last_chunk")
        self.ring.skip((cached + (sizes.stage_tokens - 1)) // sizes.stage_tokens)

    @ch.inline
    def finish(
        self,
        tile: Tile,
        kv_head: ch.Expr,
        row: ch.Expr,
        dim_pair: ch.Expr,
        low: Any,
        high: Any,
        lse: Any,
        epoch: ch.Expr,
    ) -> None:
        """The final output of two dims of a packed row."""
        group = self.sizes.group
        scale = self._codes_scale(kv_head, value=True)
        outputs = [value if scale is None else value * scale for value in (low, high)]
        if self.variant.output_transform is not None:
            context = self._row_context(tile, kv_head, row)
            at = self.product.at("output_transform", context)
            transformed = [self.variant.output_transform(value, lse, at) for value in outputs]
            outputs, lse = [value for value, _ in transformed], transformed[0][1]
        column = tile.first_column + row // group
        self.port.publish(column, kv_head * group + row % group, dim_pair, outputs[0], outputs[1], lse, epoch)

    @ch.inline
    def merge(self, epoch: ch.Expr) -> None:
        """In the consumer role, after `attend`: the rows whose keys were split. Where there are none no block waits."""
        self.exchange.meet(self.schedule.has_merges)
        Merger(self.machine, self.exchange, self.schedule, self.variant.softmax, self.finish).merge(epoch)
