"""Between the launches of a round: drafts go to the launch that verifies, and what that made to the next ones.

A round is a launch of a model that drafts, and one of a kernel that verifies a step. Many rounds are started at once,
by the same tables: so these must say of each round where its sequences stand, which is known on the device alone. One
block does that, a thread a sequence, in a launch behind each of the two. It judges nothing: what was right the kernel
that verifies has said, in `rounds`.

Where a head drafts, it is read along: what tapped layers left of the tokens that were right goes to the slots of their
positions, and the next launch that drafts begins with all of them. So it does where blocks are drafted: of these tokens
it is written down which rows are to be made, and where: the next launch does (`cheetah.blocks.known_rows`).

A sequence that is over stays as it is: what later rounds make of it they make again, and nobody hears of it.

Of several GPUs each does this to its own tables, by the same numbers, and the first one tells the host.
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.lang import prim, ty
from cheetah.plan.handoff import NO_ROW, BlockHandoff, Drafts, Handoff, HeadHandoff
from cheetah.plan.known import KNOWN, ROWS_BEGIN, SLOTS_BEGIN
from cheetah.plan.kv.tables import (
    CANCELLED_TOKEN,
    EMITTED_COUNT_BITS,
    PENALISED,
    SEQUENCE_WORDS,
    TILE_WORDS,
    SequenceRecord,
    TileRecord,
    word,
)
from cheetah.plan.plan import EMITTED_BITS, MAX_BATCH

KERNEL_NAME = "handoff"
UNITS = 4
SYSTEM = "sys"
THREADS: dict[Drafts, int] = {"model": 32, "head": 512, "block": 32}
NUMBERS: dict[Drafts, type[Handoff]] = {"model": Handoff, "head": HeadHandoff, "block": BlockHandoff}
"""Of the kernel where such a one drafts: threads of its block, what it is told."""
BUFFERS: dict[str, tuple[ty.Type, str]] = {
    "sequences": (ty.ptr_mut(ty.u32), "of the kernel that verifies"),
    "tiles": (ty.ptr_mut(ty.u32), "of the kernel that verifies"),
    "tokens": (ty.ptr_mut(ty.u32), "of the kernel that verifies"),
    "stop_ids": (ty.ptr(ty.u32), "of the kernel that verifies"),
    "rounds": (ty.ptr(ty.u32), "of the kernel that verifies: how far its launch has brought each sequence"),
    "draft_sequences": (ty.ptr_mut(ty.u32), "of the kernel that drafts"),
    "draft_tiles": (ty.ptr_mut(ty.u32), "of the kernel that drafts"),
    "draft_tokens": (ty.ptr_mut(ty.u32), "of the kernel that drafts"),
    "draft_stop_ids": (ty.ptr(ty.u32), "of the kernel that drafts"),
    "draft_counts": (ty.ptr_mut(ty.u32), "its token_counts"),
}
PAGE_TABLE: dict[str, tuple[ty.Type, str]] = {"page_table": (ty.ptr(ty.u32), "of the kernel that verifies")}
MORE: dict[Drafts, dict[str, tuple[ty.Type, str]]] = {
    "model": {},
    "head": PAGE_TABLE
    | {
        "taps": (ty.ptr(ty.u32), "of the kernel that verifies: what tapped layers left of its columns"),
        "features": (ty.ptr_mut(ty.u32), "of the kernel that drafts: the same of tokens, by pages"),
        "feature_steps": (ty.ptr_mut(ty.u32), "of the kernel that drafts"),
    },
    "block": PAGE_TABLE | {"known": (ty.ptr_mut(ty.u32), "see cheetah.plan.known")},
}
"""Further buffers where such a one drafts."""
OWN: dict[str, tuple[ty.Type, str, tuple[int | str, ...], str]] = {
    "rows": (ty.ptr(ty.u32), "of each sequence, which one it is of the kernel that drafts", (MAX_BATCH,), "host"),
    "left": (ty.ptr_mut(ty.u32), "tokens that are still to be made of each; 0: it is over", (MAX_BATCH,), "host"),
    "made": (ty.ptr_mut(ty.u32), "tokens that were made of each", (MAX_BATCH,), "host"),
    "told": (
        *(ty.ptr_mut(ty.u32), "the same in the host's memory, as words of `emitted`", ("batch", "told_room")),
        "mapped",
    ),
    "done": (
        *(ty.ptr_mut(ty.u32), "in the host's memory: rounds that were made, then what is left of each"),
        *((1 + MAX_BATCH,), "mapped"),
    ),
}
"""Buffers of this kernel alone: type, meaning, shape, fill."""


def build_handoff(drafts: Drafts, ranks: int = 1) -> ch.Kernel:
    """The kernel: one block of THREADS threads, on each of so many GPUs."""
    buffers = BUFFERS | MORE[drafts]
    parameters: dict[str, ty.Type] = {name: one[0] for name, one in buffers.items()}
    parameters |= {name: one[0] for name, one in OWN.items()}
    parameters |= {field.name: ty.u32 for field in fields(NUMBERS[drafts])}
    parameters |= {} if ranks == 1 else {"rank": ty.u32}
    ahead = {} if drafts == "block" else {"ahead": 0}

    @ch.kernel(ch.Params(**parameters), name=KERNEL_NAME, max_threads=THREADS[drafts])
    def handoff(**given: Any) -> None:
        _emit(SimpleNamespace(**ahead, **{"rank": None} | given, is_head=drafts == "head", is_block=drafts == "block"))

    return handoff


@ch.inline
def _emit(given: Any) -> None:
    sequence = ch.const(ty.u32, ch.thread_idx_x(), name="sequence")
    if given.is_head:
        with ch.if_(given.is_verified != 0):
            _keep_features(given)
    if given.is_block:
        with ch.if_((given.is_verified != 0) & (sequence < given.count)):
            _list_known(given, sequence)
    if given.is_head or given.is_block:
        prim.block_barrier()  # what sequences have behind them is read before it is changed
    with ch.if_(sequence < given.count):
        row = ch.const(ty.u32, given.rows[sequence], name="row")
        drafted = ch.var(ty.u32, 0)
        with ch.if_(row != NO_ROW):
            _count_drafts(given, row, drafted)
        with ch.if_(given.is_verified == 0):
            with ch.if_(row != NO_ROW):
                _propose(given, sequence, row, drafted)
        with ch.else_():
            _go_on(given, sequence, row, drafted)
    if given.is_head:
        prim.block_barrier()
        with ch.if_((given.is_verified != 0) & (sequence == 0)):
            _count_feature_steps(given)
    with ch.if_((given.is_verified != 0) & (sequence == 0)):
        _tell_host(given, given.done, given.number + 1)


@ch.inline
def _keep_features(given: Any) -> None:
    """What tapped layers left of the tokens that a launch has brought each sequence, by all threads: its one step has
    a row of every column."""
    with ch.for_(given.count, unroll=1, name="kept") as kept:
        own = _sequence(given.sequences, kept)
        with ch.for_(_kept_of(given, kept), unroll=1, name="number") as number:
            slot = ch.const(ty.u32, _slot(given, kept, own[_word("length")] + number), name="slot")
            source = ch.reinterpret(ty.ptr(ty.u32x4), given.taps) + ty.u64(
                own[_word("first_column")] + number
            ) * ty.u64(given.row_units)
            target = ch.reinterpret(ty.ptr_mut(ty.u32x4), given.features) + ty.u64(slot) * ty.u64(given.row_units)
            _copy_units(target, source, given.row_units)


@ch.inline
def _kept_of(given: Any, sequence: Any) -> Any:
    """How many tokens a launch has brought a sequence; none that is over."""
    return ch.select(given.left[sequence] == 0, ty.u32(0), given.rounds[sequence * given.round_words])


@ch.inline
def _slot(given: Any, sequence: Any, position: Any) -> Any:
    """Which one of all pages' places a token has."""
    at = ch.const(ty.u32, position, name="position")
    entry = sequence * given.pages_per_sequence + at // given.page_size
    return given.page_table[entry] * given.page_size + at % given.page_size


