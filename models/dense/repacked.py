"""Pieces of matrices that a device packs: their bytes as files have them, scales, and tables (`models.repacking`).

A matrix whose rows lie one after the other goes up in parts of some M-tiles; one whose rows lie among one another, or
are packed in another order, as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cheetah.models.dense.pieces import BLOCK_BYTES, PIECE_BYTES, STAGING, Job, Piece, ranges
from cheetah.models.dense.row_groups import RowGroups, SourceRows, groups_of
from cheetah.models.formats import Bytes, PackingError, WeightFormat, format_of
from cheetah.models.formats.quantized_tiles import QuantizedFormat
from cheetah.models.repacking import Read, ScaleRows, StoredMatrix, stored_matrix
from cheetah.plan import M_TILE_ROWS, MatrixLayout
from cheetah.plan.repacking import NOTHING, PLACE_BYTES, Repacking
from cheetah.plan.sections import Sections
from cheetah.stopwatch import Stopwatch

PART_BYTES = 64 * 2**20
"""About what a part has of codes, where a matrix can go up in parts."""
ALIGNMENT = 256


@dataclass(frozen=True)
class StagedMatrix:
    """A matrix to be packed by a device. target: byte of the weights where it begins. names: of its tensors."""

    layout: MatrixLayout
    groups: RowGroups
    names: tuple[str, ...]
    stored: tuple[StoredMatrix, ...]
    target: int

    @cached_property
    def parts(self) -> list[_Part]:
        """In the order of M-tiles."""
        if any(one.codes.row_bytes is None for one in self.stored):
            return [_Part(self, range(self.layout.m_tiles))]
        of_m_tile = self.layout.k_tiles * format_of(self.layout).code_bytes
        return [_Part(self, m_tiles) for m_tiles in ranges(self.layout.m_tiles, max(1, PART_BYTES // of_m_tile))]

    @property
    def nbytes(self) -> int:
        """Staging memory that its parts need."""
        return max(part.end for part in self.parts)

    @property
    def can_be_numbered(self) -> bool:
        """Whether a number of 32 bits tells any code of a part."""
        return all(max(part.code_count, part.end) <= NOTHING for part in self.parts)

    @property
    def has_rows(self) -> bool:
        """Whether every part has some: the last of several ranks may have rows of zeros alone."""
        return all(part.has_rows for part in self.parts)

    @property
    def table_bytes(self) -> int:
        """Of the largest piece of tables."""
        return max(part.table_bytes for part in self.parts)

    def pieces(self, watch: Stopwatch, before: StagedMatrix | None = None) -> Iterator[Piece]:
        """All bytes that go up, and behind those of each part the packing of it. before: whose tables lie there yet."""
        reads = [one.codes.open() for one in self.stored]
        has_tables = before is not None and self._has_tables_of(before)
        for part in self.parts:
            *pieces, last = part.pieces(reads, watch, has_tables)
            yield from pieces
            yield replace(last, work=part.work)

    def _has_tables_of(self, other: StagedMatrix) -> bool:
        """Whether another's tables are also this one's, as those of a layer's experts are."""
        if self.layout is not other.layout or self.groups is not other.groups or len(self.parts) > 1:
            return False
        return all(mine.codes.lies_like(its.codes) for mine, its in zip(self.stored, other.stored, strict=True))


def staged_matrix(
    layout: MatrixLayout, groups: RowGroups, names: tuple[str, ...], tensors: Iterable[object], target: int
) -> StagedMatrix | None:
    """The matrix that the tensors make, if a device can pack it from its files."""
    stored = [one for tensor in tensors if (one := stored_matrix(tensor)) is not None]
    wanted = format_of(layout)
    has_scales = isinstance(wanted, QuantizedFormat)
    fits = [one for one in stored if one.codes.bits == wanted.code_bits and (one.scales is not None) == has_scales]
    if len(fits) != len(names) or len({one.codes.is_f16 for one in fits}) > 1:
        return None
    parts = StagedMatrix(layout, groups, names, tuple(fits), target)
    return parts if parts.has_rows and parts.can_be_numbered else None


@dataclass(frozen=True)
class _Source:
    """Bytes [begin, end) of a matrix' codes, which go to byte `place` of a part's, for some of its rows."""

    rows: SourceRows
    begin: int
    end: int
    place: int


