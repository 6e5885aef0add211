"""Statement nodes: what a program is made of. The verbs that make them are in `binding`, `control` and `verbs`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from cheetah.lang import types as ty
from cheetah.lang.errors import Location, here
from cheetah.lang.expressions import Expr, Name


@dataclass(frozen=True, eq=False)
class Stmt:
    location: Location = field(default_factory=here, kw_only=True, repr=False)

    def expressions(self) -> Iterator[Expr]:
        """The expressions written directly in this statement, not those of its bodies."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Expr):
                yield value
            elif item.name == "operands":
                yield from (operand for _, operand in value)


@dataclass(frozen=True, eq=False)
class Declare(Stmt):
    name: Name
    value: Expr | None = None
    unrolled_zero: bool = False  # an array that starts as zeros
    fresh: bool = False  # a primitive's result whose stand-in name awaits the user's


@dataclass(frozen=True, eq=False)
class Assign(Stmt):
    target: Expr
    value: Expr


@dataclass(frozen=True, eq=False)
class If(Stmt):
    condition: Expr
    body: tuple[Stmt, ...]
    otherwise: tuple[Stmt, ...] = ()


@dataclass(frozen=True, eq=False)
class For(Stmt):
    counter: Name
    start: Expr
    stop: Expr
    step: Expr
    body: tuple[Stmt, ...]
    unroll: bool | int = False


@dataclass(frozen=True, eq=False)
class While(Stmt):
    condition: Expr
    body: tuple[Stmt, ...]


@dataclass(frozen=True, eq=False)
class Do(Stmt):
    """An expression for its effect: the call of a primitive."""

    call: Expr


@dataclass(frozen=True, eq=False)
class Raw(Stmt):
    text: str


@dataclass(frozen=True, eq=False)
class Comment(Stmt):
    text: str


@dataclass(frozen=True, eq=False)
class Asm(Stmt):
    """Inline PTX: `$name` stands for an operand; outputs are variables."""

    template: str
    operands: tuple[tuple[str, Expr], ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Jump(Stmt):
    word: str  # break, continue or return


def constraint_letter(type_: ty.Type) -> str | None:
    """The register class of an operand of inline PTX, or None where no register holds the type."""
    if isinstance(type_, ty.Pointer):
        return "l"
    if not isinstance(type_, ty.Scalar):
        return None
    return {
        ("float", 32): "f", ("float", 64): "d", ("uint", 16): "h", ("int", 16): "h", ("uint", 32): "r",
        ("int", 32): "r", ("uint", 64): "l", ("int", 64): "l",
    }.get((type_.kind, type_.bits))  # fmt: skip
