"""Vectors whose elements a matrix has in another order: put there as bf16, then turned into what its format wants.

Where a step has 8 tokens or more, a warp puts its units in order together: an element of 8 columns is a row of a matrix
that one instruction stores transposed, each row where it belongs. Until they are converted, a K-tile's elements lie one
behind the other then. (8B, 8 tokens: single elements took 0.5 ms a step, H200.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cheetah import lang as ch
from cheetah.blocks.columns import UNIT, Columns
from cheetah.blocks.linear.formats.vectors import store_unit
from cheetah.lang import prim, ty
from cheetah.plan import VECTOR_COLUMNS
from cheetah.plan.formats import BY_WARPS
from cheetah.plan.plan import COLUMNS

WARP = 32


@dataclass(frozen=True, eq=False)
class Order:
    """The order of a whole vector. places: for every element the one that it is to the matrix (u16, padded like the
    vector). elements, available, kind: as of `prologue.VectorPart`."""

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
        return tokens % COLUMNS == 0 and is_whole

    def places_array(self, count: int) -> ch.Expr:
        """A local array for what `load_places` gives of so many units."""
        return ch.array(ty.u32 if self.by_warps else ty.u32x4, count, name="places")

    def load_places(self, unit: ch.Expr, natural: ch.Expr) -> ch.Expr:
        """For `put`: of a unit's elements (u32x4), or of the one that this lane has of a warp's (u32). natural: where
        those of the unit are."""
        if not self.by_warps:
            return prim.load_constant_u32x4(natural)
        tile = unit // WARP // (self.columns.limit // COLUMNS)
        return ty.u32(self.places[tile * VECTOR_COLUMNS + _element_of_lane(self.columns)])

    def put(self, words: ch.Expr, places: ch.Expr) -> None:
        """A unit's elements (bf16) to where the matrix has them; `convert` must follow behind a barrier."""
        vector = self.columns.machine.region("vector", ty.u32x4)
        scatter = scatter_matrices if self.by_warps else scatter_unit
        scatter(self.columns, vector, words, places)

    @ch.function
    def convert(self) -> None:
        """Elements that all lie in their places become what the weights' format wants; ends with a barrier of the
        consumer warps."""
        if self.kind in BY_WARPS:
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
            for index in range(-(-units // threads)):
                unit = machine.thread + index * threads
                with ch.if_((index + 1) * threads <= units or unit < units):
                    yield index, unit

        for index, unit in each():
            data[index] = vector[unit]
        machine.meet()  # everybody has read
        for index, unit in each():
            store_unit(columns, vector, unit, data[index], self.kind)


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
def scatter_matrices(columns: Columns, vector: ch.Expr, words: ch.Expr, place: ch.Expr) -> None:
    """The same by a whole warp: of its 32 elements this lane says where one goes, with those of 8 columns."""
    rows = ch.reinterpret(ty.ptr_mut(ty.u32x4), vector)
    groups = columns.limit // COLUMNS
    row = place ^ (place // 4 & 6)  # so that the rows that are read together lie in all banks
    if groups > 1:
        group = columns.machine.warp % groups
        row = (place // VECTOR_COLUMNS * groups + group) * VECTOR_COLUMNS + row % VECTOR_COLUMNS
    prim.store_matrices_b16(rows + row, words)


def _element_of_lane(columns: Columns) -> ch.Expr:
    """Of a K-tile: row r of matrix m, lane 8m + r, holds elements 2m + r % 2 of unit r // 2."""
    lane = columns.machine.lane
    return lane % 8 // 2 * UNIT + lane // 8 * 2 + lane % 2


@ch.inline
def _turned_back(columns: Columns, vector: ch.Expr, unit: ch.Expr) -> ch.Expr:
    """The words of a unit whose elements a warp has stored as rows of 8 columns."""
    element = _element_of_lane(columns)
    row = unit // WARP * VECTOR_COLUMNS + (element ^ (element // 4 & 6))
    words = ch.const(ty.u32x4, prim.load_matrices_b16(ch.reinterpret(ty.ptr(ty.u32x4), vector) + row), name="words")
    prim.warp_barrier()  # all lanes have read before one stores where others did
    return words
