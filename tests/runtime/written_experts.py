"""Small checkpoints of models of experts, in both layouts of tensor names."""

from __future__ import annotations

from typing import Any

import numpy as np
from written_checkpoints import random_values

from cheetah.models.config import ModelConfig
from cheetah.models.layer_kind import Routing
from cheetah.models.mixtral import MixtralConfig
from cheetah.models.olmoe import OlmoeConfig
from cheetah.models.qwen3_moe import Qwen3MoeConfig

SIZES = (48, 32, 2, 4, 2, 64, 50)
CONFIGS: dict[str, ModelConfig] = {
    "qwen3_moe": Qwen3MoeConfig(*SIZES, routing=Routing(5, 2)),
    "mixtral": MixtralConfig(*SIZES, routing=Routing(3, 2)),
    "olmoe": OlmoeConfig(*SIZES, routing=Routing(4, 3, normalised=False)),
}
MERGED = "model.layers.{}.mlp.experts.{}_proj"
NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}


def merged(family: str) -> dict[str, Any]:
    """The same tensors with those of a layer's experts in two, under the names that transformers 5 has in memory."""
    config, values = CONFIGS[family], random_values(CONFIGS[family])
    block, gate, up, down = NAMES.get(family, ("mlp", "gate_proj", "up_proj", "down_proj"))
    assert config.routing is not None
    for layer in range(config.layers):
        before = f"model.layers.{layer}.{block}."
        experts = [
            [values.pop(f"{before}experts.{expert}.{part}.weight") for part in (gate, up, down)]
            for expert in range(config.routing.experts)
        ]
        values[MERGED.format(layer, "gate_up")] = np.stack([np.concatenate(one[:2]) for one in experts])
        values[MERGED.format(layer, "down")] = np.stack([one[2] for one in experts])
        values[f"model.layers.{layer}.mlp.gate.weight"] = values.pop(f"{before}gate.weight")
    return values
