"""What a completion's text shall be: JSON by a schema, a regular expression, one of several texts, a grammar.

Plain values, checked as far as they can be without the library that reads grammars (`runtime/text/grammars.py`).
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from cheetah.errors import CheetahError
from cheetah.printable import shown, shown_name
from cheetah.untrusted import parse_json

GRAMMAR_BYTES = 128_000
"""Most bytes of a schema, expression or grammar: OpenAI takes schemas with up to 120,000 characters of names."""
KINDS = ("json", "regex", "choice", "grammar", "json_object")


class GrammarError(CheetahError):
    """What a text shall be was not said, or cannot be done; the message begins with structured_outputs."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the text shall be: exactly one of the first five. Names are vLLM's.

    json: a JSON schema, as an object or as text. regex: a regular expression of the whole text, in the syntax of Rust's
    `regex` crate. choice: one of these texts. grammar: a context-free grammar, in Lark's or llama.cpp's (GBNF) form.
    json_object: any JSON object.
    whitespace_pattern: a regular expression of what may stand between two parts of JSON; by default up to 32 blanks,
    tabs and line ends. disable_any_whitespace: nothing may.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        asked = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(asked) != 1:
            what = f"{' and '.join(asked)} are given" if asked else "nothing is asked for"
            raise GrammarError(f"structured_outputs: {what}: give one of {', '.join(KINDS)}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise GrammarError(f"structured_outputs: {name}: {shown(getattr(self, name))} is no text")
        size = len(self.source.encode("utf-8", "replace"))
        if size > GRAMMAR_BYTES:
            raise GrammarError(f"structured_outputs: {self.kind} has {size} bytes, at most {GRAMMAR_BYTES} are read")

    @classmethod
    def of(cls, given: Any) -> StructuredOutputsParams:
        """From a mapping with the names of the fields; what is one already stays as it is."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise GrammarError(f"structured_outputs: {shown(given)}: expected a mapping with one of {', '.join(KINDS)}")
        known = [field.name for field in fields(cls)]
        named = {name: value for name, value in given.items() if value is not None}
        for name in named:
            if name not in known:
                place = shown_name(str(name))
                raise GrammarError(f"structured_outputs: {place} is not supported: there are {', '.join(known)}")
        return cls(**named)

    @property
    def kind(self) -> str:
        """Which of the five is asked for."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def source(self) -> str:
        """What is asked for as text: choices and schemas as JSON."""
        if self.json_object:
            return '{"type":"object"}'
        if self.json is not None:
            return _schema(self.json)
        return json_text.dumps(self.choice) if self.choice is not None else self.regex or self.grammar or ""


def _choices(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise GrammarError(f"structured_outputs: choice: {shown(given)} is no list of texts")
    for text in given:
        if not isinstance(text, str) or not text:
            raise GrammarError(f"structured_outputs: choice: {shown(text)} is not a text of at least one character")
    if not given:
        raise GrammarError("structured_outputs: choice: there are no texts to choose from")
    return tuple(given)


def _schema(given: Any) -> str:
    """A schema's JSON, whatever it was given as."""
    if isinstance(given, str):
        parse_json(given.encode("utf-8", "replace"), "structured_outputs: json", GrammarError)
        return given
    if not isinstance(given, Mapping):
        raise GrammarError(f"structured_outputs: json: {shown(given)}: expected a JSON schema, which is an object")
    try:
        return json_text.dumps(dict(given), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise GrammarError(f"structured_outputs: json: is no JSON schema: {problem}") from None
