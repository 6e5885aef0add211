"""All weights of a checkpoint into the kernel's buffers, as fast as memory and disk allow.

Knows neither files nor devices: tensors come from one function and bytes go to another. A few threads read, gather
and pack blocks of whole rows; the calling thread hands finished pieces out, in order, so that an upload goes on while
the next pieces are made, in memory that a GPU reads itself if the device lends it. What limits is neither memory nor
arithmetic but Python's lock, which every operation of numpy lets go of and takes again: so operations are few and
large. A GPU could permute the words itself after a plain upload; the emulator, the tests and a machine without a
compiler would need this way beside it.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cheetah.models.act_order import ORDERED_INPUTS, RowsInOrder, ordered_input, places_of_columns
from cheetah.models.config import ModelConfig
from cheetah.models.dense.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD_NORMS,
    INPUT_NORM,
    POST_ATTENTION_NORM,
    QKV_BIASES,
    RowGroups,
    logical_matrix,
    matrix_tensors,
    row_groups,
    vector_shapes,
)
from cheetah.models.family import Progress, QuantizedMatrix, ReadRows, ReadTensor, Rows, WriteBytes
from cheetah.models.formats import Bytes, PackingError, format_of
from cheetah.models.formats.quantized import Order, QuantizedRows
from cheetah.models.rounding import Bits
from cheetah.models.scratch import scratch
from cheetah.piece_ring import ALIGNMENT, Lend, PieceRing, ordinary_memory
from cheetah.plan import M_TILE_ROWS, MatrixLayout, StepMatrices
from cheetah.plan.formats import QuantizedTiles
from cheetah.stopwatch import Stopwatch

BLOCK_BYTES = 4 * 2**20
"""About what a thread packs at a time: some milliseconds of work in a few dozen operations, for threads wait for each
other's between any two."""
PIECE_BYTES = 16 * 2**20
"""About what one call of `write` gets, or one wave of M-tiles where that is more."""
BLOCKS_AHEAD = 3
"""For each thread, so much memory in pieces that are being made or wait for the calling thread."""
PIECES_AHEAD = 3
"""Of the largest pieces: one that is made, one that is handed out, and what is lost at the end of a ring."""
MOST_THREADS = 8
"""More of them wait for Python's lock longer than they work (8B in bf16, a machine of 64 cores)."""
WORD_BYTES = 4


def pack_all(
    config: ModelConfig,
    matrices: StepMatrices,
    tensor: ReadTensor,
    write: WriteBytes,
    progress: Progress | None = None,
    *,
    rows: ReadRows | None = None,
    threads: int | None = None,
    lend: Lend = ordinary_memory,
    watch: Stopwatch | None = None,
) -> None:
    """Pack every weight and hand the bytes out: `write(buffer, byte offset, uint8 [n])`, in the calling thread.

    Every byte of `buffer_bytes` is written once. The array given to `write` is valid only until it returns: its
    memory is used again. rows: gives a matrix that is read in parts, in several threads; by default `tensor` does.
    threads: by default one a processor, at most 16. lend: where the memory for pieces comes from. Host memory: five
    blocks of about 4 MB a thread, of which three in pieces, but at least three of the largest pieces; what `tensor` and
    `rows` hold of the matrices in work comes on top. `progress` gets the bytes just written. watch: takes the seconds
    of all threads that read and that pack, and those of the calling one that waits for them and that uploads.
    """
    watch = watch or Stopwatch()
    threads = threads or min(MOST_THREADS, os.cpu_count() or 1)
    under_way = deque[tuple[_Piece, Bytes, list[Future[None]]]]()
    pool = ThreadPoolExecutor(threads, "pack")

    def hand_out(ring: PieceRing) -> None:
        piece, packed, jobs = under_way.popleft()
        with watch("wait for pieces"):
            for job in jobs:
                job.result()
        with watch("upload"):
            write(piece.buffer, piece.offset, packed)
            ring.give_back()
        if progress is not None:
            progress(piece.nbytes)

    nbytes = max(threads * BLOCKS_AHEAD * BLOCK_BYTES, PIECES_AHEAD * _largest_piece(config, matrices))
    with lend(nbytes) as ring:
        try:
            for piece in _pieces(config, matrices, tensor, rows or tensor, watch):
                while (packed := ring.take(piece.nbytes)) is None:
                    hand_out(ring)
                under_way.append((piece, packed, [pool.submit(job, packed) for job in piece.jobs]))
            while under_way:
                hand_out(ring)
        finally:
            pool.shutdown(cancel_futures=True)  # waits for the jobs that still write to the ring


