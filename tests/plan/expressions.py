"""A stand-in for a device expression: arithmetic only, evaluated later, of no truth value."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Symbol:
    """Prints as C-like text with + - * // % and refuses everything that a device value refuses."""

    text: str

    def __bool__(self) -> bool:
        raise TypeError(f"{self.text} is a device value: it has no truth value while generating")

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"{self.text} was compared while generating")

    __hash__ = None  # type: ignore[assignment]

    def evaluate(self, **values: int) -> int:
        return eval(self.text, {}, values)


def _operator(sign: str, swapped: bool) -> Any:
    def apply(self: Symbol, other: Any) -> Symbol:
        mine, theirs = self.text, other.text if isinstance(other, Symbol) else str(other)
        left, right = (theirs, mine) if swapped else (mine, theirs)
        return Symbol(f"({left} {sign} {right})")

    return apply


for _name, _sign in {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}.items():
    setattr(Symbol, f"__{_name}__", _operator(_sign, swapped=False))
    setattr(Symbol, f"__r{_name}__", _operator(_sign, swapped=True))


def evaluate(value: Any, **values: int) -> int:
    """The number behind an int or a Symbol."""
    return value.evaluate(**values) if isinstance(value, Symbol) else value
