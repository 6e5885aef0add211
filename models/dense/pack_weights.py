"""All weights of a checkpoint into the kernel's buffers, as fast as memory and disk allow.

Knows neither files nor devices: tensors come from one function and bytes go to another. A few threads read, gather
and pack blocks of whole rows; the calling thread hands finished pieces out, in order, so that an upload goes on while
the next pieces are made, in memory that a GPU reads itself if the device lends it. What limits is neither memory nor
arithmetic but Python's lock, which every operation of numpy lets go of and takes again: so operations are few and
large. Where a device packs (`cheetah.models.repacking`), matrices go up as their files have them, and threads only
read; the emulator, and matrices that are no file's, are packed here.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cheetah.models.act_order import RowsInOrder, places_of_columns
from cheetah.models.block import HIDDEN_NORM
from cheetah.models.config import ModelConfig
from cheetah.models.dense.delta import TAPS_TENSOR, layer_numbers, of_key_heads
from cheetah.models.dense.fused_router import router_row_bytes, router_rows
from cheetah.models.dense.pieces import BLOCK_BYTES, PIECE_BYTES, STAGING, Job, Piece, ranges
from cheetah.models.dense.repacked import StagedMatrix, misplaced, staged_matrix
from cheetah.models.dense.row_groups import GROUP_ROWS, RowGroups, groups_of, rank_groups, rotated_rows, row_groups
from cheetah.models.dense.weights import (
    BEHIND,
    DELTA_NUMBERS,
    DELTA_TAPS,
    EMBEDDING,
    HEAD_NORMS,
    SINKS,
    STATE_NORM,
    bias_tensors,
    biased_products,
    biases_name,
    biases_of,
    matrix_tensors,
    norm_tensors,
    vector_element_bytes,
    vector_shapes,
)
from cheetah.models.family import MatrixRows, Packing, QuantizedMatrix, ReadRows, ReadTensor
from cheetah.models.formats import Bytes, PackingError, format_of
from cheetah.models.formats.lists import ListedRows
from cheetah.models.formats.quantized import Order, QuantizedRows
from cheetah.models.repacking import stored_matrix
from cheetah.models.rounding import Bits, round_f16
from cheetah.models.scratch import scratch
from cheetah.piece_ring import ALIGNMENT, PieceRing
from cheetah.plan import MatrixLayout, StepMatrices
from cheetah.plan.delta import DIMS
from cheetah.plan.formats import BlockRows, QuantizedTiles
from cheetah.plan.products import Product
from cheetah.plan.world import Rank
from cheetah.stopwatch import Stopwatch

BLOCKS_AHEAD = 3
"""For each thread, so much memory in pieces that are being made or wait for the calling thread."""
PIECES_AHEAD = 3
"""Of the largest pieces: one that is made, one that is handed out, and what is lost at the end of a ring."""
MOST_THREADS = 8
"""More of them wait for Python's lock longer than they work (8B in bf16, a machine of 64 cores)."""
WORD_BYTES = 4
ONE = 0x3F80
"""Of bf16."""


