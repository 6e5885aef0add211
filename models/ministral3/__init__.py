"""Ministral 3 and Devstral 2: Mistral whose queries grow with the logarithm of their positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import ConfigFile, Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import PositionScale
from cheetah.models.rope import Rope

BETA = "llama_4_scaling_beta"


class Ministral3Config(ModelConfig):
    """A Ministral 3 model, or the text part of one that sees."""

    dialect = Dialect(
        "ministral3",
        "Ministral3ForCausalLM",
        absent={
            **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144},
            **{"rms_norm_eps": 1e-5},
        },
        reads=frozenset({BETA, "sliding_window"}),
    )

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        fields, values = file.fields(), file.rope_values()
        if BETA not in values:
            raise file.error(f"rope_parameters.{BETA} is missing: queries are scaled by it")
        scale = PositionScale(file.number_of(values, BETA), file.original_context(values))
        return fields | {"position_scale": scale}

    def written(self) -> dict[str, Any]:
        scale = self.position_scale or PositionScale(0.0, 1)
        of_positions = {BETA: scale.beta, "original_max_position_embeddings": scale.context}
        return super().written() | {"rope_parameters": self.rope.to_dict() | of_positions}


_YARN = Rope(1000000.0, "yarn", 16.0, original_max_position_embeddings=16384, mscale=1.0, mscale_all_dim=1.0)
_8B = Ministral3Config(
    *(4096, 14336, 34, 32, 8, 128, 131072),
    max_position_embeddings=262144,
    rope=_YARN,
    position_scale=PositionScale(0.1, 16384),
)

FAMILY = DenseFamily(
    Ministral3Config,
    {
        "ministral-3-3b": replace(_8B, hidden_size=3072, intermediate_size=9216, layers=26, tied_embeddings=True),
        "ministral-3-8b": _8B,
        "ministral-3-14b": replace(_8B, hidden_size=5120, intermediate_size=16384, layers=40),
    },
)
