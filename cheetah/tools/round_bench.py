"""What a step costs that verifies drafts, at an acceptance that is made up: how many tokens turn out right is given.

The tokens that the model makes are found first, without drafts; then they are drafted, but for one wrong token where a
step shall end. So the kernel that is measured is the one that is used, nothing in it knows of this, and that the tokens
stay the same is seen in the same run. Drafts are looked up too, though the launch has some, so that a step costs what
it costs. Which mean lengths real text has is another matter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from cheetah.errors import CheetahError
from cheetah.runtime.engine.drafting import Drafting
from cheetah.runtime.engine.launcher import Part, Sampling
from cheetah.runtime.engine.launches import LaunchResult

if TYPE_CHECKING:
    from cheetah.tools.bench import DecodeBench

FIRST_TOKEN = 1
NGRAMS = (2, 5)
CHUNK = 512
"""Keys of an item of attention, as an `LLM` of long contexts has them that drafts."""


@dataclass(frozen=True)
class Rounds:
    """Steps of a sequence behind `context` cached tokens that take `drafts` drafts each, of which so many turn out
    right that a step makes `length` tokens on average."""

    context: int
    drafts: int
    length: float


@dataclass(frozen=True)
class RoundMeasurement:
    """Of these. step_ms: of each launch, by device events, over its steps."""

    rounds: Rounds
    step_ms: tuple[float, ...]

    @property
    def ms_per_step(self) -> float:
        """The median."""
        return median(self.step_ms)

    @property
    def tokens_per_s(self) -> float:
        """At this mean length, which is made up."""
        return 1e3 * self.rounds.length / self.ms_per_step


def round_ends(steps: int, length: float) -> list[int]:
    """How many tokens are made behind each of `steps` steps of `length` tokens on average, as evenly as may be."""
    return [int((step + 1) * length + 1e-9) for step in range(steps)]


def drafts_for(truth: Sequence[int], ends: Sequence[int], vocab: int) -> list[int]:
    """The tokens behind the first, each true but for those with which steps begin that made `ends` tokens before."""
    wrong = set(ends)
    return [(token + 1) % vocab if number + 1 in wrong else token for number, token in enumerate(truth[:-1])]


class RoundBench:
    """Steps that verify drafts of one sequence, on a bench whose kernel has room for them."""

    def __init__(self, bench: DecodeBench) -> None:
        self.bench, self._launcher = bench, bench.launcher
        self._truth: dict[int, list[int]] = {}

    def measure(
        self, rounds: Rounds, steps: int, repetitions: int, warmup: int, rest_s: float = 0.0
    ) -> RoundMeasurement:
        """`repetitions` launches after `warmup` others, before each of which the GPU rests. CheetahError where the
        tokens are not those that are made without drafts, or come by other steps."""
        ends = round_ends(steps, rounds.length)
        truth = self._made(rounds.context, ends[-1])
        drafts = drafts_for(truth, ends, self._launcher.vocab_size) if rounds.drafts else ()
        found = []
        for _ in range(warmup + repetitions):
            time.sleep(rest_s)
            result, milliseconds = self._launch(rounds.context, (), ends[-1], rounds.drafts + 1, steps, drafts)
            if list(result.token_ids) != truth or result.steps != steps:
                raise CheetahError(
                    f"context {rounds.context}, mean length {rounds.length:g}: drafts changed the tokens, or took "
                    f"{result.steps} steps of {steps}: such a kernel's speed is worth nothing"
                )
            found.append(milliseconds / steps)
        return RoundMeasurement(rounds, tuple(found[warmup:]))

    def _made(self, context: int, count: int) -> list[int]:
        """The first tokens behind `context`, made without drafts."""
        truth = self._truth.setdefault(context, [])
        while len(truth) < count:
            total = min(self._launcher.max_steps, count - len(truth))
            result, _ = self._launch(context, truth, total, 1, total, ())
            if not result.token_ids:
                raise CheetahError(f"context {context}: no logit is a number: nothing can be drafted")
            truth += result.token_ids
        return truth[:count]

    def _launch(
        self, context: int, made: Sequence[int], total: int, per_step: int, steps: int, drafts: Sequence[int]
    ) -> tuple[LaunchResult, float]:
        """One launch behind `context` tokens and those that were made, and its milliseconds."""
        cache = self._launcher.cache
        cache.clear()
        cache.reserve(context + len(made))
        cache.length = context + len(made)
        if not made:  # else the launch before has made them
            self.bench.forget()
        known = [*self._words(context), FIRST_TOKEN, *made]
        ngrams = NGRAMS if per_step > 1 else (0, 0)
        drafting = Drafting(steps, drafts, ngrams)
        part = Part(cache, known[-1:], total, Sampling(), per_step, known, len(known), drafting=drafting)
        result = self._launcher.launch_together([part])[0]
        return result, self.bench.elapsed_ms()

    def _words(self, count: int) -> list[int]:
        """What is searched: random ids."""
        return [int(token) for token in np.random.default_rng(0).integers(0, self._launcher.vocab_size, count)]


def parsed_lengths_of_rounds(text: str) -> tuple[int, list[float]]:
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


@contextmanager
def open_rounds(*subject: Any, works: Sequence[Rounds], steps: int, **options: Any) -> Iterator[RoundBench]:
    """A `RoundBench` that is closed at the end, with a kernel that has room for the works."""
    from cheetah.tools.bench import Work, open_bench

    drafts = max(work.drafts for work in works)
    room = [Work((max(work.context for work in works),), 0, drafts + 1)]
    plan = {"kv_chunk": CHUNK, **options, "drafts": drafts}
    with open_bench(*subject, room, steps, **plan) as bench:
        yield RoundBench(bench)


def round_record(measured: RoundMeasurement, bench: RoundBench, circumstances: dict[str, Any]) -> dict[str, Any]:
    """A line of a results file, which says that the mean length is made up."""
    return {
        **circumstances,
        "system": "cheetah",
        "kernel": bench.bench.manifest.text_sha256[:16],
        "context": measured.rounds.context,
        "drafts": measured.rounds.drafts,
        "synthetic_mean_length": measured.rounds.length,
        "identical": True,
        "ms_per_step": round(measured.ms_per_step, 6),
        "ms_per_step_samples": [round(one, 6) for one in measured.step_ms],
        "tokens_per_s": round(measured.tokens_per_s, 3),
    }
