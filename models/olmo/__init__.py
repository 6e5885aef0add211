"""OLMo 2 and OLMo 3: norms behind the sublayers instead of before them, and norms of queries and keys over the whole
width. In OLMo 3 three layers of four have a window, and only the fourth scales its rotary embedding."""

from __future__ import annotations

from typing import Any

from cheetah.models.config import ModelConfig, Shape
from cheetah.models.config_json import FULL, SLIDING, ConfigFile, Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import AttentionKind, LayerKind, Norms
from cheetah.models.rope import Rope

THETA = 500000.0
_LAYER = LayerKind(Norms(before=False, after=True), AttentionKind(head_norms="width"))


class Olmo2Config(ModelConfig):
    """An OLMo 2 model."""

    dialect = Dialect("olmo2", "Olmo2ForCausalLM", absent={"rms_norm_eps": 1e-5})
    layer = _LAYER


def layer_type(file: ConfigFile, layer: int) -> str:
    """Every fourth layer sees all keys."""
    return FULL if layer % 4 == 3 else SLIDING


class Olmo3Config(ModelConfig):
    """An OLMo 3 model."""

    dialect = Dialect(
        "olmo3",
        "Olmo3ForCausalLM",
        absent={"rms_norm_eps": 1e-5, "rope_theta": THETA, "sliding_window": 4096},
        reads=frozenset({"sliding_window"}),
        layer_types=layer_type,
    )
    layer = _LAYER

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        fields = file.fields()
        if file.has_ropes_by_type:
            return fields | {"local_rope": file.rope(file.rope_values(SLIDING))}
        return fields | {"local_rope": Rope(fields["rope"].rope_theta)}

    def written(self) -> dict[str, Any]:
        local = self.local_rope or self.rope
        return super().written() | {"rope_parameters": {FULL: self.rope.to_dict(), SLIDING: local.to_dict()}}


def _olmo2(shape: Shape) -> Olmo2Config:
    return Olmo2Config(*shape, rms_norm_eps=1e-6, max_position_embeddings=4096, rope=Rope(THETA))


def _olmo3(shape: Shape) -> Olmo3Config:
    layers = shape[2]
    yarn = Rope(THETA, "yarn", 8.0, original_max_position_embeddings=8192, attention_factor=1.2079441541679836)
    return Olmo3Config(
        *shape,
        rms_norm_eps=1e-6,
        max_position_embeddings=65536,
        rope=yarn,
        local_rope=Rope(THETA),
        sliding_window=4096,
        layer_types=tuple(FULL if layer % 4 == 3 else SLIDING for layer in range(layers)),
    )


FAMILY = DenseFamily(
    Olmo2Config,
    {
        "olmo-2-1b": _olmo2((2048, 8192, 16, 16, 16, 128, 100352)),
        "olmo-2-7b": _olmo2((4096, 11008, 32, 32, 32, 128, 100352)),
        "olmo-2-32b": _olmo2((5120, 27648, 64, 40, 8, 128, 100352)),
    },
)
FAMILY_3 = DenseFamily(
    Olmo3Config,
    {
        "olmo-3-7b": _olmo3((4096, 11008, 32, 32, 32, 128, 100278)),
        "olmo-3-32b": _olmo3((5120, 27648, 64, 40, 8, 128, 100278)),
    },
)
