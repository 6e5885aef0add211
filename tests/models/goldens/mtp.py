"""Tiny layers that draft as Qwen3.5's, dense and of experts, of random weights by the names of their files, drawn the
same here and where their goldens are made (`make_mtp`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.layer_kind import DeltaNet, Routing
from cheetah.models.qwen3_5 import Qwen35Config, Qwen35MoeConfig
from cheetah.models.rope import Rope
from cheetah.models.rounding import round_to_bf16

LOGITS = Path(__file__).parent / "mtp.safetensors"
"""By name of the layer the logits, float32 [tokens, vocabulary], of tokens with features, then of drafts."""
HIDDEN, FFN, HEADS, HEAD_DIM, VOCAB, EPSILON, THETA, ROTATED = 48, 40, 2, 256, 50, 1e-6, 1000.0, 0.25
EXPERTS, CHOSEN, WIDTH, SHARED = 6, 2, 32, 48
_COMMON: dict[str, Any] = {
    "rms_norm_eps": EPSILON,
    "max_position_embeddings": 256,
    "rope": Rope(THETA, partial_rotary_factor=ROTATED),
    "delta": DeltaNet(1, 4),
    "delta_layers": (0, 1, 2),
}
MTP, OF_EXPERTS = "mtp", "mtp of experts"
_EXPERTS = Routing(EXPERTS, CHOSEN, shared=SHARED)
TARGETS: dict[str, ModelConfig] = {
    MTP: Qwen35Config(HIDDEN, FFN, 4, HEADS, 1, HEAD_DIM, VOCAB, **_COMMON),
    OF_EXPERTS: Qwen35MoeConfig(HIDDEN, WIDTH, 4, HEADS, 1, HEAD_DIM, VOCAB, routing=_EXPERTS, **_COMMON),
}
"""Models that such layers draft for."""
TOKENS, DRAFTS = 9, 4
_LAYER = "mtp.layers.0."
_BOTH: dict[str, tuple[int, ...]] = {
    "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
    **{f"mtp.{name}.weight": (HIDDEN,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
    **{f"{_LAYER}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")},
    **{f"{_LAYER}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"},
    f"{_LAYER}self_attn.q_proj.weight": (2 * HEADS * HEAD_DIM, HIDDEN),
    f"{_LAYER}self_attn.k_proj.weight": (HEAD_DIM, HIDDEN),
    f"{_LAYER}self_attn.v_proj.weight": (HEAD_DIM, HIDDEN),
    f"{_LAYER}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
}
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    MTP: _BOTH
    | {f"{_LAYER}mlp.{one}_proj.weight": (FFN, HIDDEN) for one in ("gate", "up")}
    | {f"{_LAYER}mlp.down_proj.weight": (HIDDEN, FFN)},
    OF_EXPERTS: _BOTH
    | {f"{_LAYER}mlp.gate.weight": (EXPERTS, HIDDEN), f"{_LAYER}mlp.shared_expert_gate.weight": (1, HIDDEN)}
    | {f"{_LAYER}mlp.experts.gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN)}
    | {f"{_LAYER}mlp.experts.down_proj": (EXPERTS, HIDDEN, WIDTH)}
    | {f"{_LAYER}mlp.shared_expert.{one}_proj.weight": (SHARED, HIDDEN) for one in ("gate", "up")}
    | {f"{_LAYER}mlp.shared_expert.down_proj.weight": (HIDDEN, SHARED)},
}
"""The tensors of files: written down here once more."""
SEEDS = {MTP: 7, OF_EXPERTS: 7}
"""By which no token's experts are nearly others."""
OF_MODEL = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
}
"""Those of the model that it takes."""


def weights_of(layer: str = MTP) -> dict[str, NDArray[np.float32]]:
    """Random numbers of bf16; norms whose weights lie around 0, to which 1 is added, and not near it."""
    draw = np.random.default_rng(SEEDS[layer])
    drawn: dict[str, NDArray[np.float32]] = {}
    for name, shape in (SHAPES[layer] | OF_MODEL).items():
        values = draw.standard_normal(shape)
        values = 0.4 * values if len(shape) == 1 else values * (1.0 if "embed" in name else shape[-1] ** -0.5)
        drawn[name] = round_to_bf16(values.astype(np.float32))
    return drawn


def tokens_of() -> list[int]:
    """The tokens behind the first one."""
    return [(7 * index * index + 3) % VOCAB for index in range(TOKENS)]


def features_of() -> NDArray[np.float32]:
    """What the model's last layer leaves of each token but the last, before its last norm, [tokens, 1, hidden]."""
    return round_to_bf16((3 * np.random.default_rng(11).standard_normal((TOKENS, 1, HIDDEN))).astype(np.float32))
