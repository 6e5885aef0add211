"""Typed access to the fields of a configuration that others wrote; a refusal names place, field, value and choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cheetah.models.config_json import ConfigError
from cheetah.printable import shown

MOST_GROUP_COLUMNS = 2**16
MOST_NAMES = 100_000


class Fields:
    """One object of a configuration; null is as good as absent."""

    def __init__(self, values: Mapping[str, Any], place: str, within: str = "") -> None:
        self.values = {name: value for name, value in values.items() if value is not None}
        self.place, self._within = place, within

    def inner(self, name: str, value: object) -> Fields:
        """The fields of an object inside this one."""
        if not isinstance(value, Mapping):
            raise self.error(f"{name} = {shown(value)}: must be an object")
        return Fields(value, self.place, f"{self._within}{name}.")

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self.error(f"{name} = {shown(value)}: must be a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise self.error(f"{name} = {shown(value)}: must be true or false")
        return value

    def choice(self, name: str, choices: tuple[Any, ...], default: Any = None) -> Any:
        """One of some values of one type."""
        value = self.values.get(name, default)
        if value is None:
            raise self.error(f"{name} is missing: write {_listed(choices)}")
        if type(value) is not type(choices[0]) or value not in choices:
            raise self.error(f"{name} = {shown(value)} is not supported: supported: {_listed(choices)}")
        return value

    def group_size(self, name: str) -> int | None:
        """Columns of a group; None for -1, the whole row."""
        value = self.values.get(name)
        if value == -1 and type(value) is int:
            return None
        return self._count(name, value, f"a positive integer, at most {MOST_GROUP_COLUMNS}, or -1")

    def block(self, name: str) -> tuple[int, int] | None:
        """Rows and columns of a block; None where the field is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2:
            raise self.error(f"{name} = {shown(value)}: must be [rows, columns] of a block")
        wanted = f"positive integers, at most {MOST_GROUP_COLUMNS}"
        return self._count(name, value[0], wanted), self._count(name, value[1], wanted)

    def names(self, name: str) -> list[str]:
        """A list of strings, empty where the field is absent."""
        value = self.values.get(name, [])
        if not isinstance(value, list) or len(value) > MOST_NAMES or any(not isinstance(one, str) for one in value):
            raise self.error(f"{name} = {shown(value)}: must be a list of modules' names")
        return value

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.place}: quantization: {self._within}{message}")

    def _count(self, name: str, value: object, wanted: str) -> int:
        if type(value) is not int or not 1 <= value <= MOST_GROUP_COLUMNS:
            raise self.error(f"{name} = {shown(value)}: must be {wanted}")
        return value


def _listed(choices: tuple[Any, ...]) -> str:
    return " or ".join(repr(choice) for choice in choices)
