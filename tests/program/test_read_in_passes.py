"""Prompts that an engine reads in passes: which kernel reads how much, beside others, and that the answers stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from cheetah.errors import CheetahError
from cheetah.models.logprobs import TokenLogprobs
from cheetah.models.sampling import sample
from cheetah.plan import PlanError
from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.assembly.memory import MemoryShortage
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.device.emulator import EmulatorDevice
from cheetah.runtime.device.interface import LaunchCancelled
from cheetah.runtime.engine.engine import Engine
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.prefill_rules import SameSteps
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.requests import Made, Request
from cheetah.runtime.sampling import seed_of
from tests.program.rig import emulated_gpu, relative_error, token_ids

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

LENGTHS = (3, 40, 90)
LOGITS_TOLERANCE = 0.05
"""Relative error of the logits of a position between passes and steps, both of which round to bf16."""


@cache
def assembled(passes: bool) -> Assembly:
    return assemble(
        open_checkpoint("demo"),
        device=EmulatorDevice(),
        gpu=emulated_gpu(2),
        overrides={"batch": 4, "max_context": 256, "consumer_warps": 2},
        prompt_passes=passes,
        quiet=True,
    )


class Rig:
    """An engine over the demo model with an empty cache."""

    def __init__(self, passes: bool = True, chunk_tokens: int | None = None):
        ready = assembled(passes)
        old = ready.launcher.cache
        ready.launcher.cache = CachedSequence(PagePool(old.pool.pages), old.page_size, old.context)
        prefixes = PrefixCache(ready.launcher.cache.pool, old.page_size)
        logits = ready.hosts_logits_buffer
        self.engine = Engine(
            ready.launcher, None, prefixes, chunk_tokens=chunk_tokens, passes=ready.passes, logits=logits
        )

    def run(self, until: int | None = None) -> dict[int, tuple[int, ...]]:
        """The ids of every completion; until there are so many of them all, if that is said."""
        found: dict[int, tuple[int, ...]] = {}
        while not self.engine.is_idle and (until is None or sum(map(len, found.values())) < until):
            for event in self.engine.step():
                assert isinstance(event, Made)
                found[event.id] = (*found.get(event.id, ()), *event.token_ids)
        return found


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Of each pass its room, and how many tokens it reads of each prompt."""
    passes: list[tuple[int, ...]] = []
    for one in assembled(True).passes:
        prepare = one.prepare

        def prepare_and_note(parts: Any, logits: Any = None, one: Any = one, prepare: Any = prepare) -> Any:
            passes.append((one.tokens, *(part.total for part in parts)))
            return prepare(parts, logits)

        monkeypatch.setattr(one, "prepare", prepare_and_note)
    yield passes


def request(length: int, count: int = 5) -> Request:
    return Request(tuple(token_ids(length, 500, length)), count, Sampling())


def test_answers_are_those_of_prompts_read_in_steps(noted: list[tuple[int, ...]]) -> None:
    """The demo model is trained: its greedy choices do not turn on a rounding."""
    for length in LENGTHS:
        answers = []
        for passes in (True, False):
            rig = Rig(passes)
            rig.engine.add(request(length))
            answers.append(list(rig.run().values()))
        assert answers[0] == answers[1]
    assert noted == [(64, 40), (256, 90)], "3 tokens are read in steps, 40 in a short pass, 90 in a long one"


