"""Makes the goldens of drafters of blocks: logits of tiny ones, computed by the modules of transformers put together as
their authors do.

    python -m tests.models.goldens.make_block_drafter

needs torch and transformers; the tests that read the goldens do not.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from tests.models.goldens.block_drafter import (
    CONFIGS,
    EPSILON,
    HEAD_DIM,
    HIDDEN,
    LOGITS,
    ROUNDS,
    VOCAB,
    left_of,
    taps_of,
    target_embedding,
    weights_of,
)


class Attention(nn.Module):
    """Queries of the block over keys and values of what is known and of the block."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads * HEAD_DIM, config.num_key_value_heads * HEAD_DIM
        self.q_proj, self.o_proj = nn.Linear(HIDDEN, heads, bias=False), nn.Linear(heads, HIDDEN, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(HIDDEN, kv_heads, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = (Qwen3RMSNorm(HEAD_DIM, EPSILON) for _ in range(2))
        self.group = config.num_attention_heads // config.num_key_value_heads

    def forward(self, x: torch.Tensor, known: torch.Tensor, rotary: Qwen3RotaryEmbedding) -> torch.Tensor:
        both = torch.cat([known, x], 1)
        place = torch.arange(both.shape[1])[None]
        q = self.q_norm(self.q_proj(x).view(1, -1, self.q_proj.out_features // HEAD_DIM, HEAD_DIM)).transpose(1, 2)
        k = self.k_norm(self.k_proj(both).view(1, both.shape[1], -1, HEAD_DIM)).transpose(1, 2)
        v = self.v_proj(both).view(1, both.shape[1], -1, HEAD_DIM).transpose(1, 2)
        cos, sin = rotary(x, place)
        q, _ = apply_rotary_pos_emb(q, q, cos[:, known.shape[1] :], sin[:, known.shape[1] :])
        k, _ = apply_rotary_pos_emb(k, k, cos, sin)
        k, v = (one.repeat_interleave(self.group, 1) for one in (k, v))
        made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=False)
        return self.o_proj(made.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Qwen3MLP(config)
        self.input_layernorm, self.post_attention_layernorm = (Qwen3RMSNorm(HIDDEN, EPSILON) for _ in range(2))

    def forward(self, x: torch.Tensor, known: torch.Tensor, rotary: Qwen3RotaryEmbedding) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), known, rotary)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The tensors by their names in files."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        known = {name: values[name] for name in (*names, "head_dim", "vocab_size", "max_position_embeddings")}
        config = Qwen3Config(**known, rope_parameters={"rope_type": "default", "rope_theta": values["rope_theta"]})
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.fc = nn.Linear(len(taps_of(values)) * HIDDEN, HIDDEN, bias=False)
        self.hidden_norm, self.norm = (Qwen3RMSNorm(HIDDEN, EPSILON) for _ in range(2))
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.embed_tokens, self.lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        rank = values.get("markov_rank", 0)
        self.markov = (nn.Embedding(VOCAB, rank), nn.Linear(rank, VOCAB, bias=False)) if rank else None

    def logits(self, left: torch.Tensor, ids: list[int]) -> torch.Tensor:
        x, known = self.embed_tokens(torch.tensor([ids])), self.hidden_norm(self.fc(left.flatten(1)))[None]
        for layer in self.layers:
            x = layer(x, known, self.rotary_emb)
        found: torch.Tensor = self.lm_head(self.norm(x))[0]
        if self.markov is None:
            return found
        before, rows = ids[0], []
        for row in found:
            rows.append(row + self.markov[1](self.markov[0](torch.tensor(before))))
            before = int(rows[-1].argmax())
        return torch.stack(rows)


@torch.no_grad()
def logits_of(values: dict[str, Any]) -> dict[int, torch.Tensor]:
    drafter = Drafter(values)
    weights = {name: torch.tensor(value) for name, value in weights_of(values).items()}
    if drafter.markov is not None:
        for module, name in zip(drafter.markov, ("markov_w1", "markov_w2"), strict=True):
            module.weight.copy_(weights.pop(f"markov_head.{name}.weight"))
    for name in ("embed_tokens.weight", "lm_head.weight"):
        weights.setdefault(name, torch.tensor(target_embedding()))
    own = {name: one for name, one in weights.items() if not name.startswith("confidence_head")}
    drafter.load_state_dict(own, strict=True)
    mask = {**values, **values.get("dflash_config", {})}["mask_token_id"]
    left = [torch.tensor(one) for one in left_of(values)]
    blocks = [[anchor, *[mask] * (values["block_size"] - 1)] for _, anchor in ROUNDS]
    return {number: drafter.logits(torch.cat(left[: number + 1]), ids) for number, ids in enumerate(blocks)}


def main() -> None:
    torch.set_num_threads(1)
    found = {f"{name} {number}": one for name, values in CONFIGS.items() for number, one in logits_of(values).items()}
    save_file({name: one.contiguous() for name, one in found.items()}, LOGITS)


if __name__ == "__main__":
    main()
