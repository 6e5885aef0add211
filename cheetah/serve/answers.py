"""What is sent back: OpenAI's records of completions and of chats, whole or chunk by chunk.

A chunk that ends a choice has no text in it, and the one with the usage has no choices, as OpenAI's clients expect.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from cheetah.runtime.outputs import StreamPiece
from cheetah.runtime.text.answer_parts import AnswerPart, Thought, ToolCall
from cheetah.serve.logprobs import ChatLogprobs, CompletionLogprobs, of_prompt
from cheetah.serve.records import StreamOptions
from cheetah.serve.tools import ToolParser

Record = dict[str, Any]


PIECE = 4096
"""Values that become JSON at a time: some milliseconds."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # made once: streams are told token by token


def as_json(record: Any) -> bytes:
    """JSON in UTF-8; a lone surrogate, which UTF-8 has not, becomes a question mark."""
    return _encoded(record).encode("utf-8", "replace")


def long_json(record: Any) -> bytes:
    """The same of what may be long, for a thread beside the event loop: the encoder holds Python's lock as long as a
    call takes, so it is given no more than PIECE values at a time."""
    return "".join(_in_pieces(record)).encode("utf-8", "replace")


def _encoded(value: Any) -> str:
    return _ENCODER.encode(value)


def _in_pieces(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        opening = "{"
        for name, member in value.items():
            yield f"{opening}{_encoded(name)}:"
            yield from _in_pieces(member)
            opening = ","
        yield "}" if value else "{}"
    elif isinstance(value, list) and any(isinstance(member, dict | list) for member in value):
        for number, member in enumerate(value):
            yield "," if number else "["
            yield from _in_pieces(member)
        yield "]"
    elif isinstance(value, list) and len(value) > PIECE:
        for first in range(0, len(value), PIECE):
            yield ("," if first else "[") + _encoded(value[first : first + PIECE])[1:-1]
        yield "]"
    else:
        yield _encoded(value)


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


@dataclass
class Usage:
    """Tokens of all the completions of a request; each prompt counts once. is_echo: completions do not count."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    is_echo: bool = False

    def take(self, piece: StreamPiece) -> None:
        self.completion_tokens += 0 if self.is_echo else len(piece.token_ids)
        if piece.timings is None:
            return
        self.cached_tokens += piece.timings.cached_tokens if piece.index == 0 else 0
        self.drafted_tokens += piece.timings.drafted_tokens
        self.accepted_tokens += piece.timings.accepted_tokens

    def record(self) -> Record:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.drafted_tokens - self.accepted_tokens,
            },
        }


class Answer(Protocol):
    """How the pieces of a request's completions are told."""

    usage: Usage

    def chunks(self, number: int, piece: StreamPiece) -> Iterator[Record]:
        """What the next piece of completion `number` adds."""

    def ending(self) -> Iterator[Record]:
        """What stands behind the last piece."""

    def whole(self, pieces: Sequence[StreamPiece]) -> Record:
        """All of it at once: each completion as one piece."""


@dataclass
class Envelope:
    """What all records of one answer have in common."""

    id: str
    kind: str
    model: str
    usage: Usage
    told: StreamOptions
    created: int = field(default_factory=lambda: int(time.time()))

    def record(self, kind: str, choices: list[Record], **more: Any) -> Record:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}

    def chunk(self, choice: Record) -> Record:
        if not self.told.include_usage:
            return self.record(self.kind, [choice])
        usage = self.usage.record() if self.told.continuous_usage_stats else None
        return self.record(self.kind, [choice], usage=usage)

    def ending(self) -> Iterator[Record]:
        if self.told.include_usage:
            yield self.record(self.kind, [], usage=self.usage.record())


