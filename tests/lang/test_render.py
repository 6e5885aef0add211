"""What programs look like when rendered, and that the same program always gives the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cheetah import lang as ch
from cheetah.lang import ty


def body(kernel: ch.Kernel) -> list[str]:
    """The kernel's lines without the first and the last."""
    return ch.render(kernel).splitlines()[1:-1]


def test_the_papers_example_renders_as_printed() -> None:
    @ch.kernel(ch.Params(n=ty.u32, x=ty.ptr_mut(ty.i32)))
    def kernel(n, x):
        i = ch.block_idx_x() * ch.block_dim_x() + ch.thread_idx_x()
        with ch.if_(i < n):
            x[i] *= 2

    assert ch.render(kernel) == (
        "__global__ void kernel(uint32_t n, int32_t* x) {\n"
        "  uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "  if (i < n) x[i] = x[i] * 2;\n"
        "}\n"
    )


def test_launch_bounds_come_with_c_linkage() -> None:
    @ch.kernel(ch.Params(), name="decode", max_threads=544)
    def kernel():
        ch.return_()

    assert ch.render(kernel) == 'extern "C" __global__ void __launch_bounds__(544, 1) decode() {\n  return;\n}\n'


def test_else_if_chains() -> None:
    @ch.kernel(ch.Params(n=ty.u32, x=ty.ptr_mut(ty.u32)))
    def kernel(n, x):
        with ch.if_(n < 1):
            x[0] = 1
        with ch.else_():
            with ch.if_(n < 2):
                x[0] = 2
            with ch.else_():
                x[0] = 3

    assert body(kernel) == [
        "  if (n < 1) {",
        "    x[0] = 1;",
        "  } else if (n < 2) {",
        "    x[0] = 2;",
        "  } else {",
        "    x[0] = 3;",
        "  }",
    ]


def test_conditions_that_hold_together_are_one_question() -> None:
    @ch.kernel(ch.Params(n=ty.u32, x=ty.ptr_mut(ty.u32)))
    def kernel(n, x):
        with ch.if_((n == 1) | (n == 2)), ch.if_(x[0] == 3):
            x[1] = 4
        with ch.if_(n == 5):
            with ch.if_(x[0] == 6):
                x[1] = 7
            with ch.else_():
                x[1] = 8
        with ch.if_(n == 9):
            with ch.if_(x[0] == 10):
                x[1] = 11
        with ch.else_():
            x[1] = 12

    lines = [line.strip() for line in body(kernel)]
    assert lines[0] == "if ((n == 1 || n == 2) && x[0] == 3) x[1] = 4;"
    assert lines[1:6] == ["if (n == 5) {", "if (x[0] == 6) {", "x[1] = 7;", "} else {", "x[1] = 8;"]
    assert lines[8:] == ["if (n == 9) {", "if (x[0] == 10) x[1] = 11;", "} else {", "x[1] = 12;", "}"]


def test_conditions_known_while_generating() -> None:
    @ch.kernel(ch.Params(n=ty.u32, x=ty.ptr_mut(ty.u32)))
    def kernel(n, x):
        with ch.if_(True):
            with ch.if_(n < 1):
                x[0] = 1
        with ch.else_():
            x[0] = 2
        with ch.if_(False):
            count = ch.var(ty.u32, n)
            with ch.if_(count < 2):
                x[1] = count
        with ch.else_():
            with ch.if_(ty.u32(3) < 4):
                count = ch.var(ty.u32, 5)
                x[1] = count

    assert body(kernel) == [
        "  if (n < 1) x[0] = 1;",
        "  uint32_t count = 5;",
        "  x[1] = count;",
    ]


def test_loops() -> None:
    @ch.kernel(ch.Params(n=ty.u32, m=ty.i32, x=ty.ptr_mut(ty.u32)))
    def kernel(n, m, x):
        with ch.for_(4, unroll=True) as part:
            x[part] = 0
        with ch.for_(n, 100, 32, unroll=2) as i:
            x[i] = 0
        with ch.for_(1, m):
            with ch.while_(x[0] != 0):
                with ch.if_(x[1] == 1):
                    ch.break_()
                ch.continue_()

    assert body(kernel) == [
        "  #pragma unroll",
        "  for (uint32_t part = 0; part < 4; ++part) x[part] = 0;",
        "  #pragma unroll 2",
        "  for (uint32_t i = n; i < 100; i += 32) x[i] = 0;",
        "  for (int32_t i = 1; i < m; ++i) {",
        "    while (x[0] != 0) {",
        "      if (x[1] == 1) break;",
        "      continue;",
        "    }",
        "  }",
    ]


def test_variables_constants_arrays() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32)))
    def kernel(x):
        total = ch.var(ty.f32, 0)
        total += x[0]
        total.set(total * 2)
        limit = ch.const(ty.u32, 7)
        sums = ch.array(ty.f32, 4, zero=True)
        grid = ch.array(ty.u32, 2, 3)
        unset = ch.var(ty.u64)
        sums[3] = total
        grid[1][2] = limit
        unset.set(ty.u64(limit) << 40)

    assert body(kernel) == [
        "  float total = 0.0f;",
        "  total += x[0];",
        "  total *= 2.0f;",
        "  uint32_t limit = 7;",
        "  float sums[4] = {};",
        "  uint32_t grid[2][3];",
        "  uint64_t unset;",
        "  sums[3] = total;",
        "  grid[1][2] = limit;",
        "  unset = (uint64_t)(limit) << 40;",
    ]


