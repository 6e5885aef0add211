"""Lists beside the K-tiles of a chunk: single weights whose products are added to those of the tiles.

Packed by `cheetah.models.formats.lists`. The consumer warps multiply them, each the units u with u % warps == warp, in
the stage that brings the tiles: so nobody waits for anybody else, and a stage goes back as it always does. Lane 4g + t
has its own numbers of rows g and g + 8, by every column of the step. It adds their products up beside the M-tile's
sums, in f32 and in the order in which they lie; at the end of the M-tile the four lanes of a row add theirs, by pairs,
and the result is added to the sums of the tiles, behind the factors of their rows. Nothing of this depends on how many
columns are used, nor on the order in which warps or blocks run.

A number waits for its load, and the element of the vector that it names waits for the number. Behind a barrier warps
use full stages as fast as they can, so such waits are seen there: a short list is loaded, with its elements, before
the products of the tiles, and multiplied behind them.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import UNIT, Columns
from cheetah.blocks.linear.formats.sizes import BIAS, EXPONENT_AT
from cheetah.blocks.linear.formats.vectors import is_raised, is_skewed, powers_of, unit_place
from cheetah.blocks.linear.fragments import Beside, groups_of
from cheetah.blocks.ring import Stage
from cheetah.lang import prim, ty
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import (
    DIGIT_UNITS,
    DIGITS_AND_NUMBERS,
    LIST_UNIT_BYTES,
    QUANTIZED_COLUMNS,
    VECTOR_COLUMNS,
)
from cheetah.plan.index import ceil_div
from cheetah.plan.plan import COLUMNS

ROWS = 2
"""That a lane has numbers of."""
NUMBER, SECOND_ROW, COLUMN = ch.named("NUMBER", 0xFFFF0000), ch.named("SECOND_ROW", 0x8000), 0x7FFF
LANES_OF_ROW = (1, 2)
MOST_AHEAD = 4
"""Numbers and elements of the vector of a lane that wait in registers for the products of the tiles."""


def list_accumulators(layout: MatrixLayout, tokens: int) -> int:
    """Registers in fours that what lanes have of lists takes, behind an M-tile's sums."""
    return groups_of(ROWS * tokens, 1) * 2 if layout.format.list_units else 0


