"""How a prompt comes into the cache: where its steps begin, how many columns they have, whose pages it may begin with.

The last bits of a token's keys, values and logits depend on how attention read it: by which kernel, in a step that
begins at which position, in a tile of how many columns. All else, the weights' products too, is the same for a column
in any step of a kernel. So who wants the same bits whatever the cache holds lets these follow from a token's position.
In a pass they follow from nothing else: it adds up the keys from position 0 on in tiles of fixed places, wherever it
begins, and takes those that earlier passes made as its own. Knows nothing of launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

LEAST_KEPT = 128
"""Tokens of a pass that take no longer than fewer, about: where passes read prompts, as many are worth a state that is
kept of them, for which a pass has to end there and another one reads the rest."""


@dataclass(frozen=True)
class FewestSteps:
    """As few steps as may be, of up to `columns` tokens, or passes: bits depend on what was cached before. Tokens count
    from 0. has_passes: there is a kernel for them."""

    columns: int
    page_size: int
    has_passes: bool = False

    def takes_pass(self, tokens: int) -> bool:
        """Whether a pass reads `tokens` tokens, of prompts that wait; else steps do. A pass over a few and the head
        behind it take about as long as one step."""
        return self.has_passes and tokens > self.columns

    def left(self, known: int, cached: int) -> int:
        """Of `known` ids that are read as a prompt, how many are left behind the `cached` ones. The last one by itself
        is decoded."""
        return known - cached if cached < known - 1 else 0

    @property
    def unit(self) -> int:
        """A prompt begins with a multiple of so many tokens of others."""
        return self.page_size

    @property
    def least_kept(self) -> int:
        """Tokens behind a state that is kept, for another to be worth it."""
        return max(self.unit, LEAST_KEPT) if self.has_passes else self.unit

    def reused(self, cached: int) -> int:
        """Of `cached` known tokens, whole pages, how many a prompt begins with."""
        return cached // self.unit * self.unit

    def columns_of_step(self, tokens: int) -> int:
        """Columns of the steps of a launch that reads `tokens` tokens."""
        return min(self.columns, tokens)

    def read_as_prompt(self, prompt: int, known: int) -> int:
        """Of the `known` ids of a completion, more than its `prompt` if it gave its pages back, how many are read as a
        prompt; the others are decoded once more."""
        return known

    def end(self, prompt: int, samples: bool) -> int:
        """How many tokens of a prompt steps read before completions part. Whether the first token `samples` with it:
        then all; else the last token of the prompt is left, for each completion to decode in a way of its own."""
        return prompt if samples else prompt - 1

    def kept(self, prompt: int, cached: int) -> int:
        """Of `cached` tokens of a completion, how many another prompt may begin with."""
        return cached


@dataclass(frozen=True)
class SameSteps(FewestSteps):
    """Position alone says how a token of a prompt is read, and so its bits are those of reading the prompt from its
    first token on: where items of attention have a fixed length, which makes them independent of the other sequences.

    A step begins at a multiple of `columns` and has all of them, also where the prompt has fewer tokens left: the other
    columns are computed for nobody, and no token sees them. The last token samples, so it is decoded like those after
    it, with one column, however many completions begin there. What was decoded is no beginning of another prompt.
    Where there are passes, they read all tokens of a prompt, however few, and none is decoded.
    """

    def takes_pass(self, tokens: int) -> bool:
        return self.has_passes

    def left(self, known: int, cached: int) -> int:
        return known - cached if self.has_passes else super().left(known, cached)

    @property
    def unit(self) -> int:
        return self.page_size if self.has_passes else lcm(self.columns, self.page_size)

    def columns_of_step(self, tokens: int) -> int:
        return self.columns

    def read_as_prompt(self, prompt: int, known: int) -> int:
        return prompt

    def end(self, prompt: int, samples: bool) -> int:
        return prompt - 1

    def kept(self, prompt: int, cached: int) -> int:
        return min(cached, prompt if self.has_passes else prompt - 1)
