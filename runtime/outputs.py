"""What a request gives back: plain frozen values, printed and compared like data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.runtime.text.answer_parts import ToolCall


@dataclass(frozen=True)
class Timings:
    """Where the seconds of one completion went, by the host's clock, from before a launch is prepared until it is done.

    `prefill_s` goes up to the first completion token, `decode_s` covers the others: all of each launch that it took
    part in, so several that share their launches share those seconds. What other requests did in between, tokenising,
    detokenising and what the caller does between two pieces are in neither. `launches` counts its kernel launches.
    `cached_tokens` of the prompt were not read again: their keys and values were still there from an earlier request,
    or from an earlier completion of the same prompt. `drafted_tokens` were drafted, of which `accepted_tokens` turned
    out right (see `speculative_config`); where a stop string ends the text, what was drafted behind it may count too.
    """

    prompt_tokens: int
    completion_tokens: int
    prefill_s: float
    decode_s: float
    launches: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first one, of this completion alone; 0 if there were none."""
        return (self.completion_tokens - 1) / self.decode_s if self.completion_tokens > 1 and self.decode_s > 0 else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second, of those that were read."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0


@dataclass(frozen=True)
class Logprob:
    """How likely a token was, by the logits as the model gave them (before temperature, penalties, masks and filters).

    logprob: the natural logarithm of its probability. rank: 1 for the likeliest. decoded_token: its text by itself,
    where a part of a character is U+FFFD; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = Mapping[int, Logprob]
"""Of one place, by token id: first the token that stands there, then the likeliest that were asked for."""


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt, the one of number `index`.

    text: what follows the prompt, None without a tokenizer; a stop string and an end token are not in it (unless
    `include_stop_str_in_output`).
    token_ids: all ids made, the end token included. finish_reason: "stop" (an end token or a stop string; stop_reason
    says which) or "length" (max_tokens, or the context is full). logprobs: of each id, None unless they were asked for;
    cumulative_logprob: the sum of those of the ids. reasoning, tool_calls: of a chat with a model that writes channels
    (gpt-oss), what it thought and which tools it calls, neither of which is in text.
    """

    index: int
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    timings: Timings
    logprobs: tuple[Logprobs, ...] | None = None
    cumulative_logprob: float | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class RequestMetrics:
    """When a request was where, by vLLM's names: seconds since the epoch. first_token_time, last_token_time: when the
    engine told of the first token of any of its completions, and of the last. num_generation_tokens: of all."""

    arrival_time: float
    first_token_time: float
    last_token_time: float
    num_generation_tokens: int

    @property
    def first_token_latency(self) -> float:
        """Seconds from the request to its first token."""
        return self.first_token_time - self.arrival_time

    @property
    def finished_time(self) -> float:
        """When all was there."""
        return self.last_token_time


@dataclass(frozen=True)
class RequestOutput:
    """The completions of a prompt, `SamplingParams.n` of them; what is read of the output itself is the first one's.

    prompt: the text that was given, None if ids were. prompt_token_ids: what the kernel read, the beginning-of-text id
    included. prompt_logprobs: of each of these, if they were asked for; nothing stands before the first: None.
    request_id: its number among those of the LLM.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    request_id: str = ""
    metrics: RequestMetrics | None = None

    finished = True
    """It is given once all its completions have ended."""

    def __getitem__(self, index: object) -> NoReturn:
        """Refuses `generate("...")[0]`, which other libraries' lists of one take."""
        raise CheetahError(
            "the output of one prompt is no list: write output.text, or output.outputs[0].text, or give a list of "
            "prompts to get a list of outputs"
        )

    @property
    def text(self) -> str | None:
        return self.outputs[0].text

    @property
    def reasoning(self) -> str:
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.outputs[0].tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason

    @property
    def timings(self) -> Timings:
        return self.outputs[0].timings


@dataclass(frozen=True, eq=False)
class EmbeddingOutput:
    """embedding: float32 [hidden], one vector for a whole text."""

    embedding: npt.NDArray[np.float32]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass(frozen=True, eq=False)
class EmbeddingRequestOutput:
    """The embedding of a prompt. prompt, prompt_token_ids: as in `RequestOutput`."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput

    finished = True
    """There is nothing to come."""


@dataclass(frozen=True)
class StreamPiece:
    """The next part of a completion: valid UTF-8, never part of a stop string. The texts of all pieces together are the
    text of `CompletionOutput`, their ids its ids.

    `text` is None without a tokenizer, and "" while a character or a possible stop string is incomplete.
    The last piece alone has `finished`, and with it finish_reason, stop_reason and timings.
    `index` is the completion's number: with `SamplingParams.n` above 1 their pieces come in turns.
    logprobs: of each id of the piece; prompt_logprobs: see `RequestOutput`, with a completion's first piece. None
    unless they were asked for. reasoning, tool_calls: as those of `CompletionOutput`, as far as they have come.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finished: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    timings: Timings | None = None
    index: int = 0
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