def _largest_piece(config: ModelConfig, matrices: StepMatrices) -> int:
    """Bytes that no piece exceeds, with what aligns it."""
    vectors = (math.prod(shape) * 2 for shape in vector_shapes(config).values())
    waves = (min(one.blocks, one.m_tiles) * one.m_tile_bytes for one in (*matrices.of_layer, matrices.lm_head))
    return max(PIECE_BYTES, config.padded_hidden * 2 * (2 * config.layers + 1), *vectors, *waves) + ALIGNMENT


Job = Callable[[Bytes], None]
"""Fills its share of a piece's memory."""


@dataclass(frozen=True)
class _Piece:
    """`nbytes` at `offset` of `buffer`, which the jobs make together."""

    buffer: str
    offset: int
    nbytes: int
    jobs: tuple[Job, ...]


def _pieces(
    config: ModelConfig, matrices: StepMatrices, tensor: ReadTensor, rows: ReadRows, watch: Stopwatch
) -> Iterator[_Piece]:
    """Everything. A tensor is opened when its first piece is wanted, and let go with its last."""
    yield from _embedding_pieces(config, cast(Rows, rows(EMBEDDING)))
    yield _norms_piece(config, tensor)
    if config.qkv_biases:
        yield _biases_piece(config, tensor)
    if config.head_norms:
        yield _head_norms_piece(config, tensor)
    if config.act_order:
        yield _places_piece(config, rows)
    for layer in range(config.layers):
        for layout in matrices.of_layer:
            yield from _matrix_pieces(config, layout, matrices.offset(layout.name, layer), layer, rows, watch)
    yield from _matrix_pieces(config, matrices.lm_head, matrices.lm_head.offset, 0, rows, watch)


def _norms_piece(config: ModelConfig, tensor: ReadTensor) -> _Piece:
    names = [name.format(layer=layer) for layer in range(config.layers) for name in (INPUT_NORM, POST_ATTENTION_NORM)]

    def make(memory: Bytes) -> None:
        norms = memory.view(np.uint16).reshape(len(names) + 1, config.padded_hidden)
        norms[:, config.hidden_size :] = 0
        for row, name in zip(norms, (*names, FINAL_NORM), strict=True):
            row[: config.hidden_size] = tensor(name)

    return _Piece("norms", 0, (len(names) + 1) * config.padded_hidden * 2, (make,))


def _biases_piece(config: ModelConfig, tensor: ReadTensor) -> _Piece:
    """Every layer's biases in M-tile order: a bias is a matrix of one column."""
    shape = vector_shapes(config)["biases"]

    def make(memory: Bytes) -> None:
        for layer, row in enumerate(memory.view(np.uint16).reshape(shape)):
            columns = [tensor(name.format(layer=layer))[:, None] for name in QKV_BIASES]
            row[:] = logical_matrix(config, "qkv", columns)[:, 0]

    return _Piece("biases", 0, math.prod(shape) * 2, (make,))


def _head_norms_piece(config: ModelConfig, tensor: ReadTensor) -> _Piece:
    shape = vector_shapes(config)["head_norms"]

    def make(memory: Bytes) -> None:
        for layer, of_layer in enumerate(memory.view(np.uint16).reshape(shape)):
            for row, name in zip(of_layer, HEAD_NORMS, strict=True):
                row[:] = tensor(name.format(layer=layer))

    return _Piece("head_norms", 0, math.prod(shape) * 2, (make,))


def _places_piece(config: ModelConfig, rows: ReadRows) -> _Piece:
    """Where each ordered matrix has the elements of its input."""
    shape = vector_shapes(config)["places"]

    def make(memory: Bytes) -> None:
        places = memory.view(np.uint16).reshape(shape)
        for layer in range(config.layers):
            for matrix in ORDERED_INPUTS:
                order = _order_of(config, matrix, layer, rows)
                places[ordered_input(matrix, layer)] = places_of_columns(order, shape[1])
        places[-1] = places_of_columns(_order_of(config, "lm_head", 0, rows), shape[1])

    return _Piece("places", 0, math.prod(shape) * 2, (make,))


def _order_of(config: ModelConfig, matrix: str, layer: int, rows: ReadRows) -> Order | None:
    """Of the columns of a matrix; its modules have the same."""
    if not config.is_ordered(matrix):
        return None
    return cast(QuantizedMatrix, rows(matrix_tensors(config, matrix, layer)[0])).order


