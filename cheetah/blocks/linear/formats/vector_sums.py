"""What zero points take away from a product: times each, the sum of the vector over the columns that share it.

Sums are made once of every vector and kept in shared memory: a warp makes those of its own K-tiles before it multiplies
the first M-tile by them, on the tensor cores, with weights that are all 1. Nobody else reads them.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.fragments import Activations
from cheetah.lang import ty
from cheetah.plan.plan import COLUMNS


@ch.inline
def keep_sums(activations: Activations, index: int, group: int, lane: ch.Expr, sums: list[Any]) -> None:
    """Of group `index` of a K-tile's columns and group `group` of 8 tokens' columns: `sums` of this lane's columns
    2t and 2t + 1, the same in all rows."""
    kept = activations.sums + (_place(activations, index, group) + lane * 2)
    with ch.if_(lane < COLUMNS // 2):
        for number, value in enumerate(sums):
            kept[number] = value


def kept_sums(activations: Activations, index: int, group: int, lane: ch.Expr) -> ch.Expr:
    """What was kept of this lane's columns (f32x2)."""
    pairs = ch.reinterpret(ty.ptr(ty.f32x2), activations.sums + _place(activations, index, group))
    return ch.const(ty.f32x2, pairs[lane % (COLUMNS // 2)], name="of_vector")


def _place(activations: Activations, index: int, group: int) -> int:
    return (index * activations.columns.tiles + group) * COLUMNS
