"""Sampling, exactly: the counter-based generator Philox4x32-10, the Gumbel rule and the filters that the kernel
follows.

First a sequence's `adjusted` logits are made of its mask, biases and penalties. A token is then drawn with probability
softmax(logits / temperature) by taking the largest logit / temperature + noise, with independent Gumbel noise for each
token. The noise is a pure function of (seed, position of the sampled token, token id), so a draw does not depend on
timing, on the split of the vocabulary, or on how tokens are grouped into launches. Filters leave some tokens out of the
comparison: what is then the largest is a draw from those that are left."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Filters:
    """Which tokens may be drawn, of those sorted by probability: see `kept`. top_k 0, top_p 1 and min_p 0 keep all."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def keep_all(self) -> bool:
        return self.top_k == 0 and self.top_p >= 1 and self.min_p <= 0

    @property
    def reach(self) -> np.float32:
        """The distance below the highest logit, over the temperature, from which on `min_p` keeps nothing."""
        if self.min_p <= 0:
            return np.float32(np.inf)
        return np.float32(np.nextafter(np.float32(-np.log(self.min_p)), np.float32(np.inf)))


@dataclass(frozen=True)
class Penalties:
    """What tokens lose that the text has already. repetition: the logit of a token of prompt or completion is divided
    by it, multiplied if negative. presence, frequency: taken off once, and for each time, that the completion has
    it."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def change_nothing(self) -> bool:
        return self == Penalties()


def adjusted(
    logits: NDArray[np.float32],
    allowed: NDArray[np.bool_] | None = None,
    bias: NDArray[np.float32] | None = None,
    penalties: Penalties = Penalties(),
    in_prompt: NDArray[np.bool_] | None = None,
    counts: NDArray[np.uint32] | None = None,
) -> NDArray[np.float32]:
    """What is sampled from instead of `logits` [vocab]: -infinity where not `allowed`, plus the bias, then the
    penalties for tokens that are `in_prompt` or that the completion has `counts` times."""
    found = logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))
    found = found if bias is None else found + bias
    if counts is None:
        return found
    seen = counts > 0 if in_prompt is None else in_prompt | (counts > 0)
    repetition = np.float32(penalties.repetition)
    found = np.where(seen, np.where(found > 0, found / repetition, found * repetition), found)
    found = found - np.float32(penalties.frequency) * counts.astype(np.float32)
    return np.where(counts > 0, found - np.float32(penalties.presence), found)


def kept(scaled: NDArray[np.float32], filters: Filters) -> NDArray[np.bool_]:
    """Which tokens the filters keep, from the logits over the temperature [vocab]: those that

    - are among the `top_k` likeliest, with all that tie with the last of them,
    - have less than `top_p` of the probability of these above them: the smallest set that reaches `top_p`, with ties,
    - are at least `min_p` times as likely as the likeliest.

    As the logit warpers of `transformers` one after another. The likeliest token is always kept.
    """
    distance = np.nanmax(scaled) - scaled
    numbers = np.sort(distance[distance < np.inf])
    keep = distance < filters.reach
    if filters.top_k and filters.top_k < numbers.size:
        numbers = numbers[numbers <= numbers[filters.top_k - 1]]
        keep &= distance <= numbers[-1]
    if filters.top_p < 1:
        mass = np.cumsum(np.exp(-numbers), dtype=np.float64)
        above = np.concatenate([[0.0], mass])[np.searchsorted(numbers, distance)]
        keep &= above < filters.top_p * mass[-1]
    return keep


def sample(
    logits: NDArray[np.float32], temperature: float, seed: int, position: int, filters: Filters = Filters()
) -> int:
    """The token at `position`, from the logits [vocab] before it. Temperature 0: the largest, the lowest id on ties.

    NaN is never taken; NO_TOKEN if nothing else is there but -infinity.
    """
    candidates = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    if temperature != 0:
        scaled = (candidates / np.float32(temperature)).astype(np.float32)
        candidates = scaled + gumbel_noise(np.arange(len(logits)), seed, position)
        if not filters.keep_all and np.max(scaled) > -np.inf:
            candidates = np.where(kept(scaled, filters), candidates, np.float32(-np.inf))
    best = int(np.argmax(candidates))
    return best if candidates[best] > -np.inf else NO_TOKEN
