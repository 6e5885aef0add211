"""Options that are described once: a record's fields with what each does, of which functions and commands are made.

Knows no option itself, and imports nothing that takes long: commands are declared before anything is run.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Concatenate, ParamSpec, TypeVar

Given = ParamSpec("Given")
First = TypeVar("First")
Record = TypeVar("Record")
Result = TypeVar("Result")

WIDTH = 120
ABOUT = "about"


@dataclass(frozen=True)
class About:
    """What an option does. help: a sentence or two, which commands show; more: what else a reader of Python's
    documentation should know. kind: its type as a command's option, None where commands have none of it. least, most:
    of a number. aliases: what it may be called besides, in Python and as a command's option."""

    help: str
    more: str = ""
    kind: Any = None
    least: float | None = None
    most: float | None = None
    aliases: tuple[str, ...] = ()


def option(default: Any, kind: Any, help: str, more: str = "", **others: Any) -> Any:
    """A field of a record of options; see `About`."""
    return field(default=default, metadata={ABOUT: About(help, more, kind, **others)})


def options_of(record: type) -> dict[str, Field[Any]]:
    """Its fields that are options, by name, in order."""
    return {one.name: one for one in fields(record) if ABOUT in one.metadata}


def about(one: Field[Any]) -> About:
    """What a field that is an option says of itself."""
    found = one.metadata[ABOUT]
    assert isinstance(found, About)
    return found


def aliases_of(record: type) -> dict[str, str]:
    """The name of the option by each of its aliases."""
    return {alias: name for name, one in options_of(record).items() for alias in about(one).aliases}


def takes(
    record: Callable[Given, Record], own_names: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
) -> Callable[[Callable[[First, Record], Result]], Callable[Concatenate[First, Given], Result]]:
    """Has a function of something and a record be called with the record's fields instead, by their names.

    own_names: makes names of fields of those that were given."""
    signature = inspect.signature(record)

    def decorate(function: Callable[[First, Record], Result]) -> Callable[Concatenate[First, Given], Result]:
        first = next(iter(inspect.signature(function).parameters.values()))

        @functools.wraps(function)
        def with_fields(first: First, /, *arguments: Given.args, **keywords: Given.kwargs) -> Result:
            bound = signature.bind(*arguments, **own_names(keywords))
            return function(first, record(*bound.args, **bound.kwargs))

        with_fields.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[first, *signature.parameters.values()], return_annotation=inspect.Signature.empty
        )
        return with_fields

    return decorate


def described(record: type) -> str:
    """All of them for a docstring: a paragraph each."""
    paragraphs = []
    for name, one in options_of(record).items():
        said = about(one)
        default = "" if one.default in (None, MISSING) else f" ({one.default!r})"
        aliases = f" Also {', '.join(said.aliases)}." if said.aliases else ""
        text = f"{name}{default}: {said.help}{' ' if said.more else ''}{said.more}{aliases}"
        paragraphs.append(textwrap.fill(text, WIDTH, subsequent_indent="    "))
    return "\n".join(paragraphs)
