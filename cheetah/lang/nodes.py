"""Nodes: what a program is made of, expressions first, then statements. Each is frozen and carries the user's line.

What the operators mean (types, folding, refusals) is in `operators.py`, printing in `printer.py`; see `meaning.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import FrozenInstanceError, dataclass, field, fields
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar, Union

from cheetah.lang import types as ty
from cheetah.lang.errors import DeviceBoolError, Location, NoMemberError, TypeMixError, here
from cheetah.lang.meaning import meaning

if TYPE_CHECKING:
    from cheetah.lang.scope import Scope

Value: TypeAlias = Union["Expr", int, float, bool]
N = TypeVar("N", bound=Union["Expr", "Stmt"])


@dataclass(frozen=True, eq=False)
class Expr:
    """A device value of a known type."""

    type: ty.Type
    location: Location = field(default_factory=here, kw_only=True, repr=False)

    __hash__ = object.__hash__
    __array_ufunc__ = None  # a numpy number on the left leaves the operation to us

    def __bool__(self) -> NoReturn:
        raise DeviceBoolError(
            f"`{self}` is a value on the device: Python cannot branch on it while generating. "
            "Write `with ch.if_(...)`, `ch.select(...)`, or combine conditions with `&`, `|`, `~`."
        )

    def __iter__(self) -> NoReturn:
        raise TypeMixError(f"`{self}` is a value on the device and cannot be iterated over; use `ch.for_`.")

    def __index__(self) -> NoReturn:
        raise TypeMixError(
            f"`{self}` is a value on the device and Python needs an int here, while generating; "
            "use `ch.for_` to loop and a device array to look up."
        )

    def __float__(self) -> NoReturn:
        raise TypeMixError(f"`{self}` is a value on the device, not a Python float; convert it with `ty.f32(...)`.")

    def __str__(self) -> str:
        return meaning.text(self)

    def __getattr__(self, name: str) -> Expr:
        if name.startswith("__"):
            raise AttributeError(name)
        members = getattr(self.type, "fields", {})
        if name in members:
            return Member(members[name], self, name)
        raise NoMemberError(
            f"`{self}` of type {self.type} has no member `{name}`; its members: {', '.join(members) or 'none'}."
        )

    def __getitem__(self, index: Value) -> Expr:
        return meaning.subscript(self, index)

    def __setitem__(self, index: Value, value: Value) -> None:
        meaning.subscript(self, index).set(value)

    def set(self, value: Value) -> None:
        """Emit `self = value`: a variable, an element or a member gets a new value."""
        meaning.store(self, value)

    def __add__(self, other: Value) -> Expr:
        return meaning.binary("+", self, other)

    def __radd__(self, other: Value) -> Expr:
        return meaning.binary("+", other, self)

    def __sub__(self, other: Value) -> Expr:
        return meaning.binary("-", self, other)

    def __rsub__(self, other: Value) -> Expr:
        return meaning.binary("-", other, self)

    def __mul__(self, other: Value) -> Expr:
        return meaning.binary("*", self, other)

    def __rmul__(self, other: Value) -> Expr:
        return meaning.binary("*", other, self)

    def __truediv__(self, other: Value) -> Expr:
        return meaning.binary("/", self, other)

    def __rtruediv__(self, other: Value) -> Expr:
        return meaning.binary("/", other, self)

    def __floordiv__(self, other: Value) -> Expr:
        return meaning.binary("//", self, other)

    def __rfloordiv__(self, other: Value) -> Expr:
        return meaning.binary("//", other, self)

    def __mod__(self, other: Value) -> Expr:
        return meaning.binary("%", self, other)

    def __rmod__(self, other: Value) -> Expr:
        return meaning.binary("%", other, self)

    def __lshift__(self, other: Value) -> Expr:
        return meaning.binary("<<", self, other)

    def __rlshift__(self, other: Value) -> Expr:
        return meaning.binary("<<", other, self)

    def __rshift__(self, other: Value) -> Expr:
        return meaning.binary(">>", self, other)

    def __rrshift__(self, other: Value) -> Expr:
        return meaning.binary(">>", other, self)

    def __and__(self, other: Value) -> Expr:
        return meaning.binary("&", self, other)

    def __rand__(self, other: Value) -> Expr:
        return meaning.binary("&", other, self)

    def __or__(self, other: Value) -> Expr:
        return meaning.binary("|", self, other)

    def __ror__(self, other: Value) -> Expr:
        return meaning.binary("|", other, self)

    def __xor__(self, other: Value) -> Expr:
        return meaning.binary("^", self, other)

    def __rxor__(self, other: Value) -> Expr:
        return meaning.binary("^", other, self)

    def __lt__(self, other: Value) -> Expr:
        return meaning.binary("<", self, other)

    def __le__(self, other: Value) -> Expr:
        return meaning.binary("<=", self, other)

    def __gt__(self, other: Value) -> Expr:
        return meaning.binary(">", self, other)

    def __ge__(self, other: Value) -> Expr:
        return meaning.binary(">=", self, other)

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return meaning.binary("==", self, other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return meaning.binary("!=", self, other)

    def __neg__(self) -> Expr:
        return meaning.unary("-", self)

    def __invert__(self) -> Expr:
        return meaning.unary("~", self)


@dataclass(frozen=True, eq=False)
class Literal(Expr):
    value: int | float | bool


@dataclass(frozen=True, eq=False)
class Argument(Literal):
    """A static number that a function of the program takes as a parameter, not as a part of its text."""


@dataclass(frozen=True, eq=False)
class Constant(Expr):
    """A static number, or a structure of some, that the text calls by its name, defined once at the head of the
    file. comment: what stands behind its definition."""

    name: str
    value: Any
    comment: str = ""


@dataclass(frozen=True, eq=False)
class Name(Expr):
    """A bound name: a parameter, a constant, a loop counter or (mutable) a variable; visible inside `scopes`."""

    name: str
    scopes: tuple[Scope, ...] = field(repr=False)
    mutable: bool = False
    wanted: str = field(default="", repr=False)  # the Python name, where that was taken

    def _assign(self, value: Expr) -> Name:
        self.set(value)
        return self

    def __iadd__(self, other: Value) -> Name:
        return self._assign(self + other)

    def __isub__(self, other: Value) -> Name:
        return self._assign(self - other)

    def __imul__(self, other: Value) -> Name:
        return self._assign(self * other)

    def __itruediv__(self, other: Value) -> Name:
        return self._assign(self / other)

    def __ifloordiv__(self, other: Value) -> Name:
        return self._assign(self // other)

    def __imod__(self, other: Value) -> Name:
        return self._assign(self % other)

    def __ilshift__(self, other: Value) -> Name:
        return self._assign(self << other)

    def __irshift__(self, other: Value) -> Name:
        return self._assign(self >> other)

    def __iand__(self, other: Value) -> Name:
        return self._assign(self & other)

    def __ior__(self, other: Value) -> Name:
        return self._assign(self | other)

    def __ixor__(self, other: Value) -> Name:
        return self._assign(self ^ other)


@dataclass(frozen=True, eq=False)
class Unary(Expr):
    operator: str
    operand: Expr


@dataclass(frozen=True, eq=False)
class Binary(Expr):
    operator: str
    left: Expr
    right: Expr


@dataclass(frozen=True, eq=False)
class Select(Expr):
    condition: Expr
    if_true: Expr
    if_false: Expr


@dataclass(frozen=True, eq=False)
class Cast(Expr):
    operand: Expr


@dataclass(frozen=True, eq=False)
class Call(Expr):
    """A call of a primitive, of a function of the program, or of a C function that needs no definition."""

    function: str
    arguments: tuple[Expr, ...]
    callee: Any = None  # the Primitive or the Function that the text must define


@dataclass(frozen=True, eq=False)
class Subscript(Expr):
    base: Expr
    index: Expr


@dataclass(frozen=True, eq=False)
class Pointee(Subscript):
    """What a pointer points to, written `p->member`, where it is no array's first element."""


