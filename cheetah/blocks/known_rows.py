"""The kernel that makes what a drafter of blocks knows of tokens: a row of each, which `fc` makes of what tapped layers
left of it, side by side.

One product over few tokens, in a launch of its own between that of the other model and those of the drafter: weights
come as a checkpoint has them, row by row, and so do the tokens' rows. A block takes M-tiles in turn, its warps parts of
k; a fragment's k is in the order in which a lane loads 16 bytes of both, which is the same for both.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.lang import prim, ty
from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.known import KNOWN_WORDS, ROWS_BEGIN, SLOTS_BEGIN

KERNEL_NAME = "known_rows"
WARPS, TOKENS, GROUP, UNIT = 16, 16, 8, 32
"""Warps of a block; tokens that are multiplied together, in two groups; columns that a warp takes at a time."""
GROUPS = TOKENS // GROUP
OF_GROUP = M_TILE_ROWS * GROUP
SHARED_BYTES = WARPS * GROUPS * OF_GROUP * 4
BUFFERS: dict[str, tuple[ty.Type, str, tuple[int | str, ...] | None, str, bool]] = {
    "taps": (ty.ptr(ty.bf16), "what tapped layers left of tokens, a row each", None, "host", True),
    "fc": (ty.ptr(ty.bf16), "its rows as they are, filled up with zeros", ("fc_rows", "fc_columns"), "host", False),
    "known": (ty.ptr(ty.u32), "see cheetah.plan.known", (KNOWN_WORDS,), "host", False),
    "known_rows": (ty.ptr_mut(ty.bf16), "a row a slot of the cache", ("slots_of_pages", "padded_hidden"), "host", True),
}


def build_known_rows(m_tiles: int, columns: int, width: int) -> ch.Kernel:
    """The kernel of so many M-tiles of `columns` columns; width: elements of a row that is made."""
    types = {name: type_ for name, (type_, *_) in BUFFERS.items()}

    @ch.kernel(ch.Params(**types), name=KERNEL_NAME, max_threads=WARPS * 32)
    def known_rows(**given: Any) -> None:
        _emit(SimpleNamespace(**given), m_tiles, columns, width)

    return known_rows


@ch.inline
def _emit(given: Any, m_tiles: int, columns: int, width: int) -> None:
    thread = ch.const(ty.u32, ch.thread_idx_x(), name="thread")
    partial = ch.reinterpret(ty.ptr_mut(ty.f32), prim.shared_arena())
    count = ch.const(ty.u32, given.known[0], name="count")
    with ch.for_(ch.block_idx_x(), m_tiles, ch.grid_dim_x(), unroll=1, name="m_tile") as m_tile:
        with ch.for_(0, count, TOKENS, unroll=1, name="first") as first:
            _multiply(given, columns, m_tile, (first, count), thread, partial)
            prim.block_barrier()
            _add(given, width, m_tile, (first, count), thread, partial)
            prim.block_barrier()  # all have read what the next tokens' sums are laid over


@ch.inline
def _multiply(given: Any, columns: int, m_tile: Any, tokens: Any, thread: Any, partial: Any) -> None:
    """A warp's part of the sums of 16 rows and 16 tokens. tokens: the first of these, and how many there are in all."""
    first, count = tokens
    warp, lane = thread // 32, thread % 32
    in_unit = lane % 4  # of 8 columns
    row = m_tile * M_TILE_ROWS + lane // 4
    low = _units(given.fc, row, columns) + in_unit
    high = _units(given.fc, row + M_TILE_ROWS // 2, columns) + in_unit
    of_tokens = []
    for group in range(GROUPS):
        token = ch.minimum(first + (group * GROUP + lane // 4), count - 1)
        own = _units(given.taps, given.known[token + ROWS_BEGIN], columns) + in_unit
        of_tokens.append(ch.const(low.type, own, name="of_token"))
    sums = ch.array(ty.f32, GROUPS, 4)
    for group in range(GROUPS):
        for member in range(4):
            sums[group][member] = 0.0
    with ch.for_(warp, columns // UNIT, WARPS, unroll=4, name="unit") as unit:
        above = ch.const(ty.u32x4, low[unit * 4], name="above")
        below = ch.const(ty.u32x4, high[unit * 4], name="below")
        near = ch.const(ty.u32x4, prim.make_u32x4(above.x, below.x, above.y, below.y), name="near")
        far = ch.const(ty.u32x4, prim.make_u32x4(above.z, below.z, above.w, below.w), name="far")
        for group, of_token in enumerate(of_tokens):
            values = ch.const(ty.u32x4, of_token[unit * 4], name="values")
            prim.mma_bf16(sums[group], near, values.x, values.y)
            prim.mma_bf16(sums[group], far, values.z, values.w)
    for group in range(GROUPS):
        for member in range(4):
            partial[(warp * GROUPS + group) * OF_GROUP + member * 32 + lane] = sums[group][member]


def _units(base: Any, row: Any, columns: int) -> Any:
    """A row as units of 8 elements."""
    return ch.reinterpret(ty.ptr(ty.u32x4), base + ty.u64(row) * columns)


@ch.inline
def _add(given: Any, width: int, m_tile: Any, tokens: Any, thread: Any, partial: Any) -> None:
    """The warps' sums, in order: of the first threads one an element."""
    first, count = tokens
    total = ch.var(ty.f32, 0.0)
    with ch.for_(WARPS, unroll=True, name="part") as part:
        total += partial[part * (GROUPS * OF_GROUP) + thread % (GROUPS * OF_GROUP)]
    lane, member = thread % 32, thread % OF_GROUP // 32
    token = first + thread // OF_GROUP * GROUP + lane % 4 * 2 + member % 2
    row = m_tile * M_TILE_ROWS + lane // 4 + member // 2 * (M_TILE_ROWS // 2)
    with ch.if_((thread < GROUPS * OF_GROUP) & (token < count) & (row < width)):
        given.known_rows[ty.u64(given.known[token + SLOTS_BEGIN]) * width + ty.u64(row)] = prim.f32_to_bf16(total)


assert GROUPS * OF_GROUP <= WARPS * 32, "a thread an element"
