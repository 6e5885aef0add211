"""Mixtral: Mistral with a feed-forward of experts in every layer."""

from __future__ import annotations

from cheetah.models.config import ModelConfig, Shape
from cheetah.models.config_json import Dialect, ExpertFields
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import Routing
from cheetah.models.rope import Rope

_OF_EXPERT = "block_sparse_moe.experts.{expert}."


class MixtralConfig(ModelConfig):
    """A Mixtral model."""

    dialect = Dialect(
        "mixtral",
        "MixtralForCausalLM",
        absent={
            **{"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32, "rms_norm_eps": 1e-5},
            **{"rope_theta": 1000000.0, "num_local_experts": 8, "num_experts_per_tok": 2},
        },
        reads=frozenset({"sliding_window"}),
        experts=ExpertFields(("num_local_experts", "num_experts")),
    )
    modules = {
        "router": "block_sparse_moe.gate",
        "gate": f"{_OF_EXPERT}w1",
        "up": f"{_OF_EXPERT}w3",
        "down": f"{_OF_EXPERT}w2",
    }


def _published(shape: Shape, positions: int) -> MixtralConfig:
    return MixtralConfig(*shape, max_position_embeddings=positions, rope=Rope(1000000.0), routing=Routing(8, 2))


FAMILY = DenseFamily(
    MixtralConfig,
    {
        "mixtral-8x7b": _published((4096, 14336, 32, 32, 8, 128, 32000), 32768),
        "mixtral-8x22b": _published((6144, 16384, 56, 48, 8, 128, 32768), 65536),
    },
)
