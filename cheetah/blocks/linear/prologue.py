"""The input of a matrix product: a vector of every token brought into shared memory as bf16.

A unit is 8 elements of one token: 16 bytes of shared memory, four payload words of an exchange. Vectors lie in fragment
order (see `columns`), in shared memory as in the exchange, so a thread's units all belong to one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cheetah import lang as ch
from cheetah.blocks.columns import UNIT, UNITS_PER_TILE, Columns
from cheetah.blocks.exchange import Published, Whereabouts
from cheetah.blocks.linear.copied import CopiedParts, load_copied
from cheetah.blocks.linear.formats.vectors import store_unit, unit_place
from cheetah.blocks.linear.interface import Around, ColumnScale, Prologue
from cheetah.blocks.linear.order import Order
from cheetah.blocks.linear.parts import Arrival, Part
from cheetah.blocks.machine import Machine
from cheetah.blocks.vector_copies import CopySource
from cheetah.lang import prim, ty
from cheetah.lang.primitives.exchange import UNITS
from cheetah.plan import VECTOR_COLUMNS, MatrixLayout
from cheetah.plan.formats import BF16_VECTOR, BY_WARPS
from cheetah.plan.index import ceil_div
from cheetah.plan.plan import COLUMNS

LINE_BYTES = ch.named("LINE_BYTES", 128)
Read = Callable[[Any, ch.Expr, int], None]
"""Puts units (u32x4) `unit`, `unit + consumer_threads`, ... into an array: (array of UNITS, unit, how many)."""
Wait = Callable[[ch.Expr, ch.Value], None]
"""Lets one lane of a warp wait for its unit before all lanes read: called by whole warps with each lane's first unit,
and whether it is to come at all.

While a vector is awaited, polling all of it crowds the memory: 32 times fewer polls are worth 3 % on 1B (H200)."""


class Beside(Protocol):
    """What is made of a vector by the threads that bring it, beside what it becomes in shared memory."""

    def begin(self) -> Any:
        """What a thread keeps of it from unit to unit."""

    def load(self, first: ch.Expr, stride: int, count: int) -> Any:
        """What it needs for units `first`, `first + stride`, ..., before these are waited for."""

    def add(self, kept: Any, words: ch.Expr, loaded: ch.Expr) -> None:
        """A unit (u32x4: 8 elements), with what was loaded for it."""

    def end(self, kept: Any) -> None:
        """Behind the thread's last unit; a barrier of the consumer warps follows."""


class Source(Protocol):
    """Where a vector comes from: a vector of the exchange, which has a name."""

    @property
    def read(self) -> Read: ...

    @property
    def wait(self) -> Wait | None: ...

    @property
    def copied(self) -> CopySource | None:
        """What the copy engine brings it from; None where threads read it."""


@dataclass(frozen=True, eq=False)
class Units:
    """A source that is read by a function, and has no end to wait for unless one is given."""

    read: Read
    wait: Wait | None = None
    copied: CopySource | None = None


