"""A unit of a vector in shared memory, as each weight format wants it."""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
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
    STAGGERED,
)


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
    elif kind != published:
        first, second = (to - at for to, at in zip(powers_of(kind), powers_of(published), strict=True))
        vector[unit] = raised(words, first, second)
    else:
        vector[unit] = words


def is_raised(kind: str) -> bool:
    """Whether elements keep their place and size, and are raised: by who publishes them, or by who reads them."""
    return kind in (RAISED, STAGGERED)


def raised_word(word: Any, index: Any, kind: str) -> ch.Expr:
    """Payload word `index` of a vector in fragment order, raised."""
    return raised_pair(word, index, *powers_of(kind))


def powers_of(kind: str) -> tuple[int, int]:
    """The powers of two that the pairs of a unit come times, in turn."""
    return {BF16_VECTOR: (0, 0), RAISED: (RAISED_BY, RAISED_BY), STAGGERED: (RAISED_BY, RAISED_BY - 4)}[kind]
