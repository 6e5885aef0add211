"""What transformers' warpers keep of given logits: the cases, and the file of answers that was made with them.

`python -m tests.models.warpers` (needs torch and transformers) writes `warped.json` again: of each case the kept tokens
as a bit each, the first the highest of the number, and the SHA-256 of the float32 logits behind the penalty."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.sampling import Filters, Penalties, adjusted, kept

ANSWERS = Path(__file__).with_name("warped.json")
VOCAB = 512
SEEN = 40  # tokens of the text so far, of which some are there twice
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """spread: the standard deviation of the logits. All numbers follow from the seed."""

    seed: int
    spread: float
    temperature: float
    filters: Filters
    repetition: float = 1.0

    @property
    def logits(self) -> F32:
        return (np.random.default_rng(self.seed).standard_normal(VOCAB) * self.spread).astype(np.float32)

    @property
    def seen(self) -> NDArray[np.int64]:
        return np.random.default_rng(self.seed + 1000).integers(0, VOCAB, SEEN)

    def ours(self) -> tuple[F32, NDArray[np.bool_]]:
        """The logits behind the penalty, and which tokens are kept of them, as `cheetah.models.sampling` has it."""
        in_prompt = np.isin(np.arange(VOCAB), self.seen)
        counts = np.zeros(VOCAB, np.uint32)
        logits = adjusted(self.logits, penalties=Penalties(self.repetition), in_prompt=in_prompt, counts=counts)
        return logits, kept((logits / np.float32(self.temperature)).astype(np.float32), self.filters)

    def theirs(self) -> tuple[F32, NDArray[np.bool_]]:
        """The same by transformers, in the order in which its `generate` puts the warpers."""
        import torch
        from transformers.generation import logits_process as of

        scores = torch.from_numpy(self.logits)[None]
        ids = torch.from_numpy(self.seen)[None]
        scores = of.RepetitionPenaltyLogitsProcessor(self.repetition)(ids, scores) if self.repetition != 1 else scores
        penalised = scores[0].numpy()
        warpers: list[Any] = [of.TemperatureLogitsWarper(self.temperature)] if self.temperature != 1 else []
        warpers += [of.TopKLogitsWarper(self.filters.top_k)] if self.filters.top_k else []
        warpers += [of.TopPLogitsWarper(self.filters.top_p)] if self.filters.top_p < 1 else []
        warpers += [of.MinPLogitsWarper(self.filters.min_p)] if self.filters.min_p else []
        for warper in warpers:
            scores = warper(ids, scores)
        return penalised, np.isfinite(scores[0].numpy())


FILTERS = (
    Filters(top_k=1),
    Filters(top_k=7),
    Filters(top_k=50),
    Filters(top_k=500),
    Filters(top_p=0.05),
    Filters(top_p=0.5),
    Filters(top_p=0.9),
    Filters(top_p=0.999),
    Filters(min_p=0.01),
    Filters(min_p=0.3),
    Filters(top_k=50, top_p=0.9),
    Filters(top_k=20, top_p=0.95, min_p=0.05),
    Filters(top_p=0.8, min_p=0.1),
)
SHAPES = ((0.5, 1.0, 1.0), (2.0, 0.7, 1.3), (6.0, 1.0, 0.8), (3.0, 1.5, 1.1))
"""Spread, temperature, penalty."""
CASES = [
    Case(100 * number + place, spread, temperature, filters, repetition)
    for number, (spread, temperature, repetition) in enumerate(SHAPES)
    for place, filters in enumerate(FILTERS)
]


def as_answer(penalised: F32, keep: NDArray[np.bool_]) -> list[str]:
    """A case's entry of the file."""
    return [np.packbits(keep).tobytes().hex(), hashlib.sha256(penalised.tobytes()).hexdigest()[:16]]


def answers() -> list[list[str]]:
    """The file's entries, one a case."""
    entries: list[list[str]] = json.loads(ANSWERS.read_text())["answers"]
    return entries


def write_answers(path: Path = ANSWERS) -> None:
    """What the installed transformers answers."""
    import transformers

    entries = [as_answer(*case.theirs()) for case in CASES]
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    path.write_text(f'{{"transformers": "{transformers.__version__}", "answers": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    write_answers()
