"""Gated DeltaNet: the memory of every sequence, a matrix a value head, read, changed and written by who keeps it.

A block keeps some shares of a layer (`cheetah.plan.delta`), always the same ones. A share is 16 columns of the memory
of each value head that belongs to one key head; a thread has 8 numbers of a column, the same of each head, in registers
while the columns of a sequence pass one after another, and reads and writes the same places of global memory in every
step. So no other thread ever reads or writes them, but in another launch.

A column's numbers are mixed of its own raw rows and of those of the three tokens before, which each share keeps for
itself. The sums over a memory's rows for the key and for the query are taken at once, of the raw key and query: what
they are divided by multiplies the sums. Where tokens are drafted, what columns change is stored by the next step, of
those that were right: see `records`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.advance import ByAcceptance
from cheetah.blocks.columns import NUMBER, POSITION, SEQUENCE, STOPPED, TOTAL, Columns, fragment_word
from cheetah.blocks.delta.numbers import LENGTH_EPSILON, mixed_channel, silu, written_or_kept
from cheetah.blocks.delta.records import Records
from cheetah.blocks.exchange import Published
from cheetah.blocks.timeline import NO_TIMELINE, Timeline
from cheetah.lang import prim, ty
from cheetah.plan.delta import COLUMNS, DIMS, MOST_SHARED, PARTS, TAPS, DeltaHeads

LANES = 16
"""That share a column of the memory: 8 of its 128 numbers each."""
OF_LANE = DIMS // LANES
QUADS = OF_LANE // 4
"""16-byte pieces of a lane, LANES apart: so the lanes' pieces lie side by side."""
PAIRS = COLUMNS // 2
KEY_PAIRS = DIMS
"""Pairs of channels of a key head's query and key."""
LINE_BYTES = 128
SUMS = 3
"""Of key and query: of the squares of either, and of their products; behind them two of each value head."""


@dataclass(frozen=True, eq=False)
class DeltaParameters:
    """taps: bf16 [layers][channels][TAPS], the newest last. numbers: f32 [layers], as `DeltaHeads.numbers` says.
    states: u32 [slots][layers][shares][words]; slots: which of them each sequence has. records: where tokens are
    drafted, see `Records`."""

    taps: ch.Expr
    numbers: ch.Expr
    states: ch.Expr
    slots: ch.Expr
    records: ch.Expr | None = None


@dataclass(frozen=True, eq=False)
class _Share:
    """What a block works on: the columns `part` of the value heads of `key_head`, in a layer of Gated DeltaNet."""

    number: Any
    key_head: Any
    part: Any
    layer: Any


