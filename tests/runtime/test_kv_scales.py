"""Scales of keys and values for a cache in 8 bits, by all names that tools give them."""

import ml_dtypes
import numpy as np
import pytest
from quantized_checkpoints import CONFIG, drawn_float8, float8_config, quantized_tensors, write_quantized
from written_checkpoints import refusal

from cheetah.runtime.checkpoint.loading import open_checkpoint

NAMES = {
    "vLLM and compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "ModelOpt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "older compressed-tensors": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
}
SCALES = np.array([[0.25, 0.5], [1.5, 0.125]], np.float32)


@pytest.fixture(scope="module")
def tensors():
    def make(shape, seed):
        codes, scales = drawn_float8(shape, (), seed=seed)
        return {"weight": codes, "weight_scale": scales}, None

    return quantized_tensors(make)[0]


def written(folder, tensors, extra):
    return write_quantized(folder, {**tensors, **extra}, float8_config(strategy="tensor"))


def named(names, make=lambda value: np.array([value], np.float32)):
    return {
        f"model.layers.{layer}.{name}": make(SCALES[layer, part])
        for layer in range(CONFIG.layers)
        for part, name in enumerate(names)
    }


@pytest.mark.parametrize("name", NAMES)
def test_names(tmp_path, tensors, name):
    checkpoint = open_checkpoint(written(tmp_path, tensors, named(NAMES[name])))
    assert np.array_equal(checkpoint.kv_scales, np.repeat(SCALES[:, :, None], CONFIG.kv_heads, axis=2))


def test_one_for_both_and_one_for_each_head(tmp_path, tensors):
    both = {f"model.layers.{layer}.self_attn.kv_scale": np.array(2.0, ml_dtypes.bfloat16) for layer in range(2)}
    assert np.all(open_checkpoint(written(tmp_path / "both", tensors, both)).kv_scales == 2)
    heads = named(NAMES["ModelOpt"], lambda value: np.array([value, 2 * value], np.float32))
    found = open_checkpoint(written(tmp_path / "heads", tensors, heads)).kv_scales
    assert np.array_equal(found, SCALES[:, :, None] * np.array([1, 2], np.float32))


def test_without_any_there_are_none(tmp_path, tensors):
    assert open_checkpoint(written(tmp_path, tensors, {})).kv_scales is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.self_attn.v_scale": None}, "there is no scale of the values of layer 1, but there is model"),
        ({"model.layers.1.self_attn.k_scale": np.float32([0])}, "self_attn.k_scale is [0.0]: scales must be positive"),
        ({"model.layers.0.self_attn.k_scale": np.float32([np.nan])}, "self_attn.k_scale is [nan]: scales must be"),
        ({"model.layers.0.self_attn.k_scale": np.ones(3, np.float32)}, "is F32 [3]: expected one number, or one for"),
        ({"model.layers.0.self_attn.k_scale": np.ones(1, np.int32)}, "is I32 [1]: expected one number"),
    ],
)
def test_refused(tmp_path, tensors, change, message):
    extra = {**named(NAMES["vLLM and compressed-tensors"]), **change}
    present = {name: value for name, value in extra.items() if value is not None}
    assert message in refusal(written(tmp_path, tensors, present))
