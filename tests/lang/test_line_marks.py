"""With line marks on, the compiler's complaints point to the Python line that emitted the code."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from cheetah import lang as ch
from cheetah.lang import ty
from tests.lang.compilers import compile_cpp

HERE = Path(__file__)


@ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)), max_threads=32)
def kernel(x):
    i = ch.const(ty.u32, 1)
    with ch.if_(i == 1):
        x[i] = 2
        ch.raw_stmt("not_a_function(x);")  # the wrong line
    x[0] = i + 1


def line_of(text: str) -> int:
    """The number of the first line of this file with this text."""
    return next(n for n, line in enumerate(HERE.read_text().splitlines(), 1) if text in line)


@pytest.mark.compiler
def test_an_error_points_to_the_python_line(tmp_path: Path) -> None:
    text = ch.render_file(kernel, line_marks=True)
    assert inspect.getsourcefile(line_of) == str(HERE)
    emulator = HERE.parents[2] / "cheetah" / "emulator" / "runtime"
    found = compile_cpp(text, tmp_path, "-DCHEETAH_EMULATOR", "-fsyntax-only", "-I", str(emulator))
    assert found.returncode != 0
    assert f"{HERE}:{line_of('# the wrong line')}:" in found.stderr


def test_every_statement_is_marked() -> None:
    lines = ch.render(kernel, line_marks=True).splitlines()
    marked = {lines[n + 1].strip(): line for n, line in enumerate(lines) if line.startswith("#line")}
    assert marked["x[i] = 2;"] == f'#line {line_of("x[i] = 2")} "{HERE}"'
    assert marked["if (i == 1) {"] == f'#line {line_of("ch.if_(i == 1)")} "{HERE}"'
    assert marked["uint32_t i = 1;"] == f'#line {line_of("i = ch.const")} "{HERE}"'


def test_without_marks_there_are_none() -> None:
    assert "#line" not in ch.render_file(kernel)
