"""What a request is told does not depend on how many pages there are, nor on when a launch ends: with pages for one
completion all are told what they are told with pages for all, first come first served.

Bugs are planted in what the engine believes of those that gave way, and each must be seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from engine_rig import Rig, SlowDevice
from tiny_models import tiny_weights

from cheetah.models.dense.reference import Reference
from cheetah.models.rounding import round_to_bf16
from cheetah.models.sampling import Penalties
from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.launches import Launch, LaunchResult
from cheetah.runtime.engine.queues import Queues
from cheetah.runtime.engine.request_rows import RequestRows
from cheetah.runtime.engine.requests import Made, Request
from cheetah.runtime.engine.step_launches import StepLaunches
from cheetah.runtime.engine.step_time import StepTime
from tests.meant import meant

pytestmark = pytest.mark.slow

PENALTIES = Penalties(1.5, 2.0, 2.0)
REQUESTS = (
    Request((5, 17, 250), 33, Sampling(0.9, 4, penalties=PENALTIES), logprobs=1),
    Request(tuple(range(40, 64)), 6, Sampling(), prompt_logprobs=1),
    Request((7, 81), 21, Sampling(1.1, 3), count=2),
    Request((9, 3), 16, Sampling(0.7, 5, penalties=PENALTIES)),
)
SETUPS = ((12, 9), (6, 12))
"""Most steps of a launch, and pages of 4 tokens: the first request needs 9 of them for itself."""


@pytest.fixture(autouse=True)
def whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cheetah.runtime.engine.scheduler.LAUNCH_SECONDS", 1e9)


class SteadyTime(StepTime):
    """Steps that always take so long that a launch makes way for who comes, and launches of all steps."""

    step_s = 0.05  # type: ignore[assignment]

    def steps(self, wanted: int) -> int:
        return min(wanted, self.max_steps)


def told(steps: int, pages: int | None) -> tuple[dict[int, list[Any]], int]:
    """(of each completion ids, logprobs, prompt_logprobs and why it ended; preemptions), each request coming while
    those before it run."""
    rig = Rig(pages, steps, 4, device=SlowDevice(), batch=3, tokens=4, kv_chunk=64, page_size=4)
    engine = rig.engine
    engine._scheduler.decode_time = SteadyTime(steps)
    found: dict[int, list[Any]] = defaultdict(lambda: [(), (), None, None])
    coming, turns = list(REQUESTS), 0
    while coming or not engine.is_idle:
        if turns % 5 == 0 and coming:
            engine.add(coming.pop(0))
        turns += 1
        for event in engine.step():
            assert isinstance(event, Made), event
            if event.id not in found:
                assert not [one for one in engine._queues.waiting if one.id < event.id], "first come first served"
            one = found[event.id]
            one[0] += event.token_ids
            one[1] += event.logprobs or ()
            one[2] = event.prompt_logprobs or one[2]
            one[3] = event.finish_reason
    assert rig.pool.available_pages == rig.pool.pages
    return dict(found), engine.load().preemptions


@cache
def right() -> dict[int, list[Any]]:
    """What is told with pages for all; its ids are those that the requests mean."""
    model = tiny_weights()
    wanted = [
        tuple(meant(Reference(model.config, model.tensors, round_to_bf16), request, index))
        for request in REQUESTS
        for index in range(request.count)
    ]
    found, preemptions = told(12, None)
    assert [found[id][0] for id in sorted(found)] == wanted and preemptions == 0
    return found


@pytest.mark.parametrize(("steps", "pages"), SETUPS)
def test_a_request_is_told_the_same_with_pages_for_one_as_with_pages_for_all(steps: int, pages: int) -> None:
    found, preemptions = told(steps, pages)
    assert found == right() and preemptions


def goes_to_the_end(patch: pytest.MonkeyPatch) -> None:
    """Who gave its pages back is behind all who came later."""

    def preempt(queues: Queues, completion: Completion) -> None:
        queues._preemptions += 1
        completion.preemptions += 1
        queues._leave(completion)
        queues.waiting.append(completion)

    patch.setattr(Queues, "_preempt", preempt)


def believes_counts(patch: pytest.MonkeyPatch) -> None:
    """A launch that ended early is believed to have counted what it is known to have made."""
    forgotten: list[object] = []
    plain = StepLaunches.finish

    def finish(launcher: StepLaunches, launch: Launch) -> list[LaunchResult]:
        forgotten.clear()
        results = plain(launcher, launch)
        for number, part in zip(launch.order, launch.placed, strict=True):
            if part.cache in forgotten:
                launcher._rows.note(part.cache, results[number].token_ids)
        return results

    patch.setattr(StepLaunches, "finish", finish)
    patch.setattr(RequestRows, "forget", lambda rows, owner=None: forgotten.append(owner))


def keeps_logprobs(patch: pytest.MonkeyPatch) -> None:
    """A prompt that is read again is judged again behind what is known of it."""

    class Kept(list[Any]):
        def __delitem__(self, place: Any) -> None:
            pass

    plain = Completion.__init__

    def init(one: Completion, *arguments: Any) -> None:
        plain(one, *arguments)
        one.prompt_logprobs = Kept()

    patch.setattr(Completion, "__init__", init)


def forgets_the_seed(patch: pytest.MonkeyPatch) -> None:
    """A second completion that begins by itself, having given its pages back, draws as the first."""
    plain = Queues._preempt

    def preempt(queues: Queues, completion: Completion) -> None:
        completion.sampling = completion.request.sampling
        plain(queues, completion)

    patch.setattr(Queues, "_preempt", preempt)


@pytest.mark.parametrize(
    ("plant", "setup"), [(goes_to_the_end, 1), (believes_counts, 0), (keeps_logprobs, 1), (forgets_the_seed, 0)]
)
def test_a_planted_bug_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], setup: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = right()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        assert told(*SETUPS[setup])[0] == wanted
