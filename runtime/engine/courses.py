"""The course of a launch: from the parts of completions to events, told as the tokens are made.

Who wants logprobs takes its tokens at the launch's end, and is told while the next one runs: there is time to work the
logprobs out. Knows nothing of who is launched together, or why.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cheetah.models.logprobs import TokenLogprobs, token_logprobs
from cheetah.runtime.engine.completion import Completion, Group
from cheetah.runtime.engine.flights import Flight, KernelLaunches, LaunchResult, Part
from cheetah.runtime.engine.requests import Event, Made
from cheetah.runtime.engine.step_launches import StepLaunches

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer

Course = Generator[None, None, None]
"""The steps of a launch: gives way when there are new events."""


def steps_with(logits: Buffer | None, steps: int, *launchers: StepLaunches) -> int:
    """As many of `steps` as a launch by any of these takes, all of whose logits go to that buffer, if there is one."""
    return steps if logits is None else min(steps, *(launcher.score_steps(logits) for launcher in launchers))


@dataclass(frozen=True)
class _Unjudged:
    """What a completion has made, but for the logprobs of its ids: `rows` of logits float32 [vocab], one of each, where
    the launch wrote them. They are read before another launch writes there."""

    events: Sequence[Event]
    rows: Sequence[npt.NDArray[np.float32]]
    count: int

    def judged(self) -> list[Event]:
        """The events as they are told."""
        return [replace(event, logprobs=self._of(event)) if isinstance(event, Made) else event for event in self.events]

    def _of(self, made: Made) -> tuple[TokenLogprobs, ...]:
        return tuple(
            token_logprobs(row, token, self.count) for row, token in zip(self.rows, made.token_ids, strict=True)
        )


@dataclass(frozen=True)
class _Flying:
    """The launch under way. takers: of each part, those whose tokens it makes; other threads may look at them."""

    launcher: KernelLaunches
    flight: Flight
    parts: Sequence[Part]
    takers: Sequence[tuple[Completion, ...]]

    def cancel(self, ids: set[int]) -> None:
        """Ends the parts that nobody else wants."""
        for number, group in enumerate(self.takers):
            if ids.issuperset(one.id for one in group):
                self.launcher.cancel(self.flight, number)

    def end(self) -> None:
        """Ends it for all, who go on from there in another."""
        for number in range(len(self.takers)):
            self.launcher.cancel(self.flight, number)

    def fresh(self) -> Iterator[Event]:
        """What it has made since it was asked last, of who does not wait for logprobs."""
        seconds = self.flight.seconds
        for part, group, token_ids in zip(self.parts, self.takers, self.launcher.fresh(self.flight), strict=True):
            for one in group if token_ids else ():
                if one.request.logprobs is None:
                    yield from one.take(part, token_ids, seconds)


class Courses:
    """One launch after the other. logits: gives buffer 0 or 1 for those of launches in which somebody wants logprobs,
    in the host's memory; without it nobody may."""

    def __init__(self, logits: Callable[[int], Buffer] | None = None):
        self._logits = logits
        self._turn = 0  # the buffer for logits that nobody reads
        self._flying: _Flying | None = None
        self._unjudged: list[_Unjudged] = []

    @property
    def have_told_all(self) -> bool:
        """Whether nobody waits for logprobs of what the launches have made."""
        return not self._unjudged

    def logits_for(self, are_wanted: bool) -> Buffer | None:
        """The buffer for the logits of the next launch."""
        return self._logits(self._turn) if are_wanted and self._logits is not None else None

    def cancel(self, ids: set[int]) -> None:
        """Ends what is under way for these alone. By any thread, at any time."""
        if (flying := self._flying) is not None:
            flying.cancel(ids)

    def judge(self, events: list[Event]) -> None:
        """Tells what waits for its logprobs."""
        waiting, self._unjudged = self._unjudged, []
        for one in waiting:
            events += one.judged()

    def fly(
        self,
        launcher: KernelLaunches,
        parts: Sequence[Part],
        takers: Sequence[Group],
        events: list[Event],
        logits: Buffer | None = None,
        following: Sequence[int] | None = None,
        shall_end: Callable[[int, int], bool] = lambda steps, made: False,
    ) -> Generator[None, None, list[LaunchResult]]:
        """A launch, whose tokens are taken as they are made: of each part by its `takers`.

        following: the ids of a prompt that are judged by the launch's logits, where its inputs are not those before.
        shall_end: (steps, tokens made) -> whether it shall end early, with fewer tokens."""
        flight = launcher.prepare(parts, logits)
        flying = self._flying = _Flying(launcher, flight, parts, [*map(tuple, takers)])
        try:
            launcher.start(flight)
            for one in chain(*takers):
                one.launched()
            if self._unjudged:
                self.judge(events)
                yield
            is_ending = False
            while not launcher.wait(flight):
                events += flying.fresh()
                if not is_ending and shall_end(parts[0].steps, max(flight.given)):
                    flying.end()
                    is_ending = True
                yield
            results = launcher.finish(flight)
        finally:
            self._flying = None
        self._take_rest(flying, results, events, logits)
        self._judge_prompts(flying, logits, following)
        self._turn = self._turn if logits is None else 1 - self._turn
        return results

    def _take_rest(
        self, flying: _Flying, results: Sequence[LaunchResult], events: list[Event], logits: Buffer | None
    ) -> None:
        """What was made and not given yet, at a launch's end; all of it where logprobs are wanted."""
        for number, (part, group, result) in enumerate(zip(flying.parts, flying.takers, results, strict=True)):
            others = result.token_ids[flying.flight.given_of(number) :]
            for one in group:
                if (most := one.request.logprobs) is None or logits is None or not part.samples:
                    events += one.take(part, others, result.seconds, result.has_failed)
                else:
                    told = one.take(part, result.token_ids, result.seconds, result.has_failed)
                    last = len(part.inputs) - 1
                    tokens = range(last, last + len(result.token_ids))
                    rows = flying.launcher.logits_after(flying.flight, number, tokens)
                    self._unjudged.append(_Unjudged(told, [*rows], most))

    def _judge_prompts(self, flying: _Flying, logits: Buffer | None, following: Sequence[int] | None) -> None:
        """What the ids of prompts were worth by this launch's logits, where that is wanted."""
        for number, (part, group) in enumerate(zip(flying.parts, flying.takers, strict=True)):
            most = group[0].request.prompt_logprobs
            if logits is not None and most is not None and group[0].reads_logprobs:
                judged = part.inputs[1:] if following is None else following
                rows = flying.launcher.logits_after(flying.flight, number, range(len(judged)))
                group[0].prompt_logprobs += map(token_logprobs, rows, judged, repeat(most))
