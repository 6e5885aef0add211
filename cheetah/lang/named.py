"""Static numbers that the text calls by a name: Python computes with them as with any int."""

from __future__ import annotations

from typing import Any

from cheetah.lang.errors import SignatureError


class Named(int):
    """An int with its text: a name, or one operation on names and numbers. defines: the names in the text, and what
    they stand for.

    What is made of it by more than that is a plain int again: a formula that is longer says less than its value.
    """

    text: str
    defines: tuple[tuple[str, int], ...]
    operator: str

    def __new__(cls, value: int, text: str, defines: tuple[tuple[str, int], ...], operator: str = "") -> Named:
        made = super().__new__(cls, value)
        made.text, made.defines, made.operator = text, defines, operator
        return made

    def __add__(self, other: Any) -> Any:
        return _combined("+", int.__add__(self, other), self, other)

    def __radd__(self, other: Any) -> Any:
        return _combined("+", int.__radd__(self, other), other, self)

    def __sub__(self, other: Any) -> Any:
        return _combined("-", int.__sub__(self, other), self, other)

    def __mul__(self, other: Any) -> Any:
        return _combined("*", int.__mul__(self, other), self, other)

    def __rmul__(self, other: Any) -> Any:
        return _combined("*", int.__rmul__(self, other), other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _combined("/", int.__floordiv__(self, other), self, other)


def named(name: str, value: int) -> Named:
    """A static number, below 2^32, that Python computes with as an int and that the text calls by its name, which it
    defines once: `blocks = ch.named("BLOCKS", 132)`. Of one operation on it, `blocks * 4`, the text makes `BLOCKS * 4`.
    SignatureError where the name is not in capitals (device values are not) or the number does not fit."""
    if not (name.isidentifier() and name.isupper() and 0 <= value < 2**32):
        raise SignatureError(f"ch.named: {name!r} for {value}: give a name in capitals, a number from 0 to 2^32 - 1.")
    return Named(value, name, ((name, int(value)),))


def _combined(operator: str, value: Any, left: Any, right: Any) -> Any:
    """One operation on a name and a number, or on two names; what changes nothing is left out."""
    if value is NotImplemented or not 0 <= value < 2**32:
        return value
    for same, neutral, operators in ((left, right, "+-*/"), (right, left, "+*")):
        if isinstance(same, Named) and same == value and operator in operators:
            if type(neutral) is int and neutral == (operator in "*/"):
                return same
    parts = [_part(left), _part(right)]
    if None in parts:
        return value
    defines = tuple(one for part in (left, right) if isinstance(part, Named) for one in part.defines)
    return Named(value, f"{parts[0]} {operator} {parts[1]}", defines, operator)


def _part(value: Any) -> str | None:
    if isinstance(value, Named):
        return None if value.operator else value.text
    return str(value) if type(value) is int else None
