"""Decode attention over a paged KV cache: states, split over all blocks, merged by the composition operator.

An attention state over a set of keys is (O, LSE): the softmax-weighted mean of the values and the logarithm of the sum
of exponentials (FlashInfer, 2.2). Logits are kept in base 2 inside the kernel (times log2 e) and stored as natural
LSE.

An item is a range of keys of one KV head; the `group` query heads that share it ride in the n = 8 dimension of the
products. Each math warp takes tiles of 16 keys and keeps a state of its own; the newest token, whose key and value come
from the exchange and not from the cache, is one more state (its LSE is its logit, its O its value). The block folds
them in fixed order and publishes the head's output, or a partial state where the head was split over several blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.kv_cache import CACHED_KEYS
from cheetah.blocks.machine import Machine
from cheetah.blocks.ring import Ring
from cheetah.blocks.schedule import WRITE_THROUGH, Item, Merge, Schedule
from cheetah.blocks.timeline import NO_TIMELINE, Timeline
from cheetah.lang import prim, ty
from cheetah.plan.plan import ATTENTION_SLICE_DIMS as SLICE_DIMS
from cheetah.plan.plan import KV_TILE_TOKENS as TILE_KEYS
from cheetah.plan.plan import QUERY_COLUMNS

SLICE_TILES = SLICE_DIMS // 16
LSE_WORDS = 4
"""A partial state's LSE is stored four times, so that it is one unit of an exchange."""
LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@dataclass(frozen=True)
class AttentionShape:
    """Static sizes of the core for one model and plan."""

    group: int
    head_dim: int
    warps: int
    stage_tokens: int

    @property
    def query_units(self) -> int:
        """Units of 8 elements in the queries of a KV head."""
        return self.group * self.head_dim // 8

    @property
    def head_units(self) -> int:
        return self.head_dim // 8

    @property
    def partial_words(self) -> int:
        """Payload words of one row of a partial state: O in f32, then the LSE."""
        return self.head_dim + LSE_WORDS

    @property
    def output_tiles(self) -> int:
        """16-row tiles of the transposed output."""
        return self.head_dim // 16

    @property
    def slices(self) -> int:
        return self.head_dim // SLICE_DIMS

    @property
    def states(self) -> int:
        """States that a block folds: one a warp, and the newest token's."""
        return self.warps + 1


@dataclass(frozen=True, eq=False)
class WarpState:
    """One warp's attention state, in registers: of each lane's two query columns the highest logit (base 2) and the sum
    of weights, and tiles of the transposed output, not yet divided by that sum."""

    highest: Any
    weight_sum: Any
    output: Any


