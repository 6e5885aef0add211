"""Queries, keys and values of a pass, as its attention reads them.

The pool of pages is what decoding reads. Attention of a pass reads keys and values in *core order* instead, of one
layer at a time: [KV head][group of 8 tokens][unit of 8 dims][8 tokens][8 dims], whose units are core matrices, so that
a tile of keys is one bulk copy, whatever the page size. The pass's own go there as they are made; those that were
cached before it are put there first, which costs two passes over them, against one over them for every 128 queries.
Queries lie as operand A wants them: [head][16 tokens][16 dims][lane][4 words].
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from cheetah import lang as ch
from cheetah.blocks.attention.cache import KvCache
from cheetah.blocks.prompt.cases import Finish, Sums
from cheetah.blocks.prompt.finish import HALF, Scales, exchanged_rows, lay_down_squares, store_rows
from cheetah.blocks.prompt.machine import PassMachine
from cheetah.lang import prim, ty
from cheetah.plan import ModelShape
from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.prompt import GROUP_TOKENS

UNIT = 8
CORE_BYTES = ch.named("CORE_BYTES", GROUP_TOKENS * UNIT * 2)
STEP_BYTES = ch.named("STEP_BYTES", 32 * 16)
"""Of a unit of 8 tokens, and of operand A, 16 tokens and 16 dims."""
QUERY_TOKENS = 16
"""Of a warp's part of operand A."""


@dataclass(frozen=True, eq=False)
class PassTokens:
    """The tables of a launch (i32) and how many rows two of them have (u32): see `cheetah.plan.pass_tables`."""

    groups: ch.Expr
    segments: ch.Expr
    segment_count: ch.Expr
    tiles: ch.Expr
    tile_count: ch.Expr

    @ch.inline
    def group(self, index: Any) -> GroupPlace:
        """Of 8 columns."""
        of_group = ch.const(ty.u32x4, _row(self.groups, index))
        return GroupPlace(*_members(of_group))

    @ch.inline
    def segment(self, index: Any) -> SegmentPlace:
        of_segment = ch.const(ty.u32x4, _row(self.segments, index))
        return SegmentPlace(*_members(of_segment))

    @ch.inline
    def tile(self, index: Any) -> TilePlace:
        of_tile = ch.const(ty.u32x4, _row(self.tiles, index))
        return TilePlace(*_members(of_tile))


def _row(table: ch.Expr, index: ch.Expr) -> ch.Expr:
    return ch.reinterpret(ty.ptr(ty.u32x4), table)[index]


def _members(row: ch.Expr) -> tuple[Any, ...]:
    return row.x, row.y, row.z, row.w


@dataclass(frozen=True, eq=False)
class GroupPlace:
    """8 columns: position of the first, how many are tokens, word of the page table, row of keys for position 0."""

    position: ch.Expr
    count: ch.Expr
    table: ch.Expr
    first_row: ch.Expr


@dataclass(frozen=True, eq=False)
class SegmentPlace:
    """A part of a sequence: tokens cached before it, its own, word of the page table, row of keys for position 0."""

    start: ch.Expr
    count: ch.Expr
    table: ch.Expr
    first_row: ch.Expr


@dataclass(frozen=True, eq=False)
class TilePlace:
    """Tokens that attention reads together: first column, its position, how many, row of keys for position 0."""

    column: ch.Expr
    position: ch.Expr
    count: ch.Expr
    first_row: ch.Expr