@ch.inline
def _list_known(given: Any, sequence: Any) -> None:
    """The tokens that a launch has brought a sequence, behind those of the sequences before it."""
    own = _sequence(given.sequences, sequence)
    first = ch.var(ty.u32, 0)
    with ch.for_(sequence, unroll=1, name="other") as other:
        first += _kept_of(given, other)
    kept = ch.const(ty.u32, _kept_of(given, sequence), name="kept")
    with ch.for_(kept, unroll=1, name="number") as number:
        given.known[first + number + ROWS_BEGIN] = own[_word("first_column")] + number
        given.known[first + number + SLOTS_BEGIN] = _slot(given, sequence, own[_word("length")] + number)
    with ch.if_(sequence + 1 == given.count):
        given.known[0] = first + kept


@ch.inline
def _copy_units(target: Any, source: Any, count: Any) -> None:
    """16 bytes each; a thread has several under way."""
    with ch.for_(ch.thread_idx_x(), count, UNITS * THREADS["head"], unroll=1, name="unit") as unit:
        data = ch.array(ty.u32x4, UNITS)
        with ch.for_(UNITS, unroll=True, name="index") as index:
            data[index] = source[ch.minimum(unit + index * THREADS["head"], count - 1)]
        with ch.for_(UNITS, unroll=True, name="index") as index:
            with ch.if_(unit + index * THREADS["head"] < count):
                target[unit + index * THREADS["head"]] = data[index]


