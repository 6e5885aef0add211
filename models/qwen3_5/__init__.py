"""Qwen3.5, and 3.6 and 3.8, which are of the same architecture: Gated DeltaNet in three layers of four, attention with
gated heads in the fourth. Of models that see, the text part; the layer that drafts (`mtp`) is not read.

There is no kernel for Gated DeltaNet yet: configurations and checkpoints are read, and what they mean is computed in
float32; plans, and with them everything that runs, refuse such layers by name. So there are no presets.
"""

from __future__ import annotations

from typing import Any

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import FULL, ConfigFile, Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import AttentionKind, DeltaNet, LayerKind, Norms
from cheetah.printable import shown

LINEAR = "linear_attention"
INTERVAL = "full_attention_interval"
SIZES = {
    **{"key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads"},
    **{"key_dim": "linear_key_head_dim", "value_dim": "linear_value_head_dim", "taps": "linear_conv_kernel_dim"},
}
"""Fields of `DeltaNet` -> fields of config.json."""


class Qwen35Config(ModelConfig):
    """A dense Qwen3.5 model, or the text part of one that sees."""

    dialect = Dialect(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        absent={
            **{"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32},
            **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6},
            **{"max_position_embeddings": 32768, "partial_rotary_factor": 0.25, INTERVAL: 4},
            **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4},
            **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        },
        neutral={
            **{"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",), "mlp_only_layers": ([],)},
            "output_gate_type": ("silu", "swish"),
        },
        ignored=frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
        reads=frozenset(
            {"partial_rotary_factor", "mrope_section", "mrope_interleaved", "layer_types", INTERVAL, *SIZES.values()}
        ),
    )
    layer = LayerKind(Norms(plus_one=True), AttentionKind(head_norms="each", gated=True))

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        delta = DeltaNet(**{field: file.count(name) for field, name in SIZES.items()})
        if delta.value_heads % delta.key_heads:
            raise file.error(
                f"linear_num_value_heads = {delta.value_heads} is not a multiple of linear_num_key_heads = "
                f"{delta.key_heads}"
            )
        return file.fields() | {"delta": delta, "delta_layers": _delta_layers(file)}

    def written(self) -> dict[str, Any]:
        types = [LINEAR if layer in self.delta_layers else FULL for layer in range(self.layers)]
        sizes = {name: getattr(self.delta, field) for field, name in SIZES.items()}
        return super().written() | {"layer_types": types} | sizes


def _delta_layers(file: ConfigFile) -> tuple[int, ...]:
    """By the file's list, or all but each so-manieth."""
    layers, types = file.count("num_hidden_layers"), file.values.get("layer_types")
    if types is None:
        interval = file.count(INTERVAL)
        return tuple(layer for layer in range(layers) if (layer + 1) % interval)
    if not isinstance(types, list) or len(types) != layers or any(one not in (FULL, LINEAR) for one in types):
        supported = f"{FULL!r} or {LINEAR!r} for each of {layers} layers"
        raise file.error(f"layer_types = {shown(types)} is not supported; supported: {supported}")
    return tuple(layer for layer, one in enumerate(types) if one == LINEAR)


FAMILY = DenseFamily(Qwen35Config, {}, unread=("mtp.",), kept_exact=(".A_log", ".dt_bias", ".linear_attn.norm.weight"))
