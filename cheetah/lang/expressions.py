"""Expression nodes and the operators that build them. Constants fold here; there is no other optimisation.

Every node is a frozen dataclass with the user's file and line. Python ints, floats and bools become literals of the
other operand's type; two device values of different types never mix silently.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn, Union

from cheetah.lang import types as ty
from cheetah.lang.errors import DeviceBoolError, Location, RangeError, TypeMixError, here

if TYPE_CHECKING:
    from cheetah.lang.scope import Scope

Value = Union["Expr", int, float, bool]


@dataclass(frozen=True, eq=False)
class Expr:
    """A device value of a known type."""

    type: ty.Type
    location: Location = field(default_factory=here, kw_only=True, repr=False)

    __hash__ = object.__hash__

    def __bool__(self) -> NoReturn:
        raise DeviceBoolError(
            f"`{self}` is a value on the device: Python cannot branch on it while generating. "
            "Write `with ch.if_(...)`, `ch.select(...)`, or combine conditions with `&`, `|`, `~`."
        )

    def __iter__(self) -> NoReturn:
        raise TypeMixError(f"`{self}` is a value on the device and cannot be iterated over; use `ch.for_`.")

    def __str__(self) -> str:
        from cheetah.lang.render import render_expression

        return render_expression(self)

    def __getattr__(self, name: str) -> Expr:
        if name.startswith("__"):
            raise AttributeError(name)
        members = getattr(self.type, "fields", {})
        if name in members:
            return Member(members[name], self, name)
        raise AttributeError(f"`{self}` of type {self.type} has no member `{name}`; members: {', '.join(members) or 'none'}")

    def __getitem__(self, index: Value) -> Expr:
        return subscript(self, index)

    def __setitem__(self, index: Value, value: Value) -> None:
        from cheetah.lang.statements import store

        store(subscript(self, index), value)

    def __add__(self, other: Value) -> Expr:
        return binary("+", self, other)

    def __radd__(self, other: Value) -> Expr:
        return binary("+", other, self)

    def __sub__(self, other: Value) -> Expr:
        return binary("-", self, other)

    def __rsub__(self, other: Value) -> Expr:
        return binary("-", other, self)

    def __mul__(self, other: Value) -> Expr:
        return binary("*", self, other)

    def __rmul__(self, other: Value) -> Expr:
        return binary("*", other, self)

    def __truediv__(self, other: Value) -> Expr:
        return binary("/", self, other)

    def __rtruediv__(self, other: Value) -> Expr:
        return binary("/", other, self)

    def __floordiv__(self, other: Value) -> Expr:
        return binary("//", self, other)

    def __rfloordiv__(self, other: Value) -> Expr:
        return binary("//", other, self)

    def __mod__(self, other: Value) -> Expr:
        return binary("%", self, other)

    def __rmod__(self, other: Value) -> Expr:
        return binary("%", other, self)

    def __lshift__(self, other: Value) -> Expr:
        return binary("<<", self, other)

    def __rlshift__(self, other: Value) -> Expr:
        return binary("<<", other, self)

    def __rshift__(self, other: Value) -> Expr:
        return binary(">>", self, other)

    def __rrshift__(self, other: Value) -> Expr:
        return binary(">>", other, self)

    def __and__(self, other: Value) -> Expr:
        return binary("&", self, other)

    def __rand__(self, other: Value) -> Expr:
        return binary("&", other, self)

    def __or__(self, other: Value) -> Expr:
        return binary("|", self, other)

    def __ror__(self, other: Value) -> Expr:
        return binary("|", other, self)

    def __xor__(self, other: Value) -> Expr:
        return binary("^", self, other)

    def __rxor__(self, other: Value) -> Expr:
        return binary("^", other, self)

    def __lt__(self, other: Value) -> Expr:
        return binary("<", self, other)

    def __le__(self, other: Value) -> Expr:
        return binary("<=", self, other)

    def __gt__(self, other: Value) -> Expr:
        return binary(">", self, other)

    def __ge__(self, other: Value) -> Expr:
        return binary(">=", self, other)

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return binary("==", self, other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return binary("!=", self, other)

    def __neg__(self) -> Expr:
        return unary("-", self)

    def __invert__(self) -> Expr:
        return unary("~", self)


@dataclass(frozen=True, eq=False)
class Literal(Expr):
    value: int | float | bool


@dataclass(frozen=True, eq=False)
class Name(Expr):
    """A bound name: a parameter, a constant, a loop counter or (mutable) a variable; visible inside `scopes`."""

    name: str
    scopes: tuple[Scope, ...]
    mutable: bool = False

    def set(self, value: Value) -> None:
        """Emit `name = value`."""
        from cheetah.lang.statements import store

        store(self, value)

    def __iadd__(self, other: Value) -> Name:
        self.set(self + other)
        return self

    def __isub__(self, other: Value) -> Name:
        self.set(self - other)
        return self

    def __imul__(self, other: Value) -> Name:
        self.set(self * other)
        return self

    def __ixor__(self, other: Value) -> Name:
        self.set(self ^ other)
        return self


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
    """A call of a primitive or of a C function; `primitive` is what the prelude must define."""

    function: str
    arguments: tuple[Expr, ...]
    primitive: Any = None


@dataclass(frozen=True, eq=False)
class Subscript(Expr):
    base: Expr
    index: Expr


@dataclass(frozen=True, eq=False)
class Member(Expr):
    base: Expr
    member: str


@dataclass(frozen=True, eq=False)
class Builtin(Expr):
    """A value that CUDA provides, such as `threadIdx.x`."""

    text: str


def children(expression: Expr) -> Iterator[Expr]:
    """The direct operands of an expression."""
    for item in fields(expression):
        value = getattr(expression, item.name)
        if isinstance(value, Expr):
            yield value
        elif item.name == "arguments":
            yield from value


def walk(expression: Expr) -> Iterator[Expr]:
    """An expression and all that it is made of."""
    yield expression
    for child in children(expression):
        yield from walk(child)


_LIMITS = {ty.u8: (0, 2**8), ty.u16: (0, 2**16), ty.u32: (0, 2**32), ty.u64: (0, 2**64), ty.i32: (-(2**31), 2**31), ty.i64: (-(2**63), 2**63)}


def lift(value: object, type_: ty.Type) -> Expr:
    """`value` as an expression of exactly `type_`: device values must have it, Python numbers become literals."""
    if isinstance(value, Expr):
        if value.type == type_:
            return value
        raise TypeMixError(f"`{value}` has type {value.type} where {type_} is needed; convert it, e.g. `ty.u32({value})`.")
    if not isinstance(type_, ty.Scalar) or not isinstance(value, (bool, int, float)):
        raise TypeMixError(f"{value!r} cannot become a device value of type {type_}.")
    if isinstance(value, float) and type_.kind != "float" or isinstance(value, bool) != (type_.kind == "bool"):
        raise TypeMixError(f"the Python value {value!r} cannot become a device value of type {type_}.")
    if type_.is_integer:
        low, high = _LIMITS[type_]
        if not low <= value < high:
            raise RangeError(f"{value} does not fit {type_}, which holds {low} to {high - 1}.")
    return Literal(type_, float(value) if type_.kind == "float" else value)


def natural(value: object) -> Expr:
    """`value` as an expression; a Python int becomes u32 (i32 when negative), a float f32, a bool bool."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, bool):
        return lift(value, ty.boolean)
    if isinstance(value, int):
        return lift(value, ty.i32 if value < 0 else ty.u32 if value < 2**32 else ty.u64)
    return lift(value, ty.f32)


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod,
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip
_COMPARISON: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def binary(op: str, left: object, right: object) -> Expr:
    """`left op right`; integers divide with `//` (unsigned only: C truncates, Python floors), floats with `/`."""
    if isinstance(left, Expr) and isinstance(left.type, ty.Pointer):
        return _pointer_arithmetic(op, left, right)
    a, b = _same_type(op, left, right)
    _require_operator(op, a, b)
    if isinstance(a, Literal) and isinstance(b, Literal):
        return _fold(op, a, b)
    if op in _COMPARISON:
        return Binary(ty.boolean, op, a, b)
    simpler = _identity(op, a, b)
    return Binary(a.type, op, a, b) if simpler is None else simpler


