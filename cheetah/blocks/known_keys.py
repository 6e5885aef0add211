"""The kernel that makes the keys and values of a prompt's known tokens, in all layers of a drafter of blocks: what its
steps make of few, a weight for as many tokens as a step has columns, this makes of many.

Every layer projects the same row of a token, so there are no layers here, only heads of products: a block takes a head
of a layer, keys or values, and 64 tokens. Its weights are times those of the norm before them; the row's 1/rms
multiplies sums. Keys are normalised and rotated as steps do it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.known_rows import MANY, OF_GROUP, WARPS, Operands, multiply
from cheetah.lang import prim, ty
from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.index import ceil_div
from cheetah.plan.known import PLACED_WORDS, PLACES_BEGIN, POSITIONS_BEGIN

KERNEL_NAME = "known_keys"
LANES, UNIT = 32 * WARPS // MANY.tokens, 8
"""Threads that square a token's row; elements that they load at a time."""
BUFFERS: dict[str, tuple[ty.Type, str, tuple[int | str, ...] | None, str, bool]] = {
    "projections": (
        *(ty.ptr(ty.bf16), "of every layer the rows that make keys, then values, times the weights of the norm"),
        *(("projected_rows", "padded_hidden"), "host", False),
    ),
    "placed": (ty.ptr(ty.u32), "see cheetah.plan.known", (PLACED_WORDS,), "host", False),
    "known_rows": (ty.ptr(ty.bf16), "of the drafter's steps", None, "host", True),
    "head_norms": (ty.ptr(ty.bf16), "of the drafter's steps", None, "host", True),
    "rope": (ty.ptr(ty.f32), "of the drafter's steps", None, "host", True),
    "kv": (ty.ptr_mut(ty.bf16), "of the drafter's steps", None, "host", True),
}


@dataclass(frozen=True)
class Sizes:
    """Of a drafter, and its cache."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    width: int
    epsilon: float
    pages: int
    page_size: int

    @property
    def jobs(self) -> int:
        """Heads of keys and of values of all layers."""
        return self.layers * 2 * self.kv_heads

    @property
    def m_tiles(self) -> int:
        """Of a head."""
        return self.head_dim // M_TILE_ROWS

    @property
    def shared_bytes(self) -> int:
        """Warps' sums, a head of 64 tokens, and their 1/rms."""
        return 4 * (WARPS * MANY.elements + MANY.tokens * (self.head_dim + 1))


def build_known_keys(sizes: Sizes) -> ch.Kernel:
    """The kernel for a drafter of these."""
    types = {name: type_ for name, (type_, *_) in BUFFERS.items()}

    @ch.kernel(ch.Params(**types), name=KERNEL_NAME, max_threads=WARPS * 32)
    def known_keys(**given: Any) -> None:
        _emit(SimpleNamespace(**given), sizes)

    return known_keys


