"""Gated DeltaNet: the recurrence of the reference against its formulas in float64, and how Qwen3.5's files are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from cheetah.models.config_json import ConfigError
from cheetah.models.dense.delta import DeltaState, DeltaWeights, delta_step
from cheetah.models.dense.reference import Reference
from cheetah.models.formats.nearest import nearest_rows
from cheetah.models.formats.quantized import scheme_of_name
from cheetah.models.layer_kind import DeltaNet, Routing
from cheetah.models.registry import read_config
from cheetah.models.rounding import exact
from cheetah.plan.products import Experts
from cheetah.runtime.checkpoint.loading import LoadingError, open_checkpoint
from cheetah.tools.quantize import quantization_job
from tests.models.goldens.families import tokens_of, weights_of_model
from tests.models.test_against_transformers import GOLDENS

GOLDEN: dict[str, Any] = GOLDENS["qwen3_5_text"]["config"]
KIND = DeltaNet(key_heads=2, value_heads=6, key_dim=16, value_dim=8, taps=4)
HIDDEN, TOKENS = 24, 400


def drawn_weights() -> DeltaWeights:
    """Rates up to 16; head 0 forgets everything at every token, head 1 nearly nothing; head 2 writes all of a value,
    head 3 nearly nothing."""
    random = np.random.default_rng(3)

    def matrix(rows: int, columns: int = HIDDEN) -> Any:
        return random.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)

    rate = np.exp(random.uniform(-4, np.log(16), KIND.value_heads)).astype(np.float32)
    rate_bias = np.array([300, -30, 0, 1, -2, 0.5], np.float32)
    b = matrix(KIND.value_heads)
    b[2], b[3] = 40 * np.abs(b[2]), -40 * np.abs(b[3])
    norm = 1 + random.standard_normal(KIND.value_dim, np.float32) * np.float32(0.3)
    rows = (matrix(KIND.channels), matrix(KIND.value_rows), b, matrix(KIND.value_heads))
    return DeltaWeights(KIND, *rows, matrix(KIND.channels, KIND.taps), rate, rate_bias, norm, matrix(HIDDEN, 48))


def by_formulas(weights: DeltaWeights, inputs: Any) -> Any:
    """All tokens, head by head, in float64: what the paper writes, with matrices (I - b k k^T)."""
    numbers = {name: np.asarray(value, np.float64) for name, value in vars(weights).items() if name != "kind"}
    x = np.concatenate([np.zeros((KIND.taps - 1, KIND.channels)), inputs @ numbers["qkv"].T])
    mixed = sum(x[tap : tap + len(inputs)] * numbers["taps"][:, tap] for tap in range(KIND.taps))
    mixed = mixed / (1 + np.exp(-mixed))
    queries, keys, values = np.split(mixed, [KIND.key_rows, 2 * KIND.key_rows], axis=1)
    found = np.zeros((len(inputs), KIND.value_heads, KIND.value_dim))
    for head in range(KIND.value_heads):
        part = slice(head // 3 * KIND.key_dim, (head // 3 + 1) * KIND.key_dim)
        memory = np.zeros((KIND.key_dim, KIND.value_dim))
        for token, one in enumerate(inputs):
            q, k = (whole[token, part] / np.sqrt((whole[token, part] ** 2).sum() + 1e-6) for whole in (queries, keys))
            v = values[token, head * KIND.value_dim : (head + 1) * KIND.value_dim]
            written = 1 / (1 + np.exp(-numbers["b"][head] @ one))
            rate = numbers["rate"][head] * np.logaddexp(0, numbers["a"][head] @ one + numbers["rate_bias"][head])
            memory = np.exp(-rate) * (memory - written * np.outer(k, k @ memory)) + written * np.outer(k, v)
            found[token, head] = q @ memory / np.sqrt(KIND.key_dim)
    gates = (inputs @ numbers["z"].T).reshape(found.shape)
    normed = found / np.sqrt((found**2).mean(-1, keepdims=True) + 1e-6) * numbers["norm"]
    return (normed * gates / (1 + np.exp(-gates))).reshape(len(inputs), -1)


def test_the_recurrence_is_that_of_the_formulas_for_many_tokens() -> None:
    weights, inputs = drawn_weights(), np.random.default_rng(5).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    state, found = DeltaState.empty(KIND), []
    for one in inputs:
        output, state = delta_step(weights, state, one, 1e-6, exact)
        found.append(output)
    wanted = by_formulas(weights, inputs.astype(np.float64))
    assert np.linalg.norm(np.stack(found) - wanted) < 1e-5 * np.linalg.norm(wanted)


def test_a_sequence_whose_last_token_is_forgotten_goes_on_as_if_it_had_not_been() -> None:
    config = read_config(GOLDEN)
    ids = tokens_of(config.vocab_size)[:6]
    reference = Reference(config, weights_of_model(config))
    wanted = reference.forward(ids)
    reference.forward(ids[:4])
    reference.step(49)
    reference.forget_last()
    assert np.array_equal(reference.step(ids[4]), wanted[4]) and np.array_equal(reference.step(ids[5]), wanted[5])


def in_a_file(name: str, numbers: Any) -> Any:
    """Of the parts that files have in f32 and bf16 the first."""
    is_f32 = name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight"))
    return (numbers + np.float32(1e-4)).astype(np.float32) if is_f32 else numbers.astype(ml_dtypes.bfloat16)


def test_the_text_part_of_a_file_is_read_and_its_rates_are_not_rounded(tmp_path: Path) -> None:
    config = read_config(GOLDEN)
    stored = {name: in_a_file(name, numbers) for name, numbers in weights_of_model(config).items()}
    named = {name.replace("model.", "model.language_model.", 1): numbers for name, numbers in stored.items()}
    others = {"model.visual.merger.norm.weight": (4,), "mtp.fc.weight": (4, 8), "mtp.norm.weight": (4,)}
    named |= {name: np.zeros(shape, ml_dtypes.bfloat16) for name, shape in others.items()}
    save_file(named, tmp_path / "model.safetensors")
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"text_config": GOLDEN}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == config
    for name, numbers in stored.items():
        kept = numbers if numbers.dtype == np.float32 else numbers.view(np.uint16)
        assert np.array_equal(checkpoint.tensor(name), kept), name
    notes = "\n".join(checkpoint.notes)
    assert "1 tensors of visual are not read" in notes and "2 tensors of mtp are not read" in notes
    assert "rounded" not in notes
    assert checkpoint.config.shape.delta is not None


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "qwen3_next"])
def test_a_quantised_copy_leaves_the_numbers_of_heads(tmp_path: Path, name: str) -> None:
    config, scheme = read_config(GOLDENS[name]["config"]), scheme_of_name("int8", "bf16")
    stored = {tensor: in_a_file(tensor, numbers) for tensor, numbers in weights_of_model(config).items()}
    (tmp_path / "source").mkdir()
    save_file(stored, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text(json.dumps(GOLDENS[name]["config"]))
    quantization_job(str(tmp_path / "source"), scheme, clip=False).write(tmp_path / "out", lambda done: None, 1)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert {*dict(checkpoint.config.weight_formats)} == {product.name for product in config.quantisable}
    for tensor, numbers in stored.items():
        kept = ("gate.weight", "in_proj_b.weight", "in_proj_a.weight", "in_proj_ba.weight")
        if numbers.ndim == 2 and ".layers." in tensor and not tensor.endswith(kept):
            wanted = nearest_rows(numbers.astype(np.float32), scheme).dequantized()
            assert np.array_equal(checkpoint.tensor(tensor), wanted), tensor
        elif numbers.dtype != np.float32:
            assert np.array_equal(checkpoint.tensor(tensor), numbers.view(np.uint16)), tensor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_gate_type": "sigmoid"}, "output_gate_type = .sigmoid. is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = .bfloat16. is not supported"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads = 5 is not a multiple of linear_num_key_heads = 2"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads = 0: must be a positive integer"),
        ({"linear_conv_kernel_dim": 10**9}, "linear_conv_kernel_dim = 1000000000: must be from 1 to 64"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types = .* for each of 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types = .* 'linear_attention' for each of 4 layers"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(GOLDEN | changes)


def test_layers_without_types_have_attention_in_each_fourth() -> None:
    without = {name: value for name, value in GOLDEN.items() if name != "layer_types"} | {"num_hidden_layers": 9}
    assert read_config(without).delta_layers == (0, 1, 2, 4, 5, 6, 8)
    assert read_config(without | {"full_attention_interval": 2}).delta_layers == (0, 2, 4, 6, 8)


def test_experts_of_a_hybrid_have_one_that_every_token_has() -> None:
    golden = GOLDENS["qwen3_5_moe_text"]["config"]
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    config = read_config(outer | {"text_config": golden})
    assert config.routing == Routing(5, 2, shared=48) and config.intermediate_size == 32
    assert config.table.experts == Experts(5, 2, shared=48)
    with pytest.raises(ConfigError, match="norm_topk_prob = False is not supported"):
        read_config(GOLDENS["qwen3_next"]["config"] | {"norm_topk_prob": False})
    with pytest.raises(ConfigError, match="decoder_sparse_step = 2 is not supported"):
        read_config(golden | {"decoder_sparse_step": 2})
    for width in (0, -1, 2**40, float("nan")):
        with pytest.raises(ConfigError, match="shared_expert_intermediate_size = .*: must be"):
            read_config(golden | {"shared_expert_intermediate_size": width})


@pytest.mark.parametrize(
    ("tensor", "cut", "words"),
    [
        ("linear_attn.A_log", np.s_[:1], r"A_log is \[1\], expected \[2\]"),
        ("linear_attn.conv1d.weight", np.s_[:, :, :3], r"conv1d.weight is \[512, 1, 3\], expected \[512, 1, 4\]"),
        ("mlp.shared_expert_gate.weight", np.s_[:, :5], r"shared_expert_gate.weight is \[1, 5\], expected \[1, 128\]"),
    ],
)
def test_tensors_of_other_shapes_are_refused_by_name(tmp_path: Path, tensor: str, cut: Any, words: str) -> None:
    config = GOLDENS["qwen3_5_moe_text"]["config"]
    stored = {name: in_a_file(name, numbers) for name, numbers in weights_of_model(read_config(config)).items()}
    name = f"model.layers.0.{tensor}"
    save_file(stored | {name: np.ascontiguousarray(stored[name][cut])}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadingError, match=words):
        open_checkpoint(tmp_path)
