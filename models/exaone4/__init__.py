"""EXAONE 4: norms behind the sublayers, norms of every head's query and key; in the large one three layers of four have
a window, and the fourth rotates nothing."""

from __future__ import annotations

from typing import Any

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import FULL, SLIDING, ConfigFile, Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import AttentionKind, LayerKind, Norms
from cheetah.models.rope import Rope

PATTERN = "sliding_window_pattern"


def layer_type(file: ConfigFile, layer: int) -> str:
    """As `sliding_window_pattern` says: every so many layers one that sees all keys, or L and G for each in turn."""
    pattern = file.values.get(PATTERN, 4)
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        return FULL if pattern[layer % len(pattern)] == "G" else SLIDING
    return SLIDING if (layer + 1) % file.count(PATTERN, 4) else FULL


class Exaone4Config(ModelConfig):
    """An EXAONE 4 model."""

    dialect = Dialect(
        "exaone4",
        "Exaone4ForCausalLM",
        absent={"rms_norm_eps": 1e-5, "sliding_window": 4096, "num_key_value_heads": 32},
        reads=frozenset({"sliding_window", PATTERN}),
        layer_types=layer_type,
    )
    layer = LayerKind(Norms(before=False, after=True), AttentionKind(head_norms="each"))

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        fields = file.fields()
        types = fields.get("layer_types", ())
        return fields | {"unrotated_layers": tuple(layer for layer, one in enumerate(types) if one == FULL)}


_LLAMA3 = Rope(1000000.0, "llama3", 16.0, 1.0, 4.0, 8192)

FAMILY = DenseFamily(
    Exaone4Config,
    {
        "exaone-4.0-1.2b": Exaone4Config(
            *(2048, 4096, 30, 32, 8, 64, 102400), max_position_embeddings=65536, tied_embeddings=True, rope=_LLAMA3
        ),
        "exaone-4.0-32b": Exaone4Config(
            *(5120, 27392, 64, 40, 8, 128, 102400),
            max_position_embeddings=131072,
            rope=_LLAMA3,
            sliding_window=4096,
            layer_types=(SLIDING, SLIDING, SLIDING, FULL) * 16,
            unrotated_layers=tuple(range(3, 64, 4)),
        ),
    },
)
