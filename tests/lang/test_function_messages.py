"""What functions of the program refuse, and what is said of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cheetah import lang as ch
from cheetah.lang import ty
from tests.lang.compilers import compile_cpp

HERE = Path(__file__)
SPAN = ty.struct("Span", start=ty.u32, count=ty.u32, scale=ty.u64)


def in_kernel(body: Callable[..., Any]) -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32), n=ty.u32))
    def kernel(x, n):
        body(x, n)


def gives_an_array() -> None:
    @ch.function
    def sums():
        made = ch.array(ty.f32, 4)
        return made

    in_kernel(lambda x, n: sums())  # wrong


def keeps_a_name_of_the_body() -> None:
    kept = []

    @ch.function
    def keep(x):
        doubled = x[0] * 2
        kept.append(doubled)

    def body(x: ch.Expr, n: ch.Expr) -> None:
        keep(x)
        x[1] = kept[0]  # wrong

    in_kernel(body)


def changes_what_it_gets_twice() -> None:
    @ch.function
    def move(to, value):
        to += value

    def body(x: ch.Expr, n: ch.Expr) -> None:
        total = ch.var(ty.f32, 0, name="total")
        move(total, total * 2)  # wrong

    in_kernel(body)


def changes_a_member_that_it_gets() -> None:
    def body(x: ch.Expr, n: ch.Expr) -> None:
        total = ch.var(ty.f32, 0, name="total")

        @ch.function
        def change():
            total.set(2.0)

        @ch.function
        def use(value):
            change()
            x[0] = value

        use(total + 1)  # wrong

    in_kernel(body)


def ends_the_kernel() -> None:
    @ch.function
    def leave():
        ch.return_()  # wrong

    in_kernel(lambda x, n: leave())


def leaves_its_callers_loop() -> None:
    @ch.function
    def leave():
        ch.break_()  # wrong

    def body(x: ch.Expr, n: ch.Expr) -> None:
        with ch.for_(n):
            leave()

    in_kernel(body)


def writes_raw_text() -> None:
    @ch.function
    def raw():
        ch.raw_stmt("x[0] = 1;")  # wrong

    in_kernel(lambda x, n: raw())


def opens_no_block() -> None:
    def body(x: ch.Expr, n: ch.Expr) -> None:
        ch.outline("part")  # wrong
        x[0] = 1.0

    in_kernel(body)


def stores_to_a_value() -> None:
    @ch.function
    def clear(value):
        value.set(0)  # wrong

    in_kernel(lambda x, n: clear(x[0]))


def stands_outside() -> None:
    @ch.function
    def alone():
        pass

    alone()  # wrong


def asks_the_whole_kernel_for_a_value_of_its_own() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        with ch.if_(x[0] == 1):
            own = x + x[1]
            ch.whole("place", own + 1)  # wrong


def gives_a_record_twice() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        ch.record(SPAN, "EARLY", start=0, count=3, scale=1)
        ch.record(SPAN, "EARLY", start=0, count=4, scale=1)  # wrong


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        (gives_a_record_twice, ch.SignatureError, "ch.record: `EARLY` is Span (0, 4, 1) here and Span (0, 3, 1) at "),
        (asks_the_whole_kernel_for_a_value_of_its_own, ch.ScopeError, "ch.whole: `own` is not seen where the kernel"),
        (gives_an_array, ch.TypeMixError, "sums returns the array `made`: let its caller make the array and give it."),
        (
            keeps_a_name_of_the_body,
            ch.ScopeError,
            "`doubled` was bound in the function keep (",
        ),
        (
            changes_what_it_gets_twice,
            ch.TypeMixError,
            "move changes `total`, its `to`, and gets it a second time as `value`: "
            "give it once, or a copy of it, `x = ch.var(float, ...)`.",
        ),
        (
            changes_a_member_that_it_gets,
            ch.TypeMixError,
            "use changes `total`, its `total`, and gets it a second time as `value`: ",
        ),
        (ends_the_kernel, ch.ControlError, "ch.return_() ends the kernel, not a function: give the caller a value"),
        (leaves_its_callers_loop, ch.ControlError, "ch.break_() in the function leave, outside of its loops"),
        (writes_raw_text, ch.ControlError, "ch.raw_stmt in a function, whose names are its own"),
        (opens_no_block, ch.MissingWithError, "`ch.outline(...)` was called but opens no block"),
        (stores_to_a_value, ch.ConstStoreError, "`value` is a constant; make it with `ch.var` to store to it."),
        (stands_outside, ch.NoKernelError, "a device statement outside of a kernel"),
    ],
)
def test_refused(program: Callable[[], None], error: type[ch.LangError], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        program()
    start = program.__code__.co_firstlineno
    lines = HERE.read_text().splitlines()[start:]
    wrong = next(start + n for n, line in enumerate(lines, 1) if "# wrong" in line)
    assert caught.value.location == ch.errors.Location(str(HERE), wrong)


@pytest.mark.compiler
def test_the_compilers_complaint_points_into_the_function(tmp_path: Path) -> None:
    @ch.function
    def broken(x):
        ch.asm("this is no instruction $x;", x=x)  # the wrong line

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)), max_threads=32)
    def kernel(x):
        broken(x)

    emulator = HERE.parents[2] / "cheetah" / "emulator" / "runtime"
    text = ch.render_file(kernel, line_marks=True).replace("asm volatile", "no_asm_here")
    found = compile_cpp(text, tmp_path, "-DCHEETAH_EMULATOR", "-fsyntax-only", "-I", str(emulator))
    wrong = next(n for n, line in enumerate(HERE.read_text().splitlines(), 1) if "# the wrong line" in line)
    assert f"{HERE}:{wrong}:" in found.stderr
