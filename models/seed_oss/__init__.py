"""Seed-OSS: Llama with biases of q, k and v."""

from __future__ import annotations

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import AttentionKind, LayerKind
from cheetah.models.rope import Rope


class SeedOssConfig(ModelConfig):
    """A Seed-OSS model."""

    dialect = Dialect(
        "seed_oss",
        "SeedOssForCausalLM",
        absent={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 524288},
        neutral={"attention_bias": (True,), "attention_out_bias": (False,)},
        ignored=frozenset({"residual_dropout"}),
    )
    layer = LayerKind(attention=AttentionKind(biases=True))


FAMILY = DenseFamily(
    SeedOssConfig,
    {
        "seed-oss-36b": SeedOssConfig(
            *(5120, 27648, 64, 80, 8, 128, 155136),
            rms_norm_eps=1e-6,
            max_position_embeddings=524288,
            rope=Rope(10000000.0),
        ),
    },
)
