"""What a head that drafts is given of another model: the residual stream behind some of its layers, of tokens.

They lie by pages as keys do: those of the token at a position in the slot of that position. The inputs of a launch have
some. Behind those a column goes on from its own residual, which the last step has left in the block that owns its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from cheetah import lang as ch
from cheetah.blocks.columns import NUMBER, POSITION, SEQUENCE, UNIT, Columns
from cheetah.blocks.linear.epilogue import PublishedRows, place_of
from cheetah.blocks.linear.interface import ColumnScale, Rows
from cheetah.blocks.linear.prologue import Units, addresses_of_units
from cheetah.blocks.linear.rms import sum_of_lanes
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.plan import M_TILE_ROWS

NO_ROW = ch.bits("NO_ROW", 0xFFFFFFFF)


class FeatureBuffers(Protocol):
    """Parameters of the kernel."""

    @property
    def features(self) -> ch.Expr: ...
    @property
    def page_table(self) -> ch.Expr: ...
    @property
    def feature_steps(self) -> ch.Expr: ...


@dataclass(frozen=True, eq=False)
class Features:
    """Those of a launch; `count` layers of the other model, each a row's `hidden` elements, side by side."""

    columns: Columns
    launch: FeatureBuffers
    count: int

    @property
    def hidden(self) -> Any:
        return self.columns.machine.hidden

    def are_there(self, step: Any) -> Any:
        """Whether some column has any in a step: the same in all blocks and roles."""
        return step < self.launch.feature_steps[0]

    @ch.function
    def row(self, column: ch.Expr) -> ch.Expr:
        """The row of a column's token in this step, or NO_ROW."""
        columns, plan = self.columns, self.columns.machine.plan
        found = ch.var(ty.u32, NO_ROW)
        with columns.if_active(column):
            sequence = ch.const(ty.u32, columns.state(column, SEQUENCE), name="sequence")
            with ch.if_(columns.state(column, NUMBER) < columns.sequence(sequence, "given")):
                position = ch.const(ty.u32, columns.state(column, POSITION), name="position")
                place = sequence * plan.pages_per_sequence + position // plan.page_size
                page = ch.const(ty.u32, prim.load_constant_u32(self.launch.page_table + place), name="page")
                found.set(page * plan.page_size + position % plan.page_size)
        return found

    def place(self, row: ch.Expr, number: int = 0) -> Any:
        """Where what layer `number` of them left begins in a row (bf16*)."""
        return self.launch.features + (ty.u64(row) * self.count + number) * self.hidden

    def units(self, number: int) -> Units:
        """The input of a product: what layer `number` of them left; zeros of columns that have none."""

        def read(data: Any, unit: ch.Expr, count: int) -> None:
            row = ch.const(ty.u32, self.row(self.columns.of_thread()), name="row")
            own = ch.const(ty.ptr(ty.bf16), self.place(ch.select(row == NO_ROW, ty.u32(0), row), number), name="own")
            address = addresses_of_units(self.columns, own)
            with ch.for_(count, unroll=True, name="index") as index:
                words = ch.reinterpret(ty.ptr(ty.u32x4), address(unit + index * self.columns.machine.consumer_threads))
                data[index] = words[0]
                with ch.if_(row == NO_ROW):
                    data[index] = prim.make_u32x4(0, 0, 0, 0)

        return Units(read)


class ScaleArguments(NamedTuple):
    """Which layer's output it is of."""

    first: Any


@dataclass(frozen=True, eq=False)
class FeatureScale(ColumnScale):
    """1/rms of a column's features: of `elements` each of what `layers` layers left, from number `first` on."""

    features: Features
    first: int
    layers: int
    elements: int
    epsilon: float
    waits: tuple[str, ...] = ()

    @property
    def arguments(self) -> ScaleArguments:
        return ScaleArguments(ch.argument(self.first))

    def of(self, column: ch.Expr, arguments: ScaleArguments) -> ch.Expr:
        return self._scale(column, arguments.first)

    @ch.function
    def _scale(self, column: ch.Expr, first: ch.Expr) -> ch.Expr:
        """1 / rms of the features of a column, which lie in memory."""
        columns = self.features.columns
        lanes = 32 if columns.limit == 1 else M_TILE_ROWS
        total = ch.var(ty.f32, 0.0)
        with columns.if_active(column):
            row = ch.const(ty.u32, self.features.row(column), name="row")
            with ch.if_(row != NO_ROW):
                begin = self.features.place(row) + first * self.features.hidden
                units = ch.const(ty.ptr(ty.u32x4), ch.reinterpret(ty.ptr(ty.u32x4), begin), name="units")
                own, padded = self.elements // UNIT, columns.machine.model.padded_hidden // UNIT
                with ch.for_(columns.machine.lane % lanes, self.layers * own, lanes, unroll=1, name="unit") as unit:
                    place = unit if own == padded else unit // own * padded + unit % own
                    words = ch.const(ty.u32x4, units[place], name="words")
                    for member in "xyzw":
                        word = getattr(words, member)
                        low, high = prim.bits_float(word << 16), prim.bits_float(word & 0xFFFF0000)
                        total += low * low + high * high
        total.set(sum_of_lanes(total, lanes))
        return prim.rsqrt_f32(prim.fma_f32(total, 1.0 / (self.layers * self.elements), self.epsilon))


@dataclass(frozen=True, eq=False)
class AddFeatures(PublishedRows):
    """The rows onto the residual of columns with features; behind the last layer's, which `onto` is of, published.
    What is known of a column in this step is there once the consumer warps have handed over."""

    features: Features
    machine: Machine
    onto: PublishedRows | None

    @property
    def makes(self) -> tuple[str, ...]:
        return () if self.onto is None else self.onto.makes

    @ch.inline
    def __call__(self, rows: Rows) -> None:
        if self.onto is not None:
            self.onto(replace(rows, sum=lambda: self._of_features(rows)))
            return
        place = place_of(self.machine, rows)
        value = ch.const(ty.f32, self._of_features(rows), name="value")
        with ch.if_(rows.is_own):
            residual = self.machine.region("residual", ty.f32)
            residual[place] = residual[place] + value

    @ch.inline
    def _of_features(self, rows: Rows) -> ch.Expr:
        """The lane's row, or 0 where its column has no features."""
        total = ch.const(ty.f32, rows.sum(), name="total")
        row = ch.const(ty.u32, self.features.row(rows.column), name="feature_row")
        return ch.select(row == NO_ROW, ty.f32(0.0), total)
