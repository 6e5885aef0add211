"""What a head that drafts for another model has otherwise than a model: a value of its configuration, and the names of
its tensors in files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LAYER = "model.layers.0."
OFFSETS, KNOWN_TOKENS = "d2t", "t2d"
"""Of a head that knows few tokens: token i of its own is token i + d2t[i]; and which ones they are, a byte each."""
TOKEN_IDS = "token_ids"
"""The buffer with the tokens that rows of the head stand for, u32, filled up with what is no token."""
PREFIXES = {
    "midlayer.": LAYER,
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    "embed_tokens.": "model.embed_tokens.",
}
"""What names in files of heads and of drafters of blocks begin with, and what that is here."""
BESIDE = "mtp."
"""What names of the layer that lies beside a model to draft for it begin with in the model's files."""
VERIFIER = "verifier_"
"""What speculators keep of the target beside a head begins with."""
UNREAD = (VERIFIER, "confidence_head.")
"""And what says how sure a draft of a block is: all of them are verified."""


@dataclass(frozen=True)
class Drafter:
    """A layer that goes on from what some layers of another model leave, and drafts.

    layers: of the other model, whose outputs it takes side by side, ascending. vocabulary: tokens that its head knows,
    the first rows of logits; which tokens of the model's they are says the checkpoint. tap_norms: RMSNorms of what it
    takes, of each layer's output by itself or of all of them as one vector; None: no norm. norm_before_residual: the
    residual stream begins with what the norm before attention makes. norm_output: the next token that it drafts takes
    what the last norm makes, not the residual stream. joins_residual: in every step, of tokens that it drafts too, the
    residual is the sum of two products, of the token's embedding behind a norm and of a state behind another; else it
    is made of what layers of the other model leave alone, and a token is added to queries, keys and values. Such a head
    is the model's, and knows all tokens by their numbers; of others `token_ids` says which a row stands for.
    """

    layers: tuple[int, ...]
    vocabulary: int
    tap_norms: Literal["each", "whole"] | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    joins_residual: bool = False


def plain_name(name: str) -> str:
    """The name of a file's tensor here."""
    own = name.removeprefix("model.")
    for prefix, instead in PREFIXES.items():
        if own.startswith(prefix):
            return instead + own.removeprefix(prefix)
    return own


def token_ids(offsets: NDArray[np.int64] | None, vocabulary: int) -> NDArray[np.int64]:
    """The target's token that each row of the head stands for, int64 [vocabulary]; offsets: d2t."""
    rows = np.arange(vocabulary, dtype=np.int64)
    return rows if offsets is None else rows + offsets