def _same_type(op: str, left: object, right: object) -> tuple[Expr, Expr]:
    if isinstance(left, Expr) and isinstance(right, Expr):
        if left.type != right.type and not op.endswith(("<<", ">>")):
            raise TypeMixError(
                f"`{left}` ({left.type}) {op} `{right}` ({right.type}): the types differ; convert one side, e.g. `ty.u64({right})`."
            )
        return left, right
    if isinstance(left, Expr):
        return left, lift(right, left.type)
    assert isinstance(right, Expr)
    return lift(left, right.type), right


def _require_operator(op: str, a: Expr, b: Expr) -> None:
    kind = a.type.kind if isinstance(a.type, ty.Scalar) else "other"
    allowed = {
        "uint": "+ - * // % << >> & | ^ < <= > >= == !=",
        "int": "+ - * << >> & | ^ < <= > >= == !=",
        "float": "+ - * / < <= > >= == !=",
        "bool": "& | ^ == !=",
    }.get(kind, "")
    if op not in allowed.split():
        hint = {
            ("int", "//"): " C truncates where Python floors; convert to unsigned first.",
            ("int", "%"): " C truncates where Python floors; convert to unsigned first.",
            ("uint", "/"): " Integers divide with `//`.",
            ("int", "/"): " Integers divide with `//`.",
            ("bf16", op): " Convert with `bf16_to_f32` first.",
        }.get((kind, op), "")
        raise TypeMixError(f"`{a}` {op} `{b}`: {a.type} has no operator `{op}`.{hint}")


