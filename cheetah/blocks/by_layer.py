"""What differs from layer to layer, as an expression of the layer's number: a static number where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cheetah import lang as ch
from cheetah.lang import ty

WORD_BITS = 32
EVERY_KEY = ch.named("EVERY_KEY", 1 << 30)
"""How many keys a query sees where it sees all: no context has as many."""


def by_layer(numbers: Sequence[int], layer: ch.Value) -> Any:
    """numbers[layer], all of them small or few: an int if they are all the same, else a u32 expression.

    Layers follow patterns, so what is looked up is the place in the shortest period: a comparison where one place
    differs from all others, else some bits of a word.
    """
    period = _period(numbers)
    values = list(dict.fromkeys(period))
    if len(values) == 1:
        return values[0]
    place = ch.cast(ty.u32, layer) % len(period) if len(period) < len(numbers) else ch.cast(ty.u32, layer)
    if len(values) == 2 and 1 in (counts := [period.count(value) for value in values]):
        rare, usual = values[counts.index(1)], values[1 - counts.index(1)]
        return ch.select(place == period.index(rare), ty.u32(rare), ty.u32(usual))
    index = _looked_up([values.index(number) for number in period], place)
    return index if values == list(range(len(values))) else chosen([ty.u32(value) for value in values], index)


def _period(numbers: Sequence[int]) -> Sequence[int]:
    """The shortest beginning that the numbers repeat."""
    lengths = range(1, len(numbers) + 1)
    length = next(n for n in lengths if all(number == numbers[i % n] for i, number in enumerate(numbers)))
    return numbers[:length]


def _looked_up(indices: Sequence[int], place: ch.Expr) -> Any:
    """indices[place], from the bits of as few words as hold them."""
    bits = max(indices).bit_length()
    of_word = WORD_BITS // bits
    words = [
        ty.u32(sum(index << bits * number for number, index in enumerate(indices[first : first + of_word])))
        for first in range(0, len(indices), of_word)
    ]
    word = chosen(words, place // of_word)
    return (word >> (place % of_word * bits)) & ((1 << bits) - 1)


def number_among(kinds: Sequence[bool], layer: Any) -> Any:
    """How many of the layers before are among those of which `kinds` says so: a layer's number among them."""
    count = len(kinds)
    period = next(n for n in range(1, count + 1) if all(kinds[i] == kinds[i % n] for i in range(count)))
    before = by_layer([sum(kinds[: number % period]) for number in range(count)], layer)
    return layer // period * sum(kinds[:period]) + before


def chosen(values: Sequence[Any], index: Any) -> Any:
    """values[index], device values of one type."""
    if isinstance(index, int):
        return values[index]
    found = values[-1]
    for number, value in reversed(list(enumerate(values[:-1]))):
        found = ch.select(index == number, value, found)
    return found


def window_keys(window: int | None, windows: Sequence[int | None]) -> int:
    """How many keys a token sees in layers of that window, of the `windows` that layers have: under a name in the text,
    where they have no other."""
    if window is None:
        return EVERY_KEY
    return ch.named("WINDOW", window) if {*windows} <= {window, None} else window
