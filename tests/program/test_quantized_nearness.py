"""How near decoding with quantised weights is to float32 with what they stand for, on trained models in the emulator.

The measure is the KL divergence of the next-token distribution to that of a float32 forward of the dequantised weights.
`transformers` in bf16, where it is installed, must not be nearer; and it is not much farther than that forward with its
vectors rounded to bf16. A line of JSON is printed for each. `tests/gpu/test_quantized_transformers.py` asks it of 8B.
"""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cheetah import LLM
from cheetah.models.dense.reference import Reference
from cheetah.models.dense.weights import tensor_shapes
from cheetah.models.rounding import F32, round_to_bf16, widen
from cheetah.runtime.checkpoint.loading import Checkpoint, open_checkpoint
from cheetah.tools.circumstances import commit
from tests.program.test_against_reference import trained_checkpoint
from tests.program.test_quantized_checkpoints import written
from tests.tiers import tiered
from tests.tolerances import ROUNDINGS

__all__ = ["trained_checkpoint"]  # a fixture
pytestmark = [pytest.mark.compiler, pytest.mark.slow]

FORMATS = ("int4-g64", "int4-g64-asym", "int8", "fp8", "fp8-block128")
POSITIONS = 64


@pytest.mark.parametrize("format", tiered(FORMATS, ["int4-g64-asym", "int8", "fp8-block128"]))
def test_the_demo_model(tmp_path: Path, format: str) -> None:
    check_nearness("demo", tmp_path, format, [0, 100, 200, 300])


@pytest.mark.exhaustive
@pytest.mark.parametrize("format", FORMATS)
def test_the_trained_checkpoint(tmp_path: Path, trained_checkpoint: Path, format: str) -> None:
    check_nearness(str(trained_checkpoint), tmp_path, format, [1, 403, 407])


def check_nearness(model: str, folder: Path, format: str, prompt: list[int]) -> None:
    quantised = str(written(model, folder / "model", format))
    checkpoint = open_checkpoint(quantised)
    ids = [*prompt, *Reference(checkpoint.config, checkpoint.tensor).generate(prompt, POSITIONS)][:POSITIONS]
    exact = Reference(checkpoint.config, checkpoint.tensor).forward(ids)
    found = {"kl": divergence(exact, decoded(quantised, ids)), "bf16_kl": divergence(exact, in_bf16(checkpoint, ids))}
    if find_spec("transformers") and find_spec("torch"):
        found["transformers_bf16_kl"] = divergence(exact, by_transformers(checkpoint, ids))
    told = {"commit": commit(), "model": Path(model).name, "weights": format, "positions": len(ids), **found}
    print(f"\n{json.dumps(told)}")
    assert 0 < found["kl"] < ROUNDINGS * found["bf16_kl"]
    assert found["kl"] <= found.get("transformers_bf16_kl", np.inf)


def decoded(model: str, ids: list[int]) -> F32:
    """[positions, vocab], by the kernel."""
    with LLM(model, device="emulator", gpu="emulator-2", quiet=True, tokenizer=False, prompt_tokens=0) as llm:
        return llm.score(ids)


def in_bf16(checkpoint: Checkpoint, ids: list[int]) -> F32:
    """The reference with weights, and vectors that enter products, rounded to bf16; sums are in float32."""
    rounded = Reference(
        checkpoint.config, lambda name: round_to_bf16(widen(checkpoint.tensor(name))), rounding=round_to_bf16
    )
    return rounded.forward(ids)


def by_transformers(checkpoint: Checkpoint, ids: list[int]) -> F32:
    """Its model in bf16 on the CPU, with the dequantised weights."""
    torch, library = importlib.import_module("torch"), importlib.import_module("transformers")
    fields = {**checkpoint.config.to_dict(), "quantization_config": None}
    model = library.LlamaForCausalLM(library.LlamaConfig(**fields))
    names = tensor_shapes(checkpoint.config)
    state: dict[str, Any] = {name: torch.from_numpy(widen(checkpoint.tensor(name)).copy()) for name in names}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state)
    with torch.no_grad():
        logits = model.to(torch.bfloat16).eval()(torch.tensor([ids])).logits[0]
    return np.asarray(logits.float().numpy())


def divergence(exact: F32, other: F32) -> float:
    """Mean over positions of KL(softmax(exact) || softmax(other))."""
    p, q = log_softmax(exact), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def log_softmax(logits: F32) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
