"""The launches that kernels which keep hidden states are judged by, and what float32 says of what was kept.

Steps of several tokens of two sequences, then steps that sample; a pass over one prompt, then over its rest beside
another. What is kept of each token is told from what the token's place in the launch is said to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.rounding import F32, exact, round_to_bf16
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launcher import Part, Sampling
from cheetah.runtime.engine.launches import KernelLaunches, LaunchResult
from cheetah.tools.decided import decided_ids
from cheetah.tools.judged_passes import FIRST, REST, SECOND
from cheetah.tools.judged_steps import (
    LEAST_TOLERANCE,
    TOLERANCE_FACTOR,
    Agreement,
    reference_of,
    relative_errors,
)
from cheetah.tools.judging_device import Pace, judging
from cheetah.tools.rig import Rig, Session

STEPS, SAMPLED = 2, 3
"""Of a launch of given tokens, and of one that samples."""


@dataclass(frozen=True)
class Kept:
    """What a launch kept of tokens from number `first` of `ids` on, f32 [tokens, taps, hidden]. place: which launch."""

    place: str
    ids: tuple[int, ...]
    first: int
    found: F32


class JudgedTaps:
    """Of kernels of steps."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.pace, draw = rig, Pace(rig.plan.in_flight), np.random.default_rng(0)
        self.references = [reference_of(rig, rounding) for rounding in (exact, round_to_bf16)]
        self.prompts = [tuple(self._ids(draw, length)) for length in self._lengths]
        self.page_order = [int(page) for page in draw.permutation(rig.plan.kv_pages)]

    @property
    def _lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt: the first sequence has all columns but one of each other."""
        others = self.rig.plan.batch - 1
        return STEPS * (self.rig.plan.tokens - others), *(STEPS,) * others

    def _ids(self, draw: np.random.Generator, length: int) -> Sequence[int]:
        if self.rig.config.routing is None:
            return list(map(int, draw.integers(0, self.rig.config.vocab_size, length)))
        return decided_ids(self.references, draw, length)

    def run(self, scheduler: str, seed: int, is_short: bool = False) -> tuple[Kept, ...]:
        """One run. EmulatorError where a launch fails."""
        session = Session(self.rig, judging(self.rig, scheduler, seed, self.pace), self.page_order)
        return tuple(self._launched(session))

    def _launched(self, session: Session) -> Iterator[Kept]:
        caches, launcher = [session.sequence() for _ in self.prompts], session.launcher
        parts = [
            Part(cache, ids, len(ids), per_step=len(ids) // STEPS)
            for cache, ids in zip(caches, self.prompts, strict=True)
        ]
        _, kept = _launch(launcher, parts)
        for number, found in enumerate(kept):
            yield Kept(f"sequence {number} of given tokens", self.prompts[number], 0, found)
        parts = [Part(cache, (ids[0],), SAMPLED, Sampling()) for cache, ids in zip(caches, self.prompts, strict=True)]
        results, kept = _launch(launcher, parts)
        for number, (result, found) in enumerate(zip(results, kept, strict=True)):
            ids = (*self.prompts[number], self.prompts[number][0], *result.token_ids[:-1])
            yield Kept(f"sequence {number} of sampled tokens", ids, len(self.prompts[number]), found)

    def outputs(self, found: tuple[Kept, ...]) -> dict[str, NDArray[Any]]:
        """Everything that must not depend on the schedule."""
        return {f"what was kept of {one.place}": one.found for one in found}

    def pace_problem(self) -> str:
        """What is wrong with how far the copies ran ahead."""
        return self.pace.problem()

    def agreement(self, found: tuple[Kept, ...]) -> Agreement:
        """Each row beside the reference's."""
        errors, allowed = list[F32](), LEAST_TOLERANCE
        for one in found:
            wanted, rounded = (self._wanted(reference, one) for reference in self.references)
            errors.append(relative_errors(one.found.reshape(wanted.shape), wanted))
            allowed = max(allowed, TOLERANCE_FACTOR * float(relative_errors(rounded, wanted).max()))
        problems = tuple(
            problem for one, wrong in zip(found, errors, strict=True) for problem in self._problems(one, wrong, allowed)
        )
        every = np.concatenate(errors)
        return Agreement(len(every), float(every.max()), allowed, problems, "hidden states of layers")

    def _problems(self, kept: Kept, wrong: F32, allowed: float) -> Iterator[str]:
        """The first row that is off; a NaN is no agreement."""
        if np.all(wrong <= allowed):
            return
        layers = self.rig.plan.tapped_layers
        token, tap = divmod(int(np.argmax(~(wrong <= allowed))), len(layers))
        place = token * len(layers) + tap
        yield (
            f"{kept.place}: what is kept of layer {layers[tap]} of position {kept.first + token} is "
            f"{wrong[place]:.2e} from float32, allowed is {allowed:.2e}"
        )

    def _wanted(self, reference: Any, kept: Kept) -> F32:
        """f32 [tokens * taps, hidden]."""
        rows = list[F32]()
        reference.reset()
        for number, token in enumerate(kept.ids):
            reference.step(token)
            if number >= kept.first:
                rows += [reference.left[layer] for layer in self.rig.plan.tapped_layers]
        return np.stack(rows)


class JudgedTapsOfPasses(JudgedTaps):
    """Of kernels of passes."""

    @property
    def _lengths(self) -> tuple[int, ...]:
        return FIRST + REST, SECOND

    def _launched(self, session: Session) -> Iterator[Kept]:
        caches = [session.sequence() for _ in self.prompts]

        def part(number: int, count: int) -> Part:
            cache: CachedSequence = caches[number]
            return Part(cache, self.prompts[number][cache.length :][:count], count, wanted=1)

        _, (found,) = _launch(session.passes, [part(0, FIRST)])
        yield Kept("the first pass", self.prompts[0][:FIRST], 0, found)
        _, kept = _launch(session.passes, [part(0, REST), part(1, SECOND)])
        for number, (first, found) in enumerate(zip((FIRST, 0), kept, strict=True)):
            yield Kept(f"prompt {number} of the second pass", self.prompts[number], first, found)


def _launch(launcher: KernelLaunches, parts: Sequence[Part]) -> tuple[list[LaunchResult], list[F32]]:
    """What a launch did, and what it kept of each part's tokens."""
    launch = launcher.prepare(parts)
    launcher.start(launch)
    results = launcher.finish(launch)
    return results, [launcher.tapped(launch, number, range(part.total)) for number, part in enumerate(parts)]
