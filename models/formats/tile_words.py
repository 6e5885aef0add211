"""Codes of whole M-tiles as the words that the kernel's lanes read, fast: a few operations on words, then one copy of
them, or of the 16 bytes of a lane. What the words are is `cheetah.models.formats.quantized_tiles`'s to say, which has
the inverses too.

A checkpoint's codes pass here one by one while it is loaded. Operations go over pieces that stay in a core's cache, and
what they make is in memory of the thread that its next call overwrites; numpy lets other threads run meanwhile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.quantized import EIGHT_ROWS
from cheetah.models.formats.weight_format import units_of_lanes
from cheetah.models.rounding import Bytes
from cheetah.models.scratch import scratch
from cheetah.plan import M_TILE_ROWS

Words = NDArray[np.uint32]
Exchange = tuple[int, int]
"""(distance, mask): of each word the bits of the mask are exchanged with those so many places above them."""

PIECE_WORDS = 2**17
"""512 KB: a core's cache has room for two. In smaller pieces one thread is a sixth faster, but many threads wait: each
operation on a piece lets go of Python's lock and asks for it again."""
HALF = M_TILE_ROWS // 2
TILE_COLUMNS = 128

INNER_NIBBLES: Exchange = (4, 0x00F000F0)
"""The two in the middle of each half."""
INNER_BYTES: Exchange = (8, 0x0000FF00)


def exchange_bits(words: Words, *exchanges: Exchange) -> None:
    """Make the exchanges, one after the other, in all of the words, which are contiguous."""
    flat = words.reshape(-1)
    spare = scratch("exchanged bits", (min(PIECE_WORDS, flat.size),), np.uint32)
    for first in range(0, flat.size, PIECE_WORDS):
        piece = flat[first : first + PIECE_WORDS]
        differing = spare[: piece.size]
        for distance, mask in exchanges:
            np.right_shift(piece, np.uint32(distance), out=differing)
            differing ^= piece
            differing &= np.uint32(mask)
            differing *= np.uint32(1 + (1 << distance))  # in both places: the product's parts do not meet
            piece ^= differing


def int4_words(codes: NDArray[Any]) -> NDArray[Any]:
    """Words of eight columns, even ones first, of codes [rows, columns]; the codes themselves, if they are words."""
    if codes.dtype != np.uint8:
        return codes
    words = scratch("halves of words", (len(codes), codes.shape[1] // 8), np.uint32)
    halves, quads = words.reshape(-1).view(np.uint16), codes.reshape(-1).view(np.uint32)
    spare = scratch("part of moved bits", (min(PIECE_WORDS, quads.size),), np.uint32)
    for first in range(0, quads.size, PIECE_WORDS):
        quad = quads[first : first + PIECE_WORDS]
        # Columns 0 and 2 in the lowest byte, 1 and 3 in the next; what is above is of no use.
        part = np.right_shift(quad, np.uint32(12), out=spare[: quad.size])
        part |= quad
        halves[first : first + PIECE_WORDS] = part
    exchange_bits(words, INNER_BYTES)  # two such halves are a word but for its middle bytes
    return words


def byte_words(codes: Bytes) -> Words:
    """Words of four columns [rows, columns / 4] of codes [rows, columns]."""
    return codes.view(np.uint32)


def int4_in_tiles(words: NDArray[Any]) -> Words:
    """The same of words whose nibbles are in the order of columns."""
    taken = even_first_in_tiles(words)
    exchange_bits(taken, INNER_NIBBLES, INNER_BYTES)
    return taken


def even_first_in_tiles(words: NDArray[Any]) -> Words:
    """uint32 [M-tiles, K-tiles, 256] of words [M-tiles * 16, K-tiles * 16] with their even columns first, or of as many
    EIGHT_ROWS."""
    table = _int4_order(words.shape[1], words.dtype == EIGHT_ROWS)
    of_m_tiles = words.view(np.uint32).reshape(-1, table.size)
    taken = scratch("words in tiles", of_m_tiles.shape, np.uint32)
    # "clip": numpy copies twice when it must check
    np.take(of_m_tiles, table.reshape(-1), axis=1, out=taken, mode="clip")
    return taken.reshape(len(taken), *table.shape)


def bytes_in_tiles(words: Words) -> NDArray[np.complex128]:
    """Units of lanes [M-tiles, K-tiles, 4, 8, 4] of words [M-tiles * 16, K-tiles * 32] of bytes in their order."""
    units = units_of_lanes(words)
    exchange_bits(units.view(np.uint32), INNER_BYTES)
    tiles = units.reshape(*units.shape[:2], units.shape[2] // 16, 4, 4)  # M-tile, g; K-tile, part, t
    return tiles.transpose(0, 2, 3, 1, 4)


@lru_cache(maxsize=64)
def _int4_order(row_words: int, by_eights: bool) -> NDArray[np.intp]:
    """[K-tiles, words]: which word of the M-tile in memory each word of a tile is; it lies there row by row, or by
    EIGHT_ROWS."""
    k_tiles = row_words * 8 // TILE_COLUMNS
    words = np.arange(M_TILE_ROWS * row_words, dtype=np.intp)
    # Axes of an M-tile: half of the rows, g; K-tile, pair of parts, part of the pair, t.
    if by_eights:
        axes = np.moveaxis(words.reshape(2, k_tiles, 2, 2, 4, HALF), -1, 1)
    else:
        axes = words.reshape(2, HALF, k_tiles, 2, 2, 4)
    return np.ascontiguousarray(axes.transpose(2, 3, 1, 5, 4, 0)).reshape(k_tiles, -1)
