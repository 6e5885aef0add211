"""The plain model against transformers on the same weights: python -m benchmarks.baselines.check random:llama-3.2-1b

Both are fed the same tokens one at a time, uncompiled. Told are the KL divergence of the next token's distribution and
how often both would choose the same token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.baselines import plain_llama, transformers_llama
from benchmarks.baselines.weights import random_weights

if TYPE_CHECKING:
    from benchmarks.baselines.weights import Weights
    from cheetah.models.config import ModelConfig

MOST_KL = {torch.float32: 1e-9, torch.bfloat16: 5e-3}


@dataclass(frozen=True)
class Agreement:
    """kl: mean over positions, in nats. same: share of positions with the same likeliest token."""

    kl: float
    same: float


def agreement(config: ModelConfig, weights: Weights, ids: Sequence[int]) -> Agreement:
    """Of both models' logits after each of `ids`."""
    with torch.no_grad():
        p = torch.log_softmax(logits_of_plain(config, weights, ids).double(), -1)
        q = torch.log_softmax(logits_of_transformers(config, weights, ids).double(), -1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return Agreement(float(kl), float((p.argmax(-1) == q.argmax(-1)).double().mean()))


def logits_of_plain(config: ModelConfig, weights: Weights, ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab], one step a token."""
    model = plain_llama.build(config, weights)
    state = plain_llama.new_state(model, len(ids))
    rows = []
    for place, token in enumerate(ids):
        state.token.fill_(token)
        state.position.fill_(place)
        rows.append(plain_llama.logits(model, state)[0].float())
    return torch.stack(rows)


def logits_of_transformers(config: ModelConfig, weights: Weights, ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab], all tokens at once and without a cache."""
    model = transformers_llama.build(config, weights)
    tokens = torch.tensor([list(ids)], device=model.model.embed_tokens.weight.device)
    logits: torch.Tensor = model(tokens, use_cache=False, return_dict=False)[0][0].float()
    return logits


def main(arguments: Sequence[str] | None = None) -> int:
    from cheetah.cli.configs import named_config

    parser = argparse.ArgumentParser(prog="python -m benchmarks.baselines.check")
    parser.add_argument("model", help="random:PRESET")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    config = named_config(options.model).config
    ids = [int(token) for token in np.random.default_rng(3).integers(0, config.vocab_size, options.tokens)]
    result = agreement(config, random_weights(config, options.device), ids)
    allowed = MOST_KL[torch.bfloat16]
    print(f"{options.model}, bf16: KL {result.kl:.2e} (at most {allowed:.0e}), same token at {result.same:.0%}")
    return 0 if result.kl <= allowed else 1


if __name__ == "__main__":
    sys.exit(main())
