"""All weights of a checkpoint into the three buffers, as fast as memory and disk allow.

Knows neither files nor devices: tensors come from one function and bytes go to another. The work is cut into pieces of
some megabytes. A few threads gather and pack them, which is numpy's copying outside Python's lock; the calling thread
hands finished pieces out, in order, so that an upload goes on while the next pieces are made. A GPU could permute the
words itself after a plain upload, faster still, but what then limits is the same: reading the tensors and copying them
across; and the emulator, the tests and a machine without a compiler would need this way beside it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from cheetah.models.llama.config import LlamaConfig
from cheetah.models.llama.packing import Bits, Bytes, PackingError, pack_strips
from cheetah.models.llama.weights import (
    EMBEDDING,
    FINAL_NORM,
    INPUT_NORM,
    POST_ATTENTION_NORM,
    RowGroups,
    Rows,
    matrix_tensors,
    row_groups,
)
from cheetah.plan import STRIP_ROWS, MatrixLayout, StepMatrices

PIECE_BYTES = 8 * 2**20
"""About what one call of `write` gets: a few milliseconds of a thread's work."""
MOST_THREADS = 16
PIECES_AHEAD = 2
"""Finished pieces that may wait for the calling thread, beside those that are being made."""

ReadTensor = Callable[[str], Bits]
ReadRows = Callable[[str], Rows]
WriteBytes = Callable[[str, int, Bytes], None]
Progress = Callable[[int], None]