def pack_all(config: ModelConfig, matrices: StepMatrices, packing: Packing) -> None:
    """Pack every weight and hand the bytes out, in the calling thread.

    Every byte of `buffer_bytes` is written once. Host memory: five blocks of about 4 MB a thread, of which three in
    pieces, but at least three of the largest pieces, and for each thread a matrix whose blocks are stored one by one;
    what `tensor` and `rows` hold of the matrices in work comes on top.
    """
    watch, repacker = packing.watch, packing.repacker
    threads = packing.threads or min(MOST_THREADS, os.cpu_count() or 1)
    under_way = deque[tuple[Piece, Bytes, list[Future[None]]]]()
    pool = ThreadPoolExecutor(threads, "pack")

    def send(piece: Piece, packed: Bytes) -> None:
        if piece.buffer != STAGING or repacker is None:
            return packing.write(piece.buffer, piece.offset, packed)
        repacker.upload(piece.offset, packed)
        if piece.work is not None:
            repacker.repack(piece.work)

    def hand_out(ring: PieceRing) -> None:
        piece, packed, jobs = under_way.popleft()
        with watch("wait for pieces"):
            for job in jobs:
                job.result()
        with watch("upload"):
            send(piece, packed)
            ring.give_back()
        if piece.packed_bytes:
            packing.progress(piece.packed_bytes)

    tensor, rows = packing.tensor, packing.rows or packing.tensor
    if config.delta is not None and config.delta.by_key_heads:
        rows = of_key_heads(config.delta, rows)
    rank = Rank(packing.rank, matrices.ranks)
    staged = _Staged() if repacker is None else _Staged.of(config, matrices, rows, rank)
    largest = max(_largest_piece(config, matrices), staged.table_bytes) + ALIGNMENT
    with (
        nullcontext(False) if repacker is None else repacker.room(staged.nbytes) as has_room,
        packing.lend(max(threads * BLOCKS_AHEAD * BLOCK_BYTES, PIECES_AHEAD * largest)) as ring,
    ):
        room = staged if has_room else _Staged()
        source = _Source(config, matrices, tensor, rows, room, watch, rank, packing.is_fused)
        try:
            for piece in source.pieces():
                while (packed := ring.take(piece.nbytes)) is None:
                    hand_out(ring)
                under_way.append((piece, packed, [pool.submit(job, packed) for job in piece.jobs]))
            while under_way:
                hand_out(ring)
        finally:
            pool.shutdown(cancel_futures=True)  # waits for the jobs that still write to the ring


def _largest_piece(config: ModelConfig, matrices: StepMatrices) -> int:
    """Bytes that no piece exceeds which is packed here."""
    shapes = vector_shapes(config, matrices.ranks).items()
    vectors = (math.prod(shape) * vector_element_bytes(name) for name, shape in shapes)
    waves = (
        one.total_bytes if isinstance(one.format, BlockRows) else min(one.blocks, one.m_tiles) * one.m_tile_bytes
        for one in matrices
    )
    norms = config.padded_hidden * 2 * config.table.norm_count
    return max(PIECE_BYTES, norms, router_row_bytes(config), *vectors, *waves)


@dataclass(frozen=True)
class _Staged:
    """Memory for matrices that a device packs: its staging memory, and of a piece with tables."""

    nbytes: int = 0
    table_bytes: int = 0

    @staticmethod
    def of(config: ModelConfig, matrices: StepMatrices, rows: ReadRows, rank: Rank) -> _Staged:
        """For all that are quantised; the others of a model are alike, as experts are, and files opened for each."""
        found = [
            staged
            for layout, layer, expert in _layouts(config, matrices)
            if expert == 0 and (layer == 0 or matrices.delta_layers or isinstance(layout.format, QuantizedTiles))
            if (staged := _Matrix.open(config, matrices, layout, layer, expert, rows, rank).staged) is not None
        ]
        return _Staged(*(max(sizes) for sizes in zip(*((one.nbytes, one.table_bytes) for one in found), strict=True)))

    def has_room_for(self, matrix: StagedMatrix) -> bool:
        return matrix.nbytes <= self.nbytes and matrix.table_bytes <= self.table_bytes


def _layouts(config: ModelConfig, matrices: StepMatrices) -> Iterator[tuple[MatrixLayout, int, int]]:
    """All matrices in the order in which they are packed, with their layers and experts."""
    for layer in range(config.layers):
        for layout in matrices.of_layer:
            if matrices.has(layout, layer):
                yield from ((layout, layer, expert) for expert in range(layout.experts))
    yield matrices.head, 0, 0


