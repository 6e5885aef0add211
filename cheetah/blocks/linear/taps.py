"""Taps: what layers leave of the residual stream, kept besides for a model that drafts by it.

Who adds the last rows to the residual keeps them here too, rounded to bf16. A token has a row of each tapped layer,
side by side: bf16 [token][tap][padded hidden]. Nobody of the launch reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.by_layer import by_layer
from cheetah.lang import ty

NO_TAP = 2**32 - 1
"""The place of rows that are not kept."""


def place_of_layer(tapped: Sequence[int], layers: int, layer: Any, first: Any) -> Any:
    """Where the row of token 0 of a layer is (u32), in rows; NO_TAP where it is not kept. tapped: the layers that are
    kept; first: the place of the first one's."""
    numbers = by_layer([tapped.index(one) if one in tapped else len(tapped) for one in range(layers)], layer)
    number = ty.u32(numbers) if isinstance(numbers, int) else numbers
    return ch.select(number < len(tapped), first + number, ty.u32(NO_TAP))


@dataclass(frozen=True, eq=False)
class Tap:
    """Rows of a layer. into: of all (bf16), in this GPU's memory and in those of others, each of which has all of them;
    count: rows of a token; width: elements of a row; place: of token 0's."""

    into: Sequence[ch.Expr]
    count: int
    width: Any
    place: Any

    def of_token(self, place: Any, token: Any) -> list[Any]:
        """Where a token's row begins in each memory, by the place, where that is one."""
        return [into + ty.u64(place + token * self.count) * self.width for into in self.into]
