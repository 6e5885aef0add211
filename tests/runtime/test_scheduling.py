"""Who gets launches and pages: prompts in chunks, who comes first, who gives way, and that nothing is lost by it."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from engine_rig import Rig, alone, made_by

from cheetah.runtime.assembly.assemble import assemble
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.engine.engine import Engine
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.launcher import Launcher, Sampling
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.requests import Failed, Made, Request

SOAKED = int(os.environ.get("CHEETAH_SOAK", "0"))
LONG = tuple(range(40, 100))


@pytest.mark.slow
def test_a_long_prompt_is_read_in_chunks_between_launches_of_the_others() -> None:
    rig = Rig(batch=2, tokens=4, launch_steps=8, chunk_tokens=8)
    rig.engine.add(Request((1, 2), 60, Sampling()))
    rig.engine.step()
    rig.device.launches.clear()
    rig.engine.add(Request(LONG, 1, Sampling()))
    while len(rig.device.launches) < 12:
        rig.engine.step()
    read = [launch for launch in rig.device.launches if launch["sequences"][0].per_step > 1]
    assert [launch["sequences"][0].total for launch in read] == [8] * 6
    kinds = [launch["sequences"][0].per_step > 1 for launch in rig.device.launches]
    assert kinds == [True, False] * 6


def test_without_chunks_the_others_wait_for_the_prompt() -> None:
    rig = Rig(batch=2, tokens=4, launch_steps=4, chunk_tokens=0)
    rig.engine.add(Request((1, 2), 60, Sampling()))
    rig.engine.step()
    rig.device.launches.clear()
    rig.engine.add(Request(LONG, 1, Sampling()))
    for _ in range(4):
        rig.engine.step()
    assert [launch["sequences"][0].total for launch in rig.device.launches] == [16, 16, 16, 12]


def test_places_fill_by_one_launch_of_the_others_for_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every launch takes longer than they are to wait: that of first tokens is their turn."""
    monkeypatch.setattr("cheetah.runtime.engine.scheduler.LAUNCH_SECONDS", 0.0)
    rig = Rig(batch=4, tokens=4, kv_chunk=16, launch_steps=1)
    for number in range(5):
        rig.engine.add(Request((number + 1, 2, 3), 40, Sampling()))
    while len(rig.device.launches) < 9:
        rig.engine.step()
    assert rig.launched == [1, 1, 1, 2, 1, 3, 1, 4, 4]


def test_first_come_first_served() -> None:
    rig = Rig(batch=2, launch_steps=4)
    ids = [rig.engine.add(Request((number + 1, 2), 6, Sampling()))[0] for number in range(7)]
    assert list(made_by(rig.run())) == ids


@pytest.mark.slow
@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("kv_chunk", [None, 64])
def test_who_came_last_gives_its_pages_to_those_before_and_loses_nothing(kv_chunk: int | None, caches: bool) -> None:
    """Each needs 5 pages of the 9 in the end, and 1 or 2 in the beginning, so all three begin."""
    rig = Rig(pages=9, batch=3, tokens=4, launch_steps=8, kv_chunk=kv_chunk, caches=caches)
    requests = [Request((number + 1, 5), 74, Sampling(1.1, number)) for number in range(3)]
    ids = [rig.engine.add(request)[0] for request in requests]
    found = made_by(rig.run())
    assert max(rig.launched) == 3 and rig.engine.load().preemptions >= 1
    assert [found[id] for id in ids] == [alone(request) for request in requests]
    assert rig.pool.available_pages == rig.pool.pages


@pytest.mark.slow
def test_completions_of_one_prompt_give_way_to_each_other() -> None:
    rig = Rig(pages=7, batch=3, tokens=4, launch_steps=8)
    request = Request(LONG[:20], 60, Sampling(1.1, 4), count=3)
    ids = rig.engine.add(request)
    found = made_by(rig.run())
    assert rig.engine.load().preemptions >= 1
    assert [found[id] for id in ids] == [alone(request, index) for index in range(3)]
    assert rig.pool.available_pages == rig.pool.pages


@pytest.mark.slow
def test_an_old_completion_that_came_back_is_before_younger_ones() -> None:
    rig = Rig(pages=6, batch=2, launch_steps=8)
    first, second, third = (Request((number + 1, 5), 60, Sampling()) for number in range(3))
    ids = [rig.engine.add(request)[0] for request in (first, second, third)]
    ended = [event.id for event in rig.run() if isinstance(event, Made) and event.finish_reason]
    assert ended == ids and rig.engine.load().preemptions >= 1


def test_who_is_alone_has_a_kernel_of_its_own_over_the_same_pages() -> None:
    rig = Rig(batch=3, launch_steps=4, solo=True)
    solo = rig.engine._scheduler._solo
    assert solo.tokens == 1 and rig.engine.launcher.tokens == 4
    alone_launches: list[int] = []
    prepare = solo.prepare
    solo.prepare = lambda parts, *more: (alone_launches.append(len(parts)), prepare(parts, *more))[1]  # type: ignore
    requests = [Request((1, 2, 3), 40, Sampling(1.1, 5)), Request((4, 5), 9, Sampling(1.1, 6))]
    first = rig.engine.add(requests[0])[0]
    events = [event for _ in range(3) for event in rig.engine.step()]
    second = rig.engine.add(requests[1])[0]
    found = made_by([*events, *rig.run()])
    assert [found[first], found[second]] == [alone(request) for request in requests]
    assert set(alone_launches) == {1} and alone_launches and max(rig.launched) == 2
    assert rig.pool.available_pages == rig.pool.pages


