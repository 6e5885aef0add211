"""The input of a matrix product: a vector of every token brought into shared memory as bf16, optionally normalised.

A unit is 8 elements of one token: 16 bytes of shared memory, four payload words of an exchange. Vectors lie in fragment
order (see `columns`), in shared memory as in the exchange, so a thread's units all belong to one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from cheetah import lang as ch
from cheetah.blocks.columns import UNIT, UNITS_PER_TILE, Columns
from cheetah.blocks.linear.copied import CopiedParts, CopiedVector, Piece, load_copied
from cheetah.blocks.linear.formats.vectors import store_unit
from cheetah.blocks.linear.interface import Prologue
from cheetah.blocks.linear.order import Order
from cheetah.blocks.machine import Machine
from cheetah.blocks.vector_copies import CopySource
from cheetah.lang import prim, ty
from cheetah.lang.primitives.exchange import UNITS
from cheetah.plan import VECTOR_COLUMNS, MatrixLayout
from cheetah.plan.formats import BF16_VECTOR, DIGITS, HALVES
from cheetah.plan.plan import COLUMNS

LINE_BYTES = 128
TOO_LARGE = 2.0**64
"""A sum of squares that no vector of plausible numbers has. An element that was none makes all products NaN, so that it
is told, whatever the exchange made of it: at least 2^32."""
NAN = 0x7FC00000
NORMALISED_UNITS = 6
"""Units that are normalised together where there are several tokens: with 8, registers spill."""
COPIED_ROWS = 16
"""Units of a thread of which it loads the norm's weights before it waits for what the copy engine brings."""
Read = Callable[[Any, ch.Expr, int], None]
"""Puts units (u32x4) `unit`, `unit + consumer_threads`, ... into an array: (array of UNITS, unit, how many)."""
Wait = Callable[[ch.Expr, ch.Value], None]
"""Lets one lane of a warp wait for its unit before all lanes read: called by whole warps with each lane's first unit,
and whether it is to come at all.

While a vector is awaited, polling all of it crowds the memory: 32 times fewer polls are worth 3 % on 1B (H200)."""


