"""Qwen2 and Qwen2.5: biases of q, k and v."""

from __future__ import annotations

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import AttentionKind, LayerKind
from cheetah.models.rope import Rope


class Qwen2Config(ModelConfig):
    """A Qwen2 or Qwen2.5 model."""

    dialect = Dialect(
        "qwen2",
        "Qwen2ForCausalLM",
        absent={"num_key_value_heads": 32, "max_position_embeddings": 32768},
        neutral={"use_mrope": (False,)},
        ignored=frozenset({"sliding_window", "max_window_layers"}),  # read only where use_sliding_window is true
    )
    layer = LayerKind(attention=AttentionKind(biases=True))


FAMILY = DenseFamily(
    Qwen2Config,
    {
        "qwen2.5-7b": Qwen2Config(
            *(3584, 18944, 28, 28, 4, 128, 152064),
            rms_norm_eps=1e-6,
            max_position_embeddings=131072,
            rope=Rope(1000000.0),
        ),
    },
)
