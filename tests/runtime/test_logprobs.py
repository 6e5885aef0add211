"""Logprobs of what is made and of what is read, against float64 log-softmaxes of the reference's logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engine_rig import Rig, alone, made_by
from fake_kernel import FakeDevice, generate_kernel
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from tiny_models import tiny_weights, write_checkpoint
from tiny_tokenizers import byte_level

from cheetah.models.dense.reference import Reference
from cheetah.models.logprobs import TokenLogprobs, likeliest, token_logprobs
from cheetah.models.rounding import round_to_bf16
from cheetah.runtime import LLM, Logprob, SamplingParams
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.requests import Made, Request
from tests.tolerances import LOGPROB

PROMPT = (5, 17, 250, 3, 99, 7, 7, 81, 200, 12, 45)


def wanted(ids: tuple[int, ...]) -> NDArray[np.float64]:
    """Row i: the log-probabilities of the token after ids 0 .. i."""
    logits = Reference(tiny_weights().config, tiny_weights().tensors, round_to_bf16).forward(ids).astype(np.float64)
    found: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return found


def check(found: TokenLogprobs, row: NDArray[np.float64], token: int, count: int) -> None:
    order = np.argsort(-row, kind="stable")
    assert found.token == token and found.rank == 1 + int((row > row[token]).sum())
    assert [token for token, _ in found.top] == order[:count].tolist()
    numbers = [found.logprob, *(logprob for _, logprob in found.top)]
    np.testing.assert_allclose(numbers, row[[token, *order[:count]]], atol=LOGPROB)


few = st.floats(-20, 20, width=16) | st.sampled_from([0.0, 1.0, -np.inf])


@given(arrays(np.float32, st.integers(1, 300), elements=few), st.integers(0, 25))
def test_the_likeliest_are_those_of_a_stable_sort(logits: NDArray[np.float32], count: int) -> None:
    np.testing.assert_array_equal(likeliest(logits, count), np.argsort(-logits, kind="stable")[:count])


def test_the_likeliest_of_a_large_vocabulary() -> None:
    logits = np.random.default_rng(0).standard_normal(128_256).astype(np.float32)
    for each in (logits, np.round(logits)):
        np.testing.assert_array_equal(likeliest(each, 20), np.argsort(-each, kind="stable")[:20])
    row = logits.astype(np.float64)
    check(token_logprobs(logits, 77, 20), row - np.log(np.exp(row).sum()), 77, 20)


def test_ties_have_the_rank_of_their_last() -> None:
    found = token_logprobs(np.array([1, 2, 1, 0], np.float32), 0, 3)
    assert (found.rank, [token for token, _ in found.top]) == (3, [1, 0, 2])


def test_logits_that_are_no_numbers() -> None:
    some = token_logprobs(np.array([np.nan, 1, 2], np.float32), 0, 3)
    assert some.logprob == -np.inf and some.top[0] == (2, pytest.approx(-np.log1p(np.exp(-1))))
    assert token_logprobs(np.full(3, np.nan, np.float32), 1, 2).logprob == -np.inf
    assert token_logprobs(np.array([np.inf, 0], np.float32), 0, 1).logprob == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"kv_chunk": 32}, {"launch_steps": 3}, {"pages": 9}], ids=str)
def test_what_is_made_and_read_has_the_references_numbers(how: dict[str, Any]) -> None:
    rig = Rig(batch=4, caches=True, **how)
    asks = [
        Request(PROMPT * 3, 4, Sampling()),  # its pages begin the next prompt, which must be read all the same
        Request(PROMPT * 3, 7, Sampling(1.0, 3), count=2, logprobs=3, prompt_logprobs=2),
        Request(PROMPT * 2, 5, Sampling(), logprobs=0),
        Request((7,), 3, Sampling(), prompt_logprobs=1),
    ]
    ids = [rig.engine.add(request) for request in asks]
    events = rig.run()
    found = made_by(events)
    for request, several in zip(asks, ids, strict=True):
        for number, id in enumerate(several):
            assert found[id] == alone(request, number)
            check_completion(request, [event for event in events if isinstance(event, Made) and event.id == id])
    assert rig.pool.available_pages == rig.pool.pages


def check_completion(request: Request, events: list[Made]) -> None:
    made = tuple(token for event in events for token in event.token_ids)
    rows, prompt = wanted(request.prompt_ids + made), request.prompt_ids
    if request.logprobs is None:
        assert all(event.logprobs is None for event in events)
    else:
        found = [one for event in events for one in event.logprobs or ()]
        for one, row, token in zip(found, rows[len(prompt) - 1 : -1], made, strict=True):
            check(one, row, token, request.logprobs)
    assert all(event.prompt_logprobs is None for event in events[1:])
    if request.prompt_logprobs is None:
        assert events[0].prompt_logprobs is None
    else:
        assert events[0].prompt_logprobs is not None
        for one, row, token in zip(events[0].prompt_logprobs, rows, prompt[1:], strict=False):
            check(one, row, token, request.prompt_logprobs)
        assert len(events[0].prompt_logprobs) == len(prompt) - 1


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    files = {"tokenizer.json": byte_level(), "tokenizer_config.json": {"bos_token": "<|begin|>"}}
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tiny_weights(), files)
    with LLM(folder, device=FakeDevice(), generate_kernel=generate_kernel, batch=2, quiet=True) as opened:
        yield opened


def test_outputs_have_vllms_shapes(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, n=2, logprobs=2, prompt_logprobs=1)
    output = llm.generate("hello there", params)
    assert llm.tokenizer is not None and output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    for token, place in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert place is not None and next(iter(place)) == token and 1 <= len(place) <= 2
    assert len({one.token_ids for one in output.outputs}) == 2
    for one in output.outputs:
        assert one.logprobs is not None and len(one.logprobs) == 6
        for token, place in zip(one.token_ids, one.logprobs, strict=True):
            assert next(iter(place)) == token and 2 <= len(place) <= 3
            assert sorted(entry.rank for entry in place.values())[:2] == [1, 2]
            assert place[token].decoded_token == llm.tokenizer.token_text(token)
        total = sum(place[token].logprob for token, place in zip(one.token_ids, one.logprobs, strict=True))
        assert one.cumulative_logprob == pytest.approx(total)
    plain = llm.generate("hello there", SamplingParams(max_tokens=2))
    assert plain.prompt_logprobs is plain.outputs[0].logprobs is plain.outputs[0].cumulative_logprob is None


def test_logprobs_are_of_raw_logits(llm: LLM) -> None:
    """Neither temperature nor a ban changes them, as in vLLM: the banned token is the likeliest still."""
    (best,) = llm.generate([5, 6], SamplingParams(max_tokens=1, logprobs=1)).outputs[0].logprobs or ()
    token = next(iter(best))
    allowed = [other for other in range(300) if other != token]
    params = SamplingParams(max_tokens=1, temperature=0.3, logprobs=1, allowed_token_ids=allowed)
    (place,) = llm.generate([5, 6], params).outputs[0].logprobs or ()
    assert place[token] == best[token] == Logprob(best[token].logprob, 1, best[token].decoded_token)
    assert next(iter(place)) != token


def test_pieces_of_a_stream_carry_them(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, logprobs=1, prompt_logprobs=0)
    whole, pieces = llm.generate("hello", params), list(llm.stream("hello", params))
    assert pieces[0].prompt_logprobs == whole.prompt_logprobs
    assert all(len(piece.logprobs or ()) == len(piece.token_ids) for piece in pieces)
    assert tuple(place for piece in pieces for place in piece.logprobs or ()) == whole.outputs[0].logprobs


def test_behind_a_stop_string_there_are_none(llm: LLM) -> None:
    text = llm.generate("hello", SamplingParams(max_tokens=30)).text or ""
    (output,) = llm.generate("hello", SamplingParams(max_tokens=30, stop=text[4:6], logprobs=0)).outputs
    assert len(output.logprobs or ()) == len(output.token_ids) < 30
