"""Random typed expressions together with what they are worth, computed in Python with the device's wrap-around."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cheetah import lang as ch
from cheetah.lang import ty
from cheetah.lang.nodes import Expr, Literal, Name

TYPES = (ty.u32, ty.u64, ty.i32, ty.f32, ty.boolean)
INTEGERS = (ty.u32, ty.u64, ty.i32)
EXTREMES: dict[ty.Scalar, tuple[Any, ...]] = {
    ty.u32: (0, 1, 2, 5, 31, 2**31 - 1, 2**31, 2**32 - 1),
    ty.u64: (0, 1, 3, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
    ty.i32: (0, 1, -1, 7, 2**31 - 1, -(2**31), -(2**31) + 1),
    ty.f32: (0.0, -0.0, 1.0, 0.1, -2.5, 1e-45, 3.4028234663852886e38, 16777217.0, float("inf"), 1e20, 1 / 3),
    ty.boolean: (False, True),
}
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "&": lambda a, b: a & b,
    "|": lambda a, b: a | b, "^": lambda a, b: a ^ b,
}  # fmt: skip
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
}  # fmt: skip


def wrap(type_: ty.Scalar, value: Any) -> Any:
    """The value that a variable of this type would hold."""
    if type_.kind == "bool":
        return bool(value)
    if type_.kind == "float":
        return np.float32(value)
    low, _ = type_.limits
    return (int(value) - low) % 2**type_.bits + low


@dataclass(frozen=True)
class Valued:
    """An expression and its value."""

    expression: Expr
    value: Any


class Expressions:
    """A source of random expressions over a few variables of each type."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.variables = {type_: [self._variable(type_, number) for number in range(3)] for type_ in TYPES}

    def _variable(self, type_: ty.Scalar, number: int) -> Valued:
        name = f"{'b' if type_ == ty.boolean else type_.kind[0]}{type_.bits}_{number}"
        return Valued(Name(type_, name, ()), wrap(type_, self._number(type_)))

    def _number(self, type_: ty.Scalar) -> Any:
        if self.random.random() < 0.6:
            return self.random.choice(EXTREMES[type_])
        if type_.kind == "float":
            return self.random.uniform(-100, 100)
        return self.random.randint(*type_.limits) if type_.is_integer else self.random.random() < 0.5

    def draw(self, type_: ty.Scalar, depth: int) -> Valued:
        """An expression of this type, at most `depth` operators deep; refused constants are drawn again."""
        while True:
            try:
                with np.errstate(all="ignore"):
                    return self._draw(type_, depth)
            except ch.RangeError:  # two constants whose result the type cannot hold
                continue

    def _draw(self, type_: ty.Scalar, depth: int) -> Valued:
        if depth == 0 or self.random.random() < 0.1:
            return self._leaf(type_)
        makers = [self._select, self._operation, self._operation, self._unary, self._cast]
        if type_ == ty.boolean:
            makers.append(self._comparison)
        elif type_.is_integer:
            makers += [self._shift, self._division, self._extreme]
        return self.random.choice(makers)(type_, depth - 1)

    def _leaf(self, type_: ty.Scalar) -> Valued:
        if self.random.random() < 0.6:
            return self.random.choice(self.variables[type_])
        number = self._number(type_)
        value = wrap(type_, number)
        return Valued(Literal(type_, float(value) if type_.kind == "float" else number), value)

    def _operation(self, type_: ty.Scalar, depth: int) -> Valued:
        if type_.kind == "float":
            operator = self.random.choice("+-*/")
        else:
            operator = self.random.choice("&|^" if type_ == ty.boolean else "+-*&|^")
        a, b = self._draw(type_, depth), self._draw(type_, depth)
        if operator == "/":
            if isinstance(b.expression, Literal) and b.value == 0:
                return a
            return Valued(a.expression / b.expression, np.float32(a.value) / np.float32(b.value))
        meaning = ARITHMETIC[operator]
        return Valued(meaning(a.expression, b.expression), wrap(type_, meaning(a.value, b.value)))

    def _unary(self, type_: ty.Scalar, depth: int) -> Valued:
        a = self._draw(type_, depth)
        if type_ == ty.boolean:
            return Valued(~a.expression, not a.value)
        if type_.kind == "float" or self.random.random() < 0.5:
            return Valued(-a.expression, wrap(type_, -a.value))
        return Valued(~a.expression, wrap(type_, ~a.value))

    def _shift(self, type_: ty.Scalar, depth: int) -> Valued:
        a, by = self._draw(type_, depth), self._draw(self.random.choice((ty.u32, type_)), depth)
        amount = by.expression & (type_.bits - 1)
        count = by.value & (type_.bits - 1)
        if self.random.random() < 0.5:
            return Valued(a.expression >> amount, a.value >> count)
        return Valued(a.expression << amount, wrap(type_, a.value << count))

    def _extreme(self, type_: ty.Scalar, depth: int) -> Valued:
        a, b = self._draw(type_, depth), self._draw(type_, depth)
        made, meaning = self.random.choice(((ch.minimum, min), (ch.maximum, max)))
        return Valued(made(a.expression, b.expression), meaning(a.value, b.value))

    def _division(self, type_: ty.Scalar, depth: int) -> Valued:
        if type_.kind == "int":
            return self._operation(type_, depth)
        a, b = self._draw(type_, depth), self._draw(type_, depth)
        divisor = b.expression | 1
        if self.random.random() < 0.5:
            return Valued(a.expression // divisor, a.value // (b.value | 1))
        return Valued(a.expression % divisor, a.value % (b.value | 1))

    def _comparison(self, type_: ty.Scalar, depth: int) -> Valued:
        of = self.random.choice((*INTEGERS, ty.f32))
        a, b = self._draw(of, depth), self._draw(of, depth)
        meaning = COMPARISONS[self.random.choice(list(COMPARISONS))]
        return Valued(meaning(a.expression, b.expression), bool(meaning(a.value, b.value)))

    def _select(self, type_: ty.Scalar, depth: int) -> Valued:
        test = self._draw(ty.boolean, depth)
        a, b = self._draw(type_, depth), self._draw(type_, depth)
        return Valued(ch.select(test.expression, a.expression, b.expression), a.value if test.value else b.value)

    def _cast(self, type_: ty.Scalar, depth: int) -> Valued:
        of = self.random.choice(TYPES)
        a = self._draw(of, depth)
        if of == ty.f32 and type_.is_integer:  # C leaves the others undefined
            safe = ch.select((a.expression >= 0) & (a.expression < 65536), a.expression, ty.f32(3.75))
            return Valued(type_(safe), wrap(type_, a.value if 0 <= a.value < 65536 else 3.75))
        if isinstance(a.expression, Literal) and type_.is_integer and of.is_integer:
            low, high = type_.limits
            if not low <= a.value <= high:
                return self._leaf(type_)
        return Valued(type_(a.expression), wrap(type_, a.value))
