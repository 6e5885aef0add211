"""Logprobs as OpenAI's clients read them, of chats and of completions, and vLLM's of a prompt.

JSON has no infinities: what is less likely than anything is written as -9999, as vLLM does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cheetah.runtime.outputs import Logprob, Logprobs
from cheetah.runtime.text.tokenizer import Tokenizer

LEAST = -9999.0


@dataclass(frozen=True)
class TokenTexts:
    """What tokens are by themselves, and what answers show of them; nothing without a tokenizer."""

    tokenizer: Tokenizer | None
    skip_special_tokens: bool = True

    def bytes_of(self, token: int) -> bytes:
        return (self.tokenizer and self.tokenizer.token_bytes(token)) or b""

    def text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")

    def length_shown(self, token: int) -> int:
        """Characters of it in an answer's text."""
        found = self.tokenizer and self.tokenizer.token_bytes(token, False, self.skip_special_tokens)
        return len((found or b"").decode("utf-8", "replace"))


class ChatLogprobs:
    """Of the tokens of a chat's answer, or of a response, with the `top` likeliest of each."""

    def __init__(self, texts: TokenTexts, top: int) -> None:
        self._texts, self._top = texts, top

    def record(self, places: Sequence[Logprobs]) -> dict[str, Any]:
        return {"content": self.entries(places), "refusal": None}

    def entries(self, places: Sequence[Logprobs]) -> list[dict[str, Any]]:
        """One for each token: /v1/responses tells these by themselves."""
        return [self._of_place(place) for place in places]

    def _of_place(self, place: Logprobs) -> dict[str, Any]:
        likeliest = sorted(place.items(), key=lambda item: -item[1].logprob)[: self._top]
        top = [self._of_token(*item) for item in likeliest]
        return {**self._of_token(*next(iter(place.items()))), "top_logprobs": top}

    def _of_token(self, token: int, entry: Logprob) -> dict[str, Any]:
        bytes_of = [*self._texts.bytes_of(token)]
        return {"token": self._texts.text_of(token), "logprob": _number(entry), "bytes": bytes_of}


class CompletionLogprobs:
    """Of the tokens of one completion, piece by piece. A token's offset is where its text begins in the answer's."""

    def __init__(self, texts: TokenTexts, first_token: int) -> None:
        """first_token: of the prompt, before which there is nothing."""
        self._texts, self._first_token = texts, first_token
        self._offset = 0

    def record(self, places: Sequence[Logprobs | None]) -> dict[str, list[Any]]:
        """Of the next places; None is the first token of an echoed prompt."""
        every = [(self._first_token if place is None else next(iter(place)), place) for place in places]
        return {
            "tokens": [self._texts.text_of(token) for token, _ in every],
            "token_logprobs": [None if place is None else _number(place[token]) for token, place in every],
            "top_logprobs": [None if place is None else self._named(place) for place in places],
            "text_offset": [self._pass(token) for token, _ in every],
        }

    def _named(self, place: Logprobs) -> dict[str, float]:
        return {self._texts.text_of(token): _number(entry) for token, entry in place.items()}

    def _pass(self, token: int) -> int:
        offset = self._offset
        self._offset += self._texts.length_shown(token)
        return offset


def of_prompt(places: Sequence[Logprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: by token id, which JSON has as text."""
    return None if places is None else [None if place is None else _by_id(place) for place in places]


def _by_id(place: Logprobs) -> dict[str, Any]:
    return {
        str(token): {"logprob": _number(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token, entry in place.items()
    }


def _number(entry: Logprob) -> float:
    return max(entry.logprob, LEAST)
