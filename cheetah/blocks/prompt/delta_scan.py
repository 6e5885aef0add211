"""The scan of a pass: what a share of a sequence remembers, from token to token.

Tokens are taken four together, in runs that are counted from position 0 (`_take_run`): so a column's sums over lanes,
which everything else waits for, are made once for four, and a number of the memory is changed by five instructions, not
eight. It is exact but for the order of sums. What is left behind the last run of a segment, and a segment that begins
within a run, is taken token by token. So a cut at a multiple of four tokens changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.delta.memory import LANES, OF_LANE, PAIRS, QUADS
from cheetah.blocks.prompt.delta import PassMemory
from cheetah.blocks.prompt.keys import SegmentPlace
from cheetah.lang import prim, ty
from cheetah.plan.delta import COLUMNS, DIMS, PARTS, TAPS
from cheetah.plan.delta_pass import OF_KEY_HEAD, RUN

BEFORE = TAPS - 1


class Scan(PassMemory):
    """The phase between those that mix and normalise."""

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
                    row = share // PARTS * heads.shared * PARTS + share % PARTS
                    of_share = ty.u64(row * self.machine.plan.tokens + segment_column + first) * COLUMNS
                    place = ch.const(ty.u64, of_share, name="place")
                    count = ch.minimum(segment.count - first, self.plan.stage_tokens)
                    # Runs are counted from a segment's first token, and from position 0 where a cut is a multiple.
                    in_runs = ch.const(
                        ty.u32, ch.select(segment.start % RUN == 0, count // RUN * RUN, ty.u32(0)), name="in_runs"
                    )
                    with ch.for_(0, in_runs, RUN, unroll=1, name="token") as token:
                        self._take_run(stage, token, place, memory, made)
                    with ch.for_(in_runs, count, unroll=1, name="token") as token:
                        self._take_token(stage, token, place, memory, made)
                    self._be_done(memory, made)
                    self.ring.release(self.ring.using.stage)
                    self.ring.using.advance()
                self._store(state, memory)
                self._keep_last(segment, segment_column, share, state, is_new)
                segment_column += self._columns(segment)

    @ch.inline
    def _be_done(self, memory: Any, made: Any) -> None:
        """What came of the stage's last tokens is there, and so every load of it."""
        for number in range(self.plan.heads.shared * self._strips):
            for one in (made[number], memory[number * OF_LANE], memory[number * OF_LANE + OF_LANE // 2]):
                prim.wait_for_u32(prim.float_bits(one))

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
    def _take_token(self, stage: ch.Expr, token: ch.Expr, place: ch.Expr, memory: Any, made: Any) -> None:
        """One token of a stage: what the memory has under the query once it is changed, and that change."""
        shared = self.plan.heads.shared
        of_keys, *of_values, of_numbers = self._of_token(stage, token)
        query, key = self._of_lane(of_keys), self._of_lane(of_keys + DIMS)
        for strip in range(self._strips):
            sums = self._sums(memory, query, key, strip)
            for head in range(shared):
                kept = ch.const(ty.f32, of_numbers[OF_KEY_HEAD + shared + head], name="kept")
                value = of_values[head][self._column(strip)]
                change = ch.const(
                    ty.f32, (value - kept * sums[2 * head]) * of_numbers[OF_KEY_HEAD + head], name="change"
                )
                output = ch.const(ty.f32, kept * sums[2 * head + 1] + of_numbers[0] * change, name="output")
                made[head * self._strips + strip] = output
                with ch.if_(self.machine.thread % LANES == 0):
                    self._made(place, head, token, strip)[0] = output
                for index in range(OF_LANE):
                    one = (head * self._strips + strip) * OF_LANE + index
                    memory[one] = prim.fma_f32(key[index], change, kept * memory[one])

    def _of_token(self, stage: ch.Expr, token: ch.Expr) -> list[Any]:
        """Where a token's numbers lie in a stage (f32*), stretch by stretch."""
        return [
            ch.reinterpret(ty.ptr(ty.f32), stage + at) + token * (size // 4)
            for at, size in zip(self.plan.run_at, self.plan.run_bytes, strict=True)
        ]

    def _made(self, place: ch.Expr, head: int, token: Any, strip: int) -> Any:
        """Where what a value head makes of a token of a stage goes (f32*). place: of the stage's first token, of the
        share's first head and column."""
        of_head = ty.u64(head * PARTS * self.machine.plan.tokens + token) * COLUMNS
        return self.values + (place + (of_head + ty.u64(self._column(strip))))

    @ch.function
    def _take_run(self, stage: ch.Expr, first: ch.Expr, place: ch.Expr, memory: Any, made: Any) -> None:
        """Four tokens of a stage together: the sums of what the memory was before them with all four keys and queries,
        then, by the products of these, the change that each token makes, then all changes at once."""
        shared = self.plan.heads.shared
        tokens = [self._of_token(stage, first + number) for number in range(RUN)]
        keys = [self._of_lane(of_keys + DIMS) for of_keys, *_ in tokens]
        lane = self.machine.thread % LANES
        firsts = [0, *range(OF_KEY_HEAD, self.plan.numbers, 4)]
        numbers = [self._numbers(of_numbers, firsts) for *_, of_numbers in tokens]
        own = self._numbers(self._of_token(stage, first + lane % RUN)[-1], (0, RUN))  # whose output this lane makes
        own_products = [own[0], *(own[RUN + before] for before in range(RUN - 1))]
        for strip in range(self._strips):
            sums = self._sums_of_run(memory, tokens, keys, strip)
            for head in range(shared):
                total = self._dealt(sums, head)
                kept_of_all, output = ch.var(ty.f32, 1.0), ch.var(ty.f32, 0.0)
                changes = ch.array(ty.f32, RUN)
                for number, (_, *of_values, _) in enumerate(tokens):
                    kept = numbers[number][OF_KEY_HEAD + shared + head]
                    kept_of_all.set(kept_of_all * kept)
                    of_key = prim.shuffle_u32(prim.float_bits(total), self.machine.lane // LANES * LANES + number)
                    known = ch.var(ty.f32, kept_of_all * prim.bits_float(of_key))
                    for before in range(number):
                        changes[before] = kept * changes[before]
                        known.set(prim.fma_f32(changes[before], numbers[number][number - before], known))
                    written = numbers[number][OF_KEY_HEAD + head]
                    changes[number] = (of_values[head][self._column(strip)] - known) * written
                    so_far = ch.var(ty.f32, kept_of_all * total)
                    for before in range(number + 1):
                        so_far.set(prim.fma_f32(changes[before], own_products[number - before], so_far))
                    output.set(ch.select(lane % RUN == number, so_far, output))
                made[head * self._strips + strip] = output
                with ch.if_(lane // RUN == 1):
                    self._made(place, head, first + lane % RUN, strip)[0] = output
                for index in range(OF_LANE):
                    one = (head * self._strips + strip) * OF_LANE + index
                    changed = ch.var(ty.f32, kept_of_all * memory[one])
                    for number in range(RUN):
                        changed.set(prim.fma_f32(keys[number][index], changes[number], changed))
                    memory[one] = changed

    @ch.inline
    def _numbers(self, of_token: ch.Expr, firsts: Sequence[int]) -> dict[int, Any]:
        """Some of a token's numbers by their places, four from each of `firsts` on."""
        fours = ch.reinterpret(ty.ptr(ty.f32x4), of_token)
        found: dict[int, Any] = {}
        for first in firsts:
            four = ch.const(ty.f32x4, fours[first // 4], name="numbers")
            found |= {first + index: getattr(four, member) for index, member in enumerate("xyzw")}
        return found

    @ch.inline
    def _sums_of_run(self, memory: Any, tokens: Any, keys: Any, strip: int) -> Any:
        """A lane's part of each value head's column times the four keys, then times the four queries."""
        shared = self.plan.heads.shared
        sums = ch.array(ty.f32, 2 * RUN * shared, zero=True)
        for number, (of_keys, *_) in enumerate(tokens):
            query = self._of_lane(of_keys)
            for index in range(OF_LANE):
                for head in range(shared):
                    one = memory[(head * self._strips + strip) * OF_LANE + index]
                    for kind, factor in enumerate((keys[number], query)):
                        place = (2 * head + kind) * RUN + number
                        sums[place] = prim.fma_f32(one, factor[index], sums[place])
        return sums

    @ch.inline
    def _dealt(self, sums: Any, head: int) -> ch.Expr:
        """Of a head's eight sums that which this lane is left with, over all lanes: lanes give away half of what they
        have, three times. Lanes 0 to 3 of eight have those of the keys, the others those of the queries."""
        lane, first, count = self.machine.thread % LANES, 2 * RUN * head, 2 * RUN
        while count > 1:
            count //= 2
            is_upper = lane // count % 2 != 0
            for place in range(first, first + count):
                mine = ch.const(ty.f32, ch.select(is_upper, sums[place + count], sums[place]), name="mine")
                given = ch.select(is_upper, sums[place], sums[place + count])
                sums[place] = mine + prim.shuffle_xor_f32(given, count)
        total = ch.const(ty.f32, sums[first] + prim.shuffle_xor_f32(sums[first], 2 * RUN), name="total")
        return total

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
