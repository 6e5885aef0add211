"""gpt-oss: experts in every layer, in MXFP4, biases everywhere, sinks, a window in every second one, a clamped gate."""

from __future__ import annotations

from typing import Any

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import FULL, SLIDING, ConfigFile, Dialect, ExpertFields
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import AttentionKind, ClampedGate, LayerKind, Routing
from cheetah.models.rope import Rope

ALPHA, LIMIT = "swiglu_alpha", "swiglu_limit"
YARN = Rope(150000.0, "yarn", 32.0, original_max_position_embeddings=4096, truncate=False)
_EXPERT = "mlp.experts.{expert}."
MXFP4 = "mxfp4"
IN_MXFP4 = (("gate_up", MXFP4), ("down", MXFP4))
"""As the models were published."""


def _alternating(file: ConfigFile, layer: int) -> str:
    return FULL if layer % 2 else SLIDING


class GptOssConfig(ModelConfig):
    """A gpt-oss model. Gate and up of an expert are one tensor, whose rows are theirs in turn."""

    dialect = Dialect(
        "gpt_oss",
        "GptOssForCausalLM",
        absent={
            **{"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "vocab_size": 201088},
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
            **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0},
            **{"num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True, ALPHA: 1.702, LIMIT: 7.0},
        },
        neutral={"attention_bias": (True,)},
        ignored=frozenset({"experts_per_token", "initial_context_length"}),
        reads=frozenset({"sliding_window", ALPHA, LIMIT}),
        experts=ExpertFields(("num_local_experts", "num_experts"), biases=True),
        layer_types=_alternating,
    )
    layer = LayerKind(attention=AttentionKind(biases=True, out_biases=True, sinks=True))
    fused = interleaved = ("gate_up",)
    modules = {"router": "mlp.router", "gate_up": f"{_EXPERT}gate_up_proj", "down": f"{_EXPERT}down_proj"}

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        rope = {} if file.rope_values() else {"rope": YARN}
        return super().read(file) | {"clamped_gate": ClampedGate(file.number(ALPHA), file.number(LIMIT))} | rope

    def written(self) -> dict[str, Any]:
        gate = self.clamped_gate
        assert gate is not None
        return (
            super().written()
            | {"attention_bias": True, ALPHA: gate.alpha, LIMIT: gate.limit}
            | ({"quantization_config": {"quant_method": MXFP4}} if self.weight_formats == IN_MXFP4 else {})
        )


def _published(layers: int, experts: int) -> GptOssConfig:
    return GptOssConfig(
        *(2880, 2880, layers, 64, 8, 64, 201088),
        max_position_embeddings=131072,
        rope=YARN,
        sliding_window=128,
        layer_types=tuple(FULL if layer % 2 else SLIDING for layer in range(layers)),
        routing=Routing(experts, 4, biases=True),
        clamped_gate=ClampedGate(1.702, 7.0),
        weight_formats=IN_MXFP4,
    )


FAMILY = DenseFamily(GptOssConfig, {"gpt-oss-20b": _published(24, 32), "gpt-oss-120b": _published(36, 128)})
