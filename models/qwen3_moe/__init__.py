"""Qwen3, the models of experts: attention of Qwen3, and a feed-forward of experts in every layer."""

from __future__ import annotations

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import Dialect, ExpertFields
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import AttentionKind, LayerKind, Routing
from cheetah.models.rope import Rope


class Qwen3MoeConfig(ModelConfig):
    """A Qwen3 model of experts, of which every layer has some."""

    dialect = Dialect(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        absent={
            **{"num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
            **{"intermediate_size": 6144, "moe_intermediate_size": 768},
            **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False},
        },
        neutral={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
        ignored=frozenset({"sliding_window", "max_window_layers"}),
        experts=ExpertFields(normalised=None, width="moe_intermediate_size"),
    )
    layer = LayerKind(attention=AttentionKind(head_norms="each"))


def _published(hidden: int, width: int, layers: int, heads: int, theta: float, positions: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        *(hidden, width, layers, heads, 4, 128, 151936),
        rms_norm_eps=1e-6,
        max_position_embeddings=positions,
        rope=Rope(theta),
        routing=Routing(128, 8, normalised=True),
    )


FAMILY = DenseFamily(
    Qwen3MoeConfig,
    {
        "qwen3-30b-a3b": _published(2048, 768, 48, 32, 1000000.0, 40960),
        "qwen3-235b-a22b": _published(4096, 1536, 94, 64, 1000000.0, 40960),
        "qwen3-coder-30b-a3b": _published(2048, 768, 48, 32, 10000000.0, 262144),
    },
)
