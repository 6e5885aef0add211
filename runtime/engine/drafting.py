"""Tokens that are drafted and verified by the step that takes them in: how, and what came of it. Plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import exp

from cheetah.runtime.engine.watching import Mask


@dataclass(frozen=True)
class Drafting:
    """How a part's tokens are drafted, in a kernel that verifies drafts. rounds: steps of the launch at most; each
    takes `per_step` tokens, of which all that turn out right count.

    drafts: what may follow the inputs. masks: in a launch of one round which tokens may be chosen behind each of these,
    where something else may than behind the inputs. ngrams: fewest and most tokens behind which drafts are looked up in
    what is known of the sequence, where there are no such; (0, 0): not at all. ahead: a text in which they are looked
    up first.
    """

    rounds: int
    drafts: Sequence[int] = ()
    ngrams: tuple[int, int] = (0, 0)
    ahead: Sequence[int] = ()
    masks: Sequence[Mask | None] = ()


@dataclass(frozen=True)
class Drafted:
    """What came of drafts. steps: those in which something was drafted; tokens: how many were; right: in how many steps
    the first, the second, ... draft was right."""

    steps: int = 0
    tokens: int = 0
    right: tuple[int, ...] = ()

    @classmethod
    def of_token(cls, drafted: int, place: int) -> Drafted:
        """What a token says that was chosen behind draft number `place`, from 1 on, of so many; 0: behind none, with
        which a step begins."""
        if not place:
            return cls(int(drafted > 0), drafted)
        return cls(right=(*[0] * (place - 1), 1)) if place <= drafted else cls()

    @property
    def accepted(self) -> int:
        """How many drafted tokens were right."""
        return sum(self.right)

    def __add__(self, other: Drafted) -> Drafted:
        right = tuple(one + another for one, another in zip_longest(self.right, other.right, fillvalue=0))
        return Drafted(self.steps + other.steps, self.tokens + other.tokens, right)


NOTHING_DRAFTED = Drafted()

MEMORY_STEPS, TRIAL_STEPS = 8, 16
"""Steps behind which the mean length has forgotten two thirds of what was before; and of the first launch in which
something is drafted, which may be in vain."""
FORGETS = 0.3
"""How much of what is known of a step's time a launch is."""
LEAST_STEPS = 4
"""Shorter launches say nothing of a step's time."""
RETRIED_BEHIND = 16
"""Launches without drafts of another model behind which they are tried again."""
USUAL_RATIO, LEAST_RATIO = 1.1, 1.02
"""Time of a step with drafts over that of one without: where it was not measured, and what it is at least."""


@dataclass(frozen=True)
class Speculation:
    """How an engine has tokens drafted: up to `drafts` of a sequence in a step, looked up behind the same `ngrams`
    (fewest, most tokens) earlier in it; or, where those are (0, 0), by another model."""

    drafts: int
    ngrams: tuple[int, int] = (0, 0)

    @property
    def by_model(self) -> bool:
        return not self.ngrams[1]

    def new_worth(self, ahead: Sequence[int]) -> Worth:
        """Of a completion of which nothing is known. ahead: a text in which drafts are looked up too."""
        return SeenWorth(self.drafts) if self.by_model else ReplayedWorth(self, ahead)

    def widths(self, wanted: Sequence[float], columns: int) -> list[int]:
        """How many columns each of these sequences has in a step of so many: one, and of those that are left over those
        that want drafts have equally many, or one more where some remain, who want them most. wanted: how much each
        does; 0: not at all."""
        wanting = [number for number, want in enumerate(wanted) if want]
        share, more = divmod(columns - len(wanted), max(1, len(wanting)))
        first = sorted(wanting, key=lambda number: -wanted[number])[:more]
        return [1 + min(self.drafts, share + (number in first)) if want else 1 for number, want in enumerate(wanted)]


