"""A launch from its order to events, told as the tokens are made.

Who wants logprobs takes its tokens at the launch's end, and is told while the next one runs: there is time to work the
logprobs out. Knows nothing of who is launched together, or why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

import numpy as np
import numpy.typing as npt

from cheetah.models.logprobs import TokenLogprobs, token_logprobs
from cheetah.runtime.engine.launch_order import LaunchOrder, Purpose
from cheetah.runtime.engine.launches import LaunchResult
from cheetah.runtime.engine.requests import Event, Made


@dataclass(frozen=True)
class Untold:
    """What a completion has made, but for the logprobs of its ids: `rows` of logits float32 [vocab], one of each, where
    the launch wrote them. They are read before another launch writes there. most: how many of the likeliest ids."""

    events: Sequence[Event]
    rows: Sequence[npt.NDArray[np.float32]]
    most: int

    def told(self) -> list[Event]:
        """The events with the logprobs."""
        return [replace(event, logprobs=self._of(event)) if isinstance(event, Made) else event for event in self.events]

    def _of(self, made: Made) -> tuple[TokenLogprobs, ...]:
        return tuple(
            token_logprobs(row, token, self.most) for row, token in zip(self.rows, made.token_ids, strict=True)
        )


class RunningLaunch:
    """An order that is carried out. Prepared when it is made: `start` it, ask `has_ended`, and `finish` it then."""

    def __init__(self, order: LaunchOrder):
        self.order = order
        self.starts = [part.cache.length for part in order.parts]
        """Tokens of each part that were cached before."""
        self.launch = order.launcher.prepare(order.parts, order.logits)
        self._is_ending = False

    def start(self) -> None:
        """Starts it; returns at once on a GPU."""
        self.order.launcher.start(self.launch)
        for one in chain(*self.order.takers):
            one.launched()

    def cancel(self, ids: set[int]) -> None:
        """Ends the parts that these alone want. By any thread, at any time."""
        for number, takers in enumerate(self.order.takers):
            if ids.issuperset(one.id for one in takers):
                self.order.launcher.cancel(self.launch, number)

    def end_early(self) -> None:
        """Ends it for all within a few steps; they go on from there in another."""
        for number in range(0 if self._is_ending else len(self.order.parts)):
            self.order.launcher.cancel(self.launch, number)
        self._is_ending = True

    @property
    def made(self) -> int:
        """Tokens of who has most that have been given."""
        return max(self.launch.given)

    def has_ended(self) -> bool:
        """Waits until it has, or until something is `fresh`."""
        return self.order.launcher.wait(self.launch)

    def fresh(self) -> list[Event]:
        """What it has made since this was asked last, of who does not wait for logprobs."""
        seconds, events = self.launch.seconds, list[Event]()
        found = self.order.launcher.fresh(self.launch)
        if self.order.purpose is Purpose.DRAFT:
            return []
        for number, (part, takers, token_ids) in enumerate(
            zip(self.order.parts, self.order.takers, found, strict=True)
        ):
            for one in takers if token_ids else ():
                if one.request.logprobs is None:
                    events += one.take(part, token_ids, seconds, self.launch.drafted_of(number))
        return events

    def finish(self) -> list[LaunchResult]:
        """What it did, in the order of the parts."""
        return self.order.launcher.finish(self.launch)

    def rest(self, results: Sequence[LaunchResult]) -> tuple[list[Event], list[Untold]]:
        """What was made and not given yet, at its end; all of it where logprobs are wanted, which it is told with."""
        order, events, untold = self.order, list[Event](), list[Untold]()
        if order.purpose is Purpose.DRAFT:
            for one in chain(*order.takers):
                one.wait(self.launch.seconds)
            return [], []
        for number, (part, takers, result) in enumerate(zip(order.parts, order.takers, results, strict=True)):
            others = result.token_ids[self.launch.given_of(number) :]
            for one in takers:
                if (most := one.request.logprobs) is None or order.logits is None or not part.samples:
                    events += one.take(part, others, result.seconds, result.drafted, result.has_failed)
                else:
                    told = one.take(part, result.token_ids, result.seconds, result.drafted, result.has_failed)
                    last = len(part.inputs) - 1
                    tokens = range(last, last + len(result.token_ids))
                    untold.append(Untold(told, [*order.launcher.logits_after(self.launch, number, tokens)], most))
        self._judge_prompts()
        return events, untold

    def _judge_prompts(self) -> None:
        """What the ids of prompts were worth by its logits, where that is wanted."""
        order = self.order
        for number, (part, takers) in enumerate(zip(order.parts, order.takers, strict=True)):
            first = takers[0]
            if (
                order.logits is not None
                and (most := first.request.prompt_logprobs) is not None
                and first.reads_logprobs
            ):
                judged = part.inputs[1:] if order.judged is None else order.judged
                rows = order.launcher.logits_after(self.launch, number, range(len(judged)))
                first.prompt_logprobs += map(token_logprobs, rows, judged, repeat(most))
