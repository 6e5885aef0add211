"""How likely a model found a token: log-probabilities of raw logits, before temperature, masks, penalties and filters.

What vLLM calls raw_logprobs. Knows nothing of devices or text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_LOGPROBS = 20
"""Likeliest tokens that may be asked for beside the one that was chosen."""

_GROUP = 64


@dataclass(frozen=True)
class TokenLogprobs:
    """One place of a text: the `token` that stands there with its logprob and its rank, 1 for the likeliest, and the
    `top` likeliest tokens that could have, each (token, logprob), the likeliest first, the lowest id first on ties."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    """What the logits [vocab] say of `token` and of the `count` likeliest. Those that are NaN count as -infinity.

    rank: how many logits are not below the token's, as in vLLM; tokens that tie have the rank of the last of them.
    """
    largest = logits.max()
    if not np.isfinite(largest):  # max gives NaN if there is one
        logits = np.nan_to_num(logits, nan=-np.inf, posinf=float(np.finfo(np.float32).max), neginf=-np.inf)
        largest = logits.max()
    if largest == -np.inf:
        return TokenLogprobs(token, -np.inf, logits.size, ())
    top = likeliest(logits, count)
    normalizer = float(largest) + float(np.log(np.exp(logits - largest).sum()))
    found = [float(logits[place]) - normalizer for place in (token, *top)]
    rank = int(np.count_nonzero(logits >= logits[token]))
    return TokenLogprobs(token, found[0], rank, tuple(zip(map(int, top), found[1:], strict=True)))


def likeliest(logits: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """The ids of the `count` highest logits, the highest first, the lowest id first on ties.

    The last of them is not below the `count`-th of the maxima of groups of logits: few are left to be sorted.
    """
    if count == 0:
        return np.empty(0, np.intp)
    whole = logits.size // _GROUP * _GROUP
    maxima = logits[:whole].reshape(_GROUP, -1).max(axis=0)
    bound = np.partition(maxima, -count)[-count] if count <= maxima.size else -np.inf
    candidates = np.flatnonzero(logits >= bound)
    return candidates[np.argsort(-logits[candidates], kind="stable")[:count]]
