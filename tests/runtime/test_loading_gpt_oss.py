"""Checkpoints of gpt-oss: experts of a layer in one tensor, in MXFP4 or, as fine-tunes have them, bf16 transposed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantized_checkpoints import write_quantized
from test_repacking import check_alike
from written_checkpoints import random_values, refusal, write_model

from cheetah.models.config_json import FULL, SLIDING
from cheetah.models.formats.nearest import nearest_rows
from cheetah.models.formats.quantized import scheme_of_name
from cheetah.models.gpt_oss import YARN, GptOssConfig
from cheetah.models.layer_kind import ClampedGate, Routing
from cheetah.models.registry import preset, read_config
from cheetah.models.rounding import widen
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.checkpoint.random_weights import random_tensors
from cheetah.tools import quantize

HIDDEN, WIDTH, EXPERTS = 64, 96, 3
CONFIG = GptOssConfig(
    *(HIDDEN, WIDTH, 2, 4, 2, 64, 50),
    rope=replace(YARN, original_max_position_embeddings=256),
    sliding_window=8,
    layer_types=(SLIDING, FULL),
    routing=Routing(EXPERTS, 2, biases=True),
    clamped_gate=ClampedGate(1.702, 7.0),
)
STATED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
MERGED = "model.layers.{}.mlp.experts.{}_proj"
SIZES = {"gate_up": (2 * WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
PUBLISHED_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {**STATED, "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"rope_type": "yarn", "truncate": False},
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}


def expert_free(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if ".experts." not in name}


def of_bf16() -> dict[str, Any]:
    """Merged and transposed."""
    values = random_values(CONFIG)
    tensors = expert_free(values)
    for layer in range(2):
        for part in SIZES:
            name = f"model.layers.{layer}.mlp.experts.{{}}.{part}_proj"
            experts = [values[f"{name.format(expert)}.weight"].T for expert in range(EXPERTS)]
            tensors[MERGED.format(layer, part)] = np.ascontiguousarray(np.stack(experts))
            biases = [values[f"{name.format(expert)}.bias"] for expert in range(EXPERTS)]
            tensors[f"{MERGED.format(layer, part)}_bias"] = np.stack(biases)
    return tensors


def of_mxfp4() -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors, and what those of experts stand for, by the format's definition."""
    draw, tensors, meant = np.random.default_rng(5), of_bf16(), {}
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for layer in range(2):
        for part, (rows, columns) in SIZES.items():
            name = MERGED.format(layer, part)
            del tensors[name]
            blocks = draw.integers(0, 256, (EXPERTS, rows, columns // 32, 16)).astype(np.uint8)
            scales = draw.integers(118, 126, (EXPERTS, rows, columns // 32)).astype(np.uint8)
            scales[0, 0, 0], scales[0, 1, 0] = 0, 251
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(EXPERTS, rows, columns)
            values = np.array([*numbers, *(-one for one in numbers)])[codes]
            values = values * 2.0 ** (scales.astype(np.float64) - 127).repeat(32, axis=2)
            for expert in range(EXPERTS):
                meant[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"] = values[expert]
    return tensors, meant


def test_mxfp4_is_what_it_stands_for(tmp_path: Path) -> None:
    tensors, meant = of_mxfp4()
    checkpoint = open_checkpoint(write_quantized(tmp_path / "model", tensors, STATED, CONFIG))
    assert checkpoint.config == replace(CONFIG, weight_formats=(("gate_up", "mxfp4"), ("down", "mxfp4")))
    assert checkpoint.notes == () and checkpoint.quantization == "mxfp4"
    for name, values in meant.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), values.astype(np.float32))
    bias = "model.layers.1.mlp.experts.2.down_proj.bias"
    wanted = tensors[f"{MERGED.format(1, 'down')}_bias"][2]
    np.testing.assert_array_equal(checkpoint.tensor(bias), wanted.view(np.uint16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_in_16_bits_are_turned(tmp_path: Path, dtype: str) -> None:
    tensors = of_bf16()
    stored = {name: value.astype(dtype) for name, value in tensors.items()}
    checkpoint = open_checkpoint(write_model(tmp_path / "model", stored, CONFIG))
    assert checkpoint.config == CONFIG
    for name, value in random_values(CONFIG).items():
        np.testing.assert_array_equal(checkpoint.tensor(name), value.view(np.uint16))
        if value.ndim == 2:
            np.testing.assert_array_equal(checkpoint.rows(name)[3:9], value.view(np.uint16)[3:9])


@pytest.mark.slow
@pytest.mark.compiler
def test_a_device_packs_experts_as_their_files_have_them(tmp_path: Path) -> None:
    """Gate and up of one tensor, whose rows are theirs in turn; in bf16 with rows and columns exchanged."""
    works = 2 * (3 + 2 * EXPERTS) + 1
    check_alike(write_quantized(tmp_path / "mxfp4", of_mxfp4()[0], STATED, CONFIG), works)
    check_alike(write_model(tmp_path / "bf16", of_bf16(), CONFIG), works)


def test_a_copy_in_8_bits_has_experts_one_by_one(tmp_path: Path) -> None:
    source, scheme = write_model(tmp_path / "source", of_bf16(), CONFIG), scheme_of_name("int8-g32", "bf16")
    quantize.quantization_job(str(source), scheme, clip=False).write(tmp_path / "copy", lambda done: None, 1)
    checkpoint = open_checkpoint(tmp_path / "copy")
    assert dict(checkpoint.config.weight_formats) == dict.fromkeys(("qkv", "o", "gate_up", "down"), "int8-g32")
    name = "model.layers.1.mlp.experts.2.gate_up_proj.weight"
    wanted = nearest_rows(random_values(CONFIG)[name].astype(np.float32), scheme).dequantized()
    np.testing.assert_array_equal(checkpoint.tensor(name), wanted)


def test_files_that_lie_are_refused(tmp_path: Path) -> None:
    tensors, _ = of_mxfp4()
    name = MERGED.format(1, "gate_up")
    bad = tensors[f"{name}_scales"].copy()
    bad[2, 7, 1] = 255
    folder = write_quantized(tmp_path / "255", {**tensors, f"{name}_scales": bad}, STATED, CONFIG)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(Exception, match=r"the scale of row 7, group 1 is byte 255, which is no number"):
        checkpoint.tensor("model.layers.1.mlp.experts.2.gate_up_proj.weight")

    def message(changes: dict[str, Any], *missing: str, **fields: Any) -> str:
        found = {one: value for one, value in {**tensors, **changes}.items() if one not in missing}
        return refusal(write_quantized(tmp_path / "model", found, STATED, CONFIG, **fields))

    assert "missing: model.layers.1.mlp.experts.0.gate_up_proj.scales [192, 2]" in message({}, f"{name}_scales")
    fewer = {f"{name}_blocks": tensors[f"{name}_blocks"][:2]}
    assert f"misshapen: {name}_blocks is [2, 192, 2, 16], expected [3, 192, 2, 16]" in message(fewer)
    other = {f"{name}_bias": tensors[f"{name}_bias"].T.copy()}
    assert f"misshapen: {name}_bias is [192, 3], expected [3, 192]" in message(other)
    assert "num_experts_per_tok = 4: there are num_local_experts = 3" in message({}, num_experts_per_tok=4)
    assert "missing: model.layers.0.self_attn.o_proj.bias [64]" in message({}, "model.layers.0.self_attn.o_proj.bias")
    both = {name: of_bf16()[name]}
    assert "model.layers.1.mlp.experts.0.gate_up_proj is there twice, quantised and as" in message(both)
    assert "attention_bias = False is not supported" in message({}, attention_bias=False)
    assert "swiglu_limit = 0" in message({}, swiglu_limit=0)


def test_the_published_configuration_is_the_preset() -> None:
    notes: list[str] = []
    assert read_config(PUBLISHED_20B, notes) == preset("gpt-oss-20b")
    assert notes == []


def test_random_weights_are_of_the_usual_size() -> None:
    config = replace(CONFIG, weight_formats=(("gate_up", "mxfp4"), ("down", "mxfp4")))
    for part, (_, columns) in SIZES.items():
        values = random_tensors(config)(f"model.layers.0.mlp.experts.1.{part}_proj.weight")
        assert 0.5 < values.std() * columns**0.5 < 1.3
    assert np.isfinite(widen(random_tensors(config)("model.layers.0.mlp.router.weight"))).all()