def _embedding_pieces(config: ModelConfig, embedding: Rows) -> Iterator[_Piece]:
    row_bytes = config.padded_hidden * 2
    count = max(1, PIECE_BYTES // row_bytes)

    def maker(first: int, stop: int) -> Job:
        def make(memory: Bytes) -> None:
            padded = memory.view(np.uint16).reshape(-1, config.padded_hidden)
            padded[:, : config.hidden_size] = embedding[first:stop]
            padded[:, config.hidden_size :] = 0

        return make

    for first in range(0, config.vocab_size, count):
        stop = min(first + count, config.vocab_size)
        yield _Piece("embedding", first * row_bytes, (stop - first) * row_bytes, (maker(first, stop),))


def _matrix_pieces(
    config: ModelConfig, layout: MatrixLayout, offset: int, layer: int, rows: ReadRows, watch: Stopwatch
) -> Iterator[_Piece]:
    groups = row_groups(config, layout.name)
    if len(groups) != 2 * layout.m_tiles:
        raise PackingError(f"matrix {layout.name!r}: {len(groups)} groups of rows for {layout.m_tiles} M-tiles")
    names = matrix_tensors(config, layout.name, layer)
    tensors = tuple(rows(name) for name in names)
    if layout.name == "gate_up" and (order := _order_of(config, "down", layer, rows)) is not None:
        tensors = tuple(RowsInOrder(one, order) for one in tensors)
    for m_tiles in _ranges(
        layout.m_tiles, layout.blocks * max(1, PIECE_BYTES // (layout.blocks * layout.m_tile_bytes))
    ):
        blocks = _ranges(len(m_tiles), max(1, BLOCK_BYTES // layout.m_tile_bytes))
        first_wave = m_tiles.start // layout.blocks
        jobs = (
            _Block(layout, groups, names, tensors, m_tiles[block.start : block.stop], first_wave, watch)
            for block in blocks
        )
        begin = offset + m_tiles.start * layout.m_tile_bytes
        yield _Piece("weights", begin, len(m_tiles) * layout.m_tile_bytes, tuple(job.pack for job in jobs))


def _ranges(count: int, size: int) -> list[range]:
    return [range(first, min(count, first + size)) for first in range(0, count, size)]


@dataclass(frozen=True)
class _Block:
    """Some M-tiles of a piece that begins with `first_wave`."""

    layout: MatrixLayout
    groups: RowGroups
    names: tuple[str, ...]
    tensors: tuple[Rows | QuantizedMatrix, ...]
    m_tiles: range
    first_wave: int
    watch: Stopwatch

    def pack(self, memory: Bytes) -> None:
        """To their places in the piece's memory; PackingError names the tensors whose numbers have no place there."""
        with self.watch("read (all threads)"):
            rows = self._quantized_rows() if isinstance(self.layout.format, QuantizedTiles) else self._rows()
        try:
            with self.watch("pack (all threads)"):
                format_of(self.layout).pack_m_tiles(self.layout, self.m_tiles, rows, memory, self.first_wave)
        except PackingError as problem:
            raise PackingError(f"{' or '.join(self.names)}, rows in the order of M-tiles: {problem}") from problem

    def _quantized_rows(self) -> QuantizedRows:
        """The M-tiles' rows, with rows of zeros up to the last; as they are read where they are in order."""
        begin, stop = self.m_tiles.start * M_TILE_ROWS, self.m_tiles.stop * M_TILE_ROWS
        if len(self.tensors) == 1 and stop <= self.layout.rows:
            rows = cast(QuantizedMatrix, self.tensors[0])[begin:stop]
            return replace(rows, stored_codes=_aligned(rows.stored_codes))
        rows = cast(QuantizedMatrix, self.tensors[0])[:0].room(stop - begin)
        self.groups.gather(self.tensors, rows, range(2 * self.m_tiles.start, 2 * self.m_tiles.stop))
        return rows

    def _rows(self) -> Bits:
        """The M-tiles' rows, padded: straight from the tensor where they are in order, else gathered by this thread."""
        begin, stop = self.m_tiles.start * M_TILE_ROWS, self.m_tiles.stop * M_TILE_ROWS
        is_whole = stop <= self.layout.rows and self.layout.columns == self.layout.padded_columns
        if is_whole and len(self.tensors) == 1:
            return _aligned(cast(Rows, self.tensors[0])[begin:stop])
        rows = scratch("rows", (stop - begin, self.layout.padded_columns), np.uint16)
        rows[:, self.layout.columns :] = 0
        self.groups.gather(self.tensors, rows, range(2 * self.m_tiles.start, 2 * self.m_tiles.stop))
        return rows


def _aligned(rows: NDArray[Any]) -> NDArray[Any]:
    """The rows themselves, or a copy of this thread's whose words lie where words must: numpy moves others by byte."""
    if rows.flags.c_contiguous and rows.ctypes.data % WORD_BYTES == 0:
        return rows
    copy: NDArray[Any] = scratch("aligned rows", rows.shape, rows.dtype)
    copy[:] = rows
    return copy
