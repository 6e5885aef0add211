"""Tokens and orders in the middle of a launch: a device that lets tokens go one by one, as a GPU does."""

from __future__ import annotations

from typing import Any

import pytest
from engine_rig import SlowDevice
from fake_kernel import generate_kernel
from tiny_models import tiny_weights

from cheetah.models.dense.reference import Reference
from cheetah.models.rounding import round_to_bf16
from cheetah.models.sampling import Penalties
from cheetah.runtime.assembly.assemble import assemble
from cheetah.runtime.engine.engine import Engine
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.requests import Event, Made, Request
from tests.meant import meant


def engine(**overrides: Any) -> Engine:
    assembly = assemble(
        tiny_weights(), device=SlowDevice(), overrides=overrides, generate_kernel=generate_kernel, quiet=True
    )
    return Engine(assembly.launcher, logits=assembly.hosts_logits_buffer)


def alone(request: Request) -> list[int]:
    return meant(Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16), request)


def run(engine: Engine) -> list[list[Event]]:
    """The events of every step until there is nothing to do."""
    return list(iter(lambda: engine.step() if not engine.is_idle else None, None))


def test_each_step_gives_the_next_token_of_each() -> None:
    one = engine(batch=2)
    requests = [Request((5, 17, 250), 9, Sampling(0.9, 4)), Request((7, 81), 6, Sampling())]
    ids = [id for request in requests for id in one.add(request)]
    steps = run(one)
    for id, request in zip(ids, requests, strict=True):
        pieces = [event.token_ids for events in steps for event in events if isinstance(event, Made) and event.id == id]
        assert [token for piece in pieces for token in piece] == alone(request)
        assert [len(piece) for piece in pieces] == [1] * request.max_tokens
    assert one.launcher.cache.pool.free_pages == one.launcher.cache.pool.pages


def test_who_wants_logprobs_has_its_tokens_at_the_end_of_a_launch_and_the_others_as_before() -> None:
    one = engine(batch=2)
    plain, other = Request((5, 17, 250), 9, Sampling()), Request((7, 81), 9, Sampling(), logprobs=1)
    (first,), (second,) = one.add(plain), one.add(other)
    events, told = [], []
    while not one.is_idle:
        for event in one.step():
            assert isinstance(event, Made)
            events.append(event)
            told += [(one._running is not None, event.finish_reason)] if event.id == second else []
    assert told[0] == (True, None), "while the next launch runs"
    assert told[-1] == (False, "length"), "or where there is none"
    assert [len(event.token_ids) for event in events if event.id == first] == [1] * 9
    mine = [event for event in events if event.id == second]
    assert [token for event in mine for token in event.token_ids] == alone(other) and len(mine) < 9
    assert all(len(event.token_ids) == len(event.logprobs or ()) for event in mine)


def test_who_is_aborted_ends_in_the_middle_of_a_launch_and_the_others_go_on() -> None:
    one = engine(batch=2)
    kept = Request((5, 17, 250), 40, Sampling())
    (first,), (second,) = one.add(kept), one.add(Request((7, 81), 40, Sampling()))
    events = [event for _ in range(12) for event in one.step()]
    launches = len(one.launcher._device.launches)
    one.abort([second])
    assert not one.is_idle
    late = [event for events in run(one) for event in events]
    assert all(event.id == first for event in late[3:]), "more than the tokens that were on their way"
    mine = [event for event in [*events, *late] if event.id == first and isinstance(event, Made)]
    made = [token for event in mine for token in event.token_ids]
    assert made == alone(kept) and len(one.launcher._device.launches) >= launches
    assert one.launcher.cache.pool.free_pages == one.launcher.cache.pool.pages


def test_orders_wait_for_the_end_of_a_launch() -> None:
    one = engine(batch=2)
    one.add(Request((5, 17), 30, Sampling()))
    while not one._running:
        one.step()
    (other,) = one.add(Request((9,), 2, Sampling()))
    one.abort([other])
    assert one.load().waiting == 0 and len(one._changes) == 2
    assert not any(event.id == other for events in run(one) for event in events)


def in_a_long_launch(request: Request, step_s: float, **overrides: Any) -> tuple[Engine, list[Event]]:
    """An engine in the middle of a launch of all that is left of a request, of steps of so many seconds by its pace."""
    one = engine(**overrides)
    one._scheduler.decode_time.steps = lambda wanted: wanted  # type: ignore[method-assign]
    one.add(request)
    events = [event for _ in range(12) for event in one.step()]
    one._scheduler.decode_time.note(1, step_s)
    assert one._running is not None and max(one._running.launch.given) > 4
    return one, events


def steps_left(one: Engine) -> tuple[int, list[Event]]:
    """How many steps the launch under way had still to make when it ended, and what it made."""
    running, events = one._running, list[Event]()
    assert running is not None
    while one._running is running:
        events += one.step()
    return running.launch.placed[0].steps - running.launch.given[0], events


@pytest.mark.slow
def test_a_launch_makes_way_for_who_can_begin() -> None:
    asked = [Request((5, 17, 250), 60, Sampling(0.9, 4, penalties=Penalties(1.3, 0.5, 0.25)))]
    asked.append(Request((7, 81), 50, Sampling()))
    one, events = in_a_long_launch(asked[0], 0.01, batch=3, kv_chunk=64)
    one.add(asked[1])
    left, more = steps_left(one)
    assert left > 30
    events += [*more, *(event for events in run(one) for event in events)]
    for id, request in enumerate(asked):
        mine = [event for event in events if event.id == id and isinstance(event, Made)]
        assert [token for event in mine for token in event.token_ids] == alone(request)
    assert one.launcher.cache.pool.free_pages == one.launcher.cache.pool.pages


def test_a_launch_ends_for_nobody_who_cannot_begin_or_need_not_wait_long() -> None:
    for batch, step_s in ((1, 0.01), (2, 1e-5)):
        one, _ = in_a_long_launch(Request((5, 17, 250), 40, Sampling()), step_s, batch=batch)
        one.add(Request((7, 81), 3, Sampling()))
        assert steps_left(one)[0] == 0
