"""What the numbers of a config.json may plausibly be, whatever the family: beyond it a file is broken, or means harm.

A number out of its range would not fail by itself: it would make a program that never ends, or text without sense. Each
range says why it ends where it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cheetah.printable import shown

LARGEST_ID = 2**31 - 1
"""Token ids and positions are 32-bit integers on the device."""


@dataclass(frozen=True)
class Range:
    """Least and most that a number may be, and why."""

    least: float
    most: float
    why: str

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most  # exact for any integer, however large; false for NaN


_SCALING = Range(1.0, 1e6, "positions are divided by it, to make a context longer; published models have up to 128")
_TURNS = Range(1e-6, 1e6, "published models have 1 to 32")
_DIVISORS = Range(1e-3, 1e6, "frequencies are divided by it; published models have 1 to 65")
_MULTIPLIER = Range(1e-6, 1e6, "published models have 0.0078 to 72")
_SOFT_CAP = Range(1e-3, 1e6, "logits stay below it; published models have 30 and 50")
_MAGNITUDE = Range(0.0, 1e3, "published models have up to 1.5")

RANGES = {
    "hidden_size": Range(1, 2**17, "published models have up to 18,432"),
    "target_hidden_size": Range(1, 2**17, "published models have up to 18,432"),
    "intermediate_size": Range(1, 2**20, "published models have up to 73,728"),
    "moe_intermediate_size": Range(1, 2**20, "published models have up to 14,336"),
    "num_experts": Range(1, 1024, "a warp chooses among them, 32 a lane; published models have up to 512"),
    "num_local_experts": Range(1, 1024, "a warp chooses among them, 32 a lane; published models have up to 512"),
    "num_experts_per_tok": Range(1, 32, "published models have up to 10"),
    "shared_expert_intermediate_size": Range(1, 2**20, "published models have 512"),
    "shared_intermediate_size": Range(1, 2**20, "published models have up to 16,384"),
    "no_rope_layer_interval": Range(1, 1024, "published models have 4"),
    "sliding_window_pattern": Range(1, 1024, "published models have 4 or 6"),
    "swiglu_alpha": Range(1e-3, 1e3, "gates are multiplied by it; published models have 1.702"),
    "swiglu_limit": Range(1e-3, 1e6, "gates are clamped at it; published models have 7"),
    "num_hidden_layers": Range(1, 1024, "published models have up to 126"),
    "num_attention_heads": Range(1, 1024, "published models have up to 128"),
    "num_key_value_heads": Range(1, 1024, "published models have up to 128"),
    "linear_num_key_heads": Range(1, 1024, "published models have 16"),
    "linear_num_value_heads": Range(1, 1024, "published models have up to 64"),
    "linear_key_head_dim": Range(1, 1024, "published models have 128"),
    "linear_value_head_dim": Range(1, 1024, "published models have 128"),
    "linear_conv_kernel_dim": Range(1, 64, "published models have 4"),
    "full_attention_interval": Range(1, 1024, "published models have 4"),
    "head_dim": Range(1, 1024, "published models have up to 256"),
    "block_size": Range(1, 32, "a warp judges a step's drafts; published drafters have up to 16"),
    "vocab_size": Range(1, 2**22, "published models have up to 262,400"),
    "draft_vocab_size": Range(1, 2**22, "published models have up to 262,400"),
    "max_position_embeddings": Range(1, LARGEST_ID, "positions are 32-bit integers"),
    "sliding_window": Range(1, LARGEST_ID, "a query sees its own key, and positions are 32-bit integers"),
    "rms_norm_eps": Range(1e-37, 0.1, "a part of the mean of squares, and not zero in float32; models have 1e-5"),
    "rope_theta": Range(2, 1e20, "every pair of a head must turn, each slower than the last; models have 1e4 to 5e10"),
    "partial_rotary_factor": Range(1e-3, 1.0, "a part of every head is rotated; models have 0.25 to 1"),
    "factor": _SCALING,
    "short_factor": _DIVISORS,
    "long_factor": _DIVISORS,
    "low_freq_factor": _TURNS,
    "high_freq_factor": _TURNS,
    "beta_fast": _TURNS,
    "beta_slow": _TURNS,
    "original_max_position_embeddings": Range(1, LARGEST_ID, "positions are 32-bit integers"),
    "mscale": _MAGNITUDE,
    "mscale_all_dim": _MAGNITUDE,
    "embedding_multiplier": _MULTIPLIER,
    "attention_multiplier": _MULTIPLIER,
    "residual_multiplier": _MULTIPLIER,
    "logits_scaling": _MULTIPLIER,
    "query_pre_attn_scalar": Range(1e-3, 1e6, "logits are divided by its root; published models have 128 to 256"),
    "attn_logit_softcapping": _SOFT_CAP,
    "final_logit_softcapping": _SOFT_CAP,
    "llama_4_scaling_beta": Range(0.0, 1e3, "how queries grow with their positions; published models have 0.1"),
    "attention_factor": Range(1e-3, 1e3, "cosines and sines are multiplied by it; published models have up to 1.5"),
}
"""By the field's name in config.json, or in its rope_parameters."""


def implausible(name: str, value: Any) -> str | None:
    """What is wrong with the number of field `name`, in words; None if nothing is."""
    allowed = RANGES[name]
    if value in allowed:
        return None
    return f"{name} = {shown(value)}: must be from {allowed.least:.12g} to {allowed.most:.12g} ({allowed.why})"
