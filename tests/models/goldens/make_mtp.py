"""Makes the goldens of layers that draft for Qwen3.5: logits of tiny ones, computed by torch with transformers' own
decoder layers, norms and rotary embedding, put together as their authors' files want it.

    python -m tests.models.goldens.make_mtp

needs transformers; the tests that read the goldens do not. Tokens with features come first, all in one forward pass
over a causal mask; then drafts, each of which recomputes the whole sequence.
"""

from __future__ import annotations

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as of_experts

from tests.models.goldens.mtp import (
    CHOSEN,
    DRAFTS,
    EPSILON,
    EXPERTS,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LOGITS,
    MTP,
    ROTATED,
    SHARED,
    TARGETS,
    THETA,
    VOCAB,
    WIDTH,
    features_of,
    tokens_of,
    weights_of,
)

COMMON = dict(
    hidden_size=HIDDEN,
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    num_key_value_heads=1,
    head_dim=HEAD_DIM,
    vocab_size=VOCAB,
    rms_norm_eps=EPSILON,
    layer_types=["full_attention"],
    rope_parameters={
        **{"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": ROTATED},
        **{"mrope_section": [11, 11, 10], "mrope_interleaved": True},
    },
    attn_implementation="eager",
)


def layer_of(name: str) -> torch.nn.Module:
    """One of the model's layers with attention."""
    if name == MTP:
        return modeling.Qwen3_5DecoderLayer(Qwen3_5TextConfig(intermediate_size=FFN, **COMMON), 0)
    experts = dict(num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH)
    config = Qwen3_5MoeTextConfig(shared_expert_intermediate_size=SHARED, **experts, **COMMON)
    config._experts_implementation = "eager"
    return of_experts.Qwen3_5MoeDecoderLayer(config, 0)


class Drafting(torch.nn.Module):
    """By the names of the files, below `mtp`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        for norm in norms:
            self.add_module(norm, modeling.Qwen3_5RMSNorm(HIDDEN, eps=EPSILON))
        self.fc = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.layers = torch.nn.ModuleList([layer_of(name)])
        self.rotary = modeling.Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(**COMMON))

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What its norm makes of tokens [tokens, hidden] and the states of those before them."""
        both = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)], -1)
        x, count = self.fc(both)[None], len(both)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        turns = self.rotary(x, torch.arange(count)[None])
        return self.norm(self.layers[0](x, position_embeddings=turns, attention_mask=mask)[0])


@torch.no_grad()
def logits_of(name: str) -> torch.Tensor:
    weights = {name: torch.tensor(value) for name, value in weights_of(name).items()}
    drafting, last_norm = Drafting(name), modeling.Qwen3_5RMSNorm(HIDDEN, eps=EPSILON)
    own = {name.removeprefix("mtp."): value for name, value in weights.items() if name.startswith("mtp.")}
    missing = drafting.load_state_dict(own, strict=False)
    assert not missing.missing_keys and not missing.unexpected_keys, missing
    last_norm.weight.copy_(weights["model.norm.weight"])
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    tokens, states = torch.tensor(tokens_of()), last_norm(torch.tensor(features_of())[:, 0])
    for drafted in range(DRAFTS):
        made = drafting(embedding[tokens], states)
        logits = made @ head.T
        if drafted + 1 < DRAFTS:
            tokens = torch.cat([tokens, logits[-1:].argmax(-1)])
            states = torch.cat([states, made[-1:]])
    return logits


def main() -> None:
    torch.set_num_threads(1)
    save_file({name: logits_of(name).contiguous() for name in TARGETS}, LOGITS)


if __name__ == "__main__":
    main()
