"""Adapters that are merged into a checkpoint: the numbers, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_kernel import FakeDevice, generate_kernel
from safetensors.numpy import load_file, save_file
from written_checkpoints import BF16, CONFIG, random_values, write_model

from cheetah.errors import CheetahError
from cheetah.models.dense.reference import Reference
from cheetah.models.rounding import widen
from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.checkpoint.lora import with_adapter
from tests.models.goldens.families import weights_of_model
from tests.models.test_against_transformers import config_of

GOLDENS = Path(__file__).parent / "goldens"
PROMPT = [3, 14, 15, 9, 26, 5, 35]
RANK, ALPHA = 4, 6
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"
STATED = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": ALPHA,
    "bias": "none",
    "target_modules": ["q_proj", "down_proj"],
}


def drawn(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def adapter_tensors(dtype: Any = np.float32) -> dict[str, Any]:
    """A and B of two matrices, by PEFT's names."""
    tensors = {}
    for seed, module in enumerate((Q, DOWN)):
        out, into = random_values()[f"{module}.weight"].shape
        tensors[f"base_model.model.{module}.lora_A.weight"] = drawn((RANK, into), 2 * seed, dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = drawn((out, RANK), 2 * seed + 1, dtype)
    return tensors


def write_adapter(folder: Path, tensors: dict[str, Any] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(STATED | changes))
    save_file(adapter_tensors() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def merged(tensors: dict[str, Any], scale: float) -> dict[str, Any]:
    """The checkpoint's tensors with an adapter, in float64, rounded once."""
    values = random_values()
    for module in (Q, DOWN):
        a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"].astype(np.float64) for part in "AB")
        weight = values[f"{module}.weight"].astype(np.float64)
        values[f"{module}.weight"] = (weight + scale * (b @ a)).astype(np.float32).astype(BF16)
    return values


def test_an_adapter_of_gated_delta_net_is_added_to_all_its_products(tmp_path: Path) -> None:
    """Also to those of a number of each head; its taps are no matrix."""
    config = config_of("qwen3_5_text")
    values = {name: numbers.astype(BF16) for name, numbers in weights_of_model(config).items()}
    source = write_model(tmp_path / "model", values, config)
    layer = "model.layers.1.linear_attn."
    tensors, wanted = {}, {}
    for seed, name in enumerate(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")):
        out, into = values[f"{layer}{name}.weight"].shape
        a, b = drawn((RANK, into), seed), drawn((out, RANK), seed + 9)
        tensors |= {f"base_model.model.{layer}{name}.lora_{part}.weight": one for part, one in (("A", a), ("B", b))}
        wanted[f"{layer}{name}.weight"] = values[f"{layer}{name}.weight"].astype(np.float64) + 1.5 * (b @ a)
    read = with_adapter(open_checkpoint(source), write_adapter(tmp_path / "adapter", tensors))
    for name, numbers in wanted.items():
        assert np.allclose(widen(read.rows(name)[:]), numbers, rtol=2**-8, atol=1e-5), name
    tensors[f"base_model.model.{layer}conv1d.lora_A.weight"] = drawn((RANK, 4), 0)
    with pytest.raises(CheetahError, match="linear_attn.conv1d.weight', of which the model has no such matrix"):
        with_adapter(open_checkpoint(source), write_adapter(tmp_path / "adapter", tensors))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rooted", [False, True])
def test_matrices_are_those_with_b_times_a_added(tmp_path: Path, dtype: Any, rooted: bool) -> None:
    tensors = adapter_tensors(dtype)
    adapter = write_adapter(tmp_path / "adapter", tensors, use_rslora=rooted)
    checkpoint = with_adapter(open_checkpoint(write_model(tmp_path / "model")), str(adapter))
    wanted = merged(tensors, ALPHA / (math.sqrt(RANK) if rooted else RANK))
    for name, value in wanted.items():
        found = checkpoint.tensor(name)
        if name in (f"{Q}.weight", f"{DOWN}.weight"):
            assert np.allclose(widen(found), value.astype(np.float32), rtol=2**-8, atol=1e-5), name
        else:
            assert np.array_equal(found, value.view(np.uint16)), name
    rows = checkpoint.rows(f"{Q}.weight")
    parts = np.concatenate([rows[first : first + 7] for first in range(0, rows.shape[0], 7)])
    assert np.abs(widen(parts) - widen(checkpoint.tensor(f"{Q}.weight"))).max() < 0.1
    assert "rank 4" in checkpoint.notes[-1] and "2 matrices" in checkpoint.notes[-1]


@pytest.mark.parametrize("name", ["peft", "peft_rooted"])
def test_an_adapter_of_peft_is_merged_as_peft_merges_it(tmp_path: Path, name: str) -> None:
    """Matrices but for one rounding, and the logits of the model with the adapter beside it: see
    `goldens/make_peft.py`."""
    small = {n: value if value.ndim == 1 else (value * 0.125).astype(BF16) for n, value in random_values().items()}
    base = open_checkpoint(write_model(tmp_path / "model", small))
    checkpoint, golden = with_adapter(base, str(GOLDENS / name)), load_file(GOLDENS / name / "merged.safetensors")
    wanted = golden.pop("logits")
    for matrix, value in golden.items():
        assert np.allclose(widen(checkpoint.tensor(matrix)), value, rtol=2**-8, atol=0), matrix
    merged, without = (Reference(one.config, one.tensor).forward(PROMPT) - wanted for one in (checkpoint, base))
    assert np.linalg.norm(merged) < 0.01 * np.linalg.norm(wanted) < 0.1 * np.linalg.norm(without)


@pytest.mark.slow
def test_a_model_with_an_adapter_answers_as_the_merged_one(tmp_path: Path) -> None:
    """Numbers that are sums of few powers of two: both ways round alike."""
    tensors = {name: np.sign(value).astype(np.float32) / 4 for name, value in adapter_tensors().items()}
    adapter = write_adapter(tmp_path / "adapter", tensors, lora_alpha=RANK)
    values = {
        name: (np.round(value.astype(np.float32) * 8) / 8).astype(BF16) for name, value in random_values().items()
    }
    whole = dict(values)
    for module in (Q, DOWN):
        a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        whole[f"{module}.weight"] = (values[f"{module}.weight"].astype(np.float32) + b @ a).astype(BF16)
    base, by_hand = write_model(tmp_path / "model", values), write_model(tmp_path / "merged", whole)
    how: dict[str, Any] = {"generate_kernel": generate_kernel, "quiet": True, "tokenizer": False}
    found = []
    for folder, options in ((base, {"lora": adapter}), (by_hand, {}), (base, {})):
        with LLM(folder, device=FakeDevice(), **how, **options) as llm:
            found.append(llm.generate([3, 4, 5], SamplingParams(max_tokens=12)).token_ids)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3': LORA alone"),
        ({"r": 0}, "r is 0: expected an integer from 1"),
        ({"r": True}, "r is True"),
        ({"r": 8}, "lora_A of model.layers.0.mlp.down_proj.weight is [4, 40] of F32, expected [8, 40]"),
        ({"lora_alpha": None}, "lora_alpha is None: expected a number"),
        ({"lora_alpha": "6"}, "lora_alpha is '6'"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is {'q_proj': 8}"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"use_rslora": 1}, "use_rslora is 1"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not supported"),
        ({"kasa_config": {}}, "kasa_config is {}"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_an_adapter_may_not_say(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, write_adapter(tmp_path / "adapter", **changes))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (f"{Q}.lora_B", None, "q_proj.weight has lora_A and no lora_B"),
        (f"{Q}.lora_A", "model.layers.9.self_attn.q_proj.lora_A", "adapts 'model.layers.9.self_attn.q_proj.weight'"),
        (f"{Q}.lora_A", "model.norm.lora_A", "adapts 'model.norm.weight', of which"),
        (f"{Q}.lora_A", f"{Q}.lora_magnitude_vector", "is no lora_A or lora_B of a linear layer"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, old: str, new: str | None, words: str) -> None:
    tensors = adapter_tensors()
    moved = tensors.pop(f"base_model.model.{old}.weight")
    if new is not None:
        tensors[f"base_model.model.{new}.weight"] = moved
    assert words in refusal(tmp_path, write_adapter(tmp_path / "adapter", tensors))


def test_numbers_that_are_none_and_folders_that_are_no_adapter(tmp_path: Path) -> None:
    tensors = adapter_tensors()
    tensors[f"base_model.model.{Q}.lora_A.weight"][0, 0] = np.nan
    assert "infinite or NaN" in refusal(tmp_path, write_adapter(tmp_path / "adapter", tensors))
    assert "adapter_config.json and adapter_model.safetensors" in refusal(tmp_path, tmp_path / "nothing")
    assert "several at a time are not supported" in refusal(tmp_path, [tmp_path, tmp_path])
    assert refusal(tmp_path, [tmp_path / "none"]) == refusal(tmp_path, tmp_path / "none")
    with pytest.raises(CheetahError, match="merged into 16-bit weights alone"):
        with_adapter(open_checkpoint("random:demo@int8"), write_adapter(tmp_path / "adapter"))


def refusal(tmp_path: Path, adapter: object) -> str:
    """What is said of an adapter for the small model."""
    with pytest.raises(CheetahError) as raised:
        with_adapter(open_checkpoint(write_model(tmp_path / "model", config=CONFIG)), adapter)
    return str(raised.value)
