"""OLMoE: norms of queries and keys over the whole width, and a feed-forward of experts in every layer, whose weights
are of the softmax over all experts."""

from __future__ import annotations

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import Dialect, ExpertFields
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import AttentionKind, LayerKind, Routing


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
        experts=ExpertFields(normalised=None),
    )
    layer = LayerKind(attention=AttentionKind(head_norms="width"))


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
