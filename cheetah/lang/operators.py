"""What the operators on device values mean: their types, their constants, and what they refuse.

Python ints, floats and bools become literals of the other operand's type; two device values of different types never
mix silently. Constants fold here, exactly as the device would compute them; there is no other optimisation.
"""

from __future__ import annotations

import math
import numbers
import operator
import struct
from collections.abc import Callable
from typing import Any, TypeGuard

from cheetah.lang import types as ty
from cheetah.lang.errors import RangeError, TypeMixError
from cheetah.lang.meaning import meaning
from cheetah.lang.named import Named
from cheetah.lang.nodes import (
    Binary,
    Builtin,
    Call,
    Cast,
    Expr,
    Literal,
    Member,
    Name,
    Pointee,
    Select,
    Subscript,
    Unary,
    Value,
)

# -- literals -----------------------------------------------------------------------------------------------------


def lift(value: object, type_: ty.Type) -> Expr:
    """`value` as an expression of exactly `type_`: device values must have it, Python numbers become literals."""
    if isinstance(value, Expr):
        if value.type == type_:
            return value
        raise TypeMixError(
            f"`{value}` has type {value.type} where {type_} is needed; convert it, e.g. `ty.u32({value})`."
        )
    number = _number(value, type_)
    assert isinstance(type_, ty.Scalar)
    if type_.is_integer:
        low, high = type_.limits
        if not low <= number <= high:
            raise RangeError(f"{number} does not fit {type_}, which holds {low} to {high}.")
    return Literal(type_, _rounded(float(number), type_) if type_.kind == "float" else number)


def _number(value: object, type_: ty.Type) -> bool | int | float:
    """A Python (or numpy) number that `type_` can stand for."""
    kinds: tuple[str, ...] = ()
    number: bool | int | float = 0
    if isinstance(value, bool):
        kinds, number = ("bool",), value
    elif isinstance(value, numbers.Integral):
        kinds, number = ("uint", "int", "float"), value if isinstance(value, Named) else int(value)
    elif isinstance(value, numbers.Real):
        kinds, number = ("float",), float(value)
    if not isinstance(type_, ty.Scalar) or type_.kind not in kinds:
        raise TypeMixError(f"the Python value {value!r} cannot become a device value of type {type_}.")
    return number


def _rounded(value: float, type_: ty.Scalar) -> float:
    """The number that the device holds for `value`."""
    if type_.bits == 64 or math.isinf(value) or math.isnan(value):
        return value
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        raise RangeError(f"{value} does not fit {type_}, which ends at 3.4028234663852886e+38.") from None


