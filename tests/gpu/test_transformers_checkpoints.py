"""Tiny random checkpoints that `transformers` itself writes, of every family: loaded as they are, they agree.

The checkpoint is read in the installed version's spelling and, with its config.json written again, in the other one.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cheetah.models.registry import family_of
from cheetah.runtime import LLM
from cheetah.runtime.checkpoint.loading import open_checkpoint
from tests.models.spellings import spelled_for
from tests.tolerances import LOGITS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

VERSION = int(transformers.__version__.split(".")[0])
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 333,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 20000.0,
}
# name: (model_type, what it has beside the sizes)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 with groups of 5": ("qwen3", {"num_attention_heads": 10, "head_dim": 128}),
    "qwen2": ("qwen2", {"hidden_size": 256}),
    "qwen2 with groups of 7": ("qwen2", {"num_attention_heads": 14, "hidden_size": 896}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 24}),
}
TOKENS = 60


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    """transformers' model in float32, of bf16 weights; norms and biases are not what a fresh model has."""
    model_type, changes = KINDS[request.param]
    torch.manual_seed(0)
    sizes = spelled_for(VERSION, {**SIZES, **changes})
    if model_type == "qwen2":
        del sizes["head_dim"]  # it is hidden_size / num_attention_heads
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    made = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32)
    with torch.no_grad():
        for name, values in made.named_parameters():
            if name.endswith("norm.weight"):
                values.copy_(1 + 0.2 * torch.randn_like(values))
            elif name.endswith(".bias"):
                values.copy_(0.5 * torch.randn_like(values))
            else:
                values.mul_(3.0)
            values.copy_(values.bfloat16().float())
    return made.eval()


@pytest.mark.parametrize("spelling", [4, 5])
@pytest.mark.parametrize("device", ["cuda", "emulator"])
def test_a_checkpoint_of_transformers_agrees(tmp_path: Path, model: Any, device: str, spelling: int) -> None:
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path)  # a copy: its rotary frequencies are rounded too
    values = json.loads((tmp_path / "config.json").read_text())
    if spelling != VERSION:
        (tmp_path / "config.json").write_text(json.dumps(spelled_for(spelling, values)))
    count = TOKENS if device == "cuda" else 30
    ids = [int(token) for token in np.random.default_rng(3).integers(0, SIZES["vocab_size"], count)]
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].numpy()
    checkpoint = open_checkpoint(tmp_path)
    reference = family_of(checkpoint.config).reference(checkpoint.config, checkpoint.tensor).forward(ids)
    np.testing.assert_allclose(reference, wanted, rtol=1e-3, atol=1e-3)
    with LLM(tmp_path, device=device, tokenizer=False, quiet=True) as llm:
        found = llm.score(ids)
    errors = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert errors.max() < LOGITS