@dataclass(frozen=True)
class _Source:
    """Where everything comes from. staged: room for matrices that a device packs; rank: whose part of it is packed;
    is_fused: whether rows of fused routers are wanted, too."""

    config: ModelConfig
    matrices: StepMatrices
    tensor: ReadTensor
    rows: ReadRows
    staged: _Staged
    watch: Stopwatch
    rank: Rank
    is_fused: bool

    def pieces(self) -> Iterator[Piece]:
        """Everything. A tensor is opened when its first piece is wanted, and let go with its last."""
        config, tensor = self.config, self.tensor
        yield from _embedding_pieces(config, cast(MatrixRows, self.rows(EMBEDDING)), self.rank)
        yield _norms_piece(config, tensor)
        if config.has_biases:
            yield _biases_piece(config, tensor, self.matrices.named(config.table.heads.name), self.rank)
        for product in biased_products(config):
            yield from _product_biases_pieces(config, tensor, product)
        if config.head_norms is not None:
            yield _head_norms_piece(config, tensor)
        if config.has_sinks:
            yield _sinks_piece(config, tensor, self.rank)
        if config.norms.after:
            yield _norms_behind_piece(config, tensor)
        if config.act_order:
            yield _places_piece(config, self.rows)
        if config.delta_layers:
            yield from _delta_pieces(config, tensor, self.rank)
        if self.is_fused:
            yield from _router_pieces(config, tensor)
        if config.block is not None:
            yield _norm_piece(config, tensor, "known_norm", HIDDEN_NORM)
        if config.drafter is not None and config.drafter.joins_residual:
            yield _norm_piece(config, tensor, "state_norm", STATE_NORM)
        before: StagedMatrix | None = None  # what went up last
        for layout, layer, expert in _layouts(config, self.matrices):
            matrix = _Matrix.open(config, self.matrices, layout, layer, expert, self.rows, self.rank)
            staged = matrix.staged
            if staged is None or not self.staged.has_room_for(staged):
                yield from matrix.pieces(self.watch)
                continue
            yield from staged.pieces(self.watch, before)
            before = staged


def _rows_piece(name: str, shape: tuple[int, ...], rows: Sequence[Callable[[], Bits | int]], width: int) -> Piece:
    """A buffer of rows of 16 bits, of which so many numbers are given, or one for all, with zeros behind."""

    def make(memory: Bytes) -> None:
        made = memory.view(np.uint16).reshape(-1, shape[-1])
        made[:, width:] = 0
        for row, given in zip(made, rows, strict=True):
            row[:width] = given()

    return Piece(name, 0, math.prod(shape) * 2, (make,))


def _norms_piece(config: ModelConfig, tensor: ReadTensor) -> Piece:
    rows = [(lambda: ONE) if name is None else partial(tensor, name) for name in norm_tensors(config)]
    return _rows_piece("norms", (len(rows), config.padded_hidden), rows, config.hidden_size)


def _biases_piece(config: ModelConfig, tensor: ReadTensor, layout: MatrixLayout, rank: Rank) -> Piece:
    """Every layer's biases in M-tile order: a bias is a matrix of one column."""
    shape, groups = vector_shapes(config, rank.size)["biases"], rank_groups(config, layout, rank)

    def make(memory: Bytes) -> None:
        for layer, row in enumerate(memory.view(np.uint16).reshape(shape)):
            columns = [tensor(name.format(layer=layer))[:, None] for name in bias_tensors(config)]
            groups.gather(columns, row[:, None], range(len(groups)))

    return Piece("biases", 0, math.prod(shape) * 2, (make,))


def _product_biases_pieces(config: ModelConfig, tensor: ReadTensor, product: Product) -> Iterator[Piece]:
    """A product's biases, of each expert if it has some, in M-tile order, a piece a layer."""
    name, groups = biases_name(product), row_groups(config, product.name)
    shape = vector_shapes(config)[name][1:]
    nbytes = math.prod(shape) * 2

    def maker(layer: int) -> Job:
        def make(memory: Bytes) -> None:
            for expert, row in enumerate(memory.view(np.uint16).reshape(-1, shape[-1])):
                row[:] = 0
                columns = [tensor(one)[:, None] for one in biases_of(config, product, layer, expert)]
                groups.gather(columns, row[:, None], range(len(groups)))

        return make

    for layer in range(config.layers):
        yield Piece(name, layer * nbytes, nbytes, (maker(layer),))


