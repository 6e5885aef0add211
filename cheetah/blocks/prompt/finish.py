"""What becomes of the sums of a tile: the input of a later product in token order, an activation, the residual stream.

A lane has two rows of two tokens; one exchange with the lane of the neighbouring row makes each the owner of one token
and of pairs of neighbouring columns, which are words in token order.

What the next product takes is stored to every GPU that makes the pass: `into` is where it lies on this one, `others` on
those (of a `Finish`: this one's first), and its M-tiles are numbered over all ranks. What a GPU keeps for itself has
the numbers of its own M-tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.epilogue import SIGMOID_OF, clamped_of, relu2_of
from cheetah.blocks.linear.taps import NO_TAP, Tap
from cheetah.blocks.patterns import HIGH_HALVES, LOW_HALVES
from cheetah.blocks.peer_stores import store_at
from cheetah.blocks.prompt.cases import ACCUMULATORS, Finish, Sums
from cheetah.blocks.prompt.machine import ACCUMULATOR_BYTES, GROUP_BYTES, UNIT_BYTES, PassMachine
from cheetah.lang import prim, ty
from cheetah.plan.formats import M_TILE_ROWS, VECTOR_COLUMNS
from cheetah.plan.index import ceil_div
from cheetah.plan.prompt import GROUP_TOKENS

HALF = M_TILE_ROWS // 2


class Scales:
    """1/rms of the tokens of a tile, from the sums of squares that whoever made the input left.

    squares: f32 [row tiles][tokens of the pass], a partial sum of each of `parts` row tiles. They are added in order,
    when a tile begins, into one of two buffers in turn; a barrier of the consumer warps lies between writing and
    reading, and so between reading a buffer and writing it again.
    """

    def __init__(self, machine: PassMachine, squares: ch.Expr, parts: int, elements: int, epsilon: float) -> None:
        self.machine, self.squares, self.parts = machine, squares, parts
        self.elements, self.epsilon = elements, epsilon
        self._declare()

    @ch.inline
    def _declare(self) -> None:
        with self.machine.consumer:
            turn = ch.var(ty.u32, 0)
            scales = self.machine.region("scales", ty.f32)
            self.turn, self.memory = turn, scales

    @property
    def name(self) -> str:
        return self.machine.name

    @ch.function
    def load(self, token_tile: ch.Expr) -> None:
        """By all consumer warps, once a tile."""
        machine, plan = self.machine, self.machine.plan
        self.turn ^= 1
        with ch.if_(machine.thread < plan.tile_tokens):
            token = token_tile * plan.tile_tokens + machine.thread
            scale = self.of_token(token)
            self._buffer()[machine.thread] = scale
        machine.meet()

    @ch.inline
    def of_token(self, token: ch.Expr) -> ch.Expr:
        """1/rms of a token (f32)."""
        total = ch.var(ty.f32, 0.0)
        with ch.for_(self.parts, unroll=min(self.parts, 32)) as part:
            total += self.squares[part * self.machine.plan.tokens + token]
        scale = prim.rsqrt_f32(total * (1.0 / self.elements) + self.epsilon)
        return scale

    def _buffer(self) -> ch.Expr:
        return self.memory + self.turn * self.machine.plan.tile_tokens

    @ch.inline
    def scaled(self, sums: Sums) -> tuple[Any, Any, Any, Any]:
        """The sums times the scale of their token."""
        pairs = ch.reinterpret(ty.ptr(ty.f32x2), self._buffer())
        scale = pairs[sums.in_tile * (GROUP_TOKENS // 2) + self.machine.lane % 4]
        first, second, third, fourth = sums.values
        return first * scale.x, second * scale.y, third * scale.x, fourth * scale.y


class TokenWeights(Scales):
    """What a tile's tokens weigh what an expert makes that all of them have: the logistic function of logit `place` of
    a token's `width` (f32 [token][width]). They take turns with `others` in their buffers."""

    def __init__(self, others: Scales, logits: ch.Expr, width: int, place: int) -> None:
        self.others, self.width, self.place = others, width, place
        super().__init__(others.machine, logits, 1, 0, 0.0)

    def _declare(self) -> None:
        self.turn, self.memory = self.others.turn, self.others.memory

    @property
    def name(self) -> str:
        return "weights"

    @ch.inline
    def of_token(self, token: ch.Expr) -> ch.Expr:
        logit = self.squares[token * self.width + self.place]
        return prim.divide_f32(ty.f32(1.0), 1.0 + prim.exp_f32(-logit))

    def weighed(self, value: Any, in_tile: Any, index: Any) -> Any:
        """Accumulator `index` of a group, times the weight of its token."""
        return value * self._buffer()[in_tile * GROUP_TOKENS + self.machine.lane % 4 * 2 + index % 2]


