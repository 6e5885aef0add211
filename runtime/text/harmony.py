"""What gpt-oss writes (openai/harmony): messages, each with a channel, some to a function. What is in the channel
"analysis" is thought, what is sent to a function is a call, the rest is for the reader.

A message is a header, <|message|>, its text and an end. A header names a channel behind <|channel|> and, for a call,
its recipient as `to=functions.NAME`; that of the first message of an answer begins behind the prompt. The tokens that
end answers have no text of their own, so the last message may lack its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto

from cheetah.runtime.outputs import StreamPiece
from cheetah.runtime.text.answer_parts import AnswerPart, Thought, ToolCall

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
"""The first one is in the chat templates of models that write so."""
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
FUNCTIONS = "functions."
ANALYSIS = "analysis"
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
LONGEST_HEADER = 1000


class _Kind(Enum):
    HEADER = auto()
    THOUGHT = auto()
    CALL = auto()
    TEXT = auto()


class Harmony:
    """A parser of text with special tokens in it. has_tools: else what is sent to functions is thought, too."""

    form: None = None
    """Calls stand among other messages: no text can be held to be one."""

    def __init__(self, has_tools: bool = True) -> None:
        self._has_tools = has_tools
        self._kind, self._held, self._name = _Kind.HEADER, "", ""

    def feed(self, text: str) -> list[AnswerPart]:
        self._held += text
        found: list[AnswerPart] = []
        while True:
            if self._kind is _Kind.HEADER:
                header, is_whole, behind = self._held.partition(MESSAGE)
                if not is_whole:
                    return found + self._without_header()
                self._held = behind
                self._open(header)
            end = min((place, end) for end in ENDS if (place := self._held.find(end)) >= 0) if self._has_end else None
            if end is None:
                return found + self._certain()
            inside, self._held = self._held[: end[0]], self._held[end[0] + len(end[1]) :]
            found += self._part(inside, is_end=True)
            self._kind = _Kind.HEADER

    def finish(self) -> list[AnswerPart]:
        """A call that lacks its end is one if it is whole."""
        held, self._held = self._held, ""
        if self._kind is _Kind.HEADER:
            return [held] if held.strip() and CHANNEL not in held else []
        if self._kind is _Kind.CALL and not _is_json(held):
            self._kind = _Kind.TEXT
        return self._part(held, is_end=True)

    @property
    def _has_end(self) -> bool:
        return any(end in self._held for end in ENDS)

    def _open(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        to = recipient[1] if recipient else ""
        self._name = to.removeprefix(FUNCTIONS)
        if to and self._has_tools and to.startswith(FUNCTIONS):
            self._kind = _Kind.CALL
        else:
            is_thought = bool(to) or (channel is not None and channel[1] == ANALYSIS)
            self._kind = _Kind.THOUGHT if is_thought else _Kind.TEXT

    def _certain(self) -> list[AnswerPart]:
        """Of a message that goes on, all that may not become its end; of a call nothing."""
        if self._kind is _Kind.CALL:
            return []
        longest = max(map(len, ENDS)) - 1
        kept = next(
            (
                n
                for n in range(min(longest, len(self._held)), 0, -1)
                if any(e.startswith(self._held[-n:]) for e in ENDS)
            ),
            0,
        )
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return self._part(shown)

    def _part(self, text: str, is_end: bool = False) -> list[AnswerPart]:
        if self._kind is _Kind.CALL:
            return [ToolCall(self._name, text.strip() or "{}")] if is_end else []
        if not text:
            return []
        return [Thought(text) if self._kind is _Kind.THOUGHT else text]

    def _without_header(self) -> list[AnswerPart]:
        """A text that is too long for a header is none."""
        if len(self._held) <= LONGEST_HEADER:
            return []
        self._kind = _Kind.TEXT
        return self._certain()


class Channels:
    """Of the pieces of a completion with special tokens in them: what is for the reader as text, the rest beside it.
    has_tools: see `Harmony`."""

    def __init__(self, has_tools: bool):
        self._parser = Harmony(has_tools)

    def take(self, piece: StreamPiece) -> StreamPiece:
        """The piece, told apart. What may belong to a header, or to a call, comes with a later one."""
        parts = [*self._parser.feed(piece.text or ""), *(self._parser.finish() if piece.finished else ())]
        return replace(
            piece,
            text="".join(part for part in parts if isinstance(part, str)),
            reasoning="".join(part.text for part in parts if isinstance(part, Thought)),
            tool_calls=tuple(part for part in parts if isinstance(part, ToolCall)),
        )


NewChannels = Callable[[], Channels]
"""Of a completion that begins."""


def _is_json(text: str) -> bool:
    try:
        json.loads(text or "{}")
    except (ValueError, RecursionError):
        return False
    return True
