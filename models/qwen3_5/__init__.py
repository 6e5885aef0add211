"""Qwen3-Next, and Qwen3.5, 3.6 and 3.8, which are of one architecture: Gated DeltaNet in three layers of four, and in
the fourth attention with gated heads. Of models that see, the text part; the layer that drafts (`mtp`) is not read.

Models of experts have one that every token has, beside those that it is given to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import FULL, ConfigFile, Dialect, ExpertFields
from cheetah.models.dense.family import DenseFamily
from cheetah.models.layer_kind import AttentionKind, DeltaNet, LayerKind, Norms, Routing
from cheetah.models.rope import Rope
from cheetah.printable import shown

LINEAR = "linear_attention"
INTERVAL = "full_attention_interval"
SIZES = {
    **{"key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads"},
    **{"key_dim": "linear_key_head_dim", "value_dim": "linear_value_head_dim", "taps": "linear_conv_kernel_dim"},
}
"""Fields of `DeltaNet` -> fields of config.json."""


_ABSENT = {
    **{"vocab_size": 248320, "num_attention_heads": 16, "head_dim": 256, "rms_norm_eps": 1e-6},
    **{"max_position_embeddings": 32768, "partial_rotary_factor": 0.25, INTERVAL: 4},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",), "mlp_only_layers": ([],)},
    **{"output_gate_type": ("silu", "swish"), "decoder_sparse_step": (1,), "norm_topk_prob": (True,)},
}
_DRAFTER = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
_READS = frozenset(
    {"partial_rotary_factor", "mrope_section", "mrope_interleaved", "layer_types", INTERVAL, *SIZES.values()}
)
_FIELDS_OF_EXPERTS = ExpertFields(
    ("num_experts",), width="moe_intermediate_size", shared="shared_expert_intermediate_size"
)
_EXPERTS = {"num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}


Config = TypeVar("Config", bound="HybridConfig")


class HybridConfig(ModelConfig):
    """What all have in common."""

    layer = LayerKind(Norms(plus_one=True), AttentionKind(head_norms="each", gated=True))
    by_key_heads: ClassVar[bool] = False
    """How files have the matrices of Gated DeltaNet: see `DeltaNet`."""

    @classmethod
    def read(cls, file: ConfigFile) -> dict[str, Any]:
        sizes = {field: file.count(name) for field, name in SIZES.items()}
        delta = DeltaNet(**sizes, by_key_heads=cls.by_key_heads)
        if delta.value_heads % delta.key_heads:
            raise file.error(
                f"linear_num_value_heads = {delta.value_heads} is not a multiple of linear_num_key_heads = "
                f"{delta.key_heads}"
            )
        return super().read(file) | {"delta": delta, "delta_layers": _delta_layers(file)}

    def written(self) -> dict[str, Any]:
        types = [LINEAR if layer in self.delta_layers else FULL for layer in range(self.layers)]
        sizes = {name: getattr(self.delta, field) for field, name in SIZES.items()}
        flags = {} if self.routing is None else {"norm_topk_prob": self.routing.normalised}
        return super().written() | {"layer_types": types} | sizes | flags


class Qwen35Config(HybridConfig):
    """A dense Qwen3.5 model, or the text part of one that sees."""

    dialect = Dialect(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        absent=_ABSENT
        | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_key_value_heads": 4},
        neutral=_NEUTRAL,
        ignored=_DRAFTER,
        reads=_READS,
    )


class Qwen35MoeConfig(HybridConfig):
    """A Qwen3.5 model of experts, of which one is every token's, or the text part of one that sees."""

    dialect = Dialect(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        absent=_ABSENT
        | {"hidden_size": 2048, "intermediate_size": 512, "num_hidden_layers": 40, "num_key_value_heads": 2}
        | {"num_experts": 256, **_EXPERTS},
        neutral=_NEUTRAL,
        ignored=_DRAFTER,
        reads=_READS,
        experts=_FIELDS_OF_EXPERTS,
    )


class Qwen3NextConfig(HybridConfig):
    """A Qwen3-Next model, of experts; its matrices of Gated DeltaNet are fused by key heads."""

    dialect = Dialect(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        absent=_ABSENT
        | {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48}
        | {"num_key_value_heads": 2, "num_experts": 512, **_EXPERTS, "num_experts_per_tok": 10},
        neutral=_NEUTRAL,
        ignored=_DRAFTER,
        reads=_READS,
        experts=_FIELDS_OF_EXPERTS,
    )
    by_key_heads = True


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


def _family(config_type: type[ModelConfig], presets: Mapping[str, ModelConfig]) -> DenseFamily:
    exact = (".A_log", ".dt_bias", ".linear_attn.norm.weight")
    return DenseFamily(config_type, presets, unread=("mtp.",), kept_exact=exact)


def _published(
    hidden: int, ffn: int, layers: int, heads: tuple[int, int], value_heads: int, tied: bool = False
) -> Qwen35Config:
    """heads: of queries, and of keys and values."""
    return _like(Qwen35Config, (hidden, ffn, layers, *heads, 256, 248320), value_heads, tied_embeddings=tied)


Sizes = tuple[int, int, int, int, int, int, int]
"""The first fields of a configuration."""


def _like(one: type[Config], sizes: Sizes, value_heads: int, **more: Any) -> Config:
    """What all published ones have in common."""
    return one(
        *sizes,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        rope=Rope(1e7, partial_rotary_factor=0.25),
        delta=DeltaNet(16, value_heads, by_key_heads=one.by_key_heads),
        delta_layers=tuple(layer for layer in range(sizes[2]) if (layer + 1) % 4),
        **more,
    )


PRESETS = {
    "qwen3.5-0.8b": _published(1024, 3584, 24, (8, 2), 16, tied=True),
    "qwen3.5-2b": _published(2048, 6144, 24, (8, 2), 16, tied=True),
    "qwen3.5-4b": _published(2560, 9216, 32, (16, 4), 32, tied=True),
    "qwen3.5-9b": _published(4096, 12288, 32, (16, 4), 32),
    "qwen3.5-27b": _published(5120, 17408, 64, (24, 4), 48),
}
OF_EXPERTS = {
    "qwen3.5-35b-a3b": _like(
        Qwen35MoeConfig, (2048, 512, 40, 16, 2, 256, 248320), 32, routing=Routing(256, 8, shared=512)
    )
}
NEXT = {
    "qwen3-next-80b-a3b": _like(
        Qwen3NextConfig, (2048, 512, 48, 16, 2, 256, 151936), 32, routing=Routing(512, 10, shared=512)
    )
}
FAMILIES = (_family(Qwen35Config, PRESETS), _family(Qwen35MoeConfig, OF_EXPERTS), _family(Qwen3NextConfig, NEXT))
