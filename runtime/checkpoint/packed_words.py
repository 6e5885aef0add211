"""Codes of 4 and 8 bits in words of 32, as checkpoints keep them, and back: numpy alone, and fast.

Number j of a word is its bits 4j .. 4j+3, or its byte j. What words are made of differs: eight neighbouring inputs of
one output (GPTQ, compressed-tensors), or eight outputs of one input (AWQ). Codes of 4 bits stay in words of eight
inputs, the even ones first, as `QuantizedRows` has them. Work goes in pieces that stay in a core's cache; numpy lets
other threads run meanwhile.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.quantized import EIGHT_ROWS, words_of_rows
from cheetah.models.scratch import scratch

Words = NDArray[np.uint32]
Codes = NDArray[np.uint8]

PIECE_WORDS = 2**14
"""64 KB of words, 128 KB of codes."""
TRANSPOSED_ROWS = 128
"""Rows of words that are turned at a time: whole cache lines of each row that they become."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word of AWQ is output AWQ_ORDER[i] of its eight (AutoAWQ, awq/utils/packing_utils.py)."""


def codes_of_words(words: Words, bits: int) -> Codes:
    """uint8 [rows, words * 32 / bits] of words [rows, words], C-contiguous; of 8 bits in the words' own memory, if that
    is contiguous."""
    if bits == 8:
        return np.ascontiguousarray(words).view(np.uint8)
    return _nibbles(words, np.empty((len(words), words.shape[1] * 8), np.uint8))


def words_of_codes(codes: Codes, bits: int) -> Words:
    """The inverse: uint32 [rows, ceil(columns * bits / 32)], filled up with zeros."""
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns * bits // 32) * 32 // bits), np.uint8)
    padded[:, :columns] = codes
    if bits == 4:
        padded = padded[:, ::2] | padded[:, 1::2] << 4
    return np.ascontiguousarray(padded).view(np.uint32)


def _nibbles(words: Words, codes: Codes) -> Codes:
    """Expands the words into `codes`, which it gives back."""
    rows, count = words.shape
    pairs = codes.view(np.uint16)
    step = max(1, PIECE_WORDS // max(1, count))
    wide, upper = (scratch(name, (min(step, rows), count * 4), np.uint16) for name in ("wide", "upper"))
    for first in range(0, rows, step):
        piece = np.ascontiguousarray(words[first : first + step]).view(np.uint8)
        low, high = wide[: len(piece)], upper[: len(piece)]
        low[:] = piece
        np.left_shift(low, np.uint16(4), out=high)
        low |= high
        np.bitwise_and(low, np.uint16(0x0F0F), out=pairs[first : first + step])
    return codes


def transposed(words: Words, out: Words | None = None) -> Words:
    """[columns, rows], in `out` if given: eight words together, and else in strips, since numpy's own copy leaves the
    cache after every word."""
    rows, columns = words.shape
    turned = np.empty((columns, rows), np.uint32) if out is None else out
    if columns % 8 == 0:
        return words_of_rows(words.view(EIGHT_ROWS).T, turned)
    for first in range(0, rows, TRANSPOSED_ROWS):
        turned[:, first : first + TRANSPOSED_ROWS] = words[first : first + TRANSPOSED_ROWS].T
    return turned


def words_along_inputs(words: Words) -> Words:
    """AWQ's words [inputs, outputs / 8] as [outputs, inputs / 8], eight inputs a word with the even ones first; inputs
    are a multiple of 8. In memory of this thread that its next call overwrites."""
    inputs, count = words.shape
    result = scratch("words along inputs", (count, 4, 2, inputs // 8), np.uint32)
    # Axes of inputs: odd or even, which of the four such; and of outputs then, for AWQ has the same order of them.
    of_inputs = scratch("words of each eighth input", (2, 4, inputs // 8, count), np.uint32)
    of_inputs[:] = words.reshape(inputs // 8, 4, 2, count).transpose(2, 1, 0, 3)
    result[:] = (
        _transposed_nibbles(of_inputs.reshape(8, inputs // 8 * count)).reshape(of_inputs.shape).transpose(3, 1, 0, 2)
    )
    return result.reshape(count * 8, inputs // 8)


def _transposed_nibbles(words: Words) -> Words:
    """Words [8, any] as 8 x 8 matrices of nibbles, transposed in place by three rounds of exchanges."""
    spare = scratch("exchanged nibbles", (4 * words.shape[1],), np.uint32)
    for distance, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        pairs = words.reshape(4 // distance, 2, distance, words.shape[1])
        low, high = pairs[:, 0], pairs[:, 1]
        _exchange(low, high, np.uint32(4 * distance), np.uint32(mask), spare.reshape(low.shape))
    return words


def _exchange(low: Words, high: Words, shift: np.uint32, mask: np.uint32, spare: Words) -> None:
    """Exchange the bits `mask << shift` of `low` with the bits `mask` of `high`."""
    np.right_shift(low, shift, out=spare)
    spare ^= high
    spare &= mask
    high ^= spare
    spare <<= shift
    low ^= spare


def codes_of_awq_words(words: Words) -> Codes:
    """uint8 [rows, outputs] of a few words [rows, outputs / 8] in AWQ's order: zero points."""
    stored = codes_of_words(words, 4).reshape(len(words), -1, 8)
    codes = np.empty_like(stored)
    codes[:, :, AWQ_ORDER] = stored
    return codes.reshape(len(words), -1)
