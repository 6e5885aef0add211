"""Quantised checkpoints of models of experts: attention, router and experts each in a format of its own, as files of
the hub have them, and what `cheetah quantize` writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quantized_checkpoints import NVFP4, awq, compressed, drawn, drawn_nvfp4, gptq, quantized_tensors, write_quantized
from written_checkpoints import BF16, random_values, refusal, write_model
from written_experts import CONFIGS, merged

from cheetah.models.formats.nearest import nearest_rows
from cheetah.models.formats.quantized import scheme_of_name
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.tools import quantize

MOE = replace(CONFIGS["qwen3_moe"], hidden_size=64)
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 128], "modules_to_not_convert": ["self_attn", "mlp.gate"]}
ATTENTION = ("qkv", "o")
EXPERTS = ("gate_up", "down")


def packed4(shape: tuple[int, int], seed: int) -> Any:
    matrix = drawn(shape, group=32, seed=seed)
    return compressed(matrix), values_of(matrix)


def gptq4(shape: tuple[int, int], seed: int) -> Any:
    matrix = drawn(shape, group=32, seed=seed)
    return gptq(matrix, g_idx=False), values_of(matrix)


def awq4(shape: tuple[int, int], seed: int) -> Any:
    matrix = drawn(shape, group=32, asymmetric=True, seed=seed)
    return awq(matrix), values_of(matrix)


def values_of(matrix: Any) -> Any:
    return matrix.values(np.arange(matrix.codes.shape[1]) // 32)


def float8(shape: tuple[int, int], seed: int) -> Any:
    draw = np.random.default_rng(seed)
    weight = draw.normal(size=shape).astype("float8_e4m3fn")
    scales = draw.uniform(0.5, 2, (-(-shape[0] // 16), 1)).astype(np.float32)
    return {"weight": weight, "weight_scale_inv": scales}, weight.astype(np.float32) * scales.repeat(16, 0)[: shape[0]]


# what a configuration says: (its object, how a matrix is stored, which matrices are quantised, in which format)
FILES: dict[str, tuple[dict[str, Any], Any, tuple[str, ...], str]] = {
    "compressed-tensors, experts alone": (PACKED, packed4, EXPERTS, "int4-g32"),
    "gptq, all but the router, which is not mentioned": (GPTQ, gptq4, (*ATTENTION, *EXPERTS), "int4-g32"),
    "gptq, attention left out by an expression": (
        *({**GPTQ, "dynamic": {"-:.*self_attn.*": {}, "lm_head": {}}}, gptq4, EXPERTS, "int4-g32"),
    ),
    "awq, all": (AWQ, awq4, (*ATTENTION, *EXPERTS), "int4-g32-asym"),
    "fp8 in blocks": (FP8, float8, EXPERTS, "fp8-block128"),
    "nvfp4, experts alone": (
        *({**NVFP4, "exclude_modules": ["lm_head", "*self_attn*", "*mlp.gate"]}, drawn_nvfp4, EXPERTS, "nvfp4"),
    ),
}


def tensors_of(make: Any, matrices: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of a file in which some matrices are quantised, and what they stand for."""
    tensors, values = quantized_tensors(make, MOE)
    plain = random_values(MOE)
    for name in list(values):
        is_expert = ".experts." in name
        if name.endswith("mlp.gate.weight") or not is_expert and "qkv" not in matrices:
            module = name.removesuffix(".weight")
            tensors = {one: part for one, part in tensors.items() if not one.startswith(f"{module}.")}
            tensors[name] = plain[name]
            del values[name]
    return tensors, values


@pytest.mark.parametrize("file", FILES)
def test_experts_are_what_the_file_says(tmp_path: Path, file: str) -> None:
    stated, make, matrices, format = FILES[file]
    tensors, values = tensors_of(make, matrices)
    checkpoint = open_checkpoint(write_quantized(tmp_path / "model", tensors, stated, MOE))
    assert dict(checkpoint.config.weight_formats) == dict.fromkeys(matrices, format)
    for name, wanted in values.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), wanted)
    router = "model.layers.1.mlp.gate.weight"
    np.testing.assert_array_equal(checkpoint.tensor(router), random_values(MOE)[router].view(np.uint16))


def test_a_router_that_is_quantised_and_columns_in_act_order_are_refused(tmp_path: Path) -> None:
    tensors, _ = quantized_tensors(packed4, MOE)
    stated = {**PACKED, "ignore": ["lm_head"]}
    message = refusal(write_quantized(tmp_path / "router", tensors, stated, MOE))
    assert "model.layers.0.mlp.gate is quantised, but" in message
    tensors, _ = tensors_of(gptq4, (*ATTENTION, *EXPERTS))
    turned = "model.layers.0.self_attn.o_proj"
    tensors[f"{turned}.g_idx"] = np.tile(np.arange(8, dtype=np.int32), 32)
    message = refusal(write_quantized(tmp_path / "order", tensors, GPTQ, MOE))
    assert f"the columns of {turned}.weight are in act-order, which is not supported with experts" in message


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_copy_has_all_experts_rounded_and_routers_as_they_were(tmp_path: Path, family: str) -> None:
    """Of experts one by one, and of those that lie in one tensor, the same."""
    config, scheme = CONFIGS[family], scheme_of_name("int4-g32", "bf16")
    config = replace(config, hidden_size=64)
    values = random_values(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, family, config)
        sources = {
            "single": write_model(tmp_path / "single", values, config),
            "merged": write_model(tmp_path / "merged", merged(family), config),
        }
    for name, source in sources.items():
        out = tmp_path / f"{name} quantised"
        quantize.quantization_job(str(source), scheme, clip=False).write(out, lambda done: None, 1)
        checkpoint = open_checkpoint(out)
        assert dict(checkpoint.config.weight_formats) == dict.fromkeys((*ATTENTION, *EXPERTS), "int4-g32")
        assert checkpoint.notes == ()
        for tensor, value in values.items():
            if value.ndim == 2 and ".layers." in tensor and not tensor.endswith(".gate.weight"):
                wanted = nearest_rows(value.astype(np.float32), scheme).dequantized()
                np.testing.assert_array_equal(checkpoint.tensor(tensor), wanted)
            else:
                np.testing.assert_array_equal(checkpoint.tensor(tensor), value.astype(BF16).view(np.uint16))
