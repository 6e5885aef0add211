"""What a completion's text shall be: JSON by a schema, a regular expression, one of several texts, a grammar, or any
text with JSON between marks.

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
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class GrammarError(CheetahError):
    """What a text shall be was not said, or cannot be done; the message begins with structured_outputs."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the text shall be: exactly one of the first six. Names are vLLM's.

    json: a JSON schema, as an object or as text. regex: a regular expression of the whole text, in the syntax of Rust's
    `regex` crate. choice: one of these texts. grammar: a context-free grammar, in Lark's or llama.cpp's (GBNF) form.
    json_object: any JSON object. structural_tag: any text, in which whatever starts with one of `triggers` goes on as
    one of `structures` does that begin so: its `begin`, JSON by its `schema`, its `end`; an object, or its JSON.
    whitespace_pattern: a regular expression of what may stand between two parts of JSON; by default a blank.
    disable_any_whitespace: nothing may.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | Mapping[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        asked = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(asked) != 1:
            what = f"{' and '.join(asked)} are given" if asked else "nothing is asked for"
            raise GrammarError(f"structured_outputs: {what}: give one of {', '.join(KINDS)}")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(given := getattr(self, name), bool):
                raise GrammarError(f"structured_outputs: {name}: {shown(given)} is neither true nor false")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise GrammarError(f"structured_outputs: {name}: {shown(getattr(self, name))} is no text")
        given = getattr(self, self.kind)
        _check_size(self.kind, given if isinstance(given, str) else "")  # before its JSON is read
        _check_size(self.kind, self.source)

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
        """Which of the six is asked for."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def source(self) -> str:
        """What is asked for as text: choices and schemas as JSON."""
        if self.json_object:
            return '{"type":"object"}'
        if self.json is not None:
            return _json_of(self.json, "json")
        if self.structural_tag is not None:
            return _tags(self.structural_tag)
        return json_text.dumps(self.choice) if self.choice is not None else self.regex or self.grammar or ""


def _check_size(kind: str, text: str) -> None:
    if (size := len(text.encode("utf-8", "replace"))) > GRAMMAR_BYTES:
        raise GrammarError(f"structured_outputs: {kind} has {size} bytes, at most {GRAMMAR_BYTES} are read")


def _choices(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise GrammarError(f"structured_outputs: choice: {shown(given)} is no list of texts")
    for text in given:
        if not isinstance(text, str) or not text:
            raise GrammarError(f"structured_outputs: choice: {shown(text)} is not a text of at least one character")
    if not given:
        raise GrammarError("structured_outputs: choice: there are no texts to choose from")
    return tuple(given)


def _json_of(given: Any, kind: str) -> str:
    """The JSON of an object, whatever it was given as."""
    if isinstance(given, str):
        parse_json(given.encode("utf-8", "replace"), f"structured_outputs: {kind}", GrammarError)
        return given
    if not isinstance(given, Mapping):
        wanted = "a JSON schema, which is an object" if kind == "json" else "an object"
        raise GrammarError(f"structured_outputs: {kind}: {shown(given)}: expected {wanted}")
    try:
        return json_text.dumps(dict(given), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        what = "no JSON schema" if kind == "json" else "no JSON"
        raise GrammarError(f"structured_outputs: {kind}: is {what}: {problem}") from None


def _tags(given: Any) -> str:
    """A structural tag as JSON: a list of objects with trigger, begin, schema and end."""
    place = "structured_outputs: structural_tag"
    asked = parse_json(_json_of(given, "structural_tag").encode("utf-8", "replace"), place, GrammarError)
    triggers, structures = asked.get("triggers"), asked.get("structures")
    if not isinstance(triggers, list) or not all(isinstance(text, str) and text for text in triggers):
        raise GrammarError(f"{place}: triggers: {shown(triggers)}: expected a list of texts")
    if not isinstance(structures, list) or not structures:
        raise GrammarError(f"{place}: structures: {shown(structures)}: expected a list of begin, schema and end")
    return json_text.dumps([_tag(one, triggers, place) for one in structures])


def _tag(structure: Any, triggers: Sequence[str], place: str) -> dict[str, Any]:
    found = structure if isinstance(structure, dict) else {}
    begin, end, schema = found.get("begin"), found.get("end"), found.get("schema")
    if not (isinstance(begin, str) and isinstance(end, str) and isinstance(schema, dict)):
        raise GrammarError(f"{place}: {shown(structure)}: expected begin and end, which are texts, and a JSON schema")
    if (trigger := next((text for text in triggers if begin.startswith(text)), None)) is None:
        raise GrammarError(f"{place}: {shown(begin)} begins like none of the triggers {shown(triggers)}")
    return {"trigger": trigger, "begin": begin, "schema": schema, "end": end}
