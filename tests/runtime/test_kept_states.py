"""What sequences remember is kept where others may begin: engines over a device whose launches ask of each state that
it is of just the tokens that its sequence has cached, whoever computed them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from engine_rig import Rig, alone, made_by
from fake_kernel import FakeBuffer, FakeDevice

from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.queues import same_tokens
from cheetah.runtime.engine.requests import Made, Request
from cheetah.runtime.engine.states import StatePool
from tests.tiers import tiered

PAGE = 16
TEXT = tuple(random.Random(5).choices(range(64), k=90))


class RememberingDevice(FakeDevice):
    """Lays in each sequence's state how many tokens it is of, and a checksum of their keys and values in layer 0. read:
    of every launch, how many tokens its sequences had, and where it left them."""

    states: FakeBuffer
    slots: FakeBuffer

    def __init__(self) -> None:
        super().__init__()
        self.read: list[list[tuple[int, int]]] = []

    def launch(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        states = self.states.view(np.uint32, (self.states.nbytes // 8, 2))
        super().launch(kernel, arguments)
        sequences, done = self.launches[-1]["sequences"], int(arguments["status"].view(np.int32, (8,))[0])
        plan, slots = kernel.manifest.plan, self.slots.view(np.int32, len(sequences))
        assert len(set(slots.tolist())) == len(slots), "two sequences of a launch have one state"
        self.read.append([])
        for row, (sequence, slot) in enumerate(zip(sequences, slots, strict=True)):
            if sequence.length:
                assert states[slot].tolist() == self._of(plan, arguments, row, sequence.length), "another state"
            end = sequence.length + self._counted(plan, arguments, row, sequence, done)
            states[slot] = self._of(plan, arguments, row, end)
            self.read[-1].append((sequence.length, end))

    def _of(self, plan: Mapping[str, int], arguments: Mapping[str, Any], row: int, tokens: int) -> list[int]:
        pages = arguments["page_table"].view(np.int32, (row + 1, -(-plan["max_context"] // plan["page_size"])))[row]
        kv, count = arguments["kv"], int(arguments["kv_pages"])
        layers = self._model.config.layers  # type: ignore[union-attr]
        layer = kv.data[: kv.nbytes // layers].reshape(count, 2, -1, plan["page_size"], self._head_bytes)
        used = [layer[page] for page in pages[: -(-tokens // plan["page_size"])]]
        keys = np.moveaxis(np.concatenate(used, axis=2), 2, 0)[:tokens]
        return [tokens, crc32(np.ascontiguousarray(keys))]

    @property
    def _head_bytes(self) -> int:
        return 2 * self._model.config.head_dim  # type: ignore[union-attr]

    @staticmethod
    def _counted(plan: Mapping[str, int], arguments: Mapping[str, Any], row: int, sequence: Any, done: int) -> int:
        """Tokens of a launch that count: what follows a stop id is computed for nobody."""
        tokens = arguments["tokens"].view(np.int32, (row + 1, plan["max_steps"] * plan["tokens"] + 1))[row]
        stops = arguments["stop_ids"].view(np.int32, arguments["stop_ids"].nbytes // 4)
        stops = set(stops[sequence.stop_first :][: sequence.stop_count].tolist())
        reached = min(done * sequence.per_step, sequence.total)
        ends = (at for at in range(sequence.given, reached + 1) if int(tokens[at]) in stops)
        return next(ends, reached)


class RememberingRig(Rig):
    """An engine of three sequences, whose states are `kept` more for prompts that begin alike."""

    device: RememberingDevice

    def __init__(self, kept: int, pages: int = 40, **more: Any) -> None:
        options = {"batch": 3, "tokens": 4, "launch_steps": 8, "page_size": PAGE, **more}
        super().__init__(pages, caches=True, device=RememberingDevice(), **options)
        launcher, count = self.engine.launcher, 4 + kept
        self.pool.states = StatePool(count, kept)
        self.device.states = launcher._buffers["states"] = self.device.allocate(8 * count)
        self.device.slots = launcher._buffers["state_slots"] = self.device.allocate(4 * 3)

    @property
    def states(self) -> StatePool:
        return self.pool.states

    def asked(self, prompt: Sequence[int], tokens: int = 3, count: int = 1, seed: int = 0) -> int:
        """How many tokens of a prompt were cached, with answers as without a cache."""
        request = Request(tuple(prompt), tokens, Sampling(1.1, seed), count=count)
        ids = self.engine.add(request)
        events = self.run()
        found = made_by(events)
        assert [found[id] for id in ids] == [alone(request, index) for index in range(count)]
        return next(event.timings.cached_tokens for event in events if isinstance(event, Made))


@pytest.mark.parametrize("kv_chunk", [None, 16])
def test_a_prompt_begins_where_the_state_of_the_one_before_was_kept(kv_chunk: int | None) -> None:
    """Launches end at the last page's end before the last token, where prompts part, and where the next one parts."""
    rig = RememberingRig(4, kv_chunk=kv_chunk)
    assert [rig.asked(TEXT[:50]), rig.asked(TEXT[:50], count=3)] == [0, 48]
    assert [rig.asked(TEXT[:40]), rig.asked(TEXT[:49]), rig.asked(TEXT[:40])] == [0, 48, 32]
    rig = RememberingRig(4, kv_chunk=kv_chunk)
    assert rig.asked(TEXT[:70]) == 0 and rig.asked((*TEXT[:38], *TEXT[50:70])) == 0
    ends = [end for ((begin, end),) in rig.device.read if begin in (32, 48)]
    assert ends[-2:] == [48, 58 - bool(kv_chunk)], "it parts behind two pages, and the last one ends with 48"
    assert [rig.asked((*TEXT[:38], 1, 2, 3)), rig.asked((*TEXT[:38], *TEXT[50:71]))] == [32, 48]