class CompletionAnswer:
    """/v1/completions. echoes: for each completion the text of its prompt, if that is to stand before it. logprobs: for
    each completion what tells those that its pieces have, with those of an echoed prompt before them. Where the usage
    is that of an echo, nothing else is told."""

    def __init__(
        self,
        model: str,
        usage: Usage,
        echoes: Sequence[str] | None,
        told: StreamOptions,
        with_ids: bool,
        logprobs: Sequence[CompletionLogprobs],
    ):
        self.usage, self._logprobs = usage, logprobs
        self._envelope = Envelope(new_id("cmpl"), "text_completion", model, usage, told)
        self._echoes, self._with_ids = dict(enumerate(echoes or ())), with_ids

    def chunks(self, number: int, piece: StreamPiece) -> Iterator[Record]:
        choice = self._choice(number, piece)
        if choice["text"] or choice["logprobs"] or self._with_ids:
            yield self._envelope.chunk({**choice, "finish_reason": None, "stop_reason": None})
        if piece.finished:
            told: Record = {"text": "", "logprobs": None, **({"token_ids": []} if self._with_ids else {})}
            yield self._envelope.chunk({**choice, **told})

    def ending(self) -> Iterator[Record]:
        return self._envelope.ending()

    def whole(self, pieces: Sequence[StreamPiece]) -> Record:
        choices = [
            {**self._choice(number, piece), "prompt_logprobs": of_prompt(piece.prompt_logprobs)}
            for number, piece in enumerate(pieces)
        ]
        return self._envelope.record("text_completion", choices, usage=self.usage.record())

    def _choice(self, number: int, piece: StreamPiece) -> Record:
        echo = self._echoes.pop(number, None)
        if self.usage.is_echo:
            reason = "length" if piece.finish_reason else None
            none_made = () if piece.logprobs is not None else None
            piece = replace(piece, text="", token_ids=(), logprobs=none_made, finish_reason=reason, stop_reason=None)
        choice = {
            "index": number,
            "text": (echo or "") + (piece.text or ""),
            "logprobs": self._logprobs_of(number, piece, echo is not None),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        return {**choice, "token_ids": [*piece.token_ids]} if self._with_ids else choice

    def _logprobs_of(self, number: int, piece: StreamPiece, has_echo: bool) -> Record | None:
        if piece.logprobs is None:
            return None
        echoed = piece.prompt_logprobs or () if has_echo else ()
        return self._logprobs[number].record((*echoed, *piece.logprobs))


class ChatAnswer:
    """/v1/chat/completions. new_parser: finds calls of tools. one_call: no more than one call is told. logprobs: tells
    those that pieces have."""

    def __init__(
        self,
        model: str,
        usage: Usage,
        new_parser: Callable[[], ToolParser],
        one_call: bool,
        told: StreamOptions,
        logprobs: ChatLogprobs,
    ):
        self.usage, self._logprobs = usage, logprobs
        self._envelope = Envelope(new_id("chatcmpl"), "chat.completion.chunk", model, usage, told)
        self._new_parser, self._one_call = new_parser, one_call
        self._choices: dict[int, _ChatChoice] = {}

    def chunks(self, number: int, piece: StreamPiece) -> Iterator[Record]:
        if number not in self._choices:
            self._choices[number] = _ChatChoice(self._new_parser(), self._one_call)
            yield self._chunk(number, {"role": "assistant", "content": ""})
        choice, logprobs = self._choices[number], self._logprobs_of(piece)
        deltas = list(choice.deltas(piece.text or "", piece.finished))
        if not deltas and logprobs is not None:
            deltas.append({"content": ""})  # tokens whose text is held back
        for delta in deltas:
            yield self._chunk(number, delta, logprobs=logprobs)
            logprobs = None
        if piece.finished:
            yield self._chunk(number, {}, choice.finish_reason(piece.finish_reason), piece.stop_reason)

    def ending(self) -> Iterator[Record]:
        return self._envelope.ending()

    def whole(self, pieces: Sequence[StreamPiece]) -> Record:
        choices = [self._whole_choice(number, piece) for number, piece in enumerate(pieces)]
        more = {"prompt_logprobs": of_prompt(pieces[0].prompt_logprobs), "usage": self.usage.record()}
        return self._envelope.record("chat.completion", choices, **more)

    def _logprobs_of(self, piece: StreamPiece) -> Record | None:
        return self._logprobs.record(piece.logprobs) if piece.logprobs else None

    def _whole_choice(self, number: int, piece: StreamPiece) -> Record:
        choice = _ChatChoice(self._new_parser(), self._one_call)
        deltas = list(choice.deltas(piece.text or "", True))
        text = "".join(delta.get("content", "") for delta in deltas)
        calls = [
            {k: v for k, v in call.items() if k != "index"} for delta in deltas for call in delta.get("tool_calls", ())
        ]
        message: Record = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        if thoughts := "".join(delta.get("reasoning", "") for delta in deltas):
            message["reasoning"] = thoughts
        return {
            "index": number,
            "message": message,
            "logprobs": self._logprobs_of(piece),
            "finish_reason": choice.finish_reason(piece.finish_reason),
            "stop_reason": piece.stop_reason,
        }

    def _chunk(
        self,
        number: int,
        delta: Record,
        reason: str | None = None,
        stop: int | str | None = None,
        logprobs: Record | None = None,
    ) -> Record:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._envelope.chunk(choice if reason is None else {**choice, "stop_reason": stop})


class _ChatChoice:
    """One choice of a chat while its text comes: deltas of text and of calls."""

    def __init__(self, parser: ToolParser, one_call: bool):
        self._parser, self._one_call = parser, one_call
        self._calls = 0

    def deltas(self, text: str, is_last: bool) -> Iterator[Record]:
        for part in (*self._parser.feed(text), *(self._parser.finish() if is_last else ())):
            yield from self._delta(part)

    def finish_reason(self, reason: str | None) -> str | None:
        """A call that was cut by the length is none that may be made."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _delta(self, part: AnswerPart) -> Iterator[Record]:
        if isinstance(part, Thought):
            yield {"reasoning": part.text}
        elif not isinstance(part, ToolCall):
            yield {"content": part}
        elif not (self._one_call and self._calls):
            function = {"name": part.name, "arguments": part.arguments}
            yield {
                "tool_calls": [{"index": self._calls, "id": new_id("call"), "type": "function", "function": function}]
            }
            self._calls += 1
