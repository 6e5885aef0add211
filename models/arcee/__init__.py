"""Arcee: Llama whose feed-forward has no gate, but the square of what of its first product is above 0."""

from __future__ import annotations

from typing import Any

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import LayerKind
from cheetah.models.rope import Rope


class ArceeConfig(ModelConfig):
    """An Arcee model."""

    dialect = Dialect(
        "arcee",
        "ArceeForCausalLM",
        absent={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        neutral={"hidden_act": ("relu2",)},
        reads=frozenset({"attention_bias"}),
    )
    layer = LayerKind(activation="relu2")

    def written(self) -> dict[str, Any]:
        return super().written() | {"hidden_act": "relu2"}


FAMILY = DenseFamily(
    ArceeConfig,
    {
        "afm-4.5b": ArceeConfig(
            *(2560, 18432, 36, 20, 4, 128, 128004),
            max_position_embeddings=65536,
            rope=Rope(10000.0, "yarn", 20.0, original_max_position_embeddings=4096),
        ),
    },
)