def _fold(op: str, a: Literal, b: Literal) -> Expr:
    if op in _COMPARISON:
        return Literal(ty.boolean, _COMPARISON[op](a.value, b.value))
    if op in ("//", "%", "/") and b.value == 0:
        raise RangeError(f"division of the constant {a.value} by zero.")
    result = _ARITHMETIC[op](a.value, b.value)
    type_ = a.type
    assert isinstance(type_, ty.Scalar)
    if type_.kind == "uint":
        result %= 1 << type_.bits
    return lift(result, type_)


def _identity(op: str, a: Expr, b: Expr) -> Expr | None:
    """x+0, x-0, x*1, x//1, x*0, x%1 on integers: index arithmetic over static dimensions makes many of these."""
    if not (isinstance(a.type, ty.Scalar) and a.type.is_integer):
        return None
    if isinstance(b, Literal):
        if b.value == 0 and op in ("+", "-", "<<", ">>", "|", "^") or b.value == 1 and op in ("*", "//"):
            return a
        if b.value == 0 and op in ("*", "&") or b.value == 1 and op == "%":
            return Literal(a.type, 0)
        if b.value == 0 and op in ("//", "%"):
            raise RangeError(f"division of `{a}` by the constant zero.")
    if isinstance(a, Literal):
        if a.value == 0 and op in ("+", "|", "^") or a.value == 1 and op == "*":
            return b
        if a.value == 0 and op in ("*", "//", "%", "&", "<<", ">>"):
            return Literal(a.type, 0)
    return None


def _pointer_arithmetic(op: str, pointer: Expr, offset: object) -> Expr:
    if op in ("==", "!=") and isinstance(offset, Expr) and offset.type == pointer.type:
        return Binary(ty.boolean, op, pointer, offset)
    if op in ("==", "!=") and offset is None:
        return Binary(ty.boolean, op, pointer, Builtin(pointer.type, "nullptr"))
    if op not in ("+", "-"):
        raise TypeMixError(f"`{pointer}` {op} ...: a pointer has only +, -, == and !=.")
    index = natural(offset)
    if not (isinstance(index.type, ty.Scalar) and index.type.is_integer):
        raise TypeMixError(f"`{pointer}` {op} `{index}`: a pointer moves by integers, not by {index.type}.")
    if isinstance(index, Literal) and index.value == 0:
        return pointer
    return Binary(pointer.type, op, pointer, index)


