"""The states of an item's warps folded into one: the item's output, or a partial state of it.

Each warp has states of its own column tiles over its own keys. They are laid down in shared memory, as many dims at a
time as there is room for, and each pair of dims is folded by one thread over the key groups in ascending order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.merge import LSE_WORDS, partial_words
from cheetah.blocks.attention.schedule import WRITE_THROUGH, Item
from cheetah.blocks.attention.sharing import Share
from cheetah.blocks.attention.tile import LN_2, SLICE_TILES, AttentionShape, WarpState
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.plan.plan import COLUMNS
from cheetah.plan.regions import ATTENTION_SLICE_DIMS as SLICE_DIMS


class Folder:
    """Folds states, and publishes what they give: partial states by itself, outputs by `finish` (see `core`)."""

    def __init__(
        self,
        machine: Machine,
        exchange: Exchange,
        sizes: AttentionShape,
        softmax: bool,
        finish: Callable[..., None],
    ) -> None:
        self.machine, self.exchange, self.sizes = machine, exchange, sizes
        self.softmax, self.finish = softmax, finish

    @ch.function
    def fold(self, item: Item, share: Share, states: Sequence[WarpState], epoch: ch.Expr) -> None:
        """Fold the key groups' states, in ascending order, as many dims at a time as there is room for, and publish the
        result."""
        machine, every = self.machine, self.slices_together
        for index, state in enumerate(states):
            if self.softmax:
                self._lay_down_statistics(state)
            for first in range(0, self.sizes.slices, every):
                slices = range(first, min(first + every, self.sizes.slices))
                self._lay_output_down(slices, state)
                machine.meet()
                first_slice = ch.argument(slices.start)
                self._fold_slices(len(slices), first_slice, item, share, ch.argument(index), epoch)
                machine.meet()

    @property
    def columns(self) -> int:
        """Columns of a warp that are laid down: those that a tile can have."""
        return min(self.sizes.max_rows, COLUMNS)

    @property
    def slices_together(self) -> int:
        """Slices of the output that the scratch has room for."""
        slice_bytes = self.sizes.warps * self.columns * SLICE_DIMS * 4
        return min(self.machine.shared.region("attention").nbytes // slice_bytes, self.sizes.slices)

    @ch.function
    def _lay_down_statistics(self, state: WarpState) -> None:
        """Highest logit and weight sum of this warp, per column: statistics[warp][column]."""
        machine = self.machine
        words = machine.region("statistics", ty.f32)
        with ch.for_(2, unroll=True) as column:
            total = ch.var(ty.f32, state.weight_sum[column])
            for mask in (4, 8, 16):
                total += prim.shuffle_xor_f32(total, mask)
            index = machine.lane * 2 + column
            with ch.if_(index < self.columns):
                place = (machine.warp * self.columns + index) * 2
                words[place] = state.highest[column]
                words[place + 1] = total

    @ch.function
    def _lay_output_down(self, slices: range, state: WarpState) -> None:
        """This warp's unnormalised output of some slices: attention[warp][column][slice][number]."""
        machine = self.machine
        scratch = machine.region("attention", ty.u32x4)
        with ch.for_(2, unroll=True) as column:
            number = machine.lane % 4 * 2 + column
            with ch.if_(self.columns >= COLUMNS or number < self.columns):
                row = (machine.warp * self.columns + number) * len(slices)
                for index, slice_ in enumerate(slices):
                    place = scratch + ((row + index) * SLICE_DIMS + machine.lane // 4 * 8) // 4
                    for half in range(2):
                        tiles = [
                            state.output[slice_ * SLICE_TILES + tile][column + 2 * half] for tile in range(SLICE_TILES)
                        ]
                        place[half] = prim.make_u32x4(*(prim.float_bits(value) for value in tiles))

    @ch.function
    def _fold_slices(
        self, count: int, first_slice: ch.Expr, item: Item, share: Share, index: ch.Expr, epoch: ch.Expr
    ) -> None:
        """`count` slices of column tile `index` of every group: its column c was laid down by the warps column_group,
        column_group + column_groups, ..., as their column c."""
        machine = self.machine
        slice_pairs = ch.named("SLICE_PAIRS", SLICE_DIMS // 2)
        pairs = slice_pairs * count
        if share.is_few:
            rows = item.rows
            with ch.for_(machine.thread, rows * pairs, machine.consumer_threads, unroll=1) as output:
                place = output // pairs
                pair = output % pairs
                self._fold_pair(count, first_slice, item, place, place, pair, self.columns, epoch)
            return
        for column_groups in self.sizes.column_groups(share.width):
            laid_down = column_groups * COLUMNS
            with ch.if_(share.column_groups == column_groups):
                with ch.for_(machine.thread, laid_down * pairs, machine.consumer_threads, unroll=1) as output:
                    place = output // pairs
                    pair = output % pairs
                    row = (place // COLUMNS * share.width + index) * COLUMNS + place % COLUMNS
                    with ch.if_(row < item.rows):
                        self._fold_pair(count, first_slice, item, row, place, pair, laid_down, epoch)

    @ch.inline
    def _fold_pair(
        self,
        count: int,
        first_slice: ch.Expr,
        item: Item,
        row: ch.Expr,
        place: ch.Expr,
        pair: ch.Expr,
        stride: int,
        epoch: ch.Expr,
    ) -> None:
        slice_pairs = ch.named("SLICE_PAIRS", SLICE_DIMS // 2)
        low, high, highest, weight_sum = self._fold_states(place, stride, pair, slice_pairs * count)
        dim_pair = self.sizes.dim_pair(pair // slice_pairs + first_slice, pair % slice_pairs)
        lse = self._lse(highest, weight_sum)
        with ch.if_(True if self.sizes.head_dim % SLICE_DIMS == 0 else dim_pair < self.sizes.head_dim // 2):
            self._publish(item, row, dim_pair, low, high, lse, epoch)

    @ch.inline
    def _publish(
        self, item: Item, row: ch.Expr, dim_pair: Any, low: ch.Expr, high: ch.Expr, lse: ch.Expr, epoch: ch.Expr
    ) -> None:
        with ch.if_(item.partial == WRITE_THROUGH):
            self.finish(item.tile, item.head, row, dim_pair, low, high, lse, epoch)
        with ch.else_():
            self._publish_partial(item.partial + row, dim_pair, low, high, lse, epoch)

    @ch.function
    def _fold_states(self, first: ch.Expr, stride: int, pair: ch.Expr, pairs: int) -> tuple[Any, Any, Any, Any]:
        """Fold the states of rows `first`, `first + stride`, ... of the laid down ones: (low, high), the highest logit
        and the sum of weights. Without softmax the last two are 0."""
        machine = self.machine
        scratch = machine.region("attention", ty.f32x2)
        statistics = machine.region("statistics", ty.f32x2)
        low = ch.var(ty.f32, 0.0)
        high = ch.var(ty.f32, 0.0)
        if not self.softmax:
            with self._states(first, stride) as other:
                part = scratch[other * pairs + pair]
                low += part.x
                high += part.y
            return low, high, ty.f32(0.0), ty.f32(0.0)
        highest = ch.var(ty.f32, -math.inf)
        with self._states(first, stride) as other:
            highest.set(prim.maximum_f32(highest, statistics[other].x))
        base = ch.select(highest == -math.inf, ty.f32(0.0), highest)
        weight_sum = ch.var(ty.f32, 0.0)
        with self._states(first, stride) as other:
            numbers = statistics[other]
            weight = prim.exp2_f32(numbers.x - base)
            part = scratch[other * pairs + pair]
            weight_sum.set(prim.fma_f32(weight, numbers.y, weight_sum))
            low.set(prim.fma_f32(weight, part.x, low))
            high.set(prim.fma_f32(weight, part.y, high))
        inverse = ch.select(weight_sum == 0.0, ty.f32(0.0), prim.divide_f32(1.0, weight_sum))
        return low * inverse, high * inverse, highest, weight_sum

    @contextmanager
    @ch.inline
    def _states(self, first: ch.Expr, stride: int) -> Iterator[Any]:
        """The laid down states of a row, ascending. Their number is known, so they are read together: in a loop from
        `first`, which the block alone knows, each is waited for by itself (0.57 us of a fold of 8)."""
        with ch.for_(self.sizes.warps * self.columns // stride, unroll=True, name="state") as state:
            yield first + state * stride

    @ch.inline
    def _lse(self, highest: ch.Expr, weight_sum: ch.Expr) -> ch.Expr:
        """The natural logarithm of the sum of exponentials."""
        if not self.softmax:
            return ty.f32(0.0)
        lse = ch.select(weight_sum == 0.0, -math.inf, prim.fma_f32(highest, LN_2, prim.log_f32(weight_sum)))
        return lse

    @ch.function
    def _publish_partial(
        self, row: ch.Expr, dim_pair: ch.Expr, low: ch.Expr, high: ch.Expr, lse: ch.Expr, epoch: ch.Expr
    ) -> None:
        partial = row * partial_words(self.sizes.head_dim)
        self.exchange.publish("partials", partial + dim_pair * 2, prim.float_bits(low), epoch)
        self.exchange.publish("partials", partial + dim_pair * 2 + 1, prim.float_bits(high), epoch)
        with ch.if_(dim_pair < LSE_WORDS):
            self.exchange.publish("partials", partial + self.sizes.head_dim + dim_pair, prim.float_bits(lse), epoch)
