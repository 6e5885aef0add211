"""What a step costs that verifies drafts, at an acceptance that is made up: how many tokens turn out right is given.

The tokens that the model makes are found first, without drafts; then they are drafted, but for one wrong token where a
step shall end. So the kernel that is measured is the one that is used, nothing in it knows of this, and that the tokens
stay the same is seen in the same run. Drafts are looked up too, though the launch has some, so that a step costs what
it costs. Which mean lengths real text has is another matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from cheetah.errors import CheetahError
from cheetah.runtime.engine.launcher import Part, Sampling
from cheetah.runtime.engine.launches import Drafting, LaunchResult

if TYPE_CHECKING:
    from cheetah.tools.bench import DecodeBench

FIRST_TOKEN = 1
NGRAMS = (2, 5)


@dataclass(frozen=True)
class RoundMeasurement:
    """Steps of a sequence behind `context` cached tokens that take `drafts` drafts each, of which so many turn out
    right that a step makes `length` tokens on average. step_ms: of each launch, by device events, over its steps."""

    context: int
    drafts: int
    length: float
    step_ms: tuple[float, ...]

    @property
    def ms_per_step(self) -> float:
        """The median."""
        return median(self.step_ms)

    @property
    def tokens_per_s(self) -> float:
        """At this mean length, which is made up."""
        return 1e3 * self.length / self.ms_per_step


def round_ends(steps: int, length: float) -> list[int]:
    """How many tokens are made behind each of `steps` steps of `length` tokens on average, as evenly as may be."""
    return [int((step + 1) * length + 1e-9) for step in range(steps)]


def drafts_for(truth: Sequence[int], ends: Sequence[int], vocab: int) -> list[int]:
    """The tokens behind the first, each true but for those with which steps begin that made `ends` tokens before."""
    wrong = set(ends)
    return [(token + 1) % vocab if number + 1 in wrong else token for number, token in enumerate(truth[:-1])]


class RoundBench:
    """Steps that verify up to `drafts` drafts of one sequence, on a bench whose kernel has room for them."""

    def __init__(self, bench: DecodeBench, drafts: int) -> None:
        self._bench, self._launcher, self.drafts = bench, bench._launcher, drafts
        self._truth: dict[int, list[int]] = {}

    def measure(self, context: int, length: float, steps: int, repetitions: int, warmup: int) -> RoundMeasurement:
        """CheetahError where the tokens are not those that are made without drafts, or come by other steps."""
        if not 1 <= length <= self.drafts + 1:
            raise CheetahError(f"mean length {length:g} with {self.drafts} drafts: a step makes 1 to {self.drafts + 1}")
        ends = round_ends(steps, length)
        truth = self._made(context, ends[-1])
        drafts = drafts_for(truth, ends, self._launcher.vocab_size)
        found = []
        for _ in range(warmup + repetitions):
            result, milliseconds = self._launch(context, (), ends[-1], self.drafts + 1, steps, drafts)
            if list(result.token_ids) != truth or result.steps != steps:
                raise CheetahError(
                    f"context {context}, mean length {length:g}: drafts changed the tokens, or took {result.steps} "
                    f"steps of {steps}: such a kernel's speed is worth nothing"
                )
            found.append(milliseconds / steps)
        return RoundMeasurement(context, self.drafts, length, tuple(found[warmup:]))

    def _made(self, context: int, count: int) -> list[int]:
        """The first tokens behind `context`, made without drafts."""
        truth = self._truth.setdefault(context, [])
        while len(truth) < count:
            total = min(self._launcher.max_steps, count - len(truth))
            result, _ = self._launch(context, truth, total, 1, total, ())
            truth += result.token_ids
        return truth[:count]

    def _launch(
        self, context: int, made: Sequence[int], total: int, per_step: int, steps: int, drafts: Sequence[int]
    ) -> tuple[LaunchResult, float]:
        """One launch behind `context` tokens and those that were made, and its milliseconds."""
        bench, cache = self._bench, self._launcher.cache
        cache.clear()
        cache.reserve(context + len(made))
        cache.length = context + len(made)
        known = [*self._words(context), FIRST_TOKEN, *made]
        ngrams = NGRAMS if per_step > 1 else (0, 0)
        drafting = Drafting(steps, drafts, ngrams)
        part = Part(cache, known[-1:], total, Sampling(), per_step, known, len(known), drafting=drafting)
        result = self._launcher.launch_together([part])[0]
        return result, bench._timed.elapsed_ms()

    def _words(self, count: int) -> list[int]:
        """What is searched: random ids."""
        return [int(token) for token in np.random.default_rng(0).integers(0, self._launcher.vocab_size, count)]


def parsed_rounds(text: str) -> tuple[int, list[float]]:
    """ "7:1,2,2.96" -> (7, [1.0, 2.0, 2.96]): drafts of a step, and mean lengths; without any, 1 and all."""
    drafts, _, lengths = text.partition(":")
    try:
        count = int(drafts)
        found = [float(length) for length in lengths.split(",")] if lengths else [1.0, float(count + 1)]
    except ValueError:
        count, found = 0, []
    if count < 1 or any(not 1 <= length <= count + 1 for length in found):
        raise CheetahError(
            f"--speculative {text}: expected the drafts of a step and, made up, how many tokens a step makes on "
            "average (1 to one more than drafts), e.g. --speculative 7:1,2,3"
        )
    return count, found


def round_record(measured: RoundMeasurement, circumstances: dict[str, Any]) -> dict[str, Any]:
    """A JSON line of it, which says that the length is synthetic."""
    return {
        **circumstances,
        "context": measured.context,
        "drafts": measured.drafts,
        "synthetic_mean_length": measured.length,
        "step_ms": measured.step_ms,
        "ms_per_step": measured.ms_per_step,
        "tokens_per_s": measured.tokens_per_s,
    }
