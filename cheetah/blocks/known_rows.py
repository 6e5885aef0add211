"""The kernel that makes what a drafter of blocks knows of tokens: a row of each, which `fc` makes of what tapped layers
left of it, side by side.

One product, in a launch of its own between that of the other model and those of the drafter: weights
come as a checkpoint has them, row by row, and so do the tokens' rows. A block takes M-tiles in turn, its warps parts of
k; a fragment's k is in the order in which a lane loads 16 bytes of both, which is the same for both. How many tokens
there are changes no bit of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.lang import prim, ty
from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.known import KNOWN_WORDS, ROWS_BEGIN, SLOTS_BEGIN

KERNEL_NAME = "known_rows"
WARPS, GROUP, UNIT = 16, 8, 32
"""Warps of a block; tokens of a group, which an `mma` takes; columns that a warp takes at a time."""
OF_GROUP = M_TILE_ROWS * GROUP


@dataclass(frozen=True)
class Share:
    """What a block multiplies together: M-tiles, groups of tokens. unroll: units of columns that a warp has under way
    at least."""

    tiles: int
    groups: int
    unroll: int

    @property
    def tokens(self) -> int:
        return self.groups * GROUP

    @property
    def elements(self) -> int:
        """Sums of each warp."""
        return self.tiles * self.groups * OF_GROUP


FEW, MANY = Share(tiles=1, groups=2, unroll=4), Share(tiles=2, groups=8, unroll=1)
"""Of a round, whose weights take all the time; of a prompt, whose rows are read as often as there are M-tiles."""
SHARED_BYTES = WARPS * MANY.elements * 4
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
    given.thread = ch.const(ty.u32, ch.thread_idx_x(), name="thread")
    given.partial = ch.reinterpret(ty.ptr_mut(ty.f32), prim.shared_arena())
    given.count = ch.const(ty.u32, given.known[0], name="count")
    with ch.if_(given.count <= FEW.tokens):
        _make_rows(given, FEW, m_tiles, columns, width)
    with ch.else_():
        _make_rows(given, MANY, m_tiles, columns, width)


@ch.inline
def _make_rows(given: Any, share: Share, m_tiles: int, columns: int, width: int) -> None:
    with ch.for_(ch.block_idx_x() * share.tiles, m_tiles, ch.grid_dim_x() * share.tiles, unroll=1, name="tile") as tile:
        with ch.for_(0, given.count, share.tokens, unroll=1, name="first") as first:
            _multiply(given, share, tile, first, m_tiles, columns)
            prim.block_barrier()
            _add(given, share, tile, first, m_tiles, width)
            prim.block_barrier()  # all have read what the next tokens' sums are laid over


@ch.inline
def _multiply(given: Any, share: Share, first_tile: Any, first: Any, m_tiles: int, columns: int) -> None:
    """A warp's part of the sums of some rows and tokens: a part of the columns."""
    warp, lane = given.thread // 32, given.thread % 32
    in_unit = lane % 4  # of 8 columns
    halves, of_tokens = [], []
    for number in range(share.tiles):
        row = ch.minimum(first_tile + number, m_tiles - 1) * M_TILE_ROWS + lane // 4
        for half in (row, row + M_TILE_ROWS // 2):
            halves.append(ch.const(ty.u32, half * (columns // 8) + in_unit, name="of_row"))
    for group in range(share.groups):
        token = ch.minimum(first + (group * GROUP + lane // 4), given.count - 1)
        row = given.known[token + ROWS_BEGIN]
        of_tokens.append(ch.const(ty.u32, row * (columns // 8) + in_unit, name="of_token"))
    weights, taps = (ch.reinterpret(ty.ptr(ty.u32x4), one) for one in (given.fc, given.taps))
    sums = ch.array(ty.f32, share.tiles * share.groups, 4)
    with ch.for_(share.tiles * share.groups, unroll=True, name="place") as place:
        with ch.for_(4, unroll=True, name="member") as member:
            sums[place][member] = 0.0
    with ch.for_(warp, columns // UNIT, WARPS, unroll=share.unroll, name="unit") as unit:
        fragments = []
        for above, below in zip(halves[::2], halves[1::2], strict=True):
            high = ch.const(ty.u32x4, weights[above + unit * 4], name="high")
            low = ch.const(ty.u32x4, weights[below + unit * 4], name="low")
            near = ch.const(ty.u32x4, prim.make_u32x4(high.x, low.x, high.y, low.y), name="near")
            far = ch.const(ty.u32x4, prim.make_u32x4(high.z, low.z, high.w, low.w), name="far")
            fragments.append((near, far))
        for group, of_token in enumerate(of_tokens):
            values = ch.const(ty.u32x4, taps[of_token + unit * 4], name="values")
            for number, (near, far) in enumerate(fragments):
                prim.mma_bf16(sums[number * share.groups + group], near, values.x, values.y)
                prim.mma_bf16(sums[number * share.groups + group], far, values.z, values.w)
    own = given.partial + (warp * share.elements + lane)
    with ch.for_(share.tiles * share.groups, unroll=True, name="place") as place:
        with ch.for_(4, unroll=True, name="member") as member:
            own[place * OF_GROUP + member * 32] = sums[place][member]


@ch.inline
def _add(given: Any, share: Share, first_tile: Any, first: Any, m_tiles: int, width: int) -> None:
    """The warps' sums, in order: a thread an element."""
    with ch.for_(given.thread, share.elements, WARPS * 32, unroll=1, name="element") as element:
        total = ch.var(ty.f32, 0.0)
        with ch.for_(WARPS, unroll=True, name="part") as part:
            total += given.partial[part * share.elements + element]
        lane, member, place = element % 32, element % OF_GROUP // 32, element // OF_GROUP
        token = first + place % share.groups * GROUP + lane % 4 * 2 + member % 2
        tile = first_tile + place // share.groups
        row = tile * M_TILE_ROWS + lane // 4 + member // 2 * (M_TILE_ROWS // 2)
        with ch.if_((token < given.count) & (row < min(width, m_tiles * M_TILE_ROWS))):
            slot = given.known[token + SLOTS_BEGIN]
            given.known_rows[ty.u64(slot) * width + ty.u64(row)] = prim.f32_to_bf16(total)
