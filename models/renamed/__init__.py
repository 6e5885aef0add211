"""Llama under other names: InternLM, InternLM 3, Aquila, XVERSE."""

from __future__ import annotations

from typing import Any

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import ConfigFile, Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.rope import Rope


class InternLMConfig(ModelConfig):
    """An InternLM model, of the first generation. Its dynamic rotary embedding changes behind
    `max_position_embeddings`, which no sequence passes, so up to there it is the default one."""

    dialect = Dialect(
        "internlm",
        "InternLMForCausalLM",
        absent={"bias": True, "rms_norm_eps": 1e-6},
        reads=frozenset({"bias", "rotary"}),
    )

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        rotary = file.values.get("rotary", {"base": Rope.rope_theta})
        if not isinstance(rotary, dict) or rotary.get("type", "dynamic") not in ("dynamic", "origin"):
            raise file.error(f"rotary = {rotary!r} is not supported; supported: a base of type 'dynamic' or 'origin'")
        rope = file.rope({"rope_theta": rotary.get("base")})
        return file.fields() | {"rope": rope, "attention_biases": file.flag("bias")}

    def written(self) -> dict[str, Any]:
        return {"bias": self.attention_biases, "rotary": {"base": self.rope.rope_theta, "type": "dynamic"}}


class InternLM3Config(ModelConfig):
    """An InternLM3 model, whose rotary embedding is dynamic too."""

    dialect = Dialect(
        "internlm3",
        "InternLM3ForCausalLM",
        absent={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768},
        neutral={"qkv_bias": (False,), "bias": (False,)},
        reads=frozenset({"factor"}),  # of the rope behind there
        ropes={"dynamic": "default"},
    )


class AquilaConfig(ModelConfig):
    """An Aquila or Aquila 2 model."""

    dialect = Dialect("aquila", "AquilaForCausalLM", absent={"rms_norm_eps": 1e-6})


class XverseConfig(ModelConfig):
    """An XVERSE model."""

    dialect = Dialect(
        "xverse",
        "XverseForCausalLM",
        absent={"rms_norm_eps": 1e-6, "max_position_embeddings": 8192},
        neutral={"quantization_bit": (0,)},
        ignored=frozenset({"initializer_weight", "max_tokenizer_truncation"}),
    )


FAMILIES = (
    DenseFamily(InternLMConfig, {}),
    DenseFamily(
        InternLM3Config,
        {
            "internlm3-8b": InternLM3Config(
                *(4096, 10240, 48, 32, 2, 128, 128512), max_position_embeddings=32768, rope=Rope(50000000.0)
            ),
        },
    ),
    DenseFamily(AquilaConfig, {}),
    DenseFamily(XverseConfig, {}),
)