def natural(value: object) -> Expr:
    """`value` as an expression; a Python int becomes u32 (i32 when negative), a float f32, a bool bool."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, bool):
        return lift(value, ty.boolean)
    if isinstance(value, numbers.Integral):
        wide = not -(2**31) <= int(value) < 2**32
        return lift(value, (ty.i64 if wide else ty.i32) if int(value) < 0 else (ty.u64 if wide else ty.u32))
    return lift(value, ty.f32)


# -- operators ----------------------------------------------------------------------------------------------------

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_,
    "^": operator.xor,
}  # fmt: skip
_COMPARISON: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_COMPARISONS = tuple(_COMPARISON)
_ALLOWED = {
    "uint": ("+", "-", "*", "//", "%", "<<", ">>", "&", "|", "^", *_COMPARISONS),
    "int": ("+", "-", "*", "<<", ">>", "&", "|", "^", *_COMPARISONS),
    "float": ("+", "-", "*", "/", *_COMPARISONS),
    "bool": ("&", "|", "^", "==", "!="),
}
_GROWING = ("+", "-", "*", "<<")
"""Operators whose result may leave a narrow type: C computes 8 and 16 bits as int, so these would not wrap."""


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
    for simplify in (_identity, _folded_constants):
        simpler = simplify(op, a, b)
        if simpler is not None:
            return simpler
    return Binary(a.type, op, a, b)


def _same_type(op: str, left: object, right: object) -> tuple[Expr, Expr]:
    if isinstance(left, Expr) and isinstance(right, Expr):
        if left.type != right.type and op not in ("<<", ">>"):
            raise TypeMixError(
                f"`{left}` ({left.type}) {op} `{right}` ({right.type}): the types differ; "
                f"convert one side, e.g. `ty.u64({right})`."
            )
        return left, right
    if isinstance(left, Expr):
        return left, lift(right, left.type)
    assert isinstance(right, Expr)
    return lift(left, right.type), right


def _require_operator(op: str, a: Expr, b: Expr) -> None:
    kind = a.type.kind if isinstance(a.type, ty.Scalar) else "other"
    if op not in _ALLOWED.get(kind, ()):
        hint = {
            ("int", "//"): " C truncates where Python floors; convert to unsigned first.",
            ("int", "%"): " C truncates where Python floors; convert to unsigned first.",
            ("uint", "/"): " Integers divide with `//`.",
            ("int", "/"): " Unsigned integers divide with `//`.",
            ("float", "//"): " Floats divide with `/`.",
            ("bf16", op): " Convert with `bf16_to_f32` first.",
        }.get((kind, op), "")
        raise TypeMixError(f"`{a}` {op} `{b}`: {a.type} has no operator `{op}`.{hint}")
    assert isinstance(a.type, ty.Scalar)
    if op in _GROWING and a.type.is_integer and a.type.bits < 32:
        raise TypeMixError(f"`{a}` {op} `{b}`: C computes {a.type} as int; convert first, e.g. `ty.u32({a})`.")
    if op in ("<<", ">>"):
        _require_shift(op, a, b)


def _require_shift(op: str, a: Expr, b: Expr) -> None:
    assert isinstance(a.type, ty.Scalar)
    if not isinstance(b.type, ty.Scalar) or not b.type.is_integer:
        raise TypeMixError(f"`{a}` {op} `{b}`: shifts are by integers, not by {b.type}.")
    if isinstance(b, Literal) and not 0 <= b.value < a.type.bits:
        raise RangeError(f"`{a}` {op} {b.value}: {a.type} has {a.type.bits} bits; shift by 0 to {a.type.bits - 1}.")


def _fold(op: str, a: Literal, b: Literal) -> Expr:
    if op in _COMPARISON:
        return Literal(ty.boolean, _COMPARISON[op](a.value, b.value))
    if op in ("//", "%", "/") and b.value == 0:
        raise RangeError(f"division of the constant {a.value} by zero.")
    result = _ARITHMETIC[op](a.value, b.value)
    assert isinstance(a.type, ty.Scalar)
    if a.type.kind == "uint" and not 0 <= result < 1 << a.type.bits:
        result %= 1 << a.type.bits
    return lift(result, a.type)


def _identity(op: str, a: Expr, b: Expr) -> Expr | None:
    """x+0, x-0, x*1, x//1, x*0, x%1 on integers: index arithmetic over static dimensions makes many of these. Of
    floats x*1 and x/1, which are exact."""
    if not (isinstance(a.type, ty.Scalar) and a.type.is_integer):
        return a if isinstance(b, Literal) and b.value == 1.0 and op in ("*", "/") else None
    if isinstance(b, Literal):
        if b.value == 0 and op in ("//", "%"):
            raise RangeError(f"division of `{a}` by the constant zero.")
        if b.value == 0 and op in ("+", "-", "<<", ">>", "|", "^") or b.value == 1 and op in ("*", "//"):
            return a
        if b.value == 0 and op in ("*", "&") or b.value == 1 and op == "%":
            return Literal(a.type, 0)
    if isinstance(a, Literal):
        if a.value == 0 and op in ("+", "|", "^") or a.value == 1 and op == "*":
            return b
        if a.value == 0 and op in ("*", "//", "%", "&", "<<", ">>"):
            return Literal(a.type, 0)
    return None


def _folded_constants(op: str, a: Expr, b: Expr) -> Expr | None:
    """(x + 1) + 2 as x + 3, x + (y + 1) as x + y + 1, (x * 2) * 3 as x * 6: exact, as unsigned integers wrap."""
    if not (isinstance(a.type, ty.Scalar) and a.type.kind == "uint") or op not in ("+", "-", "*"):
        return None
    if op == "*":
        return _folded_product(a, b)
    (rest, before), (added, constant) = _sum_parts(a), _sum_parts(b)
    if op == "+" and added is not None and rest is not None and constant and not before:
        return _plus_constant(binary("+", a, added), constant)
    if added is None and before and rest is not None:
        return _plus_constant(rest, before + constant if op == "+" else before - constant)
    return None


def _sum_parts(value: Expr) -> tuple[Expr | None, int]:
    """A sum's other part (None: there is none), and the constant that is added to it."""
    if _is_plain(value):
        return None, int(value.value)
    if isinstance(value, Binary) and value.operator in ("+", "-") and _is_plain(value.right):
        constant = int(value.right.value)
        return value.left, constant if value.operator == "+" else -constant
    return value, 0


