"""A unit of a vector in shared memory, as each weight format wants it."""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
from cheetah.blocks.linear.formats.digits import store_digits
from cheetah.blocks.linear.formats.e4m3 import store_halves
from cheetah.blocks.linear.formats.sizes import raised
from cheetah.plan.formats import DIGITS, HALVES, RAISED, RAISED_BY, STAGGERED


def store_unit(columns: Columns, vector: ch.Expr, unit: ch.Expr, words: Any, kind: str) -> None:
    """A unit to its place in shared memory, as the weights' format wants it."""
    if kind == DIGITS:
        store_digits(vector, unit, words, columns.limit)
    elif kind == HALVES:
        store_halves(vector, unit, words, columns.limit)
    elif kind in (RAISED, STAGGERED):
        vector[unit] = raised(words, RAISED_BY, RAISED_BY - 4 if kind == STAGGERED else RAISED_BY)
    else:
        vector[unit] = words