class Soak:
    """Random requests at random times, some of which are given up, over few pages; what is left is what each makes
    alone."""

    def __init__(self, engine: Engine, vocab: int, seed: int):
        self.engine, self.draw, self.vocab = engine, random.Random(seed), vocab
        self.asked: dict[int, tuple[Request, int]] = {}
        self.ids: dict[int, tuple[int, ...]] = defaultdict(tuple)
        self.ended: set[int] = set()
        self.aborted: set[int] = set()

    def run(self, requests: int) -> None:
        """What was asked before is not given up."""
        waiting, kept = requests, set(self.asked)
        while waiting or not self.engine.is_idle:
            while waiting and self.draw.random() < 0.6:
                self.ask(self._request())
                waiting -= 1
            if self.draw.random() < 0.1 and (open_ids := [*self.asked.keys() - self.ended - self.aborted - kept]):
                gone = self.draw.choice(open_ids)
                self.engine.abort([gone])
                self.aborted.add(gone)
            for event in self.engine.step():
                assert not isinstance(event, Failed) and event.id not in self.ended | self.aborted
                self.ids[event.id] += event.token_ids
                if event.finish_reason is not None:
                    self.ended.add(event.id)
        assert self.ended | self.aborted == self.asked.keys()

    def ask(self, request: Request) -> None:
        for index, id in enumerate(self.engine.add(request)):
            self.asked[id] = (request, index)

    def _request(self) -> Request:
        draw = self.draw
        start = draw.randrange(3)  # prompts begin alike
        prompt = tuple((start + place * 7) % self.vocab for place in range(draw.choice([1, 2, 5, 17, 33, 50])))
        sampling = Sampling(draw.choice([0.0, 1.0]), draw.randrange(3), draw.choice([(), (5, 6, 7)]))
        return Request(prompt, draw.choice([1, 2, 9, 30]), sampling, count=draw.choice([1, 1, 1, 2]))

    def check(self, engine: Engine) -> None:
        """Every completion that was not given up, made once more alone by another engine."""
        known: dict[tuple[Request, int], tuple[int, ...]] = {}
        for id in sorted(self.ended):
            request, index = self.asked[id]
            if (request, index) not in known:
                ids = engine.add(request)
                events = [event for _ in iter(lambda: engine.is_idle, True) for event in engine.step()]
                for number, name in enumerate(ids):
                    made = [e.token_ids for e in events if isinstance(e, Made) and e.id == name]
                    known[request, number] = tuple(token for part in made for token in part)
            assert self.ids[id] == known[request, index], (request, index)


def small_pool(launcher: Launcher, pages: int) -> PagePool:
    launcher.cache = CachedSequence(PagePool(pages), launcher.cache.page_size, launcher.cache.context)
    return launcher.cache.pool


@pytest.mark.slow
def test_a_soak_on_the_reference() -> None:
    rig = Rig(pages=8, batch=4, tokens=4, launch_steps=6, kv_chunk=64, caches=True)
    soak = Soak(rig.engine, 300, seed=SOAKED)
    soak.run(SOAKED or 20)
    assert rig.engine.load().preemptions and rig.pool.available_pages == rig.pool.pages
    soak.check(Rig(batch=4, tokens=4, launch_steps=6, kv_chunk=64).engine)


@contextmanager
def emulated_demo() -> Iterator[Any]:
    overrides = {"batch": 4, "kv_chunk": 64, "max_context": 96}
    checkpoint = open_checkpoint("demo")
    assembly = assemble(checkpoint, device="emulator", gpu="emulator-2", overrides=overrides, quiet=True)
    try:
        yield assembly
    finally:
        assembly.close()


@pytest.mark.slow
@pytest.mark.compiler
def test_a_soak_in_the_emulator() -> None:
    with emulated_demo() as assembly:
        launcher = assembly.launcher
        alone_engine = Engine(launcher)
        whole = launcher.cache
        pool = small_pool(launcher, 6)
        engine = Engine(launcher, 2, PrefixCache(pool, launcher.cache.page_size))
        soak = Soak(engine, 512, seed=SOAKED)
        for number in range(3):  # of 2 pages each in the beginning, and 3 in the end
            soak.ask(Request(tuple(range(number + 2, number + 19)), 18, Sampling(1.0, number)))
        soak.run(SOAKED or 2)
        assert engine.load().preemptions and pool.available_pages == pool.pages
        launcher.cache = whole
        soak.check(alone_engine)


def test_what_decoding_reads_is_counted() -> None:
    """Weights once a step, keys and values of what is cached."""
    rig, request = Rig(batch=2, launch_steps=4), Request((1, 2, 3), 20, Sampling())
    step_bytes = rig.engine.launcher._step_bytes
    rig.engine.add(request)
    rig.run()
    load = rig.engine.load()
    assert load.decoded.steps == 19 and load.latest.steps <= 4 and load.decoded.seconds > 0
    cached = load.decoded.nbytes - load.decoded.steps * step_bytes["weights"]
    assert 19 * 3 < cached / step_bytes["kv_per_token"] < 19 * 22
    alone = load.decoded.nbytes
    for _ in range(2):
        rig.engine.add(request)
    rig.run()
    both = rig.engine.load().decoded.nbytes - alone
    assert alone + cached <= both < 1.5 * alone, "weights are read once for both"
