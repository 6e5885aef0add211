"""Quantised weights at the real shapes of 8B: how near decoding is to float32 with the same dequantised weights.

The measure is the KL divergence of the next-token distribution to that of `transformers` in float32; `transformers` in
its own bf16, of the same dequantised weights, must not be nearer. Products differ in how many sequences a step takes.
A line of JSON is printed for each.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cheetah.models.config import ModelConfig
from cheetah.plan import Plan, gpu_named, step_matrices
from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.checkpoint.loading import Checkpoint, open_checkpoint
from cheetah.runtime.engine.launcher import Part
from cheetah.tools.circumstances import commit
from tests.gpu.test_batches import sequence
from tests.gpu.test_transformers import hf_model, in_one_process, mean_kl
from tests.program.rig import F32

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.gpu_large]

MODEL = "llama-3.1-8b"
FORMATS = ("int4-g128", "int4-g128-asym", "int8", "fp8", "fp8-block128")
SEQUENCES, TOKENS = 8, 128


@dataclass(frozen=True)
class Case:
    """ids: [sequences, tokens]. exact: their logits in float32 arithmetic, [sequences, tokens, vocab]. bf16_kl: how far
    transformers' bf16 is from them."""

    checkpoint: Checkpoint
    ids: np.ndarray
    exact: F32
    bf16_kl: float


@pytest.fixture(scope="module", params=in_one_process(FORMATS))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    torch.backends.cuda.matmul.allow_tf32 = False
    checkpoint = open_checkpoint(f"random:{MODEL}@{request.param}")
    ids = np.random.default_rng(7).integers(0, checkpoint.config.vocab_size, (SEQUENCES, TOKENS))
    model = hf_model(checkpoint, torch.float32)
    exact = logits_of(model, ids)
    model = model.to(torch.bfloat16)
    # Rounded with all else; transformers keeps the frequencies of angles in float32.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config, device="cuda")
    bf16_kl = divergence(exact, logits_of(model, ids))
    del model
    gc.collect()
    torch.cuda.empty_cache()
    yield Case(checkpoint, ids, exact, bf16_kl)


def logits_of(model: Any, ids: np.ndarray) -> F32:
    with torch.no_grad():
        found: F32 = model(torch.from_numpy(ids).cuda()).logits.float().cpu().numpy()
    return found


def divergence(exact: F32, other: F32) -> float:
    return mean_kl(exact.reshape(-1, exact.shape[-1]), other.reshape(-1, other.shape[-1]))


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
def test_decoding_is_as_near_to_float32_as_transformers_bf16(case: Case, batch: int) -> None:
    ready = assemble(
        case.checkpoint,
        device="cuda",
        overrides={"batch": batch},
        prompt_tokens=batch,
        solo=False,
        prompt_passes=False,
        quiet=True,
    )
    try:
        found = np.concatenate([decoded(ready, ids) for ids in case.ids.reshape(-1, batch, TOKENS)])
        kinds = vector_kinds(case.checkpoint.config, ready)
    finally:
        ready.close()
    kl = divergence(case.exact, found)
    record = {
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(),
        "model": case.checkpoint.name.removeprefix("random:"),
        "batch": batch,
        "vectors": kinds,
        "positions": case.ids.size,
        "kl": kl,
        "transformers_bf16_kl": case.bf16_kl,
        "kernel": ready.manifest.text_sha256[:16],
    }
    print(f"\n{json.dumps(record)}")
    assert np.isfinite(found).all()
    assert kl <= case.bf16_kl


def decoded(ready: Assembly, ids: np.ndarray) -> F32:
    """[sequences, tokens, vocab]: the logits after each token of some sequences that are decoded together."""
    launcher, logits = ready.launcher, ready.logits_buffer()
    caches, steps = [sequence(ready) for _ in ids], launcher.score_steps(logits)
    found = np.empty((*ids.shape, launcher.vocab_size), np.float32)
    for begin in range(0, ids.shape[1], steps):
        parts = [
            Part(cache, [int(token) for token in row[begin : begin + steps]], min(steps, len(row) - begin))
            for cache, row in zip(caches, ids, strict=True)
        ]
        launcher.launch_together(parts, logits)
        rows = logits.download(np.float32, (parts[0].steps, launcher.tokens, launcher.vocab_size))
        order = [part for part, _ in launcher.columns]
        for number in range(len(ids)):
            found[number, begin : begin + parts[0].steps] = rows[:, order.index(number)]
    for cache in caches:
        cache.clear()
    return found


def vector_kinds(config: ModelConfig, ready: Assembly) -> dict[str, str]:
    """As what each matrix takes the vectors of a step."""
    plan = Plan.from_dict(ready.manifest.plan)
    matrices = step_matrices(config.shape, plan, gpu_named(ready.manifest.gpu["name"]))
    return {one.name: one.vector_kind(plan.tokens) for one in matrices}
