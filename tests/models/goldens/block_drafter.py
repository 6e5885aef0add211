"""Tiny drafters of blocks of random weights, drawn the same here and where their goldens are made
(`make_block_drafter`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.qwen3 import Qwen3Config
from cheetah.models.rounding import round_to_bf16

LOGITS = Path(__file__).parent / "block_drafter.safetensors"
"""By name of the drafter and of the round the logits, float32 [columns, vocabulary], behind the Markov head where there
is one, which goes on greedily."""
HIDDEN, FFN, HEADS, HEAD_DIM, VOCAB, LAYERS, EPSILON = 48, 80, 2, 64, 53, 6, 1e-6
TARGET = Qwen3Config(
    HIDDEN, FFN, LAYERS, HEADS, 1, HEAD_DIM, VOCAB, EPSILON, max_position_embeddings=256, tied_embeddings=True
)
ROUNDS = ((7, 5), (3, 11))
"""Tokens that become known before a round, and its anchor."""
LAYER: dict[str, Any] = {
    **{"model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 2},
    **{"num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "vocab_size": VOCAB},
    **{"rms_norm_eps": EPSILON, "rope_theta": 1000.0, "max_position_embeddings": 256, "num_target_layers": LAYERS},
    **{"layer_types": ["full_attention"] * 2, "sliding_window": None, "hidden_act": "silu", "block_size": 4},
}
DSPARK: dict[str, Any] = {
    **LAYER,
    **{"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1, 2, 4], "mask_token_id": 52, "num_anchors": 512},
    **{"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True},
    **{"confidence_head_with_markov": True, "tie_word_embeddings": False},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dspark": DSPARK,
    "dflash of DeepSpec": {
        **{name: value for name, value in DSPARK.items() if not name.startswith(("markov_head", "confidence"))},
        **{"markov_rank": 0, "enable_confidence_head": False},
    },
    "dflash of z-lab": {
        **LAYER,
        **{"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 51}},
    },
}
"""config.json of drafters of all kinds."""


def taps_of(config: dict[str, Any]) -> list[int]:
    layers: list[int] = {**config, **config.get("dflash_config", {})}["target_layer_ids"]
    return layers


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a drafter's file: written down here once more."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(taps_of(config)) * HIDDEN),
        **dict.fromkeys(("hidden_norm.weight", "norm.weight"), (HIDDEN,)),
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (HEAD_DIM, HIDDEN)),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (HEAD_DIM,)),
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (FFN, HIDDEN)),
            "mlp.down_proj": (HIDDEN, FFN),
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (HIDDEN,)),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    if "Qwen3DSparkModel" in config["architectures"]:
        shapes |= dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    if config.get("markov_rank"):
        both = [f"markov_head.markov_w{number}.weight" for number in (1, 2)]
        shapes |= dict.fromkeys(both, (VOCAB, config["markov_rank"]))
    if config.get("enable_confidence_head"):
        shapes |= {"confidence_head.proj.weight": (1, HIDDEN + 6), "confidence_head.proj.bias": (1,)}
    return shapes


def weights_of(config: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """By their names in the file; numbers of bf16."""
    draw = np.random.default_rng(7)
    return {name: _drawn(draw, name, shape) for name, shape in shapes_of(config).items()}


def target_embedding() -> NDArray[np.float32]:
    """The target's, which is its head too; numbers of bf16."""
    return _drawn(np.random.default_rng(8), "embed_tokens.weight", (VOCAB, HIDDEN))


def _drawn(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    spread = 1.0 if "embed" in name or "markov" in name else shape[-1] ** -0.5
    values = draw.standard_normal(shape) * spread
    return round_to_bf16((1 + 0.1 * values if "norm" in name else values).astype(np.float32))


def left_of(config: dict[str, Any]) -> list[NDArray[np.float32]]:
    """What the tapped layers leave of the tokens before each round [tokens, taps, hidden]."""
    draw = np.random.default_rng(9)
    taps = len(taps_of(config))
    return [round_to_bf16(draw.standard_normal((count, taps, HIDDEN)).astype(np.float32)) for count, _ in ROUNDS]
