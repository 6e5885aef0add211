"""The engine by its events, on the device that runs the reference: who is begun, what each step makes, how it ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from engine_rig import Rig, alone, made_by

from cheetah.errors import CheetahError
from cheetah.runtime.device.interface import LaunchCancelled
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.requests import Event, Failed, Made, Request
from tests.tiers import tiered

SHORT, LONG = (5, 17, 250), tuple(range(40, 80))


def test_every_completion_has_an_id_and_its_events() -> None:
    rig = Rig(batch=3, launch_steps=4)
    requests = [Request(SHORT, 9, Sampling(1.2, 3), count=2), Request((1,), 5, Sampling(1.2, 4), count=3)]
    ids = [rig.engine.add(request) for request in requests]
    assert len({*ids[0], *ids[1]}) == 5
    found = made_by(rig.run())
    assert found == {
        id: alone(request, index)
        for request, several in zip(requests, ids, strict=True)
        for index, id in enumerate(several)
    }
    assert rig.pool.free_pages == rig.pool.pages and max(rig.launched) == 3


def test_a_step_makes_one_launch_or_none() -> None:
    rig = Rig(batch=2, launch_steps=2)
    assert rig.engine.is_idle and rig.engine.step() == []
    for prompt in (LONG, SHORT):
        rig.engine.add(Request(prompt, 7, Sampling(), count=2))
    while not rig.engine.is_idle:
        before = len(rig.device.launches)
        rig.engine.step()
        assert len(rig.device.launches) == before + 1


def test_how_a_completion_ended_stands_in_its_last_event() -> None:
    rig = Rig()
    plain = alone(Request(SHORT, 9, Sampling()))
    for stops, reason in (((plain[4],), "stop"), ((), "length")):
        rig.engine.add(Request(SHORT, 9, Sampling(stop_ids=stops)))
        last = rig.run()[-1]
        assert isinstance(last, Made) and last.finish_reason == reason
        assert not stops or last.token_ids[-1] == plain[4]
        assert last.timings.prompt_tokens == 3 and last.timings.prefill_s > 0


def test_what_can_never_fit_is_refused_when_it_is_added() -> None:
    rig = Rig(pages=3, batch=2)
    for request, message in (
        (Request(LONG, 200, Sampling()), "do not fit the context"),
        (Request(SHORT, 60, Sampling()), "need 4 pages of the KV cache, there are 3: use a smaller max_tokens"),
    ):
        with pytest.raises(CheetahError, match=message):
            rig.engine.add(request)
    assert rig.engine.is_idle and rig.device.launches == []


def test_a_completion_that_finds_no_pages_fails_alone() -> None:
    rig = Rig(pages=3, batch=2)
    rig.engine.launcher.cache.reserve(17)  # somebody else's
    (first,) = rig.engine.add(Request(SHORT, 20, Sampling()))
    (second,) = rig.engine.add(Request(SHORT, 9, Sampling()))
    failed, *rest = rig.run()
    assert isinstance(failed, Failed) and failed.id == first and "2 pages of the KV cache are needed" in failed.message
    assert made_by(rest) == {second: alone(Request(SHORT, 9, Sampling()))}


@pytest.mark.slow
@pytest.mark.parametrize("steps", tiered(range(6), [0, 2, 4]))
def test_an_aborted_completion_leaves_no_trace_wherever_it_is(steps: int) -> None:
    """In line, its prompt half read, or decoding; the first of several that share the reading, or another."""
    for aborted in (0, 1, 3):
        rig = Rig(batch=2, launch_steps=16)
        requests = [Request(LONG, 20, Sampling(1.1, 5), count=2), Request(SHORT, 20, Sampling(1.1, 6), count=2)]
        ids = [id for request in requests for id in rig.engine.add(request)]
        events = [event for _ in range(steps) for event in rig.engine.step()]
        rig.engine.abort([ids[aborted], 12345])
        early = [event for event in events if event.id != ids[aborted]]
        found = made_by(early + rig.run())
        assert found == {id: alone(requests[n // 2], n % 2) for n, id in enumerate(ids) if n != aborted}
        assert rig.pool.free_pages == rig.pool.pages
        rig.engine.abort(ids)  # all have ended


def test_others_make_tokens_while_a_long_prompt_is_read() -> None:
    rig = Rig(batch=2, launch_steps=4)
    (running,) = rig.engine.add(Request(SHORT, 60, Sampling()))
    rig.engine.step()
    rig.engine.add(Request(LONG, 5, Sampling()))  # five launches
    made = [{event.id for event in rig.engine.step()} for _ in range(8)]
    assert made == [set(), {running}] * 4


def test_a_cancelled_launch_changes_nothing() -> None:
    rig = Rig(batch=2, launch_steps=4)
    requests = [Request(LONG, 9, Sampling(1.0, seed)) for seed in range(2)]
    ids = [rig.engine.add(request)[0] for request in requests]
    launch, events = rig.device.launch, list[Event]()

    def cancelled(kernel: Any, arguments: Any) -> None:
        raise LaunchCancelled("the launch was ended early: it was interrupted")

    while not rig.engine.is_idle:
        rig.device.launch = cancelled  # type: ignore[method-assign]
        assert rig.engine.step() == []
        rig.device.launch = launch  # type: ignore[method-assign]
        events += rig.engine.step()
    assert made_by(events) == {id: alone(request) for id, request in zip(ids, requests, strict=True)}
    assert {launch["epoch"] for launch in rig.device.launches} == {1}, "the exchange was not begun afresh"


def test_add_and_abort_do_not_wait_for_a_step_of_another_thread() -> None:
    rig = Rig(batch=2, launch_steps=4)
    (first,) = rig.engine.add(Request(SHORT, 9, Sampling()))
    launch, added = rig.device.launch, list[int]()

    def slow(kernel: Any, arguments: Any) -> None:
        rig.device.launch = launch  # type: ignore[method-assign]
        other = threading.Thread(target=lambda: (added.extend(rig.engine.add(request)), rig.engine.abort([first])))
        other.start()
        other.join(timeout=10)
        assert not other.is_alive(), "the other thread waits for this step"
        launch(kernel, arguments)

    request = Request(LONG, 5, Sampling())
    rig.device.launch = slow  # type: ignore[method-assign]
    rig.engine.step()
    assert made_by(rig.run()) == {added[0]: alone(request)}
    assert rig.pool.free_pages == rig.pool.pages


def test_a_closed_engine_refuses_everything() -> None:
    rig = Rig()
    ids = rig.engine.add(Request(SHORT, 9, Sampling()))
    rig.engine.close()
    for use in (rig.engine.step, lambda: rig.engine.add(Request(SHORT, 9, Sampling()))):
        with pytest.raises(CheetahError, match="this LLM is closed"):
            use()
    rig.engine.abort(ids)
    assert rig.engine.is_idle