def pack_all(
    config: LlamaConfig,
    matrices: StepMatrices,
    tensor: ReadTensor,
    write: WriteBytes,
    progress: Progress | None = None,
    *,
    rows: ReadRows | None = None,
    threads: int | None = None,
) -> None:
    """Pack every weight and hand the bytes out: `write(buffer, byte offset, uint8 [n])`, in the calling thread.

    Every byte of the three buffers is written once. The array given to `write` is valid only until it returns: its
    memory is used again. rows: gives a matrix that is read in parts, in several threads; by default `tensor` does.
    threads: by default one a processor, at most 16. Host memory: two pieces of about 8 MB a thread and two more; what
    `tensor` and `rows` hold of the matrices in work comes on top. `progress` gets the bytes just written.
    """
    threads = threads or min(MOST_THREADS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(threads, "pack")
    spare: list[Bytes] = []
    under_way: deque[tuple[_Piece, Bytes, Future[None]]] = deque()

    def hand_out() -> None:
        piece, memory, made = under_way.popleft()
        made.result()
        write(piece.buffer, piece.offset, memory[: piece.nbytes])
        spare.append(memory)
        if progress is not None:
            progress(piece.nbytes)

    try:
        for piece in _pieces(config, matrices, tensor, rows or tensor):
            if len(under_way) == threads + PIECES_AHEAD:
                hand_out()
            memory = _with_room(spare.pop() if spare else _NOTHING, piece.nbytes)
            under_way.append((piece, memory, pool.submit(piece.make, memory[: piece.nbytes])))
        while under_way:
            hand_out()
    finally:
        pool.shutdown(cancel_futures=True)


_NOTHING = np.empty(0, np.uint8)


def _with_room(memory: Bytes, nbytes: int) -> Bytes:
    return memory if memory.size >= nbytes else np.empty(nbytes, np.uint8)


@dataclass(frozen=True)
class _Piece:
    """`nbytes` at `offset` of `buffer`. make: fills memory of that size."""

    buffer: str
    offset: int
    nbytes: int
    make: Callable[[Bytes], None]


def _pieces(config: LlamaConfig, matrices: StepMatrices, tensor: ReadTensor, rows: ReadRows) -> Iterator[_Piece]:
    """Everything. A tensor is opened when its first piece is wanted, and let go with its last."""
    yield from _embedding_pieces(config, rows(EMBEDDING))
    yield _norms_piece(config, tensor)
    for layer in range(config.layers):
        for layout in matrices.of_layer:
            yield from _matrix_pieces(config, layout, matrices.offset(layout.name, layer), layer, rows)
    yield from _matrix_pieces(config, matrices.head, matrices.head.offset, 0, rows)


def _norms_piece(config: LlamaConfig, tensor: ReadTensor) -> _Piece:
    names = [name.format(layer=layer) for layer in range(config.layers) for name in (INPUT_NORM, POST_ATTENTION_NORM)]

    def make(memory: Bytes) -> None:
        norms = memory.view(np.uint16).reshape(len(names) + 1, config.padded_hidden)
        norms[:, config.hidden_size :] = 0
        for row, name in zip(norms, (*names, FINAL_NORM), strict=True):
            row[: config.hidden_size] = tensor(name)

    return _Piece("norms", 0, (len(names) + 1) * config.padded_hidden * 2, make)


def _embedding_pieces(config: LlamaConfig, embedding: Rows) -> Iterator[_Piece]:
    row_bytes = config.padded_hidden * 2
    count = max(1, PIECE_BYTES // row_bytes)

    def maker(first: int, stop: int) -> Callable[[Bytes], None]:
        def make(memory: Bytes) -> None:
            padded = memory.view(np.uint16).reshape(-1, config.padded_hidden)
            padded[:, : config.hidden_size] = embedding[first:stop, 0 : config.hidden_size]
            padded[:, config.hidden_size :] = 0

        return make

    for first in range(0, config.vocab_size, count):
        stop = min(first + count, config.vocab_size)
        yield _Piece("embedding", first * row_bytes, (stop - first) * row_bytes, maker(first, stop))


def _matrix_pieces(
    config: LlamaConfig, layout: MatrixLayout, offset: int, layer: int, rows: ReadRows
) -> Iterator[_Piece]:
    groups = row_groups(config, layout.name)
    if len(groups) != 2 * layout.strips:
        raise PackingError(f"matrix {layout.name!r}: {len(groups)} groups of rows for {layout.strips} strips")
    tensors = tuple(rows(name) for name in matrix_tensors(config, layout.name, layer))
    for strips, chunks in _parts(layout):
        part = _Part(layout, groups, tensors, strips, chunks)
        yield _Piece("weights", offset + part.offset, part.nbytes, part.make)


def _parts(layout: MatrixLayout) -> Iterator[tuple[range, range]]:
    """(strips, chunks) of about a piece each: some whole rounds, or some chunks of one round."""
    round_bytes = layout.blocks * layout.strip_bytes
    strips = max(1, PIECE_BYTES // round_bytes) * layout.blocks
    chunks = max(1, min(layout.chunks, layout.chunks * PIECE_BYTES // round_bytes))
    for first in range(0, layout.strips, strips):
        for first_chunk in range(0, layout.chunks, chunks):
            stop_chunk = min(layout.chunks, first_chunk + chunks)
            yield range(first, min(layout.strips, first + strips)), range(first_chunk, stop_chunk)


_scratch = threading.local()


@dataclass(frozen=True)
class _Part:
    """Some chunks of some strips of a matrix, which lie together."""

    layout: MatrixLayout
    groups: RowGroups
    tensors: tuple[Rows, ...]
    strips: range
    chunks: range

    @property
    def offset(self) -> int:
        return self.layout.strip_address(self.strips.start, self.chunks.start)

    @property
    def pairs(self) -> range:
        """Tile pairs of a strip."""
        size = self.layout.pairs_per_chunk
        return range(self.chunks.start * size, min(self.chunks.stop * size, self.layout.tile_pairs))

    @property
    def nbytes(self) -> int:
        return len(self.strips) * len(self.pairs) * (self.layout.strip_bytes // self.layout.tile_pairs)

    def make(self, memory: Bytes) -> None:
        pack_strips(self.layout, self.strips, self.chunks, self._rows(), memory)

    def _rows(self) -> Bits:
        """The strips' rows, padded: straight from the tensor where they are in order, else gathered by this thread."""
        layout, source = self.layout, self.tensors[0]
        begin, stop = self.strips.start * STRIP_ROWS, self.strips.stop * STRIP_ROWS
        in_order = len(self.tensors) == 1 and stop <= layout.rows and layout.columns == layout.padded_columns
        if in_order and isinstance(source, np.ndarray) and source.flags.c_contiguous:
            return source[begin:stop]
        return self._gathered()

    def _gathered(self) -> Bits:
        width = self.layout.padded_columns // self.layout.tile_pairs
        first, padded_stop = self.pairs.start * width, self.pairs.stop * width
        stop = min(padded_stop, self.layout.columns)
        rows = _scratch_rows(len(self.strips) * STRIP_ROWS, padded_stop - first)
        rows[:, stop - first :] = 0
        groups = slice(2 * self.strips.start, 2 * self.strips.stop)
        self.groups.gather(self.tensors, rows, groups, slice(first, stop))
        return rows


def _scratch_rows(rows: int, columns: int) -> Bits:
    """Memory of this thread, overwritten by its next piece."""
    memory = _with_room(getattr(_scratch, "memory", _NOTHING), rows * columns * 2)
    _scratch.memory = memory
    return memory[: rows * columns * 2].view(np.uint16).reshape(rows, columns)
