"""Sampling, exactly: the counter-based generator Philox4x32-10 and the Gumbel rule that the kernel follows.

A token is drawn with probability softmax(logits / temperature) by taking the largest logit / temperature + noise, with
independent Gumbel noise for each token. The noise is a pure function of (seed, position of the sampled token, token
id), so a draw does not depend on timing, on the split of the vocabulary, or on how tokens are grouped into launches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cheetah.plan.kv.tables import NO_TOKEN

U32 = NDArray[np.uint32]

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
MASK, SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[int, int]) -> list[U32]:
    """The four output words of Philox4x32-10 (Salmon et al., SC 2011) for uint32 counters and one key."""
    words: list[NDArray[np.uint64]] = [np.asarray(word, dtype=np.uint64) for word in counter]
    low, high = np.uint64(key[0]), np.uint64(key[1])
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * words[0], MULTIPLIERS[1] * words[2]
        words = [(second >> SHIFT) ^ words[1] ^ low, second & MASK, (first >> SHIFT) ^ words[3] ^ high, first & MASK]
        low, high = (low + KEY_STEPS[0]) & MASK, (high + KEY_STEPS[1]) & MASK
    return [word.astype(np.uint32) for word in words]


def uniform(words: U32) -> NDArray[np.float32]:
    """Uniform in (0, 1): ((word >> 9) + 0.5) * 2^-23, exact in float32 and never 0 or 1.

    One bit more would not be: (2^24 - 1) + 0.5 rounds to 2^24 in float32, whose noise is infinite.
    """
    return ((words >> 9).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)


def gumbel_noise(tokens: ArrayLike, seed: int, position: int) -> NDArray[np.float32]:
    """-log(-log(u)) in float32 of each token id; u from the first word of counter (token, position, 0, 0), key seed."""
    words = philox4x32((tokens, position, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))[0]
    return -np.log(-np.log(uniform(words)))


def sample(logits: NDArray[np.float32], temperature: float, seed: int, position: int) -> int:
    """The token at `position`, from the logits [vocab] before it. Temperature 0: the largest, the lowest id on ties.

    NaN is never taken; NO_TOKEN if nothing else is there but -infinity.
    """
    candidates = logits
    if temperature != 0:
        candidates = logits / np.float32(temperature) + gumbel_noise(np.arange(len(logits)), seed, position)
    best = int(np.argmax(np.where(np.isnan(candidates), -np.inf, candidates)))
    return best if candidates[best] > -np.inf else NO_TOKEN
