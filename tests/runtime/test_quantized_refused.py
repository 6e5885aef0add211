"""Quantised checkpoints that are malformed, or in a form that is not read: each is refused by name."""

import ml_dtypes
import numpy as np
import pytest
from quantized_checkpoints import (
    DOWN,
    E4M3,
    GROUP,
    NVFP4,
    Q,
    awq,
    awq_config,
    compressed,
    compressed_config,
    drawn,
    drawn_float8,
    float8_config,
    gptq,
    gptq_config,
    quantized_tensors,
    write_quantized,
)
from written_checkpoints import refusal

from cheetah.generate import choose_plan
from cheetah.models.config_json import ConfigError
from cheetah.models.family import Packing
from cheetah.models.formats import PackingError
from cheetah.models.llama import LlamaConfig
from cheetah.models.quantization import read_quantization
from cheetah.models.registry import family_of, read_config
from cheetah.plan import gpu_named, step_matrices
from cheetah.runtime.checkpoint.loading import LoadingError, open_checkpoint

# -- what a configuration asks for

FP8 = {"quant_method": "fp8"}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}}
REFUSED_CONFIGS = {
    "no object": ("gptq", "quantization_config = 'gptq': must be an object"),
    "no method": ({}, "quantised by a method that is not named: supported are gptq"),
    "unknown method": ({"quant_method": "mystery"}, "quantised by 'mystery': supported are gptq"),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "quantised by bitsandbytes: codes in a form of its own"),
    "hqq": ({"quant_method": "hqq"}, "quantised by hqq"),
    "aqlm": ({"quant_method": "aqlm"}, "quantised by aqlm: codebooks"),
    "gguf": ({"quant_method": "gguf"}, "quantised by gguf: the format of llama.cpp"),
    "marlin": (gptq_config(checkpoint_format="marlin"), "checkpoint_format = 'marlin' is not supported"),
    "marlin by flag": (gptq_config(is_marlin_format=True), "is_marlin_format is true"),
    "gptq of 2 bits": (gptq_config(bits=2), "bits = 2 is not supported: supported: 4 or 8"),
    "gptq of 3 bits": (gptq_config(bits=3), "bits = 3 is not supported"),
    "gptq without bits": (gptq_config(bits=None), "bits is missing: write 4 or 8"),
    "gptq, mixed": (
        gptq_config(dynamic={"+:.*down.*": {"bits": 8}}),
        "modules that differ in their bits are not supported",
    ),
    "gptq, groups of 0": (gptq_config(group_size=0), "group_size = 0: must be a positive integer"),
    "gptq, groups of true": (gptq_config(group_size=True), "group_size = True: must be a positive integer"),
    "gptq, sym in words": (gptq_config(sym="yes"), "sym = 'yes': must be true or false"),
    "awq gemv": (awq_config(version="gemv"), "version = 'gemv' of awq is not supported: supported is 'gemm'"),
    "awq of 8 bits": (awq_config(bits=8), "bits = 8 is not supported: supported: 4"),
    "awq without zero points": (awq_config(zero_point=False), "zero_point is false"),
    "llm-awq": (awq_config(backend="llm-awq"), "backend = 'llm-awq' is not supported"),
    "nvfp4 of whole numbers": (compressed_config("nvfp4-pack-quantized"), "type = 'int' is not supported"),
    "nvfp4 in groups of 32": ({**NVFP4, "group_size": 32}, "group_size = 32 is not supported: supported: 16"),
    "int-quantized": (compressed_config("int-quantized"), "format = 'int-quantized' is not supported"),
    "another sparsity": (
        compressed_config(sparsity_config={"format": "sparse-24-words"}),
        "sparsity_config.format = 'sparse-24-words' is not supported: supported: 'dense' or 'sparse-24-bitmask'",
    ),
    "marlin-24 without zero points in the middle": (
        compressed_config("marlin-24", weights={"symmetric": False}),
        "symmetric = False is not supported",
    ),
    "rotated": (compressed_config(transform_config={"config_groups": {"u": {}}}), "transformed activations"),
    "not compressed": (compressed_config(quantization_status="frozen"), "quantization_status = 'frozen'"),
    "no groups": (compressed_config(config_groups={}), "config_groups is missing or empty"),
    "W4A8": (
        compressed_config(config_groups={"g": {**GROUPS["group_0"], "input_activations": {"num_bits": 8}}}),
        "integer activations (W8A8, W4A8) are not supported",
    ),
    "unknown preset": (compressed_config(config_groups={"W3A16": ["Linear"]}), "'W3A16' is not a scheme"),
    "an order by another name": (compressed_config(weights={"actorder": "best"}), "actorder = 'best' is not supported"),
    "desc_act in words": (gptq_config(desc_act="yes"), "desc_act = 'yes': must be true or false"),
    "tensor groups": (compressed_config(weights={"strategy": "tensor_group"}), "strategy = 'tensor_group'"),
    "5 bits": (compressed_config(weights={"num_bits": 5}), "num_bits = 5 is not supported"),
    "block without sizes": (float8_config(strategy="block"), "block_structure is missing"),
    "e5m2": ({**FP8, "fmt": "e5m2"}, "fmt = 'e5m2' is not supported: supported: 'e4m3'"),
    "ue8m0": ({**FP8, "scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0' is not supported"),
    "block of one number": ({**FP8, "weight_block_size": [128]}, "weight_block_size = [128]: must be [rows, columns]"),
    "modelopt of int4": ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "quant_algo = 'INT4_AWQ' of modelopt"),
    "a costly pattern": (compressed_config(ignore=["re:(a+)+$"]), "the pattern 're:(a+)+$' is not supported"),
    "a broken pattern": (compressed_config(ignore=["re:[a"]), "is no regular expression"),
    "ignored is a text": (compressed_config(ignore="lm_head"), "ignore = 'lm_head': must be a list"),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_configurations(name):
    stated, message = REFUSED_CONFIGS[name]
    with pytest.raises(ConfigError) as raised:
        read_quantization(stated, "config.json")
    assert message in str(raised.value) and str(raised.value).startswith("config.json: ")


