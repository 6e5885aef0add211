"""Gemma 2 and Gemma 3, text: four norms a layer with 1 + weight, GELU, scaled embeddings, layers with a window between
those that see all keys. Gemma 2 has soft-caps; Gemma 3 has norms of queries and keys, and two rotary bases."""

from __future__ import annotations

from typing import Any

import numpy as np

from cheetah.models.config import ModelConfig, Shape
from cheetah.models.config_json import FULL, SLIDING, ConfigFile, Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import AttentionKind, LayerKind, Norms
from cheetah.models.rope import Rope
from cheetah.models.rounding import round_to_bf16

GELU = "gelu_pytorch_tanh"
SCALAR = "query_pre_attn_scalar"
SMALL_CONTEXT = 32768
"""Of those Gemma 3 models whose positions are not scaled."""
_NORMS = Norms(before=True, after=True, plus_one=True)
_ABSENT = {
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6},
    **{"tie_word_embeddings": True, "sliding_window": 4096, SCALAR: 256},
}
_NEUTRAL = {
    **{"hidden_activation": (GELU,), "hidden_act": (GELU, "gelu")},  # hidden_activation alone is read
    "use_bidirectional_attention": (False,),
}


class GemmaConfig(ModelConfig):
    """What both have in common."""

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        fields = file.fields()
        return fields | {
            "attention_scale": file.number(SCALAR) ** -0.5,
            "embedding_multiplier": embedding_multiplier(fields["hidden_size"]),
        }

    def written(self) -> dict[str, Any]:
        scale = self.attention_scale or self.head_dim**-0.5
        return super().written() | {
            **{"hidden_act": GELU, "hidden_activation": GELU},
            SCALAR: _scalar(scale),
        }


def embedding_multiplier(hidden: int) -> float:
    """The root of the hidden size as models in bf16 have it, rounded."""
    return float(round_to_bf16(np.array([hidden**0.5], np.float32))[0])


def _scalar(scale: float) -> float:
    """The number whose root divides logits, an integer where it is near one."""
    scalar = scale**-2
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar


def _alternating(file: ConfigFile, layer: int) -> str:
    return FULL if layer % 2 else SLIDING


class Gemma2Config(GemmaConfig):
    """A Gemma 2 model."""

    dialect = Dialect(
        "gemma2",
        "Gemma2ForCausalLM",
        absent=_ABSENT
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192}
        | {"vocab_size": 256000},
        neutral=_NEUTRAL,
        ignored=frozenset({"cache_implementation"}),
        numbers={"attn_logit_softcapping": "attention_soft_cap", "final_logit_softcapping": "logit_soft_cap"},
        reads=frozenset({"sliding_window", SCALAR}),
        layer_types=_alternating,
    )
    layer = LayerKind(_NORMS, activation="gelu")


def _of_pattern(file: ConfigFile, layer: int) -> str:
    return SLIDING if (layer + 1) % file.count("sliding_window_pattern", 6) else FULL


class Gemma3Config(GemmaConfig):
    """A Gemma 3 model, or the text part of one that sees."""

    dialect = Dialect(
        "gemma3_text",
        "Gemma3ForCausalLM",
        absent=_ABSENT
        | {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "max_position_embeddings": 131072}
        | {"vocab_size": 262208},
        neutral=_NEUTRAL,
        ignored=frozenset({"cache_implementation", "_sliding_window_pattern"}),
        numbers={"final_logit_softcapping": "logit_soft_cap"},
        reads=frozenset({"sliding_window", "sliding_window_pattern", "rope_local_base_freq", SCALAR}),
        layer_types=_of_pattern,
    )
    layer = LayerKind(_NORMS, AttentionKind(head_norms="each"), activation="gelu")

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        values = file.rope_values(SLIDING) if file.has_ropes_by_type else {}
        return super().read(file) | {"local_rope": file.rope(values, theta="rope_local_base_freq")}

    def written(self) -> dict[str, Any]:
        local = self.local_rope or self.rope
        return super().written() | {"rope_parameters": {FULL: self.rope.to_dict(), SLIDING: local.to_dict()}}


def _gemma2(shape: Shape, scalar: int = 256) -> Gemma2Config:
    return Gemma2Config(
        *shape,
        rms_norm_eps=1e-6,
        max_position_embeddings=8192,
        tied_embeddings=True,
        sliding_window=4096,
        layer_types=(SLIDING, FULL) * (shape[2] // 2),
        attention_scale=scalar**-0.5,
        attention_soft_cap=50.0,
        logit_soft_cap=30.0,
        embedding_multiplier=embedding_multiplier(shape[0]),
    )


def _gemma3(shape: Shape, scalar: int = 256, window: int = 1024, context: int = 131072) -> Gemma3Config:
    types = tuple(SLIDING if (layer + 1) % 6 else FULL for layer in range(shape[2]))
    return Gemma3Config(
        *shape,
        max_position_embeddings=context,
        rope=Rope(1000000.0) if context == SMALL_CONTEXT else Rope(1000000.0, "linear", 8.0),
        rms_norm_eps=1e-6,
        tied_embeddings=True,
        local_rope=Rope(10000.0),
        sliding_window=window,
        layer_types=types,
        attention_scale=scalar**-0.5,
        embedding_multiplier=embedding_multiplier(shape[0]),
    )


FAMILY_2 = DenseFamily(
    Gemma2Config,
    {
        "gemma-2-2b": _gemma2((2304, 9216, 26, 8, 4, 256, 256000)),
        "gemma-2-9b": _gemma2((3584, 14336, 42, 16, 8, 256, 256000)),
        "gemma-2-27b": _gemma2((4608, 36864, 46, 32, 16, 128, 256000), scalar=144),
    },
)
FAMILY_3 = DenseFamily(
    Gemma3Config,
    {
        "gemma-3-270m": _gemma3((640, 2048, 18, 4, 1, 256, 262144), window=512, context=SMALL_CONTEXT),
        "gemma-3-1b": _gemma3((1152, 6912, 26, 4, 1, 256, 262144), window=512, context=SMALL_CONTEXT),
        "gemma-3-4b": _gemma3((2560, 10240, 34, 8, 4, 256, 262208)),
        "gemma-3-12b": _gemma3((3840, 15360, 48, 16, 8, 256, 262208)),
        "gemma-3-27b": _gemma3((5376, 21504, 62, 32, 16, 128, 262208), scalar=168),
    },
)
