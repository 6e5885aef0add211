"""Which of a model's states which sequence has, where sequences have one beside their pages.

A state is what a sequence remembers in layers of Gated DeltaNet, of all its tokens at once: so it belongs to one
sequence, and to one length of it. Some are kept as they were at a length that others may begin with; see
`prefix_cache`. Pure bookkeeping, as `kv_cache`.
"""

from __future__ import annotations

from typing import NamedTuple


class StateCopy(NamedTuple):
    """State `target` is to become a copy of state `source`."""

    source: int
    target: int


class StatePool:
    """Hands out the numbers of `count` states; 0 of models whose sequences have none. kept: how many of them are for
    later sequences, so that those that go on never lack one."""

    def __init__(self, count: int = 0, kept: int = 0) -> None:
        self.count, self.kept = count, kept
        self._free = list(range(count))
        self._copies: list[StateCopy] = []

    @property
    def free(self) -> int:
        """How many nobody has."""
        return len(self._free)

    def take(self) -> int:
        """One that nobody has, with whatever it holds: a sequence's first token does not ask for it."""
        return self._free.pop(0)

    def give_back(self, state: int) -> None:
        """Nobody has it any more."""
        assert 0 <= state < self.count and state not in self._free, state
        self._free.insert(0, state)
        if all(state != copy.source for copy in self._copies):  # what nobody has copied on is of no use any more
            self._copies = [copy for copy in self._copies if copy.target != state]

    def note_copy(self, source: int, target: int) -> None:
        """Notes that `target` must become a copy of `source` before the next launch."""
        self._copies.append(StateCopy(source, target))

    def take_copies(self) -> list[StateCopy]:
        """The copies to make now, in this order and before the next launch; after that they are forgotten."""
        copies, self._copies = self._copies, []
        return copies
