"""The input of a product as the copy engine brings it: whole, or part by part ahead of its use, and converted in place.

What a warp multiplies it converts itself, so that it waits for its pieces and for no other warp. Vectors come with the
padding of their matrix: nobody publishes there, so it is zero as in the workspace, and columns that are not in use come
too, since nobody looks at their products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import UNIT, Columns
from cheetah.blocks.linear.formats.vectors import is_skewed, store_unit
from cheetah.blocks.linear.fragments import tile_units
from cheetah.blocks.linear.parts import Arrival, Part
from cheetah.blocks.vector_copies import PIECES_OF_HALF, CopySource
from cheetah.lang import prim, ty
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import BlockRows
from cheetah.plan.plan import VECTOR_PIECES

LANES = 32
UNIT_BYTES = 2 * UNIT


@dataclass(frozen=True, eq=False)
class _Copied:
    """A vector that a matrix is multiplied by and that is copied, in rows of units of 8 elements that the consumer
    threads work on together."""

    columns: Columns
    matrix: MatrixLayout
    source: CopySource

    @property
    def own(self) -> OwnTiles:
        return OwnTiles(self.columns, self.matrix, self.source.kind)


@ch.function
def load_copied(columns: Columns, matrix: MatrixLayout, source: CopySource) -> None:
    """A whole vector; then each warp has what it multiplies."""
    CopiedVector(columns, matrix, source).bring()


class CopiedVector(_Copied):
    """A whole one: two halves of the region, of some pieces each, all of which are requested at once."""

    @ch.inline
    def bring(self) -> None:
        units = int(self.matrix.padded_columns) // UNIT * self.columns.limit
        own, rows = self.own, -(-units // self.own.row_units)
        each = -(-rows // VECTOR_PIECES)
        first_rows = range(0, rows, each)
        pieces = [len(first_rows[:PIECES_OF_HALF]), len(first_rows[PIECES_OF_HALF:])]
        self._request(units * UNIT_BYTES, each, pieces)
        vector = self.columns.machine.region("vector", ty.u32x4)
        for number, first in enumerate(first_rows):
            self.source.copies.wait(*divmod(number, PIECES_OF_HALF))
            own.convert(vector, range(first, min(first + each, rows)), self.matrix.k_tiles)
        own.end()
        for half in range(2):  # this thread has waited for every piece that it reads of
            self.source.copies.end(half, pieces[half])

    def _request(self, size: int, rows: int, pieces: Sequence[int]) -> None:
        """Behind the grid barrier; a barrier of the consumer warps lies between it and this. rows: of a piece. pieces:
        of each half."""
        vector = self.columns.machine.region("vector", ty.u8)
        piece_bytes = rows * self.own.row_bytes
        half_bytes = (rows * PIECES_OF_HALF) * self.own.row_bytes
        with self.source.copies.requesting():
            for half in range(2):
                first = half * half_bytes
                source = self.source.place(first // UNIT_BYTES)
                own_bytes = min(half_bytes, size - first)
                self.source.copies.request(half, vector + first, source, own_bytes, piece_bytes, pieces[half])


class CopiedParts(_Copied):
    """The parts of a vector as a matrix is sliced, two in shared memory: while one is multiplied the next comes.

    Part p lies in half p % 2 of the region. A part is requested when all warps have multiplied the one that it is
    copied over."""

    @property
    def count(self) -> int:
        return -(-self.matrix.chunks // self.matrix.slice_chunks)

    @property
    def part_tiles(self) -> int:
        """K-tiles of every part but perhaps the last."""
        return self.matrix.slice_chunks * self.matrix.tiles_per_chunk

    @property
    def part_units(self) -> int:
        return self.part_tiles * self.own.tile_units

    @ch.inline
    def each(self, arrival: Arrival) -> Iterator[Part]:
        """One after another, in a loop of the device."""
        slice_chunks = self.matrix.slice_chunks
        arrival.ring.begin_waiting()
        self._request_first()
        with ch.for_(self.count, unroll=1, name="part") as part:
            self.wait(part)
            with ch.if_(part == 0):
                arrival.end_waiting()
            first = part * slice_chunks
            end = ch.minimum(first + slice_chunks, self.matrix.chunks)
            place = part % 2 * slice_chunks
            yield Part(first, end, place, part == self.count - 1)
            self.release(part)

    def _request_first(self) -> None:
        """Request the first two; a barrier of the consumer warps lies behind whatever was in the region."""
        with self.source.copies.requesting():
            for part in range(min(2, self.count)):
                self._request(part)

    @ch.function
    def wait(self, part: ch.Expr) -> None:
        """Until this warp has what it multiplies of a part."""
        half = part % 2
        vector = self.columns.machine.region("vector", ty.u32x4) + half * self.part_units
        for number in range(self._pieces):
            self.source.copies.wait(half, number)
            first = number * self._rows_each
            own_rows = range(first, min(first + self._rows_each, self._rows))
            self.own.convert(vector, own_rows, self._tiles_of(part))
        self.own.end()
        self.source.copies.end(half, self._pieces)

    @ch.function
    def release(self, part: ch.Expr) -> None:
        """This warp has multiplied a part; once all have, the next but one comes in its place."""
        self.columns.machine.meet()
        with ch.if_(part + 2 < self.count), self.source.copies.requesting():
            self._request(part + 2)

    def _request(self, part: ch.Value) -> None:
        half = part % 2
        destination = self.columns.machine.region("vector", ty.u8) + half * (self.part_units * UNIT_BYTES)
        size = self._tiles_of(part) * (self.own.tile_units * UNIT_BYTES)
        if not isinstance(size, int):
            size = ch.const(ty.u32, size, name="size")
        piece_bytes = self._rows_each * self.own.row_bytes
        source = self.source.place(part * self.part_units)
        self.source.copies.request(half, destination, source, size, piece_bytes, self._pieces)

    def _tiles_of(self, part: ch.Value) -> Any:
        """K-tiles of a part."""
        if self.matrix.k_tiles % self.part_tiles == 0:
            return self.part_tiles
        return ch.minimum(self.matrix.k_tiles - part * self.part_tiles, self.part_tiles)

    @property
    def _rows(self) -> int:
        return self.part_tiles // self.own.row_tiles

    @property
    def _rows_each(self) -> int:
        return -(-self._rows // PIECES_OF_HALF)

    @property
    def _pieces(self) -> int:
        """Of a part."""
        return -(-self._rows // self._rows_each)


@dataclass(frozen=True, eq=False)
class OwnTiles:
    """The K-tiles of a vector that a warp multiplies: one of each *row*, of as many K-tiles as there are warps; of
    windows of blocks all of each, which are as they come. published: as what they come."""

    columns: Columns
    matrix: MatrixLayout
    published: str

    @property
    def row_tiles(self) -> int:
        if isinstance(self.matrix.format, BlockRows):
            return 1
        return ch.named("CONSUMER_WARPS", self.columns.machine.plan.consumer_warps)

    @property
    def tile_units(self) -> int:
        return tile_units(self.matrix, self.columns.limit)

    @property
    def row_units(self) -> int:
        return self.row_bytes // UNIT_BYTES

    @property
    def row_bytes(self) -> int:
        size = self.row_tiles * self.tile_units * UNIT_BYTES
        return ch.named(f"ROW_BYTES_OF_{self.matrix.tile_columns}_COLUMNS", int(size))

    @property
    def kind(self) -> str:
        return self.matrix.vector_kind(self.columns.limit)

    @property
    def converts(self) -> bool:
        """Whether the weights' format wants something else than what is published."""
        return self.kind != self.published

    def convert(self, vector: ch.Expr, rows: range, tiles: ch.Value) -> None:
        """Make of this warp's K-tiles of some rows what the weights' format wants. tiles: that there are."""
        if not self.converts:
            return
        each = -(-self.tile_units // LANES)
        data = ch.array(ty.u32x4, len(rows) * each, name="units")
        for index, row in enumerate(rows):
            with self._units(row, tiles) as unit_of:
                for turn in range(each):
                    data[index * each + turn] = vector[unit_of(turn)]
        if is_skewed(self.kind) != is_skewed(self.published):
            prim.warp_barrier()  # a lane's place was another's
        for index, row in enumerate(rows):
            with self._units(row, tiles) as unit_of:
                for turn in range(each):
                    words = data[index * each + turn]
                    store_unit(self.columns, vector, unit_of(turn), words, self.kind, self.published)

    def end(self) -> None:
        """All rows are converted."""
        if self.converts:
            prim.warp_barrier()  # other lanes of this warp read what this one has stored

    @contextmanager
    def _units(self, row: int, tiles: ch.Value) -> Iterator[Any]:
        """Where this lane's units of a row are: a function of the turn."""
        machine = self.columns.machine
        tile = machine.warp + row * self.row_tiles
        is_whole = isinstance(tiles, int) and (row + 1) * self.row_tiles <= tiles
        with ch.if_(is_whole or tile < tiles):
            with ch.if_(self.tile_units % LANES == 0 or machine.lane < self.tile_units):
                yield lambda turn: tile * self.tile_units + turn * LANES + machine.lane
