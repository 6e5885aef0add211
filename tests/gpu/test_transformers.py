"""Real shapes with random weights against `transformers` on the same GPU, in float32 and in its own bf16.

The measure is the KL divergence of the next-token distribution to that of float32 arithmetic on the same weights: ours
must not be above that of transformers' bf16. Repeated runs must give the same bits, with both exchanges the same ids.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cheetah.models.config import ModelConfig
from cheetah.models.formats.quantized import MIDDLE_CODE, QuantizedRows
from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.checkpoint.loading import Checkpoint, open_checkpoint
from cheetah.runtime.engine.engine import Engine
from cheetah.runtime.engine.launcher import Sampling
from tests.models.spellings import spelled_for

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.gpu_large]

STEPS = 512


def hf_config(config: ModelConfig) -> Any:
    """transformers' configuration of any family, from the spelling that the installed version reads."""
    values = spelled_for(int(transformers.__version__.split(".")[0]), config.to_dict())
    return transformers.AutoConfig.for_model(**values)


def hf_model(checkpoint: Checkpoint, dtype: Any) -> Any:
    """transformers' model with the checkpoint's weights, on the GPU."""
    config = hf_config(replace(checkpoint.config, weight_formats=()))  # quantised weights are given as what they mean
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cuda").to(dtype)
    # Buffers made on the meta device hold nothing.
    model.model.rotary_emb = type(model.model.rotary_emb)(config, device="cuda")
    state = model.state_dict()
    for name, target in state.items():
        source = "model.embed_tokens.weight" if name == "lm_head.weight" and checkpoint.config.tied_embeddings else name
        target.copy_(on_gpu(checkpoint, source).view(target.shape))
    return model.eval()