@dataclass(frozen=True, eq=False)
class PassHeads:
    """Where queries, keys and values of the present layer lie (u8). key_rows: that there is room for, whole key
    tiles. scales: f32 [keys or values][KV head], what numbers of e4m3 codes are multiplied by; None where keys and
    values are bf16. In core order they are bf16 in any case, of codes the numbers that those stand for."""

    machine: PassMachine
    shape: ModelShape
    queries: ch.Expr
    keys: ch.Expr
    values: ch.Expr
    key_rows: int
    scales: ch.Expr | None = None

    @property
    def units(self) -> int:
        """Of a head."""
        units: int = ch.named("HEAD_DIM", self.shape.head_dim) // UNIT
        return units

    @property
    def group_bytes(self) -> int:
        """Of 8 tokens of a head, in core order."""
        return ch.named("HEAD_GROUP_BYTES", self.units * CORE_BYTES)

    def scale(self, kv_row: ch.Expr) -> ch.Expr:
        """Of a key head, or a value head behind those (f32); of e4m3 alone."""
        assert self.scales is not None
        return self.scales[kv_row]

    def core(self, head: ch.Expr, row: ch.Expr, unit: Any) -> ch.Expr:
        """Byte of a unit of a row of keys or values in core order (u64)."""
        group = head * (ch.named("KEY_ROWS", self.key_rows) // GROUP_TOKENS) + row // GROUP_TOKENS
        return ty.u64(group) * self.group_bytes + ty.u64(unit * CORE_BYTES + row % GROUP_TOKENS * (UNIT * 2))

    def query(self, head: ch.Expr, token: ch.Expr, step: ch.Expr) -> ch.Expr:
        """Byte where the operand of 16 tokens and 16 dims begins that `token` belongs to (u64)."""
        group = head * (self.machine.plan.tokens // QUERY_TOKENS) + token // QUERY_TOKENS
        return ty.u64(group * (self.shape.head_dim // 16) + step) * STEP_BYTES


@dataclass(frozen=True, eq=False)
class PassHeadNorms:
    """RMSNorm of every query and key by itself. weights: bf16 [layers, 2, head_dim], of queries, then of keys.
    plus_one: 1 + weight is multiplied with.

    A head's M-tiles lie in one tile. Each warp lays down its M-tile's sums of squares; a thread for each token adds
    those of a head and puts 1/rms in the place of the first."""

    machine: PassMachine
    shape: ModelShape
    weights: ch.Expr
    epsilon: float
    plus_one: bool = field(default=False, kw_only=True)
    in_tile: ClassVar[bool] = True

    def begin(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        """Called by all consumer warps when a tile begins, of norms that do not lie in one."""
        raise NotImplementedError

    @property
    def _m_tiles(self) -> int:
        return self.shape.head_dim // M_TILE_ROWS

    @ch.function
    def work_out(self) -> None:
        """By all consumer warps, behind the last sum of squares."""
        machine, plan = self.machine, self.machine.plan
        kept = machine.region("squares", ty.f32) + machine.thread
        machine.meet()
        with ch.if_(machine.thread < plan.tile_tokens):
            for head in range(plan.tile_m_tiles // self._m_tiles):
                total = ch.var(ty.f32, 0.0)
                for m_tile in range(self._m_tiles):
                    total += kept[(head * self._m_tiles + m_tile) * plan.tile_tokens]
                scale = prim.rsqrt_f32(total * (1.0 / self.shape.head_dim) + self.epsilon)
                kept[head * self._m_tiles * plan.tile_tokens] = scale
        machine.meet()

    @ch.inline
    def load(self, layer: ch.Expr, m_tile: ch.Expr) -> Any:
        """The weights of rows g and g + 8 of an M-tile of a query or a key; those of a value are never used."""
        kind = ch.select(m_tile // self._m_tiles < self.shape.heads, ty.u32(0), ty.u32(1))
        dim = (layer * 2 + kind) * self.shape.head_dim + m_tile % self._m_tiles * HALF + self.machine.lane // 4
        weights = ch.array(ty.f32, 2)
        for index in range(2):
            weights[index] = self._factor(self.weights[dim + index * (self.shape.head_dim // 2)])
        return weights

    def _factor(self, weight: ch.Expr) -> Any:
        """What a weight multiplies by."""
        return prim.bf16_to_f32(weight) + 1.0 if self.plus_one else prim.bf16_to_f32(weight)

    @ch.inline
    def apply(self, sums: Sums, rows: Any, weights: Any) -> None:
        """Rows g and g + 8 of an M-tile of a query or a key, of two tokens: times 1/rms and their weights."""
        machine = self.machine
        first_warp = machine.warp - machine.warp % self._m_tiles
        kept = machine.region("squares", ty.f32) + first_warp * machine.plan.tile_tokens
        scales = ch.reinterpret(ty.ptr(ty.f32x2), kept)
        self._multiply(scales, sums, rows, weights)

    @ch.inline
    def _multiply(self, scales: Any, sums: Sums, rows: Any, weights: Any) -> None:
        lane = self.machine.lane
        scale = ch.const(ty.f32x2, scales[sums.in_tile * (GROUP_TOKENS // 2) + lane % 4], name="scale")
        for index in range(4):
            rows[index] = rows[index] * (scale.x if index % 2 == 0 else scale.y) * weights[index // 2]


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Of rows g and g + 8 of an M-tile (f32 [2]): weights of the head's norm, and biases."""

    norms: Any
    biases: Any = None


@dataclass(frozen=True, eq=False)
class _Group:
    """Of 8 tokens: whose they are, and the angles (cos, sin) of this lane's two."""

    place: GroupPlace
    angles: list[Any]


@dataclass(frozen=True, eq=False)
class StoreHeads(Finish):
    """The rows of q, k and v: scaled, with their biases, normalised, rotated; queries and keys as attention reads them,
    keys and values also into the cache. rope: f32 [tables][positions][head_dim / 2][cos, sin]. query_angles,
    key_angles: which of the tables are the layer's. gates: where the rows behind the values, gates of what query heads
    make, go in token order (u8), if there are any."""

    heads: PassHeads
    tokens: PassTokens
    cache: KvCache
    scales: Scales
    rope: ch.Expr
    max_context: int
    layer: ch.Expr
    query_angles: Any = 0
    key_angles: Any = 0
    biases: ch.Expr | None = None
    norms: PassHeadNorms | None = None
    gates: ch.Expr | None = None

    @property
    def looks(self) -> bool:
        return self.norms is not None and self.norms.in_tile

    def look(self, sums: Sums) -> None:
        lay_down_squares(self.heads.machine, sums, self.with_biases(sums))

    def has_looked(self) -> None:
        assert self.norms is not None
        self.norms.work_out()

    def begin(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        if self.norms is None or self.norms.in_tile:
            self.scales.load(token_tile)
        else:
            self.norms.begin(row_tile, token_tile)

    @ch.function
    def finish(self, sums: Sums) -> None:
        shape, machine = self.heads.shape, self.heads.machine
        m_tiles_per_head = shape.head_dim // M_TILE_ROWS
        head = sums.m_tile // m_tiles_per_head
        m_tile_of_head = sums.m_tile % m_tiles_per_head
        rows = ch.array(ty.f32, 4)
        for index, value in enumerate(self._values(sums)):
            rows[index] = value
        is_paired = head < shape.heads + shape.kv_heads
        with ch.if_(is_paired):
            if self.norms is not None:
                self.norms.apply(sums, rows, sums.of_rows.norms)
            self._rotate(sums.of_group.angles, rows)
        if self.heads.scales is not None:
            self._quantise(rows, head)
        before = shape.heads + 2 * shape.kv_heads
        if self.gates is not None:
            first, second, third, fourth = (rows[index] for index in range(4))
            with ch.if_(head >= before):
                m_tile = sums.m_tile - before * m_tiles_per_head
                store_rows(machine, self.gates, replace(sums, m_tile=m_tile, values=(first, second, third, fourth)), ())
        with nullcontext() if self.gates is None else ch.else_():
            self._lay_down(sums, rows, head, m_tile_of_head, is_paired)

    @ch.inline
    def _lay_down(self, sums: Sums, rows: Any, head: Any, m_tile_of_head: Any, is_paired: Any) -> None:
        """Rows of a query where attention reads it, of a key or a value also where the cache has it."""
        machine, m_tiles_per_head = self.heads.machine, self.heads.shape.head_dim // M_TILE_ROWS
        low, high = exchanged_rows(machine, *(rows[index] for index in range(4)))
        # Rows g and g + 8 of a rotated head are a pair, half a head apart; of a value they are neighbours.
        first_unit = ch.select(is_paired, m_tile_of_head, m_tile_of_head * 2)
        second_unit = ch.select(is_paired, m_tile_of_head + m_tiles_per_head, m_tile_of_head * 2 + 1)
        for unit, word in ((first_unit, low), (second_unit, high)):
            self._store(head, sums.group, sums.of_group.place, unit, word)

    @ch.inline
    def load_rows(self, m_tile: ch.Expr) -> HeadRows:
        norms = None if self.norms is None else self.norms.load(self.layer, m_tile)
        return HeadRows(norms, self.load_biases(m_tile))

    @ch.inline
    def load_biases(self, m_tile: ch.Expr) -> Any:
        """Of rows g and g + 8 of an M-tile; None without any."""
        if self.biases is None:
            return None
        row = self.layer * self.heads.shape.qkv_rows + m_tile * M_TILE_ROWS + self.heads.machine.lane // 4
        biases = ch.array(ty.f32, 2)
        for index in range(2):
            biases[index] = prim.bf16_to_f32(self.biases[row + index * HALF])
        return biases

    @ch.inline
    def load_group(self, m_tile: ch.Expr, group: ch.Expr) -> _Group:
        """The group's place, and of this lane's two tokens the cosine and sine of the M-tile's frequency."""
        half, lane = self.heads.shape.head_dim // 2, self.heads.machine.lane
        place = self.tokens.group(group)
        frequency = m_tile % (self.heads.shape.head_dim // M_TILE_ROWS) * HALF + lane // 4
        loaded = []
        for index in range(2):
            position = ch.minimum(place.position + lane % 4 * 2 + index, self.max_context - 1)
            angles = ch.reinterpret(ty.ptr(ty.f32x2), self.rope)
            row = position + self._table(m_tile) * self.max_context
            loaded.append(ch.const(ty.f32x2, angles[row * half + frequency], name="angle"))
        return _Group(place, loaded)

    def _table(self, m_tile: ch.Expr) -> Any:
        """The number of the table of the angles of an M-tile's rows."""
        if self.query_angles is self.key_angles:
            return self.query_angles
        is_query = m_tile < self.heads.shape.query_rows // M_TILE_ROWS
        return ch.select(is_query, ty.u32(self.query_angles), ty.u32(self.key_angles))

    def _values(self, sums: Sums) -> tuple[Any, ...]:
        """What is normalised, or stored without norms."""
        return self.with_biases(sums) if self.norms is None or self.norms.in_tile else sums.values

    def with_biases(self, sums: Sums) -> tuple[Any, Any, Any, Any]:
        """Products scaled by 1/rms of their tokens, with the rows' biases."""
        values = self.scales.scaled(sums)
        if self.biases is None:
            return values
        first, second, third, fourth = (value + sums.of_rows.biases[index // 2] for index, value in enumerate(values))
        return first, second, third, fourth

    @ch.inline
    def _rotate(self, angles: Any, rows: Any) -> None:
        """RoPE (rotate-half): the pair (k, k + D/2) are rows g and g + 8."""
        for index, angle in enumerate(angles):
            first = ch.const(ty.f32, rows[index], name="first")
            second = ch.const(ty.f32, rows[index + 2], name="second")
            rows[index] = prim.fma_f32(first, angle.x, -second * angle.y)
            rows[index + 2] = prim.fma_f32(second, angle.x, first * angle.y)

    @ch.inline
    def _quantise(self, rows: Any, head: ch.Expr) -> None:
        """Keys and values as the numbers that their codes stand for: what this pass sees is what later ones will."""
        shape = self.heads.shape
        with ch.if_(head >= shape.heads):
            scale = ch.const(ty.f32, self.heads.scale(head - shape.heads), name="scale")
            for index in (0, 2):
                codes = prim.e4m3x2_from_f32(*(prim.divide_f32(rows[index + more], scale) for more in range(2)))
                pair = ch.const(ty.u32, prim.e4m3x4_to_bf16(codes).x, name="pair")
                rows[index] = prim.bf16x2_low(pair)
                rows[index + 1] = prim.bf16x2_high(pair)

    @ch.inline
    def _store(self, head: ch.Expr, group: ch.Expr, place: GroupPlace, unit: ch.Expr, word: ch.Expr) -> None:
        """A word (two dims) of a unit of a head, of this lane's token of a group; heads count queries, keys, values."""
        in_group = self.heads.machine.lane % 4 * 2 + self.heads.machine.lane // 4 % 2
        with ch.if_(head < self.heads.shape.heads):
            self._store_query(head, group * GROUP_TOKENS + in_group, unit, word)
        with ch.else_():
            with ch.if_(in_group < place.count):
                self._store_kv(head, place.position + in_group, place.table, place.first_row, unit, word)

    @ch.function
    def _store_query(self, head: ch.Expr, column: ch.Expr, unit: ch.Expr, word: ch.Expr) -> None:
        heads, pair = self.heads, self.heads.machine.lane // 8  # of the unit's four
        offset = heads.query(head, column, unit // 2) + ty.u64(
            (column % 8 * 4 + pair) * 16 + (column // 8 % 2 + unit % 2 * 2) * 4
        )
        ch.reinterpret(ty.ptr_mut(ty.u32), heads.queries + offset)[0] = word

    @ch.function
    def _store_kv(
        self,
        head: ch.Expr,
        position: ch.Expr,
        table: ch.Expr,
        first_row: ch.Expr,
        unit: ch.Expr,
        word: ch.Expr,
    ) -> None:
        heads, shape, pair = self.heads, self.heads.shape, self.heads.machine.lane // 8
        kv_row = head - shape.heads
        kv_head = kv_row % shape.kv_heads
        is_key = kv_row < shape.kv_heads
        core = heads.core(kv_head, first_row + position, unit) + ty.u64(pair * 4)
        into = ch.select(is_key, heads.keys, heads.values) + core
        ch.reinterpret(ty.ptr_mut(ty.u32), into)[0] = word
        key = self.cache.key(self.layer, kv_head, table, position)
        cached = ch.select(is_key, key, self.cache.value(key)) + (unit * UNIT + pair * 2)
        if heads.scales is None:
            ch.reinterpret(ty.ptr_mut(ty.u32), cached)[0] = word
        else:  # exact: the numbers come from codes
            codes = prim.e4m3x2_from_f32(prim.bf16x2_low(word), prim.bf16x2_high(word))
            ch.reinterpret(ty.ptr_mut(ty.u16), cached)[0] = ty.u16(codes)


@ch.function
def bring_earlier_keys(
    heads: PassHeads, tokens: PassTokens, cache: KvCache, layer: ch.Expr, key_tile: int, window: Any = None
) -> None:
    """In the consumer role, all blocks together, for every segment: the keys and values that were cached before this
    pass, in core order, and zeros for values behind the last one up to the end of its key tile, whose weights are
    zero. So are those of keys that a window has left behind, in the key tile where the window of the segment's first
    token begins: they may not be cached any more."""
    with ch.for_(tokens.segment_count, unroll=1, name="segment") as index:
        segment = tokens.segment(index)
        _bring_cached(heads, segment, cache, layer, key_tile, window)
        _clear_behind(heads, segment, key_tile)


def _threads(machine: PassMachine) -> tuple[Any, Any]:
    """The number of this consumer thread among those of all blocks, and how many those are."""
    threads = machine.consumer_threads
    return machine.block * threads + machine.thread, machine.gpu.blocks * threads


@ch.inline
def _bring_cached(
    heads: PassHeads, segment: SegmentPlace, cache: KvCache, layer: ch.Expr, key_tile: int, window: Any
) -> None:
    thread, threads = _threads(heads.machine)
    first, first_tile = ty.u32(0), ty.u32(0)
    if window is not None:
        first = ch.maximum(segment.start, window - 1) - (window - 1)
        first_tile = first // key_tile * key_tile
    # Eight neighbouring threads have a core matrix: they write 128 bytes side by side.
    of_head = (segment.start - first_tile + (GROUP_TOKENS - 1)) // GROUP_TOKENS
    head_units = of_head * (heads.units * GROUP_TOKENS)
    with ch.for_(thread, head_units * heads.shape.kv_heads, threads, unroll=1, name="index") as index:
        kv_head = index // head_units
        rest = index % head_units
        key = first_tile + rest // (heads.units * GROUP_TOKENS) * GROUP_TOKENS + rest % GROUP_TOKENS
        unit = rest // GROUP_TOKENS % heads.units
        core = heads.core(kv_head, segment.first_row + key, unit)
        if window is not None:
            with ch.if_(key < first):
                ch.reinterpret(ty.ptr_mut(ty.u32x4), heads.values + core)[0] = prim.make_u32x4(0, 0, 0, 0)
        with ch.if_((key >= first) & (key < segment.start) if window is not None else key < segment.start):
            source = cache.key(layer, kv_head, segment.table, key) + unit * UNIT
            for into, words in ((heads.keys, source), (heads.values, cache.value(source))):
                ch.reinterpret(ty.ptr_mut(ty.u32x4), into + core)[0] = _cached_unit(heads, words)


@ch.inline
def _cached_unit(heads: PassHeads, address: ch.Expr) -> ch.Expr:
    """A unit of the cache as bf16 numbers."""
    if heads.scales is None:
        return ch.reinterpret(ty.ptr(ty.u32x4), address)[0]
    codes = ch.const(ty.u32x2, ch.reinterpret(ty.ptr(ty.u32x2), address)[0], name="codes")
    low, high = (ch.const(ty.u32x2, prim.e4m3x4_to_bf16(word), name="pairs") for word in (codes.x, codes.y))
    return prim.make_u32x4(low.x, low.y, high.x, high.y)


@ch.inline
def _clear_behind(heads: PassHeads, segment: SegmentPlace, key_tile: int) -> None:
    thread, threads = _threads(heads.machine)
    kv_heads = heads.shape.kv_heads
    total = segment.start + segment.count
    behind = (total + (key_tile - 1)) // key_tile * key_tile - total
    with ch.for_(thread, behind * (heads.units * kv_heads), threads, unroll=1, name="index") as index:
        unit = index % heads.units
        kv_head = index // heads.units % kv_heads
        core = heads.core(kv_head, segment.first_row + total + index // (heads.units * kv_heads), unit)
        ch.reinterpret(ty.ptr_mut(ty.u32x4), heads.values + core)[0] = prim.make_u32x4(0, 0, 0, 0)
