"""One bit answer to one request, where items of attention have a fixed length: in any company, in any order, whatever
the prefix cache holds, however many completions are asked for. Every logit and all cached keys and values are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.device.emulator import EmulatorDevice
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.requests import Request
from cheetah.runtime.engine.step_time import StepTime
from tests.program.answers import Record, Service
from tests.program.rig import emulated_gpu, model, random_weights, token_ids
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

CONFIG = model(heads=4, kv_heads=1, vocab=60)
"""Four heads a KV head: of 8 columns' 32 packed rows, two warps share out the keys; of one column's, all four."""
KERNELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batch 2, one kernel of 8, pages of 5": ({"batch": 2, "tokens": 8, "page_size": 5}, {}),
    "batch 4, prompts by 16": ({"batch": 4}, {"prompt_tokens": 16}),
    "one token a step": ({"batch": 1}, {}),
    "batch 2, prompts in passes, pages of 5": ({"batch": 2, "page_size": 5}, {"prompt_passes": 64}),
}
COMMON = token_ids(68, CONFIG.vocab_size, 1)


@dataclass(frozen=True)
class Kernels:
    """One kernel twice, each with memory of its own: for requests that have it alone, and for all together."""

    alone: Assembly
    shared: Assembly

    def answers_alone(self, record: Record, request: Request) -> list[tuple[int, ...]]:
        """The completions of a request that finds nothing cached and nobody else."""
        return Service(self.alone, record).answers([request])


@cache
def assembled(kernel: str, number: int) -> Assembly:
    plan, options = KERNELS[kernel]
    overrides = {"max_context": 96, "consumer_warps": 4, "kv_chunk": 64, "max_steps": 8, **plan}
    return assemble(
        random_weights(CONFIG),
        device=EmulatorDevice(),
        gpu=emulated_gpu(2),
        overrides=overrides,
        quiet=True,
        **options,
    )


@pytest.fixture(params=tiered(KERNELS, ["batch 4, prompts by 16", "one token a step"]))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(assembled(request.param, 0), assembled(request.param, 1))


@pytest.fixture(autouse=True)
def uneven_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes() -> Iterator[int]:
        while True:
            yield from (3, 1, 7, 2, 5, 8, 1, 1, 4)

    launches = sizes()
    monkeypatch.setattr(StepTime, "steps", lambda time, wanted: min(wanted, time.max_steps, next(launches)))


def prompt_of(common: int, own: Sequence[int] = ()) -> tuple[int, ...]:
    return (*COMMON[:common], *own)


REQUESTS = [
    Request(prompt_of(68), 5, Sampling(0.0, 100)),
    Request(prompt_of(55, (7, 8, 9, 10)), 7, Sampling(1.1, 200), count=3),
    Request(prompt_of(33, (1,)), 12, Sampling(0.8, 300)),
    Request(prompt_of(0, (5,)), 6, Sampling(1.3, 400), count=2),
]


def test_order_and_company_and_what_is_cached_change_no_bit(kernels: Kernels) -> None:
    record = Record()
    expected = {request: kernels.answers_alone(record, request) for request in REQUESTS}
    hits = 0
    for order in list(permutations(REQUESTS))[::12]:
        service = Service(kernels.shared, record)
        for _ in range(2):  # the second time with all that the first one left behind
            found = iter(service.answers(order))
            for request in order:
                assert [next(found) for _ in expected[request]] == expected[request]
            assert not record.changed
        hits += sum(tokens > 0 for tokens in service.cached_tokens)
    assert hits > 5, "hardly anything was cached"


@pytest.mark.parametrize("prompt", tiered([1, 16, 31, 40], [1, 16, 40]))
def test_a_prompt_that_continues_an_answer(kernels: Kernels, prompt: int) -> None:
    """The first answer was decoded: whoever reads it as part of a prompt has other bits, and must have them always."""
    record = Record()
    first = Request(prompt_of(prompt), 30, Sampling(0.9, 100))
    service = Service(kernels.shared, record)
    answer = service.answers([first])[0]
    for more in ((), (3, 4, 5)):
        second = Request((*first.prompt_ids, *answer, *more), 6, Sampling(0.9, 200))
        expected = kernels.answers_alone(record, second)
        assert service.answers([second]) == expected
        assert Service(kernels.alone, record, prefix_cache=False).answers([second]) == expected
        assert not record.changed
    assert sum(service.cached_tokens) > 0 or prompt < 20


def test_a_repeated_prompt_of_every_length(kernels: Kernels) -> None:
    """Whole hits: whatever is left of the prompt, down to its last token."""
    record = Record()
    requests = [Request(prompt_of(length), 2, Sampling(0.7, length)) for length in range(1, 69, 9)]
    expected = [kernels.answers_alone(record, request) for request in requests]
    service = Service(kernels.shared, record)
    for request, answers in zip([*requests, *reversed(requests)], [*expected, *reversed(expected)], strict=True):
        assert service.answers([request]) == answers
    assert not record.changed
    assert sum(tokens > 0 for tokens in service.cached_tokens) > len(requests) // 3


def test_up_to_the_last_token_of_the_context(kernels: Kernels) -> None:
    """Steps whose columns, or whose items, end behind the context."""
    record, context = Record(), kernels.alone.launcher.cache.context
    ids = tuple(token_ids(context, CONFIG.vocab_size, 3))
    requests = [
        Request(ids[: context - left], left + 1, Sampling(0.9, left), count=count) for left, count in ((0, 1), (17, 2))
    ]
    expected = [kernels.answers_alone(record, request) for request in requests]
    service = Service(kernels.shared, record)
    for request, answers in zip([*reversed(requests), *requests], [*reversed(expected), *expected], strict=True):
        assert service.answers([request]) == answers
    assert not record.changed


@pytest.mark.parametrize("seed", tiered((0, 3), [3]))
def test_random_requests_with_common_beginnings(kernels: Kernels, seed: int) -> None:
    """Rounds of requests over one cache: prompts begin alike or continue earlier answers; some stop early, some streams
    are given up."""
    draw = np.random.default_rng(seed)
    record = Record()
    service = Service(kernels.shared, record)
    texts: list[tuple[int, ...]] = [tuple(COMMON)]
    for number in range(3):
        requests = []
        for place in range(int(draw.integers(1, 5))):
            text = texts[int(draw.integers(0, len(texts)))]
            own = draw.integers(0, CONFIG.vocab_size, int(draw.integers(0, 6))).tolist()
            prompt = (*text[: int(draw.integers(1, len(text) + 1))], *own)[:70]
            stops = tuple(draw.integers(0, CONFIG.vocab_size, int(draw.integers(0, 4))).tolist())
            sampling = Sampling(float(draw.choice([0.0, 1.2])), 1000 * number + 100 * place, stops)
            count = int(draw.choice([1, 1, 2, 3]))
            requests.append(Request(prompt, int(draw.integers(1, 25)), sampling, count=count))
        expected = [one for request in requests for one in kernels.answers_alone(record, request)]
        if number % 2:
            given_up = service.desk.complete(Request(prompt_of(40, (number,)), 20, Sampling(0.5, 7)))
            service.begin([given_up])
            next(iter(given_up))
        assert service.answers(requests) == expected
        assert not record.changed
        texts += [(*requests[0].prompt_ids, *expected[0])]
    assert any(service.cached_tokens)


def test_scores_of_a_beginning_are_the_beginning_of_the_scores(kernels: Kernels) -> None:
    """Also where the last launch has fewer tokens than a step takes."""
    ids, logits = token_ids(80, CONFIG.vocab_size, 4), kernels.shared.logits_buffer()
    service = Service(kernels.shared, Record())
    whole = service.desk.score(ids, logits)
    for count in (1, 9, 67, 79):
        np.testing.assert_array_equal(
            service.desk.score(ids[:count], logits).view(np.uint32), whole[:count].view(np.uint32)
        )