def test_a_pass_goes_on_behind_what_is_cached(noted: list[tuple[int, ...]]) -> None:
    rig = Rig()
    for _ in range(2):
        (number,) = rig.engine.add(request(155))
        answer = rig.run()[number]
    assert noted == [(256, 155), (64, 11)], "of the second prompt all whole pages were there"
    longer = Request((*request(155).prompt_ids, *answer, *token_ids(60, 500, 1)), 3, Sampling())
    rig.engine.add(longer)
    rig.run()
    page = assembled(True).launcher.cache.page_size
    assert noted[2:] == [(256, 155 + 5 + 60 - 159 // page * page)]


def test_prompts_that_wait_fill_a_pass_in_the_order_in_which_they_came(noted: list[tuple[int, ...]]) -> None:
    """What does not fit is read by the next, and the first tokens behind those that were read come together."""
    lengths, answers = (60, 3, 40, 151), []  # prompts whose answers turn on no rounding
    for passes in (True, False):
        rig = Rig(passes, chunk_tokens=0)
        ids = [rig.engine.add(request(length))[0] for length in lengths]
        first = rig.run(until=1)
        if passes:
            assert set(first) == set(ids[:3]), "one launch has made the first tokens of the three"
        found = rig.run()
        answers.append([(*first.get(id, ()), *found[id]) for id in ids])
    assert answers[0] == answers[1]
    assert noted == [(256, 60, 3, 40, 128), (64, 23)]


def test_company_in_a_pass_changes_no_key(noted: list[tuple[int, ...]]) -> None:
    """Bits of the cached pages of a prompt that was read alone, and in the middle of others."""
    found = set()
    for company in ((), (33, 90)):
        rig = Rig()
        ids = [rig.engine.add(request(length))[0] for length in (*company[:1], 100, *company[1:])]
        rig.run(until=1)
        middle = next(one for one in rig.engine._queues.begun if len(one.request.prompt_ids) == 100)
        assert middle.id in ids and middle.cache is not None
        whole = middle.cache.pages[: 99 // middle.cache.page_size]
        kv = assembled(True).buffers["kv"].download(np.uint16, assembled(True).manifest.buffer("kv").shape)
        found.add(np.ascontiguousarray(kv[:, whole]).tobytes())
        rig.run()
    assert noted == [(256, 100), (256, 33, 100, 90)]
    assert len(found) == 1


def test_who_begins_alike_waits_for_the_pages_of_who_is_read(noted: list[tuple[int, ...]]) -> None:
    """Where that saves a tile of a pass; else both are read at once."""
    page, tile = assembled(True).launcher.cache.page_size, assembled(True).passes[-1].tile_tokens
    assert page == tile == 16
    common = token_ids(100, 500, 1)
    for shared, expected in ((96, [(256, 100), (64, 44)]), (15, [(256, 100, 59)])):
        rig = Rig(chunk_tokens=0)
        rig.engine.add(Request(tuple(common), 2, Sampling()))
        own = token_ids(44, 500, 2)
        rig.engine.add(Request((*common[:shared], *own), 2, Sampling()))
        rig.run()
        assert noted == expected
        noted.clear()


def test_a_prompt_whose_pages_are_gone_in_the_middle_of_it_is_read_again(noted: list[tuple[int, ...]]) -> None:
    rig = Rig(chunk_tokens=0)
    requests = [request(40), request(250)]
    ids = [rig.engine.add(one)[0] for one in requests]
    first = rig.run(until=1)
    assert noted == [(256, 40, 208)] and set(first) == set(ids[:1])
    pool = assembled(True).launcher.cache.pool
    elsewhere = pool.take(pool.available_pages)
    second = rig.run(until=1)
    assert set(second) == set(ids[:1]) and rig.engine.load().preemptions == 1
    pool.give_back(elsewhere)
    found = rig.run()
    assert (*first[0], *second[0], *found.get(0, ())) == _alone(requests[0])
    assert found[1] == _alone(requests[1])


def _alone(request: Request) -> tuple[int, ...]:
    rig = Rig()
    (number,) = rig.engine.add(request)
    return rig.run()[number]


@pytest.mark.exhaustive
def test_others_make_tokens_between_passes_of_the_size_that_was_asked_for(noted: list[tuple[int, ...]]) -> None:
    rig = Rig(chunk_tokens=48)
    rig.engine.add(request(3, 90))
    first = rig.run(until=2)
    rig.engine.add(request(150))
    found = rig.run()
    assert [tokens for _, tokens in noted] == [48, 48, 48, 6] or [tokens for _, tokens in noted] == [48, 48, 48]
    assert sum(map(len, first.values())) + sum(map(len, found.values())) == 95


@pytest.mark.parametrize("same_steps", [False, True])
def test_prompts_whose_logprobs_are_wanted_are_read_whole_and_share_with_others(
    noted: list[tuple[int, ...]], same_steps: bool
) -> None:
    rig = Rig()
    if same_steps:
        rig.engine._queues.rule = SameSteps(*vars(rig.engine._queues.rule).values())
    for wanted in (1, None, 1):
        rig.engine.add(replace(request(155), prompt_logprobs=wanted))
        rig.run()
    assert noted == [(256, 155), (64, 11), (256, 155)]


def test_logprobs_are_those_of_prompts_read_in_steps(noted: list[tuple[int, ...]]) -> None:
    """Of a prompt's ids and of those behind it, by itself, with a second one, and in parts while another decodes."""
    asked = [replace(request(length), logprobs=2, prompt_logprobs=3) for length in (90, 60)]
    found = []
    for passes, decoding in ((False, 0), (True, 0), (True, 40)):
        rig = Rig(passes, chunk_tokens=64 if decoding else None)
        if decoding:
            rig.engine.add(request(40, decoding))
            rig.run(until=2)
        ids = [rig.engine.add(one)[0] for one in asked]
        found.append(_logprobs(rig, ids))
    assert noted[0] == (256, 90, 60) and all(sum(parts[1:]) <= 64 for parts in noted[2:])
    for passes in found[1:]:
        for one, other in zip(found[0], passes, strict=True):
            assert [judged.token for judged in one] == [judged.token for judged in other]
            difference = [abs(judged.logprob - again.logprob) for judged, again in zip(one, other, strict=True)]
            assert max(difference) < 0.1 and float(np.mean(difference)) < 0.02, difference
            assert all(len(judged.top) == len(again.top) for judged, again in zip(one, other, strict=True))


def _logprobs(rig: Rig, ids: Sequence[int]) -> list[list[TokenLogprobs]]:
    """Of each completion those of its prompt, then of what was made."""
    found: dict[int, list[TokenLogprobs]] = {id: [] for id in ids}
    while not rig.engine.is_idle:
        for event in rig.engine.step():
            assert isinstance(event, Made)
            if event.id in found:
                found[event.id] += [*(event.prompt_logprobs or ()), *(event.logprobs or ())]
    assert [len(one) for one in found.values()] == [89 + 5, 59 + 5]
    return [*found.values()]


def test_several_completions_of_one_prompt_begin_behind_one_pass(noted: list[tuple[int, ...]]) -> None:
    """Each draws with its own seed; what is drawn first is what the logits there give."""
    sampling = Sampling(1.0, 7, banned=(3,))
    rig = Rig()
    ids = rig.engine.add(replace(request(150, 4), sampling=sampling, count=3))
    found = rig.run()
    assert noted == [(256, 150)] and [len(found[id]) for id in ids] == [4, 4, 4]
    logits = rig.engine.score(request(150).prompt_ids, assembled(True).logits_buffer())
    assert logits is not None
    logits[-1, 3] = -np.inf
    first = [sample(logits[-1], 1.0, seed_of(7, index), position=150) for index in range(3)]
    assert [found[id][0] for id in ids] == first and len(set(first)) > 1


def test_scores_are_those_of_steps() -> None:
    """Of a prompt of more tokens than a pass or a launch of the head takes at once."""
    ids, scores = token_ids(250, 500, 9), []
    for passes in (True, False):
        rig = Rig(passes)
        scores.append(rig.engine.score(ids, assembled(passes).logits_buffer()))
    assert relative_error(scores[0], scores[1]) < LOGITS_TOLERANCE


def test_a_head_that_was_interrupted_chooses_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for several completions, and where position says how a token is read."""
    for same_steps in (False, True):
        rig = Rig()
        if same_steps:
            rig.engine._queues.rule = SameSteps(*vars(rig.engine._queues.rule).values())
        ids = rig.engine.add(request(150, 4)), rig.engine.add(replace(request(40, 4), count=2))
        head = assembled(True).passes[0].head
        with monkeypatch.context() as patched:
            patched.setattr(head, "finish", _cancelled)
            while not (reading := rig.engine._queues.reading) or rig.engine._scheduler.prefill.left(reading[0]) == 150:
                assert not rig.engine.step()
        head._begin_again()
        found = rig.run()
        assert found[ids[0][0]] == _alone(request(150, 4))
        assert found[ids[1][0]] == found[ids[1][1]] == _alone(request(40, 4))


def test_a_head_that_was_interrupted_judges_a_prompt_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a launch before it has judged some of the ids."""
    head, found = assembled(True).passes[0].head, []
    for interrupted in (0, 1, 2):
        rig, launches = Rig(), list[Any]()

        def finish(launch: Any, launches: list[Any] = launches, interrupted: int = interrupted) -> Any:
            launches.append(launch)
            return _cancelled(launch) if len(launches) == interrupted else type(head).finish(head, launch)

        monkeypatch.setattr(head, "finish", finish)
        rig.engine.add(replace(request(150, 3), prompt_logprobs=1))
        events: list[Any] = []
        while not rig.engine.is_idle:
            events += rig.engine.step()
        tokens = [token for one in events for token in one.token_ids]  # in how many launches, the clock decides
        found.append((tokens, [one.prompt_logprobs for one in events if one.prompt_logprobs]))
        assert len(launches) == 4 + interrupted, "three judge, one chooses"
    assert found[0] == found[1] == found[2]


def _cancelled(launch: Any) -> Any:
    """As by Ctrl-C. The launch had ended: its epochs are used up."""
    raise LaunchCancelled("as by Ctrl-C")


def test_an_interrupted_pass_is_as_if_not_made() -> None:
    ready = assembled(True)
    for passes in ready.passes:
        passes._begin_again()
    rig = Rig()
    rig.engine.add(request(150))
    assert len(rig.run()[0]) == 5


def test_where_there_can_be_none_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError, match="needs .* beside a cache that has .*: it may take an eighth"):
        _without_room(True)
    with pytest.raises((MemoryShortage, CheetahError)):
        _without_room(False)


def _without_room(passes: bool) -> None:
    device = EmulatorDevice()
    info = device.describe()
    device.describe = lambda: type(info)(**{**vars(info), "free_bytes": 1})  # type: ignore[method-assign]
    assemble(open_checkpoint("demo"), device=device, prompt_passes=passes, quiet=True)