class Attention:
    """The attention core of a kernel."""

    def __init__(
        self,
        machine: Machine,
        ring: Ring,
        exchange: Exchange,
        schedule: Schedule,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self.machine, self.ring, self.exchange, self.schedule = machine, ring, exchange, schedule
        self.timeline = timeline
        plan, shape = machine.plan, machine.shape
        self.sizes = AttentionShape(shape.group, shape.head_dim, plan.math_warps, plan.kv_stage_tokens(shape.head_dim))

    # -- items ----------------------------------------------------------------------------------------------------

    @ch.inline
    def attend(self, position: ch.Expr, epoch: ch.Expr) -> None:
        """In the math role: compute this block's items. `position` is the newest token's."""
        with self.schedule.items(self.machine.math) as item:
            cached_end = ch.minimum(item.end, position)
            has_newest = (item.begin <= position) & (position < item.end)
            self._load_queries(item, has_newest, epoch)
            self.timeline.stamp_first("ready")
            state = self._new_state()
            self._attend_cached(item.begin, cached_end, state)
            self._finish_state(state)
            self._attend_newest(has_newest)
            self._fold_item(item, state, has_newest, epoch)

    @ch.inline
    def _load_queries(self, item: Item, has_newest: ch.Expr, epoch: ch.Expr) -> None:
        """Wait for the rows of this KV head only: its queries, and the newest key and value if the item has them."""
        machine, sizes, shape = self.machine, self.sizes, self.machine.shape
        queries = machine.region("queries", ty.u32x4)
        wanted = ch.select(has_newest, ty.u32(sizes.query_units + 2 * sizes.head_units), ty.u32(sizes.query_units))
        with ch.for_(machine.thread, wanted, machine.math_threads, unroll=1) as unit:
            source = ch.var(ty.u32, item.head * sizes.query_units + unit)
            with ch.if_(unit >= sizes.query_units + sizes.head_units):
                source.set(
                    (shape.heads + shape.kv_heads + item.head) * sizes.head_units
                    + (unit - sizes.query_units - sizes.head_units)
                )
            with ch.else_():
                with ch.if_(unit >= sizes.query_units):
                    source.set((shape.heads + item.head) * sizes.head_units + (unit - sizes.query_units))
            queries[unit] = self.exchange.read4("qkv", source, epoch)
        machine.meet()

    @ch.inline
    def _new_state(self) -> WarpState:
        """This warp's state: per lane the two query columns 2t and 2t + 1 of the product (t = lane % 4)."""
        sizes = self.sizes
        highest = ch.array(ty.f32, 2)
        weight_sum = ch.array(ty.f32, 2, zero=True)
        output = ch.array(ty.f32, sizes.output_tiles, 4, zero=True)
        highest[0] = -math.inf
        highest[1] = -math.inf
        return WarpState(highest, weight_sum, output)

    @ch.inline
    def _attend_cached(self, begin: ch.Expr, end: ch.Expr, state: WarpState) -> None:
        """Walk the stages of the item; this warp takes every `warps`-th tile of 16 keys."""
        machine, sizes = self.machine, self.sizes
        self.ring.uses(CACHED_KEYS)
        next_tile = ch.var(ty.u32, machine.warp)
        with ch.for_(begin, end, sizes.stage_tokens, unroll=1) as first:
            count = ch.minimum(end - first, sizes.stage_tokens)
            with self.ring.use() as stage:
                self.timeline.stamp_first("first_chunk")
                with ch.while_(next_tile * TILE_KEYS < count):
                    first_key = next_tile * TILE_KEYS
                    self._attend_tile(stage, first_key, count - first_key, state)
                    next_tile += sizes.warps
                next_tile -= sizes.stage_tokens // TILE_KEYS
                self.timeline.stamp_here("last_chunk")

    @ch.inline
    def _attend_tile(self, stage: ch.Expr, first_key: ch.Expr, valid: ch.Expr, state: WarpState) -> None:
        """Fold 16 keys, of which the first `valid` exist, into this warp's state."""
        weights = self._tile_weights(stage, first_key, valid, state)
        self._add_values(stage, first_key, valid, weights, state)

    @ch.inline
    def _tile_weights(self, stage: ch.Expr, first_key: ch.Expr, valid: ch.Expr, state: WarpState) -> Any:
        """exp2(logit - highest) of the tile, as the B operand (keys x queries) of the product with the values.

        Lane (r, t) takes key r, key r + 8 and query r (the last one again beyond the group: its column is ignored).
        """
        machine, sizes = self.machine, self.sizes
        keys = ch.reinterpret(ty.ptr(ty.u32x4), stage)
        queries = ch.reinterpret(ty.ptr(ty.u32x4), machine.region("queries", ty.u32x4))
        key_row = machine.lane // 4
        query_row = ch.minimum(key_row, sizes.group - 1)
        logits = ch.array(ty.f32, 4, zero=True)
        with ch.for_(sizes.head_dim // 32, unroll=2) as part:
            column = part * 4 + machine.lane % 4
            low = keys[(first_key + key_row) * sizes.head_units + column]
            high = keys[(first_key + key_row + 8) * sizes.head_units + column]
            query = queries[query_row * sizes.head_units + column]
            prim.mma_bf16(logits, prim.make_u32x4(low.x, high.x, low.y, high.y), query.x, query.y)
            prim.mma_bf16(logits, prim.make_u32x4(low.z, high.z, low.w, high.w), query.z, query.w)
        # Keys beyond the valid ones are stale memory, NaN perhaps: select, never multiply.
        scale = LOG2_E / math.sqrt(sizes.head_dim)
        with ch.for_(4, unroll=True) as element:
            exists = key_row + (element // 2) * 8 < valid
            logits[element] = ch.select(exists, logits[element] * scale, -math.inf)
        highest, weight_sum, output = state.highest, state.weight_sum, state.output
        with ch.for_(2, unroll=True) as column:
            peak = ch.var(ty.f32, prim.maximum_f32(logits[column], logits[column + 2]))
            for mask in (4, 8, 16):
                peak.set(prim.maximum_f32(peak, prim.shuffle_xor_f32(peak, mask)))
            new_highest = prim.maximum_f32(highest[column], peak)
            shrink = prim.exp2_f32(highest[column] - new_highest)
            highest[column] = new_highest
            logits[column] = prim.exp2_f32(logits[column] - new_highest)
            logits[column + 2] = prim.exp2_f32(logits[column + 2] - new_highest)
            weight_sum[column] = weight_sum[column] * shrink + (logits[column] + logits[column + 2])
            with ch.for_(sizes.output_tiles, unroll=True) as tile:
                output[tile][column] = output[tile][column] * shrink
                output[tile][column + 2] = output[tile][column + 2] * shrink
        # The product gives keys x queries by rows; the next product wants it by columns.
        weights_low = prim.matrix_transpose_b16(prim.pack_bf16x2(logits[0], logits[1]))
        weights_high = prim.matrix_transpose_b16(prim.pack_bf16x2(logits[2], logits[3]))
        return weights_low, weights_high

    @ch.inline
    def _add_values(self, stage: ch.Expr, first_key: ch.Expr, valid: ch.Expr, weights: Any, state: WarpState) -> None:
        """output (dims x queries) += values^T * weights, 64 dims at a time.

        Lane (r, t) reads 8 dims of keys 2t, 2t+1, 2t+8 and 2t+9: row r of output tile i is dim 8r + i, row r + 8 is dim
        8r + i + 4. One dim of two neighbouring keys is a register of the operand.
        """
        machine, sizes = self.machine, self.sizes
        values = ch.reinterpret(ty.ptr(ty.u32x4), stage + machine.plan.stage_bytes // 2)
        first_row = machine.lane % 4 * 2
        with ch.for_(sizes.slices, unroll=True) as slice_:
            words = ch.array(ty.u32, 4, 4)
            with ch.for_(4, unroll=True) as number:
                key = first_row + number % 2 + (number // 2) * 8
                read = values[(first_key + key) * sizes.head_units + slice_ * 8 + machine.lane // 4]
                exists = key < valid  # stale memory may hold NaN, and 0 * NaN is NaN: select
                for word, member in enumerate("xyzw"):
                    words[number][word] = ch.select(exists, getattr(read, member), ty.u32(0))
            with ch.for_(SLICE_TILES, unroll=True) as tile:
                low_early = self._pair(words, 0, tile)
                high_early = self._pair(words, 0, tile + SLICE_TILES)
                low_late = self._pair(words, 2, tile)
                high_late = self._pair(words, 2, tile + SLICE_TILES)
                operand = prim.make_u32x4(low_early, high_early, low_late, high_late)
                prim.mma_bf16(state.output[slice_ * SLICE_TILES + tile], operand, *weights)

    @staticmethod
    def _pair(words: Any, key: int, element: ch.Expr) -> ch.Expr:
        """One dim of two neighbouring keys, packed: even dims are low halves of a word, odd ones high halves."""
        selector = ch.select(element % 2 == 0, ty.u32(0x5410), ty.u32(0x7632))
        return prim.byte_permute(words[key][element // 2], words[key + 1][element // 2], selector)

    @ch.inline
    def _finish_state(self, state: WarpState) -> None:
        """Lay down highest logit and weight sum of this warp, per query."""
        machine = self.machine
        statistics = machine.region("statistics", ty.f32x2)
        words = ch.reinterpret(ty.ptr_mut(ty.f32), statistics)
        with ch.for_(2, unroll=True) as column:
            total = ch.var(ty.f32, state.weight_sum[column])
            for mask in (4, 8, 16):
                total += prim.shuffle_xor_f32(total, mask)
            with ch.if_(machine.lane < 4):
                place = (machine.warp * QUERY_COLUMNS + machine.lane * 2 + column) * 2
                words[place] = state.highest[column]
                words[place + 1] = total

    @ch.inline
    def _attend_newest(self, has_newest: ch.Expr) -> None:
        """The newest token's state: highest = its logit, weight sum 1; the identity if the item does not have it."""
        machine, sizes = self.machine, self.sizes
        queries = ch.reinterpret(ty.ptr(ty.u32), machine.region("queries", ty.u32))
        statistics = ch.reinterpret(ty.ptr_mut(ty.f32), machine.region("statistics", ty.f32))
        words = sizes.head_dim // 2
        with ch.for_(machine.warp, sizes.group, sizes.warps, unroll=1) as row:
            product = ch.var(ty.f32, 0.0)
            with ch.if_(has_newest):
                with ch.for_(machine.lane, words, 32, unroll=True) as word:
                    a = queries[row * words + word]
                    b = queries[sizes.group * words + word]
                    product += prim.bf16x2_low(a) * prim.bf16x2_low(b) + prim.bf16x2_high(a) * prim.bf16x2_high(b)
            logit = prim.warp_sum_f32(product) * (LOG2_E / math.sqrt(sizes.head_dim))
            with ch.if_(machine.lane == 0):
                place = (sizes.warps * QUERY_COLUMNS + row) * 2
                statistics[place] = ch.select(has_newest, logit, -math.inf)
                statistics[place + 1] = ch.select(has_newest, ty.f32(1.0), ty.f32(0.0))

    # -- folding the warps' states --------------------------------------------------------------------------------

    @ch.inline
    def _fold_item(self, item: Item, state: WarpState, has_newest: ch.Expr, epoch: ch.Expr) -> None:
        """Fold the warps' states and the newest token's, in this order, 64 dims at a time, and publish the result."""
        machine = self.machine
        for slice_ in range(self.sizes.slices):
            self._lay_down(slice_, state)
            machine.meet()
            self._fold_slice(slice_, item, has_newest, epoch)
            machine.meet()

    @ch.inline
    def _lay_down(self, slice_: int, state: WarpState) -> None:
        """This warp's unnormalised output of 64 dims: scratch[warp][query][dim]."""
        machine, sizes = self.machine, self.sizes
        scratch = machine.region("attention", ty.f32)
        with ch.for_(2, unroll=True) as column:
            row = machine.lane % 4 * 2 + column
            with ch.if_(row < sizes.group):
                lane_dims = scratch + ((machine.warp * sizes.group + row) * SLICE_DIMS + machine.lane // 4 * 8)
                with ch.for_(SLICE_TILES, unroll=True) as tile:
                    lane_dims[tile] = state.output[slice_ * SLICE_TILES + tile][column]
                    lane_dims[tile + SLICE_TILES] = state.output[slice_ * SLICE_TILES + tile][column + 2]

    @ch.inline
    def _fold_slice(self, slice_: int, item: Item, has_newest: ch.Expr, epoch: ch.Expr) -> None:
        machine, sizes = self.machine, self.sizes
        scratch = machine.region("attention", ty.f32x2)
        statistics = machine.region("statistics", ty.f32x2)
        values = machine.region("queries", ty.u32) + (sizes.group + 1) * sizes.head_dim // 2
        pairs = SLICE_DIMS // 2
        with ch.for_(machine.thread, sizes.group * pairs, machine.math_threads, unroll=1) as output:
            row = output // pairs
            pair = output % pairs
            highest = ch.var(ty.f32, -math.inf)
            with ch.for_(sizes.states) as other:
                highest.set(prim.maximum_f32(highest, statistics[other * QUERY_COLUMNS + row].x))
            base = ch.select(highest == -math.inf, ty.f32(0.0), highest)
            weight_sum = ch.var(ty.f32, 0.0)
            low = ch.var(ty.f32, 0.0)
            high = ch.var(ty.f32, 0.0)
            with ch.for_(sizes.warps) as other:
                numbers = statistics[other * QUERY_COLUMNS + row]
                weight = prim.exp2_f32(numbers.x - base)
                part = scratch[(other * sizes.group + row) * pairs + pair]
                weight_sum += weight * numbers.y
                low += weight * part.x
                high += weight * part.y
            with ch.if_(has_newest):
                weight = prim.exp2_f32(statistics[sizes.warps * QUERY_COLUMNS + row].x - base)
                value = values[slice_ * pairs + pair]
                weight_sum += weight
                low += weight * prim.bf16x2_low(value)
                high += weight * prim.bf16x2_high(value)
            inverse = ch.select(weight_sum == 0.0, ty.f32(0.0), prim.divide_f32(1.0, weight_sum))
            lse = ch.select(weight_sum == 0.0, -math.inf, highest * LN_2 + prim.log_f32(weight_sum))
            self._publish_pair(slice_, item, row, pair, low * inverse, high * inverse, lse, epoch)

    @ch.inline
    def _publish_pair(
        self,
        slice_: int,
        item: Item,
        row: ch.Expr,
        pair: ch.Expr,
        low: ch.Expr,
        high: ch.Expr,
        lse: ch.Expr,
        epoch: ch.Expr,
    ) -> None:
        """Write through to the output, or store a part of a partial state."""
        sizes, pairs = self.sizes, SLICE_DIMS // 2
        dim_pair = pair + slice_ * pairs
        with ch.if_(item.slot == WRITE_THROUGH):
            place = (item.head * sizes.group + row) * (sizes.head_dim // 2) + dim_pair
            self.exchange.publish("attention", place, prim.pack_bf16x2(low, high), epoch)
        with ch.else_():
            partial = (item.slot * sizes.group + row) * sizes.partial_words
            self.exchange.publish("partials", partial + dim_pair * 2, prim.float_bits(low), epoch)
            self.exchange.publish("partials", partial + dim_pair * 2 + 1, prim.float_bits(high), epoch)
            with ch.if_(dim_pair < LSE_WORDS):
                self.exchange.publish("partials", partial + sizes.head_dim + dim_pair, prim.float_bits(lse), epoch)

    # -- merging partial states of different blocks ----------------------------------------------------------------

    @ch.inline
    def merge(self, epoch: ch.Expr) -> None:
        """In the math role: fold the partial states of the rows that are this block's, in the plan's order."""
        with self.schedule.merges(self.machine.math) as merge:
            self._merge_row(merge, epoch)

    @ch.inline
    def _merge_row(self, merge: Merge, epoch: ch.Expr) -> None:
        """Each warp waits for one partial state at a time; the threads that own a pair of dims fold them in order."""
        machine, sizes = self.machine, self.sizes
        scratch = machine.region("attention", ty.f32x2)
        lses = machine.region("statistics", ty.f32)
        highest = ch.var(ty.f32, -math.inf)
        weight_sum = ch.var(ty.f32, 0.0)
        low = ch.var(ty.f32, 0.0)
        high = ch.var(ty.f32, 0.0)
        with ch.for_(merge.begin, merge.end, sizes.warps, unroll=1) as first:
            count = ch.minimum(merge.end - first, sizes.warps)
            self._fetch_partial(merge, first, count, epoch)
            machine.meet()
            with ch.if_(machine.thread < sizes.head_dim // 2):
                with ch.for_(count) as other:
                    lse = lses[other]
                    new_highest = prim.maximum_f32(highest, lse)
                    base = ch.select(new_highest == -math.inf, ty.f32(0.0), new_highest)
                    shrink = prim.exp2_f32((highest - base) * LOG2_E)
                    weight = prim.exp2_f32((lse - base) * LOG2_E)
                    part = scratch[other * (sizes.head_dim // 2) + machine.thread]
                    highest.set(new_highest)
                    weight_sum.set(weight_sum * shrink + weight)
                    low.set(low * shrink + weight * part.x)
                    high.set(high * shrink + weight * part.y)
            machine.meet()
        with ch.if_(machine.thread < sizes.head_dim // 2):
            inverse = ch.select(weight_sum == 0.0, ty.f32(0.0), prim.divide_f32(1.0, weight_sum))
            place = (merge.head * sizes.group + merge.row) * (sizes.head_dim // 2) + machine.thread
            self.exchange.publish("attention", place, prim.pack_bf16x2(low * inverse, high * inverse), epoch)

    @ch.inline
    def _fetch_partial(self, merge: Merge, first: ch.Expr, count: ch.Expr, epoch: ch.Expr) -> None:
        machine, sizes = self.machine, self.sizes
        scratch = machine.region("attention", ty.u32x4)
        lses = machine.region("statistics", ty.u32)
        units = sizes.head_dim // 4
        with ch.if_(machine.warp < count):
            slot = self.schedule.source(machine.math, first + machine.warp)
            partial_unit = (slot * sizes.group + merge.row) * (sizes.partial_words // 4)
            with ch.if_(machine.lane < units):
                scratch[machine.warp * units + machine.lane] = self.exchange.read4(
                    "partials", partial_unit + machine.lane, epoch
                )
            with ch.if_(machine.lane == 0):
                lse_words = self.exchange.read4("partials", partial_unit + units, epoch)
                lses[machine.warp] = lse_words.x