@ch.inline
def _count_feature_steps(given: Any) -> None:
    """Steps of the next launch that drafts in which some column has features: those of inputs."""
    steps = ch.var(ty.u32, 0)
    with ch.for_(given.count, unroll=1, name="other") as other:
        row = ch.const(ty.u32, given.rows[other], name="row_of_other")
        with ch.if_(row != NO_ROW):
            inputs = ch.const(ty.u32, _sequence(given.draft_sequences, row)[_word("given")], name="inputs_of_other")
            steps.set(ch.maximum(steps, inputs))
    given.feature_steps[0] = steps


@ch.inline
def _count_drafts(given: Any, row: Any, drafted: Any) -> None:
    """How many tokens the launch that drafts has made of its sequence: up to a stop id, or to where there was none."""
    own = _sequence(given.draft_sequences, row)
    inputs = ch.const(ty.u32, own[_word("given")] + given.ahead, name="inputs")
    most = ch.const(ty.u32, own[_word("total")] + 1 - inputs, name="most")
    going_on = ch.var(ty.u32, 1)
    with ch.for_(most, unroll=1, name="number") as number:
        with ch.if_(going_on != 0):
            token = ch.const(ty.u32, given.draft_tokens[row * given.draft_room + inputs + number], name="token")
            with ch.if_(token < CANCELLED_TOKEN):
                drafted += 1
            going_on.set(ch.select(token < CANCELLED_TOKEN, ty.u32(1), ty.u32(0)))
            _look_for_end(own, given.draft_stop_ids, token, going_on)


@ch.inline
def _propose(given: Any, sequence: Any, row: Any, drafted: Any) -> None:
    """The drafts behind the newest token, as many as the launch has room for."""
    own, draft = _sequence(given.sequences, sequence), _sequence(given.draft_sequences, row)
    first = ch.const(ty.u32, row * given.draft_room + draft[_word("given")] + given.ahead, name="first_draft")
    count = ch.const(ty.u32, ch.minimum(drafted, own[_word("total")] - 1), name="drafts")
    with ch.for_(count, unroll=1, name="draft") as number:
        given.tokens[sequence * given.room + 1 + number] = given.draft_tokens[first + number]
    own[_word("drafted")] = count + 1


@ch.inline
def _go_on(given: Any, sequence: Any, row: Any, drafted: Any) -> None:
    """What a launch has made of a sequence: the host hears of it, and the next round begins behind it."""
    left = ch.const(ty.u32, given.left[sequence], name="left")
    with ch.if_(left != 0):
        own = _sequence(given.sequences, sequence)
        first = ch.const(ty.u32, sequence * given.room, name="first")
        reached = ch.const(ty.u32, given.rounds[sequence * given.round_words], name="reached")
        last = ch.const(ty.u32, given.tokens[first + reached], name="last")
        _tell(given, sequence, first, reached, own[_word("drafted")] - 1)
        going_on = ch.var(ty.u32, ch.select((last < CANCELLED_TOKEN) & (reached < left), ty.u32(1), ty.u32(0)))
        _look_for_end(own, given.stop_ids, last, going_on)
        with ch.if_(going_on == 0):
            given.left[sequence] = 0
        with ch.else_():
            with ch.if_(row != NO_ROW):
                if not given.is_block:  # of which no penalties are asked
                    _count_again(given, row, drafted, first, reached)
                _read_on(given, sequence, row, own, drafted, first, reached, left - reached)
            _verify_on(given, sequence, own, first, reached, left - reached)
        _tell_host(given, given.done + 1 + sequence, given.left[sequence])


@ch.inline
def _tell(given: Any, sequence: Any, first: Any, reached: Any, drafts: Any) -> None:
    """Each token says how many were drafted in its step, and behind which of them it was chosen."""
    known = ch.const(ty.u32, given.made[sequence], name="known")
    drafts = ch.const(ty.u32, drafts, name="drafted_now")
    with ch.for_(reached, unroll=1, name="number") as number:
        token = ch.const(ty.u32, given.tokens[first + 1 + number], name="made_token")
        counts = (drafts | number << EMITTED_COUNT_BITS) << EMITTED_BITS
        place = given.told + sequence * given.told_room + (known + number)
        _tell_host(given, place, ch.select(token < CANCELLED_TOKEN, token | counts, token))
    given.made[sequence] = known + reached