@dataclass(frozen=True, eq=False)
class Member(Expr):
    base: Expr
    member: str


@dataclass(frozen=True, eq=False)
class Builtin(Expr):
    """A value that CUDA provides, such as `threadIdx.x`."""

    text: str


@cache
def _fields_to_search(node: type[Any]) -> tuple[str, ...]:
    """The fields of a kind of node that by their declaration hold an expression, or may hold one."""
    kinds = ("Expr", "Name", "Call", "Expr | None")
    return tuple(item.name for item in fields(node) if item.type in kinds)


def walk(*expressions: Expr) -> list[Expr]:
    """Expressions and all that they are made of, each before its operands."""
    found: list[Expr] = []
    pending = [*reversed(expressions)]
    while pending:
        node = pending.pop()
        found.append(node)
        if isinstance(node, Call):
            pending += reversed(node.arguments)
        elif names := _fields_to_search(type(node)):  # type: ignore[arg-type]
            pending += [getattr(node, name) for name in reversed(names)]
    return found


def with_changes(node: N, **changes: Any) -> N:
    """The node with other values in some fields, as `dataclasses.replace` gives it, in a fraction of the time: a kernel
    is made of tens of thousands of nodes, and their classes check nothing when they are made."""
    made = object.__new__(type(node))
    made.__dict__.update(node.__dict__)
    made.__dict__.pop("nodes", None)  # what a statement has found of the old values
    made.__dict__.update(changes)
    return made


