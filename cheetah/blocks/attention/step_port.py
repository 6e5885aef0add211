"""Attention inside the step: queries, keys and values from their projection, through the exchange, to the core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.cache import KvCache
from cheetah.blocks.attention.head_norms import JointNorms, RawHead, RawHeads, append
from cheetah.blocks.attention.port import AttentionPort, Finished
from cheetah.blocks.columns import POSITION, UNIT, Columns, fragment_word
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.linear.epilogue import HALF, PublishedRows, pair_of_rows, paired_dim, rotate
from cheetah.blocks.linear.interface import Rows
from cheetah.lang import prim, ty
from cheetah.plan import M_TILE_ROWS
from cheetah.plan.products import AttentionPhase


class StepPort(AttentionPort):
    """Queries and new keys come from the input of a phase, what attention makes is its output."""

    def __init__(self, exchange: Exchange, columns: Columns, phase: AttentionPhase, scales: Any = None) -> None:
        self.machine, self.exchange, self.columns, self.scales = columns.machine, exchange, columns, scales
        self.phase, self.reads, self.makes = phase, phase.input.name, phase.output.name
        self.shape = self.machine.shape
        self.layer: Any = None  # the layer whose attention is being emitted
        self.query_angles: Any = 0  # the table of its queries' angles, and of its keys'
        self.key_angles: Any = 0
        self.heads: RawHeads | None = None
        self.head_units = self.shape.head_dim // UNIT

    asks = True

    def asked(self) -> ch.Expr | None:
        return self.exchange.asked4()

    def ask(self, asked: ch.Expr, raw: RawHead) -> None:
        self.exchange.ask4(asked, self.reads, self._place(raw))

    def settle(self, asked: ch.Expr, raw: RawHead, epoch: ch.Expr) -> ch.Expr:
        return self.exchange.settle4(asked, self.reads, self._place(raw), epoch)

    def unit(self, raw: RawHead, epoch: ch.Expr) -> ch.Expr:
        return self.exchange.read4(self.reads, self._place(raw), epoch)

    def _place(self, raw: RawHead) -> Any:
        """The number of a unit in the vector."""
        units = self.machine.projected_rows // UNIT
        return raw.column * units + raw.head * self.head_units + raw.unit

    def query_unit(self, column: ch.Expr, head: ch.Expr, unit: ch.Expr, epoch: ch.Expr) -> ch.Expr:
        return self.unit(RawHead(column, head, unit), epoch)

    def newest_unit(self, column: ch.Expr, kv_head: ch.Expr, value: ch.Expr, unit: ch.Expr, epoch: ch.Expr) -> ch.Expr:
        first = ch.select(value, ty.u32(self.shape.heads + self.shape.kv_heads), ty.u32(self.shape.heads))
        return self.unit(RawHead(column, first + kv_head, unit), epoch)

    def position(self, column: ch.Expr) -> Any:
        return self.columns.state(column, POSITION)

    def scale(self, kv_head: ch.Expr, value: bool) -> Any:
        return self.scale_of(self.layer, kv_head + (self.shape.kv_heads if value else 0))

    def scale_of(self, layer: ch.Expr, kv_row: ch.Expr) -> Any:
        """The scale of a KV head's codes; kv_row counts key heads, then value heads."""
        return self.scales[layer * (2 * self.shape.kv_heads) + kv_row]

    def angles(self, column: ch.Expr, head: ch.Expr, first: Any = 0) -> Any:
        """The angles (f32x2*: cos, sin) by which a column's query or key is rotated, from number `first` on. Heads
        count queries, then keys."""
        half = self.shape.head_dim // 2
        return self.machine.region("rope", ty.f32x2) + (
            column * half + first + self._table(head) * (self.machine.plan.tokens * half)
        )

    def _table(self, head: ch.Expr) -> Any:
        """The number of the table."""
        if self.query_angles is self.key_angles:
            return self.query_angles
        return ch.select(head < self.shape.heads, ty.u32(self.query_angles), ty.u32(self.key_angles))

    def publish(self, made: Finished, epoch: ch.Expr) -> None:
        pair = self._gated(made, epoch) if self.shape.gated_heads else (made.low, made.high)
        element = made.head * self.machine.head_dim + made.dim_pair * 2
        if self.machine.world.size > 1:
            element = element + self.machine.rank * self.shape.query_rows  # of the ranks before
        place = fragment_word(element, made.column, self.columns.limit)
        self.exchange.publish(self.makes, place, prim.pack_bf16x2(*pair), epoch)

    @ch.inline
    def _gated(self, made: Finished, epoch: ch.Expr) -> tuple[Any, Any]:
        """Two dims of a head times the logistic function of their gates, which are heads behind those of values."""
        dim_pair, head = made.dim_pair, made.head + (self.shape.heads + 2 * self.shape.kv_heads)
        unit = self.unit(RawHead(made.column, head, dim_pair // (UNIT // 2)), epoch)
        first = ch.select(dim_pair % 2 == 0, unit.x, unit.y)
        second = ch.select(dim_pair % 2 == 0, unit.z, unit.w)
        gates = ch.const(ty.u32, ch.select(dim_pair % 4 < 2, first, second), name="gates")
        return made.low * logistic(prim.bf16x2_low(gates)), made.high * logistic(prim.bf16x2_high(gates))


def logistic(number: ch.Expr) -> ch.Expr:
    return prim.divide_f32(1.0, 1.0 + prim.exp_f32(-number))


@dataclass(frozen=True, eq=False)
class ProjectedHeads(PublishedRows):
    """The epilogue of q, k and v in a layer."""

    projection: Projection
    layer: ch.Expr
    epoch: ch.Expr

    @property
    def makes(self) -> tuple[str, ...]:
        return self.projection.port.phase.input.names

    def __call__(self, rows: Rows) -> None:
        self.projection.finish(rows, self.layer, self.epoch)


class Projection:
    """What becomes of the rows of q, k and v: rotated, the keys and values appended to the cache, all published.

    biases: bf16 of every layer, in the order of the rows, if there are any. Where heads are finished by who reads them,
    the rows are published as they are, or, with norms of all heads together, times their weights.
    """

    def __init__(self, port: StepPort, cache: KvCache, biases: ch.Expr | None = None) -> None:
        self.port, self.cache, self.biases = port, cache, biases
        self.machine, self.columns, self.shape = port.machine, port.columns, port.shape
        self.norms: JointNorms | None = None
        self.of_token: Callable[[ch.Expr], Any] | None = None
        """Of a head that drafts: what a column's token adds to the rows (bf16*)."""

    def finish(self, rows: Rows, layer: ch.Expr, epoch: ch.Expr) -> None:
        """The epilogue of qkv, in a layer."""
        if self.port.heads is None:
            self._rotate_and_append(rows, layer, epoch)
        else:
            self._publish_raw(_of_whole_m_tile(rows), layer, epoch)

    def _value(self, rows: Rows, layer: ch.Expr) -> ch.Expr:
        """The row's number, with its bias, and what its column's token adds."""
        if self.of_token is not None:
            added = ch.const(ty.f32, prim.bf16_to_f32(self.of_token(rows.column)[self._row(rows)]), name="added")
            with_token: ch.Expr = rows.sum() + added
            return with_token
        if self.biases is None:
            total: ch.Expr = rows.sum()
            return total
        value = ch.const(ty.f32, rows.sum(), name="value")
        return value + prim.bf16_to_f32(self.biases[layer * self.shape.qkv_rows + rows.m_tile * M_TILE_ROWS + rows.row])

    @staticmethod
    def _row(rows: Rows) -> Any:
        return rows.m_tile * M_TILE_ROWS + rows.row

    @ch.inline
    def _dim(self, rows: Rows, head: ch.Expr, m_tile_of_head: ch.Expr) -> ch.Expr:
        """Which dim of its head a row is."""
        shape = self.shape
        paired = paired_dim(m_tile_of_head * HALF + rows.row % HALF, rows.row >= HALF, shape.head_dim)
        is_paired = head < shape.heads + shape.kv_heads
        return ch.select(is_paired, paired, m_tile_of_head * M_TILE_ROWS + rows.row)

    @ch.inline
    def _place(self, rows: Rows, epoch: ch.Expr) -> tuple[Any, Any, Any, Callable[[ch.Value], None]]:
        """A row's head, its M-tile in the head, its dim, and what publishes a pair of rows that it is the first of."""
        shape = self.shape
        m_tiles_per_head = shape.head_dim // M_TILE_ROWS
        head = rows.m_tile // m_tiles_per_head
        m_tile_of_head = rows.m_tile % m_tiles_per_head
        dim = self._dim(rows, head, m_tile_of_head)
        place = (rows.column * self.machine.projected_rows + head * self.machine.head_dim + dim) // 2
        return head, m_tile_of_head, dim, self.port.exchange.publish_later(self.port.reads, place, epoch)

    @ch.inline
    def _publish_raw(self, rows: Rows, layer: ch.Expr, epoch: ch.Expr) -> None:
        _, _, _, publish = self._place(rows, epoch)
        if self.norms is not None:
            self._publish_weighted(self.norms, rows, layer, epoch, publish)
            return
        pair = pair_of_rows(self._value(rows, layer))
        with ch.if_(rows.is_own & (rows.row % 2 == 0)):
            publish(pair)

    @ch.inline
    def _publish_weighted(
        self, norms: JointNorms, rows: Rows, layer: ch.Expr, epoch: ch.Expr, publish: Callable[[ch.Value], None]
    ) -> None:
        value = ch.const(ty.f32, self._value(rows, layer), name="value")
        weighted = ch.const(ty.f32, norms.weighted(value, rows, layer), name="weighted")
        pair = pair_of_rows(weighted)
        with ch.if_(rows.is_own & (rows.row % 2 == 0)):
            publish(pair)
        norms.publish_squares(value, weighted, rows, epoch)

    @ch.inline
    def _rotate_and_append(self, rows: Rows, layer: ch.Expr, epoch: ch.Expr) -> None:
        shape = self.shape
        head, m_tile_of_head, dim, publish = self._place(rows, epoch)
        value = ch.var(ty.f32, self._value(rows, layer))
        with ch.if_(head < shape.heads + shape.kv_heads):
            value.set(rotate(rows, value, m_tile_of_head, lambda: self.port.angles(rows.column, head)))
        neighbour = prim.shuffle_xor_f32(value, 1)
        pair = ch.var(ty.u32, prim.pack_bf16x2(value, neighbour))
        with ch.if_(rows.is_own & (rows.row % 2 == 0)):
            is_coded = self.machine.plan.kv_dtype == "e4m3"
            if is_coded:
                codes = ch.var(ty.u32, 0)
                with ch.if_(head >= shape.heads):
                    # Quantised before anybody uses them, so that later reads of the cache agree.
                    scale = self.port.scale_of(layer, head - shape.heads)
                    codes.set(prim.e4m3x2_from_f32(prim.divide_f32(value, scale), prim.divide_f32(neighbour, scale)))
                    pair.set(prim.e4m3x4_to_bf16(codes).x)
            publish(pair)
            # Behind it: attention waits for the exchange, and for the cache nobody does before the next step.
            with ch.if_(head >= shape.heads):
                place_of = (self.cache, self.columns, layer, head - shape.heads, rows.column, dim)
                append(*place_of, ty.u16(codes) if is_coded else pair)


def _of_whole_m_tile(rows: Rows) -> Rows:
    """The rows of a narrow M-tile as those of the M-tile of 16 rows whose half it is."""
    if rows.count == M_TILE_ROWS:
        return rows
    m_tile, half = rows.m_tile // 2, rows.m_tile % 2
    return replace(rows, m_tile=m_tile, row=half * rows.count + rows.row, count=M_TILE_ROWS)


@dataclass(frozen=True, eq=False)
class LayerSinks:
    """The parameter `sinks` of `learned_sink`, of the layer whose attention is being emitted: sinks, bf16 [layers,
    heads], if there are any."""

    port: StepPort
    sinks: ch.Expr | None

    def __getitem__(self, head: ch.Expr) -> ch.Expr:
        assert self.sinks is not None
        return prim.bf16_to_f32(self.sinks[self.port.layer * self.port.shape.heads + head])