class List(Beside):
    """The list of a chunk in a full stage, and the vectors beside the chunk (u32x4 units). sums: of the M-tile, f32
    [accumulators, 4], of which those of lists begin at `first`: of each column rows g and g + 8."""

    def __init__(self, layout: MatrixLayout, columns: Columns, units: ch.Expr, sums: Any, first: int) -> None:
        self.layout, self.columns, self.units, self.sums, self.first = layout, columns, units, sums, first
        self.machine, self.kind = columns.machine, layout.vector_kind(columns.limit)
        self.turns = ceil_div(layout.format.list_units, self.machine.plan.consumer_warps)
        self.is_short = self.turns * (1 + columns.limit) <= MOST_AHEAD

    @ch.inline
    def load(self, chunk: ch.Expr, stage: Stage) -> None:
        """Before the products of chunk `chunk` of an M-tile: what of them this warp needs of a short list."""
        machine, layout = self.machine, self.layout
        begin = layout.chunk_bytes(chunk) - layout.format.list_bytes
        listed = ch.reinterpret(ty.ptr(ty.u32), stage.address + begin)
        self.listed = listed
        self.loaded: list[tuple[Any, list[Any]]] = []
        for turn in range(self.turns if self.is_short else 0):
            warps, units = machine.plan.consumer_warps, layout.format.list_units
            unit = machine.warp + turn * warps
            word = ch.var(ty.u32, 0)
            with ch.if_((turn + 1) * warps <= units or unit < units):
                word.set(listed[unit * (LIST_UNIT_BYTES // 4) + machine.lane])
            self.loaded.append((word, []))
        for word, values in self.loaded:
            values.extend(self._values(word))

    @ch.inline
    def multiply(self) -> None:
        """Behind them: add this warp's products. `finish_chunk` must follow."""
        machine, layout = self.machine, self.layout
        have_read = ch.var(ty.u32, 0)
        for word, values in self.loaded:
            have_read ^= word
            self._add(word, values)
        if not self.is_short:
            with ch.for_(
                machine.warp, layout.format.list_units, machine.plan.consumer_warps, unroll=4, name="unit"
            ) as unit:
                word = ch.const(ty.u32, self.listed[unit * (LIST_UNIT_BYTES // 4) + machine.lane], name="word")
                have_read ^= word
                self._add(word, self._values(word))
        self.have_read = have_read

    def finish_chunk(self, stage: Stage) -> None:
        """Tell the stage what has been read."""
        stage.has_read(self.have_read)

    def _values(self, word: ch.Expr) -> list[ch.Expr]:
        """Of all columns, the elements that a number meets."""
        element = ch.const(ty.u32, word & COLUMN, name="element")
        return [ch.const(ty.f32, self._value(element, column), name="value") for column in range(self.columns.limit)]

    def _add(self, word: ch.Expr, values: list[ch.Expr]) -> None:
        """The products of a number with elements of all columns."""
        number = ch.const(ty.f32, prim.bits_float(word & NUMBER), name="number")
        is_second = ch.const(ty.boolean, (word & SECOND_ROW) != 0, name="is_second")
        of_rows = [ch.select(is_second, 0.0, number), ch.select(is_second, number, 0.0)]
        of_rows = [ch.const(ty.f32, one, name="of_row") for one in of_rows]
        for column, value in enumerate(values):
            for row, of_row in enumerate(of_rows):
                place, index = self._place(column, row)
                self.sums[place][index] = prim.fma_f32(of_row, value, self.sums[place][index])

    def part(self, column: int, row: int) -> ch.Expr:
        place, index = self._place(column, row)
        own: ch.Expr = self.sums[place][index]
        return own

    def _place(self, column: int, row: int) -> tuple[int, int]:
        number = ROWS * column + row
        return self.first + number // 4, number % 4

    def _value(self, element: ch.Expr, column: int) -> ch.Expr:
        """Element `element` of the chunk of a column's vector (f32)."""
        tokens = self.columns.limit
        halves = ch.reinterpret(ty.ptr(ty.u16), self.units)
        others: Any = element // VECTOR_COLUMNS * (VECTOR_COLUMNS * (tokens - 1)) if tokens > 1 else 0
        if self.kind == DIGITS_AND_NUMBERS:  # each K-tile's elements behind its digits
            others += (element // QUANTIZED_COLUMNS + 1) * (DIGIT_UNITS * tokens * UNIT)
        place = element + others + column * VECTOR_COLUMNS
        if is_skewed(self.kind):
            place = unit_place(place // UNIT, self.kind) * UNIT + element % UNIT
        bits = ty.u32(halves[place])
        value: ch.Expr = prim.bits_float(bits << 16)
        if self.kind == DIGITS_AND_NUMBERS or not is_raised(self.kind):
            return value
        first, second = powers_of(self.kind)
        power = ty.u32(BIAS - first) + (element // 2 % 2) * (first - second)
        return value * prim.bits_float(power << EXPONENT_AT)

    @ch.inline
    def finish(self) -> None:
        """At the end of an M-tile: the sums of the lists to those of the tiles."""
        lane = self.machine.lane
        for column in range(self.columns.limit):
            for row in range(ROWS):
                total: Any = self.part(column, row)
                for mask in LANES_OF_ROW:
                    total = ch.const(ty.f32, total + prim.shuffle_xor_f32(total, mask), name="of_row")
                own = ch.select(lane % 4 == column % COLUMNS // 2, total, 0.0)
                group, number = column // COLUMNS, column % 2 + 2 * row
                self.sums[group][number] = self.sums[group][number] + own
