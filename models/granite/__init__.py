"""Granite 3.x, and the dense ones of Granite 4, which have the name and the tensors of hybrids: four multipliers."""

from __future__ import annotations

from typing import Any

from cheetah.models.config import ModelConfig, Shape
from cheetah.models.config_json import ConfigFile, Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.rope import Rope

MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logit_divisor",
}
_ABSENT = {**dict.fromkeys(MULTIPLIERS, 1.0), "rms_norm_eps": 1e-6}


class GraniteConfig(ModelConfig):
    """A Granite 3.x model."""

    dialect = Dialect("granite", "GraniteForCausalLM", absent=_ABSENT, numbers=MULTIPLIERS)


class GraniteHybridConfig(ModelConfig):
    """A Granite 4 model whose layers are all attention and feed-forward, without experts."""

    dialect = Dialect(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        absent=_ABSENT,
        neutral={"num_local_experts": (0,)},
        ignored=frozenset(
            {
                *("intermediate_size", "layers_block_type", "num_experts_per_tok", "output_router_logits"),
                *("router_aux_loss_coef", "time_step_limit", "init_method", "normalization_function"),
                *(f"mamba_{part}" for part in ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand")),
                *("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias"),
            }
        ),
        numbers=MULTIPLIERS,
        reads=frozenset({"shared_intermediate_size", "position_embedding_type", "layer_types"}),
    )
    fused = ("gate_up",)
    modules = {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        types = file.values.get("layer_types", file.values.get("layers_block_type"))
        if not isinstance(types, list) or any(one not in ("attention", "full_attention") for one in types):
            raise file.error("layer_types is not 'attention' in every layer: Mamba layers are not supported")
        if file.values.get("num_local_experts") != 0:
            raise file.error("num_local_experts is not 0: experts are not supported")
        fields = file.fields() | {"intermediate_size": file.count("shared_intermediate_size")}
        if (position := file.values.get("position_embedding_type")) not in (None, "rope", "nope"):
            raise file.error(f"position_embedding_type = {position!r} is not supported; supported: 'rope' or 'nope'")
        return fields | {"unrotated_layers": () if position == "rope" else tuple(range(fields["layers"]))}

    def written(self) -> dict[str, Any]:
        return super().written() | {
            "shared_intermediate_size": self.intermediate_size,
            "position_embedding_type": "nope" if self.unrotated_layers else "rope",
            "layer_types": ["attention"] * self.layers,
            "num_local_experts": 0,
        }


def _granite(config: type[ModelConfig], shape: Shape, scale: float, divisor: float) -> ModelConfig:
    return config(
        *shape,
        max_position_embeddings=131072,
        tied_embeddings=True,
        rope=Rope(10000000.0),
        embedding_multiplier=12.0,
        attention_scale=scale,
        residual_multiplier=0.22,
        logit_divisor=divisor,
    )


FAMILY = DenseFamily(
    GraniteConfig,
    {
        "granite-3.3-2b": _granite(GraniteConfig, (2048, 8192, 40, 32, 8, 64, 49159), 0.015625, 8.0),
        "granite-3.3-8b": _granite(GraniteConfig, (4096, 12800, 40, 32, 8, 128, 49159), 0.0078125, 16.0),
    },
)
HYBRID_FAMILY = DenseFamily(
    GraniteHybridConfig,
    {
        "granite-4.0-micro": _granite(GraniteHybridConfig, (2560, 8192, 40, 40, 8, 64, 100352), 0.015625, 10.0),
    },
)
