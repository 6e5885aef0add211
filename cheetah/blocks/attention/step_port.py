"""Attention inside the step: queries, keys and values from their projection, through the exchange, to the core."""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.cache import KvCache
from cheetah.blocks.attention.port import AttentionPort
from cheetah.blocks.columns import NUMBER, POSITION, SEQUENCE, TOTAL, UNIT, Columns, fragment_word
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.linear.epilogue import rotate, scaled
from cheetah.blocks.linear.interface import Rows
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.plan import STRIP_ROWS


class StepPort(AttentionPort):
    """Queries and new keys come from the vector `qkv`, the output goes to the vector `attention`."""

    def __init__(self, machine: Machine, exchange: Exchange, columns: Columns, scales: Any = None) -> None:
        self.machine, self.exchange, self.columns, self.scales = machine, exchange, columns, scales
        self.shape = machine.shape
        self.layer: Any = None  # of the layer whose attention is being emitted
        self.head_units = self.shape.head_dim // UNIT

    def query_unit(self, column: ch.Expr, head: ch.Expr, unit: ch.Expr, epoch: ch.Expr) -> Any:
        return self._unit(column, head, unit, epoch)

    def newest_unit(self, column: ch.Expr, kv_head: ch.Expr, value: Any, unit: ch.Expr, epoch: ch.Expr) -> Any:
        first = ch.select(value, ty.u32(self.shape.heads + self.shape.kv_heads), ty.u32(self.shape.heads))
        return self._unit(column, first + kv_head, unit, epoch)

    def _unit(self, column: ch.Expr, head: ch.Expr, unit: ch.Expr, epoch: ch.Expr) -> Any:
        row_units = self.shape.qkv_rows // UNIT
        return self.exchange.read4("qkv", column * row_units + head * self.head_units + unit, epoch)

    def position(self, column: ch.Expr) -> Any:
        return self.columns.state(column, POSITION)

    def scale(self, kv_head: ch.Expr, value: bool) -> Any:
        return self.scale_of(self.layer, kv_head + (self.shape.kv_heads if value else 0))

    def scale_of(self, layer: ch.Expr, kv_row: ch.Expr) -> Any:
        """The scale of a KV head's codes; kv_row counts key heads, then value heads."""
        return self.scales[layer * (2 * self.shape.kv_heads) + kv_row]

    def publish(
        self,
        column: ch.Expr,
        head: ch.Expr,
        dim_pair: ch.Expr,
        low: ch.Expr,
        high: ch.Expr,
        lse: ch.Expr,
        epoch: ch.Expr,
    ) -> None:
        element = head * self.shape.head_dim + dim_pair * 2
        place = fragment_word(element, column, self.columns.limit)
        self.exchange.publish("attention", place, prim.pack_bf16x2(low, high), epoch)


class Projection:
    """What becomes of the rows of q, k and v: rotated, the keys and values appended to the cache, all published."""

    def __init__(self, port: StepPort, cache: KvCache) -> None:
        self.port, self.cache = port, cache
        self.machine, self.columns, self.shape = port.machine, port.columns, port.shape

    @ch.inline
    def finish(self, rows: Rows, layer: ch.Expr, epoch: ch.Expr) -> None:
        """The epilogue of qkv, in a layer."""
        shape = self.shape
        strips_per_head = shape.head_dim // STRIP_ROWS
        head = rows.strip // strips_per_head
        strip_of_head = rows.strip % strips_per_head
        value = ch.var(ty.f32, scaled(self.machine, rows))
        dim = ch.var(ty.u32, strip_of_head * STRIP_ROWS + rows.row)
        with ch.if_(head < shape.heads + shape.kv_heads):
            rotated, rotated_dim = rotate(self.machine, rows, value, strip_of_head)
            value.set(rotated)
            dim.set(rotated_dim)
        neighbour = prim.shuffle_xor_f32(value, 1)
        pair = ch.var(ty.u32, prim.pack_bf16x2(value, neighbour))
        with ch.if_((rows.lane < STRIP_ROWS) & (rows.lane % 2 == 0)):
            place = (rows.column * shape.qkv_rows + head * shape.head_dim + dim) // 2
            if self.machine.plan.kv_dtype == "e4m3":
                with ch.if_(head >= shape.heads):
                    # Quantised before anybody uses them, so that later reads of the cache agree.
                    scale = self.port.scale_of(layer, head - shape.heads)
                    codes = prim.e4m3x2_from_f32(prim.divide_f32(value, scale), prim.divide_f32(neighbour, scale))
                    pair.set(prim.e4m3x4_to_bf16(codes).x)
                    self._append(layer, head - shape.heads, dim, ty.u16(codes), rows.column)
            else:
                with ch.if_(head >= shape.heads):
                    self._append(layer, head - shape.heads, dim, pair, rows.column)
            self.port.exchange.publish("qkv", place, pair, epoch)

    @ch.inline
    def _append(self, layer: Any, kv_row: Any, dim: Any, pair: Any, column: Any) -> None:
        """kv_row counts key heads, then value heads."""
        kv_heads, columns = self.shape.kv_heads, self.columns
        with ch.if_(columns.state(column, NUMBER) < columns.state(column, TOTAL)):
            table = columns.state(column, SEQUENCE) * self.machine.plan.pages_per_sequence
            key = self.cache.key(layer, kv_row % kv_heads, table, columns.state(column, POSITION))
            place = ch.select(kv_row < kv_heads, key, self.cache.value(key))
            ch.reinterpret(ty.ptr_mut(pair.type), place + dim)[0] = pair
            prim.fence_proxy_async()  # a later step reads this with the copy engine
