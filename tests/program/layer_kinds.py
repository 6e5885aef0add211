"""Models whose layers do what Llama's do not, in other company than any family's: what tests of kernels run."""

from __future__ import annotations

from typing import Any

from cheetah.models.arcee import ArceeConfig
from cheetah.models.config import ModelConfig
from cheetah.models.layer_kind import LayerKind, Norms
from cheetah.models.llama import LlamaConfig
from cheetah.models.phi3 import Phi3Config
from cheetah.models.rope import Rope


class Sandwich(LlamaConfig):
    """Norms on both sides of sublayers, with 1 + weight, and GELU."""

    layer = LayerKind(Norms(before=True, after=True, plus_one=True), activation="gelu")


class Behind(LlamaConfig):
    """Norms behind sublayers alone."""

    layer = LayerKind(Norms(before=False, after=True))


MULTIPLIERS: dict[str, Any] = {
    **{"embedding_multiplier": 7.0, "residual_multiplier": 0.4, "logit_divisor": 3.0, "logit_soft_cap": 2.0},
    "max_position_embeddings": 256,
}


def sandwich(hidden: int = 48, ffn: int = 40, heads: int = 2, **more: Any) -> ModelConfig:
    """Of which nothing divides 32, with all multipliers."""
    return Sandwich(hidden, ffn, 2, heads, 1, 64, 50, **MULTIPLIERS, **more)


def behind(hidden: int = 80, ffn: int = 40, heads: int = 2, **more: Any) -> ModelConfig:
    """The same, without multipliers."""
    return Behind(hidden, ffn, 2, heads, 1, 64, 50, max_position_embeddings=256, **more)


def fused(hidden: int = 256, ffn: int = 512, heads: int = 4, **more: Any) -> ModelConfig:
    """Fused tensors, and heads of 96 dims of which a part is rotated."""
    rope = Rope(1000.0, partial_rotary_factor=0.5)
    return Phi3Config(hidden, ffn, 2, heads, 1, 96, 50, max_position_embeddings=256, rope=rope, **more)


def ungated(hidden: int = 48, ffn: int = 72, heads: int = 2, head_dim: int = 96, **more: Any) -> ModelConfig:
    """No gate, and biases of q, k, v and o."""
    sizes = (hidden, ffn, 2, heads, 1, head_dim, 50)
    return ArceeConfig(*sizes, max_position_embeddings=256, attention_biases=True, **more)
