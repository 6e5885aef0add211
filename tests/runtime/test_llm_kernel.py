"""`LLM` with the generated kernel, in the emulator and on a GPU: what the kernel promises the runtime, it must hold."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TinyWeights, tiny_config, tiny_weights, write_checkpoint

from cheetah.errors import CheetahError
from cheetah.models.dense.reference import Reference
from cheetah.models.dense.weights import FINAL_NORM
from cheetah.models.sampling import sample
from cheetah.plan.kv.tables import epochs_of_step
from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.engine.launcher import EPOCH_LIMIT, Epochs
from cheetah.runtime.engine.step_time import StepTime
from tests.tiers import tiered

pytestmark = pytest.mark.slow

EMULATOR = {"device": "emulator", "gpu": "emulator-2"}
DEVICES = [
    pytest.param(EMULATOR, marks=pytest.mark.compiler, id="emulator"),
    *(pytest.param({"device": name}, marks=pytest.mark.gpu, id=name) for name in ("cuda", "pycuda")),
]
PROMPT = (5, 17, 250, 3, 99, 7, 7, 81, 200, 12, 45)
BF16_NAN = 0x7FC0
LOGIT_TOLERANCE = 0.05
"""Relative L2 error of the logits of a position against float32 (rounding the reference to bf16 alone gives 0.04)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tiny_weights())


def opened(folder: Path, place: dict[str, Any], **options: Any) -> LLM:
    if importlib.util.find_spec(place["device"].replace("emulator", "cheetah")) is None:
        pytest.skip(f"{place['device']} is not installed")
    return LLM(folder, max_context=80, quiet=True, **place, **options)


@pytest.fixture(scope="module", params=DEVICES)
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