class Unscaled(Scales):
    """Of an input that goes through no norm."""

    def load(self, token_tile: ch.Expr) -> None:
        self.machine.meet()

    def of_token(self, token: ch.Expr) -> ch.Expr:
        return ty.f32(1.0)

    def scaled(self, sums: Sums) -> tuple[Any, Any, Any, Any]:
        first, second, third, fourth = sums.values
        return first, second, third, fourth


@ch.inline
def _neighbours(machine: PassMachine, of_first: ch.Expr, of_second: ch.Expr) -> tuple[Any, Any]:
    """Give the lane of the neighbouring row what belongs to its token: (words of the even row, of the odd row), of
    token 2t on lanes of an even row, of token 2t + 1 on the others."""
    is_odd = machine.lane // 4 % 2 != 0
    mine = ch.const(ty.u32, ch.select(is_odd, of_second, of_first), name="mine")
    other = prim.shuffle_xor_u32(ch.select(is_odd, of_first, of_second), 4)
    return ch.select(is_odd, other, mine), ch.select(is_odd, mine, other)


@ch.inline
def exchanged_rows(
    machine: PassMachine, first: ch.Expr, second: ch.Expr, third: ch.Expr, fourth: ch.Expr
) -> tuple[Any, Any]:
    """Of the sums of an M-tile: two words of this lane's token, rows g and g + 1 (g even), and those 8 below."""
    even, odd = _neighbours(machine, prim.pack_bf16x2(first, third), prim.pack_bf16x2(second, fourth))
    return prim.byte_permute(even, odd, LOW_HALVES), prim.byte_permute(even, odd, HIGH_HALVES)


