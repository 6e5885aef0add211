"""What a request gives back: plain frozen values, printed and compared like data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    """Where the seconds of one request went, by the host's clock, from before a launch is prepared until it is done.

    `prefill_s` goes up to the first completion token, `decode_s` covers the others. Tokenising, detokenising and what
    the caller does between two pieces are in neither. `launches` counts kernel launches.
    """

    prompt_tokens: int
    completion_tokens: int
    prefill_s: float
    decode_s: float
    launches: int

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first one; 0 if there were none."""
        return (self.completion_tokens - 1) / self.decode_s if self.completion_tokens > 1 and self.decode_s > 0 else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s > 0 else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """One completion.

    prompt: the text that was given, None if ids were. prompt_token_ids: what the kernel read, the beginning-of-text id
    included. text: what follows the prompt, None without a tokenizer; a stop string and an end token are not in it.
    token_ids: all ids made, the end token included. finish_reason: "stop" (an end token or a stop string; stop_reason
    says which) or "length" (max_tokens, or the context is full).
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    timings: Timings


@dataclass(frozen=True)
class StreamPiece:
    """The next part of a completion: valid UTF-8, never part of a stop string. The texts of all pieces together are the
    text of `RequestOutput`, their ids its ids.

    `text` is None without a tokenizer, and "" while a character or a possible stop string is incomplete.
    The last piece alone has `finished`, and with it finish_reason, stop_reason and timings.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finished: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    timings: Timings | None = None