class Pace:
    """How long steps take with drafts and without, by how many sequences share them; so how many tokens one must make
    for drafts to pay. With one sequence that is 1.1 (8B) to 1.4 (4 bits), since a kernel of one column takes its steps
    without drafts, and several with experts, which are others for each column. least_steps: shorter launches say
    nothing."""

    def __init__(self, least_steps: int = LEAST_STEPS) -> None:
        self._least_steps = least_steps
        self._step_s: dict[tuple[int, bool], float] = {}
        self._measured: set[int] = set()

    def note(self, sequences: int, has_drafts: bool, steps: int, seconds: float) -> None:
        """A launch took so long."""
        if not has_drafts:
            self._measured.add(sequences)
        if steps >= self._least_steps:
            known = self._step_s.get((sequences, has_drafts), seconds / steps)
            self._step_s[sequences, has_drafts] = known + (seconds / steps - known) * FORGETS

    def lacks_plain(self, sequences: int) -> bool:
        """Whether a launch without drafts is to be made to know how long its steps take: once, behind one with them."""
        return (sequences, True) in self._step_s and sequences not in self._measured

    def break_even(self, sequences: int) -> float:
        """Tokens that a step must make."""
        plain = self._step_s.get((sequences, False))
        drafted = self._step_s.get((sequences, True))
        ratio = USUAL_RATIO if plain is None or drafted is None else drafted / plain
        return max(ratio, LEAST_RATIO)


def first_steps(steps: int, worths: Iterable[Worth | None]) -> int:
    """Steps of a launch of completions that may have something drafted: fewer where of one nothing is known yet."""
    return min(steps, TRIAL_STEPS) if any(worth is None for worth in worths) else steps


class Worth:
    """How many tokens a step makes of one completion with drafts: `length`, a mean that forgets. It decides speed
    alone, so it may be wrong."""

    def __init__(self, length: float) -> None:
        self.length = length  # before anything is known, so that drafts are tried

    def note(self, ids: Sequence[int], made: int, steps: int | None) -> None:
        """The last `made` of these ids were made, with drafts in so many steps, or without: None."""
        raise NotImplementedError

    def proposed(self, ids: Sequence[int], most: int) -> list[int]:
        """What would be looked up behind these ids."""
        return []

    def _see(self, made: int, steps: int) -> None:
        self.length += (made / steps - self.length) * (1.0 - exp(-steps / MEMORY_STEPS))


class SeenWorth(Worth):
    """By what came of drafts of another model. Where they did not pay they are tried again now and then."""

    def __init__(self, drafts: int) -> None:
        super().__init__(1.0 + drafts / 2)
        self._first, self._launches = self.length, 0

    def note(self, ids: Sequence[int], made: int, steps: int | None) -> None:
        if steps is not None:
            self._launches = 0
            self._see(made, steps)
        else:
            self._launches += 1
            if self._launches % RETRIED_BEHIND == 0:
                self.length = max(self.length, self._first)


class ReplayedWorth(Worth):
    """What a launch without drafts has made is replayed: what would have been looked up, and how many tokens a step
    would have made. So nothing need be drafted to know when it pays again.

    Of several lengths of n-grams only the shortest is replayed. ahead: a text in which they are looked up too."""

    def __init__(self, speculation: Speculation, ahead: Sequence[int] = ()) -> None:
        super().__init__(2.0)
        self._drafts, self._shortest, self._ahead = speculation.drafts, speculation.ngrams[0], ahead
        self._ends: dict[tuple[int, ...], int] = {}  # of n-grams, the latest place behind one
        self._noted = 0

    def note(self, ids: Sequence[int], made: int, steps: int | None) -> None:
        ids = [*self._ahead, *ids]
        replayed = self._replayed(ids, len(ids) - made)
        if made:
            self._see(made, replayed if steps is None else steps)

    def proposed(self, ids: Sequence[int], most: int) -> list[int]:
        ids = [*self._ahead, *ids]
        self._know(ids, len(ids))
        found = self._ends.get(tuple(ids[-self._shortest :]))
        return [] if found is None else ids[found : found + most]

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
