"""JSON values as frozen dataclasses: every field there, none unknown, each of its annotated type.

For manifests and caches, which may have been written by another version, edited by hand or damaged.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from cheetah.errors import CheetahError
from cheetah.printable import shown, shown_name

Record = TypeVar("Record")


def record_from_json(record_type: type[Record], data: object, place: str, error: type[CheetahError]) -> Record:
    """The record that a JSON value holds; `error` names the field that is missing, unknown or mistyped.

    Fields may be str, int, float (an integer will do), bool, None, Any, tuples and dicts of these, records, and unions.
    """
    return _Reader(error).record(record_type, data, place)


def first_difference(found: Any, expected: Any, place: str = "") -> str | None:
    """Where two JSON values differ, what is found there and what is expected; None if they are equal.

    Entries of a list that have a name are called by it.
    """
    if isinstance(found, dict) and isinstance(expected, dict):
        return _difference_of_entries(found, expected, f"{place}." if place else "")
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        return _difference_of_lists(found, expected, place)
    if found == expected and isinstance(found, bool) == isinstance(expected, bool):
        return None
    return f"{place} is {shown(found)}, expected {shown(expected)}"


def _difference_of_lists(found: Sequence[Any], expected: Sequence[Any], place: str) -> str | None:
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=False)):
        name = theirs.get("name", index) if isinstance(theirs, dict) else index
        if difference := first_difference(mine, theirs, f"{place}[{name}]"):
            return difference
    if len(found) != len(expected):
        return f"{place} has {len(found)} entries, expected {len(expected)}"
    return None


def _difference_of_entries(found: Mapping[str, Any], expected: Mapping[str, Any], place: str) -> str | None:
    for name in (*expected, *found):
        if name not in found or name not in expected:
            return f"{place}{shown_name(name)} is {'missing' if name in expected else 'not known'}"
        if difference := first_difference(found[name], expected[name], f"{place}{name}"):
            return difference
    return None


class _Reader:
    """Raises one kind of error."""

    def __init__(self, error: type[CheetahError]) -> None:
        self._error = error

    def record(self, record_type: type[Record], data: object, place: str) -> Record:
        if not isinstance(data, dict):
            raise self._error(f"{place} must be an object, not {type(data).__name__}")
        hints = typing.get_type_hints(record_type)
        fields = dataclasses.fields(record_type)  # type: ignore[arg-type]
        unknown = sorted(set(data) - {field.name for field in fields})
        self._require(not unknown, f"{place}: unknown field {', '.join(map(shown_name, unknown[:8]))}")
        missing = [field.name for field in fields if field.name not in data and field.default is dataclasses.MISSING]
        self._require(not missing, f"{place}: missing field {', '.join(missing)}")
        return record_type(**{name: self._value(hints[name], value, f"{place}.{name}") for name, value in data.items()})

    def _value(self, hint: Any, value: Any, place: str) -> Any:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return value
        if origin is types.UnionType:
            return self._one_of(arguments, value, place)
        if origin is tuple:
            self._require(isinstance(value, list), f"{place} must be a list, not {type(value).__name__}")
            return tuple(self._value(arguments[0], entry, f"{place}[{index}]") for index, entry in enumerate(value))
        if origin is dict:
            self._require(isinstance(value, dict), f"{place} must be of type dict, not {type(value).__name__}")
            return self._entries(arguments[1], value, place)
        if dataclasses.is_dataclass(hint):
            return self.record(typing.cast("type[Any]", hint), value, place)
        if hint is float and type(value) is int and abs(value) <= 2**53:
            return float(value)
        self._require(type(value) is hint, f"{place} must be of type {hint.__name__}, not {type(value).__name__}")
        return value

    def _entries(self, hint: Any, value: Mapping[str, Any], place: str) -> dict[str, Any]:
        return {name: self._value(hint, entry, f"{place}.{shown_name(name)}") for name, entry in value.items()}

    def _one_of(self, choices: tuple[Any, ...], value: Any, place: str) -> Any:
        if value is None and types.NoneType in choices:
            return None
        matching = [choice for choice in choices if type(value) is choice or typing.get_origin(choice) is tuple]
        self._require(bool(matching), f"{place} has the wrong type {type(value).__name__}")
        return self._value(matching[0], value, place)

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise self._error(message)
