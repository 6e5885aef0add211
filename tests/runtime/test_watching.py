"""Completions that need the host between two tokens: what they sample, and that nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from engine_rig import Rig, alone, made_by
from tiny_models import tiny_weights

from cheetah.errors import CheetahError
from cheetah.models.dense.reference import Reference
from cheetah.models.rounding import round_to_bf16
from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.requests import Failed, Made, Request
from cheetah.runtime.engine.watching import Mask, allows_one_beside, mask_of_all
from cheetah.runtime.sampling import seed_of
from tests.meant import next_token

VOCAB = tiny_weights().config.vocab_size
SHORT, LONG = (5, 17, 250), tuple(range(40, 80))
Rule = Callable[[Sequence[int]], Iterable[int]]
"""Which tokens may follow those that were made."""


def words_of(token_ids: Iterable[int]) -> Mask:
    bits = np.zeros(-(-VOCAB // 32) * 32, bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


class Ruled:
    """Allows what a rule says. late: what it says of the tokens before the last, as if it heard them too late."""

    def __init__(self, rule: Rule, late: bool = False):
        self.made: list[int] = []
        self._rule, self._late = rule, late
        self.mask: Mask | None = words_of(rule(self.made))

    def after(self, token_id: int) -> None:
        self.made.append(token_id)
        self.mask = words_of(self._rule(self.made[:-1] if self._late else self.made))


def sevens(made: Sequence[int]) -> Iterable[int]:
    """A rule by which each token depends on the one before it."""
    last = made[-1] if made else 3
    return range((last * 7 + 1) % 11, VOCAB, 11)


def follows(made: Sequence[int]) -> bool:
    return all(token in sevens(made[:place]) for place, token in enumerate(made))


def ruled_alone(request: Request, rule: Rule, index: int = 0) -> tuple[int, ...]:
    """What the reference makes by the meaning of sampling, of what the rule allows."""
    model = Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16)
    sampling = replace(request.sampling, seed=seed_of(request.sampling.seed, index))
    made: list[int] = []
    for token in request.prompt_ids:
        row = model.step(token)
    while len(made) < request.max_tokens:
        allowed = tuple(sorted(rule(made)))
        made.append(next_token(row, replace(sampling, allowed=allowed), request.prompt_ids, made))
        row = model.step(made[-1])
    return tuple(made)


def ruled(request: Request, rule: Rule = sevens) -> Request:
    return replace(request, watchers=(lambda: Ruled(rule),))


@pytest.mark.slow
def test_each_token_is_sampled_by_the_mask_that_the_one_before_it_left() -> None:
    rig = Rig(batch=3, launch_steps=8)
    watched, free = Request(SHORT, 9, Sampling(1.1, 3), count=2), Request((1, 2), 30, Sampling(1.2, 4))
    ids, (other,) = rig.engine.add(ruled(watched)), rig.engine.add(free)
    found = made_by(rig.run())
    assert [found[id] for id in ids] == [ruled_alone(watched, sevens, index) for index in range(2)]
    assert all(follows(found[id]) for id in ids)
    assert found[other] == alone(free), "a neighbour's tokens are changed"
    assert {launch["steps"] for launch in rig.device.launches if len(launch["sequences"]) > 1} == {1}
    assert rig.pool.free_pages == rig.pool.pages


def test_a_watcher_that_is_told_one_token_late_is_found() -> None:
    rig = Rig()
    (id,) = rig.engine.add(Request(SHORT, 9, Sampling(1.1, 3), watchers=(lambda: Ruled(sevens, late=True),)))
    assert not follows(made_by(rig.run())[id])


@pytest.mark.parametrize("kv_chunk", [None, 16])
@pytest.mark.slow
def test_who_gives_its_pages_back_goes_on_by_its_rule_and_is_told_nothing_twice(kv_chunk: int | None) -> None:
    rig = Rig(pages=4, batch=2, launch_steps=4, **({"kv_chunk": kv_chunk} if kv_chunk else {}))
    requests = [Request(SHORT, 40, Sampling(1.1, 3)), Request((1, 2), 40, Sampling(1.2, 4))]
    watchers: list[Ruled] = []

    def new() -> Ruled:
        watchers.append(Ruled(sevens))
        return watchers[-1]

    ids = [rig.engine.add(replace(request, watchers=(new,)))[0] for request in requests]
    found = made_by(rig.run())
    assert rig.engine.load().preemptions > 0
    assert [found[id] for id in ids] == [ruled_alone(request, sevens) for request in requests]
    assert [tuple(watcher.made) for watcher in watchers] == [found[id][:-1] for id in ids]


def test_one_whose_watcher_fails_ends_alone() -> None:
    class Failing(Ruled):
        def after(self, token_id: int) -> None:
            super().after(token_id)
            if len(self.made) == 3:
                raise CheetahError("too hard a rule")

    rig = Rig(batch=2, launch_steps=4)
    (failing,) = rig.engine.add(Request(SHORT, 9, Sampling(), watchers=(lambda: Failing(sevens),)))
    free = Request((1, 2), 12, Sampling(1.2, 4))
    (other,) = rig.engine.add(free)
    events = rig.run()
    mine = [event for event in events if event.id == failing]
    assert isinstance(mine[-1], Failed) and mine[-1].message == "too hard a rule"
    assert [event.finish_reason for event in mine[:-1] if isinstance(event, Made)] == [None] * 3
    assert made_by(event for event in events if event.id == other) == {other: alone(free)}
    assert rig.pool.free_pages == rig.pool.pages


def test_a_completion_of_which_nothing_is_left_to_sample_says_so() -> None:
    rig = Rig()
    sampling = Sampling(1.0, 3, banned=tuple(sevens(())))
    rig.engine.add(ruled(Request(SHORT, 9, sampling)))
    (event,) = rig.run()
    assert isinstance(event, Failed) and "structured output" in event.message and "bad_words" in event.message


def test_fewest_tokens_give_way_where_only_an_end_is_allowed() -> None:
    stop = 7

    def rule(made: Sequence[int]) -> Iterable[int]:
        return [9, stop] if len(made) < 3 else [stop]

    rig = Rig()
    (id,) = rig.engine.add(ruled(Request(SHORT, 20, Sampling(1.0, 3, stop_ids=(stop,)), min_tokens=10), rule))
    assert made_by(rig.run())[id] == (9, 9, 9, stop)


def test_masks_of_several_watchers_are_taken_together() -> None:
    even, small = words_of(range(0, VOCAB, 2)), words_of(range(40))
    assert mask_of_all([None]) is None and mask_of_all([None, even]) is even
    both = mask_of_all([even, None, small])
    assert both is not None and both.tobytes() == words_of(range(0, 40, 2)).tobytes()
    assert allows_one_beside(words_of([3, 40]), [40, 10**6]) and not allows_one_beside(words_of([3, 40]), [3, 40])


def test_a_completion_that_is_read_again_has_no_more_steps_than_reach_its_next_token() -> None:
    rig = Rig()
    completion = Completion(0, ruled(Request(SHORT, 20, Sampling())), 0)
    completion.cache = rig.engine.launcher.cache.fork()
    completion.ids += [9, 9]
    assert completion.most_tokens() == len(SHORT) + 2 - 1 + 1
