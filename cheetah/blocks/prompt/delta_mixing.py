"""Mixing: queries, keys and values of the rows of four tokens, for the scan of a pass (`delta_scan`).

Keys and queries are brought to their lengths here, once for all shares. Of each token's key and query with the keys of
the tokens before it in its run of four the products are kept: by them the scan takes four tokens together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.delta.memory import LANES, OF_LANE, QUADS
from cheetah.blocks.delta.numbers import LENGTH_EPSILON, mixed_channel, silu, written_or_kept
from cheetah.blocks.prompt.delta import PassMemory
from cheetah.blocks.prompt.keys import SegmentPlace
from cheetah.lang import prim, ty
from cheetah.plan.delta import COLUMNS, DIMS, PARTS, TAPS
from cheetah.plan.delta_pass import OF_KEY_HEAD, RUN
from cheetah.plan.prompt import GROUP_TOKENS

BEFORE = TAPS - 1


@dataclass(frozen=True, eq=False)
class _Run:
    """Neighbouring tokens of a segment whose channels half a warp mixes: number of the first in the segment, its column
    in the pass, tokens of the segment; the sequence's state in the layer (u32*), and whether it has none."""

    first: ch.Expr
    column: ch.Expr
    count: ch.Expr
    state: ch.Expr
    is_new: ch.Expr


