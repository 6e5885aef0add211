"""One warp's work on 16 keys and one or more tiles of 8 query rows: logits, weights, their product with the values.

Lane (r, t) = (lane // 4, lane % 4) of the products: keys are rows r and r + 8 of the first, queries its columns 2t and
2t + 1; dims are rows of the second. A lane reads whole units of 8 dims of a key or a value; which dims they are is free
as long as both factors agree, and is chosen so that shared memory is read with few bank conflicts: rows lie a multiple
of 128 bytes apart, so lanes of neighbouring rows read their two halves in opposite order and exchange them afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.variants import At, Pair, Variant
from cheetah.blocks.machine import Machine
from cheetah.blocks.patterns import HIGH_HALVES, LOW_HALVES
from cheetah.lang import prim, ty
from cheetah.plan.index import ceil_div
from cheetah.plan.plan import COLUMNS, column_tiles
from cheetah.plan.regions import ATTENTION_SLICE_DIMS as SLICE_DIMS

SLICE_TILES = SLICE_DIMS // 16
SLICES_AT_ONCE = 2
"""Slices of the values that a lane has in registers together: 32 registers, beside a state of 64 where heads have 256
dims."""
LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@dataclass(frozen=True)
class AttentionShape:
    """Static sizes of the core for one model and plan."""

    group: int
    head_dim: int
    warps: int
    stage_tokens: int
    max_rows: int
    codes: bool

    @property
    def head_units(self) -> int:
        """Units of 8 elements in a query, a key or a value."""
        return self.head_dim // 8

    @property
    def parts(self) -> int:
        """Units of a key that a lane reads."""
        return self.head_dim // 32

    @property
    def slices(self) -> int:
        """Units of a value that a lane reads, and rounds in which a block folds its warps' states."""
        return ceil_div(self.head_dim, SLICE_DIMS)

    @property
    def output_tiles(self) -> int:
        """16-row tiles of the transposed output; in heads of 96 dims a quarter of their rows is no dim's."""
        return self.slices * SLICE_TILES

    @property
    def column_tiles(self) -> int:
        """Column tiles of a warp in an item of several. Of a token that has more rows than one takes, warps share the
        rows out: in a step of one token two states of 128 dims were in part spilled (64 bytes of stack)."""
        return 1 if self.group > COLUMNS else column_tiles(self.head_dim)

    def column_groups(self, width: int) -> list[int]:
        """In how many groups of `width` column tiles the warps may have an item's rows, ascending."""
        groups = [1]
        while groups[-1] * width * COLUMNS < self.max_rows and groups[-1] < self.warps:
            groups.append(min(2 * groups[-1], self.warps))
        return groups

    @property
    def is_wide(self) -> bool:
        """A lane reads 16 codes of a cached key at once: parts 2n and 2n + 1 are neighbouring units."""
        return self.codes and self.parts > 2 and self.parts % 2 == 0

    def parts_read(self, both: int) -> int:
        """Units of a key that a lane reads together as number `both`: two, or the last one."""
        return min(2, self.parts - 2 * both)

    def value_lane(self, lane: ch.Expr) -> Any:
        """The number r of a lane among those that read different dims of a value; of lanes for which there are none the
        last one that has some: what becomes of theirs is read by nobody."""
        lanes = self.head_units // self.slices
        return lane // 4 if lanes == COLUMNS else ch.minimum(lane // 4, lanes - 1)

    def key_unit(self, part: Any, lane: Any) -> Any:
        """The unit of a key, or of a query, that lane t = `lane` has as number `part`."""
        if self.is_wide:
            return part // 2 * 8 + lane * 2 + part % 2
        return part * 4 + lane

    def dim_pair(self, slice_: ch.Expr, pair: ch.Expr) -> Any:
        """Which pair of dims is number `pair` of a slice of the output."""
        return (pair // 4 * self.slices + slice_) * 4 + pair % 4


@dataclass(frozen=True, eq=False)
class WarpState:
    """One warp's attention state, in registers: of each lane's two query columns the highest logit (base 2) and the sum
    of weights, and tiles of the transposed output, not yet divided by that sum."""

    highest: Any
    weight_sum: Any
    output: Any


@dataclass(frozen=True, eq=False)
class KeyRows:
    """Keys and values in shared memory (u8*), a token a row; `codes`: e4m3, else bf16."""

    keys: Any
    values: Any
    codes: bool


@dataclass(frozen=True, eq=False)
class Queries:
    """What a warp knows of its 8 query rows in an item.

    unit: reads a unit (u32x4) of the lane's query row, by part. limits: of the lane's two columns, the first key that
    is not seen. scale: what a raw dot product of stored numbers is multiplied by to be one of true numbers (None: 1).
    contexts: of the two columns, for the functions of a variant that look at logits. tokens: for those that look at
    keys and values. offset: absolute position of key 0.
    """

    unit: Callable[[Any], Any]
    limits: Any
    scale: Any
    contexts: tuple[Mapping[str, Callable[[], Any]], ...]
    tokens: Mapping[str, Callable[[], Any]]
    offset: Any


class AttentionProduct:
    """Folds tiles of 16 keys into a warp's state."""

    def __init__(self, machine: Machine, sizes: AttentionShape, variant: Variant, parameters: Any) -> None:
        self.machine, self.sizes, self.variant, self.parameters = machine, sizes, variant, parameters

    def at(self, function: str, values: Mapping[str, Callable[[], Any]]) -> At:
        """The context of a call of a variant's function."""
        shape = self.machine.shape
        return At(
            function,
            self.parameters,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            scale=self.variant.scale,
            values=values,
        )

    @ch.inline
    def new_state(self) -> WarpState:
        highest = ch.array(ty.f32, 2)
        weight_sum = ch.array(ty.f32, 2, zero=True)
        output = ch.array(ty.f32, self.sizes.output_tiles, 4, zero=True)
        highest[0] = -math.inf
        highest[1] = -math.inf
        return WarpState(highest, weight_sum, output)

    @ch.function
    def attend(
        self,
        rows: KeyRows,
        first_row: ch.Expr,
        valid: ch.Expr,
        key: ch.Expr,
        queries: Sequence[Queries],
        states: Sequence[WarpState],
    ) -> None:
        """Fold 16 keys into the states of some column tiles, which share what is read of keys and values. The first
        `valid` keys (one at least) exist; the first is key `key`."""
        weights = []
        for own, state, logits in zip(
            queries, states, self._products(rows, first_row, valid, key, queries), strict=True
        ):
            self._scale_and_mask(logits, valid, key, own)
            if self.variant.softmax:
                self._weigh(logits, state)
            # The product gives keys x queries by rows; the next product wants it by columns.
            weights_low = prim.matrix_transpose_b16(prim.pack_bf16x2(logits[0], logits[1]))
            weights_high = prim.matrix_transpose_b16(prim.pack_bf16x2(logits[2], logits[3]))
            weights.append((weights_low, weights_high))
        self._add_values(rows, first_row, valid, key, weights, queries[0], states)

    # -- keys x queries ---------------------------------------------------------------------------------------------

    @ch.inline
    def _products(
        self, rows: KeyRows, first_row: ch.Expr, valid: ch.Expr, key: ch.Expr, queries: Sequence[Queries]
    ) -> list[Any]:
        """Of each column tile the raw dot products: f32 [4], of key r and queries 2t, 2t + 1, then of key r + 8."""
        # Two chains of sums, because each product waits for the one before it.
        sums = [ch.array(ty.f32, 2, 4, zero=True, name="sums") for _ in queries]
        if self.variant.key_transform is not None:
            self._transformed_products(rows, first_row, valid, key, queries, sums)
            return [self._added(chains) for chains in sums]
        row = first_row + self.machine.lane // 4
        for both in range(ceil_div(self.sizes.parts, 2)):
            low = self._key_words(rows, row, both)
            high = self._key_words(rows, row + 8, both)
            for part in range(self.sizes.parts_read(both)):
                self._multiply_part(low[part], high[part], ch.argument(both * 2 + part), queries, sums)
        return [self._added(chains) for chains in sums]

    @ch.inline
    def _transformed_products(
        self,
        rows: KeyRows,
        first_row: ch.Expr,
        valid: ch.Expr,
        key: ch.Expr,
        queries: Sequence[Queries],
        sums: list[Any],
    ) -> None:
        """The same with key_transform, which needs all units of a key together."""
        parts, index = self.sizes.parts, self.machine.lane // 4
        keys = []
        for half in range(2):
            words = ch.array(ty.u32, parts, 4)
            for both in range(parts // 2):
                read = self._key_words(rows, first_row + index + 8 * half, both)
                for part in range(2):
                    for word in range(4):
                        words[both * 2 + part][word] = read[part][word]
            self._transform_keys(words, key + ch.minimum(index + 8 * half, valid - 1), queries[0])
            keys.append(words)
        for part in range(parts):
            self._multiply_part(keys[0][part], keys[1][part], ch.argument(part), queries, sums)

    @ch.function
    def _multiply_part(self, low: Any, high: Any, part: ch.Expr, queries: Sequence[Queries], sums: list[Any]) -> None:
        """32 dims of 16 keys by those of the queries: low and high are what the lane has of keys r and r + 8."""
        early = prim.make_u32x4(low[0], high[0], low[1], high[1])
        late = prim.make_u32x4(low[2], high[2], low[3], high[3])
        for own, chains in zip(queries, sums, strict=True):
            query = own.unit(part)
            prim.mma_bf16(chains[0], early, query.x, query.y)
            prim.mma_bf16(chains[1], late, query.z, query.w)

    @ch.inline
    def _added(self, sums: Any) -> ch.Expr:
        logits = ch.array(ty.f32, 4)
        with ch.for_(4, unroll=True) as element:
            logits[element] = sums[0][element] + sums[1][element]
        return logits

    @ch.inline
    def _key_words(self, rows: KeyRows, row: ch.Expr, both: int) -> Any:
        """This lane's units 2*both and 2*both + 1 of a key: bf16 pairs, u32 [2][4]."""
        count = self.sizes.parts_read(both)
        words = ch.array(ty.u32, count, 4)
        if self.sizes.is_wide:
            self._read_wide_codes(rows, row, ch.argument(both), words)
        elif rows.codes:
            self._read_codes(rows, row, range(both * 2, both * 2 + count), words)
        elif self.sizes.parts % 2:
            self._read_in_order(rows, row, range(both * 2, both * 2 + count), words)
        else:
            self._read_crossed(rows, row, ch.argument(both), words)
        return words

    @ch.function
    def _read_in_order(self, rows: KeyRows, row: ch.Expr, parts: range, words: Any) -> None:
        """Rows that are an odd multiple of 64 bytes apart lie in other banks than their neighbours."""
        keys = ch.reinterpret(ty.ptr(ty.u32x4), rows.keys) + row * self.sizes.head_units
        for index, part in enumerate(parts):
            read = keys[part * 4 + self.machine.lane % 4]
            for word, member in enumerate("xyzw"):
                words[index][word] = getattr(read, member)

    @ch.function
    def _read_crossed(self, rows: KeyRows, row: ch.Expr, both: ch.Expr, words: Any) -> None:
        """Lanes of odd rows read the two units in the opposite order: no bank conflicts."""
        keys = ch.reinterpret(ty.ptr(ty.u32x4), rows.keys) + row * self.sizes.head_units
        is_odd = self.machine.lane // 4 % 2
        first = keys[(both * 2 + is_odd) * 4 + self.machine.lane % 4]
        second = keys[(both * 2 + (1 - is_odd)) * 4 + self.machine.lane % 4]
        self._cross(words[0], words[1], first, second, is_odd != 0)

    @ch.function
    def _cross(self, early: Any, late: Any, first: ch.Expr, second: ch.Expr, is_crossed: ch.Expr) -> None:
        """The words of two units that were read in this order, or in the opposite one."""
        for word, member in enumerate("xyzw"):
            early[word] = ch.select(is_crossed, getattr(second, member), getattr(first, member))
            late[word] = ch.select(is_crossed, getattr(first, member), getattr(second, member))

    @ch.function
    def _read_wide_codes(self, rows: KeyRows, row: ch.Expr, both: ch.Expr, words: Any) -> None:
        """16 codes at a time."""
        keys = ch.reinterpret(ty.ptr(ty.u32x4), rows.keys) + row * (self.sizes.head_dim // 16)
        read = keys[both * 4 + self.machine.lane % 4]
        for quarter, member in enumerate("xyzw"):
            self._widen(getattr(read, member), words[quarter // 2], quarter % 2 * 2)

    @ch.function
    def _read_codes(self, rows: KeyRows, row: ch.Expr, parts: range, words: Any) -> None:
        """8 codes at a time."""
        keys = ch.reinterpret(ty.ptr(ty.u32x2), rows.keys) + row * self.sizes.head_units
        for index, part in enumerate(parts):
            read = keys[part * 4 + self.machine.lane % 4]
            self._widen(read.x, words[index], 0)
            self._widen(read.y, words[index], 2)

    @ch.inline
    def _widen(self, codes: ch.Expr, words: Any, word: int) -> None:
        """Four e4m3 codes as two words of bf16 pairs; exact."""
        pairs = prim.e4m3x4_to_bf16(codes)
        words[word] = pairs.x
        words[word + 1] = pairs.y

    @ch.inline
    def _transform_keys(self, words: Any, key: ch.Expr, queries: Queries) -> None:
        """A lane has both elements of every rotated pair: units `part` and `part + parts / 2`."""
        half = self.sizes.parts // 2
        function = self.variant.key_transform
        assert function is not None
        for part in range(half):
            unit = self.sizes.key_unit(part, self.machine.lane % 4)
            for word in range(4):
                near, far = words[part][word], words[part + half][word]

                def place(element: int, unit: Any = unit, word: int = word) -> At:
                    values = {
                        **queries.tokens,
                        "key": lambda: queries.offset + key,
                        "dim": lambda: unit * 8 + (word * 2 + element),
                    }
                    return self.at("key_transform", values)

                low = function((prim.bf16x2_low(near), prim.bf16x2_low(far)), place(0))
                high = function((prim.bf16x2_high(near), prim.bf16x2_high(far)), place(1))
                new_near = prim.pack_bf16x2(low[0], high[0])
                new_far = prim.pack_bf16x2(low[1], high[1])
                words[part][word] = new_near
                words[part + half][word] = new_far

    # -- logits to weights --------------------------------------------------------------------------------------------

    @ch.function
    def _scale_and_mask(self, logits: Any, valid: ch.Expr, key: ch.Expr, queries: Queries) -> None:
        """Logits times log2 e, and -inf (without softmax: weights, and 0) where a key is not seen.

        Keys beyond the valid ones are stale memory, NaN perhaps: select, never multiply.
        """
        index = self.machine.lane // 4
        for half in range(2):
            tile_key = index + 8 * half
            for column in range(2):
                context = self._logit_context(column, key + ch.minimum(tile_key, valid - 1), queries)
                self._mask(logits[half * 2 + column], key + tile_key < queries.limits[column], context, queries)

    def _mask(
        self, place: ch.Expr, is_seen: ch.Expr, context: Mapping[str, Callable[[], Any]], queries: Queries
    ) -> None:
        """From a raw dot product in its place."""
        if self.variant.logits_mask is not None:
            is_seen = is_seen & self.variant.logits_mask(self.at("logits_mask", context))
        logit = self._logit(place, context, queries)
        place.set(ch.select(is_seen, logit, -math.inf if self.variant.softmax else ty.f32(0.0)))

    def _logit_context(self, column: int, key: ch.Expr, queries: Queries) -> Mapping[str, Callable[[], Any]]:
        if not self.variant.needs_query_context:
            return {}
        return {**queries.contexts[column], "key": lambda: queries.offset + key}

    def _logit(self, product: ch.Expr, context: Mapping[str, Callable[[], Any]], queries: Queries) -> Any:
        """From a raw dot product; in base 2 where it is to be exponentiated."""
        base = LOG2_E if self.variant.softmax else 1.0
        if self.variant.logits_transform is not None:
            product = product if queries.scale is None else product * queries.scale
            return self.variant.logits_transform(product, self.at("logits_transform", context)) * base
        scale = self.variant.scale
        factor = base / math.sqrt(self.sizes.head_dim) if scale is None else base * scale
        return product * (factor if queries.scale is None else queries.scale * factor)

    @ch.function
    def _weigh(self, logits: Any, state: WarpState) -> None:
        """exp2(logit - highest) in place, and the state shrunk to the new highest logit."""
        highest, weight_sum, output = state.highest, state.weight_sum, state.output
        with ch.for_(2, unroll=True) as column:
            peak = ch.var(ty.f32, prim.maximum_f32(logits[column], logits[column + 2]))
            for mask in (4, 8, 16):
                peak.set(prim.maximum_f32(peak, prim.shuffle_xor_f32(peak, mask)))
            new_highest = prim.maximum_f32(highest[column], peak)
            base = ch.select(new_highest == -math.inf, ty.f32(0.0), new_highest)  # nothing seen yet: all weights 0
            shrink = prim.exp2_f32(highest[column] - base)
            highest[column] = new_highest
            logits[column] = prim.exp2_f32(logits[column] - base)
            logits[column + 2] = prim.exp2_f32(logits[column + 2] - base)
            weight_sum[column] = prim.fma_f32(weight_sum[column], shrink, logits[column] + logits[column + 2])
            with ch.for_(self.sizes.output_tiles, unroll=True) as tile:
                output[tile][column] = output[tile][column] * shrink
                output[tile][column + 2] = output[tile][column + 2] * shrink

    # -- values x weights ---------------------------------------------------------------------------------------------

    @ch.function
    def _add_values(
        self,
        rows: KeyRows,
        first_row: ch.Expr,
        valid: ch.Expr,
        key: ch.Expr,
        weights: Sequence[tuple[ch.Expr, ch.Expr]],
        queries: Queries,
        states: Sequence[WarpState],
    ) -> None:
        """output (dims x queries) += values^T * weights, of every column tile.

        Lane (r, t) reads 8 dims a slice of keys 2t, 2t + 1, 2t + 8 and 2t + 9: row r of tile i of a slice is number i
        of them, row r + 8 number i + 4. One dim of two neighbouring keys is a register of the operand. Keys that do not
        exist have weight 0; their rows are stale, and 0 * NaN is NaN: the last row that exists is read instead.
        """
        for first in range(0, self.sizes.slices, SLICES_AT_ONCE):
            slices = range(first, min(first + SLICES_AT_ONCE, self.sizes.slices))
            words = ch.array(ty.u32, len(slices), 4, 4)
            with ch.for_(4, unroll=True) as index:
                tile_key = ch.minimum(self.machine.lane % 4 * 2 + index % 2 + index // 2 * 8, valid - 1)
                self._read_values(rows, first_row + tile_key, slices, words, index)
                if self.variant.value_transform is not None:
                    self._transform_values(slices, words, index, key + tile_key, queries)
            with ch.for_(len(slices) * SLICE_TILES, unroll=True) as tile:
                number, in_slice = tile // SLICE_TILES, tile % SLICE_TILES
                low_early = self._pair(words[number], 0, in_slice)
                high_early = self._pair(words[number], 0, in_slice + SLICE_TILES)
                low_late = self._pair(words[number], 2, in_slice)
                high_late = self._pair(words[number], 2, in_slice + SLICE_TILES)
                operand = prim.make_u32x4(low_early, high_early, low_late, high_late)
                for state, (weights_low, weights_high) in zip(states, weights, strict=True):
                    prim.mma_bf16(state.output[first * SLICE_TILES + tile], operand, weights_low, weights_high)

    @staticmethod
    def _pair(words: ch.Expr, key: int, element: ch.Expr) -> ch.Expr:
        """One dim of two neighbouring keys, packed: even dims are low halves of a word, odd ones high halves."""
        selector = ch.select(element % 2 == 0, LOW_HALVES, HIGH_HALVES)
        packed: ch.Expr = prim.byte_permute(words[key][element // 2], words[key + 1][element // 2], selector)
        return packed

    @ch.function
    def _read_values(self, rows: KeyRows, row: ch.Expr, slices: range, words: Any, index: ch.Expr) -> None:
        """Units slices * r, slices * r + 1, ... of a value, as bf16 pairs into words[slice][number]."""
        if rows.codes:
            self._read_value_codes(rows, row, slices, words, index)
            return
        units = ch.reinterpret(ty.ptr(ty.u32x4), rows.values) + self._first_value_unit(row, slices)
        if len(slices) == 1:
            read = units[0]
            for word, member in enumerate("xyzw"):
                words[0][index][word] = getattr(read, member)
            return
        # Lanes t = 2 and 3 read the two units in the opposite order: half the bank conflicts.
        is_late = self.machine.lane % 4 // 2
        first = units[is_late]
        second = units[1 - is_late]
        self._cross(words[0][index], words[1][index], first, second, is_late != 0)

    def _first_value_unit(self, row: ch.Expr, slices: range) -> ch.Expr:
        """The first of the units of a value that a lane reads for some slices."""
        lane = self.sizes.value_lane(self.machine.lane)
        first: ch.Expr = row * self.sizes.head_units + lane * self.sizes.slices + slices.start
        return first

    @ch.inline
    def _read_value_codes(self, rows: KeyRows, row: ch.Expr, slices: range, words: Any, index: ch.Expr) -> None:
        element, count = {1: ty.u32x2, 2: ty.u32x4}[len(slices)], len(slices)
        of_row, of_lane = self.sizes.head_units // count, self.sizes.slices // count
        place = row * of_row + self.sizes.value_lane(self.machine.lane) * of_lane + slices.start // count
        read = ch.reinterpret(ty.ptr(element), rows.values)[place]
        for quarter, member in enumerate("xyzw"[: 2 * len(slices)]):
            self._widen(getattr(read, member), words[quarter // 2][index], quarter % 2 * 2)

    @ch.inline
    def _transform_values(self, slices: range, words: Any, index: ch.Expr, key: ch.Expr, queries: Queries) -> None:
        function = self.variant.value_transform
        assert function is not None
        for number, slice_ in enumerate(slices):
            first_dim = (self.sizes.value_lane(self.machine.lane) * self.sizes.slices + slice_) * 8
            for word in range(4):
                pair = words[number][index][word]

                def place(element: int, first_dim: Any = first_dim, word: int = word) -> At:
                    values = {
                        **queries.tokens,
                        "key": lambda: queries.offset + key,
                        "dim": lambda: first_dim + (word * 2 + element),
                    }
                    return self.at("value_transform", values)

                low = function(prim.bf16x2_low(pair), place(0))
                high = function(prim.bf16x2_high(pair), place(1))
                words[number][index][word] = prim.pack_bf16x2(low, high)

    # -- queries ------------------------------------------------------------------------------------------------------

    @ch.inline
    def transform_queries(self, near: ch.Expr, far: ch.Expr, unit: ch.Expr, values: Mapping[str, Any]) -> Any:
        """Units `unit` and `unit + head_units / 2` of a query after query_transform (u32x4 each)."""
        function = self.variant.query_transform
        assert function is not None
        new_near, new_far = [], []
        for word, member in enumerate("xyzw"):
            a, b = getattr(near, member), getattr(far, member)

            def place(element: int, word: int = word) -> At:
                dim = {"dim": lambda: unit * 8 + (word * 2 + element)}
                return self.at("query_transform", {**values, **dim})

            low: Pair = function((prim.bf16x2_low(a), prim.bf16x2_low(b)), place(0))
            high: Pair = function((prim.bf16x2_high(a), prim.bf16x2_high(b)), place(1))
            new_near.append(prim.pack_bf16x2(low[0], high[0]))
            new_far.append(prim.pack_bf16x2(low[1], high[1]))
        return prim.make_u32x4(*new_near), prim.make_u32x4(*new_far)
