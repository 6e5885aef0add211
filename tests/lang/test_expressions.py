"""Printing and folding proved by meaning: random expressions, evaluated by g++ and by Python."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cheetah import lang as ch
from cheetah.lang import ty
from cheetah.lang.nodes import Literal, Name
from cheetah.lang.printer import literal_text, render_expression
from tests.lang.compilers import run_cpp
from tests.lang.random_expressions import TYPES, Expressions, Valued

PREAMBLE = """
#include <cstdint>
#include <cstdio>
#include <cstring>
static float bits_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
template <class A, class B> auto min(A a, B b) { return b < a ? b : a; }
template <class A, class B> auto max(A a, B b) { return a < b ? b : a; }
static void show(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) puts("nan"); else printf("%08x\\n", bits);
}
static float infinity() { return __builtin_inff(); }
static float not_a_number() { return __builtin_nanf(""); }
static void show(uint32_t value) { printf("%u\\n", value); }
static void show(uint64_t value) { printf("%lu\\n", value); }
static void show(int32_t value) { printf("%d\\n", value); }
static void show(bool value) { puts(value ? "true" : "false"); }
"""
BATCH = 300


def shown(type_: ty.Type, value: object) -> str:
    """The value as the C++ program prints it."""
    if type_ == ty.f32:
        return "nan" if value != value else struct.pack(">f", value).hex()
    return str(value).lower()


def program(source: Expressions, drawn: list[Valued]) -> str:
    """A C++ program that prints the value of each expression on its line."""
    variables = [
        f"{variable.expression.type} {variable.expression} = {render_expression(Literal(type_, value_of(variable)))};"
        for type_, listed in source.variables.items()
        for variable in listed
    ]
    lines = [f"  {{ {item.expression.type} x = {render_expression(item.expression)}; show(x); }}" for item in drawn]
    return "\n".join([PREAMBLE, *variables, "int main() {", *lines, "}"]) + "\n"


def value_of(variable: Valued) -> int | float | bool:
    return float(variable.value) if variable.expression.type == ty.f32 else variable.value


@pytest.mark.compiler
@settings(max_examples=4, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
@pytest.mark.slow
def test_printed_expressions_evaluate_as_python_does(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    source = Expressions(seed)
    drawn = [source.draw(source.random.choice(TYPES), depth=5) for _ in range(BATCH)]
    flags = ("-ffp-contract=off", "-Werror=parentheses")
    printed = run_cpp(program(source, drawn), tmp_path_factory.mktemp("batch"), *flags).split()
    for item, found in zip(drawn, printed, strict=True):
        assert found == shown(item.expression.type, item.value), f"{item.expression}  (seed {seed})"


def test_the_comparison_above_can_fail() -> None:
    assert shown(ty.f32, 0.0) != shown(ty.f32, -0.0)
    assert shown(ty.u32, 7) != shown(ty.u32, 8)


@pytest.mark.compiler
def test_literals_have_the_type_they_print(tmp_path: Path) -> None:
    """On the left of a shift no other operand gives a literal its type."""
    values = [(type_, value) for type_ in (ty.u32, ty.u64, ty.i32, ty.i64) for value in (*type_.limits, 7) if value]
    shifts = [(type_, Literal(type_, value) >> x) for type_, value in values]
    lines = [
        f"  static_assert(sizeof({shift}) == {type_.bytes});\n"
        f"  static_assert((decltype({shift})(-1) < 0) == {int(type_.kind == 'int')});"
        for type_, shift in shifts
    ]
    run_cpp("\n".join(["#include <cstdint>", "int main() {", "  uint32_t x = 0;", *lines, "}"]), tmp_path)


x = Name(ty.u32, "x", ())
y = Name(ty.u32, "y", ())
p = Name(ty.boolean, "p", ())
q = Name(ty.boolean, "q", ())


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ((x + y) * 2, "(x + y) * 2"),
        (x + y * 2, "x + y * 2"),
        (x - (y - 1), "x - (y - 1)"),
        (5 * (x % 2), "5 * (x % 2)"),
        (5 * x % 2, "5 * x % 2"),
        (x // 16 * 8 + x % 16, "x / 16 * 8 + x % 16"),
        ((x + 1) << 2, "(x + 1) << 2"),
        ((x & 3) | (y << 2), "(x & 3) | (y << 2)"),
        ((x & 3) == 0, "(x & 3) == 0"),
        ((p & q) | ~p, "(p && q) || !p"),
        ((x < y) == p, "(x < y) == p"),
        (1 << x, "1u << x"),
        (ch.select(p, 1, 2) - x, "(p ? 1u : 2u) - x"),
        (ch.select(p, x, ch.select(q, y, 1)), "p ? x : (q ? y : 1)"),
        (ty.u64(x) * 2**33, "(uint64_t)(x) * 8589934592ull"),
        (-(-x), "- -x"),  # noqa: B002
    ],
)
def test_printing_is_as_a_person_would_write(expression: ch.Expr, text: str) -> None:
    assert str(expression) == text


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (x + 0, "x"), (0 + x, "x"), (x * 1, "x"), (x // 1, "x"), (x * 0, "0"), (x % 1, "0"), (x - 0, "x"),
        (x ^ 0, "x"), (x << 0, "x"), (ty.u32(3) * ty.u32(2**31), "2147483648u"), (ty.u32(1) - ty.u32(2), "4294967295u"),
        (ty.f32(0.1) + ty.f32(0.2), "0.3f"), (~ty.u32(0), "4294967295u"), (ty.u32(True), "1"),
    ],
)  # fmt: skip
def test_constants_fold(expression: ch.Expr, text: str) -> None:
    assert str(expression) in (text, text.replace("0.3f", "0.30000001f"))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-45, 3.4028234663852886e38, 1e20, 0.000244140625, 2.0**-24, 1e-5])
def test_floats_print_as_what_the_device_holds(value: float) -> None:
    literal = ty.f32(value)
    assert isinstance(literal, Literal)
    text = literal_text(literal)
    assert text.endswith("f") and struct.pack("f", float(text[:-1])) == struct.pack("f", value)
    assert len(text) <= 15


def test_numpy_numbers_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    assert str(x + np.int64(3)) == "x + 3"
    assert str(np.uint32(3) + x) == "3 + x"
    assert str(ty.f32(np.float32(0.5))) == "0.5f"


def test_minimum_and_maximum_of_both_worlds() -> None:
    assert (ch.minimum(3, 4), ch.maximum(3, 4)) == (3, 4)
    assert str(ch.minimum(x, 4)) == "min(x, 4u)"
    assert str(ch.maximum(x, y)) == "max(x, y)"