def _is_plain(value: Expr) -> TypeGuard[Literal]:
    """Whether a value is a literal that has no name of its own."""
    return isinstance(value, Literal) and not isinstance(value.value, Named)


def _plus_constant(value: Expr, constant: int) -> Expr:
    return binary("+", value, constant) if constant >= 0 else binary("-", value, -constant)


def _folded_product(a: Expr, b: Expr) -> Expr | None:
    if _is_plain(b) and isinstance(a, Binary) and a.operator == "*" and _is_plain(a.right):
        assert isinstance(a.type, ty.Scalar)
        return binary("*", a.left, int(a.right.value) * int(b.value) % (1 << a.type.bits))
    return None


def _pointer_arithmetic(op: str, pointer: Expr, offset: object) -> Expr:
    if op in ("==", "!=") and isinstance(offset, Expr) and offset.type == pointer.type:
        return Binary(ty.boolean, op, pointer, offset)
    if op in ("==", "!=") and offset is None:
        return Binary(ty.boolean, op, pointer, Builtin(pointer.type, "nullptr"))
    if op not in ("+", "-"):
        raise TypeMixError(
            f"`{pointer}` {op} `{offset}`: a pointer has + and - with integers, == and != with its own type and None."
        )
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
    if type_.is_integer and type_.bits < 32:
        raise TypeMixError(f"{op}`{value}`: C computes {type_} as int; convert first, e.g. `ty.u32({value})`.")
    if isinstance(value, Literal):
        folded = -value.value if op == "-" else ~int(value.value)
        return lift(folded % (1 << type_.bits) if type_.kind == "uint" else folded, type_)
    return Unary(type_, op, value)


# -- places and conversions ---------------------------------------------------------------------------------------


def subscript(base: Expr, index: Value) -> Expr:
    """`base[index]` of a pointer or a local array; a static index is checked against the array's length."""
    if not isinstance(base.type, (ty.Pointer, ty.Array)):
        raise TypeMixError(f"`{base}` of type {base.type} cannot be indexed; only pointers and arrays can.")
    position = natural(index)
    if not (isinstance(position.type, ty.Scalar) and position.type.is_integer):
        raise TypeMixError(f"`{base}` is indexed by `{position}` of type {position.type}; an index is an integer.")
    if isinstance(base.type, ty.Array) and isinstance(position, Literal):
        if not 0 <= position.value < base.type.length:
            raise RangeError(f"index {position.value} of `{base}`, which has {base.type.length} elements.")
    return Subscript(base.type.element, base, position)


def pointee(pointer: Expr) -> Any:
    """The one thing that a pointer points to: `pointee(p).member` is `p->member`, where `p[0]` is an array's first."""
    if not isinstance(pointer.type, ty.Pointer):
        raise TypeMixError(f"`{pointer}` of type {pointer.type} is no pointer.")
    return Pointee(pointer.type.element, pointer, Literal(ty.u32, 0))


def cast(type_: ty.Type, value: Value) -> Expr:
    """`value` converted to `type_` (C's rules); a literal is converted at once."""
    if not isinstance(value, Expr):
        return lift(_converted(value, type_), type_)
    if value.type == type_:
        return value
    if isinstance(type_, ty.Pointer):
        return reinterpret(type_, value)
    _require_convertible(type_, value)
    if isinstance(value, Literal) and isinstance(value.value, int) and _is_number(type_):
        return lift(value.value if isinstance(value.value, Named) else int(value.value), type_)
    return Cast(type_, value)