@ch.inline
def _tell_host(given: Any, place: Any, word: Any) -> None:
    if given.rank is None:
        prim.store_relaxed_u32(place, word, scope=SYSTEM)
        return
    with ch.if_(given.rank == 0):
        prim.store_relaxed_u32(place, word, scope=SYSTEM)


@ch.inline
def _verify_on(given: Any, sequence: Any, own: Any, first: Any, reached: Any, left: Any) -> None:
    """The next launch that verifies begins with the last token that was made, and nothing drafted yet."""
    own[_word("length")] = own[_word("length")] + reached
    own[_word("total")] = ch.minimum(own[_word("per_step")], left)
    own[_word("drafted")] = 1
    given.tokens[first] = given.tokens[first + reached]
    given.left[sequence] = left
    with ch.for_(given.tile_count, unroll=1, name="tile") as tile:
        record = given.tiles + tile * TILE_WORDS
        with ch.if_(record[word(TileRecord, "stride")] == sequence):
            record[word(TileRecord, "length")] = record[word(TileRecord, "length")] + reached


@ch.inline
def _read_on(given: Any, sequence: Any, row: Any, own: Any, drafted: Any, first: Any, reached: Any, left: Any) -> None:
    """The next launch that drafts begins behind what is right of all that was read: with the last token that was made,
    or, where all drafts were right, with the last of those, which was never read. Drafts that a head has read were read
    without features, so it begins with all that was made; so does a block, which has rows of all but the last."""
    draft = _sequence(given.draft_sequences, row)
    known = ch.const(ty.u32, own[_word("length")], name="known_length")
    right = ty.u32(0) if given.is_head or given.is_block else ch.minimum(drafted, reached)
    read = ch.const(ty.u32, known + right, name="read")
    skipped = 1 if given.is_head else 0
    inputs = ch.const(ty.u32, known + reached + (1 - skipped) - read, name="inputs_now")
    with ch.for_(inputs, unroll=1, name="input") as number:
        token = ch.var(ty.u32, given.tokens[first + reached + 1 - inputs + number])
        if given.is_block:
            with ch.if_(number < reached):
                token.set(KNOWN + _slot(given, sequence, known + number))
        given.draft_tokens[row * given.draft_room + number] = token
    draft[_word("length")] = read
    draft[_word("given")] = inputs
    drafts = ch.minimum(own[_word("per_step")] - 1, left - 1)
    total = ch.const(ty.u32, inputs - 1 + given.ahead + ch.maximum(drafts, ty.u32(1)), name="total_now")
    draft[_word("total")] = total
    with ch.for_(given.draft_tile_count, unroll=1, name="tile") as tile:
        record = given.draft_tiles + tile * TILE_WORDS
        is_own = record[word(TileRecord, "table")] // given.pages_per_sequence == row
        with ch.if_(is_own & (record[word(TileRecord, "stride")] != 0)):  # what several share stays as it is
            record[word(TileRecord, "length")] = read
            if given.is_block:  # all of it is seen by all of it
                record[word(TileRecord, "new")] = total


@ch.inline
def _count_again(given: Any, row: Any, drafted: Any, first: Any, reached: Any) -> None:
    """Penalties: the model that drafts has counted its drafts; what was made counts."""
    draft = _sequence(given.draft_sequences, row)
    with ch.if_((draft[_word("options")] & PENALISED) != 0):
        counts = given.draft_counts + ty.u64(draft[_word("slot")]) * ty.u64(given.draft_vocab)
        start = ch.const(ty.u32, row * given.draft_room + draft[_word("given")], name="start")
        with ch.for_(drafted, unroll=1, name="number") as number:
            token = ch.const(ty.u32, given.draft_tokens[start + number], name="counted")
            counts[token] = counts[token] - 1
        with ch.for_(reached, unroll=1, name="number") as number:
            token = ch.const(ty.u32, given.tokens[first + 1 + number], name="true")
            with ch.if_(token < given.draft_vocab):
                counts[token] = counts[token] + 1


@ch.inline
def _look_for_end(own: Any, stop_ids: Any, token: Any, going_on: Any) -> None:
    begin = ch.const(ty.u32, own[_word("stop_first")], name="begin")
    with ch.for_(own[_word("stop_count")], unroll=1, name="stop") as stop:
        with ch.if_(stop_ids[begin + stop] == token):
            going_on.set(0)


def _sequence(records: Any, number: Any) -> Any:
    return records + number * SEQUENCE_WORDS


def _word(name: str) -> int:
    return word(SequenceRecord, name)
