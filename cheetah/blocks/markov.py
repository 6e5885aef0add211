"""The kernel that chooses a block's tokens one behind the other: a Markov head says what a token does to the next.

A launch chooses one: of every token the drafter's logit, to which the product of two narrow rows is added, that of the
token before and its own, over the temperature and with the request's own noise. Every block says the best of its share;
who comes next, and at last the host, takes the best of those.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.sampling import gumbel
from cheetah.lang import prim, ty

KERNEL_NAME = "markov"
WARPS, UNIT = 8, 8
NOTHING = 2**32 - 1
"""The token of a share in which nothing is a number."""
SHARED_BYTES = WARPS * 8
BUFFERS: dict[str, tuple[ty.Type, str, tuple[int | str, ...], str, bool]] = {
    "logits": (ty.ptr(ty.f32), "of the columns of the drafter's launch", ("logit_rows", "vocab"), "host", True),
    "looked_up": (ty.ptr(ty.bf16), "a row of each token before", ("vocab", "rank"), "host", False),
    "multiplied": (ty.ptr(ty.bf16), "a row of each token", ("vocab", "rank"), "host", False),
    "best": (ty.ptr_mut(ty.u32), "of every place and block: the score's bits, the token", ("places", "blocks", 2),
             "zero", False),
}  # fmt: skip
NUMBERS: dict[str, tuple[ty.Type, str]] = {
    "place": (ty.u32, "which token of the block is chosen, from 0 on"),
    "before": (ty.u32, "places of other sequences' blocks, before this one's"),
    "row": (ty.u32, "of `logits`"),
    "anchor": (ty.u32, "the token before the first"),
    "position": (ty.u32, "of the token that is chosen"),
    "seed": (ty.u64, "of the request"),
    "temperature": (ty.f32, "of the request; 0: greedily"),
}


def build_markov(blocks: int, vocab: int, rank: int) -> ch.Kernel:
    """The kernel of so many blocks. rank: elements of a row, a multiple of 8."""
    types = {name: one[0] for name, one in BUFFERS.items()} | {name: one[0] for name, one in NUMBERS.items()}

    @ch.kernel(ch.Params(**types), name=KERNEL_NAME, max_threads=WARPS * 32)
    def markov(**given: Any) -> None:
        _emit(SimpleNamespace(**given), blocks, vocab, rank)

    return markov


@ch.inline
def _emit(given: Any, blocks: int, vocab: int, rank: int) -> None:
    thread = ch.const(ty.u32, ch.thread_idx_x(), name="thread")
    warp, lane = thread // 32, thread % 32
    before = ch.var(ty.u32, given.anchor)
    with ch.if_(given.place > 0):
        before.set(_chosen(given, blocks, vocab, lane))
    units = -(-rank // (UNIT * 32))
    of_before = ch.array(ty.f32, units, UNIT)
    for unit in range(units):
        words = _unit(given.looked_up, before, rank, unit, lane)
        for number, value in enumerate(_numbers(words)):
            of_before[unit][number] = value
    score, token = ch.var(ty.f32, -prim.infinity()), ch.var(ty.u32, NOTHING)
    first = ch.block_idx_x() * WARPS + warp
    with ch.for_(first, vocab, blocks * WARPS, unroll=4, name="candidate") as candidate:
        part = ch.var(ty.f32, 0.0)
        for unit in range(units):
            words = _unit(given.multiplied, candidate, rank, unit, lane)
            for number, value in enumerate(_numbers(words)):
                part.set(prim.fma_f32(value, of_before[unit][number], part))
        total = ch.var(ty.f32, given.logits[ty.u64(given.row) * vocab + ty.u64(candidate)] + prim.warp_sum_f32(part))
        with ch.if_(given.temperature > 0.0):
            scaled = prim.divide_f32(total, given.temperature)
            total.set(scaled + gumbel(candidate, given.position, given.seed))
        with ch.if_(total > score):  # of equal ones the first stays
            score.set(total)
            token.set(candidate)
    _lay_down(given, blocks, thread, score, token)


@ch.inline
def _chosen(given: Any, blocks: int, vocab: int, lane: Any) -> Any:
    """By a whole warp: what the launch before has chosen; the first token where that was none."""
    score, token = ch.var(ty.f32, -prim.infinity()), ch.var(ty.u32, NOTHING)
    of_place = given.best + (given.before + given.place - 1) * (blocks * 2)
    with ch.for_(lane, blocks, 32, unroll=1, name="share") as share:
        _take(score, token, prim.bits_float(of_place[share * 2]), of_place[share * 2 + 1])
    for mask in (16, 8, 4, 2, 1):
        _take(score, token, prim.shuffle_xor_f32(score, mask), prim.shuffle_xor_u32(token, mask))
    return ch.select(token < vocab, token, ty.u32(0))


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
        place = ((given.before + given.place) * blocks + ch.block_idx_x()) * 2
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


def _numbers(words: Any) -> list[Any]:
    parts = words.x, words.y, words.z, words.w
    return [half(part) for part in parts for half in (prim.bf16x2_low, prim.bf16x2_high)]
