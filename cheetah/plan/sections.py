"""Named sections of a memory, one after the other: where each begins and how much they take together."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from cheetah.plan.index import round_up

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Sections(Generic[Name]):
    """Each begins at the first multiple of `alignment` (its own, where they differ) behind the one before it; the first
    not below `start`. Sizes, alignments and offsets count whatever the caller counts: bytes or words."""

    sizes: Mapping[Name, int]
    alignment: int | Mapping[Name, int] = 1
    start: int = 0

    @cached_property
    def offsets(self) -> dict[Name, int]:
        """Where each section begins."""
        offsets: dict[Name, int] = {}
        end = self.start
        for name, size in self.sizes.items():
            alignment = self.alignment if isinstance(self.alignment, int) else self.alignment[name]
            offsets[name] = round_up(end, alignment)
            end = offsets[name] + size
        return offsets

    @property
    def end(self) -> int:
        """Where the last one ends."""
        last = next(reversed(self.offsets), None)
        return self.start if last is None else self.offsets[last] + self.sizes[last]

    @property
    def total(self) -> int:
        """`end`, rounded up to the alignment that all have."""
        assert isinstance(self.alignment, int)
        return round_up(self.end, self.alignment)