class Mixing(PassMemory):
    """The phase before the scan."""

    @ch.function
    def mix(self) -> None:
        """In the consumer role: a warp 8 tokens of a key head's query and key, or of a value head."""
        machine, heads = self.machine, self.plan.heads
        warps = machine.gpu.blocks * machine.plan.consumer_warps
        own = machine.block * machine.plan.consumer_warps + machine.warp
        each = heads.key_heads + heads.value_heads
        segment_column = ch.var(ty.u32, 0)
        before = ch.var(ty.u32, 0)
        with ch.for_(self.tokens.segment_count, unroll=1, name="segment") as index:
            segment = self.tokens.segment(index)
            groups = ch.const(ty.u32, (segment.count + (GROUP_TOKENS - 1)) // GROUP_TOKENS, name="groups")
            items = ch.const(ty.u32, groups * each, name="items")
            # Segments may be short: the warps behind those that had the last one's items take the next one's.
            begin = (own + warps - before % warps) % warps
            with ch.for_(begin, items, warps, unroll=1, name="item") as item:
                # Those of key heads, which take longer, come first: all warps have as many.
                head, group = ch.const(ty.u32, item // groups, name="head"), item % groups
                with ch.if_(head < heads.key_heads):
                    self._mix_keys(segment, segment_column, group, head)
                with ch.else_():
                    self._mix_values(segment, segment_column, group, head - heads.key_heads)
            before += items
            segment_column += self._columns(segment)

    @ch.inline
    def _run(self, segment: SegmentPlace, column: ch.Expr, group: ch.Expr, share: ch.Expr) -> _Run:
        """This half warp's tokens of a group of 8, and the share that keeps what is mixed with the first ones."""
        first = ch.const(ty.u32, group * GROUP_TOKENS + self.machine.lane // LANES * RUN, name="first_of_run")
        state = ch.const(ty.ptr_mut(ty.u32), self._state(segment, share), name="state")
        return _Run(first, column + first, segment.count, state, segment.start == 0)

    @ch.function
    def _mix_keys(self, segment: SegmentPlace, column: ch.Expr, group: ch.Expr, key_head: ch.Expr) -> None:
        """A key head's queries and keys, and the numbers of its heads."""
        heads, lane = self.plan.heads, self.machine.lane % LANES
        run = self._run(segment, column, group, key_head * PARTS)
        rows = [key_head * DIMS + first for first in (0, heads.key_rows)]
        kept_at = [heads.memory_words + first * 2 for first in (0, DIMS)]  # two words a channel
        quads = [
            (row + quad * (LANES * 4), at + quad * (LANES * 8))
            for row, at in zip(rows, kept_at, strict=True)
            for quad in range(QUADS)
        ]
        before, taps = self._begin(run, [(row + lane * 4, at + lane * 8) for row, at in quads])
        earlier = ch.array(ty.f32, (RUN - 1) * OF_LANE, zero=True)
        with ch.for_(RUN, unroll=1, name="of_run") as of_run:
            channels = ch.array(ty.f32, 2 * OF_LANE)
            self._mix_token(run, of_run, [row + lane * 4 for row, _ in quads], before, taps, channels)
            self._bring_to_length(channels)
            products = self._products(channels, earlier)
            with ch.if_(run.first + of_run < run.count):
                token = ty.u64(key_head * self.machine.plan.tokens + run.column + of_run)
                for quad in range(2 * QUADS):
                    in_token = ty.u64(quad * (LANES * 4) + lane * 4)
                    self._store_four(self.keys + (token * (2 * DIMS) + in_token), channels, quad * 4)
                self._store_numbers(run.column + of_run, key_head, token, products)

    @ch.inline
    def _bring_to_length(self, channels: Any) -> None:
        """A query and a key, over theirs."""
        for first, times in ((0, DIMS**-0.5), (OF_LANE, 1.0)):
            total = ch.var(ty.f32, 0.0)
            for number in range(OF_LANE):
                total.set(prim.fma_f32(channels[first + number], channels[first + number], total))
            for mask in (1, 2, 4, 8):
                total += prim.shuffle_xor_f32(total, mask)
            scale = ch.const(ty.f32, prim.rsqrt_f32(total + LENGTH_EPSILON) * times, name="scale")
            for number in range(OF_LANE):
                channels[first + number] = channels[first + number] * scale

    @ch.inline
    def _products(self, channels: Any, earlier: Any) -> Any:
        """A token's numbers of its key head; its key is the nearest of the earlier ones then."""
        products = ch.array(ty.f32, OF_KEY_HEAD, zero=True)
        for number in range(OF_LANE):
            query, key = channels[number], channels[OF_LANE + number]
            products[0] = prim.fma_f32(key, query, products[0])
            for before in range(RUN - 1):
                one = earlier[before * OF_LANE + number]
                products[1 + before] = prim.fma_f32(one, key, products[1 + before])
                products[RUN + before] = prim.fma_f32(one, query, products[RUN + before])
            for before in range(RUN - 2, 0, -1):
                earlier[before * OF_LANE + number] = earlier[(before - 1) * OF_LANE + number]
            earlier[number] = key
        for mask in (1, 2, 4, 8):
            for place in range(OF_KEY_HEAD - 1):
                products[place] = products[place] + prim.shuffle_xor_f32(products[place], mask)
        return products

    @ch.inline
    def _store_numbers(self, column: ch.Expr, key_head: ch.Expr, token: ch.Expr, products: Any) -> None:
        """Those of a token, those of value heads a lane each."""
        heads, lane = self.plan.heads, self.machine.lane % LANES
        of_token = self.numbers + token * self.plan.numbers
        with ch.if_(lane == LANES - 1):
            for first in range(0, OF_KEY_HEAD, 4):
                self._store_four(of_token + first, products, first)
        with ch.if_(lane < 2 * heads.shared):
            is_written = lane < heads.shared
            value_head = ch.const(ty.u32, key_head * heads.shared + lane % heads.shared, name="value_head")
            row = ch.const(ty.u32, value_head + ch.select(is_written, ty.u32(heads.b_row), ty.u32(heads.a_row)))
            pair = ch.const(ty.u32, self.mixed[self._word(column, row)], name="pair")
            raw = ch.select(row % 2 == 0, prim.bf16x2_low(pair), prim.bf16x2_high(pair))
            of_layer = self.parameters.numbers + (self.layer * heads.numbers + value_head)
            rate, bias = of_layer[0], of_layer[heads.value_heads]
            of_token[lane + OF_KEY_HEAD] = written_or_kept(raw, is_written, rate, bias)

    @ch.function
    def _mix_values(self, segment: SegmentPlace, column: ch.Expr, group: ch.Expr, value_head: ch.Expr) -> None:
        """A value head's values."""
        heads, lane = self.plan.heads, self.machine.lane % LANES
        # Four lanes have a part's columns, which its share keeps behind those of its query and key.
        part = ch.const(ty.u32, lane // (COLUMNS // 4), name="part")
        share = value_head // heads.shared * PARTS
        run = self._run(segment, column, group, share)
        in_share = 2 * DIMS + value_head % heads.shared * COLUMNS + lane % (COLUMNS // 4) * 4
        row = 2 * heads.key_rows + value_head * DIMS + lane * 4
        of_quad = LANES * 4 // COLUMNS
        quads = [
            (row + quad * (LANES * 4), (part + quad * of_quad) * heads.share_words + heads.memory_words + in_share * 2)
            for quad in range(QUADS)
        ]
        before, taps = self._begin(run, quads)
        with ch.for_(RUN, unroll=1, name="of_run") as of_run:
            channels = ch.array(ty.f32, OF_LANE)
            self._mix_token(run, of_run, [row for row, _ in quads], before, taps, channels)
            with ch.if_(run.first + of_run < run.count):
                for quad in range(QUADS):
                    of_part = (value_head * PARTS + (part + quad * of_quad)) * self.machine.plan.tokens
                    token = ty.u64(of_part + run.column + of_run)
                    place = self.values + (token * COLUMNS + ty.u64(lane % (COLUMNS // 4) * 4))
                    self._store_four(place, channels, quad * 4)

    def _pairs(self, column: Any, row: Any) -> Any:
        """Four rows of a token (u32x2)."""
        return ch.reinterpret(ty.ptr(ty.u32x2), self.mixed + self._word(column, row))[0]

    @ch.inline
    def _begin(self, run: _Run, quads: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Of each quad of channels (first row, word of a state where its numbers of the tokens before lie) what comes
        before the run, [token][quad][pair], with its first token behind it, and its taps, [quad][pair]."""
        before = ch.array(ty.u32, (BEFORE + 1) * len(quads) * 2, zero=True)
        self._ask(run.column, [row for row, _ in quads], before, BEFORE * len(quads) * 2)
        taps = ch.array(ty.u32x4, len(quads) * 2)
        of_layer = self.parameters.taps + self.layer * (self.plan.heads.channels * TAPS)
        for number, (row, kept_at) in enumerate(quads):
            for pair in range(2):
                taps[number * 2 + pair] = prim.load_constant_u32x4(of_layer + (row + pair * 2) * TAPS)
            with ch.if_(run.first > 0):
                for token in range(BEFORE):
                    pairs = ch.const(ty.u32x2, self._pairs(run.column - (BEFORE - token), row), name="pairs")
                    for pair, word in enumerate((pairs.x, pairs.y)):
                        before[(token * len(quads) + number) * 2 + pair] = word
            with ch.else_(), ch.if_(run.is_new == False):  # noqa: E712 (a device comparison)
                kept = ch.reinterpret(ty.ptr(ty.u32x4), run.state + kept_at)
                for pair in range(2):
                    words = ch.const(ty.u32x4, kept[pair], name="words")
                    for token, member in enumerate("xyz"):
                        before[(token * len(quads) + number) * 2 + pair] = getattr(words, member)
        return before, taps

    @ch.inline
    def _mix_token(self, run: _Run, of_run: ch.Expr, rows: list[Any], before: Any, taps: Any, channels: Any) -> None:
        """The channels of a token of the run; it is one of those before then. The next one's rows are on their way
        while those of this one are mixed: `before` has them behind those of the tokens before."""
        words, last = 2 * len(rows), BEFORE * 2 * len(rows)
        own = ch.array(ty.u32, words)
        for at in range(words):
            own[at] = before[last + at]
        self._ask(run.column + ch.minimum(of_run + 1, RUN - 1), rows, before, last)
        for at in range(words):
            tokens = [before[token * words + at] for token in range(BEFORE)]
            for index, half in enumerate((prim.bf16x2_low, prim.bf16x2_high)):
                raw = [half(one) for one in (*tokens, own[at])]
                channels[at * 2 + index] = silu(mixed_channel(raw, taps[at], index))
            for token in range(BEFORE - 1):
                before[token * words + at] = before[(token + 1) * words + at]
            before[(BEFORE - 1) * words + at] = own[at]

    @ch.inline
    def _ask(self, column: Any, rows: list[Any], into: Any, first: int) -> None:
        """A token's rows, four from each of `rows` on."""
        for number, row in enumerate(rows):
            pairs = ch.const(ty.u32x2, self._pairs(column, row), name="pairs")
            for pair, word in enumerate((pairs.x, pairs.y)):
                into[first + number * 2 + pair] = word

    @ch.inline
    def _store_four(self, place: ch.Expr, numbers: Any, first: int) -> None:
        four = ch.var(ty.f32x4)
        for index, member in enumerate("xyzw"):
            setattr(four, member, numbers[first + index])
        ch.reinterpret(ty.ptr_mut(ty.f32x4), place)[0] = four