def test_mxfp4_of_a_model_without_experts() -> None:
    values = {**LlamaConfig(64, 64, 1, 1, 1, 64, 100).to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ConfigError, match="quantised by mxfp4, which is supported of experts alone"):
        read_config(values)


# -- what tensors hold


@pytest.fixture(scope="module")
def whole():
    """Checkpoints without a fault: method -> tensors and configuration."""

    def codes(write, **named):
        return quantized_tensors(lambda shape, seed: (write(drawn(shape, seed=seed, **named)), None))[0]

    def float8(shape, seed):
        bytes_, scales = drawn_float8(shape, (shape[0], 1), seed=seed)
        return {"weight": bytes_, "weight_scale": scales}, None

    return {
        "gptq": (codes(gptq), gptq_config()),
        "awq": (codes(awq, asymmetric=True), awq_config()),
        "packed": (codes(compressed), compressed_config()),
        "packed-asym": (
            codes(lambda matrix: compressed(matrix, asymmetric=True), asymmetric=True),
            compressed_config(weights={"symmetric": False}),
        ),
        "fp8": (quantized_tensors(float8)[0], float8_config(strategy="channel")),
    }


def changed(value, index, number):
    value = value.copy()
    value[index] = number
    return value


def act_order(value):
    return np.random.default_rng(0).permutation(value)