class Source(Protocol):
    """Where a vector comes from: a vector of the exchange, or the embeddings of the tokens."""

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
class RmsNorm(Prologue):
    """x * weight, and 1/rms of every token beside it, of the whole vector.

    elements: of the vector, over which the mean of squares runs; available: those that the source has, the rest of its
    K-tiles is zero. weight: bf16, padded like the vector. following: the weights of the norm after this one, which
    are brought into L2 while this one is worked on. places: as of `Part`.
    """

    columns: Columns
    source: Source
    elements: int
    available: int
    epsilon: float
    weight: ch.Expr
    following: ch.Expr | None = None
    places: ch.Expr | None = None

    def prepare(self) -> None:
        if self.following is not None:
            prefetch(self.columns.machine, self.following, self._padded * 2)

    def load(self, matrix: MatrixLayout, index: int) -> None:
        kind = matrix.vector_kind(self.columns.limit)
        part = Part(matrix.padded_columns, self.available, kind=kind, places=self.places)
        copied = _copied(self.source, part)
        if copied is not None:
            load_copied_normalised(self.columns, matrix, self.elements, self.epsilon, self.weight, copied)
            return
        load_normalised(self.columns, part, self.elements, self.epsilon, self.weight, self.source)

    @property
    def _padded(self) -> int:
        return -(-self.elements // VECTOR_COLUMNS) * VECTOR_COLUMNS


@dataclass(frozen=True, eq=False)
class Slices(Prologue):
    """The parts of a vector as the matrix is sliced; `available` of its elements exist. places: as of `Part`, where the
    matrix is not sliced."""

    columns: Columns
    source: Source
    available: int
    places: ch.Expr | None = None

    def parts(self, matrix: MatrixLayout) -> CopiedParts | None:
        copied = _copied(self.source, Part(0, 0, kind=matrix.vector_kind(self.columns.limit), places=self.places))
        return None if copied is None else CopiedParts(self.columns, matrix, copied)

    def load(self, matrix: MatrixLayout, index: int) -> None:
        chunk_elements = matrix.tiles_per_chunk * matrix.tile_columns
        first, end = (chunk * chunk_elements for chunk in matrix.slice_range(index))
        end = min(end, matrix.padded_columns)
        first_unit = first // UNIT * self.columns.limit
        part = Part(
            *(end - first, min(end, self.available) - first, first_unit),
            kind=matrix.vector_kind(self.columns.limit),
            places=self.places,
        )
        assert self.places is None or matrix.slices == 1, matrix.name
        copied = _copied(self.source, part)
        if copied is not None and matrix.slices == 1:
            load_copied(self.columns, matrix, copied)
            return
        load_vector(self.columns, part, self.source)


@dataclass(frozen=True, eq=False)
class Either(Prologue):
    """One prologue where `condition` holds, else the other; what is prepared is the other's."""

    condition: ch.Expr
    then: Prologue
    otherwise: Prologue

    def prepare(self) -> None:
        self.otherwise.prepare()

    def load(self, matrix: MatrixLayout, index: int) -> None:
        with ch.if_(self.condition):
            self.then.load(matrix, index)
        with ch.else_():
            self.otherwise.load(matrix, index)


@dataclass(frozen=True, eq=False)
class Prefetching(Prologue):
    """A prologue that also brings `vectors`, (address, bytes) each, into L2, for the epilogue or the next phase."""

    inner: Prologue
    machine: Machine
    vectors: Sequence[tuple[ch.Expr, int]]

    def prepare(self) -> None:
        self.inner.prepare()
        for address, size_bytes in self.vectors:
            prefetch(self.machine, address, size_bytes)

    def load(self, matrix: MatrixLayout, index: int) -> None:
        self.inner.load(matrix, index)


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a vector: `elements` of every token, a multiple of 32, of which the first `available` exist (the rest
    is zero); in the exchange it begins at unit `first_unit`. kind: as what it is kept (`cheetah.plan.formats`). places:
    for every element the one that it is to the matrix (u16, padded like the vector), of a whole vector; None: itself.
    """

    elements: int
    available: int
    first_unit: ch.Value = 0
    kind: str = BF16_VECTOR
    places: ch.Expr | None = None


@contextmanager
def _read_batch(columns: Columns, part: Part, batch: _Batch, source: Source) -> Iterator[Any]:
    """The batch's units, of threads whose column is in use. Where whole warps convert units together, also of others,
    which have zeros."""
    order = _order_of(columns, part)
    if not (part.kind in (DIGITS, HALVES) or order is not None and order.by_warps):
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


@ch.function
def load_vector(columns: Columns, part: Part, source: Source) -> None:
    """Bring a part of a vector into shared memory; ends with a barrier of the consumer warps."""
    machine, order = columns.machine, _order_of(columns, part)
    vector = machine.region("vector", ty.u32x4)
    for batch in _batches(columns, part):
        places = _load_places(order, batch)
        batch.wait(source.wait)
        with _read_batch(columns, part, batch, source) as data:
            with _each(machine, batch) as (index, unit):
                if order is None:
                    store_unit(columns, vector, unit, data[index], part.kind)
                else:
                    order.put(data[index], places[index])
    machine.meet()
    if order is not None:
        order.convert()


@ch.inline
def load_normalised(
    columns: Columns,
    part: Part,
    true_elements: int,
    epsilon: float,
    norm: ch.Expr,
    source: Source,
) -> None:
    """RMSNorm: x * weight into shared memory, and every token's 1/rms into the region `scales`.

    The products are multiplied by 1/rms afterwards, which keeps it off their path. The mean of squares runs over
    `true_elements`; padding is zero. `norm` points to the bf16 weights. They are loaded before the vector is waited
    for. Ends with a barrier of the consumer warps for the vector; `scales` are seen after the next one.
    """
    machine, order = columns.machine, _order_of(columns, part)
    vector = machine.region("vector", ty.u32x4)
    squares = ch.var(ty.f32, 0.0)
    most = UNITS if columns.limit == 1 else NORMALISED_UNITS
    weights_at = addresses_of_units(columns, norm)
    for batch in _batches(columns, part, most):
        weights = ch.array(ty.u32x4, UNITS)
        with _each(machine, batch) as (index, unit):
            weights[index] = prim.load_constant_u32x4(weights_at(unit))
        places = _load_places(order, batch)
        batch.wait(source.wait)
        with _read_batch(columns, part, batch, source) as data:
            with _each(machine, batch) as (index, unit):
                if order is None:
                    _normalise_unit(columns, vector, unit, data[index], weights[index], squares, part)
                else:
                    weighted = _times_weights(data[index], weights[index], squares)
                    words = ch.const(ty.u32x4, weighted, name="words")
                    order.put(words, places[index])
    _write_scales(columns, part, squares, true_elements, epsilon)
    if order is not None:
        order.convert()


@ch.inline
def load_copied_normalised(
    columns: Columns, matrix: MatrixLayout, true_elements: int, epsilon: float, norm: ch.Expr, source: CopySource
) -> None:
    """`load_normalised` of a vector that the copy engine brings: a thread takes the same units in the same order."""
    machine = columns.machine
    part = Part(matrix.padded_columns, matrix.padded_columns, kind=matrix.vector_kind(columns.limit))
    whole = CopiedVector(columns, matrix, source, machine.consumer_threads)
    whole.request()
    vector = machine.region("vector", ty.u32x4)
    squares = ch.var(ty.f32, 0.0)
    weights_at = addresses_of_units(columns, norm)
    count = -(-true_elements // VECTOR_COLUMNS) * UNITS_PER_TILE * columns.limit  # behind them all is zero

    def each(piece: Piece) -> Iterator[tuple[int, ch.Expr]]:
        """(number in the piece, unit) of this thread's."""
        for index in range(piece.rows):
            unit = machine.thread + (piece.first_row + index) * machine.consumer_threads
            is_whole = (piece.first_row + index + 1) * machine.consumer_threads <= count
            with nullcontext() if is_whole else ch.if_(unit < count):
                yield index, unit

    together = max(1, COPIED_ROWS // whole.pieces[0].rows)
    for first in range(0, len(whole.pieces), together):
        pieces = whole.pieces[first : first + together]
        weights = [ch.array(ty.u32x4, piece.rows, name="weights") for piece in pieces]
        for piece, own in zip(pieces, weights, strict=True):
            for index, unit in each(piece):
                own[index] = prim.load_constant_u32x4(weights_at(unit))
        for piece, own in zip(pieces, weights, strict=True):
            whole.wait(piece)
            data = ch.array(ty.u32x4, piece.rows, name="units")
            for index, unit in each(piece):
                data[index] = vector[unit]
            for index, unit in each(piece):
                _normalise_in_pairs(columns, vector, unit, data[index], own[index], squares, part)
    whole.end()
    _write_scales(columns, part, squares, true_elements, epsilon)


def _copied(source: Source, part: Part) -> CopySource | None:
    """Units that become something of another size, or belong elsewhere, pass through registers anyway."""
    is_in_place = part.places is None and part.kind not in (DIGITS, HALVES)
    return source.copied if is_in_place else None


@ch.function
def prefetch(machine: Machine, source: ch.Expr, size_bytes: int) -> None:
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
    part: Part
    first: ch.Expr
    count: int
    leads: bool

    def wait(self, wait: Wait | None) -> None:
        if self.leads and wait is not None:
            # The first lane of a warp has column 0, or (with room for more than 8) one that may not be in use.
            active = True if self.columns.limit <= COLUMNS else self.columns.of_thread() < self.columns.count
            wait(self.first + self.part.first_unit, active)


def _batches(columns: Columns, part: Part, most_units: int = UNITS) -> Iterator[_Batch]:
    """The thread's units that exist, at most `most_units` of them at a time; then the padding is cleared."""
    machine, tokens = columns.machine, columns.limit
    whole_pairs = part.available // VECTOR_COLUMNS
    units, threads = whole_pairs * UNITS_PER_TILE * tokens, machine.consumer_threads
    each = units // threads  # of every thread; some have one more
    begin = 0
    while begin * threads < units:
        size = max(1, min(most_units, each - begin))
        full = (begin + size) * threads <= units
        with nullcontext() if full else ch.if_(machine.thread + begin * threads < units):
            first = ch.const(ty.u32, machine.thread + begin * threads, name="first_unit")
            yield _Batch(columns, part, first, size, begin == 0 and (full or units % 32 == 0))
        begin += size
    if part.available % VECTOR_COLUMNS:
        yield from _last_pair(columns, part, units)
    _clear_behind(columns, part)


def _last_pair(columns: Columns, part: Part, first_unit: int) -> Iterator[_Batch]:
    """A K-tile of which only the first units exist: the others are zero."""
    machine, tokens = columns.machine, columns.limit
    vector = machine.region("vector", ty.u32x4)
    existing = part.available % VECTOR_COLUMNS // UNIT
    with ch.for_(machine.thread, UNITS_PER_TILE * tokens, machine.consumer_threads, unroll=1, name="rest") as rest:
        first = ch.const(ty.u32, rest + first_unit, name="first_unit")
        with ch.if_(rest % UNITS_PER_TILE < existing):
            yield _Batch(columns, part, first, 1, False)
        with ch.else_():
            vector[first] = prim.make_u32x4(0, 0, 0, 0)


def _clear_behind(columns: Columns, part: Part) -> None:
    """What follows the last 32 elements that have some, of which a wider K-tile has more."""
    machine, units_each = columns.machine, UNITS_PER_TILE * columns.limit
    first, end = -(-part.available // VECTOR_COLUMNS) * units_each, part.elements // VECTOR_COLUMNS * units_each
    if first < end:
        vector = machine.region("vector", ty.u32x4)
        with ch.for_(machine.thread + first, end, machine.consumer_threads, unroll=1, name="padding") as unit:
            vector[unit] = prim.make_u32x4(0, 0, 0, 0)


@contextmanager
def _each(machine: Machine, batch: _Batch) -> Iterator[tuple[ch.Expr, ch.Expr]]:
    """(number in the array, unit) of each of the batch."""
    with ch.for_(batch.count, unroll=True, name="index") as index:
        yield index, batch.first + index * machine.consumer_threads


@ch.function
def _normalise_unit(
    columns: Columns,
    vector: ch.Expr,
    unit: ch.Expr,
    words: ch.Expr,
    weight: ch.Expr,
    squares: Any,
    part: Part,
) -> None:
    """A unit times the norm's weights into the vector, and its squares to the thread's sum."""
    store_unit(columns, vector, unit, _times_weights(words, weight, squares), part.kind)


@ch.inline
def _times_weights(words: ch.Expr, weight: ch.Expr, squares: Any) -> Any:
    packed = []
    for member in "xyzw":
        low = prim.bf16x2_low(getattr(words, member))
        high = prim.bf16x2_high(getattr(words, member))
        squares += low * low + high * high
        weights = getattr(weight, member)
        packed.append(prim.pack_bf16x2(low * prim.bf16x2_low(weights), high * prim.bf16x2_high(weights)))
    return prim.make_u32x4(*packed)


@ch.function
def _normalise_in_pairs(
    columns: Columns, vector: ch.Expr, unit: ch.Expr, words: ch.Expr, weight: ch.Expr, squares: Any, part: Part
) -> None:
    """`_normalise_unit` with products that are rounded as pairs: the same bits. With one token it is no faster."""
    packed = []
    for member in "xyzw":
        pair = getattr(words, member)
        low, high = prim.bf16x2_low(pair), prim.bf16x2_high(pair)
        squares += low * low + high * high
        packed.append(prim.multiply_bf16x2(pair, getattr(weight, member)))
    store_unit(columns, vector, unit, prim.make_u32x4(*packed), part.kind)


def _order_of(columns: Columns, part: Part) -> Order | None:
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


@ch.function
def _write_scales(columns: Columns, part: Part, squares: Any, true_elements: int, epsilon: float) -> None:
    """1/rms of every token from the threads' sums of squares: within warps, then over the warps in order."""
    machine, tokens = columns.machine, columns.limit
    partial_sums = machine.region("partial_sums", ty.f32)
    scales = machine.region("scales", ty.f32)
    in_warp = min(tokens, COLUMNS)  # tokens of one warp's units
    classes = tokens // in_warp  # so many neighbouring warps have those of different tokens
    sum_of_token = ch.var(ty.f32, squares)
    for mask in (16, 8, 4, 2, 1):
        if mask < UNITS_PER_TILE or mask >= UNITS_PER_TILE * in_warp:
            sum_of_token += prim.shuffle_xor_f32(sum_of_token, mask)
    with ch.if_((machine.lane % UNITS_PER_TILE == 0) & (machine.lane < UNITS_PER_TILE * in_warp)):
        partial_sums[machine.warp * COLUMNS + machine.lane // UNITS_PER_TILE] = sum_of_token
    machine.meet()
    with ch.if_(machine.thread < columns.count):
        total = ch.var(ty.f32, 0.0)
        with ch.for_(machine.plan.consumer_warps // classes, unroll=True) as other:
            warp = other * classes + machine.thread // COLUMNS
            total += partial_sums[warp * COLUMNS + machine.thread % COLUMNS]
        scale = prim.rsqrt_f32(total * (1.0 / true_elements) + epsilon)
        scales[machine.thread] = ch.select(total < TOO_LARGE, scale, prim.bits_float(NAN))
