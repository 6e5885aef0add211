"""Mistral 7B and Small 3.x: a head size that is not hidden / heads, and a sliding window where the file has one."""

from __future__ import annotations

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.rope import Rope


class MistralConfig(ModelConfig):
    """A Mistral model."""

    dialect = Dialect(
        "mistral",
        "MistralForCausalLM",
        absent={"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32, "sliding_window": 4096},
        reads=frozenset({"sliding_window"}),
    )


FAMILY = DenseFamily(
    MistralConfig,
    {
        "mistral-7b-v0.3": MistralConfig(
            4096, 14336, 32, 32, 8, 128, 32768, max_position_embeddings=32768, rope=Rope(1000000.0)
        ),
        "mistral-small-3.2-24b": MistralConfig(
            *(5120, 32768, 40, 32, 8, 128, 131072), max_position_embeddings=131072, rope=Rope(1000000000.0)
        ),
        "mistral-small-24b": MistralConfig(
            5120, 32768, 40, 32, 8, 128, 131072, max_position_embeddings=32768, rope=Rope(100000000.0)
        ),
    },
)
