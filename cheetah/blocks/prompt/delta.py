"""Gated DeltaNet in a pass: what sequences remember goes on over many tokens, token by token in float32.

Three phases behind the product, whose rows lie by token. *Mixing*, by all warps: queries, keys and values of the rows
of a token and of the three before it, which before a segment's first are those that its sequence's state keeps. The
*scan*: the block that keeps a share in decoding (`cheetah.blocks.delta`) has the share's part of the memory in
registers, takes what it needs of some tokens a stage through the ring, and goes from token to token; warps have
columns of their own and wait for nobody. Sums are added up as a step adds them up, and a token's bits do not depend on
how its prompt was cut into passes. The *norms* of heads, by all warps: what heads made, over its root mean square,
times weights and gates, as the next product takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.delta.memory import DeltaParameters
from cheetah.blocks.delta.numbers import silu
from cheetah.blocks.prompt.cases import Finish, Sums
from cheetah.blocks.prompt.finish import Scales, exchanged_rows
from cheetah.blocks.prompt.keys import PassTokens, SegmentPlace
from cheetah.blocks.prompt.machine import GROUP_BYTES, UNIT_BYTES, PassMachine
from cheetah.blocks.prompt.ring import TileRing
from cheetah.lang import prim, ty
from cheetah.plan.delta import COLUMNS, DIMS, PARTS
from cheetah.plan.delta_pass import DeltaPass
from cheetah.plan.formats import M_TILE_ROWS, VECTOR_COLUMNS
from cheetah.plan.prompt import GROUP_TOKENS


@dataclass(frozen=True, eq=False)
class StoreMixed(Finish):
    """The rows, rounded to bf16, [token][width]; scaled, if the input was normalised."""

    machine: PassMachine
    into: ch.Expr
    width: int
    scales: Scales

    def begin(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        self.scales.load(token_tile)

    @ch.function
    def finish(self, sums: Sums) -> None:
        # Four lanes have neighbouring rows of a token: half a sector of memory, and with the other word all of it.
        lane = self.machine.lane
        low, high = exchanged_rows(self.machine, *self.scales.scaled(sums))
        token = sums.group * GROUP_TOKENS + lane % 4 * 2 + lane // 4 % 2
        words = self.into + (ty.u64(token) * (self.width // 2) + ty.u64(sums.m_tile * (M_TILE_ROWS // 2) + lane // 8))
        words[0] = low
        words[M_TILE_ROWS // 4] = high


@dataclass(frozen=True, eq=False)
class PassMemory:
    """What phases of one layer of Gated DeltaNet have, `layer` counting those alone. mixed: the product's rows,
    pairs of bf16 (u32); keys, values, numbers: see `cheetah.plan.delta_pass`; into: the input of the next product in
    token order
    (u8). columns: of the launch. pages: words of a page table."""

    machine: PassMachine
    ring: TileRing
    tokens: PassTokens
    plan: DeltaPass
    parameters: DeltaParameters
    layer: Any
    mixed: ch.Expr
    keys: ch.Expr
    values: ch.Expr
    numbers: ch.Expr
    into: ch.Expr
    columns: ch.Expr
    pages: int
    epsilon: float

    def _columns(self, segment: SegmentPlace) -> Any:
        """Columns of a pass that a segment takes: it begins with a row of attention's operands."""
        return (segment.count + (2 * GROUP_TOKENS - 1)) // (2 * GROUP_TOKENS) * (2 * GROUP_TOKENS)

    def _state(self, segment: SegmentPlace, share: ch.Expr) -> ch.Expr:
        """Where a share of the state of a segment's sequence lies."""
        heads = self.plan.heads
        slot = prim.load_constant_u32(self.parameters.slots + segment.table // self.pages)
        place = (ty.u64(slot) * len(heads.layers) + ty.u64(self.layer)) * heads.shares + ty.u64(share)
        state: ch.Expr = self.parameters.states + place * ch.named("SHARE_WORDS", heads.share_words)
        return state

    def _word(self, column: Any, row: Any) -> Any:
        """Where a token's pair of rows lies (u64)."""
        return ty.u64(column) * (self.plan.heads.mixed_rows // 2) + ty.u64(row // 2)


class HeadNorms(PassMemory):
    """The phase behind the scan."""

    @ch.function
    def normalise(self) -> None:
        """In the consumer role: a warp 8 tokens of a value head; four lanes have a token, each a unit of a K-tile."""
        machine, heads, lane = self.machine, self.plan.heads, self.machine.lane
        warps, k_tiles = machine.plan.consumer_warps, DIMS // VECTOR_COLUMNS
        first, all_warps = machine.block * warps + machine.warp, machine.gpu.blocks * warps
        items = self.columns // GROUP_TOKENS * heads.value_heads
        with ch.for_(first, items, all_warps, unroll=1, name="item") as item:
            head = ch.const(ty.u32, item % heads.value_heads, name="head")
            group = ch.const(ty.u32, item // heads.value_heads, name="group")
            column, unit = group * GROUP_TOKENS + lane // 4, lane % 4
            made, total = ch.array(ty.f32, DIMS // 4), ch.var(ty.f32, 0.0)
            gates = ch.array(ty.u32, DIMS // 8)  # on their way before what heads made is waited for
            for pair in range(DIMS // 8):
                gates[pair] = self.mixed[self._word(column, heads.z_row + head * DIMS + pair * 8 + unit * 2)]
            for pair in range(DIMS // 8):
                part, in_part = head * PARTS + pair // 2, pair % 2 * 8 + unit * 2
                place = ty.u64(part * machine.plan.tokens + column) * COLUMNS + ty.u64(in_part)
                two = ch.const(ty.f32x2, ch.reinterpret(ty.ptr(ty.f32x2), self.values + place)[0], name="two")
                for index, one in enumerate((two.x, two.y)):
                    made[pair * 2 + index] = one
                    total.set(prim.fma_f32(one, one, total))
            for mask in (1, 2):
                total += prim.shuffle_xor_f32(total, mask)
            scale = ch.const(ty.f32, prim.rsqrt_f32(prim.fma_f32(total, 1.0 / DIMS, self.epsilon)), name="scale")
            with ch.if_(lane // 4 < self.tokens.group(group).count):
                for k_tile in range(k_tiles):
                    words = [self._gated(gates, made, k_tile * 4 + index, scale) for index in range(4)]
                    block = ty.u64((head * k_tiles + k_tile) * machine.plan.groups + group) * GROUP_BYTES
                    place = self.into + (block + ty.u64(unit * UNIT_BYTES + lane // 4 * 16))
                    ch.reinterpret(ty.ptr_mut(ty.u32x4), place)[0] = prim.make_u32x4(*words)

    @ch.inline
    def _gated(self, gates: Any, made: Any, pair: int, scale: ch.Expr) -> ch.Expr:
        """Two columns of a head over its root mean square, times the norm's weights and the gates."""
        heads, dim = self.plan.heads, pair * 8 + self.machine.lane % 4 * 2
        norm = self.parameters.numbers + (self.layer * heads.numbers + 2 * heads.value_heads + dim)
        values = []
        for index, half in enumerate((prim.bf16x2_low, prim.bf16x2_high)):
            gate = silu(half(gates[pair])) * norm[index]
            values.append(made[pair * 2 + index] * gate * scale)
        word = ch.const(ty.u32, prim.pack_bf16x2(values[0], values[1]), name="word")
        return word