BUGS: dict[str, Any] = {
    "a copy that is not made": lambda self, source, target: None,
    "a copy of another state": lambda self, source, target: NOTE_COPY(self, (source + 1) % self.count, target),
    "a copy the other way": lambda self, source, target: NOTE_COPY(self, target, source),
}
NOTE_COPY = StatePool.note_copy


@pytest.mark.parametrize("bug", BUGS)
def test_a_state_of_other_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Planted: copies of a state that is kept, and of it to who begins there before a launch has made the first."""
    rig = RememberingRig(1)
    rig.asked((1, *TEXT[:30]))
    monkeypatch.setattr(StatePool, "note_copy", BUGS[bug])
    with pytest.raises(AssertionError, match="another state"):
        rig.asked((1, *TEXT[:30]), count=2)


def test_the_next_in_line_begins_where_it_parts_from_who_is_read() -> None:
    rig = RememberingRig(4)
    prompts = [TEXT[:60], (*TEXT[:35], 7, 8, *TEXT[:20]), (*TEXT[:35], 9, *TEXT[:20])]
    ids = [rig.engine.add(Request(prompt, 3, Sampling()))[0] for prompt in prompts]
    events = rig.run()
    cached = {event.id: event.timings.cached_tokens for event in events if isinstance(event, Made)}
    assert [cached[id] for id in ids] == [0, 32, 32]
    assert [made_by(events)[id] for id in ids] == [alone(Request(prompt, 3, Sampling())) for prompt in prompts]


def test_few_tokens_are_worth_no_end_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where passes read prompts. Not at the 32 tokens where two part, nor 16 behind a state that is kept."""
    monkeypatch.setattr("cheetah.runtime.engine.prefill_rules.LEAST_KEPT", 40)
    rig = RememberingRig(4)
    rig.engine._queues.rule = replace(rig.engine._queues.rule, has_passes=True)
    parted = (*TEXT[:38], *TEXT[50:80])
    assert [rig.asked(TEXT[:70]), rig.asked(parted[:58]), rig.asked(parted), rig.asked(parted)] == [0, 0, 48, 48]
    assert rig.states.free == 4 + 4 - 2


def test_turns_of_a_talk_go_on_from_the_last_prompt() -> None:
    rig, talk, found = RememberingRig(2), list(TEXT[:20]), []
    for turn in range(4):
        found.append(rig.asked(talk, tokens=9, seed=turn))
        talk += [*alone(Request(tuple(talk), 9, Sampling(1.1, turn))), 60, 61, turn]
    assert found == [0, 16, 32, 32] and rig.states.free == 4  # prompts of 20, 32, 44 and 56 tokens


def test_states_go_in_order_of_use_with_their_pages_and_by_request() -> None:
    rig = RememberingRig(2)
    first, second, third = ((number, *TEXT[:30]) for number in (1, 2, 3))
    assert [rig.asked(one) for one in (first, second, first, third, first, second)] == [0, 0, 16, 0, 16, 0]
    rig.engine.reset_prefixes()
    assert rig.states.free == rig.states.count and rig.asked(first) == 0
    pool = rig.pool
    pool.give_back(pool.take(pool.available_pages))
    assert rig.states.free == rig.states.count and rig.asked(first) == 0


