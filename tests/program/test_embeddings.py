"""`LLM.embed`: vectors of whole texts from the hidden states that passes leave, against float32, beside who decodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cheetah.errors import CheetahError
from cheetah.models.dense.reference import Reference
from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.outputs import EmbeddingRequestOutput
from tests.program.rig import relative_error, token_ids

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

LENGTHS = (3, 130, 40, 250, 1, 90)
TOLERANCE = 0.05
"""Relative error of a vector (seen: 0.02)."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options: dict[str, Any] = {"batch": 4, "max_context": 256, "plan": {"consumer_warps": 2}}
    with LLM("demo", device="emulator", gpu="emulator-2", prompt_passes=True, quiet=True, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [token_ids(length, 500, length) for length in LENGTHS]


@pytest.fixture(scope="module")
def states(prompts: list[list[int]]) -> list[np.ndarray]:
    """Of each prompt float32 [tokens, hidden]."""
    checkpoint = open_checkpoint("demo")
    found = []
    for ids in prompts:
        reference = Reference(checkpoint.config, checkpoint.tensor)
        found.append(np.stack([reference.hidden_state(token) for token in ids]))
    return found


def vectors(outputs: list[EmbeddingRequestOutput]) -> np.ndarray:
    found = np.stack([output.outputs.embedding for output in outputs])
    assert found.dtype == np.float32
    return found


def test_the_last_or_the_mean_of_the_hidden_states(
    llm: LLM, prompts: list[list[int]], states: list[np.ndarray]
) -> None:
    """More prompts than sequences, some of which share a pass, one that is longer than a short one has room for."""
    last, mean = np.stack([one[-1] for one in states]), np.stack([one.mean(axis=0) for one in states])
    outputs = llm.embed(prompts, normalize=False)
    assert [output.prompt_token_ids for output in outputs] == [tuple(ids) for ids in prompts]
    assert relative_error(vectors(outputs), last) < TOLERANCE
    assert relative_error(vectors(llm.embed(prompts, pooling="mean", normalize=False)), mean) < TOLERANCE
    units = vectors(llm.embed(prompts, pooling="mean"))
    np.testing.assert_allclose(np.linalg.norm(units, axis=1), 1, rtol=1e-6)
    assert relative_error(units, mean / np.linalg.norm(mean, axis=1, keepdims=True)) < TOLERANCE


@pytest.mark.exhaustive
def test_a_prompt_in_several_passes_has_the_same_vector(llm: LLM, prompts: list[list[int]]) -> None:
    """By the same kernel, which does not say where one ended."""
    passes = llm.engine.engine._passes[-1]
    whole = {pooling: llm.embed(prompts[3], pooling=pooling).outputs.embedding for pooling in ("last", "mean")}
    room = passes.tokens
    try:
        passes.tokens = 112
        for pooling, vector in whole.items():
            again = llm.embed(prompts[3], pooling=pooling).outputs.embedding
            np.testing.assert_allclose(again, vector, rtol=0, atol=0 if pooling == "last" else 1e-5)
    finally:
        passes.tokens = room


def test_beside_who_decodes(llm: LLM, prompts: list[list[int]]) -> None:
    """A stream goes on as if nothing had been embedded, and all pages are given back."""
    pool = llm.engine.engine.launcher.cache.pool
    params, alone = SamplingParams(max_tokens=30, ignore_eos=True), vectors(llm.embed(prompts[:3]))
    expected = llm.generate(prompts[2], params).token_ids
    free = pool.available_pages
    stream = llm.stream(prompts[2], params)
    made = list(next(stream).token_ids)
    np.testing.assert_array_equal(vectors(llm.embed(prompts[:3])), alone)
    made += [token for piece in stream for token in piece.token_ids]
    assert tuple(made) == expected and pool.available_pages == free


def test_text_and_what_is_refused(llm: LLM) -> None:
    output = llm.embed("One morning,")
    assert output.prompt == "One morning," and output.outputs.hidden_size == llm.config.hidden_size
    with pytest.raises(CheetahError, match=r"pooling='cls': expected one of last, mean"):
        llm.embed("a", pooling="cls")
    with pytest.raises(CheetahError, match="300 tokens do not fit the context of 256"):
        llm.embed([[1] * 300])
    engine = llm.engine.engine
    passes, engine._passes = engine._passes, ()
    try:
        with pytest.raises(CheetahError, match="passes over prompts, of which there are none"):
            llm.embed("a")
    finally:
        engine._passes = passes
