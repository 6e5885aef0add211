"""Prompts that an engine reads in passes: which kernel reads how much, beside others, and that the answers stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cheetah.errors import CheetahError
from cheetah.plan import PlanError
from cheetah.runtime.build.assemble import Assembly, assemble
from cheetah.runtime.build.memory import MemoryShortage
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.device.emulator import EmulatorDevice
from cheetah.runtime.engine.engine import Engine
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.prefix_cache import PrefixCache
from cheetah.runtime.engine.prompt_reading import SameSteps
from cheetah.runtime.engine.requests import Made, Request
from tests.program.rig import emulated_gpu, token_ids

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

LENGTHS = (3, 40, 150)


@cache
def assembled(passes: bool) -> Assembly:
    return assemble(
        open_checkpoint("demo"),
        device=EmulatorDevice(),
        gpu=emulated_gpu(2),
        overrides={"batch": 2, "max_context": 256},
        prompt_passes=passes,
        tuned=False,
        quiet=True,
    )


class Rig:
    """An engine over the demo model with an empty cache, whose passes are written down: (room, tokens)."""

    def __init__(self, passes: bool = True, chunk_tokens: int | None = None):
        ready, self.read = assembled(passes), list[tuple[int, int]]()
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
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """(room, tokens) of each pass."""
    passes: list[tuple[int, int]] = []
    for one in assembled(True).passes:
        prepare = one.prepare

        def prepare_and_note(parts: Any, logits: Any = None, one: Any = one, prepare: Any = prepare) -> Any:
            passes.append((one.tokens, parts[0].total))
            return prepare(parts, logits)

        monkeypatch.setattr(one, "prepare", prepare_and_note)
    yield passes


def request(length: int, count: int = 5) -> Request:
    return Request(tuple(token_ids(length, 500, length)), count, Sampling())


def test_answers_are_those_of_prompts_read_in_steps(noted: list[tuple[int, int]]) -> None:
    """The demo model is trained: its greedy choices do not turn on a rounding."""
    for length in LENGTHS:
        answers = []
        for passes in (True, False):
            rig = Rig(passes)
            rig.engine.add(request(length))
            answers.append(list(rig.run().values()))
        assert answers[0] == answers[1]
    assert noted == [(64, 39), (256, 149)], "3 tokens are read in steps, 40 in a short pass, 150 in a long one"


def test_a_pass_goes_on_behind_what_is_cached(noted: list[tuple[int, int]]) -> None:
    rig = Rig()
    for _ in range(2):
        (number,) = rig.engine.add(request(150))
        answer = rig.run()[number]
    assert noted == [(256, 149), (64, 5)], "of the second prompt all whole pages were there"
    longer = Request((*request(150).prompt_ids, *answer, *token_ids(60, 500, 1)), 3, Sampling())
    rig.engine.add(longer)
    rig.run()
    page = assembled(True).launcher.cache.page_size
    assert noted[2:] == [(256, 150 + 5 + 60 - 1 - 154 // page * page)]


def test_others_make_tokens_between_passes_of_the_size_that_was_asked_for(noted: list[tuple[int, int]]) -> None:
    rig = Rig(chunk_tokens=48)
    rig.engine.add(request(3, 90))
    first = rig.run(until=2)
    rig.engine.add(request(150))
    found = rig.run()
    assert [tokens for _, tokens in noted] == [48, 48, 48, 5] or [tokens for _, tokens in noted] == [48, 48, 48]
    assert sum(map(len, first.values())) + sum(map(len, found.values())) == 95


@pytest.mark.parametrize("same_steps", [False, True])
def test_prompts_whose_logprobs_are_wanted_share_with_passes_only_where_bits_may_differ(
    noted: list[tuple[int, int]], same_steps: bool
) -> None:
    """They are read in steps, whose keys have other bits than those of passes."""
    rig = Rig()
    if same_steps:
        rig.engine._manner = SameSteps(*vars(rig.engine._manner).values())
    for wanted in (1, None, 1):
        rig.engine.add(replace(request(150), prompt_logprobs=wanted))
        rig.run()
    assert noted == ([(256, 149)] if same_steps else [(64, 5)])


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
    assemble(open_checkpoint("demo"), device=device, prompt_passes=passes, tuned=False, quiet=True)
