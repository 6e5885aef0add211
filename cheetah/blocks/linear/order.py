"""Vectors whose elements a matrix has in another order: put there as bf16, then turned into what its format wants.

Where a step has several tokens, a warp puts its units in order together: turned round, a lane has an element of two
neighbouring columns, and both go to one place. Until they are converted, a K-tile's elements then lie one behind the
other, each with those of all columns of the warp. (8B, 8 tokens: single elements took 0.5 ms a step, H200.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import UNIT, Columns
from cheetah.blocks.linear.formats.vectors import store_unit
from cheetah.lang import prim, ty
from cheetah.plan import VECTOR_COLUMNS
from cheetah.plan.formats import DIGITS, HALVES
from cheetah.plan.plan import COLUMNS

WARP = 32
FEWEST_TURNED = 4
"""Tokens of a step from which warps put elements in order together."""


@dataclass(frozen=True, eq=False)
class Order:
    """The order of a whole vector. places: for every element the one that it is to the matrix (u16, padded like the
    vector). elements, available, kind: as of `prologue.Part`."""

    columns: Columns
    places: ch.Expr
    elements: int
    available: int
    kind: str

    @property
    def by_warps(self) -> bool:
        """Whether whole warps put units in order together: all their lanes must have some."""
        tokens = self.columns.limit
        is_whole = self.available % VECTOR_COLUMNS == 0 and self.available // UNIT * tokens % WARP == 0
        return tokens >= FEWEST_TURNED and is_whole

    def load_places(self, unit: ch.Expr, natural: ch.Expr) -> Any:
        """Of the elements that this lane will store of a unit (u32x4); natural: where those of the unit itself are."""
        address = self.places + _Turned(self.columns, unit).first_element if self.by_warps else natural
        return prim.load_constant_u32x4(address)

    def put(self, words: ch.Expr, places: ch.Expr) -> None:
        """A unit's elements (bf16) to where the matrix has them; `convert` must follow behind a barrier."""
        vector = self.columns.machine.region("vector", ty.u32x4)
        scatter = scatter_turned if self.by_warps else scatter_unit
        scatter(self.columns, vector, words, places)

    @ch.function
    def convert(self) -> None:
        """Elements that all lie in their places become what the weights' format wants; ends with a barrier of the
        consumer warps."""
        if self.kind in (DIGITS, HALVES):
            self._convert_elsewhere()
        else:
            self._convert_in_place()
        self.columns.machine.meet()

    @ch.inline
    def _convert_in_place(self) -> None:
        columns, machine = self.columns, self.columns.machine
        vector = machine.region("vector", ty.u32x4)
        units, threads = self.elements // UNIT * columns.limit, machine.consumer_threads
        turned = self.available // UNIT * columns.limit if self.by_warps else 0
        if turned:
            with ch.for_(machine.thread, turned, threads, unroll=1, name="unit") as own:
                store_unit(columns, vector, own, _turned_back(columns, vector, own), self.kind)
        if turned < units:
            with ch.for_(machine.thread + turned, units, threads, unroll=1, name="unit") as own:
                store_unit(columns, vector, own, vector[own], self.kind)

    @ch.inline
    def _convert_elsewhere(self) -> None:
        """What is stored lies where others read."""
        columns, machine = self.columns, self.columns.machine
        vector = machine.region("vector", ty.u32x4)
        units, threads = self.elements // UNIT * columns.limit, machine.consumer_threads
        data = ch.array(ty.u32x4, -(-units // threads), name="units")

        def each() -> Iterator[tuple[int, ch.Expr]]:
            for number in range(-(-units // threads)):
                unit = machine.thread + number * threads
                with nullcontext() if (number + 1) * threads <= units else ch.if_(unit < units):
                    yield number, unit

        for number, unit in each():
            data[number] = vector[unit]
        machine.meet()  # everybody has read
        for number, unit in each():
            store_unit(columns, vector, unit, data[number], self.kind)


@ch.function
def scatter_unit(columns: Columns, vector: ch.Expr, words: ch.Expr, places: ch.Expr) -> None:
    """The 8 elements of a unit (bf16) to their places in the vector of this thread's column."""
    elements, tokens = ch.reinterpret(ty.ptr_mut(ty.u16), vector), columns.limit
    own = elements if tokens == 1 else elements + columns.of_thread() * VECTOR_COLUMNS
    for member in "xyzw":
        pair, of_pair = getattr(words, member), getattr(places, member)
        for element, place in ((pair & 0xFFFF, of_pair & 0xFFFF), (pair >> 16, of_pair >> 16)):
            of_others = place // VECTOR_COLUMNS * (VECTOR_COLUMNS * (tokens - 1))
            own[place if tokens == 1 else place + of_others] = ty.u16(element)


@ch.function
def scatter_turned(columns: Columns, vector: ch.Expr, words: ch.Expr, places: ch.Expr) -> None:
    """The same by a whole warp, whose units are turned round."""
    machine, tokens = columns.machine, columns.limit
    width, is_odd = pair_columns(columns), machine.lane // 4 % 2 != 0
    pairs = ch.reinterpret(ty.ptr_mut(ty.u32), vector) + machine.lane % width
    if tokens > COLUMNS:
        pairs = pairs + machine.warp % (tokens // COLUMNS) * (VECTOR_COLUMNS * width)
    own = ch.const(pairs.type, pairs, name="own")
    for member in "xyzw":
        pair = prim.matrix_transpose_b16(getattr(words, member))
        of_pair = getattr(places, member)
        place = ch.const(ty.u32, ch.select(is_odd, of_pair >> 16, of_pair & 0xFFFF), name="place")
        # So that the lanes that read a tile again find it in all banks.
        slot = place ^ (place // 4 & 6)
        others = place // VECTOR_COLUMNS * (VECTOR_COLUMNS * (tokens // 2 - width))
        own[slot * width if tokens <= COLUMNS else slot * width + others] = pair


def pair_columns(columns: Columns) -> int:
    """Pairs of columns that a warp has."""
    return min(columns.limit, COLUMNS) // 2


class _Turned:
    """A lane's share of a warp's 4 units of 8 columns (or of 4 columns, of two tiles), turned round: of word w of all
    units, element `first_element` + 2w, or the next one on every second row of lanes, of two columns."""

    def __init__(self, columns: Columns, unit: ch.Expr) -> None:
        lane, tokens, width = columns.machine.lane, columns.limit, pair_columns(columns)
        number, self.width, self._row = unit // WARP, width, lane // 4
        tile = number * 2 + lane % 4 // 2 if tokens < COLUMNS else number // (tokens // COLUMNS)
        self.first_element = tile * VECTOR_COLUMNS + lane // 8 * UNIT
        of_tile = number * (COLUMNS * VECTOR_COLUMNS // 2) + lane % 4 // width * (VECTOR_COLUMNS * width)
        self._first = of_tile + lane % width + lane // 8 * (UNIT * width)

    def place(self, word: int) -> Any:
        """Of the lane's pair in the region `vector` (u32)."""
        return self._first + (self._row ^ 2 * word) * self.width


@ch.inline
def _turned_back(columns: Columns, vector: ch.Expr, unit: ch.Expr) -> Any:
    """The words of a unit whose elements a warp has stored turned round."""
    pairs, turned = ch.reinterpret(ty.ptr(ty.u32), vector), _Turned(columns, unit)
    stored = [ch.const(ty.u32, pairs[turned.place(word)], name="pair") for word in range(4)]
    words = ch.const(ty.u32x4, prim.make_u32x4(*map(prim.matrix_transpose_b16, stored)), name="words")
    prim.warp_barrier()  # all lanes have read before one stores where others did
    return words
