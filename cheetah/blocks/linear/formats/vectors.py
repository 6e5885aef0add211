"""A unit of a vector in shared memory, as each weight format wants it."""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import UNITS_PER_TILE, Columns
from cheetah.blocks.linear.formats.digits import store_digits, store_plain_digits
from cheetah.blocks.linear.formats.e4m3 import store_halves
from cheetah.blocks.linear.formats.sizes import raised, raised_pair
from cheetah.plan.formats import (
    BF16_VECTOR,
    BY_WARPS,
    DIGITS,
    DIGITS_AND_NUMBERS,
    HALVES,
    PLAIN_DIGITS,
    RAISED,
    RAISED_BY,
    RAISED_SKEWED,
    SKEWED,
    STAGGERED,
)

_POWERS = {
    BF16_VECTOR: (0, 0),
    RAISED: (RAISED_BY, RAISED_BY),
    STAGGERED: (RAISED_BY, RAISED_BY - 4),
    SKEWED: (0, 0),
    RAISED_SKEWED: (RAISED_BY, RAISED_BY),
}
UNIT_WORDS = 4


def store_unit(
    columns: Columns, vector: ch.Expr, unit: ch.Expr, words: ch.Expr, kind: str, published: str = BF16_VECTOR
) -> None:
    """A unit to its place in shared memory, as the weights' format wants it. published: as what it comes, bf16 numbers
    or raised ones."""
    assert published == BF16_VECTOR or kind not in BY_WARPS, f"{published} to {kind}"
    if kind == DIGITS:
        store_digits(columns.machine.lane, vector, unit, words, columns.limit)
    elif kind == DIGITS_AND_NUMBERS:
        store_digits(columns.machine.lane, vector, unit, words, columns.limit, with_numbers=True)
    elif kind == PLAIN_DIGITS:
        store_plain_digits(columns.machine.lane, vector, unit, words, columns.limit)
    elif kind == HALVES:
        store_halves(vector, unit, words, columns.limit)
    else:
        first, second = (to - at for to, at in zip(powers_of(kind), powers_of(published), strict=True))
        place = unit_place(unit, SKEWED) if is_skewed(kind) != is_skewed(published) else unit
        vector[place] = raised(words, first, second) if first or second else words


def is_of_pairs(kind: str) -> bool:
    """Whether what becomes of a vector can be said of each pair of elements by itself, by who publishes it or by who
    reads it."""
    return kind in _POWERS


def is_raised(kind: str) -> bool:
    """Whether elements keep their size, and are raised."""
    return any(_POWERS.get(kind, ()))


def is_skewed(kind: str) -> bool:
    """Whether units lie as `unit_place` says.

    Matrices of 8 x 8 elements, as operands of sparse products are loaded, have a unit of each of 8 tokens, which are 64
    bytes apart: where each K-tile begins with the same unit four of them lie in the same banks (8B, 2:4 int4, 8 tokens:
    64 cycles a K-tile of 128 columns instead of 16)."""
    return kind in (SKEWED, RAISED_SKEWED)


def unit_place(unit: Any, kind: str) -> Any:
    """Where a unit of a vector in fragment order lies: the four units of a K-tile and token are exchanged with one
    another, otherwise for every second token. Its own inverse."""
    return unit ^ unit // 8 % UNITS_PER_TILE if is_skewed(kind) else unit


def word_place(word: Any, kind: str) -> Any:
    """The same of a payload word."""
    return word ^ word // (8 * UNIT_WORDS) % UNITS_PER_TILE * UNIT_WORDS if is_skewed(kind) else word


def raised_word(word: Any, index: Any, kind: str) -> ch.Expr:
    """Payload word `index` of a vector in fragment order, raised."""
    return raised_pair(word, index, *powers_of(kind))


def powers_of(kind: str) -> tuple[int, int]:
    """The powers of two that the pairs of a unit come times, in turn."""
    return _POWERS[kind]
