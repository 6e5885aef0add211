"""CWM: Llama with a window in three layers of four."""

from __future__ import annotations

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import FULL, SLIDING, ConfigFile, Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.rope import Rope


def layer_type(file: ConfigFile, layer: int) -> str:
    """Every fourth layer sees all keys, the first one among them."""
    return SLIDING if layer % 4 else FULL


class CwmConfig(ModelConfig):
    """A Code World Model."""

    dialect = Dialect(
        "cwm",
        "CwmForCausalLM",
        absent={
            **{"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": 8192},
            **{"num_key_value_heads": 8, "max_position_embeddings": 131072},
        },
        reads=frozenset({"sliding_window"}),
        layer_types=layer_type,
    )


FAMILY = DenseFamily(
    CwmConfig,
    {
        "cwm-32b": CwmConfig(
            *(6144, 21504, 64, 48, 8, 128, 128256),
            max_position_embeddings=131072,
            rope=Rope(1000000.0, "llama3", 16.0, 1.0, 4.0, 8192),
            sliding_window=8192,
            layer_types=(FULL, SLIDING, SLIDING, SLIDING) * 16,
        ),
    },
)
