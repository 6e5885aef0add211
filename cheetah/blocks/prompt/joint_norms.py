"""Norms of queries and keys over more rows than a tile of a pass has: the rows are stored, with sums of their squares,
and finished in the next phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.peer_stores import store_at
from cheetah.blocks.prompt.cases import Sums
from cheetah.blocks.prompt.finish import HALF, lay_down_squares
from cheetah.blocks.prompt.keys import HeadRows, PassHeadNorms, StoreHeads
from cheetah.blocks.prompt.parts import StoreParts
from cheetah.lang import prim, ty
from cheetah.plan.formats import M_TILE_ROWS


@dataclass(frozen=True, eq=False)
class JointHeadNorms(PassHeadNorms):
    """Norms over more rows than a tile has: of heads that are larger, or of all queries together, and of all keys.

    Whoever multiplies stores the products, and the sums of squares of each *span* (a tile's rows, or a head of them if
    it has several); whoever finishes them, in the next phase, adds up those of its norm. squares: f32 [span][tokens].
    joint: whether the norm is of all heads together; weights are then bf16 [layers][rows of q, then of k, in the order
    of the matrix]."""

    squares: ch.Expr
    joint: bool
    in_tile = False

    @property
    def span(self) -> int:
        """M-tiles of a span."""
        return self.machine.plan.span_m_tiles(self.shape.head_dim)

    @property
    def _spans_of_head(self) -> int:
        return self._m_tiles // self.span

    def _spans(self, span: ch.Expr) -> tuple[Any, Any]:
        """The first span of the norm that a span belongs to, and how many that norm has; of values anything."""
        of_head = self._spans_of_head
        if not self.joint:
            return span // of_head * of_head, of_head
        own, ranks = self.shape.heads * of_head, self.machine.world.size
        is_query, queries, keys = span < own, ranks * own, ranks * self.shape.kv_heads * of_head
        return ch.select(is_query, ty.u32(0), ty.u32(queries)), ch.select(is_query, ty.u32(queries), ty.u32(keys))

    @property
    def normed_spans(self) -> int:
        """Of this rank's queries and keys."""
        return (self.shape.heads + self.shape.kv_heads) * self._spans_of_head

    def of_all(self, span: ch.Expr) -> Any:
        """The number that a span of this rank has where its norm is of all ranks' heads: queries of all, keys of all,
        and this rank's values."""
        return self._of_all(span, self._spans_of_head) if self.joint else span

    def _of_all(self, number: ch.Expr, of_head: int) -> Any:
        """The same of a thing of which every head has so many."""
        machine, others = self.machine, self.machine.world.size - 1
        if not others:
            return number
        queries, keys = self.shape.heads * of_head, self.shape.kv_heads * of_head
        of_key = number + (others * queries + machine.rank * keys)
        of_value = number + others * (queries + keys)
        of_others = ch.select(number < queries + keys, of_key, of_value)
        return ch.select(number < queries, number + machine.rank * queries, of_others)

    @ch.function
    def begin(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        """1/rms of every span's rows, for each token.

        Each warp adds up every so many-th span, in order, a token a lane; then one thread a token those sums."""
        machine, plan = self.machine, self.machine.plan
        kept, scales = machine.region("squares", ty.f32), machine.region("scales", ty.f32)
        for index in range(plan.tile_m_tiles // self.span):
            first, count = self._spans(row_tile * (plan.tile_m_tiles // self.span) + index)
            with ch.if_(machine.lane < plan.tile_tokens):
                token = token_tile * plan.tile_tokens + machine.lane
                part = ch.var(ty.f32, 0.0)
                with ch.for_(machine.warp, count, plan.consumer_warps, unroll=1, name="span") as span:
                    part += self.squares[(first + span) * plan.tokens + token]
                kept[machine.warp * plan.tile_tokens + machine.lane] = part
            machine.meet()
            with ch.if_(machine.thread < plan.tile_tokens):
                total = ch.var(ty.f32, 0.0)
                for warp in range(plan.consumer_warps):
                    total += kept[warp * plan.tile_tokens + machine.thread]
                elements = ch.cast(ty.f32, ty.u32(count)) * float(self.span * M_TILE_ROWS)
                scale = prim.rsqrt_f32(prim.divide_f32(total, elements) + self.epsilon)
                scales[index * plan.tile_tokens + machine.thread] = scale
            machine.meet()

    @ch.inline
    def load(self, layer: ch.Expr, m_tile: ch.Expr) -> Any:
        """The weights of rows g and g + 8 of an M-tile of a query or a key; those of a value are never used."""
        if not self.joint:
            return super().load(layer, m_tile)
        rows = self.machine.world.size * self.shape.rotated_rows
        first = self._of_all(m_tile * M_TILE_ROWS, self.shape.head_dim)
        row = ch.minimum(first, rows - M_TILE_ROWS) + self.machine.lane // 4
        weights = ch.array(ty.f32, 2)
        for index in range(2):
            weights[index] = self._factor(self.weights[layer * rows + row + index * HALF])
        return weights

    @ch.inline
    def apply(self, sums: Sums, rows: Any, weights: Any) -> None:
        """Rows g and g + 8 of an M-tile of a query or a key, of two tokens: times 1/rms and their weights."""
        first = self.machine.warp // self.span * self.machine.plan.tile_tokens
        scales = ch.reinterpret(ty.ptr(ty.f32x2), self.machine.region("scales", ty.f32) + first)
        self._multiply(scales, sums, rows, weights)


@dataclass(frozen=True, eq=False)
class StoreSquares(StoreParts):
    """The rows of q, k and v, scaled and with their biases, as `StoreParts`; beside them each span's sums of squares,
    f32 [span][tokens of the pass], for every rank where norms are of all ranks' heads. span: its M-tiles; m_tiles: all
    that there are."""

    heads: StoreHeads
    squares: Sequence[ch.Expr]
    span: int
    m_tiles: int

    def begin(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        self.heads.scales.load(token_tile)

    def load_rows(self, m_tile: ch.Expr) -> HeadRows:
        return HeadRows(None, self.heads.load_biases(m_tile))

    @ch.inline
    def finish(self, sums: Sums) -> None:
        values = self.heads.with_biases(sums)
        lay_down_squares(self.machine, sums, values)
        super().finish(replace(sums, values=values))

    @ch.function
    def end(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        """Every token's sum over each span: its M-tiles in order."""
        machine, plan = self.machine, self.machine.plan
        machine.meet()
        with ch.if_(machine.thread < plan.tile_tokens):
            kept = machine.region("squares", ty.f32) + machine.thread
            for index in range(plan.tile_m_tiles // self.span):
                span = row_tile * (plan.tile_m_tiles // self.span) + index
                with ch.if_(span < self.m_tiles // self.span):
                    total = ch.var(ty.f32, 0.0)
                    for m_tile in range(self.span):
                        total += kept[(index * self.span + m_tile) * plan.tile_tokens]
                    norms = self.heads.norms
                    of_all = norms.of_all(span) if isinstance(norms, JointHeadNorms) else span
                    place = of_all * plan.tokens + token_tile * plan.tile_tokens + machine.thread
                    own, *others = self.squares
                    own[place] = total
                    if isinstance(norms, JointHeadNorms) and others:
                        with ch.if_(span < norms.normed_spans):
                            for squares in others:
                                store_at(squares, place, total, True)
        machine.meet()  # everybody has read before the next tile's squares are laid down
