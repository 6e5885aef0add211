"""Vectors of whole prompts from the hidden states that passes leave. Knows nothing of who asks, or of who else runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from cheetah.runtime import interrupts
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launches import Part
from cheetah.runtime.engine.prompt_passes import PassLauncher

Vector = npt.NDArray[np.float32]


def pooled_states(
    kernels: Sequence[PassLauncher],
    prompts: Sequence[Sequence[int]],
    caches: Sequence[CachedSequence],
    is_mean: bool,
) -> list[Vector]:
    """float32 [hidden] of each prompt: the last layer's output behind its norm, of the last token or on average.

    kernels: of passes, with room for fewest tokens first. caches: empty ones. The prompts are those that one pass
    reads, or a single one that takes several.
    """
    sums = [np.zeros(0, np.float32)] * len(prompts)
    while any(cache.length < len(prompt) for cache, prompt in zip(caches, prompts, strict=True)):
        found = _states_of_a_pass(kernels, prompts, caches, is_mean)
        sums = [one + other if one.size and is_mean else other for one, other in zip(sums, found, strict=True)]
    counted = [len(prompt) if is_mean else 1 for prompt in prompts]
    return [np.asarray(one / count, np.float32) for one, count in zip(sums, counted, strict=True)]


def _states_of_a_pass(
    kernels: Sequence[PassLauncher],
    prompts: Sequence[Sequence[int]],
    caches: Sequence[CachedSequence],
    are_all_wanted: bool,
) -> list[Vector]:
    """The sum over each prompt's next tokens, as many as a pass reads, or the last one of those."""
    left = [len(prompt) - cache.length for cache, prompt in zip(caches, prompts, strict=True)]
    passes = next((one for one in kernels if one.has_columns_for(left)), kernels[-1])
    counts = passes.fitting([cache.length for cache in caches], left, passes.tokens)
    parts = [
        Part(cache, prompt[cache.length :][:tokens], tokens, wanted=tokens if are_all_wanted else 1)
        for cache, prompt, tokens in zip(caches, prompts, counts, strict=True)
    ]
    with interrupts.deferred():
        passes.launch_together(parts)
    ends = [*accumulate(part.wanted for part in parts)]
    states = np.split(passes.normed_states(ends[-1]), ends[:-1])
    return [np.asarray(rows.sum(axis=0), np.float32) for rows in states]
