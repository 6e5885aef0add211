"""Heads that are finished by who reads them: RMSNorm of every query and key by itself, or of all together, then RoPE.

A head's rows are made in M-tiles by different blocks, so nobody knows its sum of squares when they are made. They are
published in bf16 as their product gives them; the block that loads a query or a new key for attention has all units of
the head in neighbouring lanes of a warp. New keys and values go to the cache from there too: of the blocks that load
them, that whose item belongs to the column's own tile appends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.cache import KvCache
from cheetah.blocks.columns import NUMBER, POSITION, SEQUENCE, TOTAL, UNIT, Columns
from cheetah.blocks.linear.interface import Rows
from cheetah.blocks.linear.rms import PublishedSquares
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.plan import M_TILE_ROWS


@dataclass(frozen=True, eq=False)
class RawHead:
    """What a lane has of a column's query, key or value: unit `unit` of head number `head`, which counts query heads,
    then key heads, then value heads."""

    column: Any
    head: Any
    unit: Any


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """RMSNorm over a head, then RoPE. weights: bf16 [layers, 2, head_dim], of a layer's queries, then of its keys.
    angles: gives those of a column's head (f32x2*: cos, sin) from a number on. plus_one: 1 + weight is multiplied
    with."""

    machine: Machine
    weights: ch.Expr
    epsilon: float
    angles: Callable[[ch.Expr, ch.Expr, ch.Expr], Any]
    plus_one: bool = field(default=False, kw_only=True)

    @ch.inline
    def weights_of(self, layer: ch.Expr, raw: RawHead) -> ch.Expr | None:
        """A unit's weights (bf16); a value's lanes get those of a key, for nothing."""
        shape = self.machine.shape
        kind = ch.select(raw.head < shape.heads, ty.u32(0), ty.u32(1))
        words = prim.load_constant_u32x4(self.weights + ((layer * 2 + kind) * self.machine.head_dim + raw.unit * UNIT))
        return words

    @ch.inline
    def apply(self, words: ch.Expr, weights: ch.Expr, raw: RawHead) -> ch.Expr:
        """f32[8] of a query or a key from its bf16 words and those of the weights; a value stays as it is."""
        shape = self.machine.shape
        values = widened(words)
        scale = self._scale(values, raw)
        scaled = ch.array(ty.f32, UNIT)
        for index, weight in enumerate(self._factors(weights)):
            scaled[index] = values[index] * scale * weight
        rotated = self._rotated(scaled, raw)
        is_value = raw.head >= shape.heads + shape.kv_heads
        for index in range(UNIT):
            values[index] = ch.select(is_value, values[index], rotated[index])
        return values

    def _factors(self, weights: ch.Expr) -> list[Any]:
        """What the eight numbers of a unit are multiplied by beside 1/rms."""
        return [number + 1.0 if self.plus_one else number for number in _numbers(weights)]

    @ch.inline
    def _scale(self, values: Any, raw: RawHead) -> ch.Expr:
        """1/rms of the lanes' head."""
        head_dim = self.machine.shape.head_dim
        squares = ch.var(ty.f32, 0.0)
        for index in range(UNIT):
            squares.set(prim.fma_f32(values[index], values[index], squares))
        mask = 1
        while mask < head_dim // UNIT:
            squares += prim.shuffle_xor_f32(squares, mask)
            mask *= 2
        scale = prim.rsqrt_f32(squares * (1.0 / head_dim) + self.epsilon)
        return scale

    @ch.inline
    def _rotated(self, values: Any, raw: RawHead) -> ch.Expr:
        """RoPE (rotate-half): the lane with the other elements of the unit's pairs is half a head away."""
        half = self.machine.shape.head_dim // 2
        angles = self.angles(raw.column, raw.head, raw.unit % (half // UNIT) * UNIT)
        is_second = raw.unit >= half // UNIT
        rotated = ch.array(ty.f32, UNIT)
        for index in range(UNIT):
            angle = angles[index]
            partner = prim.shuffle_xor_f32(values[index], half // UNIT)
            turned = ch.select(is_second, partner, -partner) * angle.y
            rotated[index] = prim.fma_f32(values[index], angle.x, turned)
        return rotated


@dataclass(frozen=True, eq=False)
class JointNorms(HeadNorms):
    """RMSNorm of all of a token's queries together, and of all its keys, then RoPE. weights: bf16 [layers][rows of q,
    then of k, in the order of the matrix], those of all ranks. Who makes a row multiplies it by its weight, and
    publishes its M-tile's sum of squares to all ranks; who reads a head multiplies it by 1/rms. squares: those of an
    epoch, over some M-tiles of all ranks' queries, then keys."""

    squares: Callable[[ch.Expr, range], PublishedSquares]

    def _of_all(self, number: ch.Expr, of_head: int) -> ch.Expr:
        """A row or an M-tile of the rank's queries or keys, of which a head has so many, as one of all ranks'."""
        machine, others = self.machine, self.machine.world.size - 1
        if not others:
            return number
        queries, keys = machine.shape.heads * of_head, machine.shape.kv_heads * of_head
        behind = machine.rank * keys + others * queries
        return number + ch.select(number < queries, machine.rank * queries, behind)

    def weighted(self, value: ch.Expr, rows: Rows, layer: ch.Expr) -> ch.Expr:
        """A row's number times its weight; of values the number itself."""
        machine, shape = self.machine, self.machine.shape
        row = rows.m_tile * M_TILE_ROWS + rows.row
        known = self._of_all(ch.minimum(row, shape.rotated_rows - 1), shape.head_dim)
        weight = prim.bf16_to_f32(self.weights[layer * machine.model.rotated_rows + known]) + float(self.plus_one)
        return value * ch.select(row < shape.rotated_rows, weight, ty.f32(1.0))

    @ch.inline
    def publish_squares(self, value: ch.Expr, weighted: ch.Expr, rows: Rows, epoch: ch.Expr) -> None:
        """The squares of an M-tile's rows, but of values."""
        machine, shape = self.machine, self.machine.shape
        of_all = range(machine.model.rotated_rows // M_TILE_ROWS)
        with ch.if_(rows.m_tile < shape.rotated_rows // M_TILE_ROWS):
            m_tile = self._of_all(rows.m_tile, shape.head_dim // M_TILE_ROWS)
            self.squares(epoch, of_all).publish(replace(rows, m_tile=m_tile), value, weighted)

    def _sum_of_lane(self, epoch: ch.Expr, m_tiles: range, column: ch.Expr) -> ch.Expr:
        squares = self.squares(epoch, m_tiles)
        return squares.sum_of_lane(column, self.machine.lane, 32, squares.published.when_and_where)

    @ch.function
    def work_out(self, epoch: ch.Expr) -> None:
        """By all consumer warps: 1/rms of every column's queries and keys, to shared memory: a warp one of either."""
        machine, shape = self.machine, self.machine.model
        queries, keys = shape.query_rows // M_TILE_ROWS, shape.rotated_rows // M_TILE_ROWS
        columns = self.squares(epoch, range(queries)).columns
        scales = machine.region("head_scales", ty.f32)
        with ch.for_(machine.warp, columns.count * 2, machine.plan.consumer_warps, unroll=1, name="place") as place:
            total, elements = ch.var(ty.f32, 0.0), ch.var(ty.f32, 1.0 / (queries * M_TILE_ROWS))
            with ch.if_(place % 2 == 0):
                total.set(self._sum_of_lane(epoch, range(queries), place // 2))
            with ch.else_():
                total.set(self._sum_of_lane(epoch, range(queries, keys), place // 2))
                elements.set(1.0 / ((keys - queries) * M_TILE_ROWS))
            for mask in (16, 8, 4, 2, 1):
                total += prim.shuffle_xor_f32(total, mask)
            with ch.if_(machine.lane == 0):
                scales[place] = prim.rsqrt_f32(total * elements + self.epsilon)
        machine.meet()

    def weights_of(self, layer: ch.Expr, raw: RawHead) -> None:
        """None: they have been multiplied with."""

    def _factors(self, weights: Any) -> list[Any]:
        return [1.0] * UNIT

    @ch.inline
    def _scale(self, values: Any, raw: RawHead) -> ch.Expr:
        """1/rms of the head's kind, of its column."""
        is_key = ch.select(raw.head < self.machine.shape.heads, ty.u32(0), ty.u32(1))
        scale = self.machine.region("head_scales", ty.f32)[raw.column * 2 + is_key]
        return scale


class RawHeads:
    """Heads of attention's input that are finished by who reads them: normalised and rotated, keys and values then put
    into the cache. port: of which the layer is asked, and the scales of codes."""

    def __init__(self, port: Any, cache: KvCache, norms: HeadNorms) -> None:
        self.port, self.cache, self.norms = port, cache, norms
        self.machine, self.columns, self.shape = port.machine, port.columns, port.shape

    @property
    def begins(self) -> bool:
        """Whether something is worked out before the first item of a layer."""
        return isinstance(self.norms, JointNorms)

    def begin(self, epoch: ch.Expr) -> None:
        """That, by all consumer warps of a block that has items; if `begins`."""
        assert isinstance(self.norms, JointNorms)
        self.norms.work_out(epoch)

    def weights(self, raw: RawHead) -> ch.Expr | None:
        """What `finish` needs of a unit besides its words, to be loaded before these are waited for."""
        return self.norms.weights_of(self.port.layer, raw)

    def finish(self, raw: RawHead, words: ch.Expr, weights: Any) -> ch.Expr:
        """The eight numbers that attention works with, f32[8], from a unit's words as they were published. Called by
        whole warps, in which the lanes of a head are neighbours."""
        return self.norms.apply(words, weights, raw)

    def stored(self, values: ch.Expr, raw: RawHead) -> list[Any]:
        """A key's or value's unit as the cache has it: four words of bf16, or two of e4m3 codes."""
        if self.machine.plan.kv_dtype != "e4m3":
            return packed(values)
        return codes_of(values, self.port.scale_of(self.port.layer, raw.head - self.shape.heads))

    def append(self, words: Sequence[Any], raw: RawHead) -> None:
        """Put a key's or value's unit into the cache. Called once for each of a step's."""
        unit = prim.make_u32x4(*words) if len(words) == 4 else words
        append(
            self.cache, self.columns, self.port.layer, raw.head - self.shape.heads, raw.column, raw.unit * UNIT, unit
        )


def packed(values: ch.Expr) -> list[Any]:
    """Eight numbers as the words of a unit: bf16."""
    return [prim.pack_bf16x2(values[index], values[index + 1]) for index in range(0, UNIT, 2)]


def codes_of(values: Any, scale: ch.Expr) -> list[Any]:
    """Eight numbers as two words of e4m3 codes, which are multiplied by `scale`."""
    quotients = [prim.divide_f32(values[index], scale) for index in range(UNIT)]
    pairs = [ty.u32(prim.e4m3x2_from_f32(*quotients[index : index + 2])) for index in range(0, UNIT, 2)]
    return [pairs[0] | (pairs[1] << 16), pairs[2] | (pairs[3] << 16)]


@ch.inline
def append(cache: KvCache, columns: Columns, layer: Any, kv_row: Any, column: Any, dim: Any, data: Any) -> None:
    """Put elements of a column's new key or value into the cache, from dim `dim` on: one number of the device, or
    several words. kv_row counts key heads, then value heads. A column without a token left has nothing to put there."""
    machine = cache.machine
    kv_heads = machine.shape.kv_heads
    with ch.if_(columns.state(column, NUMBER) < columns.state(column, TOTAL)):
        table = columns.state(column, SEQUENCE) * machine.plan.pages_per_sequence
        key = cache.key(layer, kv_row % kv_heads, table, columns.state(column, POSITION))
        place = ch.select(kv_row < kv_heads, key, cache.value(key))
        words = data if isinstance(data, list) else [data]
        for index, word in enumerate(words):
            ch.reinterpret(ty.ptr_mut(word.type), place + dim)[index] = word
        prim.fence_proxy_async()  # a later step reads this with the copy engine


@ch.inline
def widened(words: ch.Expr) -> ch.Expr:
    """A unit of bf16 as f32[8]."""
    values = ch.array(ty.f32, UNIT)
    for index, value in enumerate(_numbers(words)):
        values[index] = value
    return values


def _numbers(words: ch.Expr) -> list[Any]:
    """The eight numbers of a unit, in order."""
    pairs = [getattr(words, member) for member in "xyzw"]
    return [half(pair) for pair in pairs for half in (prim.bf16x2_low, prim.bf16x2_high)]
