"""One bit answer to one request on a GPU, at the real shapes of a small model: every logit, and all cached keys and
values of prompts, in company, with hits of the prefix cache that leave a few tokens of the prompt, and after an answer.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.requests import Request
from tests.program.answers import Record, Service
from tests.program.rig import token_ids

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("one answer")]

CACHED = {579: 576, 180: 176, 577: 576, 65: 64, 1: 0}
"""What is known of a prompt of so many tokens when it is asked for again: whole pages of 16, but never all of it."""


@pytest.fixture(scope="module", params=[{"prompt_tokens": 8}, {"prompt_tokens": 16}, {"prompt_passes": True}], ids=str)
def kernel(request: pytest.FixtureRequest) -> Iterator[Assembly]:
    ready = assemble(
        open_checkpoint("random:llama-3.2-1b"),
        device="cuda",
        overrides={"batch": 8, "kv_chunk": 256, "max_context": 1024},
        timeout_s=20,
        quiet=True,
        **{"prompt_passes": False, **request.param},
    )
    yield ready
    ready.close()


def requests_of(vocab: int) -> list[Request]:
    return [
        Request(tuple(token_ids(length, vocab, length)), 24, Sampling(0.8, length * 100), count=count)
        for length, count in zip(CACHED, (1, 1, 3, 2, 1), strict=True)
    ]


def test_company_and_hits_change_no_bit(kernel: Assembly) -> None:
    record, requests = Record(), requests_of(kernel.launcher.vocab_size)
    expected = {request: Service(kernel, record).answers([request]) for request in requests}
    service = Service(kernel, record)
    for order in (requests, requests[::-1], requests[2:] + requests[:2]):
        assert service.answers(order) == [ids for request in order for ids in expected[request]]
        assert not record.changed
    known = [CACHED[len(request.prompt_ids)] for request in requests[::-1] for _ in range(request.count)]
    assert service.cached_tokens[len(known) : 2 * len(known)] == known


@pytest.mark.parametrize("prompt", [100, 250])
def test_a_prompt_that_continues_an_answer(kernel: Assembly, prompt: int) -> None:
    record = Record()
    first = Request(tuple(token_ids(prompt, kernel.launcher.vocab_size, 7)), 80, Sampling(0.8, 100))
    answer = Service(kernel, record).answers([first])[0]
    second = Request((*first.prompt_ids, *answer, 1, 2, 3), 24, Sampling(0.8, 200))
    expected = Service(kernel, record, prefix_cache=False).answers([second])
    service = Service(kernel, record)
    assert service.answers([first]) == [answer]
    assert service.answers([second]) == expected
    assert not record.changed and service.cached_tokens[-1] > 0
