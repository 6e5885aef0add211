"""SmolLM3: queries and keys of every fourth layer are not rotated."""

from __future__ import annotations

from typing import Any

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import ConfigFile, Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.rope import Rope

INTERVAL = 4
"""Of layers that are not rotated, where the file does not say."""


class SmolLM3Config(ModelConfig):
    """A SmolLM3 model."""

    dialect = Dialect(
        "smollm3",
        "SmolLM3ForCausalLM",
        absent={
            **{"num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
            **{"rope_theta": 2000000.0, "tie_word_embeddings": True},
        },
        ignored=frozenset({"sliding_window", "max_window_layers"}),  # read only where use_sliding_window is true
        reads=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    )

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        fields = file.fields()
        interval = file.count("no_rope_layer_interval", INTERVAL)
        is_rotated = file.integers("no_rope_layers", fields["layers"])  # 1: rotated, whatever the name says
        if is_rotated is None:
            return fields | {"unrotated_layers": unrotated(fields["layers"], interval)}
        return fields | {"unrotated_layers": tuple(layer for layer, is_one in enumerate(is_rotated) if not is_one)}

    def written(self) -> dict[str, Any]:
        is_rotated = [int(layer not in self.unrotated_layers) for layer in range(self.layers)]
        return super().written() | {"no_rope_layers": is_rotated}


def unrotated(layers: int, interval: int = INTERVAL) -> tuple[int, ...]:
    """The last of so many layers each."""
    return tuple(range(interval - 1, layers, interval))


FAMILY = DenseFamily(
    SmolLM3Config,
    {
        "smollm3-3b": SmolLM3Config(
            *(2048, 11008, 36, 16, 4, 128, 128256),
            rms_norm_eps=1e-6,
            max_position_embeddings=65536,
            tied_embeddings=True,
            rope=Rope(5000000.0),
            unrotated_layers=unrotated(36),
        ),
    },
)