@pytest.fixture(scope="module", params=tiered(["flags", "barrier"], ["barrier"]))
def llm(folder: Path, place: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[LLM]:
    with opened(folder, place, sync=request.param) as llm:
        yield llm


@pytest.fixture
def whole_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode launches as long as they may be, however slow the emulator is."""
    monkeypatch.setattr(StepTime, "steps", lambda time, wanted: min(wanted, time.max_steps))


@cache
def reference() -> Reference:
    return Reference(tiny_weights().config, tiny_weights().tensors)


def scored(llm: LLM, ids: tuple[int, ...], launch_steps: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    llm.engine.engine.launch_steps = launch_steps
    scores = llm.score(ids)
    llm.engine.engine.launch_steps = 64
    return scores


def test_scores_are_near_the_reference_and_the_same_bits_in_any_grouping(llm: LLM) -> None:
    ids = tuple(int(token) for token in np.random.default_rng(1).integers(0, 300, 40))
    whole = scored(llm, ids, 64)
    wanted = reference().forward(ids)
    error = np.linalg.norm(whole - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert error.max() < LOGIT_TOLERANCE
    for launch_steps in (1, 7):
        np.testing.assert_array_equal(scored(llm, ids, launch_steps).view(np.uint32), whole.view(np.uint32))


def test_generated_tokens_are_what_the_scores_say(llm: LLM) -> None:
    made = llm.generate(PROMPT, SamplingParams(max_tokens=25)).token_ids
    scores = llm.score(PROMPT + made)
    assert tuple(scores[len(PROMPT) - 1 : -1].argmax(axis=1)) == made


def test_logprobs_are_near_the_references_and_say_which_token_was_likeliest(llm: LLM) -> None:
    output = llm.generate(PROMPT, SamplingParams(max_tokens=12, logprobs=20, prompt_logprobs=20))
    logits = reference().forward(PROMPT + output.token_ids).astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    places = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
    for place, row in zip(places, wanted, strict=False):
        assert place is not None and len(place) >= 20
        found = np.array([entry.logprob for entry in place.values()])
        error = np.linalg.norm(found - row[[*place]]) / np.linalg.norm(row[[*place]])
        assert error < LOGIT_TOLERANCE and min(entry.rank for entry in place.values()) == 1
    assert len(places) == len(PROMPT) - 1 + 12
    assert all(place[token].rank == 1 for place, token in zip(places[-12:], output.token_ids, strict=True) if place)


@pytest.mark.parametrize("sync", tiered(["flags", "barrier"], ["barrier"]))
def test_sampled_tokens_are_the_references_draws_from_the_scores(
    folder: Path, place: dict[str, Any], sync: str
) -> None:
    """Scores by steps, as tokens are made: those of a pass over the prompt have other bits."""
    seed = 2**40 + 9
    with opened(folder, place, sync=sync, prompt_passes=False) as llm:
        made = llm.generate(PROMPT, SamplingParams(max_tokens=25, temperature=0.8, seed=seed)).token_ids
        scores = llm.score(PROMPT + made)
        drawn = [sample(scores[at - 1], 0.8, seed, position=at) for at in range(len(PROMPT), len(PROMPT + made))]
        assert tuple(drawn) == made != llm.generate(PROMPT, SamplingParams(max_tokens=25)).token_ids


BROKEN = [
    *((FINAL_NORM, 0.8), ("model.layers.0.self_attn.v_proj.weight", 0.0), ("model.layers.0.mlp.up_proj.weight", 0.0)),
    (FINAL_NORM, 0.0),
]


@pytest.mark.parametrize(("tensor", "temperature"), tiered(BROKEN, BROKEN[3:]))
def test_logits_that_are_not_numbers_are_an_error_and_not_a_token(
    tmp_path: Path, place: dict[str, Any], tensor: str, temperature: float
) -> None:
    """Also where the exchange makes numbers of what is none, in `attention` and in `gated`."""
    broken = TinyWeights(tiny_config())
    broken.tensors[tensor].flat[3] = BF16_NAN
    with opened(write_checkpoint(tmp_path, broken), place) as llm:
        assert np.isnan(llm.score(PROMPT)).all()
        with pytest.raises(CheetahError, match=rf"no token can be chosen for position {len(PROMPT)}: none of its"):
            llm.generate(PROMPT, SamplingParams(max_tokens=5, temperature=temperature))


def check_early_ends(llm: LLM) -> None:
    """Completions ended by a stop id in the middle of a launch, each followed by a whole one."""
    params = SamplingParams(max_tokens=20, temperature=1.1, seed=7)
    plain = llm.generate(PROMPT, params).token_ids
    for end in plain[2], plain[5], plain[9]:
        stopped = llm.generate(PROMPT, dataclasses.replace(params, stop_token_ids=[end]))
        assert stopped.token_ids == plain[: plain.index(end) + 1] and stopped.stop_reason == end
        assert llm.generate(PROMPT, params).token_ids == plain


@pytest.mark.parametrize("sync", tiered(["flags", "barrier"], ["barrier"]))
def test_a_completion_ended_early_leaves_the_next_one_alone(
    folder: Path, place: dict[str, Any], sync: str, whole_launches: None
) -> None:
    more_blocks = place | {"gpu": "emulator-8"} if place == EMULATOR else place
    with opened(folder, more_blocks, sync=sync) as llm:
        check_early_ends(llm)


@pytest.mark.compiler
def test_an_early_end_with_more_chunks_ahead_than_stages(folder: Path, whole_launches: None) -> None:
    """On two blocks the first matrix of a step is longer than the ring, so the producer warp is in the middle of it."""
    check_early_ends(opened(folder, EMULATOR))


def test_epochs_may_start_again(llm: LLM) -> None:
    plain = llm.generate(PROMPT, SamplingParams(max_tokens=20)).token_ids
    launcher = llm.engine.engine._scheduler._solo  # which decodes who is alone
    launcher._buffers["exchange"].fill(0)
    launcher._epochs = Epochs(epochs_of_step(tiny_weights().config.layers), first=EPOCH_LIMIT - 500)
    assert llm.generate(PROMPT, SamplingParams(max_tokens=20)).token_ids == plain
    assert launcher._epochs.take(1)[0] < EPOCH_LIMIT // 2, "the epochs did not pass their end"


@pytest.mark.parametrize("page_size", tiered([5, 64], [64]))
def test_page_sizes_give_the_same_bits(folder: Path, place: dict[str, Any], page_size: int) -> None:
    with opened(folder, place) as plain, opened(folder, place, plan={"page_size": page_size}) as other:
        np.testing.assert_array_equal(plain.score(PROMPT * 4).view(np.uint32), other.score(PROMPT * 4).view(np.uint32))
