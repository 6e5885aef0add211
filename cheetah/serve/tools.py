"""Calls of tools in what a model writes: one parser for each way in which models write them.

A parser takes the text as it comes and gives what is for the reader (text) and what is for the program (`ToolCall`); it
holds back what may still become a call. What turns out to be no call is text. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cheetah.runtime.text.answer_parts import AnswerPart, ToolCall
from cheetah.runtime.text.harmony import CHANNEL

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class CallForm:
    """How a call is written: `before`, the name in quotes, `middle`, the arguments as JSON, `after`; and what stands
    between two calls."""

    before: str
    middle: str
    after: str
    between: str


class ToolParser(Protocol):
    @property
    def form(self) -> CallForm | None:
        """How calls are written; None where none can be found."""

    def feed(self, text: str) -> list[AnswerPart]:
        """What the next text makes certain."""

    def finish(self) -> list[AnswerPart]:
        """The rest, once no more will come."""


class NoTools:
    """All is text."""

    form: CallForm | None = None

    def feed(self, text: str) -> list[AnswerPart]:
        return [text] if text else []

    def finish(self) -> list[AnswerPart]:
        return []


class Hermes:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, beside text.

    Written by Hermes, Qwen2.5 and Qwen3."""

    form = CallForm(f'{OPEN}\n{{"name": ', ', "arguments": ', f"}}\n{CLOSE}", "\n")

    def __init__(self) -> None:
        self._held = ""
        self._has_called = False

    def feed(self, text: str) -> list[AnswerPart]:
        self._held += text
        found: list[AnswerPart] = []
        while True:
            before, opened, rest = self._held.partition(OPEN)
            if not opened:
                return found + self._text_before_tag()
            inside, closed, after = rest.partition(CLOSE)
            if before.strip():
                found.append(before.rstrip())
            if not closed:
                self._held = opened + rest
                return found
            found.append(_call_of(inside) or opened + inside + closed)
            self._held, self._has_called = after, True

    def finish(self) -> list[AnswerPart]:
        held, self._held = self._held, ""
        inside = held.removeprefix(OPEN)
        call = _call_of(inside) if inside != held else None  # a stop may have come before the closing tag
        return [call or held] if held.strip() or (held and not self._has_called) else []

    def _text_before_tag(self) -> list[AnswerPart]:
        """All that is held but what may become an opening tag, and white space, which may stand before one."""
        kept = next((n for n in range(len(OPEN) - 1, 0, -1) if self._held.endswith(OPEN[:n])), 0)
        shown = self._held[: len(self._held) - kept].rstrip()
        self._held = self._held[len(shown) :]
        return [shown] if shown else []


class Llama3Json:
    """{"name": ..., "parameters": {...}} as all of the answer, several with semicolons between: Llama 3.1 to 3.3."""

    form = CallForm('{"name": ', ', "parameters": ', "}", "; ")

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> list[AnswerPart]:
        if self._is_text:
            return [text] if text else []
        self._held += text
        begun = self._held.lstrip()
        if not begun or begun.startswith("{") or PYTHON_TAG.startswith(begun[: len(PYTHON_TAG)]):
            return []
        self._is_text = True
        return [self._held]

    def finish(self) -> list[AnswerPart]:
        if self._is_text or not self._held:
            return []
        calls = _calls_in_line(self._held.strip().removeprefix(PYTHON_TAG))
        return [*calls] if calls else [self._held]


PARSERS: Mapping[str, Callable[[], ToolParser]] = {"hermes": Hermes, "llama3_json": Llama3Json}
"""By vLLM's names."""
HARMONY = "openai"
"""The name of what finds calls in answers of several channels: see `runtime.text.harmony`."""


def parser_of_template(template: str | None) -> str | None:
    """The name of the parser for models with this chat template; None if it tells nothing."""
    if template is None:
        return None
    if CHANNEL in template:
        return HARMONY
    if OPEN in template:
        return "hermes"
    return "llama3_json" if '"parameters"' in template and "<|start_header_id|>" in template else None


def _calls_in_line(text: str) -> list[ToolCall]:
    """The calls that `text` consists of; none if anything else is in it."""
    decoder, calls, rest = json.JSONDecoder(), list[ToolCall](), text
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        if (call := _call(value)) is None:
            return []
        calls.append(call)
        rest = rest[end:].lstrip("; \n\t")
    return calls


def _call_of(text: str) -> ToolCall | None:
    calls = _calls_in_line(text.strip())
    return calls[0] if len(calls) == 1 else None


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(value["name"], written)
