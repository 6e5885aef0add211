"""Qwen3, the dense models: the norm of every head's query and key, and a head size of its own."""

from __future__ import annotations

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import AttentionKind, LayerKind
from cheetah.models.rope import Rope


class Qwen3Config(ModelConfig):
    """A dense Qwen3 model."""

    dialect = Dialect(
        "qwen3",
        "Qwen3ForCausalLM",
        absent={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        ignored=frozenset({"sliding_window", "max_window_layers"}),  # read only where use_sliding_window is true
    )
    layer = LayerKind(attention=AttentionKind(head_norms="each"))


def _published(hidden: int, ffn: int, layers: int, heads: int, tied: bool = False) -> Qwen3Config:
    return Qwen3Config(
        hidden,
        ffn,
        layers,
        heads,
        kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        tied_embeddings=tied,
        rope=Rope(1000000.0),
    )


FAMILY = DenseFamily(
    Qwen3Config,
    {
        "qwen3-0.6b": _published(1024, 3072, 28, 16, tied=True),
        "qwen3-1.7b": _published(2048, 6144, 28, 16, tied=True),
        "qwen3-4b": _published(2560, 9728, 36, 32, tied=True),
        "qwen3-8b": _published(4096, 12288, 36, 32),
        "qwen3-14b": _published(5120, 17408, 40, 40),
        "qwen3-32b": _published(5120, 25600, 64, 64),
    },
)
