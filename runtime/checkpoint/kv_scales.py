"""Scales of keys and values that a checkpoint brings for a cache in 8 bits: a number a layer, or one a head.

Tools name them differently; all mean that a cached code times its scale is the key or value. They are read where the
cache is kept as e4m3, and change nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.registry import family_of
from cheetah.models.rounding import widen
from cheetah.runtime.checkpoint.safetensors_files import WEIGHT_DTYPES, LoadingError, StoredTensor


def kv_scales(config: ModelConfig, stored: Mapping[str, StoredTensor], place: str) -> NDArray[np.float32] | None:
    """float32 [layers, 2, kv_heads], of keys, then values; None if there are none. LoadingError if some are missing, or
    are no positive numbers."""
    names = [_names(config, stored, layer) for layer in range(config.layers)]
    found = [name for of_layer in names for name in of_layer if name is not None]
    if not found:
        return None
    scales = np.empty((config.layers, 2, config.kv_heads), np.float32)
    for layer, of_layer in enumerate(names):
        for part, name in enumerate(of_layer):
            if name is None:
                what = ("keys", "values")[part]
                raise LoadingError(
                    f"{place}: there is no scale of the {what} of layer {layer}, but there is {found[0]}"
                )
            scales[layer, part] = _values(config, name, stored[name])
    return scales


def _names(config: ModelConfig, stored: Mapping[str, StoredTensor], layer: int) -> tuple[str | None, str | None]:
    """The tensors that scale a layer's keys and values: of vLLM and compressed-tensors, of ModelOpt, of older files,
    and one for both."""
    key, value = _projections(config, layer)
    both = f"{key.rpartition('.')[0]}.kv_scale"
    usual_key, usual_value = usual_names(config, layer)
    of_keys = (usual_key, f"{key}.k_scale", f"{key}.output_scale", both)
    of_values = (usual_value, f"{value}.v_scale", f"{value}.output_scale", both)
    first, second = (next((name for name in names if name in stored), None) for names in (of_keys, of_values))
    return first, second


def usual_names(config: ModelConfig, layer: int) -> tuple[str, str]:
    """The tensors that scale a layer's keys and values, as vLLM and compressed-tensors name them."""
    attention = _projections(config, layer)[0].rpartition(".")[0]
    return f"{attention}.k_scale", f"{attention}.v_scale"


def _projections(config: ModelConfig, layer: int) -> tuple[str, str]:
    """The modules that make a layer's keys and values."""
    modules = family_of(config).matrix_modules(config)[config.table.heads.name]
    attention = modules[0].format(layer=layer).rpartition(".")[0]
    return f"{attention}.k_proj", f"{attention}.v_proj"


def _values(config: ModelConfig, name: str, tensor: StoredTensor) -> NDArray[np.float32]:
    """One scale for all heads, or one for each."""
    if tensor.dtype not in WEIGHT_DTYPES or tensor.shape not in ((), (1,), (config.kv_heads,)):
        raise LoadingError(
            f"{tensor.file}: tensor {name} is {tensor.dtype} {list(tensor.shape)}: expected one number, or one for "
            f"each of {config.kv_heads} KV heads, in {', '.join(WEIGHT_DTYPES)}"
        )
    values = widen(np.atleast_1d(tensor.mapped()))
    if not (np.isfinite(values) & (values > 0)).all():
        raise LoadingError(f"{tensor.file}: tensor {name} is {values.tolist()}: scales must be positive and finite")
    return values
