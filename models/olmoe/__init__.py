"""OLMoE: norms of queries and keys over the whole width, and a feed-forward of experts in every layer, whose weights
are of the softmax over all experts."""

from __future__ import annotations

from typing import Any

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import ConfigFile, Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import AttentionKind, LayerKind, Routing
from cheetah.models.routing import NOT_FOR_INFERENCE, routing_of, written_routing

EXPERTS = ("num_experts", "num_local_experts")
"""The count's field, and as it may be called, too."""


class OlmoeConfig(ModelConfig):
    """An OLMoE model."""

    dialect = Dialect(
        "olmoe",
        "OlmoeForCausalLM",
        absent={
            **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
            **{"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        },
        neutral={"clip_qkv": ()},
        ignored=NOT_FOR_INFERENCE,
        reads=frozenset({*EXPERTS, "num_experts_per_tok", "norm_topk_prob"}),
    )
    layer = LayerKind(attention=AttentionKind(head_norms="width"))

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        return file.fields() | {"routing": routing_of(file, EXPERTS, file.flag("norm_topk_prob"))}

    def written(self) -> dict[str, Any]:
        return super().written() | written_routing(self.routing, EXPERTS[0])


FAMILY = DenseFamily(
    OlmoeConfig,
    {
        "olmoe-1b-7b": OlmoeConfig(
            *(2048, 1024, 16, 16, 16, 128, 50304),
            max_position_embeddings=4096,
            routing=Routing(64, 8, normalised=False),
        )
    },
)
