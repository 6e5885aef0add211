"""A tiny layer that drafts as Qwen3.5's, of random weights by the names of its files, drawn the same here and where its
golden is made (`make_mtp`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.layer_kind import DeltaNet
from cheetah.models.qwen3_5 import Qwen35Config
from cheetah.models.rope import Rope
from cheetah.models.rounding import round_to_bf16

LOGITS = Path(__file__).parent / "mtp.safetensors"
"""As `logits`, float32 [tokens, vocabulary]: of tokens with features, then of drafts."""
HIDDEN, FFN, HEADS, HEAD_DIM, VOCAB, EPSILON, THETA, ROTATED = 48, 40, 2, 256, 50, 1e-6, 1000.0, 0.25
TARGET = Qwen35Config(
    *(HIDDEN, FFN, 4, HEADS, 1, HEAD_DIM, VOCAB),
    rms_norm_eps=EPSILON,
    max_position_embeddings=256,
    rope=Rope(THETA, partial_rotary_factor=ROTATED),
    delta=DeltaNet(1, 4),
    delta_layers=(0, 1, 2),
)
TOKENS, DRAFTS = 9, 4
_LAYER = "mtp.layers.0."
SHAPES: dict[str, tuple[int, ...]] = {
    "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
    **{f"mtp.{name}.weight": (HIDDEN,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
    **{f"{_LAYER}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")},
    **{f"{_LAYER}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"},
    f"{_LAYER}self_attn.q_proj.weight": (2 * HEADS * HEAD_DIM, HIDDEN),
    f"{_LAYER}self_attn.k_proj.weight": (HEAD_DIM, HIDDEN),
    f"{_LAYER}self_attn.v_proj.weight": (HEAD_DIM, HIDDEN),
    f"{_LAYER}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    f"{_LAYER}mlp.gate_proj.weight": (FFN, HIDDEN),
    f"{_LAYER}mlp.up_proj.weight": (FFN, HIDDEN),
    f"{_LAYER}mlp.down_proj.weight": (HIDDEN, FFN),
}
"""The tensors of a file: written down here once more."""
OF_MODEL = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
}
"""Those of the model that it takes."""


def weights_of() -> dict[str, NDArray[np.float32]]:
    """Random numbers of bf16; norms whose weights lie around 0, to which 1 is added, and not near it."""
    draw = np.random.default_rng(7)
    drawn: dict[str, NDArray[np.float32]] = {}
    for name, shape in (SHAPES | OF_MODEL).items():
        values = draw.standard_normal(shape)
        values = 0.4 * values if len(shape) == 1 else values * (1.0 if "embed" in name else shape[-1] ** -0.5)
        drawn[name] = round_to_bf16(values.astype(np.float32))
    return drawn


def tokens_of() -> list[int]:
    """The tokens behind the first one."""
    return [(7 * index * index + 3) % VOCAB for index in range(TOKENS)]


def features_of(_: Any = None) -> NDArray[np.float32]:
    """What the model's last layer leaves of each token but the last, before its last norm, [tokens, 1, hidden]."""
    return round_to_bf16((3 * np.random.default_rng(11).standard_normal((TOKENS, 1, HIDDEN))).astype(np.float32))
