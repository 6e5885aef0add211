"""Static numbers that the text calls by a name: Python computes with them as with any int."""

from __future__ import annotations

from typing import Any

from cheetah.lang.errors import SignatureError

MOST_OPERATIONS = 4
"""A formula that is longer says less than its value."""
_TIGHTNESS = {"+": 1, "-": 1, "*": 2, "/": 2, "%": 2, "": 3}
_ANY_ORDER = ("+", "*")


class Bits(int):
    """A pattern of bits, which the text writes in hexadecimal."""


class Named(int):
    """An int with its text: a name, or a formula of names and numbers. defines: the names in the text, and what they
    stand for. operator: the outermost of the formula's.

    What is made of it by more than MOST_OPERATIONS, or is beyond 32 bits, is a plain int again.
    """

    text: str
    defines: tuple[tuple[str, int], ...]
    operator: str
    operations: int

    def __new__(
        cls, value: int, text: str, defines: tuple[tuple[str, int], ...], operator: str = "", operations: int = 0
    ) -> Named:
        made = super().__new__(cls, value)
        made.text, made.defines, made.operator, made.operations = text, defines, operator, operations
        return made

    def __add__(self, other: Any) -> Any:
        return _combined("+", int.__add__(self, other), self, other)

    def __radd__(self, other: Any) -> Any:
        return _combined("+", int.__radd__(self, other), other, self)

    def __sub__(self, other: Any) -> Any:
        return _combined("-", int.__sub__(self, other), self, other)

    def __rsub__(self, other: Any) -> Any:
        return _combined("-", int.__rsub__(self, other), other, self)

    def __mul__(self, other: Any) -> Any:
        return _combined("*", int.__mul__(self, other), self, other)

    def __rmul__(self, other: Any) -> Any:
        return _combined("*", int.__rmul__(self, other), other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _combined("/", int.__floordiv__(self, other), self, other)

    def __mod__(self, other: Any) -> Any:
        return _combined("%", int.__mod__(self, other), self, other)


def named(name: str, value: int) -> Named:
    """A static number, below 2^64, that Python computes with as an int and that the text calls by its name, which it
    defines once: `blocks = ch.named("BLOCKS", 132)`. Of a formula with it, `blocks * 4 + 1`, the text makes
    `BLOCKS * 4 + 1`. SignatureError where the name is not in capitals (device values are not) or the number does not
    fit."""
    if not (name.isidentifier() and name.isupper() and 0 <= value < 2**64):
        raise SignatureError(f"ch.named: {name!r} for {value}: give a name in capitals, a number from 0 to 2^64 - 1.")
    return Named(value, name, ((name, value if isinstance(value, Bits) else int(value)),))


def bits(name: str, value: int) -> Named:
    """The same of a pattern of bits, such as a mask, which the text defines in hexadecimal."""
    return named(name, Bits(value))


def _combined(operator: str, value: Any, left: Any, right: Any) -> Any:
    """A formula of two; what changes nothing is left out."""
    if value is NotImplemented or not 0 < value < 2**32:
        return value
    for same, neutral, operators in ((left, right, "+-*/"), (right, left, "+*")):
        if isinstance(same, Named) and same == value and operator in operators:
            if type(neutral) is int and neutral == (operator in "*/"):
                return same
    operations = 1 + sum(part.operations for part in (left, right) if isinstance(part, Named))
    parts = [_part(left, operator, False), _part(right, operator, True)]
    if None in parts or operations > MOST_OPERATIONS:
        return value
    defines = tuple(one for part in (left, right) if isinstance(part, Named) for one in part.defines)
    return Named(value, f"{parts[0]} {operator} {parts[1]}", defines, operator, operations)


def _part(value: Any, around: str, is_right: bool) -> str | None:
    """The text of an operand, in parentheses where C needs them."""
    if not isinstance(value, Named):
        return str(value) if type(value) is int else None
    needed = _TIGHTNESS[around] + (is_right and not (around in _ANY_ORDER and value.operator == around))
    return value.text if _TIGHTNESS[value.operator] >= needed else f"({value.text})"
