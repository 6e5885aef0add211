"""Quantised checkpoints of every format that is read: golden words, one matrix stored all ways, a tool's own file."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from quantized_checkpoints import (
    CONFIG,
    DOWN,
    GROUP,
    NVFP4,
    act_order_tensors,
    awq,
    awq_config,
    compressed,
    compressed_config,
    drawn,
    drawn_float8,
    drawn_nvfp4,
    float8_config,
    gptq,
    gptq_config,
    quantized_tensors,
    write_quantized,
)
from safetensors import safe_open

from cheetah import LLM
from cheetah.models.dense.reference import Reference
from cheetah.models.dense.weights import tensor_shapes
from cheetah.models.formats.quantized import QuantizationScheme, in_natural_order
from cheetah.models.llama import LlamaConfig
from cheetah.models.quantization import Storage, read_quantization
from cheetah.models.registry import read_config
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.checkpoint.packed_words import codes_of_awq_words, codes_of_words, words_of_codes
from cheetah.runtime.checkpoint.quantized_checks import open_matrix, problems_of_module
from cheetah.runtime.checkpoint.safetensors_files import LoadingError, read_header
from tests.program.rig import relative_error
from tests.tolerances import LOGITS

GOLDENS = Path(__file__).parent / "goldens"
TOOLS_FILE = GOLDENS / "compressed_tensors.safetensors"
OTHER_TOOLS_FILE = GOLDENS / "gptqmodel_autoawq.safetensors"


# -- golden words


def words(*values):
    return np.array([values], np.uint32)


def test_words_of_gptq_and_compressed_tensors_count_from_the_lowest_nibble():
    assert codes_of_words(words(0x76543210, 0xFEDCBA98), 4).tolist() == [list(range(16))]
    assert codes_of_words(words(0x03020100, 0xFF807F04), 8).tolist() == [[0, 1, 2, 3, 4, 127, 128, 255]]


def test_words_of_awq_have_the_even_outputs_first():
    assert codes_of_awq_words(words(0x75316420)).tolist() == [list(range(8))]


@pytest.mark.parametrize(("bits", "columns"), [(4, 64), (4, 13), (8, 6)])
def test_words_give_back_their_codes(bits, columns):
    codes = np.random.default_rng(0).integers(0, 2**bits, (5, columns), dtype=np.uint8)
    assert np.array_equal(codes_of_words(words_of_codes(codes, bits), bits)[:, :columns], codes)


# -- one logical matrix, all ways

SYMMETRIC = {
    "gptq v1": (lambda matrix: gptq(matrix), gptq_config()),
    "gptq v1 without g_idx": (lambda matrix: gptq(matrix, g_idx=False), gptq_config()),
    "gptq v2": (lambda matrix: gptq(matrix, stored_less=0), gptq_config(checkpoint_format="gptq_v2")),
    "gptq labelled v1, stored as v2": (lambda matrix: gptq(matrix, stored_less=0), gptq_config()),
    "compressed-tensors": (compressed, compressed_config()),
}
ASYMMETRIC = {
    "gptq v1": (lambda matrix: gptq(matrix), gptq_config(sym=False)),
    "gptq v2": (lambda matrix: gptq(matrix, stored_less=0), gptq_config(sym=False, checkpoint_format="gptq_v2")),
    "awq": (awq, awq_config()),
    "compressed-tensors": (
        lambda matrix: compressed(matrix, asymmetric=True),
        compressed_config(weights={"symmetric": False}),
    ),
}


def check_read(folder, values, scheme, dtype):
    """Whole tensors and odd parts of them are what was drawn."""
    checkpoint = open_checkpoint(folder)
    assert dict(checkpoint.config.weight_formats) == dict.fromkeys(("qkv", "o", "gate_up", "down"), scheme)
    for name, wanted in values.items():
        assert np.array_equal(checkpoint.tensor(name), wanted), name
    matrix = checkpoint.rows(f"{DOWN}.weight")
    assert matrix.scheme.name == scheme and matrix.shape == (48, 40)
    rows = matrix[11:29]
    assert rows.scales.dtype == dtype
    assert np.array_equal(rows.dequantized(), values[f"{DOWN}.weight"][11:29])
    assert matrix[48:48].shape == (0, 40)
    return checkpoint


@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_codes(tmp_path, name):
    write, stated = SYMMETRIC[name]

    def make(shape, seed):
        matrix = drawn(shape, seed=seed)
        return write(matrix), matrix.values()

    tensors, values = quantized_tensors(make)
    checkpoint = check_read(write_quantized(tmp_path, tensors, stated), values, f"int4-g{GROUP}", np.float16)
    told = [note for note in checkpoint.notes if "labelled" in note]
    assert len(told) == ("labelled" in name)


@pytest.mark.parametrize("name", ASYMMETRIC)
def test_asymmetric_codes(tmp_path, name):
    write, stated = ASYMMETRIC[name]

    def make(shape, seed):
        matrix = drawn(shape, asymmetric=True, seed=seed)
        return write(matrix), matrix.values()

    tensors, values = quantized_tensors(make)
    check_read(write_quantized(tmp_path, tensors, stated), values, f"int4-g{GROUP}-asym", np.float16)


EIGHT_BITS = {
    "gptq": (lambda matrix: gptq(matrix, 8), gptq_config(bits=8), True),
    "compressed-tensors": (
        lambda matrix: compressed(matrix, 8),
        compressed_config(weights={"num_bits": 8, "strategy": "channel", "group_size": None}),
        False,
    ),
}


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_codes_of_8_bits(tmp_path, name):
    write, stated, grouped = EIGHT_BITS[name]

    def make(shape, seed):
        matrix = drawn(shape, 8, group=GROUP if grouped else 0, scales=ml_dtypes.bfloat16, seed=seed)
        return write(matrix), matrix.values()

    tensors, values = quantized_tensors(make)
    folder = write_quantized(tmp_path, tensors, stated)
    check_read(folder, values, f"int8-g{GROUP}" if grouped else "int8", ml_dtypes.bfloat16)


def block_values(codes, scales, block):
    rows, columns = codes.shape
    spread = scales.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :columns]
    return codes.astype(np.float32) * spread.astype(np.float32)


FLOAT8 = {
    "compressed-tensors, a scale a row": (lambda rows: (rows, 1), "weight_scale", float8_config(strategy="channel")),
    "compressed-tensors, a scale a tensor": (lambda rows: (1,), "weight_scale", float8_config(strategy="tensor")),
    "fp8, a scale a tensor": (lambda rows: (), "weight_scale", {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 without blocks": (lambda rows: (), "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": None}),
    "fbgemm": (lambda rows: (rows, 1), "weight_scale", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "modelopt": (lambda rows: (), "weight_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}),
}


@pytest.mark.parametrize("name", FLOAT8)
def test_float8(tmp_path, name):
    scale_shape, suffix, stated = FLOAT8[name]

    def make(shape, seed):
        codes, scales = drawn_float8(shape, scale_shape(shape[0]), seed=seed)
        parts = {"weight": codes, suffix: scales, "input_scale": np.ones((), np.float32)}
        return parts, codes.astype(np.float32) * scales.reshape(-1, 1)

    tensors, values = quantized_tensors(make)
    excluded = {"ignore": ["lm_head"]} if "modelopt" in name else {}
    check_read(write_quantized(tmp_path, tensors, {**stated, **excluded}), values, "fp8", np.float32)


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_float8_in_blocks(tmp_path, method):
    block = (16, 32)

    def make(shape, seed):
        codes, scales = drawn_float8(shape, tuple(-(-size // part) for size, part in zip(shape, block, strict=True)))
        suffix = "weight_scale_inv" if method == "fp8" else "weight_scale"
        return {"weight": codes, suffix: scales}, block_values(codes, scales, block)

    tensors, values = quantized_tensors(make)
    fine = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(block)}
    stated = fine if method == "fp8" else float8_config(strategy="block", block_structure=list(block))
    check_read(write_quantized(tmp_path, tensors, stated), values, "fp8-block32", np.float32)


@pytest.mark.parametrize(
    ("file", "stated"),
    [
        ("quantize_config.json", gptq_config(quant_method=None)),
        ("quant_config.json", {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}),
    ],
)
def test_what_older_tools_write_beside_the_configuration(tmp_path, file, stated):
    is_awq = file == "quant_config.json"

    def make(shape, seed):
        matrix = drawn(shape, asymmetric=is_awq, seed=seed)
        return awq(matrix) if is_awq else gptq(matrix), matrix.values()

    tensors, values = quantized_tensors(make)
    write_quantized(tmp_path, tensors, None)
    stated = {name: value for name, value in stated.items() if value is not None}
    (tmp_path / file).write_text(json.dumps(stated))
    check_read(tmp_path, values, f"int4-g{GROUP}{'-asym' if is_awq else ''}", np.float16)


@pytest.mark.parametrize("form", ["modelopt", "nvfp4-pack-quantized"])
def test_nvfp4(tmp_path, form):
    config = replace(CONFIG, intermediate_size=80)
    make = partial(drawn_nvfp4, packed_by_nvidia=form == "modelopt")
    tensors, values = quantized_tensors(make, config)
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    inputs = {"input_activations": {"num_bits": 4, "type": "float", "dynamic": "local"}}
    stated = compressed_config(form, weights)
    stated["config_groups"]["group_0"] |= inputs
    folder = write_quantized(tmp_path, tensors, NVFP4 if form == "modelopt" else stated, config)
    checkpoint = open_checkpoint(folder)
    assert dict(checkpoint.config.weight_formats) == dict.fromkeys(("qkv", "o", "gate_up", "down"), "nvfp4")
    for name, wanted in values.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), wanted)


WRONG_IN_NVFP4 = {
    "weight_scale": (np.nan, "the scale of row 0, group 0 is nan: scales must be positive and finite"),
    "weight_scale_2": (0, "it is 0.0: it must be positive and finite"),
}


@pytest.mark.parametrize("suffix", WRONG_IN_NVFP4)
def test_numbers_of_nvfp4_that_are_none(tmp_path, suffix):
    config, (number, message) = replace(CONFIG, intermediate_size=80), WRONG_IN_NVFP4[suffix]
    tensors, _ = quantized_tensors(drawn_nvfp4, config)
    tensors[f"{DOWN}.{suffix}"] = tensors[f"{DOWN}.{suffix}"].copy()
    tensors[f"{DOWN}.{suffix}"][(0, 0) if suffix == "weight_scale" else ()] = number
    folder = write_quantized(tmp_path, tensors, NVFP4, config)
    with pytest.raises(LoadingError, match=message):
        open_checkpoint(folder).tensor(f"{DOWN}.weight")


def test_nvfp4_wants_whole_groups(tmp_path):
    tensors, _ = quantized_tensors(drawn_nvfp4)
    with pytest.raises(LoadingError, match="40 inputs are no whole groups of 16"):
        open_checkpoint(write_quantized(tmp_path, tensors, NVFP4))


def test_the_file_of_modelopt(tmp_path):
    def make(shape, seed):
        codes, scales = drawn_float8(shape, (), seed=seed)
        return {"weight": codes, "weight_scale": scales}, codes.astype(np.float32) * scales

    tensors, values = quantized_tensors(make)
    write_quantized(tmp_path, tensors, None)
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": inner})
    )
    check_read(tmp_path, values, "fp8", np.float32)


def test_a_matrix_that_is_left_out_everywhere_stays_bf16(tmp_path):
    tensors, values = quantized_tensors(lambda shape, seed: (compressed(drawn(shape, seed=seed)), None))
    for name in [name for name in tensors if ".down_proj." in name]:
        del tensors[name]
    for layer in range(CONFIG.layers):
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] = np.zeros((48, 40), ml_dtypes.bfloat16)
    folder = write_quantized(tmp_path, tensors, compressed_config(ignore=["lm_head", "re:.*down_proj"]))
    checkpoint = open_checkpoint(folder)
    assert dict(checkpoint.config.weight_formats) == dict.fromkeys(("qkv", "o", "gate_up"), f"int4-g{GROUP}")
    assert checkpoint.tensor(f"{DOWN}.weight").dtype == np.uint16


# -- act-order

ORDERED = {
    "gptq": (gptq, gptq_config(desc_act=True), {}),
    "gptq, not said": (gptq, gptq_config(), {}),
    "gptq, 8 bits, asymmetric": (
        lambda matrix, groups: gptq(matrix, 8, groups=groups),
        gptq_config(bits=8, sym=False, desc_act=True),
        {"bits": 8, "asymmetric": True},
    ),
    "compressed-tensors": (compressed, compressed_config(weights={"actorder": "group"}), {}),
}


@pytest.mark.parametrize("name", ORDERED)
def test_groups_of_columns_that_do_not_lie_side_by_side(tmp_path, name):
    write, stated, drawing = ORDERED[name]
    tensors, values = act_order_tensors(write, **drawing)
    checkpoint = open_checkpoint(write_quantized(tmp_path, tensors, stated))
    assert checkpoint.config.act_order
    for weight, wanted in values.items():
        assert np.array_equal(checkpoint.tensor(weight), wanted), weight
    matrix = checkpoint.rows(f"{DOWN}.weight")
    rows = matrix[11:29]
    assert sorted(matrix.order) == list(range(40)) and list(matrix.order) != sorted(matrix.order)
    assert np.array_equal(rows.dequantized(), values[f"{DOWN}.weight"][11:29, matrix.order])


@pytest.mark.parametrize(
    ("write", "stated"),
    [
        (gptq, gptq_config(desc_act=True)),
        (lambda matrix: gptq(matrix, g_idx=False), gptq_config(desc_act=True)),
        (compressed, compressed_config(weights={"actorder": "group"})),
        (compressed, compressed_config(weights={"actorder": "weight"})),
        (
            lambda matrix: compressed(matrix, groups=np.full(matrix.codes.shape[1], -1, np.int32)),
            compressed_config(weights={"actorder": True}),
        ),
    ],
)
def test_an_order_that_is_none(tmp_path, write, stated):
    """Said, but groups are of neighbours: there is nothing to do for it."""
    tensors, values = quantized_tensors(
        lambda shape, seed: (write(drawn(shape, seed=seed)), drawn(shape, seed=seed).values())
    )
    checkpoint = check_read(write_quantized(tmp_path, tensors, stated), values, f"int4-g{GROUP}", np.float16)
    assert not checkpoint.config.act_order and checkpoint.rows(f"{DOWN}.weight").order is None


@pytest.mark.slow
@pytest.mark.compiler
def test_logits_of_a_checkpoint_in_act_order(tmp_path):
    """From the folder to the logits, in steps; what a pass makes of it is in tests/program."""
    config = LlamaConfig(64, 96, 2, 2, 1, 64, 50, max_position_embeddings=128)
    tensors, values = act_order_tensors(gptq, config, group=32)
    stated = gptq_config(desc_act=True, group_size=32)
    folder = write_quantized(tmp_path, tensors, stated, config)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    options = {"device": "emulator", "gpu": "emulator-2", "quiet": True, "tokenizer": False, "prompt_tokens": 0}
    with LLM(str(folder), **options) as llm:
        found = llm.score(ids)
    checkpoint = open_checkpoint(folder)
    written = {name: checkpoint.tensor(name) for name in tensor_shapes(config)} | values
    assert relative_error(found, Reference(config, written).forward(ids)) < LOGITS


def test_what_a_configuration_alone_says_of_order():
    said = {
        True: [gptq_config(desc_act=True), compressed_config(weights={"actorder": "group"})],
        False: [
            *(gptq_config(), gptq_config(desc_act=True, static_groups=True), gptq_config(desc_act=True, group_size=-1)),
            *(compressed_config(weights={"actorder": name}) for name in ("static", "weight", None, False)),
        ],
    }
    for expected, configurations in said.items():
        for stated in configurations:
            assert read_config({**CONFIG.to_dict(), "quantization_config": stated}).act_order is expected, stated


# -- what a list of modules means


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("lm_head", []),
        ("model.layers.0.mlp.down_proj", ["model.layers.0.mlp.down_proj"]),
        ("model.layers.0.mlp", ["model.layers.0.mlp.down_proj"]),
        ("mlp.down_proj", ["model.layers.0.mlp.down_proj", "model.layers.10.mlp.down_proj"]),
        ("model.layers.1", []),
        ("model.layers.1*", ["model.layers.10.mlp.down_proj"]),
        ("re:.*down_proj", ["model.layers.0.mlp.down_proj", "model.layers.10.mlp.down_proj"]),
        (r"re:model\.layers\.\d\.", ["model.layers.0.mlp.down_proj"]),
    ],
)
def test_patterns(pattern, matched):
    modules = ["model.layers.0.mlp.down_proj", "model.layers.10.mlp.down_proj"]
    quantization = read_quantization(compressed_config(ignore=[pattern]), "here")
    assert [module for module in modules if quantization.storage_of(module) is None] == matched


# -- files of the formats' own tools


def tools_cases(path=TOOLS_FILE):
    with safe_open(path, "np") as file:
        return json.loads(file.metadata()["schemes"])


@pytest.mark.parametrize("name", tools_cases())
def test_what_compressed_tensors_itself_wrote(name):
    """compressed-tensors 0.20.0 with torch packed drawn matrices (PackedQuantizationCompressor and
    FloatQuantizationCompressor.compress) and said what they stand for (decompress, with its scales in float32)."""
    stated = tools_cases()[name]
    form = "pack-quantized" if stated["type"] == "int" else "float-quantized"
    groups = {"group_0": {"targets": ["Linear"], "weights": stated}}
    check_golden(TOOLS_FILE, name, compressed_config(form, config_groups=groups))


@pytest.mark.parametrize("name", tools_cases(OTHER_TOOLS_FILE))
def test_what_gptqmodel_and_autoawq_themselves_wrote(name):
    """GPTQModel 7.7.0 packed drawn matrices (TorchLinear.pack_original; convert_gptq_v2_to_v1_format_module where v1)
    and said what they stand for (dequantize_weight); so did AutoAWQ 0.2.9 (WQLinear_GEMM.from_linear,
    dequantize_gemm). Both with their scales in float32."""
    check_golden(OTHER_TOOLS_FILE, name, tools_cases(OTHER_TOOLS_FILE)[name])


def check_golden(path, name, stated):
    storage = read_quantization(stated, "here").storage_of(name)
    assert isinstance(storage, Storage) and isinstance(storage.scheme, QuantizationScheme)
    stored = read_header(path)
    wanted = stored[f"{name}.dequantized"].mapped()
    assert problems_of_module(name, storage, wanted.shape, stored) == []
    matrix = open_matrix(name, storage, wanted.shape, stored)
    assert (matrix.order is not None) == ("act_order" in name)
    assert np.array_equal(in_natural_order(matrix[:].dequantized(), matrix.order), wanted)
