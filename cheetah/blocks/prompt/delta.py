"""Gated DeltaNet in a pass: what sequences remember goes on over many tokens, token by token in float32.

Three phases behind the product, whose rows lie by token. *Mixing*, by all warps: queries, keys and values of the rows
of a token and of the three before it, which before a segment's first are those that its sequence's state keeps. The
*scan*: the block that keeps a share in decoding (`cheetah.blocks.delta`) has the share's part of the memory in
registers, takes what it needs of some tokens a stage through the ring, and goes from token to token; warps have
columns of their own and wait for nobody. Sums are added up as a step adds them up, and a token's bits do not depend on
how its prompt was cut into passes. The *norms* of heads, by all warps: what heads made, over its root mean square,
times weights and gates, as the next product takes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.delta.memory import LANES, OF_LANE, PAIRS, QUADS, DeltaParameters
from cheetah.blocks.delta.numbers import LENGTH_EPSILON, mixed_channel, silu, written_or_kept
from cheetah.blocks.prompt.cases import Finish, Sums
from cheetah.blocks.prompt.finish import Scales, exchanged_rows
from cheetah.blocks.prompt.keys import PassTokens, SegmentPlace
from cheetah.blocks.prompt.machine import GROUP_BYTES, UNIT_BYTES, PassMachine
from cheetah.blocks.prompt.ring import TileRing
from cheetah.lang import prim, ty
from cheetah.plan.delta import COLUMNS, DIMS, PARTS, TAPS
from cheetah.plan.delta_pass import OF_KEY_HEAD, DeltaPass
from cheetah.plan.formats import M_TILE_ROWS, VECTOR_COLUMNS
from cheetah.plan.prompt import GROUP_TOKENS

RUN_TOKENS = GROUP_TOKENS // 2
"""Neighbouring tokens that half a warp mixes; a multiple of those that are mixed with one, but for the first run."""
BEFORE = TAPS - 1


@dataclass(frozen=True, eq=False)
class StoreMixed(Finish):
    """The rows, rounded to bf16, [token][width]; scaled, if the input was normalised."""

    machine: PassMachine
    into: ch.Expr
    width: int
    scales: Scales

    def begin(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        self.scales.load(token_tile)

    @ch.function
    def finish(self, sums: Sums) -> None:
        # Four lanes have neighbouring rows of a token: half a sector of memory, and with the other word all of it.
        lane = self.machine.lane
        low, high = exchanged_rows(self.machine, *self.scales.scaled(sums))
        token = sums.group * GROUP_TOKENS + lane % 4 * 2 + lane // 4 % 2
        words = self.into + (ty.u64(token) * (self.width // 2) + ty.u64(sums.m_tile * (M_TILE_ROWS // 2) + lane // 8))
        words[0] = low
        words[M_TILE_ROWS // 4] = high


@dataclass(frozen=True, eq=False)
class _Run:
    """Neighbouring tokens of a segment whose channels half a warp mixes: number of the first in the segment, its column
    in the pass, tokens of the segment; the sequence's state in the layer (u32*), and whether it has none."""

    first: ch.Expr
    column: ch.Expr
    count: ch.Expr
    state: ch.Expr
    is_new: ch.Expr


