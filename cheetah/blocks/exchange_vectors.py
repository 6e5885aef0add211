"""Where the vectors of an exchange lie in its workspace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from cheetah import lang as ch
from cheetah.lang import ty
from cheetah.plan.halves import PART_BYTES

COUNTER_BYTES = 256
"""The grid barrier's counter has cache lines of its own."""
VECTOR_ALIGNMENT = 256
PARTS_IN_HALF = 8
"""Inputs of more parts lie together: in one half of L2 their parts would be far apart."""


@dataclass(frozen=True)
class Vector:
    """A named part of the workspace: `words` 32-bit payload words, each in a `word` of memory, the first at number
    `offset`. Each PART_BYTES of it begin `apart` times as many bytes after those before them."""

    name: str
    words: int
    offset: int
    word: ty.Scalar
    apart: int = 1

    @property
    def part_words(self) -> int:
        """Words that lie together."""
        return ch.named("PART_WORDS", PART_BYTES // self.word.bytes)

    def with_name(self) -> Vector:
        """Its offset under a name in the text."""
        return replace(self, offset=ch.named(f"EXCHANGE_{self.name.upper()}", self.offset))

    def number(self, index: Any) -> Any:
        """The number in the workspace of payload word `index`."""
        if self.apart == 1:
            return index + self.offset
        part, place = index // self.part_words, index % self.part_words
        return part * (self.apart * self.part_words) + place + self.offset

    def distance(self, words: int) -> int | None:
        """How far apart payload words lie whose numbers differ by `words`, if that is the same everywhere."""
        return words * self.apart if self.apart == 1 or words % self.part_words == 0 else None

    @property
    def byte_ranges(self) -> list[tuple[int, int, str]]:
        """(first, end, name) of each of its parts in the workspace."""
        parts = range(0, self.words, self.part_words if self.apart > 1 else self.words)
        sizes = ((self.number(first), min(self.words - first, parts.step)) for first in parts)
        return [(number * self.word.bytes, (number + words) * self.word.bytes, self.name) for number, words in sizes]


EXCHANGED = ty.struct("Exchanged", **dict.fromkeys(("offset", "apart", "exponent"), ty.u32))
"""A vector as readers and writers of several may share their text: see `Vector` and `Exchange.inputs`."""


@dataclass(frozen=True, eq=False)
class RecordedVector:
    """A `Vector` of words that lies where the device says: `where` is a record (EXCHANGED), or, of one that is no input
    of a product and lies together, the number of its first word."""

    vector: Vector
    where: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.vector, name)

    @property
    def is_input(self) -> bool:
        return bool(self.where.type == EXCHANGED)

    @property
    def apart(self) -> int | None:
        return None if self.is_input else 1

    @property
    def offset(self) -> Any:
        return self.where.offset if self.is_input else self.where

    def distance(self, words: int) -> Any:
        same = self.vector.distance(words)
        return same if same is None or not self.is_input else self.where.apart * words


@ch.function
def word_of_input(vector: ch.Expr, index: ch.Expr) -> Any:
    """The number in the workspace of payload word `index` of a vector (EXCHANGED) whose parts lie apart."""
    words = ch.named("PART_WORDS", PART_BYTES // 4)
    return index // words * (vector.apart * words) + index % words + vector.offset


def apart(vectors: dict[str, Vector]) -> dict[str, Vector]:
    """The vectors; AssertionError where words of two of them coincide."""
    ranges = sorted(one for vector in vectors.values() for one in vector.byte_ranges)
    for (_, end, name), (first, _, other) in pairwise(ranges):
        assert end <= first, f"{name} and {other} have words in common, from byte {first} on"
    return vectors