@dataclass(frozen=True)
class _Part:
    """Some M-tiles of a matrix."""

    matrix: StagedMatrix
    m_tiles: range

    @cached_property
    def _sources(self) -> tuple[_Source, ...]:
        """What the M-tiles need of each tensor that they have rows of."""
        wanted = self.matrix.groups.rows(groups_of(self.matrix.layout, self.m_tiles))
        spans = [self._span(rows) for rows in wanted]
        places = Sections({number: len(span) for number, span in enumerate(spans)}, ALIGNMENT).offsets
        return tuple(
            _Source(rows, span.start, span.stop, places[number])
            for number, (rows, span) in enumerate(zip(wanted, spans, strict=True))
        )

    def _span(self, rows: SourceRows) -> range:
        """The bytes of a tensor's codes that have these rows."""
        codes = self.matrix.stored[rows.source].codes
        first, stop = rows.span
        return (
            range(codes.nbytes) if codes.row_bytes is None else range(first * codes.row_bytes, stop * codes.row_bytes)
        )

    @property
    def has_rows(self) -> bool:
        return bool(self._sources)

    @property
    def code_count(self) -> int:
        """Codes that go up, at most."""
        last = self._sources[-1]
        return (last.place + last.end - last.begin) * 8 // format_of(self.matrix.layout).code_bits

    @cached_property
    def _tables(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tables, in the order in which they lie in the staging memory."""
        layout, wanted = self.matrix.layout, format_of(self.matrix.layout)
        return {
            "order": (M_TILE_ROWS * wanted.code_columns,),
            "rows": (len(self.m_tiles) * M_TILE_ROWS, 2),
            "columns": (len(self.matrix.stored) * layout.halves, layout.k_tiles * wanted.code_columns),
            "places": (len(self.m_tiles), layout.chunks),
        }

    @cached_property
    def _sections(self) -> Sections[str]:
        """Of the staging memory, in bytes."""
        sizes = {name: 4 * int(np.prod(shape)) for name, shape in self._tables.items()}
        last = self._sources[-1]
        sizes |= {"scales": len(self.m_tiles) * self._scale_bytes, "codes": last.place + last.end - last.begin}
        return Sections(sizes, ALIGNMENT)

    @property
    def end(self) -> int:
        """Bytes of staging memory."""
        return self._sections.total

    @property
    def _behind_bytes(self) -> int:
        return self.matrix.layout.format.tile_bytes - format_of(self.matrix.layout).code_bytes

    @property
    def _scale_bytes(self) -> int:
        """What an M-tile has beside codes."""
        return self.matrix.layout.k_tiles * self._behind_bytes + self.matrix.layout.factor_bytes

    @property
    def work(self) -> Repacking:
        """What the device is told."""
        layout, wanted = self.matrix.layout, format_of(self.matrix.layout)
        return Repacking(
            target=self.matrix.target,
            m_tiles=len(self.m_tiles),
            k_tiles=layout.k_tiles,
            code_bits=wanted.code_bits,
            code_columns=wanted.code_columns,
            code_bytes=wanted.code_bytes,
            tile_bytes=layout.format.tile_bytes,
            tiles_per_chunk=layout.tiles_per_chunk,
            behind_bytes=self._behind_bytes,
            factor_bytes=layout.factor_bytes,
            is_f16=int(self.matrix.stored[0].codes.is_f16),
            **{f"{name}_at": offset for name, offset in self._sections.offsets.items()},
        )

    def pieces(self, reads: Sequence[Read], watch: Stopwatch, has_tables: bool) -> Iterator[Piece]:
        """Tables, if they do not lie there, scales and codes."""
        if not has_tables:
            yield self._tables_piece()
        yield from self._scales_pieces(watch)
        for source in self._sources:
            yield from self._codes_pieces(reads[source.rows.source], source, watch)

    @property
    def table_bytes(self) -> int:
        """Of all tables."""
        return self._sections.offsets["scales"]

    def _tables_piece(self) -> Piece:
        def make(memory: Bytes) -> None:
            made: dict[str, NDArray[Any]] = {"order": _code_order(format_of(self.matrix.layout))}
            made |= {"rows": self._row_table(), "columns": self._column_table()}
            for name, table in {**made, "places": self._places()}.items():
                begin = self._sections.offsets[name]
                memory[begin : begin + 4 * table.size].view(np.uint32).reshape(table.shape)[:] = table

        return Piece(STAGING, 0, self.table_bytes, (make,))

    def _row_table(self) -> NDArray[np.int64]:
        table = np.full(self._tables["rows"], NOTHING, np.int64)
        layout, per_byte = self.matrix.layout, 8 // format_of(self.matrix.layout).code_bits
        for source in self._sources:
            offsets = self.matrix.stored[source.rows.source].codes.row_offsets[source.rows.rows]
            for half in range(layout.halves):
                m_tile, row = np.divmod(source.rows.places, layout.tile_rows)
                places = m_tile * M_TILE_ROWS + half * layout.tile_rows + row
                table[places, 0] = offsets + (source.place - source.begin) * per_byte
                table[places, 1] = (source.rows.source * layout.halves + half) * self._tables["columns"][1]
        return table

    def _column_table(self) -> NDArray[np.int64]:
        """Of each tensor the columns of every K-tile's first half, if it has halves, then those of the second."""
        halves, (rows, width) = self.matrix.layout.halves, self._tables["columns"]
        table = np.full((rows // halves, width * halves), NOTHING, np.int64)
        for row, one in zip(table, self.matrix.stored, strict=True):
            row[: len(one.codes.column_offsets)] = one.codes.column_offsets
        return table.reshape(len(table), self.matrix.layout.k_tiles, halves, -1).swapaxes(1, 2).reshape(rows, width)

    def _places(self) -> NDArray[np.int64]:
        layout = self.matrix.layout
        wave, position = np.divmod(np.array(self.m_tiles)[:, None], layout.blocks)
        addresses = layout.address(wave, np.arange(layout.chunks), position, layout.wave_width(wave))
        return np.asarray(addresses) // PLACE_BYTES

    def _scales_pieces(self, watch: Stopwatch) -> Iterator[Piece]:
        if not self._scale_bytes:
            return
        for some in ranges(len(self.m_tiles), max(1, PIECE_BYTES // self._scale_bytes)):
            blocks = ranges(len(some), max(1, BLOCK_BYTES // self._scale_bytes))
            jobs = (self._scales_job(some.start, one, watch) for one in blocks)
            begin = self._sections.offsets["scales"] + some.start * self._scale_bytes
            yield Piece(STAGING, begin, len(some) * self._scale_bytes, tuple(jobs))

    def _scales_job(self, first: int, m_tiles: range, watch: Stopwatch) -> Job:
        """Scales, zero points and factors of some M-tiles of a piece, whose first is M-tile `first` of the part."""
        begin = self.m_tiles.start + first

        def make(memory: Bytes) -> None:
            room = memory.reshape(-1, self._scale_bytes)[m_tiles.start : m_tiles.stop]
            with watch("scales (all threads)"):
                some = range(begin + m_tiles.start, begin + m_tiles.stop)
                self._put_scales(groups_of(self.matrix.layout, some), room)

        return make

    def _put_scales(self, groups: range, room: Bytes) -> None:
        layout = self.matrix.layout
        scales = [cast(ScaleRows, one.scales) for one in self.matrix.stored]
        rows = scales[0][:0].room(len(groups) * M_TILE_ROWS // 2)
        self.matrix.groups.gather(scales, rows, groups)
        wanted = cast(QuantizedFormat, format_of(layout))
        end = layout.k_tiles * self._behind_bytes
        try:
            room[:, :end] = wanted.behind_codes(rows, layout.k_tiles).reshape(len(room), end)
            factors = wanted.row_factors(rows)
            room[:, end : end + factors.shape[1]] = factors
            room[:, end + factors.shape[1] :] = 0
        except PackingError as problem:
            raise misplaced(self.matrix.names, problem) from problem

    def _codes_pieces(self, read: Read, source: _Source, watch: Stopwatch) -> Iterator[Piece]:
        def job(begin: int, block: range) -> Job:
            def make(memory: Bytes) -> None:
                with watch("read (all threads)"):
                    read(begin + block.start, memory[block.start : block.stop])

            return make

        for some in ranges(source.end - source.begin, PIECE_BYTES):
            begin = source.begin + some.start
            jobs = tuple(job(begin, block) for block in ranges(len(some), BLOCK_BYTES))
            place = self._sections.offsets["codes"] + source.place + some.start
            yield Piece(STAGING, place, len(some), jobs)


@cache
def _code_order(wanted: WeightFormat) -> NDArray[np.uint32]:
    return wanted.code_order()


def misplaced(names: Sequence[str], problem: PackingError) -> PackingError:
    """The error of rows that the tensors' numbers have no place in."""
    return PackingError(f"{' or '.join(names)}, rows in the order of M-tiles: {problem}")