def test_who_gave_its_pages_back_goes_on_from_the_state_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock decides who lacks pages when."""
    monkeypatch.setattr("cheetah.runtime.engine.scheduler.LAUNCH_SECONDS", 0.0)
    rig = RememberingRig(3, pages=9, launch_steps=1)
    requests = [Request((number + 1, *TEXT[:36]), 40, Sampling(1.1, number)) for number in range(3)]
    ids = [rig.engine.add(request)[0] for request in requests]
    found = made_by(rig.run())
    assert [found[id] for id in ids] == [alone(request) for request in requests]
    assert rig.engine.load().preemptions >= 1
    begun = [start for launch in rig.device.read for start, _ in launch]
    assert begun.count(32) > 3, "one began again from what was kept of its prompt"


def test_no_more_prompts_are_embedded_together_than_there_are_states() -> None:
    rig = RememberingRig(1)
    engine, prompts = rig.engine, [TEXT[:9]] * 3
    engine._passes = [SimpleNamespace(fitting=lambda starts, lengths, most: lengths, tokens=64)]  # type: ignore
    assert [(engine._fit_for_embedding(prompts), rig.states.take())[0] for _ in range(5)] == [3, 3, 3, 2, 1]


def test_what_was_no_number_is_kept_for_nobody() -> None:
    rig = RememberingRig(2)
    rig.engine.add(Request(TEXT[:40], 3, Sampling(allowed=())))
    rig.run()
    assert rig.states.free == rig.states.count and rig.asked(TEXT[:40]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", tiered(range(20), range(1, 20)))
@pytest.mark.parametrize("kv_chunk", [None, 16])
def test_random_requests_make_what_they_make_alone(kv_chunk: int | None, seed: int) -> None:
    """Prompts that begin alike, several answers, few pages, few states, and who is cancelled."""
    draw = random.Random(seed)
    rig = RememberingRig(draw.choice([1, 2, 5]), pages=draw.choice([9, 14]), kv_chunk=kv_chunk, chunk_tokens=8)
    requests: dict[int, tuple[Request, int]] = {}
    events = []
    for number in range(14):
        prompt = (draw.randrange(2), *TEXT[: draw.randrange(60)], draw.randrange(3), *TEXT[: draw.randrange(20)])
        request = Request(prompt, draw.randint(1, 30), Sampling(1.1, number, (3, 9)), count=draw.choice([1, 1, 3]))
        requests |= {id: (request, index) for index, id in enumerate(rig.engine.add(request))}
        for _ in range(draw.randrange(5)):
            events += rig.engine.step()
        if draw.random() < 0.2:
            rig.engine.abort([draw.choice([*requests])])
    events += rig.run()
    found: dict[int, tuple[int, ...]] = {}
    for event in events:
        assert isinstance(event, Made), event
        found[event.id] = found.get(event.id, ()) + event.token_ids
    for id, ids in found.items():
        expected = alone(*requests[id])
        ends = [at + 1 for at, token in enumerate(expected) if token in (3, 9)]
        assert ids == expected[: min(len(ids), *ends, len(expected))], id
    rig.engine.reset_prefixes()
    assert rig.states.free == rig.states.count and rig.pool.free_pages == rig.pool.pages


def test_a_prefix_ends_where_a_state_is_kept() -> None:
    """The bookkeeping by itself: copies in order, none for who went before it was made."""
    states = StatePool(4, kept=2)
    pool = PagePool(12, states=states)
    cache = PrefixCache(pool, 2)
    one = CachedSequence(pool, 2, 100)
    one.reserve(6)
    one.length = 6
    cache.insert(range(6), one.pages)
    assert cache.lookup(range(9)) == ([], 0) and cache.parting([0, 1, 2, 3, 9, 9]) == 4 and not cache.parting(range(9))
    cache.keep_state(range(4), one.state or 0)
    cache.keep_state(range(4), one.state or 0)  # there is one
    cache.keep_state(range(3), one.state or 0)  # no whole pages
    assert states.free == 2 and cache.known(range(9)) == 4
    pages, tokens = cache.lookup(range(9))
    other = CachedSequence(pool, 2, 100)
    other.adopt(pages, tokens, cache.state_behind(pages))
    assert states.take_copies() == [(0, 1), (1, 2)] and (other.pages, other.length) == (one.pages[:2], 4)
    cache.keep_state(range(6), one.state or 0)
    cache.keep_state(range(2), one.state or 0)  # in the place of that of four tokens, which was used longer ago
    assert cache.known(range(9)) == 6 and cache.known(range(5)) == 2 and states.free == 0
    cache.forget(one.pages[1])
    assert states.free == 1 and states.take_copies() == [(0, 1)]
    for sequence in (one, other):
        sequence.clear()
    cache.clear()
    assert states.free == 4 and pool.free_pages == 12


def test_how_many_tokens_two_begin_with() -> None:
    ids = list(range(600))
    for at in (0, 1, 255, 256, 257, 599):
        assert same_tokens(ids, [*ids[:at], -1, *ids[at + 1 :]]) == at
    assert same_tokens(ids, ids[:300]) == 300 and same_tokens([], ids) == 0
