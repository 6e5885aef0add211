"""Makes the golden of the layer that drafts for Qwen3.5: logits of a tiny one, computed by torch with transformers' own
decoder layer, norms and rotary embedding, put together as its authors' files want it.

    python -m tests.models.goldens.make_mtp

needs transformers; the tests that read the golden do not. Tokens with features come first, all in one forward pass
over a causal mask; then drafts, each of which recomputes the whole sequence.
"""

from __future__ import annotations

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from tests.models.goldens.mtp import (
    DRAFTS,
    EPSILON,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LOGITS,
    ROTATED,
    THETA,
    VOCAB,
    features_of,
    tokens_of,
    weights_of,
)

CONFIG = Qwen3_5TextConfig(
    hidden_size=HIDDEN,
    intermediate_size=FFN,
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


class Drafting(torch.nn.Module):
    """By the names of the files, below `mtp`."""

    def __init__(self) -> None:
        super().__init__()
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        for name in norms:
            self.add_module(name, modeling.Qwen3_5RMSNorm(HIDDEN, eps=EPSILON))
        self.fc = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.layers = torch.nn.ModuleList([modeling.Qwen3_5DecoderLayer(CONFIG, 0)])
        self.rotary = modeling.Qwen3_5TextRotaryEmbedding(CONFIG)

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What its norm makes of tokens [tokens, hidden] and the states of those before them."""
        both = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)], -1)
        x, count = self.fc(both)[None], len(both)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        turns = self.rotary(x, torch.arange(count)[None])
        return self.norm(self.layers[0](x, position_embeddings=turns, attention_mask=mask)[0])


@torch.no_grad()
def logits_of() -> torch.Tensor:
    weights = {name: torch.tensor(value) for name, value in weights_of().items()}
    drafting, last_norm = Drafting(), modeling.Qwen3_5RMSNorm(HIDDEN, eps=EPSILON)
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
    save_file({"logits": logits_of().contiguous()}, LOGITS)


if __name__ == "__main__":
    main()
