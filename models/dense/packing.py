"""A bf16 matrix into the bytes the kernel streams, and back, exactly.

Where chunks lie is `cheetah.plan.MatrixLayout`'s; this module knows the order of the words inside a tile pair. Bits are
uint16 patterns of bf16; a *word* is two neighbouring columns of one row (32 bits, lower column in the lower half).

A tile pair is 16 rows x 32 columns = 1024 bytes: tile 0, then tile 1. In tile h, lane 4g + t (g 0..7, t 0..3) owns 16
bytes, the A fragment of one mma.m16n8k16: the words at columns c = 8t + 4h of rows g and g + 8, then at columns c + 2
of rows g and g + 8. So over both tiles lane t meets the columns 8t .. 8t+7, and the activations it needs are one
16-byte load in natural order.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.rounding import Bits
from cheetah.plan import PAIR_COLUMNS, STRIP_ROWS, MatrixLayout

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]

PAIR_WORDS = STRIP_ROWS * PAIR_COLUMNS // 2


class PackingError(CheetahError):
    """A matrix or a packed buffer whose size is not the layout's."""


def pack_matrix(layout: MatrixLayout, matrix: Bits) -> Bytes:
    """All `layout.total_bytes` bytes of `matrix`, uint16 [rows, columns] in strip order; the padding is zero."""
    if matrix.shape != (layout.rows, layout.columns):
        raise PackingError(
            f"matrix {layout.name!r}: shape {list(matrix.shape)}, its layout says {[layout.rows, layout.columns]}"
        )
    padded = np.zeros((layout.padded_rows, layout.padded_columns), dtype=np.uint16)
    padded[: layout.rows, : layout.columns] = matrix
    packed = np.empty(layout.total_bytes, dtype=np.uint8)
    pack_strips(layout, range(layout.strips), padded, packed)
    return packed


def unpack_matrix(layout: MatrixLayout, packed: Bytes) -> Bits:
    """The inverse of `pack_matrix`: uint16 [rows, columns]."""
    if packed.dtype != np.uint8 or packed.shape != (layout.total_bytes,):
        found = f"{packed.dtype} {list(packed.shape)}"
        raise PackingError(f"matrix {layout.name!r}: {found}, its layout says uint8 [{layout.total_bytes}]")
    words = packed.view(np.uint32)
    strips = np.empty((layout.strips, layout.tile_pairs * PAIR_WORDS), dtype=np.uint32)
    position = 0
    for first in range(0, layout.strips, layout.blocks):
        width = min(layout.blocks, layout.strips - first)
        for sources in _chunk_sources(layout.tile_pairs, layout.pairs_per_chunk):
            chunk = words[position : position + width * sources.size]
            strips[first : first + width, sources] = chunk.reshape(width, sources.size)
            position += chunk.size
    rows = strips.view(np.uint16).reshape(layout.padded_rows, layout.padded_columns)
    return np.ascontiguousarray(rows[: layout.rows, : layout.columns])


def pack_strips(layout: MatrixLayout, strips: range, rows: Bits, out: Bytes, first_round: int = 0) -> None:
    """Pack some strips to their places in `out`, the bytes of some rounds from `first_round` on.

    rows: uint16 [strips * 16, padded_columns], C-contiguous, padding included. One table-driven copy of words a chunk
    and round, no temporary memory; numpy lets other threads run meanwhile, which may pack other strips.
    """
    source = rows.reshape(len(strips), STRIP_ROWS * layout.padded_columns).view(np.uint32)
    target = out.view(np.uint32)
    for round in sorted({strip // layout.blocks for strip in strips}):
        width, start = int(layout.round_width(round)), round * layout.blocks
        begin, stop = max(start, strips.start), min(start + width, strips.stop)
        position = (start - first_round * layout.blocks) * layout.strip_bytes // 4
        for table in _chunk_sources(layout.tile_pairs, layout.pairs_per_chunk):
            end = position + width * table.size
            if end > target.size or position < 0:
                raise PackingError(f"matrix {layout.name!r}: round {round} is not in a buffer of {out.nbytes} bytes")
            chunk = target[position:end].reshape(width, table.size)[begin - start : stop - start]
            of_round = source[begin - strips.start : stop - strips.start]
            np.take(of_round, table, axis=1, out=chunk, mode="clip")  # "clip": numpy copies twice when it must check
            position = end


@lru_cache(maxsize=64)
def _chunk_sources(tile_pairs: int, pairs_per_chunk: int) -> tuple[NDArray[np.intp], ...]:
    """For each chunk of a strip, in its order: which word of the row-major strip each packed word is."""
    words = np.arange(tile_pairs * PAIR_WORDS, dtype=np.intp)
    # Axes of a row-major strip: half of the rows, g; pair, t, tile h, column pair of the tile.
    axes = words.reshape(2, STRIP_ROWS // 2, tile_pairs, 4, 2, 2)
    packed = np.ascontiguousarray(axes.transpose(2, 4, 1, 3, 5, 0)).reshape(tile_pairs, PAIR_WORDS)
    starts = range(0, tile_pairs, pairs_per_chunk)
    return tuple(packed[start : start + pairs_per_chunk].reshape(-1) for start in starts)
