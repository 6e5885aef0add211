"""Tiny EAGLE-3 heads of random weights, drawn the same here and where their goldens are made (`make_eagle3`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.llama import LlamaConfig
from cheetah.models.rounding import round_to_bf16

LOGITS = Path(__file__).parent / "eagle3.safetensors"
"""By name of the head the logits, float32 [tokens, draft vocabulary], of tokens with features, then of drafts."""
HIDDEN, FFN, HEADS, HEAD_DIM, VOCAB, KNOWN, LAYERS, EPSILON = 48, 40, 2, 64, 50, 37, 9, 1e-5
TARGET = LlamaConfig(HIDDEN, FFN, LAYERS, HEADS, 1, HEAD_DIM, VOCAB, max_position_embeddings=256)
SAFEAI, SPECULATORS = "midlayer.", "layers.0."
TOKENS, DRAFTS = 9, 4
LAYER: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 1},
    **{"num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "vocab_size": VOCAB},
    **{"rms_norm_eps": EPSILON, "rope_theta": 1000.0, "max_position_embeddings": 64},
}
OF_SPECULATORS: dict[str, Any] = {
    **{"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": LAYER},
    **{"speculators_config": {"algorithm": "eagle3"}, "draft_vocab_size": KNOWN, "target_hidden_size": None},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "safeai": {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": KNOWN},
    "speculators": {**OF_SPECULATORS, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
    "3.1": {**OF_SPECULATORS, "fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 5, 7]},
    "one norm before fc": {
        **{**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": KNOWN, "norm_output": True},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5], "norm_before_fc": True},
    },
}
"""config.json of heads in both layouts."""


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a head's file: written down here once more."""
    prefix = SPECULATORS if "speculators_config" in config else SAFEAI
    named = config.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_config", {}).get(
        "eagle_aux_hidden_state_layer_ids", [0] * 3
    )
    count = len(named)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, count * HIDDEN),
        f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{prefix}self_attn.k_proj.weight": (HEAD_DIM, 2 * HIDDEN),
        f"{prefix}self_attn.v_proj.weight": (HEAD_DIM, 2 * HIDDEN),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}mlp.gate_proj.weight": (FFN, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (FFN, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, FFN),
        "lm_head.weight": (KNOWN, HIDDEN),
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes |= {f"{prefix}{norm}.weight": (HIDDEN,) for norm in norms}
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{number}.weight": (HIDDEN,) for number in range(count)}
    if config.get("eagle_config", {}).get("norm_before_fc"):
        shapes["input_norm.weight"] = (count * HIDDEN,)
    return shapes


def weights_of(config: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Random numbers of bf16, as float32, and d2t."""
    draw = np.random.default_rng(7)
    drawn: dict[str, NDArray[Any]] = {}
    for name, shape in shapes_of(config).items():
        values = draw.standard_normal(shape)
        values = 1 + 0.1 * values if len(shape) == 1 else values * (1.0 if "embed" in name else shape[-1] ** -0.5)
        drawn[name] = round_to_bf16(values.astype(np.float32))
    known = np.sort(draw.permutation(VOCAB)[:KNOWN])
    return {**drawn, "d2t": known - np.arange(KNOWN)}


def tokens_of() -> list[int]:
    """The tokens behind the first one."""
    return [(7 * index * index + 3) % VOCAB for index in range(TOKENS)]


def features_of(config: dict[str, Any]) -> NDArray[np.float32]:
    """What tapped layers leave of each token but the last, [tokens, layers, hidden]: of other sizes each."""
    count = shapes_of(config)["fc.weight"][1] // HIDDEN
    drawn = np.random.default_rng(11).standard_normal((TOKENS, count, HIDDEN)) * (1 + np.arange(count))[:, None]
    return round_to_bf16(drawn.astype(np.float32))
