"""What passes between host and kernel in the middle of a launch: tokens as they are made, and orders to end."""

from __future__ import annotations

from functools import cache

import pytest

from cheetah.generate import generate_kernel
from cheetah.models.sampling import Filters
from cheetah.runtime.engine.launcher import Launch, Launcher, LaunchResult, Part, Sampling
from tests.program.rig import Rig, Session, model, random_weights

pytestmark = pytest.mark.compiler

STEPS = 12
SAMPLINGS = (Sampling(), Sampling(1.0, 5, filters=Filters(top_k=5)), Sampling(1.0, 6))


@cache
def rig(sync: str) -> Rig:
    weights = random_weights(model(16, 16, 1, 1, 1, 64, 60))
    return Rig(weights, blocks=3, batch=4, sync=sync, consumer_warps=4, generate=generate_kernel)


def parts(session: Session, inputs: int = 2) -> list[Part]:
    ids = tuple(range(3, 3 + inputs))
    return [Part(session.sequence(), ids, STEPS, sampling) for sampling in SAMPLINGS]


def run(launcher: Launcher, launch: Launch) -> list[LaunchResult]:
    launcher.start(launch)
    assert launcher.wait(launch)
    fresh = launcher.fresh(launch)
    results = launcher.finish(launch)
    assert fresh == [result.token_ids for result in results]
    return results


@pytest.mark.parametrize("sync", ["flags", "barrier"])
@pytest.mark.slow
def test_the_host_has_every_token_and_ends_a_sequence_alone(sync: str) -> None:
    session = rig(sync).session("random", 1)
    plain = run(session.launcher, session.launcher.prepare(parts(session)))
    assert [len(result.token_ids) for result in plain] == [STEPS - 1] * 3
    for number in range(3):
        session = rig(sync).session("random", 2)
        launch = session.launcher.prepare(parts(session))
        session.launcher.cancel(launch, number)
        found = run(session.launcher, launch)
        for other in range(3):
            tokens = plain[other].token_ids
            assert found[other].token_ids == (tokens[:0] if other == number else tokens)
        assert found[0].steps == STEPS


@pytest.mark.slow
def test_a_launch_ends_when_all_are_cancelled_and_a_late_order_means_nothing() -> None:
    session = rig("flags").session()
    launcher, wanted = session.launcher, parts(session)
    first = launcher.prepare(wanted)
    for number in range(3):
        launcher.cancel(first, number)
    assert run(launcher, first)[0].steps == 2
    assert [part.cache.length for part in wanted] == [2, 2, 2]
    for part in wanted:
        part.cache.length = 1  # what nothing has followed is fed once more
    again = launcher.prepare([Part(part.cache, (4,), STEPS - 1, part.sampling) for part in wanted])
    whole = rig("flags").session()
    others = run(whole.launcher, whole.launcher.prepare(parts(whole)))
    assert [result.token_ids for result in run(launcher, again)] == [result.token_ids for result in others]


@pytest.mark.slow
def test_reading_a_prompt_is_cancelled_too() -> None:
    session = rig("flags").session()
    wanted = parts(session, STEPS)
    launch = session.launcher.prepare(wanted)
    for number in range(3):
        session.launcher.cancel(launch, number)
    results = run(session.launcher, launch)
    assert [result.token_ids for result in results] == [()] * 3 and results[0].steps == 2
    assert [part.cache.length for part in wanted] == [2, 2, 2]
