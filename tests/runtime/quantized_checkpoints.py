"""Small quantised checkpoints that tests write, each format by its own rules, in plain loops that share nothing with
the loader.

The rules: GPTQ, AutoGPTQ's and GPTQModel's qlinear modules; AWQ, AutoAWQ's WQLinear_GEMM and packing_utils;
compressed-tensors, its compressors pack_quantized, naive_quantized and nvfp4_quantized; FP8, transformers' integrations
finegrained_fp8 and fbgemm_fp8 and the exporter of ModelOpt, of which NVFP4 is, too.
"""

import json
import zlib
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from written_checkpoints import CONFIG, random_values

from cheetah.models.dense.weights import tensor_shapes

GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E4M3 = ml_dtypes.float8_e4m3fn
DOWN = "model.layers.1.mlp.down_proj"
Q = "model.layers.0.self_attn.q_proj"


@dataclass
class Matrix:
    """codes [rows, columns]; scales and zero points [rows, groups]."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray

    def values(self, groups: np.ndarray | None = None) -> np.ndarray:
        """groups: that columns are in, by default those of neighbours."""
        if groups is None:
            groups = np.arange(self.codes.shape[1]) // GROUP if self.scales.shape[1] > 1 else 0 * self.codes[0]
        return (self.codes.astype(np.float32) - self.zeros[:, groups]) * self.scales[:, groups].astype(np.float32)


def drawn(shape, bits=4, asymmetric=False, group=GROUP, scales=np.float16, seed=0):
    rng = np.random.default_rng(seed)
    rows, columns = shape
    groups = -(-columns // group) if group else 1
    zeros = rng.integers(0, 2**bits, (rows, groups)) if asymmetric else np.full((rows, groups), 2 ** (bits - 1))
    codes = rng.integers(0, 2**bits, shape)
    return Matrix(codes, rng.uniform(0.001, 0.02, (rows, groups)).astype(scales), zeros)


def packed(values, bits, axis, order=None):
    """int32 words of numbers along an axis, number `order[i]` of each word at place i; filled up with zeros."""
    values = np.moveaxis(np.asarray(values), axis, -1)
    per_word = 32 // bits
    count = -(-values.shape[-1] // per_word)
    filled = np.zeros((*values.shape[:-1], count * per_word), np.uint32)
    filled[..., : values.shape[-1]] = values
    numbers = filled.reshape(*values.shape[:-1], count, per_word)
    words = np.zeros(numbers.shape[:-1], np.uint32)
    for place in range(per_word):
        words |= numbers[..., order[place] if order else place] << np.uint32(bits * place)
    return np.ascontiguousarray(np.moveaxis(words.view(np.int32), -1, axis))


def drawn_groups(columns, seed, group=GROUP):
    """Act-order: the group of every column, as the tools number them."""
    return np.random.default_rng(seed).permutation(np.arange(columns) // group).astype(np.int32)


def input_of(name):
    """The first module with the same input as a module or its weight."""
    for ending, first in (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj")):
        name = name.replace(ending, first)
    return name


def gptq(matrix, bits=4, stored_less=1, g_idx=True, groups=None):
    if groups is None:
        groups = (np.arange(matrix.codes.shape[1]) // GROUP).astype(np.int32)
    order = {"g_idx": groups} if g_idx and matrix.scales.shape[1] > 1 else {}
    return {
        "qweight": packed(matrix.codes.T, bits, 0),
        "qzeros": packed((matrix.zeros.T - stored_less) % 2**bits, bits, 1),
        "scales": np.ascontiguousarray(matrix.scales.T),
        **order,
    }


def awq(matrix):
    return {
        "qweight": packed(matrix.codes.T, 4, 1, AWQ_ORDER),
        "qzeros": packed(matrix.zeros.T, 4, 1, AWQ_ORDER),
        "scales": np.ascontiguousarray(matrix.scales.T),
    }


def compressed(matrix, bits=4, asymmetric=False, groups=None):
    zeros = {"weight_zero_point": packed(matrix.zeros, bits, 0)} if asymmetric else {}
    return {
        "weight_packed": packed(matrix.codes, bits, 1),
        "weight_scale": matrix.scales,
        "weight_shape": np.array(matrix.codes.shape, np.int64),
        **zeros,
        **({} if groups is None else {"weight_g_idx": groups}),
    }


def act_order_tensors(write, config=CONFIG, group=GROUP, **drawing):
    """As `quantized_tensors`, of matrices that `write(matrix, groups=...)` stores in act-order; modules with one input
    have the same groups."""
    names = iter([name for name, shape in tensor_shapes(config).items() if len(shape) == 2 and ".layers." in name])

    def make(shape, seed):
        groups = drawn_groups(shape[1], zlib.crc32(input_of(next(names)).encode()), group)
        matrix = drawn(shape, group=group, seed=seed, **drawing)
        return write(matrix, groups=groups), matrix.values(groups)

    return quantized_tensors(make, config)


def quantized_tensors(make, config=CONFIG):
    """Tensors of a checkpoint whose layers' matrices are made by `make(shape, seed)`: parts and values; and the values
    of those matrices."""
    tensors, values = {}, {}
    plain = random_values(config)
    for seed, (name, shape) in enumerate(tensor_shapes(config).items()):
        if name.startswith("model.layers.") and len(shape) == 2:
            parts, values[name] = make(shape, seed)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        else:
            tensors[name] = plain[name]
    return tensors, values


def write_quantized(folder, tensors, stated, config=CONFIG, **changes):
    folder.mkdir(exist_ok=True)
    values = {**config.to_dict(), "quantization_config": stated, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


def gptq_config(**changes):
    return {
        **{"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
        **{"checkpoint_format": "gptq", "damp_percent": 0.01, "true_sequential": True, "lm_head": False},
        **changes,
    }


def awq_config(**changes):
    return {
        **{"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        **{"modules_to_not_convert": None, **changes},
    }


def compressed_config(form="pack-quantized", weights=None, **changes):
    usual = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": {**usual, "dynamic": False, **(weights or {})}}
    return {
        **{"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"},
        **{"config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None, **changes},
    }


def float8_config(**weights):
    return compressed_config("float-quantized", {"num_bits": 8, "type": "float", "group_size": None, **weights})


def drawn_float8(shape, scale_shape, dtype=np.float32, seed=0):
    """Bytes of e4m3, none of them NaN, scales, and the values [rows, columns], the scales spread over equal blocks."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 127, shape).astype(np.uint8) | (rng.integers(0, 2, shape) << 7).astype(np.uint8)
    scales = np.asarray(rng.uniform(0.001, 0.02, scale_shape)).astype(dtype)
    return codes.view(E4M3), scales


def drawn_nvfp4(shape, seed=0, packed_by_nvidia=True):
    """Parts of NVFP4 as ModelOpt stores them, or compressed-tensors, and the values [rows, columns]."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    scales = rng.integers(1, 0x7F, (rows, -(-columns // 16))).astype(np.uint8).view(E4M3)
    factor = np.float32(rng.uniform(0.001, 0.02))
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = np.where(codes & 8, -1, 1).astype(np.float32) * magnitudes[codes & 7]
    values = numbers * scales.astype(np.float32).repeat(16, 1)[:, :columns]
    both = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
    if packed_by_nvidia:
        parts = {"weight": both, "weight_scale": scales, "weight_scale_2": np.asarray(factor)}
        return parts | {"input_scale": np.ones((), np.float32)}, values * factor
    divisor = np.array([1 / factor], np.float32)
    parts = {"weight_packed": both, "weight_scale": scales, "weight_global_scale": divisor}
    return parts | {"input_global_scale": np.ones(1, np.float32)}, values * (np.float32(1) / divisor[0])


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
