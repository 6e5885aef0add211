"""What a request says that its answer's text shall be: OpenAI's fields, vLLM's, and calls of tools that must be made.

Knows nothing of how a text is made to be so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cheetah.printable import shown
from cheetah.runtime import StructuredOutputsParams
from cheetah.runtime.structured_outputs import GrammarError
from cheetah.runtime.text.grammars import WHITESPACE
from cheetah.serve.errors import ApiError, refused
from cheetah.serve.records import GUIDED_FIELDS, Sampled
from cheetah.serve.tools import CallForm

TOOL_NAME = "[a-zA-Z0-9_-]{1,64}"


@dataclass(frozen=True)
class Structure:
    """What a text shall be, and the field of the request that says so."""

    field: str
    wanted: StructuredOutputsParams


def structure_of(body: Sampled) -> Structure | None:
    """What the fields of a body ask for; None if they leave the text free. ApiError names the field that is wrong."""
    readers: dict[str, Callable[[Any], StructuredOutputsParams | None]] = {
        "response_format": _of_response_format,
        "structured_outputs": StructuredOutputsParams.of,
        **{name: lambda given, name=name: _of_guided(name, given) for name in GUIDED_FIELDS},  # type: ignore[misc]
    }
    found: list[Structure] = []
    for field, read in readers.items():
        if (given := getattr(body, field)) is not None:
            with _named(field):
                found += [Structure(field, wanted) for wanted in [read(given)] if wanted is not None]
    if len(found) > 1:
        raise refused(found[1].field, f"{found[0].field} says already what the text shall be: give one of them")
    return found[0] if found else None


def structure_of_text(text: Mapping[str, Any] | None) -> Structure | None:
    """What `text` of /v1/responses asks for."""
    with _named("text"):
        wanted = _of_text_format(text or {})
    return None if wanted is None else Structure("text", wanted)


def structure_of_calls(form: CallForm, tools: Sequence[Mapping[str, Any]], name: str | None, one: bool) -> Structure:
    """At least one call of one of `tools`, or of the one of that name, exactly one if `one`, with arguments that follow
    the tool's schema. What of a schema is not supported is passed over where the tool is not `strict`."""
    functions = [function_of(tool) for tool in tools]
    chosen = [function for function in functions if name in (None, function["name"])]
    if not chosen:
        raise refused("tool_choice", f"there is no tool {shown(name)}")
    rules = ["start: call" + ("" if one else f" ({_literal(form.between)} call)*")]
    rules.append("call: " + " | ".join(f"c{number}" for number in range(len(chosen))))
    for number, function in enumerate(chosen):
        before = f"{form.before}{json.dumps(function['name'])}{form.middle}"
        rules.append(f"c{number}: {_literal(before)} a{number} {_literal(form.after)}")
        rules.append(f"a{number}: %json {_arguments(function)}")
    with _named("tools"):
        return Structure("tools", StructuredOutputsParams(grammar="\n".join(rules)))


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a tool says of its function, whose name is one that OpenAI takes."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refused("tools", f"{shown(tool)}: expected an object of type function, with its name")
    if not re.fullmatch(TOOL_NAME, function["name"]):
        raise refused("tools", f"the name {shown(function['name'])}: expected {TOOL_NAME}")
    return function


def of_grammar(structure: Structure, problem: GrammarError) -> ApiError:
    """400 that names the field which asked for a text that cannot be."""
    return refused(structure.field, str(problem).removeprefix("structured_outputs: "))


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Makes of what is wrong in here a refusal of the field."""
    try:
        yield
    except GrammarError as problem:
        raise refused(field, str(problem).removeprefix("structured_outputs: ")) from None


def _of_response_format(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    if given.get("type") == "structural_tag":
        return StructuredOutputsParams(structural_tag=given)
    if given.get("type") != "json_schema":
        return _of_kind(given)
    return _of_schema(given.get("json_schema"), "json_schema.schema")


def _of_text_format(text: Mapping[str, Any]) -> StructuredOutputsParams | None:
    if others := sorted(text.keys() - {"format", "verbosity"}):
        raise GrammarError(f"{others[0]} is not supported")
    given = text.get("format") or {"type": "text"}
    if not isinstance(given, Mapping):
        raise GrammarError(f"format: {shown(given)} is no object")
    return _of_schema(given, "format.schema") if given.get("type") == "json_schema" else _of_kind(given)


def _of_kind(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind = given.get("type")
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "text":
        raise GrammarError(f"type: {shown(kind)}: expected text, json_object or json_schema")
    return None


def _of_schema(holder: Any, place: str) -> StructuredOutputsParams:
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if not isinstance(schema, Mapping):
        raise GrammarError(f"{place}: {shown(schema)}: expected a JSON schema, which is an object")
    return StructuredOutputsParams(json=schema)


def _of_guided(name: str, given: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**{name.removeprefix("guided_"): given})


def _arguments(function: Mapping[str, Any]) -> str:
    """The schema of a function's arguments, with how it is read, as JSON."""
    schema = function.get("parameters") or {"type": "object"}
    if not isinstance(schema, Mapping):
        raise refused("tools", f"parameters of {shown(function['name'])}: expected a JSON schema, which is an object")
    reading = {"whitespace_pattern": WHITESPACE, "lenient": not function.get("strict")}
    try:
        return json.dumps({**schema, "x-guidance": reading})
    except (ValueError, RecursionError) as problem:
        raise refused("tools", f"parameters of {shown(function['name'])}: {problem}") from None


def _literal(text: str) -> str:
    """A text as a grammar in Lark's form writes it."""
    return json.dumps(text)
