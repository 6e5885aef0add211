"""A small model on which mistakes show that weights as they usually are hide.

Nothing divides: its sizes are padded in every matrix and vector. Half of its tokens have embeddings so small that the
norm's epsilon decides. Rows of its head are equal in fours, so that every greedy choice is a tie, within a block and
between blocks. And its kernel takes several sequences, has small pages and cuts short caches into parts, where the plan
leaves that open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.family import QuantizedMatrix, Rows
from cheetah.models.registry import family_of
from cheetah.models.rounding import round_to_bf16, widen
from cheetah.runtime.checkpoint.random_weights import RandomTensors, random_tensors

HIDDEN, INTERMEDIATE, VOCABULARY = 72, 296, 100
MOST_LAYERS, MOST_KV_HEADS = 2, 2
FAINTNESS = np.float32(2.0**-10)
BATCH, PAGE_SIZE, KV_CHUNK_MIN = 4, 4, 16


def awkward_config(config: ModelConfig) -> ModelConfig:
    """A small model of the same kind: head_dim, query heads a KV head, RoPE and tied embeddings stay."""
    kv_heads = min(config.kv_heads, MOST_KV_HEADS)
    return replace(
        config,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        vocab_size=VOCABULARY,
        layers=min(config.layers, MOST_LAYERS),
        kv_heads=kv_heads,
        query_heads=kv_heads * config.group,
    )


def awkward_plan(options: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's options, with several sequences, small pages and short parts where they leave that open."""
    several = {} if "tokens" in options else {"batch": BATCH}
    return {**several, "page_size": PAGE_SIZE, "kv_chunk_min": KV_CHUNK_MIN, **options}


@dataclass(frozen=True)
class AwkwardTensors:
    """The tensors of such a model by name: bf16 bits, or what quantised matrices stand for."""

    config: ModelConfig
    random: RandomTensors

    def rows(self, name: str) -> Rows | QuantizedMatrix:
        """A matrix in parts; quantised ones as they are."""
        matrix = self.random.rows(name)
        return self(name) if isinstance(matrix[:1], np.ndarray) else matrix

    def __call__(self, name: str) -> NDArray[Any]:
        tensor = self.random(name)
        family = family_of(self.config)
        if name not in (family.embedding_tensor, family.head_tensor):
            return tensor
        alike = tensor[np.arange(VOCABULARY) // 2 % (VOCABULARY // 4)]  # 2i and 2i + 1, here and half a vocabulary on
        if name != family.embedding_tensor:
            return alike
        values = widen(alike)
        values[np.arange(VOCABULARY) // 2 % 2 == 1] *= FAINTNESS
        return np.asarray(round_to_bf16(values).view(np.uint32) >> 16).astype(np.uint16)


def awkward_tensors(config: ModelConfig) -> AwkwardTensors:
    """Random weights with faint embeddings and equal rows of the head, for a configuration of `awkward_config`."""
    return AwkwardTensors(config, random_tensors(config))
