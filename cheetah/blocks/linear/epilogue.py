"""What becomes of the rows of a finished M-tile: residual and norm, activation, rotary embedding. One warp, one row of
a token a lane."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from cheetah import lang as ch
from cheetah.blocks.columns import fragment_word
from cheetah.blocks.exchange import Published, Whereabouts
from cheetah.blocks.linear.interface import Epilogue, Rows
from cheetah.blocks.linear.rms import PublishedSquares
from cheetah.blocks.linear.taps import NO_TAP, Tap
from cheetah.blocks.machine import Machine
from cheetah.blocks.peer_stores import store_at
from cheetah.lang import prim, ty
from cheetah.plan import M_TILE_ROWS

HALF = M_TILE_ROWS // 2


class PublishedRows(ABC):
    """An `Epilogue` that publishes what it makes of the rows, and may be one text for several products, which differ in
    its arguments."""

    @property
    @abstractmethod
    def makes(self) -> tuple[str, ...]:
        """The vectors that it publishes."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What tells it from others: values of the device, a named tuple."""
        return ()

    @contextmanager
    def known_by(self, arguments: Any) -> Iterator[Epilogue]:
        """Inside, the epilogue that such arguments tell of."""
        yield self

    @abstractmethod
    def __call__(self, rows: Rows) -> None:
        """As every epilogue."""


@dataclass(frozen=True, eq=False)
class NormWeights:
    """The weights of a norm, bf16, padded like the vector. plus_one: it multiplies by 1 + weight."""

    weights: ch.Expr
    plus_one: bool = False

    def of(self, rows: Rows) -> ch.Expr:
        """What the lane's row is multiplied by (f32)."""
        weight = prim.bf16_to_f32(self.weights[rows.m_tile * rows.count + rows.row])
        return weight + 1.0 if self.plus_one else weight


class Biases(Protocol):
    """What is added to rows."""

    def of(self, rows: Rows) -> ch.Expr:
        """To the lane's row (f32). Asked for before the row is waited for."""


@dataclass(frozen=True, eq=False)
class RowBiases:
    """A number for each row, bf16, in the order of the matrix' rows."""

    biases: ch.Expr

    def of(self, rows: Rows) -> ch.Expr:
        return prim.bf16_to_f32(self.biases[rows.m_tile * rows.count + rows.row])


class ResidualArguments(NamedTuple):
    """What tells rows that are added to the residual from those of another product."""

    weights: Any
    vector: Any
    squares: Any
    epoch: Any


class TappedArguments(NamedTuple):
    """The same, and where they are kept."""

    weights: Any
    vector: Any
    squares: Any
    epoch: Any
    place: Any


@dataclass(frozen=True, eq=False)
class Fixed:
    """Columns whose residual stays as it begins, published times weights of its own. of: whether a column is one."""

    of: Callable[[Any], Any]
    norm: NormWeights


@dataclass(frozen=True, eq=False)
class AddResidual(PublishedRows):
    """residual += (rows + biases) * multiplier, kept in f32 by the block that owns them, and published as the next norm
    wants it: times its weights, rounded to bf16, and the squares beside it. is_first: the rows are the residual, which
    begins with them. tap: where it is kept besides, of layers that are tapped. fixed: to which columns
    nothing is added."""

    machine: Machine
    into: Published
    squares: PublishedSquares
    norm: NormWeights
    multiplier: float = 1.0
    is_first: bool = False
    biases: Biases | None = None
    tap: Tap | None = None
    fixed: Fixed | None = None

    @property
    def makes(self) -> tuple[str, ...]:
        return self.into.name, self.squares.published.name

    @property
    def arguments(self) -> ResidualArguments | TappedArguments:
        into, squares = self.into.when_and_where, self.squares.published.when_and_where
        assert str(into.epoch) == str(squares.epoch), self.makes
        told = self.norm.weights, into.vector, squares.vector, into.epoch
        return ResidualArguments(*told) if self.tap is None else TappedArguments(*told, self.tap.place)

    @contextmanager
    def known_by(self, arguments: Any) -> Iterator[AddResidual]:
        weights, vector, squares, epoch, *place = arguments
        published = self.squares.published
        with self.into.known_by(Whereabouts(vector, epoch)) as into:
            with published.known_by(Whereabouts(squares, epoch)) as known:
                norm = replace(self.norm, weights=weights)
                tap = None if self.tap is None else replace(self.tap, place=place[0])
                yield replace(self, into=into, squares=replace(self.squares, published=known), norm=norm, tap=tap)

    @ch.inline
    def __call__(self, rows: Rows) -> None:
        machine = self.machine
        residual = machine.region("residual", ty.f32)
        place = place_of(machine, rows)
        is_fixed: Any = None
        if self.fixed is not None:
            is_fixed = ch.const(ty.boolean, self.fixed.of(rows.column), name="is_fixed")
        weight = ch.const(ty.f32, self._weight(rows, is_fixed), name="weight")
        publish = publishing(machine, self.into, rows, rows.m_tile * rows.count, rows.count)
        bias = None if self.biases is None else ch.const(ty.f32, self.biases.of(rows), name="bias")
        value = ch.var(ty.f32, self._added(rows, bias))
        with ch.if_(rows.is_own):
            if not self.is_first and is_fixed is None:
                value += residual[place]
            elif not self.is_first:
                value.set(ch.select(is_fixed, residual[place], value + residual[place]))
            residual[place] = value
            if self.tap is not None:
                with ch.if_(self.tap.place != NO_TAP):
                    for number, of_token in enumerate(self.tap.of_token(self.tap.place, rows.column)):
                        kept = of_token
                        store_at(kept, rows.m_tile * rows.count + rows.row, prim.f32_to_bf16(value), number > 0)
        weighted = ch.const(ty.f32, value * weight, name="weighted")
        publish(weighted)
        self.squares.publish(rows, value, weighted)

    def _weight(self, rows: Rows, is_fixed: Any) -> Any:
        """What is published is multiplied by this."""
        if self.fixed is None:
            return self.norm.of(rows)
        return ch.select(is_fixed, self.fixed.norm.of(rows), self.norm.of(rows))

    def _added(self, rows: Rows, bias: Any) -> Any:
        """What is added to the residual."""
        made = rows.sum() if bias is None else rows.sum() + bias
        return made if self.multiplier == 1 else made * self.multiplier


def place_of(machine: Machine, rows: Rows) -> ch.Expr:
    """Where the block keeps the lane's row of a column, of the residual or to be added to it."""
    return prim.renewed_u32((rows.wave * rows.count + rows.row) * machine.plan.tokens + rows.column)


def gelu_argument(value: ch.Expr) -> ch.Expr:
    """gelu(x), in the form with a hyperbolic tangent, is x times the logistic function of this."""
    return (value * value * (GELU * 0.044715) + GELU) * value


GELU = 2 * math.sqrt(2 / math.pi)
SIGMOID_OF: dict[str, Callable[[Any], Any]] = {"silu": lambda value: value, "gelu": gelu_argument}
"""An activation is its argument times the logistic function of this."""


@dataclass(frozen=True, eq=False)
class GatedRows(PublishedRows):
    """activation(gate) * up: an M-tile holds 8 gate rows and, 8 lanes further, their up rows; of "relu2" every row by
    itself. activation: a name, or what has `alpha` and `limit`: see `clamped_of`."""

    machine: Machine
    into: Published
    activation: Any

    @property
    def makes(self) -> tuple[str, ...]:
        return (self.into.name,)

    @ch.inline
    def __call__(self, rows: Rows) -> None:
        count = rows.count if self.activation == "relu2" else HALF
        publish = publishing(self.machine, self.into, rows, rows.m_tile * count, count)
        value = ch.const(ty.f32, rows.sum(), name="value")
        gated = relu2_of(value) if self.activation == "relu2" else gated_of(value, self.activation)
        publish(gated)


def relu2_of(value: ch.Expr) -> ch.Expr:
    """The square of what is above 0. What is no number stays so."""
    return value * ch.select(value < 0.0, ty.f32(0.0), value)


@ch.inline
def gated_of(value: ch.Expr, activation: Any) -> ch.Expr:
    """activation(gate) * up, of the gate's row and, HALF lanes further, up's. Lanes of the up rows compute something
    too."""
    other = prim.shuffle_xor_f32(value, HALF)
    if not isinstance(activation, str):
        return clamped_of(value, other, activation.alpha, activation.limit)
    return prim.divide_f32(value, 1.0 + prim.exp_f32(-SIGMOID_OF[activation](value))) * other


@ch.inline
def clamped_of(gate: ch.Expr, up: ch.Expr, alpha: float, limit: float) -> ch.Expr:
    """(up + 1) * gate times the logistic function of alpha * gate; gate is at most `limit`, up at most as far from 0.
    What is no number stays so."""
    low = ch.const(ty.f32, ch.select(gate > limit, ty.f32(limit), gate), name="low")
    within = ch.select(up > limit, ty.f32(limit), ch.select(up < -limit, ty.f32(-limit), up))
    return prim.divide_f32(low, 1.0 + prim.exp_f32(low * -alpha)) * (within + 1.0)


def publishing(machine: Machine, into: Published, rows: Rows, first: ch.Value, count: int) -> Callable[[Any], None]:
    """Works out where the first `count` rows' values go, as pairs of bf16 beginning at element `first` (even). What it
    gives publishes them, one a lane."""
    store = into.publish_later(fragment_word(first + rows.row, rows.column, machine.plan.tokens))

    def publish(value: ch.Expr) -> None:
        pair = pair_of_rows(value)
        with ch.if_(rows.is_own & (rows.row < count) & (rows.row % 2 == 0)):
            store(pair)

    return publish


@ch.inline
def pair_of_rows(value: ch.Expr) -> ch.Expr:
    """On lanes of even rows, this row's value and the next one's, rounded to bf16."""
    neighbour = prim.shuffle_xor_f32(value, 1)
    pair = prim.pack_bf16x2(value, neighbour)
    return pair


@ch.function
def rotate(rows: Rows, value: ch.Expr, m_tile_of_head: ch.Expr, angles_of: Callable[[], Any]) -> ch.Expr:
    """RoPE (rotate-half): the pair (k, k + D/2) lies 8 lanes apart. Returns the rotated value.

    cos and sin of the token's position lie in the region `rope` as pairs.
    """
    angles = angles_of()
    frequency = m_tile_of_head * HALF + rows.row % HALF
    angle = angles[frequency]
    partner = prim.shuffle_xor_f32(value, HALF)
    is_second = rows.row >= HALF
    return prim.fma_f32(value, angle.x, ch.select(is_second, partner, -partner) * angle.y)


def paired_dim(frequency: ch.Expr, is_second: ch.Expr, head_dim: int) -> ch.Expr:
    """The dim in its head of the first or the second element of a pair that is rotated."""
    return frequency + ch.select(is_second, head_dim // 2, ty.u32(0))