@ch.inline
def _emit(given: Any, sizes: Sizes) -> None:
    given.thread = ch.const(ty.u32, ch.thread_idx_x(), name="thread")
    given.partial = ch.reinterpret(ty.ptr_mut(ty.f32), prim.shared_arena())
    given.heads = given.partial + WARPS * MANY.elements
    given.inverse = given.heads + MANY.tokens * sizes.head_dim
    given.count = ch.const(ty.u32, given.placed[0], name="count")
    work = (given.count + (MANY.tokens - 1)) // MANY.tokens * sizes.jobs
    with ch.for_(ch.block_idx_x(), work, ch.grid_dim_x(), unroll=1, name="work") as number:
        job = ch.const(ty.u32, number % sizes.jobs, name="job")
        first = ch.const(ty.u32, number // sizes.jobs * MANY.tokens, name="first")
        _square(given, sizes, first)
        weights = given.projections + ty.u64(job) * (sizes.head_dim * sizes.width)
        operands = Operands(weights, given.known_rows, given.placed, PLACES_BEGIN, sizes.width)
        with ch.for_(0, sizes.m_tiles, MANY.tiles, unroll=1, name="tile") as tile:
            multiply(operands, given, MANY, tile, first, sizes.m_tiles)
            prim.block_barrier()
            _add(given, sizes, tile)
            prim.block_barrier()
        _finish(given, sizes, job, first)
        prim.block_barrier()  # all have read what the next work's sums are laid over


@ch.inline
def _square(given: Any, sizes: Sizes, first: Any) -> None:
    """1/rms of each token's row."""
    token = given.thread // LANES
    slot = given.placed[ch.minimum(first + token, given.count - 1) + PLACES_BEGIN]
    units = ch.reinterpret(ty.ptr(ty.u32x4), given.known_rows + ty.u64(slot) * sizes.width)
    total = ch.var(ty.f32, 0.0)
    with ch.for_(given.thread % LANES, ceil_div(sizes.hidden, UNIT), LANES, unroll=4, name="unit") as unit:
        words = ch.const(ty.u32x4, units[unit], name="words")
        for word in (words.x, words.y, words.z, words.w):
            for value in (prim.bf16x2_low(word), prim.bf16x2_high(word)):
                total.set(prim.fma_f32(value, value, total))
    for mask in (4, 2, 1):
        total += prim.shuffle_xor_f32(total, mask)
    with ch.if_(given.thread % LANES == 0):
        given.inverse[token] = prim.rsqrt_f32(total * (1.0 / sizes.hidden) + sizes.epsilon)


@ch.inline
def _add(given: Any, sizes: Sizes, first_tile: Any) -> None:
    """The warps' sums, in order, times 1/rms: a head's elements side by side."""
    with ch.for_(given.thread, MANY.elements, WARPS * 32, unroll=1, name="element") as element:
        total = ch.var(ty.f32, 0.0)
        with ch.for_(WARPS, unroll=True, name="part") as part:
            total += given.partial[part * MANY.elements + element]
        lane, member, place = element % 32, element % OF_GROUP // 32, element // OF_GROUP
        token = place % MANY.groups * 8 + lane % 4 * 2 + member % 2
        row = (first_tile + place // MANY.groups) * M_TILE_ROWS + lane // 4 + member // 2 * (M_TILE_ROWS // 2)
        given.heads[token * sizes.head_dim + row] = total * given.inverse[token]


@ch.inline
def _finish(given: Any, sizes: Sizes, job: Any, first: Any) -> None:
    """By a warp a token: a key is normalised and rotated; both go to the token's place."""
    lane, parts = given.thread % 32, sizes.head_dim // 32
    layer, kind, head = job // (2 * sizes.kv_heads), job // sizes.kv_heads % 2, job % sizes.kv_heads
    with (
        ch.for_(given.thread // 32, MANY.tokens, WARPS, unroll=1, name="token") as token,
        ch.if_(first + token < given.count),
    ):
        values = ch.array(ty.f32, parts)
        with ch.for_(parts, unroll=True, name="part") as part:
            of_head = given.heads[token * sizes.head_dim + part * 32 + lane]
            values[part] = prim.bf16_to_f32(prim.f32_to_bf16(of_head))
        with ch.if_(kind == 0):
            weights = given.head_norms + (layer * 2 + 1) * sizes.head_dim
            _normalise(values, weights, lane, parts, sizes)
            angles = given.rope + ty.u64(given.placed[first + token + POSITIONS_BEGIN]) * sizes.head_dim
            _rotate(values, angles, lane, parts)
        slot = ch.const(ty.u32, given.placed[first + token + PLACES_BEGIN], name="slot")
        of_page = ((layer * sizes.pages + slot // sizes.page_size) * 2 + kind) * sizes.kv_heads + head
        target = given.kv + ty.u64(of_page * sizes.page_size + slot % sizes.page_size) * sizes.head_dim + lane
        with ch.for_(parts, unroll=True, name="part") as part:
            target[part * 32] = prim.f32_to_bf16(values[part])


@ch.inline
def _normalise(values: Any, weights: Any, lane: Any, parts: int, sizes: Sizes) -> None:
    squares = ch.var(ty.f32, 0.0)
    with ch.for_(parts, unroll=True, name="part") as part:
        squares.set(prim.fma_f32(values[part], values[part], squares))
    mean = prim.warp_sum_f32(squares) * (1.0 / sizes.head_dim)
    inverse = ch.const(ty.f32, prim.rsqrt_f32(mean + sizes.epsilon), name="inverse")
    with ch.for_(parts, unroll=True, name="part") as part:
        values[part] = values[part] * inverse * prim.bf16_to_f32(weights[part * 32 + lane])


@ch.inline
def _rotate(values: Any, angles: Any, lane: Any, parts: int) -> None:
    """RoPE (rotate-half): both elements of a pair are a lane's."""
    with ch.for_(parts // 2, unroll=True, name="part") as part:
        pair = (part * 32 + lane) * 2
        cos, sin = ch.const(ty.f32, angles[pair], name="cos"), ch.const(ty.f32, angles[pair + 1], name="sin")
        one, other = (ch.const(ty.f32, values[at], name="of_pair") for at in (part, part + parts // 2))
        values[part] = prim.fma_f32(one, cos, -other * sin)
        values[part + parts // 2] = prim.fma_f32(other, cos, one * sin)
