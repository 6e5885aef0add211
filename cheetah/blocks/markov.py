"""The kernel that chooses a block's tokens one behind the other: a Markov head says what a token does to the next.

A launch chooses one: of every token the drafter's logit, to which the product of two narrow rows is added, that of the
token before and its own, over the temperature and with the request's own noise. Every block says the best of its share;
the next launch takes the best of those, and writes it where the drafter's own choice was. So behind the last one there
is a launch that chooses nothing. Where a sequence stands the tables of the drafter's launch say.

Of several GPUs the first one chooses, which has the logits of all, and stores the tokens into the others' memories too.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.peer_stores import store_at
from cheetah.blocks.sampling import gumbel
from cheetah.lang import prim, ty
from cheetah.plan.kv.tables import NO_TOKEN, SEQUENCE_WORDS, SequenceRecord, word

KERNEL_NAME = "markov"
WARPS, UNIT, TOGETHER = 16, 8, 8
"""Warps of a block; elements that a lane loads at a time; rows that a warp has under way."""
NOTHING = NO_TOKEN
"""The token of a share in which nothing is a number."""
SHARED_BYTES = WARPS * 8
BUFFERS: dict[str, tuple[ty.Type, str, tuple[int | str, ...] | None, str, bool]] = {
    "logits": (ty.ptr(ty.f32), "of the columns of the drafter's launch", ("logit_rows", "vocab"), "host", True),
    "looked_up": (ty.ptr(ty.bf16), "a row of each token before", ("vocab", "rank"), "host", False),
    "multiplied": (ty.ptr(ty.bf16), "a row of each token", ("vocab", "rank"), "host", False),
    "sequences": (ty.ptr(ty.u32), "of the drafter's launch", None, "host", True),
    "tokens": (ty.ptr_mut(ty.u32), "of the drafter's launch", None, "host", True),
    "best": (ty.ptr_mut(ty.u32), "of two places in turn and every block: the score's bits, the token",
             (2, "blocks", 2), "zero", False),
}  # fmt: skip
NUMBERS = {
    "place": "which token of the block is chosen, from 0 on",
    "count": "tokens of the block that are chosen",
    "sequence": "whose block it is",
    "room": "tokens of a row of `tokens`",
}


def build_markov(blocks: int, vocab: int, rank: int, peers: Sequence[str] = ()) -> ch.Kernel:
    """The kernel of so many blocks. rank: elements of a row, a multiple of 8. peers: parameters that point to `tokens`
    of other GPUs."""
    types = {name: one[0] for name, one in BUFFERS.items()} | dict.fromkeys(NUMBERS, ty.u32)
    types |= {name: types["tokens"] for name in peers} | ({"rank": ty.u32} if peers else {})

    @ch.kernel(ch.Params(**types), name=KERNEL_NAME, max_threads=WARPS * 32)
    def markov(**given: Any) -> None:
        own = SimpleNamespace(**given, memories=[given["tokens"], *(given[name] for name in peers)])
        if not peers:
            return _emit(own, blocks, vocab, rank)
        with ch.if_(own.rank == 0):
            _emit(own, blocks, vocab, rank)

    return markov


@ch.inline
def _emit(given: Any, blocks: int, vocab: int, rank: int) -> None:
    thread = ch.const(ty.u32, ch.thread_idx_x(), name="thread")
    own = given.sequences + given.sequence * SEQUENCE_WORDS
    number = ch.const(ty.u32, own[_word("given")] + given.place, name="number")  # of the token, in its launch
    place = given.sequence * given.room + number - 1  # of the one before
    before = ch.var(ty.u32, given.tokens[place])
    with ch.if_(given.place > 0):
        before.set(_chosen(given, blocks, thread % 32))
        with ch.if_((ch.block_idx_x() == 0) & (thread == 0)):
            for memory, tokens in enumerate(given.memories):
                store_at(tokens, place, before, is_peers=memory > 0)
    with ch.if_(given.place < given.count):
        before.set(ch.select(before < vocab, before, ty.u32(0)))
        _choose(given, thread, own, number, before, blocks, vocab, rank)


@ch.inline
def _choose(given: Any, thread: Any, own: Any, number: Any, before: Any, blocks: int, vocab: int, rank: int) -> None:
    """The best token of every block behind that one."""
    warp, lane = thread // 32, thread % 32
    row = ch.const(ty.u32, own[_word("first_column")] + (number - 1), name="row")
    position = ch.const(ty.u32, own[_word("length")] + number, name="position")
    temperature = ch.const(ty.f32, prim.bits_float(own[_word("temperature")]), name="temperature")
    seed = ch.const(ty.u64, ty.u64(own[_word("seed_high")]) << 32 | ty.u64(own[_word("seed_low")]), name="seed")
    units = -(-rank // (UNIT * 32))
    of_before = ch.array(ty.f32, units, UNIT)
    for unit in range(units):
        words = _unit(given.looked_up, before, rank, unit, lane)
        for number, value in enumerate(_numbers(words)):
            of_before[unit][number] = value
    score, token = ch.var(ty.f32, -prim.infinity()), ch.var(ty.u32, NOTHING)
    first = (ch.block_idx_x() * WARPS + warp) * TOGETHER
    of_row = given.logits + ty.u64(row) * vocab
    with ch.for_(first, vocab, blocks * WARPS * TOGETHER, unroll=1, name="begin") as begin:
        candidate = ch.const(ty.u32, begin + lane % TOGETHER, name="candidate")  # each that many lanes have
        logit = ch.const(ty.f32, of_row[ch.minimum(candidate, vocab - 1)], name="logit")
        rows = ch.array(ty.u32x4, units, TOGETHER)
        with ch.for_(TOGETHER, unroll=True, name="member") as member:
            for unit in range(units):
                rows[unit][member] = _unit(given.multiplied, ch.minimum(begin + member, vocab - 1), rank, unit, lane)
        total = ch.var(ty.f32, 0.0)
        with ch.for_(TOGETHER, unroll=True, name="member") as member:
            part = ch.var(ty.f32, 0.0)
            for unit in range(units):
                for number, value in enumerate(_numbers(rows[unit][member])):
                    part.set(prim.fma_f32(value, of_before[unit][number], part))
            of_member = ch.const(ty.f32, prim.warp_sum_f32(part), name="of_member")
            total.set(ch.select(lane % TOGETHER == member, of_member, total))
        total += logit
        with ch.if_(temperature > 0.0):
            scaled = prim.divide_f32(total, temperature)
            total.set(scaled + gumbel(candidate, position, seed))
        with ch.if_((total > score) & (candidate < vocab)):  # of equal ones the first stays
            score.set(total)
            token.set(candidate)
    for mask in (4, 2, 1):
        _take(score, token, prim.shuffle_xor_f32(score, mask), prim.shuffle_xor_u32(token, mask))
    _lay_down(given, blocks, thread, score, token)


@ch.inline
def _chosen(given: Any, blocks: int, lane: Any) -> Any:
    """By a whole warp: what the launch before has chosen; NOTHING where that was none."""
    score, token = ch.var(ty.f32, -prim.infinity()), ch.var(ty.u32, NOTHING)
    of_place = given.best + (given.place - 1) % 2 * (blocks * 2)
    with ch.for_(lane, blocks, 32, unroll=1, name="share") as share:
        _take(score, token, prim.bits_float(of_place[share * 2]), of_place[share * 2 + 1])
    for mask in (16, 8, 4, 2, 1):
        _take(score, token, prim.shuffle_xor_f32(score, mask), prim.shuffle_xor_u32(token, mask))
    return token


@ch.inline
def _take(score: Any, token: Any, other_score: Any, other_token: Any) -> None:
    """The better of two, of equal ones the lower token."""
    found = ch.const(ty.f32, other_score, name="found")
    of_found = ch.const(ty.u32, other_token, name="of_found")
    with ch.if_((found > score) | ((found == score) & (of_found < token))):
        score.set(found)
        token.set(of_found)


@ch.inline
def _lay_down(given: Any, blocks: int, thread: Any, score: Any, token: Any) -> None:
    """The best of the block's warps."""
    scores = ch.reinterpret(ty.ptr_mut(ty.f32), prim.shared_arena())
    tokens = ch.reinterpret(ty.ptr_mut(ty.u32), prim.shared_arena() + WARPS * 4)
    with ch.if_(thread % 32 == 0):
        scores[thread // 32] = score
        tokens[thread // 32] = token
    prim.block_barrier()
    with ch.if_(thread == 0):
        with ch.for_(1, WARPS, unroll=True, name="other") as other:
            _take(score, token, scores[other], tokens[other])
        place = (given.place % 2 * blocks + ch.block_idx_x()) * 2
        given.best[place] = prim.float_bits(score)
        given.best[place + 1] = token


@ch.inline
def _unit(rows: Any, row: Any, rank: int, unit: int, lane: Any) -> Any:
    """A lane's 8 elements of a row, zeros behind its end."""
    words = ch.var(ty.u32x4, prim.make_u32x4(0, 0, 0, 0))
    index = unit * 32 + lane
    with ch.if_(index < rank // UNIT):
        words.set(ch.reinterpret(ty.ptr(ty.u32x4), rows + ty.u64(row) * rank)[index])
    return words


def _word(name: str) -> int:
    return word(SequenceRecord, name)


def _numbers(words: Any) -> list[Any]:
    parts = words.x, words.y, words.z, words.w
    return [half(part) for part in parts for half in (prim.bf16x2_low, prim.bf16x2_high)]
