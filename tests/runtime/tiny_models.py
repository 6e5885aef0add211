"""Tiny Llama models with random weights, in memory and as checkpoint folders."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.models.dense.weights import tensor_shapes
from cheetah.models.llama import LlamaConfig


@cache
def tiny_config(vocab_size: int = 300, tied: bool = False, max_position_embeddings: int = 200) -> LlamaConfig:
    """One layer more than one, grouped heads, sizes that fill neither strips nor tile pairs."""
    return LlamaConfig(
        hidden_size=72,
        intermediate_size=104,
        layers=2,
        query_heads=4,
        kv_heads=2,
        head_dim=64,
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        tied_embeddings=tied,
    )


class TinyWeights:
    """Random bf16 tensors; large enough embeddings that greedy text does not settle on one token."""

    def __init__(self, config: LlamaConfig, seed: int = 0):
        self.config = config
        draw = np.random.default_rng(seed)
        self.tensors: dict[str, NDArray[np.uint16]] = {}
        for name, shape in tensor_shapes(config).items():
            scale = 1.0 if len(shape) == 1 or "embed" in name else 2.0 * shape[-1] ** -0.5
            self.tensors[name] = (draw.standard_normal(shape) * scale).astype(ml_dtypes.bfloat16).view(np.uint16)

    def tensor(self, name: str) -> NDArray[np.uint16]:
        return self.tensors[name]


@cache
def tiny_weights(vocab_size: int = 300, tied: bool = False, max_position_embeddings: int = 200) -> TinyWeights:
    return TinyWeights(tiny_config(vocab_size, tied, max_position_embeddings))


def write_checkpoint(folder: Path, weights: TinyWeights, files: dict[str, Any] | None = None, **config: Any) -> Path:
    """A checkpoint folder as Hugging Face lays it out; `files` are written beside it, `config` into config.json."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.view(ml_dtypes.bfloat16) for name, tensor in weights.tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name, content in {"config.json": weights.config.to_dict() | config, **(files or {})}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder
