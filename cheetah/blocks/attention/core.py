"""Attention over a paged KV cache: states, split over all blocks, merged by the composition operator.

An attention state over a set of keys is (O, LSE): the softmax-weighted mean of the values and the logarithm of the sum
of exponentials (FlashInfer, 2.2). Logits are kept in base 2 inside the kernel (times log2 e) and stored as natural
LSE. Without softmax the state is O, the sum of weighted values, and states are added.

An item is a range of keys of one KV head for a tile of packed query rows: row i * group + (h mod group) is query i of
the tile and head h. 8 rows ride in the n = 8 dimension of the products, so the consumer warps share out the tile's
groups of 8 rows (*column tiles*), and those with the same rows (a *key group* each) take tiles of 16 keys in turn, each
with a state of its own. Keys have tiles by position, also the newest ones, which come from the exchange and not from
the cache: which keys are multiplied together, and by which warp, does not depend on the step in which they came.
The block folds the states of the key groups in ascending order and publishes the output, or a partial state where the
keys were split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.cache import CACHED_KEYS, KvCache, stage_keys, values_at
from cheetah.blocks.attention.fold import Folder
from cheetah.blocks.attention.item_loads import ItemLoads
from cheetah.blocks.attention.merge import LSE_WORDS, Merger, partial_words
from cheetah.blocks.attention.port import AttentionPort, Finished
from cheetah.blocks.attention.schedule import Item, Schedule, Tile
from cheetah.blocks.attention.sharing import NEVER, Share, Sharing
from cheetah.blocks.attention.tile import (
    AttentionProduct,
    AttentionShape,
    KeyRows,
    Queries,
    WarpState,
)
from cheetah.blocks.attention.variants import CAUSAL, Variant
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.machine import Machine
from cheetah.blocks.ring import Ring
from cheetah.blocks.timeline import NO_TIMELINE, Timeline
from cheetah.lang import prim, ty
from cheetah.plan.formats import KV_TILE_TOKENS as TILE_KEYS
from cheetah.plan.plan import COLUMNS

__all__ = ["LSE_WORDS", "Attention", "AttentionPort", "AttentionShape", "partial_words"]


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
            machine.head_dim,
            plan.consumer_warps,
            stage_keys(machine),
            (tile_columns or plan.tile_columns(shape)) * shape.group,
            plan.kv_dtype == "e4m3",
        )
        self.product = AttentionProduct(machine, self.sizes, variant, parameters)
        self.loads = ItemLoads(machine, self.sizes, port, variant, self.product, self._row_context)
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
        if self.port.heads is not None and self.port.heads.begins:
            with ch.if_(self.schedule.has_items):
                self.port.heads.begin(epoch)
        with self.schedule.items(self.machine.consumer, step) as item:
            cached_end = ch.minimum(item.end, item.tile.cached)
            newest_begin = ch.maximum(item.begin, item.tile.cached)
            newest_end = ch.minimum(item.end, item.tile.cached + item.tile.new)
            newest = ch.select(newest_begin < newest_end, newest_end - newest_begin, ty.u32(0))
            keys = (cached_end, newest_begin, newest, epoch)
            asked = self.loads.ask_queries(item) if self.loads.asks else None
            work = self._work(item) if self.sizes.max_rows <= COLUMNS else None  # looked up before the wait
            if asked is None:
                self.loads.load_item(item, newest_begin, newest, epoch)
            else:
                self.loads.settle_queries(item, asked, epoch)
            self.timeline.stamp_first("ready")
            self.ring.uses(CACHED_KEYS)
            if work is not None:
                self._attend_rows(item, *work, *keys)
            else:
                with ch.if_(item.rows <= COLUMNS):
                    self._attend_rows(item, *self._work(item), *keys)
                with ch.else_():
                    self._attend_rows(item, *self._work(item, self.sizes.column_tiles), *keys)
            if self.port.heads is not None:
                self.loads.append_newest(self.port.heads, item, newest_begin, newest)

    @ch.inline
    def _work(self, item: Item, width: int | None = None) -> tuple[Share, list[Queries]]:
        """This warp's share of an item, with `width` column tiles a warp (None: the item has one), and what it knows of
        their rows. Two of them share what is read and wait together; an item of few rows would waste the second."""
        share = self.sharing.share_few(item) if width is None else self.sharing.share(item, width)
        return share, [self._queries(item, share.column_group * share.width + index) for index in range(share.width)]

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

    # -- what a warp knows of its rows --------------------------------------------------------------------------------

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
        contexts: list[Mapping[str, Callable[[], Any]]] = [{}, {}]
        for index in range(2):
            packed = column_tile * COLUMNS + machine.lane % 4 * 2 + index
            limits[index] = self._limit(item, packed)
            if self.variant.needs_query_context:
                present = ch.minimum(packed, item.rows - 1)
                contexts[index] = self._row_context(item.tile, item.head, present)
        scale = self._codes_scale(item.head, value=False)
        return Queries(unit, limits, scale, tuple(contexts), self._token_context(item), item.tile.offset)

    @ch.function
    def _limit(self, item: Item, packed: ch.Expr) -> ch.Expr:
        """The first key of the item that a packed row does not see; 0 for a row beyond the item's."""
        row = ch.minimum(packed, item.rows - 1)
        end = ch.minimum(item.end, item.tile.cached + item.tile.new if self.port.has_newest else item.tile.cached)
        if self.variant.causal:
            position = self.port.position(item.tile.first_column + row // self.sizes.group)
            following = position + 1
            visible = ch.select(following > item.tile.offset, following - item.tile.offset, ty.u32(0))
            end = ch.minimum(end, visible)
        return ch.select(packed < item.rows, end, ty.u32(0))

    @ch.inline
    def _codes_scale(self, kv_head: ch.Expr, value: bool) -> Any:
        if not self.sizes.codes:
            return None
        scale = self.port.scale(kv_head, value)
        return scale

    @ch.inline
    def _row_context(self, tile: Tile, kv_head: ch.Expr, row: ch.Expr) -> Mapping[str, Callable[[], Any]]:
        """What a variant's function can ask about a packed row. Looked up here once."""
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
        """This warp's tiles of 16 keys of [item.begin, end), which are cached, and of the newest ones behind them. The
        newest keys of a tile that begins with cached ones are put behind those, into the stage; the other tiles of
        newest keys are worked on as if they were in one more stage: so the code of a tile stands in the kernel once."""
        machine, sizes, port = self.machine, self.sizes, self.port
        begin = item.begin
        stage_tiles = sizes.stage_tokens // TILE_KEYS
        cached = ch.select(begin < end, end - begin, ty.u32(0))
        tiles = (cached + (TILE_KEYS - 1)) // TILE_KEYS
        keys_end = begin + cached + newest if port.has_newest else end
        all_tiles = (cached + newest + (TILE_KEYS - 1)) // TILE_KEYS if port.has_newest else tiles
        tile = ch.var(ty.u32, share.first_tile)
        first_newest = ch.select(newest > 0, cached // TILE_KEYS, ty.u32(NEVER))
        asked = None
        if self.loads.asks:
            own = first_newest % share.key_groups == tile
            asked = self.loads.ask_newest(item, newest_begin, newest, (newest > 0) & own)
        with self._stages(tile, tiles, all_tiles) as (stage, is_cached):
            first_tile = ch.var(ty.u32, stage * stage_tiles)
            last_tile = ch.var(ty.u32, ch.minimum(first_tile + stage_tiles, tiles))
            arrivals = self.sharing.arrivals(share, first_tile, last_tile)
            with self.ring.use_ahead(stage, arrivals, is_cached) as taken:
                keys = ch.var(ty.ptr_mut(ty.u8), taken.address)
                values = ch.var(ty.ptr_mut(ty.u8), taken.address + values_at(machine))
                self.timeline.stamp_first("first_chunk")
                if port.has_newest:
                    with ch.if_(~is_cached):
                        newest_keys, newest_values = self.loads.newest_rows(ty.u8)
                        first_tile.set(tiles)
                        last_tile.set(all_tiles)
                        before = begin + tiles * TILE_KEYS - newest_begin
                        joined = ch.const(ty.u32, before * self.loads.row_bytes, name="joined")
                        keys.set(newest_keys + joined)
                        values.set(newest_values + joined)
                rows = KeyRows(keys, values, sizes.codes)
                with ch.while_(tile < last_tile):
                    row, key = (tile - first_tile) * TILE_KEYS, begin + tile * TILE_KEYS
                    if port.has_newest:
                        with ch.if_(tile == first_newest):
                            if asked is not None:
                                self.loads.bring_newest(newest, asked, epoch)
                            with ch.if_(is_cached):
                                self.loads.join_newest(rows, row + cached % TILE_KEYS, newest)
                    self.product.attend(rows, row, keys_end - key, key, queries, states)
                    tile += share.key_groups
                for state in states:  # a sum of all that was read
                    taken.has_read(prim.float_bits(state.output[0][0]))
                self.timeline.stamp_here("last_chunk")
        self.ring.skip((cached + (sizes.stage_tokens - 1)) // sizes.stage_tokens)

    @contextmanager
    @ch.inline
    def _stages(self, tile: Any, tiles: ch.Expr, all_tiles: ch.Expr) -> Iterator[tuple[Any, Any]]:
        """The stages that a warp waits for, and whether one holds cached keys: else it stands for the tiles behind
        those. Where warps share stages out, only those with a tile of its own."""
        stage_tiles = self.sizes.stage_tokens // TILE_KEYS
        if self.sharing.shares_stages:
            with ch.while_(tile < all_tiles):
                stage = ch.const(ty.u32, tile // stage_tiles, name="stage")
                yield stage, ch.const(ty.boolean, tile < tiles, name="is_cached")
        else:
            of_cached = (tiles + (stage_tiles - 1)) // stage_tiles
            with ch.for_(of_cached + ch.select(tiles < all_tiles, ty.u32(1), ty.u32(0)), unroll=1) as stage:
                yield stage, ch.const(ty.boolean, stage < of_cached, name="is_cached")

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
        low, high = outputs
        made = Finished(column, kv_head * group + row % group, dim_pair, low, high, lse)
        self.port.publish(made, epoch)

    @ch.inline
    def merge(self, epoch: ch.Expr) -> None:
        """In the consumer role, after `attend`: the rows whose keys were split. Where there are none no block waits."""
        self.exchange.meet(self.schedule.has_merges)
        Merger(self.machine, self.exchange, self.schedule, self.variant.softmax, self.finish).merge(epoch)