class DeltaMemory:
    """The phase, in the consumer role."""

    def __init__(
        self, columns: Columns, heads: DeltaHeads, parameters: DeltaParameters, timeline: Timeline = NO_TIMELINE
    ) -> None:
        self.machine, self.columns, self.heads, self.parameters = columns.machine, columns, heads, parameters
        self.timeline = timeline
        self.records: Records | None = None
        if parameters.records is not None:
            assert isinstance(columns.advance, ByAcceptance)
            self.records = Records(columns, heads, parameters.records, columns.advance)
        self.channel_pairs = KEY_PAIRS + heads.shared * PAIRS
        threads = self.machine.plan.consumer_warps * 32
        self.gates_from = -(-self.channel_pairs // 32) * 32
        self.numbers_from = self.gates_from + -(-heads.shared * PAIRS // 32) * 32
        self.items = self.numbers_from + 2 * heads.shared
        """Numbered by who brings them, kinds in warps of their own: pairs of channels, of gates, and single numbers."""
        self.rounds = -(-self.items // threads)
        self.strips = COLUMNS * LANES // threads
        """Columns of a value head that a thread has a part of."""

    @ch.function
    def prefetch(self, layer: Any) -> None:
        """What the phase will read of the block's shares into L2, a line a thread."""
        machine, heads = self.machine, self.heads
        lines = -(-heads.share_words * 4 // LINE_BYTES)
        with ch.for_(machine.block, heads.shares, machine.gpu.blocks, unroll=1, name="share") as number:
            share = _Share(number, number // PARTS, number % PARTS, layer)
            with ch.for_(self._count, unroll=1, name="column") as column:
                sequence = ch.const(ty.u32, self.columns.state(column, SEQUENCE), name="sequence")
                state = ch.reinterpret(ty.ptr(ty.u8), self._state(share, sequence))
                with ch.if_(self._ends(column, sequence)[0]):
                    with ch.for_(machine.thread, lines, machine.consumer_threads, unroll=1, name="line") as line:
                        prim.prefetch_l2(state + line * LINE_BYTES)

    @ch.inline
    def remember(self, step: Any, layer: Any, reads: Published, makes: Published, squares: Published) -> None:
        """Every share of the block, column by column. layer: its number among those of Gated DeltaNet."""
        machine, heads = self.machine, self.heads
        with ch.for_(machine.block, heads.shares, machine.gpu.blocks, unroll=1, name="share") as number:
            share = _Share(number, number // PARTS, number % PARTS, layer)
            memory = ch.array(ty.f32, self.strips * heads.shared * OF_LANE)
            known, taps = ch.array(ty.u32x4, self.rounds), ch.array(ty.u32x4, self.rounds)
            self._load_constants(share, known, taps)
            with ch.for_(self._count, unroll=1, name="column") as column:
                sequence = ch.const(ty.u32, self.columns.state(column, SEQUENCE), name="sequence")
                is_first, is_last = self._ends(column, sequence)
                state = ch.const(ty.ptr_mut(ty.u32), self._state(share, sequence), name="state")
                record = None
                with ch.if_(is_first):
                    if self.records is None:
                        self._load(state, self._is_new(column), memory, known)
                    else:
                        self._catch_up(share, state, column, sequence, step, memory, known)
                if self.records is not None:
                    own = self.records.of(share.layer, share.number, column)
                    record = ch.const(ty.ptr_mut(ty.u32), own, name="record")
                is_live = self._is_live(column)
                self._bring(share, column, known, taps, is_live, reads, record)
                machine.meet()
                self.timeline.stamp_here("ready")
                self._work(memory, is_live, record)
                machine.meet()
                self._publish(share, column, makes, squares)
                if self.records is None:
                    with ch.if_(is_last):
                        self._store(state, memory, known)
        machine.meet()  # what has been published lay where the next phase brings its input

    @ch.function
    def settle(self, step: Any) -> None:
        """Behind the last step, in the consumer role: what columns of that step would change, whose tokens count."""
        machine, heads = self.machine, self.heads
        with (
            ch.for_(len(heads.layers), unroll=1, name="layer") as layer,
            ch.for_(machine.block, heads.shares, machine.gpu.blocks, unroll=1, name="share") as number,
            ch.for_(self._count, unroll=1, name="column") as column,
        ):
            share = _Share(number, number // PARTS, number % PARTS, layer)
            sequence = ch.const(ty.u32, self.columns.record(column, "sequence"), name="sequence")
            with ch.if_(self._ends(column, sequence)[0]):
                memory = ch.array(ty.f32, self.strips * heads.shared * OF_LANE)
                known = ch.array(ty.u32x4, self.rounds)
                state = ch.const(ty.ptr_mut(ty.u32), self._state(share, sequence), name="state")
                self._catch_up(share, state, column, sequence, step + 1, memory, known)

    @ch.function
    def _catch_up(
        self, share: _Share, state: ch.Expr, column: ch.Expr, sequence: Any, step: Any, memory: Any, known: Any
    ) -> None:
        """A sequence's share into registers, with what the records of the step before say of tokens that count; if
        there are some, it is stored so. column: the sequence's first."""
        assert self.records is not None
        behind, more = self.records.counted(sequence, step)
        self._load(state, behind == 0, memory, known)
        with ch.for_(more, unroll=1, name="number") as number:
            record = self.records.of(share.layer, share.number, column + number)
            self._change_by(ch.const(ty.ptr_mut(ty.u32), record, name="record"), memory, known)
        with ch.if_(more != 0):
            self._store(state, memory, known)

    @ch.inline
    def _change_by(self, record: ch.Expr, memory: Any, known: Any) -> None:
        """What a column would have done, as its record says."""
        assert self.records is not None
        records, heads = self.records, self.heads
        key, of_strip = self._of_lane(records.key(record)), self.machine.plan.consumer_warps * 32 // LANES
        for head in range(heads.shared):
            kept = ch.const(ty.f32, records.kept(record)[head], name="kept")
            for strip in range(self.strips):
                place = self.machine.thread // LANES + (strip * of_strip + head * COLUMNS)
                of_key = ch.const(ty.f32, records.written(record)[place], name="of_key")
                self._change(memory, head * self.strips + strip, key, of_key, kept)
        for number, item in self._items():
            with ch.if_(item < self.channel_pairs):
                before = known[number]
                known[number] = prim.make_u32x4(before.y, before.z, records.rows(record)[item], 0)

    def _change(self, memory: Any, strip: int, key: Any, of_key: ch.Expr, kept: ch.Expr) -> None:
        """A lane's numbers of a column, of one head."""
        for index in range(OF_LANE):
            one = strip * OF_LANE + index
            memory[one] = prim.fma_f32(key[index], of_key, kept * memory[one])

    def _is_new(self, column: ch.Expr) -> ch.Expr:
        is_new: ch.Expr = self.columns.state(column, POSITION) == 0
        return is_new

    @property
    def _count(self) -> Any:
        return 1 if self.columns.limit == 1 else self.columns.count

    def _ends(self, column: ch.Expr, sequence: ch.Expr) -> tuple[Any, Any]:
        """Whether a column is its sequence's first and last one in the step."""
        if self.columns.limit == 1:
            return True, True
        number = ch.const(ty.u32, self.columns.record(column, "number"), name="number")
        return number == 0, number + 1 == self.columns.sequence(sequence, "per_step")

    @ch.inline
    def _is_live(self, column: ch.Expr) -> Any:
        """Whether the column is a token of its sequence: what is computed for nobody is not remembered."""
        has_token = self.columns.state(column, NUMBER) < self.columns.state(column, TOTAL)
        is_live = ch.const(ty.boolean, has_token & (self.columns.state(column, STOPPED) == 0))
        return is_live

    def _state(self, share: _Share, sequence: ch.Expr) -> ch.Expr:
        """Where a share of a sequence's state lies."""
        heads = self.heads
        slot = prim.load_constant_u32(self.parameters.slots + sequence)
        place = (ty.u64(slot) * len(heads.layers) + ty.u64(share.layer)) * heads.shares + ty.u64(share.number)
        state: ch.Expr = self.parameters.states + place * ch.named("SHARE_WORDS", heads.share_words)
        return state

    # -- what a share has, between global memory and registers --------------------------------------------------------

    def _pieces(self) -> Iterator[tuple[int, Any]]:
        """(the first of four numbers in a thread's array, their place in a share, in 16-byte pieces)."""
        thread, of_strip = self.machine.thread, self.machine.plan.consumer_warps * 32 // LANES
        for head in range(self.heads.shared):
            for strip in range(self.strips):
                column = thread // LANES + (head * COLUMNS + strip * of_strip)
                for quad in range(QUADS):
                    first = ((head * self.strips + strip) * QUADS + quad) * 4
                    yield first, column * (DIMS // 4) + quad * LANES + thread % LANES

    def _items(self) -> Iterator[tuple[int, ch.Expr]]:
        """(round, item) of each that a thread brings."""
        threads = self.machine.consumer_threads
        for number in range(self.rounds):
            yield number, ch.const(ty.u32, self.machine.thread + number * threads, name="item")

    def _kept(self, state: ch.Expr, item: ch.Expr) -> ch.Expr:
        """Where (u32x4*) a pair's numbers of the tokens before lie."""
        return ch.reinterpret(ty.ptr_mut(ty.u32x4), state + self.heads.memory_words) + item

    @ch.function
    def _load_constants(self, share: _Share, known: Any, taps: Any) -> None:
        """Of pairs of channels their taps, of gates the weights of the heads' norm, of numbers what they go with."""
        heads, numbers = self.heads, self.parameters.numbers + share.layer * self.heads.numbers
        for number, item in self._items():
            with ch.if_(item < self.channel_pairs):
                row = share.layer * heads.channels + self._row(share, item)
                taps[number] = prim.load_constant_u32x4(self.parameters.taps + row * TAPS)
            with ch.else_(), ch.if_(item < self.items):
                is_gate = item < self.numbers_from
                of_norm = 2 * heads.value_heads + share.part * COLUMNS + (item - self.gates_from) % PAIRS * 2
                of_head = share.key_head * heads.shared + (item - self.numbers_from) % heads.shared
                first = ch.const(ty.u32, ch.select(is_gate, of_norm, of_head), name="first")
                second = first + ch.select(is_gate, ty.u32(1), ty.u32(heads.value_heads))
                words = [prim.load_constant_u32(numbers + place) for place in (first, second)]
                known[number] = prim.make_u32x4(*words, 0, 0)

    @ch.function
    def _load(self, state: ch.Expr, is_first: ch.Expr, memory: Any, known: Any) -> None:
        """A sequence's share into registers; nothing at all before its first token, whatever lies there."""
        pieces = ch.reinterpret(ty.ptr_mut(ty.u32x4), state)
        is_new = ch.const(ty.boolean, is_first, name="is_new")
        for first, place in self._pieces():
            words = self._unless(is_new, pieces + place)
            for index, member in enumerate("xyzw"):
                memory[first + index] = prim.bits_float(getattr(words, member))
        for number, item in self._items():
            with ch.if_(item < self.channel_pairs):
                known[number] = self._unless(is_new, self._kept(state, item))

    @ch.inline
    def _unless(self, is_new: ch.Expr, place: ch.Expr) -> ch.Expr:
        """Four words of memory, or nothing."""
        words = ch.var(ty.u32x4, prim.make_u32x4(0, 0, 0, 0))
        with ch.if_(is_new == False):  # noqa: E712 (a device comparison)
            words.set(place[0])
        return words

    @ch.function
    def _store(self, state: ch.Expr, memory: Any, known: Any) -> None:
        """It, as the sequence's last column of the step leaves it."""
        pieces = ch.reinterpret(ty.ptr_mut(ty.u32x4), state)
        for first, place in self._pieces():
            words = [prim.float_bits(memory[first + index]) for index in range(4)]
            pieces[place] = prim.make_u32x4(*words)
        for number, item in self._items():
            with ch.if_(item < self.channel_pairs):
                self._kept(state, item)[0] = known[number]

    # -- a column -------------------------------------------------------------------------------------------------

    @ch.inline
    def _row(self, share: _Share, item: ch.Expr) -> ch.Expr:
        """The first of the two rows of the product that an item is; of a single number its row."""
        heads = self.heads
        of_key = share.key_head * DIMS + item % (KEY_PAIRS // 2) * 2
        of_key = of_key + ch.select(item < KEY_PAIRS // 2, ty.u32(0), ty.u32(heads.key_rows))
        number = ch.select(item < self.gates_from, item - KEY_PAIRS, item - self.gates_from)
        first = ch.select(item < self.gates_from, ty.u32(2 * heads.key_rows), ty.u32(heads.z_row))
        value_head = share.key_head * heads.shared + number // PAIRS
        of_value = first + value_head * DIMS + share.part * COLUMNS + number % PAIRS * 2
        single = item - self.numbers_from
        of_number = share.key_head * heads.shared + ch.select(
            single < heads.shared, single + heads.b_row, single + (heads.a_row - heads.shared)
        )
        row = ch.select(item < KEY_PAIRS, of_key, ch.select(item < self.numbers_from, of_value, of_number))
        return row

    @ch.function
    def _bring(
        self,
        share: _Share,
        column: ch.Expr,
        known: Any,
        taps: Any,
        is_live: ch.Expr,
        reads: Published,
        record: ch.Expr | None,
    ) -> None:
        """A column's rows, mixed: query, key and values of the share, their gates, and how much is kept and written."""
        heads, mixed = self.heads, self.machine.region("delta_mixed", ty.f32)
        gates, numbers = mixed + heads.share_channels, mixed + (heads.share_channels + heads.shared * COLUMNS)
        for number, item in self._items():
            is_channel = item < self.channel_pairs
            is_gate = (item >= self.gates_from) & (item < self.gates_from + heads.shared * PAIRS)
            is_number = (item >= self.numbers_from) & (item < self.items)
            with ch.if_(is_channel | is_gate | is_number):
                row = ch.const(ty.u32, self._row(share, item), name="row")
                word = ch.const(ty.u32, self._word(reads, column, row), name="word")
                before = known[number]
                with ch.if_(is_channel):
                    for index, half in enumerate((prim.bf16x2_low, prim.bf16x2_high)):
                        tokens = [half(one) for one in (before.x, before.y, before.z, word)]
                        mixed[item * 2 + index] = silu(mixed_channel(tokens, taps[number], index))
                    with ch.if_(is_live):
                        known[number] = prim.make_u32x4(before.y, before.z, word, 0)
                        if self.records is not None and record is not None:
                            self.records.rows(record)[item] = word
                with ch.if_(is_gate):
                    place = (item - self.gates_from) * 2
                    gates[place] = silu(prim.bf16x2_low(word)) * prim.bits_float(before.x)
                    gates[place + 1] = silu(prim.bf16x2_high(word)) * prim.bits_float(before.y)
                with ch.if_(is_number):
                    raw = ch.select(row % 2 == 0, prim.bf16x2_low(word), prim.bf16x2_high(word))
                    numbers[item - self.numbers_from] = written_or_kept(
                        *(raw, item < self.numbers_from + heads.shared),
                        *(prim.bits_float(before.x), prim.bits_float(before.y)),
                    )

    @ch.inline
    def _word(self, reads: Published, column: ch.Expr, row: ch.Expr) -> ch.Expr:
        """The pair of rows that has a row."""
        place = column * (self.heads.mixed_rows // 2) + row // 2
        unit = reads.exchange.read4(reads.name, place // 4, reads.epoch)
        low = ch.select(place % 2 == 0, unit.x, unit.y)
        high = ch.select(place % 2 == 0, unit.z, unit.w)
        word = ch.select(place % 4 < 2, low, high)
        return word

    @ch.function
    def _work(self, memory: Any, is_live: ch.Expr, record: ch.Expr | None) -> None:
        """What the memory has under the query once it is changed, and that change."""
        machine, heads = self.machine, self.heads
        mixed, made = machine.region("delta_mixed", ty.f32), machine.region("delta_made", ty.f32)
        query, key = self._of_lane(mixed), self._of_lane(mixed + DIMS)
        values, count = 2 * DIMS, heads.shared * COLUMNS
        of_strip = machine.plan.consumer_warps * 32 // LANES
        for strip in range(self.strips):
            column = machine.thread // LANES + strip * of_strip
            sums = self._sums(memory, query, key, strip)
            for_key = prim.rsqrt_f32(sums[0] + LENGTH_EPSILON)
            for_query = prim.rsqrt_f32(sums[1] + LENGTH_EPSILON) * DIMS**-0.5
            for head in range(heads.shared):
                place = ch.const(ty.u32, column + head * COLUMNS, name="place")
                written = mixed[values + 2 * count + head]
                kept = ch.const(ty.f32, mixed[values + 2 * count + heads.shared + head], name="kept")
                known = kept * for_key * sums[SUMS + 2 * head]
                change = ch.const(ty.f32, (mixed[place + values] - known) * written, name="change")
                under_query = kept * sums[SUMS + 2 * head + 1] + sums[2] * for_key * change
                output = ch.const(ty.f32, for_query * under_query, name="output")
                with ch.if_(machine.thread % LANES == 0):
                    made[place] = output * mixed[place + (values + count)]
                    made[place + count] = output * output
                with ch.if_(is_live):
                    of_key = ch.const(ty.f32, change * for_key, name="of_key")
                    self._change(memory, head * self.strips + strip, key, of_key, kept)
                    if self.records is not None and record is not None:
                        with ch.if_(machine.thread % LANES == 0):
                            self.records.written(record)[place] = of_key
                            if not strip:
                                with ch.if_(machine.thread == 0):
                                    self.records.kept(record)[head] = kept
        if self.records is not None and record is not None:
            with ch.if_(is_live & (machine.thread < LANES)):
                self.records.keep_key(record, key, machine.thread, [quad * LANES for quad in range(QUADS)])

    @ch.inline
    def _of_lane(self, numbers: ch.Expr) -> ch.Expr:
        """The lane's numbers of a query or key."""
        pieces = ch.reinterpret(ty.ptr_mut(ty.u32x4), numbers)
        found = ch.array(ty.f32, OF_LANE)
        for quad in range(QUADS):
            words = ch.const(ty.u32x4, pieces[self.machine.thread % LANES + quad * LANES], name="words")
            for index, member in enumerate("xyzw"):
                found[quad * 4 + index] = prim.bits_float(getattr(words, member))
        return found

    @ch.inline
    def _sums(self, memory: Any, query: Any, key: Any, strip: int) -> ch.Expr:
        """Over all rows: of the key's squares, the query's, and the products of both; of each value head's column times
        the key, then times the query."""
        heads = self.heads
        sums = ch.array(ty.f32, SUMS + 2 * heads.shared, zero=True)
        for index in range(OF_LANE):
            sums[0] = prim.fma_f32(key[index], key[index], sums[0])
            sums[1] = prim.fma_f32(query[index], query[index], sums[1])
            sums[2] = prim.fma_f32(key[index], query[index], sums[2])
            for head in range(heads.shared):
                one = memory[(head * self.strips + strip) * OF_LANE + index]
                for number, factor in enumerate((key, query)):
                    place = SUMS + 2 * head + number
                    sums[place] = prim.fma_f32(one, factor[index], sums[place])
        for mask in (1, 2, 4, 8):
            for place in range(SUMS + 2 * heads.shared):
                sums[place] = sums[place] + prim.shuffle_xor_f32(sums[place], mask)
        return sums

    def _of_all(self, value_head: Any) -> Any:
        """The number of a value head among those of all ranks."""
        machine = self.machine
        return value_head if machine.world.size == 1 else value_head + machine.rank * self.heads.value_heads

    @ch.function
    def _publish(self, share: _Share, column: ch.Expr, makes: Published, squares: Published) -> None:
        """The share's columns of each head, times the norm's weights and the gates, and the sums of their squares."""
        machine, heads = self.machine, self.heads
        made, count = machine.region("delta_made", ty.f32), heads.shared * COLUMNS
        with ch.if_(machine.thread < heads.shared * PAIRS):
            value_head = self._of_all(share.key_head * heads.shared + machine.thread // PAIRS)
            element = value_head * DIMS + share.part * COLUMNS + machine.thread % PAIRS * 2
            pair = prim.pack_bf16x2(made[machine.thread * 2], made[machine.thread * 2 + 1])
            makes.publish(fragment_word(element, column, self.columns.limit), pair)
        head = machine.thread - MOST_SHARED * PAIRS
        with ch.if_((machine.thread >= MOST_SHARED * PAIRS) & (head < heads.shared)):
            total = ch.var(ty.f32, 0.0)
            for index in range(COLUMNS):
                total += made[head * COLUMNS + (count + index)]
            all_heads = machine.world.size * heads.value_heads
            place = self._of_all(column * all_heads + share.key_head * heads.shared + head) * PARTS + share.part
            squares.publish(place, prim.float_bits(total))