@ch.inline
def _address(machine: PassMachine, into: ch.Expr, k_tile: ch.Expr, group: ch.Expr) -> ch.Expr:
    """The address of this lane's unit and token in a group: its token is 2t, or 2t + 1 where its row is odd."""
    row, token = machine.lane // 4, machine.lane % 4 * 2 + machine.lane // 4 % 2
    block = ty.u64(k_tile * machine.plan.groups + group) * GROUP_BYTES
    return into + block + ty.u64(row // 2 * UNIT_BYTES + token * 16)


@ch.function
def store_rows(machine: PassMachine, into: ch.Expr, sums: Sums, others: Sequence[ch.Expr]) -> None:
    """The 16 rows of an M-tile as 16 columns of a vector in token order, rounded to bf16."""
    words: Any = ch.var(ty.u32x2)
    low, high = exchanged_rows(machine, *sums.values)
    words.x = low
    words.y = high
    k_tile, half = sums.m_tile // 2, sums.m_tile % 2
    for base in (into, *others):
        address = _address(machine, base, k_tile, sums.group) + half * 8
        store_at(ch.reinterpret(ty.ptr_mut(ty.u32x2), address), 0, words, base is not into)


@ch.function
def scatter_rows(machine: PassMachine, into: ch.Expr, sums: Sums, places: ch.Expr, others: Sequence[ch.Expr]) -> None:
    """The same, each row where `places` (u16) says."""
    token = machine.lane % 4 * 2 + machine.lane // 4 % 2
    first = sums.m_tile * M_TILE_ROWS + machine.lane // 8 * 2
    for word, row in zip(exchanged_rows(machine, *sums.values), (first, first + HALF), strict=True):
        scatter_pair(machine, into, places, row, sums.group, token, word, others)


@ch.function
def scatter_pair(
    machine: PassMachine,
    into: ch.Expr,
    places: ch.Expr,
    column: ch.Expr,
    group: ch.Expr,
    token: ch.Expr,
    word: ch.Expr,
    others: Sequence[ch.Expr],
) -> None:
    """Columns `column` (even) and the next of a token of a group (two bf16) where `places` (u16) says."""
    pair = ch.const(ty.u32, ch.reinterpret(ty.ptr(ty.u32), places)[column // 2], name="pair")
    for place, element in ((pair & 0xFFFF, word & 0xFFFF), (pair >> 16, word >> 16)):
        block = ty.u64(place // VECTOR_COLUMNS * machine.plan.groups + group) * GROUP_BYTES
        for base in (into, *others):
            address = base + block + ty.u64(machine.plan.address_in_group(place % VECTOR_COLUMNS, token))
            store_at(ch.reinterpret(ty.ptr_mut(ty.u16), address), 0, ty.u16(element), base is not into)


@ch.function
def store_gated(machine: PassMachine, into: ch.Expr, sums: Sums, activation: str, others: Sequence[ch.Expr]) -> None:
    """silu(gate) * up of an M-tile's 8 gate rows and their up rows, as 8 columns of a vector in token order."""
    first, second, third, fourth = sums.values
    gated = _gated(first, third, activation), _gated(second, fourth, activation)
    _store_pair(machine, (into, *others), sums, *gated)


@ch.inline
def _store_pair(machine: PassMachine, places: Sequence[ch.Expr], sums: Sums, first: ch.Expr, second: ch.Expr) -> None:
    """A lane's row of an M-tile's 8, of its two tokens, to every rank's buffer, this one's first."""
    pair = prim.pack_bf16x2(first, second)
    even, odd = _neighbours(machine, pair, pair)
    is_odd = machine.lane // 4 % 2 != 0
    word = ch.select(is_odd, prim.byte_permute(even, odd, HIGH_HALVES), prim.byte_permute(even, odd, LOW_HALVES))
    tiles = VECTOR_COLUMNS // HALF
    for base in places:
        address = _address(machine, base, sums.m_tile // tiles, sums.group) + sums.m_tile % tiles * 4
        store_at(ch.reinterpret(ty.ptr_mut(ty.u32), address), 0, word, base is not places[0])


def _gated(gate: ch.Expr, up: ch.Expr, activation: Any) -> ch.Expr:
    if not isinstance(activation, str):
        gate, up = (ch.const(ty.f32, row, name="row") for row in (gate, up))
        return clamped_of(gate, up, activation.alpha, activation.limit)
    return prim.divide_f32(gate, 1.0 + prim.exp_f32(-SIGMOID_OF[activation](gate))) * up


@dataclass(frozen=True, eq=False)
class Store(Finish):
    """The rows, in token order; scaled, if the input was normalised. m_tiles: of the matrix, a rank's. is_pushed:
    `into` is this GPU's alone, and warps that push bring others the tile."""

    machine: PassMachine
    into: Sequence[ch.Expr]
    m_tiles: int
    scales: Scales | None = None
    is_pushed: bool = field(default=False, kw_only=True)

    def begin(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        if self.scales is not None:
            self.scales.load(token_tile)

    def finish(self, sums: Sums) -> None:
        store_rows(self.machine, self.into[0], self._scaled(sums), self.into[1:])

    def _scaled(self, sums: Sums) -> Sums:
        values = sums.values if self.scales is None else self.scales.scaled(sums)
        return replace(sums, values=values, m_tile=self.machine.of_all(sums.m_tile, self.m_tiles))


@dataclass(frozen=True, eq=False)
class StoreGated(Store):
    """activation(gate) * up of gate and up rows; "relu2" of every row."""

    activation: str = "silu"

    def finish(self, sums: Sums) -> None:
        scaled = self._scaled(sums)
        if self.activation == "relu2":
            first, second, third, fourth = (relu2_of(ch.const(ty.f32, row, name="row")) for row in scaled.values)
            made = replace(scaled, values=(first, second, third, fourth))
            store_rows(self.machine, self.into[0], made, self.into[1:])
        else:
            store_gated(self.machine, self.into[0], scaled, self.activation, self.into[1:])


@ch.function
def store_weighed(
    machine: PassMachine,
    into: ch.Expr,
    sums: Sums,
    factors: ch.Expr,
    activation: Any,
    others: Sequence[ch.Expr],
) -> None:
    """The same of slots, whose gate and up rows are scaled, and whose product is multiplied by a weight in f32.
    factors: f32x4 of two slots, the scale of each before its weight. What `of_rows` has is added to the rows."""
    first, second, third, fourth = sums.values
    rows = [(first * factors.x, third * factors.x), (second * factors.z, fourth * factors.z)]
    if sums.of_rows is not None:
        rows = [(gate + sums.of_rows[0], up + sums.of_rows[1]) for gate, up in rows]
    gated = _gated(*rows[0], activation) * factors.y
    other = _gated(*rows[1], activation) * factors.w
    _store_pair(machine, (into, *others), sums, gated, other)


class SlotFactors(Scales):
    """Of the slots of a tile what their sums are multiplied with before and behind the activation: f32x2 [slot]. They
    wait in shared memory as `Scales` do."""

    def __init__(self, machine: PassMachine, factors: ch.Expr) -> None:
        self.factors = factors
        super().__init__(machine, factors, 0, 0, 0.0)

    @ch.inline
    def _declare(self) -> None:
        with self.machine.consumer:
            factor_turn = ch.var(ty.u32, 0)
            slot_factors = self.machine.region("slot_factors", ty.f32x2)
            self.turn, self.memory = factor_turn, slot_factors

    @ch.function
    def load(self, first_group: ch.Expr) -> None:
        """By all consumer warps, once a tile, of the slots from that group on."""
        machine = self.machine
        self.turn ^= 1
        with ch.if_(machine.thread < machine.plan.tile_tokens):
            of_slots = ch.reinterpret(ty.ptr(ty.f32x2), self.factors)
            self._buffer()[machine.thread] = of_slots[first_group * GROUP_TOKENS + machine.thread]
        machine.meet()

    def of_pair(self, sums: Sums) -> ch.Expr:
        """Those of this lane's two slots (f32x4)."""
        pairs = ch.reinterpret(ty.ptr(ty.f32x4), self._buffer())
        return pairs[sums.in_tile * (GROUP_TOKENS // 2) + self.machine.lane % 4]


@dataclass(frozen=True, eq=False)
class StoreWeighed(Finish):
    """activation(gate) * up of an expert's rows, times the weight that it has to the token of each slot. m_tiles: of
    the matrix, a rank's. biases: of gate and up, bf16 [expert][bias_rows], if they have some."""

    machine: PassMachine
    into: Sequence[ch.Expr]
    m_tiles: int
    factors: SlotFactors
    activation: Any
    biases: ch.Expr | None = None
    bias_rows: int = 0

    @ch.inline
    def load_rows_of(self, m_tile: ch.Expr, expert: ch.Expr) -> Any:
        if self.biases is None:
            return None
        of_all = self.machine.of_all(m_tile, self.m_tiles)
        return _biases_of(self.machine, self.biases + expert * self.bias_rows, of_all)

    def begin(self, row_tile: ch.Expr, first_group: ch.Expr) -> None:
        self.factors.load(first_group)

    def finish(self, sums: Sums) -> None:
        factors = ch.const(ty.f32x4, self.factors.of_pair(sums), name="factors")
        of_all = replace(sums, m_tile=self.machine.of_all(sums.m_tile, self.m_tiles))
        store_weighed(self.machine, self.into[0], of_all, factors, self.activation, self.into[1:])


@dataclass(frozen=True, eq=False)
class StoreBySlot(Finish):
    """The rows, rounded to bf16: words [slot][M-tile][g], of rows g and g + 8. width: rows of a slot."""

    machine: PassMachine
    into: ch.Expr
    width: int

    @ch.function
    def finish(self, sums: Sums) -> None:
        # Eight lanes have an M-tile of a slot: a whole sector of memory.
        lane, words = self.machine.lane, self.width // 2
        place = ty.u64(sums.group * GROUP_TOKENS + lane % 4 * 2) * words + ty.u64(sums.m_tile * HALF + lane // 4)
        of_slot = self.into + place
        for index in range(2):
            of_slot[index * words] = prim.pack_bf16x2(sums.values[index], sums.values[index + 2])


@dataclass(frozen=True, eq=False)
class StoreByToken(Finish):
    """The rows, f32 [token][width]; scaled, if the input was normalised; with biases (bf16), if any."""

    machine: PassMachine
    into: ch.Expr
    width: int
    scales: Scales | None = None
    biases: ch.Expr | None = None

    def load_rows(self, m_tile: ch.Expr) -> Any:
        """The biases of rows g and g + 8."""
        return None if self.biases is None else _biases_of(self.machine, self.biases, m_tile)

    def begin(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        if self.scales is not None:
            self.scales.load(token_tile)

    @ch.function
    def finish(self, sums: Sums) -> None:
        # Eight lanes have neighbouring rows of a token: a whole sector of memory.
        lane = self.machine.lane
        first = ty.u64(sums.group * GROUP_TOKENS + lane % 4 * 2) * self.width
        rows = self.into + (first + ty.u64(sums.m_tile * M_TILE_ROWS + lane // 4))
        values = sums.values if self.scales is None else self.scales.scaled(sums)
        for index, value in enumerate(values):
            added = value if sums.of_rows is None else value + sums.of_rows[index // 2]
            rows[index % 2 * self.width + index // 2 * HALF] = added


@ch.inline
def _biases_of(machine: PassMachine, biases: ch.Expr, m_tile: ch.Expr) -> Any:
    """Of rows g and g + 8 of an M-tile (f32 [2])."""
    loaded = ch.array(ty.f32, 2)
    for index in range(2):
        loaded[index] = prim.bf16_to_f32(biases[m_tile * M_TILE_ROWS + machine.lane // 4 + index * HALF])
    return loaded


@dataclass(frozen=True, eq=False)
class StoreResidual(Finish):
    """The residual stream in f32, in accumulator order, and what the next product takes: its bf16 rows times the
    weights of the next norm, in token order, with each row tile's sums of their squares, f32 [row tiles][tokens].
    m_tiles: of the stream, a rank's, which keeps those; the rest all ranks get. places: where the next product has them
    (u16), if not in order. plus_one: norms multiply by 1 + weight. biases: what is added to the rows (bf16), where
    `has_biases`. tap: where the stream is kept besides, of layers that are tapped. is_pushed: as of `Store`."""

    machine: PassMachine
    residual: ch.Expr
    into: Sequence[ch.Expr]
    squares: Sequence[ch.Expr]
    norm: ch.Expr
    m_tiles: int
    places: ch.Expr | None = None
    plus_one: bool = False
    multiplier: float = 1.0
    biases: ch.Expr | None = None
    has_biases: Any = False
    tap: Tap | None = None
    is_pushed: bool = False

    @ch.inline
    def load_rows(self, m_tile: ch.Expr) -> ch.Expr:
        """The norm's weights of rows g and g + 8, then what is added to these rows, if anything is."""
        row = self.row(m_tile)
        weights = ch.array(ty.f32, 2 if self.biases is None else 4)
        for index in range(2):
            weights[index] = self._weight(self.norm[row + index * HALF])
            if self.biases is not None:
                bias = prim.bf16_to_f32(self.biases[row + index * HALF])
                weights[index + 2] = ch.select(self.has_biases, bias, ty.f32(0.0))
        return weights

    def row(self, m_tile: ch.Expr) -> Any:
        """Row g of an M-tile, of all ranks' rows."""
        return self.machine.of_all(m_tile, self.m_tiles) * M_TILE_ROWS + self.machine.lane // 4

    def _weight(self, stored: ch.Expr) -> ch.Expr:
        weight = prim.bf16_to_f32(stored)
        return weight + 1.0 if self.plus_one else weight

    @ch.inline
    def finish(self, sums: Sums) -> None:
        machine, plan = self.machine, self.machine.plan
        if self.biases is not None:
            added = [value + sums.of_rows[index // 2 + 2] for index, value in enumerate(sums.values)]
            first, second, third, fourth = (ch.const(ty.f32, value, name="value") for value in added)
            sums = replace(sums, values=(first, second, third, fourth))
        index = (ty.u64(sums.m_tile) * plan.groups + ty.u64(sums.group)) * (ACCUMULATOR_BYTES // 16)
        kept = ch.var(ty.f32x4)
        for member, value in zip("xyzw", sums.values, strict=True):
            setattr(kept, member, value)
        ch.reinterpret(ty.ptr_mut(ty.f32x4), self.residual)[index + ty.u64(machine.lane)] = kept
        if self.tap is not None:
            self._keep(self.tap, sums)
        rounded = [_rounded(value) for value in sums.values]
        lay_down_squares(machine, sums, rounded)
        values = tuple(value * sums.of_rows[index // 2] for index, value in enumerate(rounded))
        weighted = replace(sums, values=values, m_tile=machine.of_all(sums.m_tile, self.m_tiles))
        if self.places is None:
            store_rows(machine, self.into[0], weighted, self.into[1:])
        else:
            scatter_rows(machine, self.into[0], weighted, self.places, self.into[1:])

    @ch.inline
    def _keep(self, tap: Tap, sums: Sums) -> None:
        """The stream, in natural order: a lane's two rows of two tokens."""
        tap_place = ch.const(ty.u32, tap.place, name="tap_place")
        with ch.if_(tap_place != NO_TAP):
            for index in range(2):
                token = sums.group * GROUP_TOKENS + self.machine.lane % 4 * 2 + index
                for number, of_token in enumerate(tap.of_token(tap_place, token)):
                    kept = of_token + ty.u64(self.row(sums.m_tile))
                    store_at(kept, 0, prim.f32_to_bf16(sums.values[index]), number > 0)
                    store_at(kept, HALF, prim.f32_to_bf16(sums.values[index + 2]), number > 0)

    @ch.function
    def end(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        """Every token's sum over the row tile: its M-tiles in order."""
        machine, plan = self.machine, self.machine.plan
        machine.meet()
        with ch.if_(machine.thread < plan.tile_tokens):
            kept = machine.region("squares", ty.f32) + machine.thread
            count = ch.minimum(ty.u32(self.m_tiles) - row_tile * plan.tile_m_tiles, plan.tile_m_tiles)
            total = ch.var(ty.f32, 0.0)
            with ch.for_(count, unroll=1, name="m_tile") as m_tile:
                total += kept[m_tile * plan.tile_tokens]
            token = token_tile * plan.tile_tokens + machine.thread
            row_tiles = ceil_div(self.m_tiles, plan.tile_m_tiles)
            for squares in self.squares:
                is_peers = squares is not self.squares[0]
                store_at(squares, machine.of_all(row_tile, row_tiles) * plan.tokens + token, total, is_peers)
        machine.meet()  # everybody has read before the next tile's squares are laid down


@dataclass(frozen=True, eq=False)
class StoreKept(StoreResidual):
    """Rows that go through a norm before they are added: in accumulator order (f32, to `residual`), beside the sums of
    their squares."""

    def load_rows(self, m_tile: ch.Expr) -> Any:
        """Nothing."""

    @ch.inline
    def finish(self, sums: Sums) -> None:
        index = (ty.u64(sums.m_tile) * self.machine.plan.groups + ty.u64(sums.group)) * (ACCUMULATOR_BYTES // 16)
        kept = ch.var(ty.f32x4)
        for member, value in zip("xyzw", sums.values, strict=True):
            setattr(kept, member, value)
        ch.reinterpret(ty.ptr_mut(ty.f32x4), self.residual)[index + ty.u64(self.machine.lane)] = kept
        lay_down_squares(self.machine, sums, sums.values)


@dataclass(frozen=True, eq=False)
class AddKept(StoreResidual):
    """Such rows, through the norm with weights `behind` and 1/rms of `scales`, added to the residual stream."""

    scales: Scales | None = None
    behind: ch.Expr | None = None

    def begin(self, row_tile: ch.Expr, token_tile: ch.Expr) -> None:
        assert self.scales is not None
        self.scales.load(token_tile)

    @ch.inline
    def load_rows(self, m_tile: ch.Expr) -> ch.Expr:
        """The weights of the next norm, then of that behind the rows, of rows g and g + 8."""
        row = self.row(m_tile)
        weights = ch.array(ty.f32, 4)
        for index in range(2):
            weights[index] = self._weight(self.norm[row + index * HALF])
            weights[index + 2] = self._weight(self.behind[row + index * HALF])  # type: ignore[index]
        return weights

    @ch.inline
    def finish(self, sums: Sums) -> None:
        assert self.scales is not None
        index = (ty.u64(sums.m_tile) * self.machine.plan.groups + ty.u64(sums.group)) * (ACCUMULATOR_BYTES // 16)
        stream = ch.reinterpret(ty.ptr(ty.f32x4), self.residual)
        before = ch.const(ty.f32x4, stream[index + ty.u64(self.machine.lane)], name="before")
        values: list[Any] = []
        for number, (member, value) in enumerate(zip("xyzw", self.scales.scaled(sums), strict=True)):
            added = value * sums.of_rows[2 + number // 2] * self.multiplier
            values.append(ch.const(ty.f32, getattr(before, member) + added, name="value"))
        StoreResidual.finish(self, replace(sums, values=tuple(values)))


@ch.inline
def lay_down_squares(machine: PassMachine, sums: Sums, values: Sequence[Any]) -> None:
    """An M-tile's sums of squares of 8 tokens, over its rows (which lie in lanes 4, 8 and 16 apart), in the region
    `squares`: [warp][token of the tile]."""
    # The lane's place goes into the pointer: what is added to it is then a constant of the instruction. As part of the
    # index it made an address for each of a tile's tokens, kept in registers and, where those were few, spilled.
    of_lane = machine.region("squares", ty.f32) + (machine.warp * machine.plan.tile_tokens + machine.lane * 2)
    kept = ch.const(of_lane.type, of_lane, name="kept")
    for index in range(2):
        square = ch.var(ty.f32, prim.fma_f32(values[index], values[index], values[index + 2] * values[index + 2]))
        for mask in (4, 8, 16):
            square += prim.shuffle_xor_f32(square, mask)
        with ch.if_(machine.lane < 4):
            kept[sums.in_tile * GROUP_TOKENS + index] = square


@ch.inline
def _rounded(value: ch.Expr) -> ch.Expr:
    return prim.bf16_to_f32(prim.f32_to_bf16(value))


assert ACCUMULATORS * 32 * 4 == ACCUMULATOR_BYTES
