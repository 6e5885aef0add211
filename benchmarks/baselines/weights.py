"""Random weights by the names of a Hugging Face checkpoint, made where they are used: the same for every system."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cheetah.models.config import ModelConfig

SEED = 20
RANDOM_BF16, BF16_BYTES = "bf16 random", 2.0
Weights = dict[str, torch.Tensor]
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each weight; a tied head is none."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (config.query_rows, hidden),
        "self_attn.k_proj": (config.kv_rows, hidden),
        "self_attn.v_proj": (config.kv_rows, hidden),
        "self_attn.o_proj": (hidden, config.query_rows),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    yield EMBEDDING, (config.vocab_size, hidden)
    for layer in range(config.layers):
        for name, shape in of_layer.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield NORM, (hidden,)
    if not config.tied_embeddings:
        yield HEAD, (config.vocab_size, hidden)


def random_weights(config: ModelConfig, device: str, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """Normal numbers of a scale that keeps activations near 1; norm weights of 1. A tied head is the embedding."""
    source = torch.Generator(device).manual_seed(SEED)
    weights: Weights = {}
    for name, shape in shapes(config):
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            weights[name] = torch.empty(shape, dtype=dtype, device=device)
            weights[name].normal_(0.0, shape[1] ** -0.5, generator=source)
    weights.setdefault(HEAD, weights[EMBEDDING])
    return weights


def step_bytes(config: ModelConfig, context: int, weight_bytes: float = BF16_BYTES) -> int:
    """Bytes that a step must read, counted as `cheetah bench` counts: matrices of `weight_bytes` a weight, and K and V
    of `context` tokens."""
    matrices = sum(shape[0] * shape[1] for name, shape in shapes(config) if len(shape) == 2 and name != EMBEDDING)
    tied = config.vocab_size * config.hidden_size if config.tied_embeddings else 0
    return round(weight_bytes * (matrices + tied)) + context * config.kv_bytes_per_token
