"""Makes the goldens of EAGLE-3 heads: logits of tiny heads, computed by torch as their authors write them down.

    python -m tests.models.goldens.make_eagle3

needs torch; the tests that read the goldens do not. Tokens with features come first, all in one forward pass over a
causal mask; then drafts, each of which recomputes the whole sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

from tests.models.goldens.eagle3 import (
    CONFIGS,
    DRAFTS,
    EPSILON,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYER,
    LOGITS,
    SAFEAI,
    SPECULATORS,
    features_of,
    tokens_of,
    weights_of,
)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, EPSILON)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Heads [heads, tokens, head_dim], rotated by halves."""
    turns = LAYER["rope_theta"] ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * turns
    cos, sin = (torch.cat([one, one], -1).float() for one in (angles.cos(), angles.sin()))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def layer(config: dict[str, Any], weights: dict[str, torch.Tensor], tokens: torch.Tensor, state: torch.Tensor) -> Any:
    """Logits and the states that the next tokens take, of all tokens at once."""
    prefix = SPECULATORS if "speculators_config" in config else SAFEAI

    def of(name: str) -> torch.Tensor:
        return weights[f"{prefix}{name}.weight"]

    embedded = normed(weights["embed_tokens.weight"][tokens], of("input_layernorm"))
    hidden = normed(state, of("hidden_norm"))
    residual = hidden if config.get("norm_before_residual") else state
    both = torch.cat([embedded, hidden], -1)
    q, k, v = (
        functional.linear(both, of(f"self_attn.{part}_proj")).view(len(tokens), -1, HEAD_DIM).transpose(0, 1)
        for part in "qkv"
    )
    k, v = k.expand(HEADS, -1, -1), v.expand(HEADS, -1, -1)
    attended = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
    x = residual + functional.linear(attended.transpose(0, 1).flatten(1), of("self_attn.o_proj"))
    y = normed(x, of("post_attention_layernorm"))
    gate, up = (functional.linear(y, of(f"mlp.{part}_proj")) for part in ("gate", "up"))
    x = x + functional.linear(functional.silu(gate) * up, of("mlp.down_proj"))
    last = normed(x, weights["norm.weight"])
    return functional.linear(last, weights["lm_head.weight"]), last if config.get("norm_output") else x


def logits_of(config: dict[str, Any]) -> torch.Tensor:
    weights = {name: torch.tensor(value) for name, value in weights_of(config).items()}
    features = torch.tensor(features_of(config))
    count = features.shape[1]
    if config.get("fc_norm"):
        norms = [normed(features[:, number], weights[f"fc_norm.{number}.weight"]) for number in range(count)]
        features = torch.stack(norms, 1)
    joined = features.reshape(-1, count * HIDDEN)
    if config.get("eagle_config", {}).get("norm_before_fc"):
        joined = normed(joined, weights["input_norm.weight"])
    states, tokens = functional.linear(joined, weights["fc.weight"]), torch.tensor(tokens_of())
    found, following = layer(config, weights, tokens, states)
    for _ in range(DRAFTS - 1):
        best = found[-1].argmax()
        tokens = torch.cat([tokens, (best + weights["d2t"][best])[None]])
        states = torch.cat([states, following[-1:]])
        logits, following = layer(config, weights, tokens, states)
        found = torch.cat([found, logits[-1:]])
    return found


def main() -> None:
    torch.set_num_threads(1)
    save_file({name: logits_of(config).contiguous() for name, config in CONFIGS.items()}, LOGITS)


if __name__ == "__main__":
    main()