def _store_member(self: Expr, name: str, value: Value) -> None:
    """`place.member = value` emits a store; anything else about a node is fixed."""
    members = getattr(self.type, "fields", {})
    if name not in members:
        raise FrozenInstanceError(f"cannot assign to `{name}` of `{self}`")
    Member(members[name], self, name).set(value)


_NODES = (Literal, Argument, Constant, Name, Unary, Binary, Select, Cast, Call, Subscript, Pointee, Member, Builtin)
meaning.node_attributes = frozenset(item.name for node in _NODES for item in fields(node)) | {"set"}
for _node in _NODES:
    _node.__setattr__ = _store_member  # type: ignore[method-assign, assignment]


# -- statements -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stmt:
    location: Location = field(default_factory=here, kw_only=True, repr=False)

    def expressions(self) -> tuple[Expr, ...]:
        """The expressions written directly in this statement, not those of its bodies."""
        held = [getattr(self, name) for name in _fields_to_search(type(self))]  # type: ignore[arg-type]
        return tuple([value for value in held if value is not None])

    @cached_property
    def nodes(self) -> tuple[Expr, ...]:
        """The expressions written directly in this statement, with all that they are made of."""
        return tuple(walk(*self.expressions()))


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
    """A call for its effect."""

    call: Call


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

    def expressions(self) -> tuple[Expr, ...]:
        return tuple(operand for _, operand in self.operands)


@dataclass(frozen=True, eq=False)
class Jump(Stmt):
    word: str  # break, continue or return


@dataclass(frozen=True, eq=False)
class Return(Stmt):
    """The end of a function that gives a value."""

    value: Expr


def statements_in(statements: Iterable[Stmt]) -> list[Stmt]:
    """All statements, outer before inner."""
    found: list[Stmt] = []
    for statement in statements:
        found.append(statement)
        if isinstance(statement, If):
            found += statements_in(statement.body)
            found += statements_in(statement.otherwise)
        elif isinstance(statement, (For, While)):
            found += statements_in(statement.body)
    return found


def expressions_in(statements: Iterable[Stmt]) -> Iterator[Expr]:
    """All expressions of all statements, with all that they are made of."""
    for statement in statements_in(statements):
        yield from statement.nodes


# -- functions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Parameter:
    """What a function is given: a value, or (`by_reference`) a place of the caller that it may store to."""

    name: str
    type: ty.Type
    by_reference: bool


@dataclass(frozen=True, eq=False)
class Function:
    """A function of the program: one `__device__ __forceinline__` function of the text, under a comment."""

    name: str
    parameters: tuple[Parameter, ...]
    returns: ty.Type
    body: tuple[Stmt, ...]
    comment: str = ""
    changes: frozenset[str] = frozenset()
    """The members of the kernel that it stores to, itself or through what it calls."""