@dataclass(frozen=True, eq=False)
class Slices(Prologue):
    """The parts of a vector as the matrix is sliced; `available` of its elements exist. places, beside: as of
    `VectorPart`, where the matrix is not sliced. scale: of the products."""

    columns: Columns
    source: Source
    available: int
    places: ch.Expr | None = None
    scale: ColumnScale | None = None
    beside: Beside | None = None

    @property
    def waits(self) -> tuple[str, ...]:
        name = getattr(self.source, "name", None)
        own = () if name is None else (name,)
        return (*own, *(() if self.scale is None else self.scale.waits))

    def scale_of_products(self) -> ColumnScale | None:
        return self.scale

    def begin(self, matrix: MatrixLayout, arrival: Arrival) -> None:
        if matrix.slices > 1:
            return
        with arrival.awaited():
            self.load(matrix, 0)
            if self.scale is not None:
                arrival.tell_loaded()

    def is_whole(self, matrix: MatrixLayout) -> bool:
        return matrix.slices == 1

    def parts(self, matrix: MatrixLayout, arrival: Arrival) -> Iterator[Part]:
        copied = _copied(self.source, VectorPart(0, 0, kind=matrix.vector_kind(self.columns.limit), places=self.places))
        if matrix.slices == 1:
            yield Part(0, matrix.chunks)
        elif copied is not None:
            yield from CopiedParts(self.columns, matrix, copied).each(arrival)
        else:
            yield from self._loaded(matrix, arrival)

    def _loaded(self, matrix: MatrixLayout, arrival: Arrival) -> Iterator[Part]:
        """Parts that threads bring, each when all have multiplied the one before."""
        assert self.scale is None, matrix.name
        for index in range(ceil_div(matrix.chunks, matrix.slice_chunks)):  # rounding may leave none for the last ones
            if index > 0:
                self.columns.machine.meet()  # everybody has read the last part before it is loaded over
            with arrival.awaited(index == 0):
                self.load(matrix, index)
            yield Part(*matrix.slice_range(index), is_last=index == matrix.slices - 1)

    def load(self, matrix: MatrixLayout, index: int) -> None:
        """Bring slice `index`: then each warp has what it multiplies."""
        chunk_elements = matrix.tiles_per_chunk * matrix.tile_columns
        first, end = (int(chunk * chunk_elements) for chunk in matrix.slice_range(index))
        end = min(end, int(matrix.padded_columns))
        slice_elements = int(matrix.slice_chunks * chunk_elements)
        slice_units = ch.named(f"{matrix.name.upper()}_SLICE_UNITS", slice_elements // UNIT * self.columns.limit)
        is_usual = end - first == min(end, self.available) - first == slice_elements
        part = VectorPart(
            *(end - first, min(end, self.available) - first, index * slice_units),
            kind=matrix.vector_kind(self.columns.limit),
            places=self.places,
            beside=self.beside,
            name=matrix.name if matrix.slices == 1 else f"{matrix.name}_{'slice' if is_usual else 'last_slice'}",
        )
        assert self.places is None and self.beside is None or matrix.slices == 1, matrix.name
        copied = _copied(self.source, part)
        if copied is not None and matrix.slices == 1:
            load_copied(self.columns, matrix, copied)
            return
        load_vector(self.columns, part, self.source)


@dataclass(frozen=True, eq=False)
class Prefetching(Around):
    """A prologue that also brings `vectors`, (address, bytes) each, into L2, for the epilogue or the next phase, and
    what `others` does."""

    machine: Machine
    vectors: Sequence[tuple[ch.Expr, int]]
    others: Callable[[], None] | None = None

    def prepare(self) -> None:
        self.inner.prepare()
        for address, size_bytes in self.vectors:
            prefetch(self.machine, address, ch.argument(size_bytes))
        if self.others is not None:
            self.others()


@dataclass(frozen=True, eq=False)
class VectorPart:
    """A part of a vector: `elements` of every token, a multiple of 32, of which the first `available` exist (the rest
    is zero); in the exchange it begins at unit `first_unit`. kind: as what it is kept (`cheetah.plan.formats`). places:
    for every element the one that it is to the matrix (u16, padded like the vector), of a whole vector; None: itself.
    part_units, part_room: units of parts of their own, which lie so far from one another in shared memory; else there
    is one part. at: the unit of shared memory where it begins. beside: what else is made of it, where threads bring it.
    name: by which the text calls its sizes, where they are not those of hidden vectors.
    """

    elements: int
    available: int
    first_unit: ch.Value = 0
    kind: str = BF16_VECTOR
    places: ch.Expr | None = None
    part_units: int = 0
    part_room: int = 0
    at: ch.Expr | None = None
    beside: Beside | None = None
    name: str = ""

    def units(self, machine: Machine) -> int:
        """Those of whole K-tiles that exist, of all tokens, under a name in the text."""
        units: int = self.available // VECTOR_COLUMNS * UNITS_PER_TILE * machine.plan.tokens
        if self.available == machine.model.hidden == machine.hidden:
            units = machine.hidden // UNIT * machine.plan.tokens
            return units
        return ch.named(f"{self.name.upper()}_UNITS", units) if self.name else units

    def place(self, unit: ch.Expr) -> ch.Expr:
        """Where a unit lies in shared memory."""
        gap = self.part_room - self.part_units
        if gap:
            return unit + unit // self.part_units * gap
        return unit if self.at is None else unit + self.at


@contextmanager
def _read_batch(columns: Columns, part: VectorPart, batch: _Batch, source: Source) -> Iterator[Any]:
    """The batch's units, of threads whose column is in use. Where whole warps convert units together, also of others,
    which have zeros."""
    order = _order_of(columns, part)
    if not (part.kind in BY_WARPS or order is not None and order.by_warps):
        with columns.if_active(columns.of_thread()):
            data = ch.array(ty.u32x4, UNITS, name="units")
            source.read(data, batch.first + part.first_unit, batch.count)
            yield data
        return
    data = ch.array(ty.u32x4, UNITS, name="units")
    with columns.if_active(columns.of_thread()):
        source.read(data, batch.first + part.first_unit, batch.count)
    if columns.limit > 1:
        with ch.else_():
            for index in range(batch.count):
                data[index] = prim.make_u32x4(0, 0, 0, 0)
    yield data


def load_vector(columns: Columns, part: VectorPart, source: Source) -> None:
    """Bring a part of a vector into shared memory; ends with a barrier of the consumer warps."""
    first_unit = part.first_unit if isinstance(part.first_unit, ch.Expr) else ch.argument(part.first_unit)
    if isinstance(source, Published):
        _load_vector(columns, part, source, first_unit, source.when_and_where)
    else:
        _load_given(columns, part, source)


@ch.function
def _load_vector(
    columns: Columns, part: VectorPart, source: Published, first_unit: ch.Expr, published: Whereabouts
) -> None:
    """Bring a part of a vector into shared memory; ends with a barrier of the consumer warps."""
    with source.known_by(published) as vector:
        _bring_vector(columns, replace(part, first_unit=first_unit), vector)


@ch.function
def _load_given(columns: Columns, part: VectorPart, source: Source) -> None:
    """Bring a part of a vector into shared memory; ends with a barrier of the consumer warps."""
    _bring_vector(columns, part, source)


@ch.inline
def _bring_vector(columns: Columns, part: VectorPart, source: Source) -> None:
    bring_units(columns, part, source)
    clear_behind(columns, part)
    columns.machine.meet()
    order = _order_of(columns, part)
    if order is not None:
        order.convert()


@ch.inline
def bring_units(columns: Columns, part: VectorPart, source: Source) -> None:
    """The units of a part that this thread brings, and zeros behind them in their K-tile of 32 columns."""
    machine, order, beside = columns.machine, _order_of(columns, part), part.beside
    vector = machine.region("vector", ty.u32x4)
    kept = None if beside is None else beside.begin()
    for batch in _batches(columns, part, UNITS):
        places = _load_places(order, batch)
        loaded: Any = None if beside is None else beside.load(batch.first, machine.consumer_threads, batch.count)
        batch.wait(source.wait)
        with _read_batch(columns, part, batch, source) as data:
            with _each(machine, batch) as (index, unit):
                if beside is not None:
                    beside.add(kept, data[index], loaded[index])
                if order is None and part.kind == BF16_VECTOR:
                    vector[part.place(unit)] = data[index]
                elif order is None:
                    store_unit(
                        columns, vector, part.place(unit), ch.const(ty.u32x4, data[index], name="words"), part.kind
                    )
                else:
                    order.put(ch.const(ty.u32x4, data[index], name="words"), places[index])
    if beside is not None:
        beside.end(kept)


def _copied(source: Source, part: VectorPart) -> CopySource | None:
    """Units that become something of another size, or belong elsewhere, pass through registers anyway."""
    is_in_place = part.places is None and part.beside is None and part.kind not in BY_WARPS
    return source.copied if is_in_place else None


@ch.function
def prefetch(machine: Machine, source: ch.Expr, size_bytes: ch.Expr) -> None:
    """Bring `size_bytes` of global memory into L2, a line a block: a cold line under full load takes microseconds."""
    lines = ch.reinterpret(ty.ptr(ty.u8), source)
    with ch.if_(machine.thread == 0):
        with ch.for_(machine.block * LINE_BYTES, size_bytes, machine.gpu.blocks * LINE_BYTES, unroll=1) as offset:
            prim.prefetch_l2(lines + offset)


@ch.inline
def addresses_of_units(columns: Columns, source: ch.Expr) -> Callable[[ch.Expr], ch.Expr]:
    """Where a consumer thread finds a unit of its own in `source`, the elements of its token (bf16, in natural order).

    Its units lie whole K-tiles apart: one address for all, and distances that the compiler knows. Worked out for
    each unit by itself, the addresses were kept in registers from layer to layer, and up to 100 words spilled.
    """
    thread, tokens = columns.machine.thread, columns.limit
    if tokens == 1:
        return lambda unit: source + unit * UNIT
    pair = thread // (UNITS_PER_TILE * tokens)
    own_units = source + (pair * UNITS_PER_TILE + thread % UNITS_PER_TILE) * UNIT
    return lambda unit: own_units + (unit - thread) // tokens * UNIT


@dataclass(frozen=True, eq=False)
class _Batch:
    """Units `first`, `first + consumer_threads`, ... of a thread: `count` of them.

    leads: the vector's first batch, of whole warps, so that they can wait together.
    """

    columns: Columns
    part: VectorPart
    first: ch.Expr
    count: int
    leads: bool

    def wait(self, wait: Wait | None) -> None:
        if self.leads and wait is not None:
            # The first lane of a warp has column 0, or (with room for more than 8) one that may not be in use.
            active = True if self.columns.limit <= COLUMNS else self.columns.of_thread() < self.columns.count
            wait(self.first + self.part.first_unit, active)


def _batches(columns: Columns, part: VectorPart, most_units: int) -> Iterator[_Batch]:
    """The thread's units that exist, at most `most_units` of them at a time; then the padding is cleared."""
    machine = columns.machine
    units, threads = part.units(machine), machine.consumer_threads
    each = units // threads  # of every thread; some have one more
    begin = 0
    while begin * threads < units:
        size = max(1, min(most_units, each - begin))
        full = (begin + size) * threads <= units
        with ch.if_(full or machine.thread + begin * threads < units):
            first = machine.thread
            if begin:
                first = ch.const(ty.u32, machine.thread + begin * threads, name="first_unit")
            yield _Batch(columns, part, first, size, begin == 0 and (full or units % 32 == 0))
        begin += size
    if part.available % VECTOR_COLUMNS:
        yield from _last_pair(columns, part, units)


def _last_pair(columns: Columns, part: VectorPart, first_unit: int) -> Iterator[_Batch]:
    """A K-tile of which only the first units exist: the others are zero."""
    machine, tokens = columns.machine, columns.limit
    vector = machine.region("vector", ty.u32x4)
    existing = part.available % VECTOR_COLUMNS // UNIT
    with ch.for_(machine.thread, UNITS_PER_TILE * tokens, machine.consumer_threads, unroll=1, name="rest") as rest:
        first = ch.const(ty.u32, rest + first_unit, name="first_unit")
        with ch.if_(rest % UNITS_PER_TILE < existing):
            yield _Batch(columns, part, first, 1, False)
        with ch.else_():
            vector[unit_place(first, part.kind)] = prim.make_u32x4(0, 0, 0, 0)


def clear_behind(columns: Columns, part: VectorPart) -> None:
    """What follows the last 32 elements that have some, of which a wider K-tile has more."""
    machine, units_each = columns.machine, UNITS_PER_TILE * columns.limit
    first, end = -(-part.available // VECTOR_COLUMNS) * units_each, part.elements // VECTOR_COLUMNS * units_each
    if first < end:
        vector = machine.region("vector", ty.u32x4)
        with ch.for_(machine.thread + first, end, machine.consumer_threads, unroll=1, name="padding") as unit:
            vector[part.place(unit)] = prim.make_u32x4(0, 0, 0, 0)


@contextmanager
def _each(machine: Machine, batch: _Batch) -> Iterator[tuple[ch.Expr, ch.Expr]]:
    """(number in the array, unit) of each of the batch."""
    with ch.for_(batch.count, unroll=True, name="index") as index:
        yield index, batch.first + index * machine.consumer_threads


def _order_of(columns: Columns, part: VectorPart) -> Order | None:
    if part.places is None:
        return None
    return Order(columns, part.places, part.elements, part.available, part.kind)


def _load_places(order: Order | None, batch: _Batch) -> Any:
    """For `order.put`, of the batch's units."""
    if order is None:
        return None
    places = order.places_array(UNITS)
    natural = addresses_of_units(order.columns, order.places)
    with _each(order.columns.machine, batch) as (index, unit):
        places[index] = order.load_places(unit, natural(unit))
    return places