def test_every_augmented_assignment_stores() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        v = ch.var(ty.u32, 1)
        v += 2
        v -= 2
        v *= 2
        v //= 2
        v %= 2
        v <<= 2
        v >>= 2
        v &= 2
        v |= 2
        v ^= 2
        x[0] |= v
        f = ch.var(ty.f32, 1.0)
        f /= 2

    operators = [line.split()[1] for line in body(kernel)[1:11]]
    assert operators == ["+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^="]
    assert body(kernel)[11:] == ["  x[0] = x[0] | v;", "  float f = 1.0f;", "  f /= 2.0f;"]


def test_members_of_vectors_and_structures_are_read_and_stored_to() -> None:
    pair = ty.struct("Pair", low=ty.u32, high=ty.array(ty.f32, 2))

    @ch.kernel(ch.Params(p=ty.ptr_mut(pair)))
    def kernel(p):
        v = ch.var(ty.u32x4)
        v.x = p[0].low
        v.y += 1
        p[1].low = v.x
        p[1].high[1] = 2
        first = ch.address_of(p[1].high[0])
        first[0] = 1

    assert body(kernel) == [
        "  uint4 v;",
        "  v.x = p[0].low;",
        "  v.y = v.y + 1;",
        "  p[1].low = v.x;",
        "  p[1].high[1] = 2.0f;",
        "  float* first = &p[1].high[0];",
        "  first[0] = 1.0f;",
    ]
    assert "struct Pair {\n  uint32_t low;\n  float high[2];\n};\n" in ch.render_file(kernel)


def test_structures_come_before_those_that_hold_them() -> None:
    inner = ty.struct("Inner", a=ty.u32)
    outer = ty.struct("Outer", i=inner, b=ty.u64)

    @ch.kernel(ch.Params(p=ty.ptr(outer)))
    def kernel(p):
        ch.comment("nothing of it is used")

    text = ch.render_file(kernel)
    assert 0 < text.index("struct Inner") < text.index("struct Outer") < text.index("__global__")
    assert outer.bytes == 16


def test_comments_keep_to_their_line() -> None:
    @ch.kernel(ch.Params())
    def kernel():
        ch.comment("one\ntwo \\")
        ch.raw_stmt("int a = 1;\nint b = 2;")

    assert body(kernel) == ["  // one", "  // two \\ .", "  int a = 1;", "  int b = 2;"]


def test_raw_text_brings_the_primitives_it_names() -> None:
    @ch.kernel(ch.Params())
    def kernel():
        ch.raw_stmt("block_barrier();")

    assert "void block_barrier()" in ch.render_file(kernel)


def test_a_primitive_brings_what_its_body_calls() -> None:
    helper = ch.Primitive("helper", ty.void, {}, "mbarrier_arrive(nullptr);", "a test")

    @ch.kernel(ch.Params())
    def kernel():
        helper()

    text = ch.render_file(kernel)
    places = [text.index(f" {name}(") for name in ("shared_address", "mbarrier_arrive", "helper")]
    assert places == sorted(places)


PROGRAM = """
from cheetah import lang as ch
from cheetah.lang import ty
{imports}
@ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32)), max_threads=64)
def kernel(x):
    total = ch.prim.warp_sum_f32(ch.prim.bits_float(ch.prim.shuffle_u32(ch.prim.float_bits(x[0]), 0)))
    ch.prim.block_barrier()
    x[0] = ch.prim.exp2_f32(total) + float("inf")
print(ch.render_file(kernel, header="a header", line_marks=True))
"""


@pytest.mark.slow
def test_the_same_program_gives_the_same_bytes(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(imports=""))
    texts = {
        subprocess.run(
            [sys.executable, str(file)],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            check=True,
        ).stdout
        for seed in (0, 1, 2, 3)
    }
    assert len(texts) == 1
    assert b"// a header" in next(iter(texts))


def test_rendering_twice_changes_nothing() -> None:
    @ch.kernel(ch.Params(n=ty.u32))
    def kernel(n):
        i = ch.thread_idx_x() + n
        with ch.for_(i) as j:
            ch.raw_stmt(f"use({j});")

    assert ch.render_file(kernel) == ch.render_file(kernel)


def test_a_kernel_may_take_whatever_is_declared() -> None:
    @ch.kernel(ch.Params(n=ty.u32, x=ty.ptr_mut(ty.u32)))
    def kernel(**arguments):
        arguments["x"][0] = arguments["n"]

    assert body(kernel) == ["  x[0] = n;"]


def test_a_loop_ends_where_its_whole_bound_says() -> None:
    @ch.kernel(ch.Params(n=ty.u32, m=ty.u32))
    def kernel(n, m):
        with ch.for_(ch.minimum(n, m)) as i:
            ch.raw_stmt(f"use({i});")
        with ch.for_(n & m):
            ch.raw_stmt("again();")

    assert body(kernel)[0] == "  for (uint32_t i = 0; i < min(n, m); ++i) {"
    assert body(kernel)[3].endswith("< (n & m); ++i) {")


def test_named_constants_stand_once_before_the_functions() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        scale = ch.constexpr(ty.f32, "SCALE", 0.5)
        ch.constexpr(ty.u32, "UNUSED", 1)
        for number in range(2):
            x[number] = x[number] * ch.constexpr(ty.u32, "WIDTH", 4) + 0
        WIDTH = x[2]
        x[3] = ty.u32(scale) + WIDTH

    text = ch.render_file(kernel)
    assert "#endif\n\nconstexpr float SCALE = 0.5f;\nconstexpr uint32_t WIDTH = 4;\n\n__global__" in text
    assert body(kernel)[:3] == ["  x[0] = x[0] * WIDTH;", "  x[1] = x[1] * WIDTH;", "  uint32_t WIDTH_2 = x[2];"]
