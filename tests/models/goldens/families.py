"""The tiny models of the goldens: their weights and tokens, drawn the same here and where the goldens are made."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.registry import family_of
from cheetah.models.rounding import round_to_bf16

FOLDER = Path(__file__).parent
CONFIGS = FOLDER / "families.json"
"""By name the config.json that transformers wrote, and the shapes of the first layer's tensors and of no layer's; of
experts also how far each token's logits are in bf16 (`divergence`), where all have the experts that float32 chose."""
LOGITS = FOLDER / "families.safetensors"
"""By name the logits of all tokens, float32 [tokens, vocab]."""
TOKENS = 14


def tokens_of(vocab: int) -> list[int]:
    """The prompt."""
    return [(7 * index * index + 3) % vocab for index in range(TOKENS)]


def divergence(wanted: NDArray[np.float32], found: NDArray[np.float32]) -> NDArray[np.float32]:
    """Kullback and Leibler's, of the distributions that logits [tokens, vocab] stand for: [tokens], in nats."""
    first, second = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)) for logits in (wanted, found))
    return np.asarray((np.exp(first) * (first - second)).sum(-1), np.float32)


def weights_of(shapes: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Random numbers of bf16: around one for norms whose weights are that, small for matrices."""
    return {name: _drawn(name, tuple(shape)) for name, shape in shapes.items()}


def weights_of_model(config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """The tensors of a model, which files of gpt-oss have merged: drawn as they lie there."""
    family = family_of(config)
    shapes = family.tensor_shapes(config)
    if not config.interleaved:
        return weights_of(shapes)
    merged = {name: one for name, one in family.merged_tensors(config).items() if [*one.parts][0] in shapes}
    parts = {part for one in merged.values() for part in one.parts}
    drawn = weights_of({name: shape for name, shape in shapes.items() if name not in parts})
    for name, one in merged.items():
        of_parts = _drawn(name, one.shape)
        drawn |= {
            part: np.ascontiguousarray(values.T if one.is_transposed else values)
            for part, values in zip(one.parts, of_parts, strict=True)
        }
    return drawn


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Those of a file."""
    family = family_of(config)
    shapes = family.tensor_shapes(config)
    for name, one in family.merged_tensors(config).items() if config.interleaved else ():
        if [*one.parts][0] in shapes:
            shapes = {part: shape for part, shape in shapes.items() if part not in one.parts} | {name: one.shape}
    return shapes


def _drawn(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    numbers = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    if len(shape) == 1:
        return round_to_bf16(1 + 0.3 * numbers)
    return round_to_bf16(numbers * (0.5 if "embed" in name else shape[-1] ** -0.5))