def _head_norms_piece(config: ModelConfig, tensor: ReadTensor) -> Piece:
    shape = vector_shapes(config)["head_norms"]
    order = config.rotary_order if config.head_norms == "each" else rotated_rows(config)

    def make(memory: Bytes) -> None:
        layers = [layer for layer in range(config.layers) if layer not in config.delta_layers]
        for layer, of_layer in zip(layers, memory.view(np.uint16).reshape(len(layers), -1), strict=True):
            weights = np.concatenate([tensor(name.format(layer=layer)) for name in HEAD_NORMS])
            of_layer[:] = weights.reshape(-1, len(order))[:, order].reshape(-1)

    return Piece("head_norms", 0, math.prod(shape) * 2, (make,))


def _sinks_piece(config: ModelConfig, tensor: ReadTensor, rank: Rank) -> Piece:
    shape, heads = vector_shapes(config, rank.size)["sinks"], rank.part(config.query_heads)

    def sinks(layer: int) -> Bits:
        return tensor(SINKS.format(layer=layer))[heads.start : heads.stop]

    return _rows_piece("sinks", shape, [partial(sinks, layer) for layer in range(config.layers)], shape[-1])


def _norms_behind_piece(config: ModelConfig, tensor: ReadTensor) -> Piece:
    names = [name.format(layer=layer) for layer in range(config.layers) for name in BEHIND.values()]
    rows = [partial(tensor, name) for name in names]
    return _rows_piece("norms_behind", vector_shapes(config)["norms_behind"], rows, config.hidden_size)


def _delta_pieces(config: ModelConfig, tensor: ReadTensor, rank: Rank) -> Iterator[Piece]:
    """What layers of Gated DeltaNet have beside their matrices, of a rank's heads."""
    shapes, heads = vector_shapes(config, rank.size), config.shape.delta
    assert heads is not None
    channels = np.concatenate([np.array(part) for part in heads.channels_of(rank)])
    own = np.array(rank.part(heads.value_heads))
    numbers_of_rank = np.concatenate([own, heads.value_heads + own, 2 * heads.value_heads + np.arange(DIMS)])

    def make_taps(memory: Bytes) -> None:
        for layer, taps in zip(config.delta_layers, memory.view(np.uint16).reshape(shapes[DELTA_TAPS]), strict=True):
            taps[:] = tensor(TAPS_TENSOR.format(layer=layer))[channels, 0]

    def make_numbers(memory: Bytes) -> None:
        rows = memory.view(np.float32).reshape(shapes[DELTA_NUMBERS])
        for layer, numbers in zip(config.delta_layers, rows, strict=True):
            numbers[:] = layer_numbers(layer, tensor)[numbers_of_rank]

    for name, make in ((DELTA_TAPS, make_taps), (DELTA_NUMBERS, make_numbers)):
        yield Piece(name, 0, math.prod(shapes[name]) * vector_element_bytes(name), (make,))


def _norm_piece(config: ModelConfig, tensor: ReadTensor, buffer: str, name: str) -> Piece:
    """A norm that is no layer's."""
    return _rows_piece(buffer, (config.padded_hidden,), [partial(tensor, name)], config.hidden_size)


def _places_piece(config: ModelConfig, rows: ReadRows) -> Piece:
    """Where each ordered matrix has the elements of its input."""
    shape, table = vector_shapes(config)["places"], config.table

    def make(memory: Bytes) -> None:
        places = memory.view(np.uint16).reshape(shape)
        of_layers = ((product, layer) for layer in range(config.layers) for product in table.placed)
        for product, layer in (*of_layers, (table.head, 0)):
            order = _order_of(config, product.name, layer, rows)
            places[table.places_row(product, layer)] = places_of_columns(order, shape[1])

    return Piece("places", 0, math.prod(shape) * 2, (make,))


def _router_pieces(config: ModelConfig, tensor: ReadTensor) -> Iterator[Piece]:
    """The rows of fused routers, a piece a layer."""
    nbytes = router_row_bytes(config)

    def maker(layer: int) -> Job:
        def make(memory: Bytes) -> None:
            memory[:] = router_rows(config, tensor, layer).reshape(-1).view(np.uint8)

        return make

    for layer in range(config.layers):
        yield Piece("router_rows", layer * nbytes, nbytes, (maker(layer),))


def _order_of(config: ModelConfig, matrix: str, layer: int, rows: ReadRows) -> Order | None:
    """Of the columns of a matrix; its modules have the same."""
    if not config.is_ordered(matrix):
        return None
    return cast(QuantizedMatrix, rows(matrix_tensors(config, matrix, layer)[0])).order


def _embedding_pieces(config: ModelConfig, embedding: MatrixRows, rank: Rank) -> Iterator[Piece]:
    row_bytes = config.embedding_columns(rank.size) * 2
    count = max(1, PIECE_BYTES // row_bytes)
    stored = stored_matrix(embedding)
    read = stored.codes.open() if stored is not None and stored.codes.row_bytes == row_bytes else None

    def maker(first: int, stop: int) -> Job:
        def make(memory: Bytes) -> None:
            if stored is not None and read is not None:
                read(first * row_bytes, memory)  # straight into the piece
                if stored.codes.is_f16:
                    round_f16(memory.view(np.uint16), memory.view(np.uint16))
                return
            padded = memory.view(np.uint16).reshape(-1, row_bytes // 2)
            padded[:, : embedding.shape[1]] = embedding[first:stop]
            padded[:, embedding.shape[1] :] = 0

        return make

    for first in range(0, config.vocab_size, count):
        stop = min(first + count, config.vocab_size)
        yield Piece("embedding", first * row_bytes, (stop - first) * row_bytes, (maker(first, stop),))


def _in_order(tensor: MatrixRows | QuantizedMatrix, order: Order) -> RowsInOrder:
    """A tensor with its rows in an order, of one source or of several, one after another."""
    sources = tensor.shape[0] // len(order)
    return RowsInOrder(tensor, np.concatenate([order + source * len(order) for source in range(sources)]))


@dataclass(frozen=True)
class _Matrix:
    """What a rank has of a matrix of a layer. target: byte of the weights where it begins."""

    layout: MatrixLayout
    groups: RowGroups
    names: tuple[str, ...]
    tensors: tuple[MatrixRows | QuantizedMatrix, ...]
    target: int

    @staticmethod
    def open(
        config: ModelConfig,
        matrices: StepMatrices,
        layout: MatrixLayout,
        layer: int,
        expert: int,
        rows: ReadRows,
        rank: Rank,
    ) -> _Matrix:
        groups = rank_groups(config, layout, rank)
        if len(groups) * GROUP_ROWS != layout.m_tiles * layout.tile_rows:
            raise PackingError(f"matrix {layout.name!r}: {len(groups)} groups of rows for {layout.m_tiles} M-tiles")
        names = matrix_tensors(config, layout.name, layer, expert)
        tensors = tuple(rows(name) for name in names)
        for reader in config.shape.table.packed_for(layout.name):
            order = _order_of(config, reader.name, layer, rows)
            tensors = tensors if order is None else tuple(_in_order(one, order) for one in tensors)
        return _Matrix(layout, groups, names, tensors, matrices.offset(layout.name, layer, expert))

    @property
    def staged(self) -> StagedMatrix | None:
        """The same for a device to pack, if it can."""
        return staged_matrix(self.layout, self.groups, self.names, self.tensors, self.target)

    def pieces(self, watch: Stopwatch) -> Iterator[Piece]:
        """The matrix packed here, whole where only all M-tiles together say where one lies."""
        layout = self.layout
        if isinstance(layout.format, BlockRows):
            whole = _Block(self, range(layout.m_tiles), 0, watch)
            yield Piece("weights", self.target, layout.total_bytes, (whole.pack,))
            return
        of_piece = layout.blocks * max(1, PIECE_BYTES // (layout.blocks * layout.m_tile_bytes))
        for m_tiles in ranges(layout.m_tiles, of_piece):
            blocks = ranges(len(m_tiles), max(1, BLOCK_BYTES // layout.m_tile_bytes))
            first_wave = m_tiles.start // layout.blocks
            jobs = (_Block(self, m_tiles[block.start : block.stop], first_wave, watch) for block in blocks)
            begin = self.target + m_tiles.start * layout.m_tile_bytes
            yield Piece("weights", begin, len(m_tiles) * layout.m_tile_bytes, tuple(job.pack for job in jobs))


@dataclass(frozen=True)
class _Block:
    """Some M-tiles of a matrix, in a piece that begins with `first_wave`."""

    matrix: _Matrix
    m_tiles: range
    first_wave: int
    watch: Stopwatch

    def pack(self, memory: Bytes) -> None:
        """To their places in the piece's memory; PackingError names the tensors whose numbers have no place there."""
        with self.watch("read (all threads)"):
            rows = self._quantized_rows() if isinstance(self.matrix.layout.format, QuantizedTiles) else self._rows()
        try:
            with self.watch("pack (all threads)"):
                layout = self.matrix.layout
                format_of(layout).pack_m_tiles(layout, self.m_tiles, rows, memory, self.first_wave)
        except PackingError as problem:
            raise misplaced(self.matrix.names, problem) from problem

    def _quantized_rows(self) -> QuantizedRows | ListedRows:
        """The M-tiles' rows, with rows of zeros up to the last; as they are read where they are in order."""
        begin, stop = self._row_range
        if self.matrix.groups.is_in_order and stop <= self.matrix.layout.rows:
            rows = cast(QuantizedMatrix, self.matrix.tensors[0])[begin:stop]
            return rows.with_planes(_aligned)
        rows = cast(QuantizedMatrix, self.matrix.tensors[0])[:0].room(stop - begin)
        self.matrix.groups.gather(self.matrix.tensors, rows, groups_of(self.matrix.layout, self.m_tiles))
        return rows

    def _rows(self) -> Bits:
        """The M-tiles' rows, padded: straight from the tensor where they are in order, else gathered by this thread."""
        begin, stop = self._row_range
        is_whole = stop <= self.matrix.layout.rows and self.matrix.layout.columns == self.matrix.layout.padded_columns
        if is_whole and self.matrix.groups.is_in_order:
            return _aligned(cast(MatrixRows, self.matrix.tensors[0])[begin:stop])
        rows = scratch("rows", (stop - begin, self.matrix.layout.padded_columns), np.uint16)
        rows[:, self.matrix.layout.columns :] = 0
        self.matrix.groups.gather(self.matrix.tensors, rows, groups_of(self.matrix.layout, self.m_tiles))
        return rows

    @property
    def _row_range(self) -> tuple[int, int]:
        """The M-tiles' first row, and the one behind their last."""
        return self.m_tiles.start * self.matrix.layout.tile_rows, self.m_tiles.stop * self.matrix.layout.tile_rows


def _aligned(rows: NDArray[Any]) -> NDArray[Any]:
    """The rows themselves, or a copy of this thread's whose words lie where words must: numpy moves others by byte."""
    if rows.flags.c_contiguous and rows.ctypes.data % WORD_BYTES == 0:
        return rows
    copy: NDArray[Any] = scratch("aligned rows", rows.shape, rows.dtype)
    copy[:] = rows
    return copy