# checkpoint, tensor (None: remove or change the configuration alone), its new value, message
MALFORMED = {
    "gptq, no zero points": ("gptq", f"{Q}.qzeros", None, f"missing: {Q}.qzeros [3, 32]"),
    "gptq, no codes": ("gptq", f"{Q}.qweight", None, f"missing: {Q}.qweight [6, 256]"),
    "gptq, codes of another shape": (
        *("gptq", f"{Q}.qweight", lambda value: value[:-1]),
        f"misshapen: {Q}.qweight is [5, 256], expected [6, 256]",
    ),
    "gptq, codes of another dtype": (
        *("gptq", f"{Q}.qweight", lambda value: value.astype(np.int64)),
        f"{Q}.qweight is I64, expected I32",
    ),
    "gptq, scales of other groups": (
        *("gptq", f"{Q}.scales", lambda value: np.ascontiguousarray(value[:2])),
        f"misshapen: {Q}.scales is [2, 256], expected [3, 256]",
    ),
    "gptq, an order that its neighbours do not have": (
        *("gptq", f"{Q}.g_idx", act_order),
        "the columns of model.layers.0.self_attn.k_proj.weight are grouped otherwise than those of "
        "model.layers.0.self_attn.q_proj.weight (act-order): they have one input",
    ),
    "gptq, groups of unequal size": (
        *("gptq", f"{Q}.g_idx", lambda value: changed(value, 5, 2)),
        f"{Q}.g_idx places 15 columns in group 0, which has 16",
    ),
    "gptq, an order of another length": (
        *("gptq", f"{Q}.g_idx", lambda value: value[:-1].copy()),
        f"misshapen: {Q}.g_idx is [47], expected [48]",
    ),
    "gptq, an order of another dtype": (
        *("gptq", f"{Q}.g_idx", lambda value: value.astype(np.int64)),
        f"{Q}.g_idx is I64, expected I32",
    ),
    "gptq, a group that is not there": (
        *("gptq", f"{Q}.g_idx", lambda value: changed(value, 5, 3)),
        f"{Q}.g_idx places column 5 in group 3: there are groups 0 to 2",
    ),
    "gptq, a group below none": (
        *("gptq", f"{Q}.g_idx", lambda value: changed(value, 5, -2)),
        f"{Q}.g_idx places column 5 in group -2",
    ),
    "gptq, zero points of two conventions": (
        *("gptq", f"{Q}.qzeros", lambda value: changed(value, (1, 4), -2004318072)),
        f"tensor {Q}.qzeros: the zero point of row 32, group 1 is stored as 8; symmetric weights have 7 everywhere",
    ),
    "gptq, a scale that is not a number": (
        *("gptq", f"{DOWN}.scales", lambda value: changed(value, (1, 7), np.nan)),
        f"tensor {DOWN}.scales: the scale of row 7, group 1 is nan: scales must be positive and finite",
    ),
    "gptq, an endless scale": (
        *("gptq", f"{DOWN}.scales", lambda value: changed(value, (0, 47), np.inf)),
        f"tensor {DOWN}.scales: the scale of row 47, group 0 is inf",
    ),
    "gptq, a scale of zero": (
        *("gptq", f"{DOWN}.scales", lambda value: changed(value, (0, 0), 0)),
        f"tensor {DOWN}.scales: the scale of row 0, group 0 is 0.0",
    ),
    "gptq, a negative scale": (
        *("gptq", f"{DOWN}.scales", lambda value: changed(value, (0, 0), -0.5)),
        f"tensor {DOWN}.scales: the scale of row 0, group 0 is -0.5",
    ),
    "gptq, scales of two dtypes in one matrix": (
        *("gptq", f"{Q}.scales", lambda value: value.astype(np.float32)),
        "scales of one matrix are of different dtypes: those of model.layers.0.self_attn.q_proj.weight f32",
    ),
    "gptq, a bias that is not zero": (
        *("gptq", f"{DOWN}.bias", lambda value: np.ones(48, np.float16)),
        f"a bias that is not zero, which is not supported: {DOWN}.bias",
    ),
    "awq, codes of gptq's shape": (
        *("awq", f"{Q}.qweight", lambda value: np.zeros((6, 256), np.int32)),
        f"misshapen: {Q}.qweight is [6, 256], expected [48, 32]",
    ),
    "awq, a scale that is not a number": (
        *("awq", f"{Q}.scales", lambda value: changed(value, (2, 255), np.nan)),
        f"tensor {Q}.scales: the scale of row 255, group 2 is nan",
    ),
    "compressed-tensors, another stated shape": (
        *("packed", f"{Q}.weight_shape", lambda value: value[::-1].copy()),
        f"{Q}.weight_shape says [48, 256], the matrix is [256, 48]",
    ),
    "compressed-tensors, no scales": ("packed", f"{Q}.weight_scale", None, f"missing: {Q}.weight_scale [256, 3]"),
    "compressed-tensors, scales of whole numbers": (
        *("packed", f"{Q}.weight_scale", lambda value: value.astype(np.int32)),
        f"{Q}.weight_scale is I32, expected F16 or BF16 or F32",
    ),
    "compressed-tensors, stored twice": (
        *("packed", f"{Q}.weight", lambda value: np.zeros((256, 48), ml_dtypes.bfloat16)),
        f"{Q} is there twice, quantised and as {Q}.weight (BF16): remove one",
    ),
    "compressed-tensors, no zero points": (
        *("packed-asym", f"{Q}.weight_zero_point", None),
        f"missing: {Q}.weight_zero_point [32, 3]",
    ),
    "compressed-tensors, an order of one module alone": (
        *("packed", f"{Q}.weight_g_idx", lambda value: act_order(np.arange(48, dtype=np.int32) // GROUP)),
        "the columns of model.layers.0.self_attn.k_proj.weight are grouped otherwise than those of",
    ),
    "compressed-tensors, a group that is not there": (
        *("packed", f"{Q}.weight_g_idx", lambda value: np.full(48, 3, np.int32)),
        f"{Q}.weight_g_idx places column 0 in group 3: there are groups 0 to 2",
    ),
    "fp8, a code that is not a number": (
        *("fp8", f"{Q}.weight", lambda value: changed(value.view(np.uint8), (17, 3), 0xFF).view(E4M3)),
        f"tensor {Q}.weight: row 17, column 3 is 0xff, which is not a number in e4m3",
    ),
    "fp8, no scale": ("fp8", f"{Q}.weight_scale", None, f"{Q} has no scale: expected weight_scale"),
    "fp8, scales of another matrix": (
        *("fp8", f"{Q}.weight_scale", lambda value: value[:100].copy()),
        f"misshapen: {Q}.weight_scale is [100, 1], expected [] or [1] or [1, 1] or [256] or [256, 1]",
    ),
    "fp8, weights of e5m2": (
        *("fp8", f"{Q}.weight", lambda value: value.astype(np.float32).astype(ml_dtypes.float8_e5m2)),
        f"{Q}.weight is F8_E5M2, expected F8_E4M3",
    ),
    "fp8, weights that are not quantised": (
        *("fp8", f"{Q}.weight", lambda value: value.astype(ml_dtypes.bfloat16)),
        f"{Q}.weight is BF16, expected F8_E4M3",
    ),
    "fp8, a scale that is not a number": (
        *("fp8", f"{Q}.weight_scale", lambda value: changed(value, (9, 0), np.nan)),
        f"tensor {Q}.weight_scale: the scale of row 9, group 0 is nan",
    ),
    "fp8, a negative scale": (
        *("fp8", f"{DOWN}.weight_scale", lambda value: changed(value, (9, 0), -1)),
        f"tensor {DOWN}.weight_scale: the scale of row 9, group 0 is -1.0",
    ),
    "fp8, two scales": (
        *("fp8", f"{Q}.weight_scale_inv", lambda value: np.ones((256, 1), np.float32)),
        f"{Q} has weight_scale and weight_scale_inv: expected weight_scale or weight_scale_inv",
    ),
    "awq, no scales": ("awq", f"{DOWN}.scales", None, f"missing: {DOWN}.scales [3, 48]"),
    "awq, zero points of gptq's shape": (
        *("awq", f"{DOWN}.qzeros", lambda value: np.ascontiguousarray(value.T)),
        f"misshapen: {DOWN}.qzeros is [6, 3], expected [3, 6]",
    ),
    "compressed-tensors, zero points of 64 bits": (
        *("packed-asym", f"{Q}.weight_zero_point", lambda value: value.astype(np.int64)),
        f"{Q}.weight_zero_point is I64, expected I32",
    ),
    "compressed-tensors, codes that are transposed": (
        *("packed", f"{Q}.weight_packed", lambda value: np.ascontiguousarray(value.T)),
        f"misshapen: {Q}.weight_packed is [6, 256], expected [256, 6]",
    ),
    "compressed-tensors, a scale of zero": (
        *("packed", f"{DOWN}.weight_scale", lambda value: changed(value, (40, 2), 0)),
        f"tensor {DOWN}.weight_scale: the scale of row 40, group 2 is 0.0",
    ),
    "a layer that the configuration does not have": (
        *("packed", "model.layers.2.mlp.down_proj.weight_packed", lambda value: np.zeros((48, 5), np.int32)),
        "model.layers.2.mlp.down_proj is quantised, but",
    ),
    "a quantised tensor of no module": (
        *("packed", "lm_head.weight_packed", lambda value: np.zeros((50, 6), np.int32)),
        "tensor lm_head.weight_packed: lm_head is quantised, but",
    ),
}


READ = ("not a number", "scale of zero", "endless scale", "negative scale", "two conventions")
"""What is in large tensors is found where it is read; all else when the checkpoint is opened."""


def load_all(folder):
    """Opens a checkpoint and reads every matrix in parts, as loading does."""
    checkpoint = open_checkpoint(folder)
    for module in (Q, DOWN):
        matrix = checkpoint.rows(f"{module}.weight")
        for first in range(0, matrix.shape[0], 24):
            matrix[first : first + 24]


@pytest.mark.parametrize("name", MALFORMED)
def test_tensors(tmp_path, whole, name):
    checkpoint, tensor, change, message = MALFORMED[name]
    tensors, stated = whole[checkpoint]
    tensors = dict(tensors)
    if change is None:
        del tensors[tensor]
    else:
        tensors[tensor] = change(tensors.get(tensor))
    write_quantized(tmp_path, tensors, stated)
    with pytest.raises(LoadingError) as raised:
        load_all(tmp_path) if any(what in name for what in READ) else open_checkpoint(tmp_path)
    assert message in str(raised.value)


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
# checkpoint, its configuration, message
CONTRADICTIONS = {
    "an ignored module that there is not": (
        *("packed", compressed_config(ignore=["lm_haed"])),
        "missing: lm_head.weight_packed [50, 6]: lm_head.weight is there, not quantised",
    ),
    "targets that there are not": (
        *("packed", compressed_config(config_groups={"g": {"targets": ["Conv2d"], "weights": WEIGHTS}})),
        "is quantised, but",
    ),
    "4 and 8 bits in one matrix": (
        "packed",
        compressed_config(
            config_groups={
                "g": {"targets": ["Linear"], "weights": WEIGHTS},
                "h": {"targets": ["re:.*up_proj"], "weights": {**WEIGHTS, "num_bits": 8}},
            }
        ),
        "the kernel keeps matrix 'gate_up' in one format in all layers",
    ),
    "8 bits, stored in 4": ("gptq", gptq_config(bits=8), f"misshapen: {Q}.qweight is [6, 256], expected [12, 256]"),
    "asymmetric, without zero points": (
        *("packed", compressed_config(weights={"symmetric": False})),
        f"missing: {Q}.weight_zero_point [32, 3]",
    ),
    "a scale a row, stored in groups": (
        *("packed", compressed_config(weights={"strategy": "channel", "group_size": None})),
        f"misshapen: {Q}.weight_scale is [256, 3], expected [256, 1] or [256]",
    ),
    "groups as large as there are no columns": (
        *("awq", awq_config(group_size=2**14)),
        f"misshapen: {Q}.qzeros is [3, 32], expected [1, 32]",
    ),
    "a quantised head that is not": (
        *("gptq", gptq_config(lm_head=True)),
        "50 outputs are no multiple of the 8 codes of a word of gptq",
    ),
    "blocks, stored as rows": (
        *("fp8", float8_config(strategy="block", block_structure=[128, 128])),
        f"misshapen: {Q}.weight_scale is [256, 1], expected [2, 1]",
    ),
    "fp8, labelled int4": ("fp8", compressed_config(), f"missing: {Q}.weight_packed [256, 6]"),
    "int4, labelled fp8": ("packed", float8_config(strategy="channel"), f"missing: {Q}.weight [256, 48]"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_configurations_that_the_tensors_contradict(tmp_path, whole, name):
    checkpoint, stated, message = CONTRADICTIONS[name]
    assert message in refusal(write_quantized(tmp_path, whole[checkpoint][0], stated))


@pytest.mark.parametrize("checkpoint", ["gptq", "awq", "packed", "packed-asym", "fp8"])
def test_without_a_fault_they_are_read(tmp_path, whole, checkpoint):
    tensors, stated = whole[checkpoint]
    load_all(write_quantized(tmp_path, tensors, stated))


def test_scales_that_the_kernel_has_no_room_for(tmp_path):
    """Of float32, with more bits than f16 has: told when the matrix is packed."""
    make = lambda shape, seed: (compressed(drawn(shape, scales=np.float32, group=32, seed=seed)), None)  # noqa: E731
    stated = compressed_config(weights={"group_size": 32})
    checkpoint = open_checkpoint(write_quantized(tmp_path, quantized_tensors(make)[0], stated))
    plan, gpu = choose_plan(checkpoint.config, gpu_named("emulator-2")), gpu_named("emulator-2")
    family = family_of(checkpoint.config)
    matrices = step_matrices(checkpoint.config.shape, plan, gpu)
    with pytest.raises(PackingError) as raised:
        packing = Packing(checkpoint.tensor, lambda *written: None, rows=checkpoint.rows, threads=1)
        family.pack_weights(checkpoint.config, matrices, packing)
    assert "q_proj.weight or model.layers.0.self_attn.k_proj.weight" in str(raised.value)
    assert "is no f16 number times a power of two" in str(raised.value)


# -- what does not fit together


def test_a_label_that_the_tensors_do_not_have(tmp_path, whole):
    message = refusal(write_quantized(tmp_path, whole["gptq"][0], awq_config()))
    assert "(awq, gemm)" in message and f"misshapen: {Q}.qweight is [6, 256], expected [48, 32]" in message


def test_a_group_size_that_the_tensors_do_not_have(tmp_path, whole):
    message = refusal(write_quantized(tmp_path, whole["gptq"][0], gptq_config(group_size=24)))
    assert f"misshapen: {Q}.qzeros is [3, 32], expected [2, 32]" in message


def test_quantised_tensors_without_a_configuration(tmp_path, whole):
    write_quantized(tmp_path, whole["packed"][0], None)
    assert "is part of a quantised weight, though config.json names no quantisation" in refusal(tmp_path)


def test_a_configuration_without_quantised_tensors(tmp_path, whole):
    plain = {name: np.zeros((256, 48), ml_dtypes.bfloat16) for name in [f"{Q}.weight"]}
    others = {name: value for name, value in whole["packed"][0].items() if not name.startswith(Q)}
    message = refusal(write_quantized(tmp_path, {**others, **plain}, whole["packed"][1]))
    assert f"missing: {Q}.weight_packed [256, 6]: {Q}.weight is there, not quantised" in message


def test_a_module_that_is_left_out_in_one_layer(tmp_path, whole):
    message = refusal(write_quantized(tmp_path, whole["packed"][0], compressed_config(ignore=["lm_head", DOWN])))
    assert "the kernel keeps matrix 'down' in one format in all layers" in message
    assert f"{DOWN} is not quantised" in message and "model.layers.0.mlp.down_proj is int4-g16" in message


def test_a_module_that_is_left_out_of_a_joined_matrix(tmp_path, whole):
    message = refusal(write_quantized(tmp_path, whole["packed"][0], compressed_config(ignore=["lm_head", "k_proj"])))
    assert "the kernel keeps matrix 'qkv' in one format" in message


def test_sizes_that_are_no_whole_words(tmp_path, whole):
    message = refusal(write_quantized(tmp_path, whole["gptq"][0], gptq_config(), intermediate_size=44))
    assert "model.layers.0.mlp.gate_proj: 44 outputs are no multiple of the 8 codes of a word of gptq" in message
