"""Codes of whole M-tiles as the words that the kernel's lanes read, fast: a few operations on words, then one copy of
words by a table. What the words are is `cheetah.models.formats.quantized_tiles`'s to say, which has the inverses too.

A checkpoint's codes pass here one by one while it is loaded. Operations go over pieces that stay in a core's cache, and
what they make is in memory of the thread that its next call overwrites; numpy lets other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.weight_format import Bytes
from cheetah.models.scratch import scratch
from cheetah.plan import M_TILE_ROWS

Words = NDArray[np.uint32]
Moves = tuple[tuple[int, int], ...]
"""(mask, shift) of bits of a word that stand elsewhere in another; a shift to the right is negative."""

PIECE_WORDS = 2**15
"""128 KB: smaller pieces cost more calls than the cache saves."""
HALF = M_TILE_ROWS // 2
TILE_COLUMNS = 128

SWAPPED_MIDDLE: Moves = ((0xFF0000FF, 0), (0x0000FF00, 8), (0x00FF0000, -8))


def int4_words(codes: Bytes) -> Words:
    """uint32 [M-tiles, K-tiles, 256] of codes [M-tiles * 16, columns]."""
    words = scratch("halves of words", (len(codes), codes.shape[1] // 8), np.uint32)
    halves, quads = words.reshape(-1).view(np.uint16), codes.reshape(-1).view(np.uint32)
    spare = scratch("part of moved bits", (min(PIECE_WORDS, quads.size),), np.uint32)
    for first in range(0, quads.size, PIECE_WORDS):
        quad = quads[first : first + PIECE_WORDS]
        # Columns 0 and 2 in the lowest byte, 1 and 3 in the next; what is above is of no use.
        part = np.right_shift(quad, np.uint32(12), out=spare[: quad.size])
        part |= quad
        halves[first : first + PIECE_WORDS] = part
    # Two such halves are a word but for its middle bytes.
    return _in_tiles(moved_bits(words, SWAPPED_MIDDLE), _int4_order)


def int8_words(codes: Bytes) -> Words:
    """uint32 [M-tiles, K-tiles, 512] of codes [M-tiles * 16, columns]."""
    return _in_tiles(moved_bits(codes.view(np.uint32), SWAPPED_MIDDLE), _int8_order)


def e4m3_words(codes: Bytes) -> Words:
    """uint32 [M-tiles, K-tiles, 512] of bytes of e4m3 [M-tiles * 16, columns]."""
    return _in_tiles(codes.view(np.uint32), _int8_order)


def moved_bits(words: Words, moves: Moves) -> Words:
    """Of each word the bits of all masks, each shifted; shifted masks are disjoint. In memory of this thread that its
    next call overwrites."""
    source = words.reshape(-1)
    result = scratch("moved bits", source.shape, np.uint32)
    spare = scratch("part of moved bits", (min(PIECE_WORDS, source.size),), np.uint32)
    for first in range(0, source.size, PIECE_WORDS):
        piece, target = source[first : first + PIECE_WORDS], result[first : first + PIECE_WORDS]
        _move(piece, moves[0], target)
        for move in moves[1:]:
            target |= _move(piece, move, spare[: piece.size])
    return result.reshape(words.shape)


def _move(words: Words, move: tuple[int, int], out: Words) -> Words:
    mask, shift = move
    np.bitwise_and(words, np.uint32(mask), out=out)
    if shift > 0:
        return np.left_shift(out, np.uint32(shift), out=out)
    return np.right_shift(out, np.uint32(-shift), out=out) if shift < 0 else out


def _in_tiles(words: Words, order: Callable[[int], NDArray[np.intp]]) -> Words:
    """Words row by row as [M-tiles, K-tiles, words of a tile]."""
    m_tiles, of_m_tile = len(words) // M_TILE_ROWS, M_TILE_ROWS * words.shape[1]
    table = order(words.shape[1])
    # "clip": numpy copies twice when it must check
    taken = scratch("words in tiles", (m_tiles, table.size), np.uint32)
    np.take(words.reshape(m_tiles, of_m_tile), table.reshape(-1), axis=1, out=taken, mode="clip")
    return taken.reshape(m_tiles, *table.shape)


@lru_cache(maxsize=64)
def _int4_order(row_words: int) -> NDArray[np.intp]:
    """[K-tiles, words]: which word of the row-major M-tile each word of a tile is."""
    k_tiles = row_words * 8 // TILE_COLUMNS
    # Axes of a row-major M-tile: half of the rows, g; K-tile, pair of parts, part of the pair, t.
    words = np.arange(M_TILE_ROWS * row_words, dtype=np.intp).reshape(2, HALF, k_tiles, 2, 2, 4)
    return np.ascontiguousarray(words.transpose(2, 3, 1, 5, 4, 0)).reshape(k_tiles, -1)


@lru_cache(maxsize=64)
def _int8_order(row_words: int) -> NDArray[np.intp]:
    """The same for words of 4 columns."""
    k_tiles = row_words * 4 // TILE_COLUMNS
    # Axes of a row-major M-tile: half of the rows, g; K-tile, part, t, half of the 8 columns.
    words = np.arange(M_TILE_ROWS * row_words, dtype=np.intp).reshape(2, HALF, k_tiles, 4, 4, 2)
    return np.ascontiguousarray(words.transpose(2, 3, 1, 4, 5, 0)).reshape(k_tiles, -1)
