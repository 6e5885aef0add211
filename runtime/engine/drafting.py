"""Tokens that are drafted and verified by the step that takes them in: how, and what came of it. Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True)
class Drafting:
    """How a part's tokens are drafted, in a kernel that verifies drafts. rounds: steps of the launch at most; each
    takes `per_step` tokens, of which all that turn out right count.

    drafts: what may follow the inputs. ngrams: fewest and most tokens behind which drafts are looked up in what is
    known of the sequence, where there are no such; (0, 0): not at all.
    """

    rounds: int
    drafts: Sequence[int] = ()
    ngrams: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Drafted:
    """What came of drafts. steps: those in which something was drafted; tokens: how many were; right: in how many steps
    the first, the second, ... draft was right."""

    steps: int = 0
    tokens: int = 0
    right: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        """How many drafted tokens were right."""
        return sum(self.right)

    def __add__(self, other: Drafted) -> Drafted:
        right = tuple(one + another for one, another in zip_longest(self.right, other.right, fillvalue=0))
        return Drafted(self.steps + other.steps, self.tokens + other.tokens, right)


NOTHING_DRAFTED = Drafted()

BREAK_EVEN = 1.05
"""Tokens of a step from which on drafts pay: with 8 columns it takes 3 to 7 % longer than with one, in one kernel."""
FORGETS = 0.3
"""How much of the mean length a launch is."""


@dataclass(frozen=True)
class Speculation:
    """How an engine has tokens drafted: up to `drafts` of a sequence in a step, looked up behind the same `ngrams`
    (fewest, most tokens) earlier in it."""

    drafts: int
    ngrams: tuple[int, int]

    def widths(self, wanted: Sequence[bool], columns: int) -> list[int]:
        """How many columns each of these sequences has in a step of so many: one, and of those that are left over those
        that want drafts have equally many."""
        spare = columns - len(wanted)
        share = spare // max(1, sum(wanted))
        return [1 + min(self.drafts, share) if wants else 1 for wants in wanted]


class Worth:
    """Whether drafts of one completion pay. What a launch without drafts has made is replayed: what would have been
    looked up, and how many tokens a step would have made. So nothing need be drafted to know when it pays again.

    It decides speed alone, so it may be wrong: of several lengths of n-grams only the shortest is replayed."""

    def __init__(self, speculation: Speculation) -> None:
        self._drafts, self._shortest = speculation.drafts, speculation.ngrams[0]
        self._ends: dict[tuple[int, ...], int] = {}  # of n-grams, the latest place behind one
        self._noted = 0
        self.length = 2.0  # tokens of a step, a mean that forgets; before anything is known, drafts are tried

    @property
    def pays(self) -> bool:
        return self.length > BREAK_EVEN

    def note(self, ids: Sequence[int], made: int, steps: int | None) -> None:
        """The last `made` of these ids were made, with drafts in so many steps, or without: None."""
        replayed = self._replayed(ids, len(ids) - made)
        if made:
            self.length += (made / (replayed if steps is None else steps) - self.length) * FORGETS

    def _replayed(self, ids: Sequence[int], first: int) -> int:
        """The steps that would have made the ids from `first` on; all n-grams are known afterwards."""
        self._know(ids, first)
        steps, place = 0, first
        while place < len(ids):
            found = self._ends.get(tuple(ids[place - self._shortest : place]))
            right = 0
            if found is not None:
                most = min(self._drafts, len(ids) - place - 1)
                while right < most and ids[found + right] == ids[place + right]:
                    right += 1
            steps, place = steps + 1, place + right + 1
            self._know(ids, place)
        return steps

    def _know(self, ids: Sequence[int], end: int) -> None:
        """Notes the n-grams that end before the one before `end`."""
        for place in range(max(self._noted, self._shortest), min(end, len(ids))):
            self._ends[tuple(ids[place - self._shortest : place])] = place
        self._noted = max(self._noted, min(end, len(ids)))
