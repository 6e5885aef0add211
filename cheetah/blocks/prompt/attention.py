"""Attention of a pass: 64 tokens of one head a warpgroup, over all keys before them, on `wgmma`.

A tile is a query head and the tokens of the warpgroups, of one sequence; the tiles with most keys come first, so that
the blocks end together. Of heads with more than 128 dims two warpgroups have the same tokens, and each the values of a
part of the dims. Its queries stay in registers, keys and values come through the ring, `key_tile` keys a stage,
in core order: queries x keys with the keys as operand B, and weights x values with the values as a transposed one. The
state of a row (its largest logit, the sum of the exponentials, the weighted sum of values) is kept online, in base 2,
and divided out at the end. Values of one tile are multiplied while the weights of the next are worked out. A row sees
the keys up to its own position, and with a window that many of them: all others are left out by selection.
Values behind the last key are zero (`keys`), since their weights, zero, are multiplied with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.attention.step_port import logistic
from cheetah.blocks.peer_stores import store_at
from cheetah.blocks.prompt.finish import scatter_pair
from cheetah.blocks.prompt.keys import CORE_BYTES, QUERY_TOKENS, UNIT, PassHeads, PassTokens, TilePlace
from cheetah.blocks.prompt.machine import GROUP_BYTES, UNIT_BYTES, PassMachine
from cheetah.blocks.prompt.ring import TileRing
from cheetah.lang import prim, ty
from cheetah.plan.formats import VECTOR_COLUMNS
from cheetah.plan.prompt import GROUP_TOKENS

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, eq=False)
class PassAttention:
    """Attention of one layer. into: the input of o in token order (u8), of every rank. window: keys that a row sees,
    its own included (an expression where layers differ), or None. places: where o has its columns (u16), if not in
    order. scale: of products of queries and keys (None: 1 / sqrt(head_dim)); soft_cap: c of logits c * tanh(l / c).
    sinks: of every query head (bf16) the logit of one more key, without a value. gated: what a head makes is multiplied
    by the logistic function of what lies where it goes to."""

    machine: PassMachine
    ring: TileRing
    heads: PassHeads
    tokens: PassTokens
    into: Sequence[ch.Expr]
    key_tile: int
    window: Any = None
    places: ch.Expr | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: ch.Expr | None = None
    gated: bool = False

    @property
    def tile_bytes(self) -> int:
        """Of the keys of a stage, and of its values."""
        return ch.named("KEY_TILE_BYTES", self.key_tile // GROUP_TOKENS * self.heads.group_bytes)

    @property
    def _parts(self) -> int:
        """Of a head's dims, each of which a warpgroup of its own sums values of."""
        return self.machine.plan.value_parts(self.heads.shape.head_dim)

    @property
    def _dims(self) -> int:
        """Of a head, those that a warpgroup sums values of."""
        return self.heads.shape.head_dim // self._parts

    @property
    def _part(self) -> Any:
        """Which part of the dims this warp has."""
        return 0 if self._parts == 1 else self.machine.warp // self._token_warps

    @property
    def _token_warps(self) -> int:
        """Warps that have different tokens."""
        return self.machine.plan.consumer_warps // self._parts

    @property
    def _first_of_warp(self) -> Any:
        """The first of this warp's tokens in a tile."""
        warp = self.machine.warp if self._parts == 1 else self.machine.warp % self._token_warps
        return warp * QUERY_TOKENS

    def _tiles(self) -> AbstractContextManager[ch.Expr]:
        """A loop over this block's tiles."""
        tiles = self.tokens.tile_count * self.heads.shape.heads
        if self.machine.world.size > 1:
            return self._there_and_back(tiles)
        loop: Any = ch.for_(self.machine.block, tiles, self.machine.gpu.blocks, unroll=1, name="tile")
        return loop  # type: ignore[no-any-return]

    @contextmanager
    @ch.inline
    def _there_and_back(self, tiles: ch.Expr) -> Iterator[ch.Expr]:
        """Of several GPUs a block has few tiles: who has one of the first, with most keys, has one of the last."""
        block, blocks = self.machine.block, self.machine.gpu.blocks
        with ch.for_(0, tiles, blocks, unroll=1, name="first_tile") as first:
            turned = ch.select(first // blocks % 2 == 0, block, blocks - 1 - block)
            tile = ch.const(ty.u32, first + turned, name="tile")
            with ch.if_(tile < tiles):
                yield tile

    def _place(self, tile: ch.Expr) -> TilePlace:
        """Its tokens; tiles with most keys come first."""
        return self.tokens.tile(tile // self.heads.shape.heads)

    def _head(self, tile: ch.Expr) -> Any:
        return tile % self.heads.shape.heads

    @ch.inline
    def _key_tiles(self, place: TilePlace) -> tuple[Any, Any]:
        """[begin, end) of those that the tile's tokens see, counted from position 0."""
        end = (place.position + place.count + (self.key_tile - 1)) // self.key_tile
        if self.window is None:
            return ty.u32(0), end
        begin = (ch.maximum(place.position, self.window - 1) - (self.window - 1)) // self.key_tile
        return begin, end

    # -- copies -----------------------------------------------------------------------------------------------------

    @ch.function
    def copy_nothing(self) -> None:
        """In the weights role, which brings nothing here, but whose arrival is needed."""
        with self._tiles() as tile:
            begin, end = self._key_tiles(self._place(tile))
            with ch.for_(begin, end, unroll=1):
                with self.ring.fill_weights(0, lanes=1):
                    pass
            self.ring.end_weights()

    @ch.function
    def copy_keys(self) -> None:
        """In the activations role: keys and values, a stage for each tile of them."""
        with self._tiles() as tile:
            tokens = self._place(tile)
            begin, end = self._key_tiles(tokens)
            kv_head = self._head(tile) // self.heads.shape.group
            with ch.for_(begin, end, unroll=1, name="key_tile") as key_tile:
                offset = self.heads.core(kv_head, tokens.first_row + key_tile * self.key_tile, 0)
                with self.ring.fill_activations(2 * self.tile_bytes) as (stage, barrier):
                    prim.bulk_copy(stage, self.heads.keys + offset, self.tile_bytes, barrier)
                    prim.bulk_copy(stage + self.tile_bytes, self.heads.values + offset, self.tile_bytes, barrier)

    # -- a tile -----------------------------------------------------------------------------------------------------

    @ch.function
    def attend(self) -> None:
        """In the consumer role: all tiles of this block."""
        machine, head_dim = self.machine, self.heads.shape.head_dim
        with self._tiles() as tile:
            place = self._place(tile)
            begin, end = self._key_tiles(place)
            head = self._head(tile)
            first_of_warp = self._first_of_warp
            queries = ch.array(ty.u32x4, head_dim // 16)
            self._load_queries(queries, head, place.column + first_of_warp)
            rows = _Rows(place.position + first_of_warp, machine.lane, self._logit_scale(head))
            output = ch.array(ty.f32, self._dims // 2, zero=True)
            logits = ch.array(ty.f32, self.key_tile // 2)
            even = ch.array(ty.u32x4, self.key_tile // 16)
            odd = ch.array(ty.u32x4, self.key_tile // 16)
            previous = ch.var(ty.u32, self.ring.using.stage)
            self._multiply_keys(logits, queries)
            prim.wgmma_wait_all()
            self._weigh(logits, even, rows, ch.argument(0) if self.window is None else begin * self.key_tile)
            # Two sets of weights take turns: one is multiplied while the other is made.
            others = end - begin - 1
            with ch.for_(0, others // 2 * 2, 2, unroll=1, name="other") as other:
                key = (begin + other + 1) * self.key_tile
                self._go_on(logits, queries, output, even, odd, rows, previous, key)
                self._go_on(logits, queries, output, odd, even, rows, previous, key + self.key_tile)
            with ch.if_(others % 2 != 0):
                self._go_on(logits, queries, output, even, odd, rows, previous, (end - 1) * self.key_tile)
                self._finish_values(output, odd, previous)
            with ch.else_():
                self._finish_values(output, even, previous)
            self._store(output, rows, head, place)

    @ch.function
    def _go_on(
        self,
        logits: Any,
        queries: Any,
        output: Any,
        weights: Any,
        following: Any,
        rows: _Rows,
        previous: Any,
        first_key: ch.Expr,
    ) -> None:
        """Multiply the values of stage `previous` with their weights, and make those of the next stage's keys."""
        stage = ch.const(ty.u32, self.ring.using.stage, name="stage")
        self._multiply_keys(logits, queries)
        self._multiply_values(output, weights, previous)
        prim.wgmma_wait_but_one()  # the logits are there, the values are still being multiplied
        self._weigh(logits, following, rows, first_key)
        prim.wgmma_wait_all()
        self.ring.release(previous)
        self._bring_to_origin(output, rows)
        previous.set(stage)

    @ch.function
    def _finish_values(self, output: Any, weights: Any, previous: Any) -> None:
        """The last values."""
        self._multiply_values(output, weights, previous)
        prim.wgmma_wait_all()
        self.ring.release(previous)

    def _logit_scale(self, head: ch.Expr) -> Any:
        """What products of queries and keys are multiplied by: in base 2, but where a cap comes behind it."""
        base = LOG2_E if self.soft_cap is None else 1.0
        scale = base / math.sqrt(self.heads.shape.head_dim) if self.scale is None else base * self.scale
        if self.heads.scales is None:
            return scale
        return ch.const(ty.f32, self.heads.scale(head // self.heads.shape.group) * scale, name="logit_scale")

    def _inverse(self, total: ch.Expr, head: ch.Expr) -> ch.Expr:
        """What sums of values are multiplied by, for a sum of weights."""
        if self.heads.scales is None:
            return prim.divide_f32(1.0, total)
        return prim.divide_f32(self.heads.scale(head // self.heads.shape.group + self.heads.shape.kv_heads), total)

    @ch.function
    def _load_queries(self, queries: Any, head: ch.Expr, column: ch.Expr) -> None:
        first = self.heads.queries + self.heads.query(head, column, ty.u32(0))
        words = ch.reinterpret(ty.ptr(ty.u32x4), first)
        for step in range(self.heads.shape.head_dim // 16):
            queries[step] = words[step * ch.named("LANES", 32) + self.machine.lane]

    def _stage(self, stage: ch.Expr) -> ch.Expr:
        return self.ring.memory + stage * self.ring.stage_bytes

    @ch.function
    def _multiply_keys(self, logits: Any, queries: Any) -> None:
        """A group: logits = queries x keys of the next stage; two units of dims are the 16 of a step."""
        self.ring.wait()
        memory = self._stage(self.ring.using.stage)
        keys = prim.matrix_descriptor(memory, CORE_BYTES, self.heads.group_bytes)
        prim.wgmma_fence()
        for step in range(self.heads.shape.head_dim // 16):
            descriptor = keys + step * (2 * CORE_BYTES // 16)
            prim.wgmma_bf16(self.key_tile)(logits, queries[step], descriptor, int(step > 0))
        prim.wgmma_commit()
        self.ring.using.advance()

    @ch.function
    def _multiply_values(self, output: Any, weights: Any, stage: ch.Expr) -> None:
        """A group: output += weights x values of a stage; two groups of keys are the 16 of a step, dims the columns."""
        memory = self._stage(stage) + self.tile_bytes + self._part * (self._dims // UNIT * CORE_BYTES)
        values = prim.matrix_descriptor(memory, self.heads.group_bytes, CORE_BYTES)
        prim.wgmma_fence()
        for step in range(self.key_tile // 16):
            descriptor = values + step * (2 * self.heads.group_bytes // 16)
            prim.wgmma_bf16(self._dims, transposed=True)(output, weights[step], descriptor, 1)
        prim.wgmma_commit()

    @ch.inline
    def _cap(self, logits: Any, rows: _Rows) -> None:
        """The products of a tile become capped logits, in base 2."""
        assert self.soft_cap is not None
        with ch.for_(self.key_tile // 2, unroll=True, name="element") as element:
            capped = prim.tanh_f32(logits[element] * (rows.scale * (1.0 / self.soft_cap)))
            logits[element] = capped * (self.soft_cap * LOG2_E)

    @ch.function
    def _mask(self, logits: Any, rows: _Rows, first_key: ch.Expr) -> None:
        """Keys that a row does not see have no weight. Most tiles lie whole before the first row of the warp."""
        partial = first_key + (self.key_tile - 1) > rows.first
        if self.window is not None:
            partial = partial | (first_key + self.window <= rows.first + (QUERY_TOKENS - 1))
        with ch.if_(partial):
            with ch.for_(self.key_tile // 8, unroll=True, name="group") as group:
                for index in range(4):
                    key = first_key + group * 8 + self.machine.lane % 4 * 2 + index % 2
                    position = rows.position + index // 2 * 8
                    seen = key <= position
                    if self.window is not None:
                        seen = seen & (key + self.window > position)
                    element = group * 4 + index
                    logits[element] = ch.select(seen, logits[element], ty.f32(-math.inf))

    @ch.function
    def _weigh(self, logits: Any, weights: Any, rows: _Rows, first_key: ch.Expr) -> None:
        """The weights of a tile of keys, from `first_key` on, as operand A; `rows` say what that makes of the sums."""
        if self.soft_cap is not None:
            self._cap(logits, rows)
        self._mask(logits, rows, first_key)
        scale = rows.scale if self.soft_cap is None else 1.0
        origins = [self._new_origin(logits, rows, index, scale) for index in range(2)]
        with ch.for_(self.key_tile // 8, unroll=True, name="group") as group:
            for index in range(4):
                element = group * 4 + index
                logits[element] = prim.exp2_f32(prim.fma_f32(logits[element], scale, -origins[index // 2]))
                rows.sums[index // 2] += logits[element]
        for step in range(self.key_tile // 16):
            words = [prim.pack_bf16x2(logits[step * 8 + pair], logits[step * 8 + pair + 1]) for pair in (0, 2, 4, 6)]
            weights[step] = prim.make_u32x4(*words)

    @ch.inline
    def _new_origin(self, logits: Any, rows: _Rows, index: int, scale: Any) -> ch.Expr:
        """The largest logit of a row so far, scaled; the sum of its exponentials is brought to it."""
        largest = ch.var(ty.f32, rows.largest[index])
        with ch.for_(self.key_tile // 8, unroll=True, name="group") as group:
            for low in range(2):
                largest.set(prim.maximum_f32(largest, logits[group * 4 + index * 2 + low]))
        for mask in (1, 2):
            largest.set(prim.maximum_f32(largest, prim.shuffle_xor_f32(largest, mask)))
        # A row that has seen no key yet has the largest logit -inf: the exponents below must be numbers.
        seen = largest > ty.f32(-math.inf)
        origin = ch.const(ty.f32, ch.select(seen, largest * scale, ty.f32(0.0)), name="origin")
        # Exactly 1 where nothing larger was found: tiles in which a row sees no key, of which it has more or fewer as
        # its prompt was cut into passes, must change nothing.
        rows.shrinks[index] = prim.exp2_f32(rows.largest[index] * scale - origin)
        rows.largest[index] = largest
        rows.sums[index] *= rows.shrinks[index]
        return origin

    @ch.function
    def _bring_to_origin(self, output: Any, rows: _Rows) -> None:
        """What was summed of the values before, on the scale of the newest weights."""
        with ch.for_(self._dims // 8, unroll=True, name="group") as group:
            for index in range(4):
                output[group * 4 + index] *= rows.shrinks[index // 2]

    @ch.function
    def _store(self, output: Any, rows: _Rows, head: ch.Expr, tile: TilePlace) -> None:
        """The rows' outputs in token order: four groups of 8 dims are a K-tile, a lane's unit of it."""
        lane, plan = self.machine.lane, self.machine.plan
        k_tiles = self._dims // VECTOR_COLUMNS
        for index in range(2):
            total = ch.var(ty.f32, rows.sums[index])
            for mask in (1, 2):
                total += prim.shuffle_xor_f32(total, mask)
            if self.sinks is not None:  # a row has seen a key, so its largest logit is a number
                scale = rows.scale if self.soft_cap is None else 1.0
                sink = prim.bf16_to_f32(self.sinks[head]) * LOG2_E
                total += prim.exp2_f32(sink - rows.largest[index] * scale)
            inverse = ch.const(ty.f32, self._inverse(total, head), name="inverse")
            in_tile = self._first_of_warp + index * GROUP_TOKENS
            group = (tile.column + in_tile) // GROUP_TOKENS
            with ch.if_(in_tile + lane // 4 < tile.count):
                for k_tile in range(k_tiles):
                    gates = self._gates(head, k_tile, group) if self.gated else None
                    words = []
                    for dims in range(4):
                        element = (k_tile * 4 + dims) * 4 + index * 2
                        values = [output[element] * inverse, output[element + 1] * inverse]
                        if gates is not None:
                            pair = getattr(gates, "xyzw"[dims])
                            both = (logistic(prim.bf16x2_low(pair)), logistic(prim.bf16x2_high(pair)))
                            values = [value * gate for value, gate in zip(values, both, strict=True)]
                        words.append(prim.pack_bf16x2(*values))
                    if self.places is not None:
                        self._scatter(words, (self._first_k_tile(head) + k_tile) * VECTOR_COLUMNS, group)
                        continue
                    block = ty.u64((self._first_k_tile(head) + k_tile) * plan.groups + group) * GROUP_BYTES
                    for into in self.into:
                        unit = into + (block + ty.u64(lane % 4 * UNIT_BYTES + lane // 4 * 16))
                        is_peers = into is not self.into[0]
                        store_at(ch.reinterpret(ty.ptr_mut(ty.u32x4), unit), 0, prim.make_u32x4(*words), is_peers)

    @ch.inline
    def _gates(self, head: ch.Expr, k_tile: int, group: ch.Expr) -> ch.Expr:
        """Of what a lane stores of a K-tile: four pairs, which lie there until then."""
        lane, plan = self.machine.lane, self.machine.plan
        block = ty.u64((self._first_k_tile(head) + k_tile) * plan.groups + group) * GROUP_BYTES
        place = self.into[0] + (block + ty.u64(lane % 4 * UNIT_BYTES + lane // 4 * 16))
        gates = ch.const(ty.u32x4, ch.reinterpret(ty.ptr(ty.u32x4), place)[0], name="gates")
        return gates

    def _first_k_tile(self, head: ch.Expr) -> Any:
        """Of the output: where this warp's dims of a head begin."""
        of_all = self.machine.of_all(head, self.heads.shape.heads)
        return (of_all * self._parts + self._part) * (self._dims // VECTOR_COLUMNS)

    @ch.inline
    def _scatter(self, words: Sequence[Any], first: ch.Expr, group: ch.Expr) -> None:
        """A lane's words of a K-tile that begins with column `first`, where the next product has its columns."""
        assert self.places is not None
        for dims, word in enumerate(words):
            column = first + dims * 8 + self.machine.lane % 4 * 2
            scatter_pair(
                *(self.machine, self.into[0], self.places, column, group, self.machine.lane // 4, word, self.into[1:])
            )


class _Rows:
    """The states of a lane's two rows, `position` and `position` + 8, whose parts lie in four lanes: largest is the
    same in all of them, sums are not yet added. first: position of the warp's first row. shrinks: what the newest tile
    of keys makes of what was summed before it. scale: of logits, in base 2."""

    def __init__(self, first: ch.Expr, lane: ch.Expr, scale: Any) -> None:
        self.scale = scale
        self._declare(first, lane)

    @ch.inline
    def _declare(self, first: ch.Expr, lane: ch.Expr) -> None:
        first_row = ch.const(ty.u32, first)
        position = first_row + lane // 4
        largest = ch.array(ty.f32, 2)
        shrinks = ch.array(ty.f32, 2)
        sums = ch.array(ty.f32, 2, zero=True)
        for index in range(2):
            largest[index] = ty.f32(-math.inf)
        self.first, self.position = first_row, position
        self.largest, self.sums, self.shrinks = largest, sums, shrinks