def on_gpu(checkpoint: Checkpoint, name: str) -> Any:
    """A tensor of the checkpoint as it is: bf16, or float32 of a quantised matrix."""
    if name.endswith("_proj.weight") and hasattr(matrix := checkpoint.rows(name), "scheme"):
        return dequantized(matrix[:])
    values = np.array(checkpoint.tensor(name))
    if values.dtype == np.uint16:
        return torch.from_numpy(values.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(values).cuda()


def dequantized(rows: QuantizedRows) -> Any:
    """float32 on the GPU: the numbers of `QuantizedRows.dequantized`, which would take minutes for 8B."""
    codes = torch.from_numpy(rows.codes).cuda()
    scales = torch.from_numpy(rows.scales.astype(np.float32)).cuda()

    def of_columns(of_groups: Any) -> Any:
        return of_groups.repeat_interleave(rows.group_columns, 1)[:, : codes.shape[1]]

    if rows.kind == "fp8":
        values = codes.view(torch.float8_e4m3fn).float()
    elif rows.zero_points is None:
        values = codes.float() - MIDDLE_CODE[rows.kind]
    else:
        values = codes.float() - of_columns(torch.from_numpy(rows.zero_points).cuda().float())
    found = values * of_columns(scales)
    np.testing.assert_array_equal(found[:2].cpu().numpy(), rows.with_planes(lambda plane: plane[:2]).dequantized())
    return found


def hf_logits(checkpoint: Checkpoint, dtype: Any, ids: list[int], last: int) -> np.ndarray:
    """float32 [last, vocab]: the logits of the last positions, teacher-forced."""
    return hf_logits_of_all(checkpoint, dtype, [ids], last)[0]


def hf_logits_of_all(checkpoint: Checkpoint, dtype: Any, texts: Sequence[list[int]], last: int) -> list[np.ndarray]:
    """The same of each text, by one model."""
    model = hf_model(checkpoint, dtype)
    found = []
    with torch.no_grad():
        for ids in texts:
            hidden = model.model(torch.tensor([ids], device="cuda")).last_hidden_state[0, -last:]
            found.append(model.lm_head(hidden).float().cpu().numpy())
    del model, hidden
    gc.collect()
    torch.cuda.empty_cache()
    return found


def mean_kl(reference: np.ndarray, other: np.ndarray) -> float:
    """Mean over rows of KL(softmax(reference) || softmax(other)), in float64 on the GPU."""
    total = 0.0
    for begin in range(0, len(reference), 64):
        p = torch.log_softmax(torch.from_numpy(reference[begin : begin + 64]).cuda().double(), -1)
        q = torch.log_softmax(torch.from_numpy(other[begin : begin + 64]).cuda().double(), -1)
        total += float((p.exp() * (p - q)).sum())
    return total / len(reference)


def in_one_process(names: Sequence[str]) -> list[Any]:
    """Parameters of a fixture that takes long: one process has all tests of each."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]


@pytest.fixture(scope="module", params=in_one_process(["llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b", "qwen3-8b"]))
def case(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """A random checkpoint, ids, and both of transformers' answers."""
    torch.backends.cuda.matmul.allow_tf32 = False
    checkpoint = open_checkpoint(f"random:{request.param}")
    ids = [int(i) for i in np.random.default_rng(7).integers(0, checkpoint.config.vocab_size, STEPS)]
    exact = hf_logits(checkpoint, torch.float32, ids, STEPS)
    bf16 = hf_logits(checkpoint, torch.bfloat16, ids, STEPS)
    yield {"name": request.param, "checkpoint": checkpoint, "ids": ids, "exact": exact, "bf16_kl": mean_kl(exact, bf16)}


def ours(case: dict[str, Any], **overrides: Any) -> Assembly:
    return assemble(case["checkpoint"], device="cuda", overrides=overrides, quiet=True)


@pytest.mark.parametrize("overrides", [{"sync": "flags"}, {"sync": "barrier"}, {"page_size": 64}])
def test_512_steps_are_as_near_to_float32_as_transformers_bf16(case: dict[str, Any], overrides: dict[str, Any]) -> None:
    assembly = ours(case, **overrides)
    try:
        engine = Engine(assembly.launcher)
        first = engine.score(case["ids"], assembly.logits_buffer())
        for _ in range(2):
            assert np.array_equal(first, engine.score(case["ids"], assembly.logits_buffer())), "bits moved between runs"
    finally:
        assembly.close()
    kl = mean_kl(case["exact"], first)
    print(f"\n{case['name']} {overrides}: KL ours {kl:.3e}, transformers bf16 {case['bf16_kl']:.3e}")
    assert np.isfinite(first).all()
    assert kl <= case["bf16_kl"]


def test_greedy_ids_are_the_same_in_every_run_and_with_both_exchanges(case: dict[str, Any]) -> None:
    runs = []
    for sync in ("flags", "flags", "barrier"):
        assembly = ours(case, sync=sync)
        try:
            done: list[int] = []
            inputs = case["ids"][:64]
            while len(done) < 128:
                result = assembly.launcher.launch(inputs, 64, Sampling())
                done += result.token_ids
                inputs = [done[-1]]
            runs.append(done[:128])
        finally:
            assembly.close()
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("context", [8000])
def test_a_long_context_is_as_near_to_float32(case: dict[str, Any], context: int) -> None:
    """The last 64 positions of 8064: split over many blocks and merged."""
    last = 64
    checkpoint = case["checkpoint"]
    ids = [int(i) for i in np.random.default_rng(8).integers(0, checkpoint.config.vocab_size, context + last)]
    exact, bf16 = (hf_logits(checkpoint, dtype, ids, last) for dtype in (torch.float32, torch.bfloat16))
    assembly = ours(case, max_context=8192)
    try:
        launcher = assembly.launcher
        for begin in range(0, context, launcher.max_steps):
            chunk = ids[begin : min(context, begin + launcher.max_steps)]
            launcher.launch([*chunk, ids[begin + len(chunk)]], len(chunk), Sampling())
        logits = launcher.score(ids[context:], assembly.logits_buffer())
    finally:
        assembly.close()
    kl, bf16_kl = mean_kl(exact, logits), mean_kl(exact, bf16)
    print(f"\n{case['name']} at {context}: KL ours {kl:.3e}, transformers bf16 {bf16_kl:.3e}")
    assert kl <= bf16_kl
