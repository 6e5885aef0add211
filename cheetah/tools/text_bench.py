"""How many tokens a step makes of real text: a model answers prompts with drafts and without them, in one engine.

The answers are the model's own, and must be the same both ways. Which mean length they have is a matter of the text and
of the model: with made-up weights it would say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from cheetah.errors import CheetahError
from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.engine.drafting import Drafted

SEPARATOR = "---"
"""Alone on a line between two prompts of a file."""
WARMUP_TOKENS = 8


@dataclass(frozen=True)
class Answered:
    """One prompt's answer of `tokens` tokens. steps: that made them; drafted: what came of drafts. seconds,
    plain_seconds: behind the first token by the host's clock, with drafts and without."""

    prompt_tokens: int
    tokens: int
    steps: int
    drafted: Drafted
    seconds: float
    plain_seconds: float

    @property
    def mean_length(self) -> float:
        """Tokens that a step makes, also of steps in which nothing was drafted."""
        return 1.0 + self.drafted.accepted / self.steps if self.steps else 1.0

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - 1) / self.seconds if self.seconds else 0.0

    @property
    def plain_tokens_per_s(self) -> float:
        return (self.tokens - 1) / self.plain_seconds if self.plain_seconds else 0.0

    def __add__(self, other: Answered) -> Answered:
        """Of both prompts together; the rates count a first token that no decode step made once too often."""
        return Answered(
            self.prompt_tokens + other.prompt_tokens,
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.drafted + other.drafted,
            self.seconds + other.seconds,
            self.plain_seconds + other.plain_seconds,
        )


def prompts_of(text: str) -> list[str]:
    """The prompts of a file: between lines of `---`. CheetahError if there are none."""
    pieces, lines = list[str](), list[str]()
    for line in [*text.splitlines(keepends=True), SEPARATOR]:
        if line.rstrip() == SEPARATOR:
            pieces.append("".join(lines).strip("\n"))
            lines = []
        else:
            lines.append(line)
    found = [piece for piece in pieces if piece.strip()]
    if not found:
        raise CheetahError("--text: the file has no prompt")
    return found


def answered(llm: LLM, prompt: str, max_tokens: int) -> Answered:
    """The greedy answer to a prompt, with drafts and without. CheetahError where they are not the same."""

    def made(speculation: bool) -> Any:
        asked = SamplingParams(max_tokens=max_tokens, temperature=0.0, speculation=speculation)
        return llm.generate(prompt, asked)

    plain, found = made(False), made(True)
    if found.token_ids != plain.token_ids:
        pairs = zip_longest(found.token_ids, plain.token_ids)
        place = next(number for number, (one, other) in enumerate(pairs) if one != other)
        raise CheetahError(f"drafts changed token {place} of an answer: such a kernel's speed is worth nothing")
    drafted, accepted = found.timings.drafted_tokens, found.timings.accepted_tokens
    return Answered(
        len(found.prompt_token_ids),
        len(found.token_ids),
        len(found.token_ids) - accepted,  # a step makes one token beside those that were drafted rightly
        Drafted(tokens=drafted, right=(accepted,)),
        found.timings.decode_s,
        plain.timings.decode_s,
    )


def measured_text(llm: LLM, prompts: Sequence[str], max_tokens: int) -> list[Answered]:
    """Of each prompt, once the kernels are warm."""
    answered(llm, prompts[0], min(max_tokens, WARMUP_TOKENS))
    return [answered(llm, prompt, max_tokens) for prompt in prompts]


def text_record(one: Answered, number: int, circumstances: dict[str, Any]) -> dict[str, Any]:
    """A line of a results file."""
    return {
        **circumstances,
        "system": "cheetah",
        "prompt": number,
        "prompt_tokens": one.prompt_tokens,
        "tokens": one.tokens,
        "mean_length": round(one.mean_length, 4),
        "drafted_tokens": one.drafted.tokens,
        "accepted_tokens": one.drafted.accepted,
        "identical": True,
        "tokens_per_s": round(one.tokens_per_s, 3),
        "plain_tokens_per_s": round(one.plain_tokens_per_s, 3),
    }