def unary(op: str, value: Expr) -> Expr:
    """`-value`, or `~value` (`!` for a condition)."""
    type_ = value.type
    if not isinstance(type_, ty.Scalar) or type_.kind in ("bf16", "void") or op == "-" and type_.kind == "bool":
        raise TypeMixError(f"{op}`{value}`: {type_} has no such operator.")
    if op == "~" and type_.kind == "bool":
        return Literal(type_, not value.value) if isinstance(value, Literal) else Unary(type_, "!", value)
    if op == "~" and type_.kind == "float":
        raise TypeMixError(f"~`{value}`: {type_} has no bits to invert; use `float_bits`.")
    if isinstance(value, Literal):
        folded = -value.value if op == "-" else ~value.value  # type: ignore[operator]
        return lift(folded % (1 << type_.bits) if type_.kind == "uint" else folded, type_)
    return Unary(type_, op, value)


def subscript(base: Expr, index: Value) -> Expr:
    """`base[index]` of a pointer or a local array; a static index is checked against the array's length."""
    if not isinstance(base.type, (ty.Pointer, ty.Array)):
        raise TypeMixError(f"`{base}` of type {base.type} cannot be indexed; only pointers and arrays can.")
    position = natural(index)
    if not (isinstance(position.type, ty.Scalar) and position.type.is_integer):
        raise TypeMixError(f"`{base}` is indexed by `{position}` of type {position.type}; an index is an integer.")
    if isinstance(base.type, ty.Array) and isinstance(position, Literal) and not 0 <= position.value < base.type.length:
        raise RangeError(f"index {position.value} of `{base}`, which has {base.type.length} elements.")
    return Subscript(base.type.element, base, position)


def cast(type_: ty.Type, value: Value) -> Expr:
    """`value` converted to `type_` (C's rules); a literal is converted at once."""
    if not isinstance(value, Expr):
        if isinstance(type_, ty.Scalar) and type_.kind == "float" or not isinstance(value, float):
            return lift(value, type_)
        return lift(int(value), type_)
    if value.type == type_:
        return value
    if isinstance(value, Literal) and isinstance(type_, ty.Scalar) and type_.is_integer and isinstance(value.value, int):
        return lift(value.value, type_)
    return Cast(type_, value)


def select(condition: Value, if_true: Value, if_false: Value) -> Expr:
    """`condition ? if_true : if_false`; both values have one type."""
    test = lift(condition, ty.boolean)
    a, b = _same_type("select", if_true, if_false) if isinstance(if_true, Expr) or isinstance(if_false, Expr) else (natural(if_true), natural(if_false))
    if isinstance(test, Literal):
        return a if test.value else b
    return Select(a.type, test, a, b)


def minimum(a: Value, b: Value) -> Expr:
    """The smaller of two integers, as a selection."""
    left, right = _same_type("minimum", a, b)
    return select(binary("<", left, right), left, right)


def reinterpret(type_: ty.Pointer, pointer: Expr) -> Expr:
    """`pointer` as a pointer to another type; constness may be added, never removed."""
    if not isinstance(pointer.type, ty.Pointer):
        raise TypeMixError(f"`{pointer}` of type {pointer.type} is no pointer.")
    if type_.mutable and not pointer.type.mutable:
        raise TypeMixError(f"`{pointer}` is {pointer.type}: its constness cannot be cast away.")
    return pointer if pointer.type == type_ else Cast(type_, pointer)


def address_of(place: Expr) -> Expr:
    """`&place`, of an element or member that can be stored to or read."""
    if not isinstance(place, (Subscript, Member)):
        raise TypeMixError(f"`{place}` has no address: only elements and members of memory have one.")
    base = place
    while isinstance(base, (Subscript, Member)) and not isinstance(base.base.type, ty.Pointer):
        base = base.base
    mutable = isinstance(base, (Subscript, Member)) and isinstance(base.base.type, ty.Pointer) and base.base.type.mutable
    return Unary(ty.Pointer(place.type, mutable), "&", place)