@dataclass(frozen=True, eq=False)
class PassMemory:
    """The phases of one layer of Gated DeltaNet, `layer` counting those alone. mixed: the product's rows, pairs of bf16
    (u32); keys, values, numbers: see `cheetah.plan.delta_pass`; into: the input of the next product in token order
    (u8). columns: of the launch. pages: words of a page table."""

    machine: PassMachine
    ring: TileRing
    tokens: PassTokens
    plan: DeltaPass
    parameters: DeltaParameters
    layer: Any
    mixed: ch.Expr
    keys: ch.Expr
    values: ch.Expr
    numbers: ch.Expr
    into: ch.Expr
    columns: ch.Expr
    pages: int
    epsilon: float

    # -- mixing -----------------------------------------------------------------------------------------------------

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
            items = ch.const(ty.u32, (segment.count + (GROUP_TOKENS - 1)) // GROUP_TOKENS * each, name="items")
            # Segments may be short: the warps behind those that had the last one's items take the next one's.
            begin = (own + warps - before % warps) % warps
            with ch.for_(begin, items, warps, unroll=1, name="item") as item:
                head = ch.const(ty.u32, item % each, name="head")
                with ch.if_(head < heads.key_heads):
                    self._mix_keys(segment, segment_column, item // each, head)
                with ch.else_():
                    self._mix_values(segment, segment_column, item // each, head - heads.key_heads)
            before += items
            segment_column += self._columns(segment)

    def _columns(self, segment: SegmentPlace) -> Any:
        """Columns of a pass that a segment takes: it begins with a row of attention's operands."""
        return (segment.count + (2 * GROUP_TOKENS - 1)) // (2 * GROUP_TOKENS) * (2 * GROUP_TOKENS)

    @ch.inline
    def _run(self, segment: SegmentPlace, column: ch.Expr, group: ch.Expr, share: ch.Expr) -> _Run:
        """This half warp's tokens of a group of 8, and the share that keeps what is mixed with the first ones."""
        first = ch.const(ty.u32, group * GROUP_TOKENS + self.machine.lane // LANES * RUN_TOKENS, name="first_of_run")
        state = ch.const(ty.ptr_mut(ty.u32), self._state(segment, share), name="state")
        return _Run(first, column + first, segment.count, state, segment.start == 0)

    def _state(self, segment: SegmentPlace, share: ch.Expr) -> ch.Expr:
        """Where a share of the state of a segment's sequence lies."""
        heads = self.plan.heads
        slot = prim.load_constant_u32(self.parameters.slots + segment.table // self.pages)
        place = (ty.u64(slot) * len(heads.layers) + ty.u64(self.layer)) * heads.shares + ty.u64(share)
        state: ch.Expr = self.parameters.states + place * ch.named("SHARE_WORDS", heads.share_words)
        return state

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
        with ch.for_(RUN_TOKENS, unroll=1, name="of_run") as of_run:
            channels = ch.array(ty.f32, 2 * OF_LANE)
            self._mix_token(run, of_run, [row + lane * 4 for row, _ in quads], before, taps, channels)
            sums = ch.array(ty.f32, OF_KEY_HEAD, zero=True)
            for number in range(OF_LANE):
                query, key = channels[number], channels[OF_LANE + number]
                sums[0] = prim.fma_f32(key, key, sums[0])
                sums[1] = prim.fma_f32(query, query, sums[1])
                sums[2] = prim.fma_f32(key, query, sums[2])
            for mask in (1, 2, 4, 8):
                for place in range(OF_KEY_HEAD):
                    sums[place] = sums[place] + prim.shuffle_xor_f32(sums[place], mask)
            with ch.if_(run.first + of_run < run.count):
                token = ty.u64(key_head * self.machine.plan.tokens + run.column + of_run)
                for quad in range(2 * QUADS):
                    in_token = ty.u64(quad * (LANES * 4) + lane * 4)
                    self._store_four(self.keys + (token * (2 * DIMS) + in_token), channels, quad * 4)
                self._store_numbers(run.column + of_run, key_head, token, sums)

    @ch.inline
    def _store_numbers(self, column: ch.Expr, key_head: ch.Expr, token: ch.Expr, sums: Any) -> None:
        """Those of a token, a lane each."""
        heads, lane = self.plan.heads, self.machine.lane % LANES
        of_token = self.numbers + token * self.plan.numbers
        with ch.if_(lane == LANES - 1):
            for_key = ch.const(ty.f32, prim.rsqrt_f32(sums[0] + LENGTH_EPSILON), name="for_key")
            of_token[0] = for_key
            of_token[1] = prim.rsqrt_f32(sums[1] + LENGTH_EPSILON) * DIMS**-0.5
            of_token[2] = sums[2] * for_key
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
        with ch.for_(RUN_TOKENS, unroll=1, name="of_run") as of_run:
            channels = ch.array(ty.f32, OF_LANE)
            self._mix_token(run, of_run, [row for row, _ in quads], before, taps, channels)
            with ch.if_(run.first + of_run < run.count):
                for quad in range(QUADS):
                    of_part = (value_head * PARTS + (part + quad * of_quad)) * self.machine.plan.tokens
                    token = ty.u64(of_part + run.column + of_run)
                    place = self.values + (token * COLUMNS + ty.u64(lane % (COLUMNS // 4) * 4))
                    self._store_four(place, channels, quad * 4)

    def _word(self, column: Any, row: Any) -> Any:
        """Where a token's pair of rows lies (u64)."""
        return ty.u64(column) * (self.plan.heads.mixed_rows // 2) + ty.u64(row // 2)

    def _pairs(self, column: Any, row: Any) -> Any:
        """Four rows of a token (u32x2)."""
        return ch.reinterpret(ty.ptr(ty.u32x2), self.mixed + self._word(column, row))[0]

    @ch.inline
    def _begin(self, run: _Run, quads: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Of each quad of channels (first row, word of a state where its numbers of the tokens before lie) what comes
        before the run, [token][quad][pair], and its taps, [quad][pair]."""
        before = ch.array(ty.u32, BEFORE * len(quads) * 2, zero=True)
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
        """The channels of a token of the run; it is one of those before then."""
        words = 2 * len(rows)
        for number, row in enumerate(rows):
            pairs = ch.const(ty.u32x2, self._pairs(run.column + of_run, row), name="pairs")
            for pair, word in enumerate((pairs.x, pairs.y)):
                at = number * 2 + pair
                tokens = [before[token * words + at] for token in range(BEFORE)]
                for index, half in enumerate((prim.bf16x2_low, prim.bf16x2_high)):
                    raw = [half(one) for one in (*tokens, word)]
                    channels[at * 2 + index] = silu(mixed_channel(raw, taps[at], index))
                for token in range(BEFORE - 1):
                    before[token * words + at] = before[(token + 1) * words + at]
                before[(BEFORE - 1) * words + at] = word

    @ch.inline
    def _store_four(self, place: ch.Expr, numbers: Any, first: int) -> None:
        four = ch.var(ty.f32x4)
        for index, member in enumerate("xyzw"):
            setattr(four, member, numbers[first + index])
        ch.reinterpret(ty.ptr_mut(ty.f32x4), place)[0] = four

    # -- the scan ---------------------------------------------------------------------------------------------------

    def _shares(self) -> Any:
        """A loop over this block's shares: those that it has in decoding."""
        return ch.for_(self.machine.block, self.plan.heads.shares, self.machine.gpu.blocks, unroll=1, name="share")

    def _stages(self, segment: SegmentPlace) -> Any:
        return ch.for_(0, segment.count, self.plan.stage_tokens, unroll=1, name="first")

    @ch.function
    def copy_nothing(self) -> None:
        """In the weights role, which brings nothing here, but whose arrival is needed."""
        with self._shares(), ch.for_(self.tokens.segment_count, unroll=1, name="segment") as index:
            with self._stages(self.tokens.segment(index)):
                with self.ring.fill_weights(0, lanes=1):
                    pass
            self.ring.end_weights()

    @ch.function
    def copy_tokens(self) -> None:
        """In the activations role: what shares need of some tokens a stage."""
        heads, plan = self.plan.heads, self.plan
        with self._shares() as share:
            key_head = ch.const(ty.u32, share // PARTS, name="key_head")
            part, segment_column = share % PARTS, ch.var(ty.u32, 0)
            with ch.for_(self.tokens.segment_count, unroll=1, name="segment") as index:
                segment = self.tokens.segment(index)
                with self._stages(segment) as first:
                    count = ch.const(ty.u32, ch.minimum(segment.count - first, plan.stage_tokens), name="count")
                    token = ch.const(ty.u32, segment_column + first, name="token")
                    runs = [(self.keys, key_head)]
                    for head in range(heads.shared):
                        runs.append((self.values, (key_head * heads.shared + head) * PARTS + part))
                    runs.append((self.numbers, key_head))
                    with self.ring.fill_activations(count * sum(plan.run_bytes)) as (stage, barrier):
                        for (section, row), size, at in zip(runs, plan.run_bytes, plan.run_at, strict=True):
                            offset = ty.u64(row * self.machine.plan.tokens + token) * size
                            source = ch.reinterpret(ty.ptr(ty.u8), section) + offset
                            prim.bulk_copy(stage + at, source, count * size, barrier)
                segment_column += self._columns(segment)

    @property
    def _strips(self) -> int:
        """Columns of a value head that a thread has a part of."""
        return COLUMNS * LANES // (self.machine.plan.consumer_warps * 32)

    def _pieces(self) -> Iterator[tuple[int, Any]]:
        """(the first of four numbers in a thread's array, their place in a share, in 16-byte pieces)."""
        for head in range(self.plan.heads.shared):
            for strip in range(self._strips):
                column = self._column(strip) + head * COLUMNS
                for quad in range(QUADS):
                    first = ((head * self._strips + strip) * QUADS + quad) * 4
                    yield first, column * (DIMS // 4) + quad * LANES + self.machine.thread % LANES

    def _column(self, strip: int) -> Any:
        """Of a share's columns that this thread has a part of."""
        return self.machine.thread // LANES + strip * (COLUMNS // self._strips)

    @ch.function
    def scan(self) -> None:
        """In the consumer role: every share of the block, segment by segment."""
        heads = self.plan.heads
        with self._shares() as share:
            segment_column = ch.var(ty.u32, 0)
            with ch.for_(self.tokens.segment_count, unroll=1, name="segment") as index:
                segment = self.tokens.segment(index)
                state = ch.const(ty.ptr_mut(ty.u32), self._state(segment, share), name="state")
                memory = ch.array(ty.f32, heads.shared * self._strips * OF_LANE, zero=True)
                made = ch.array(ty.f32, heads.shared * self._strips)
                is_new = ch.const(ty.boolean, segment.start == 0, name="is_new")
                with ch.if_(is_new == False):  # noqa: E712 (a device comparison)
                    self._load(state, memory)
                with self._stages(segment) as first:
                    self.ring.wait()
                    stage = ch.const(
                        ty.ptr(ty.u8), self.ring.memory + self.ring.using.stage * self.ring.stage_bytes, name="stage"
                    )
                    count = ch.minimum(segment.count - first, self.plan.stage_tokens)
                    with ch.for_(count, unroll=1, name="token") as token:
                        self._take_token(stage, token, share, segment_column + first + token, memory, made)
                    for one in range(heads.shared * self._strips):
                        prim.wait_for_u32(prim.float_bits(made[one]))  # came of every load of the stage's last token
                    self.ring.release(self.ring.using.stage)
                    self.ring.using.advance()
                self._store(state, memory)
                self._keep_last(segment, segment_column, share, state, is_new)
                segment_column += self._columns(segment)

    @ch.inline
    def _load(self, state: ch.Expr, memory: Any) -> None:
        pieces = ch.reinterpret(ty.ptr(ty.u32x4), state)
        for first, place in self._pieces():
            words = ch.const(ty.u32x4, pieces[place], name="words")
            for index, member in enumerate("xyzw"):
                memory[first + index] = prim.bits_float(getattr(words, member))

    @ch.inline
    def _store(self, state: ch.Expr, memory: Any) -> None:
        pieces = ch.reinterpret(ty.ptr_mut(ty.u32x4), state)
        for first, place in self._pieces():
            words = [prim.float_bits(memory[first + index]) for index in range(4)]
            pieces[place] = prim.make_u32x4(*words)

    @ch.function
    def _take_token(
        self, stage: ch.Expr, token: ch.Expr, share: ch.Expr, column: ch.Expr, memory: Any, made: Any
    ) -> None:
        """A token of a stage: what the memory has under the query once it is changed, and that change. What is brought
        by its query's and key's lengths multiplies the sums."""
        plan, shared = self.plan, self.plan.heads.shared
        of_keys, *of_values, of_numbers = (
            ch.reinterpret(ty.ptr(ty.f32), stage + at) + token * (size // 4)
            for at, size in zip(plan.run_at, plan.run_bytes, strict=True)
        )
        query, key = self._of_lane(of_keys), self._of_lane(of_keys + DIMS)
        for_key = ch.const(ty.f32, of_numbers[0], name="for_key")
        for_query = ch.const(ty.f32, of_numbers[1], name="for_query")
        of_both = ch.const(ty.f32, of_numbers[2], name="of_both")
        for strip in range(self._strips):
            sums = self._sums(memory, query, key, strip)
            for head in range(shared):
                written = of_numbers[OF_KEY_HEAD + head]
                kept = ch.const(ty.f32, of_numbers[OF_KEY_HEAD + shared + head], name="kept")
                known = kept * for_key * sums[2 * head]
                value = of_values[head][self._column(strip)]
                change = ch.const(ty.f32, (value - known) * written, name="change")
                output = ch.const(ty.f32, for_query * (kept * sums[2 * head + 1] + of_both * change), name="output")
                made[head * self._strips + strip] = output
                with ch.if_(self.machine.thread % LANES == 0):
                    row = (share // PARTS * shared + head) * PARTS + share % PARTS
                    place = ty.u64(row * self.machine.plan.tokens + column) * COLUMNS + ty.u64(self._column(strip))
                    self.values[place] = output
                of_key = ch.const(ty.f32, change * for_key, name="of_key")
                for index in range(OF_LANE):
                    one = (head * self._strips + strip) * OF_LANE + index
                    memory[one] = prim.fma_f32(key[index], of_key, kept * memory[one])

    @ch.inline
    def _of_lane(self, numbers: ch.Expr) -> Any:
        """The lane's numbers of a query or key."""
        pieces = ch.reinterpret(ty.ptr(ty.f32x4), numbers)
        found = ch.array(ty.f32, OF_LANE)
        for quad in range(QUADS):
            four = ch.const(ty.f32x4, pieces[self.machine.thread % LANES + quad * LANES], name="four")
            for index, member in enumerate("xyzw"):
                found[quad * 4 + index] = getattr(four, member)
        return found

    @ch.inline
    def _sums(self, memory: Any, query: Any, key: Any, strip: int) -> Any:
        """Of each value head's column over all rows: times the key, then times the query."""
        shared = self.plan.heads.shared
        sums = ch.array(ty.f32, 2 * shared, zero=True)
        for index in range(OF_LANE):
            for head in range(shared):
                one = memory[(head * self._strips + strip) * OF_LANE + index]
                for number, factor in enumerate((key, query)):
                    place = 2 * head + number
                    sums[place] = prim.fma_f32(one, factor[index], sums[place])
        for mask in (1, 2, 4, 8):
            for place in range(2 * shared):
                sums[place] = sums[place] + prim.shuffle_xor_f32(sums[place], mask)
        return sums

    @ch.inline
    def _keep_last(
        self, segment: SegmentPlace, column: ch.Expr, share: ch.Expr, state: ch.Expr, is_new: ch.Expr
    ) -> None:
        """The last three tokens' rows of the share's channels, of which those before the segment are known already. A
        thread reads what it writes."""
        machine, heads = self.machine, self.plan.heads
        kept = ch.reinterpret(ty.ptr_mut(ty.u32x4), state + heads.memory_words)
        pairs = DIMS + heads.shared * PAIRS
        with ch.for_(machine.thread, pairs, machine.consumer_threads, unroll=1, name="pair") as pair:
            words = ch.array(ty.u32, 2 * BEFORE, zero=True)
            with ch.if_((is_new == False) & (segment.count < BEFORE)):  # noqa: E712 (a device comparison)
                known = ch.const(ty.u32x4, kept[pair], name="known")
                for index, member in enumerate("xyz"):
                    words[index] = getattr(known, member)
            row = self._row(share, pair)
            # Of the tokens before and the segment's last ones in order, three are left: the last.
            with ch.for_(ch.minimum(segment.count, BEFORE), unroll=1, name="last") as last:
                words[0] = words[1]
                words[1] = words[2]
                token = column + segment.count - ch.minimum(segment.count, BEFORE) + last
                words[2] = self.mixed[self._word(token, row)]
            kept[pair] = prim.make_u32x4(words[0], words[1], words[2], 0)

    @ch.inline
    def _row(self, share: ch.Expr, pair: ch.Expr) -> Any:
        """The first of the product's rows that a share's pair of channels is."""
        heads, half = self.plan.heads, DIMS // 2
        key_head, part = share // PARTS, share % PARTS
        of_key = key_head * DIMS + pair % half * 2 + ch.select(pair < half, ty.u32(0), ty.u32(heads.key_rows))
        number = pair - DIMS
        of_value = 2 * heads.key_rows + (key_head * heads.shared + number // PAIRS) * DIMS + part * COLUMNS
        row = ch.const(ty.u32, ch.select(pair < DIMS, of_key, of_value + number % PAIRS * 2), name="row")
        return row

    # -- norms ------------------------------------------------------------------------------------------------------

    @ch.function
    def normalise(self) -> None:
        """In the consumer role: a warp 8 tokens of a value head; four lanes have a token, each a unit of a K-tile."""
        machine, heads, lane = self.machine, self.plan.heads, self.machine.lane
        warps, k_tiles = machine.plan.consumer_warps, DIMS // VECTOR_COLUMNS
        first, all_warps = machine.block * warps + machine.warp, machine.gpu.blocks * warps
        items = self.columns // GROUP_TOKENS * heads.value_heads
        with ch.for_(first, items, all_warps, unroll=1, name="item") as item:
            head = ch.const(ty.u32, item % heads.value_heads, name="head")
            group = ch.const(ty.u32, item // heads.value_heads, name="group")
            column, unit = group * GROUP_TOKENS + lane // 4, lane % 4
            made, total = ch.array(ty.f32, DIMS // 4), ch.var(ty.f32, 0.0)
            for pair in range(DIMS // 8):
                part, in_part = head * PARTS + pair // 2, pair % 2 * 8 + unit * 2
                place = ty.u64(part * machine.plan.tokens + column) * COLUMNS + ty.u64(in_part)
                two = ch.const(ty.f32x2, ch.reinterpret(ty.ptr(ty.f32x2), self.values + place)[0], name="two")
                for index, one in enumerate((two.x, two.y)):
                    made[pair * 2 + index] = one
                    total.set(prim.fma_f32(one, one, total))
            for mask in (1, 2):
                total += prim.shuffle_xor_f32(total, mask)
            scale = ch.const(ty.f32, prim.rsqrt_f32(prim.fma_f32(total, 1.0 / DIMS, self.epsilon)), name="scale")
            with ch.if_(lane // 4 < self.tokens.group(group).count):
                for k_tile in range(k_tiles):
                    words = [self._gated(column, head, made, k_tile * 4 + index, scale) for index in range(4)]
                    block = ty.u64((head * k_tiles + k_tile) * machine.plan.groups + group) * GROUP_BYTES
                    place = self.into + (block + ty.u64(unit * UNIT_BYTES + lane // 4 * 16))
                    ch.reinterpret(ty.ptr_mut(ty.u32x4), place)[0] = prim.make_u32x4(*words)

    @ch.inline
    def _gated(self, column: ch.Expr, head: ch.Expr, made: Any, pair: int, scale: ch.Expr) -> ch.Expr:
        """Two columns of a head over its root mean square, times the norm's weights and the gates."""
        heads, dim = self.plan.heads, pair * 8 + self.machine.lane % 4 * 2
        gates = ch.const(ty.u32, self.mixed[self._word(column, heads.z_row + head * DIMS + dim)], name="gates")
        norm = self.parameters.numbers + (self.layer * heads.numbers + 2 * heads.value_heads + dim)
        values = []
        for index, half in enumerate((prim.bf16x2_low, prim.bf16x2_high)):
            gate = silu(half(gates)) * norm[index]
            values.append(made[pair * 2 + index] * gate * scale)
        word = ch.const(ty.u32, prim.pack_bf16x2(values[0], values[1]), name="word")
        return word
