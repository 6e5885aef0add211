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
