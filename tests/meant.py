"""What a request means: its tokens by the reference's logits and the numpy meaning of sampling, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from cheetah.models.dense.reference import Reference
from cheetah.models.sampling import adjusted, sample
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.requests import Request
from cheetah.runtime.sampling import seed_of


def drawn(
    rows: Iterable[np.ndarray], sampling: Sampling, prompt: Sequence[int], banned: Sequence[int] = ()
) -> list[int]:
    """A token from each row of logits [vocab], behind the prompt and those drawn before."""
    made: list[int] = []
    for row in rows:
        made.append(next_token(row, sampling, prompt, made, banned))
    return made


def next_token(
    row: np.ndarray, sampling: Sampling, prompt: Sequence[int], made: Sequence[int], banned: Sequence[int] = ()
) -> int:
    """The token that follows `prompt` and `made`."""
    vocab = len(row)
    allowed = np.full(vocab, sampling.allowed is None)
    allowed[list(sampling.allowed or ())] = True
    allowed[[*sampling.banned, *banned]] = False
    bias = np.zeros(vocab, np.float32)
    for token, value in sampling.bias:
        bias[token] = value
    in_prompt = np.isin(np.arange(vocab), prompt)
    counts = np.array([list(made).count(token) for token in range(vocab)], np.uint32)
    numbers = adjusted(row, allowed, bias, sampling.penalties, in_prompt, counts)
    return sample(numbers, sampling.temperature, sampling.seed, len(prompt) + len(made), sampling.filters)


def meant(reference: Reference, request: Request, index: int = 0) -> list[int]:
    """The ids of completion `index` of a request, by `models.dense.reference.Reference`."""
    sampling = replace(request.sampling, seed=seed_of(request.sampling.seed, index))
    made: list[int] = []
    for token in request.prompt_ids:
        row = reference.step(token)
    while True:
        banned = sampling.stop_ids if len(made) < request.min_tokens else ()
        made.append(next_token(row, sampling, request.prompt_ids, made, banned))
        if made[-1] in sampling.stop_ids or len(made) == request.max_tokens:
            return made
        row = reference.step(made[-1])