def _is_number(type_: ty.Type) -> bool:
    return isinstance(type_, ty.Scalar) and type_.kind in ("uint", "int", "float")


def _converted(value: object, type_: ty.Type) -> object:
    """A Python number converted explicitly: a bool counts as 0 or 1, a float loses its fraction."""
    if isinstance(value, bool) and _is_number(type_):
        return int(value)
    if isinstance(value, Named):
        return value
    if isinstance(value, numbers.Real) and math.isfinite(value) and isinstance(type_, ty.Scalar) and type_.is_integer:
        return math.trunc(value)
    return value


def _require_convertible(type_: ty.Type, value: Expr) -> None:
    def converts(kind: ty.Type) -> bool:
        return isinstance(kind, ty.Scalar) and kind.kind in ("uint", "int", "float", "bool")

    is_address = isinstance(value.type, ty.Pointer) and type_ == ty.u64
    if converts(type_) and (converts(value.type) or is_address):
        return
    hint = ""
    if ty.bf16 in (type_, value.type):
        hint = " Use `bf16_to_f32` and `f32_to_bf16`."
    raise TypeMixError(f"`{value}` of type {value.type} cannot be converted to {type_}.{hint}")


def select(condition: Value, if_true: Value, if_false: Value) -> Expr:
    """`condition ? if_true : if_false`; both values have one type."""
    test = lift(condition, ty.boolean)
    if isinstance(if_true, Expr) or isinstance(if_false, Expr):
        a, b = _same_type("select", if_true, if_false)
    else:
        a, b = _same_type("select", natural(if_true), natural(if_false))
    if isinstance(test, Literal):
        return a if test.value else b
    return Select(a.type, test, a, b)


def minimum(a: Value, b: Value) -> Any:
    """The smaller of two numbers: of integers `min(a, b)`, of floats a selection, which says what becomes of NaN; of
    two Python numbers, the number."""
    if not isinstance(a, Expr) and not isinstance(b, Expr):
        return min(a, b)
    left, right = _same_type("minimum", a, b)
    return _extreme("min", left, right) if _is_integer(left.type) else select(binary("<", left, right), left, right)


def maximum(a: Value, b: Value) -> Any:
    """The larger of two numbers: of integers `max(a, b)`, else as `minimum`."""
    if not isinstance(a, Expr) and not isinstance(b, Expr):
        return max(a, b)
    left, right = _same_type("maximum", a, b)
    return _extreme("max", left, right) if _is_integer(left.type) else select(binary("<", left, right), right, left)


def _is_integer(type_: ty.Type) -> bool:
    return isinstance(type_, ty.Scalar) and type_.is_integer


def _extreme(function: str, left: Expr, right: Expr) -> Expr:
    """A call of C++'s function; both arguments have the type, also where one is a literal."""
    if isinstance(left, Literal) and isinstance(right, Literal):
        return Literal(left.type, {"min": min, "max": max}[function](left.value, right.value))
    return Call(left.type, function, (left, right))


def reinterpret(type_: ty.Pointer, pointer: Expr) -> Expr:
    """`pointer` as a pointer to another type; constness may be added, never removed."""
    if not isinstance(pointer.type, ty.Pointer):
        raise TypeMixError(f"`{pointer}` of type {pointer.type} is no pointer.")
    if type_.mutable and not pointer.type.mutable:
        raise TypeMixError(f"`{pointer}` is {pointer.type}: its constness cannot be cast away.")
    return pointer if pointer.type == type_ else Cast(type_, pointer)


def address_of(place: Expr) -> Expr:
    """`&place`, of an element or member of memory or of a local array; constant where the place is."""
    if not isinstance(place, (Subscript, Member)):
        raise TypeMixError(f"`{place}` has no address: only elements and members of memory have one.")
    return Unary(ty.Pointer(place.type, is_mutable_place(place)), "&", place)


def is_mutable_place(place: Expr) -> bool:
    """Whether a value is a place that can be stored to."""
    if isinstance(place, (Subscript, Member)):
        base = place.base
        return base.type.mutable if isinstance(base.type, ty.Pointer) else is_mutable_place(base)
    return isinstance(place, Name) and place.mutable


meaning.binary, meaning.unary, meaning.subscript, meaning.cast = binary, unary, subscript, cast
