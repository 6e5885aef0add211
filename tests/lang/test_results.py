"""Results of calls stand where they are used, where that is one place and means the same; constants of sums are one."""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.lang import prim, ty


def body(kernel: ch.Kernel) -> list[str]:
    return [line.strip() for line in ch.render(kernel).partition("__global__")[2].splitlines()[1:-1]]


def kernel_of(function: Any) -> ch.Kernel:
    return ch.kernel(ch.Params(n=ty.u32, x=ty.ptr_mut(ty.u32)))(function)


def test_a_result_used_once_stands_where_it_is_used() -> None:
    def kernel(n: ch.Expr, x: ch.Expr) -> None:
        x[n] = prim.load_constant_u32(x)
        first = ch.const(ty.u32, prim.load_constant_u32(x + 1))
        total = ch.var(ty.u32, n)
        total += prim.shuffle_xor_u32(total, 16)
        with ch.if_(first < prim.load_constant_u32(x + prim.load_constant_u32(x + total))):
            x[0] = first
        prim.shuffle_xor_u32(total, 1)

    assert body(kernel_of(kernel)) == [
        "x[n] = load_constant_u32(x);",
        "uint32_t first = load_constant_u32(x + 1);",
        "uint32_t total = n;",
        "total += shuffle_xor_u32(total, 16);",
        "if (first < load_constant_u32(x + load_constant_u32(x + total))) x[0] = first;",
        "shuffle_xor_u32(total, 1);",
    ]


def test_a_result_that_is_used_again_or_later_keeps_a_name() -> None:
    def kernel(n: ch.Expr, x: ch.Expr) -> None:
        listed = [prim.load_constant_u32(x)]
        x[0] = listed[0] + listed[0]
        listed = [prim.load_constant_u32(x + 1)]
        prim.warp_barrier()
        x[1] = listed[0]
        with ch.for_(prim.load_constant_u32(x + 2)) as i:
            x[i] = 0

    assert body(kernel_of(kernel)) == [
        "uint32_t value = load_constant_u32(x);",
        "x[0] = value + value;",
        "uint32_t value_2 = load_constant_u32(x + 1);",
        "warp_barrier();",
        "x[1] = value_2;",
        "uint32_t value_3 = load_constant_u32(x + 2);",
        "for (uint32_t i = 0; i < value_3; ++i) x[i] = 0;",
    ]


def test_no_call_becomes_conditional() -> None:
    def kernel(n: ch.Expr, x: ch.Expr) -> None:
        x[0] = ch.select(n == 0, prim.shuffle_xor_u32(n, 1), n)
        with ch.if_((n == 1) & (prim.shuffle_xor_u32(n, 2) == 0)):
            x[1] = n
        with ch.if_((prim.shuffle_xor_u32(n, 4) == 0) & (n == 1)):
            x[2] = n

    assert body(kernel_of(kernel)) == [
        "uint32_t value = shuffle_xor_u32(n, 1);",
        "x[0] = n == 0 ? value : n;",
        "uint32_t value_2 = shuffle_xor_u32(n, 2);",
        "if (n == 1 && value_2 == 0) x[1] = n;",
        "if (shuffle_xor_u32(n, 4) == 0 && n == 1) x[2] = n;",
    ]


def test_no_call_moves_across_what_may_read_other_than_before_it() -> None:
    """C++ says nothing of the order of two operands."""

    @ch.function
    def next_of(counter: Any) -> Any:
        counter += 1
        return counter * 2

    def kernel(n: ch.Expr, x: ch.Expr) -> None:
        x[1] = x[0] + prim.load_constant_u32(x)
        x[2] = prim.load_constant_u32(x) + prim.load_constant_u32(x + 1)
        counter = ch.var(ty.u32, n)
        x[3] = counter + next_of(counter)
        x[x[4]] = next_of(counter)

    assert body(kernel_of(kernel)) == [
        "uint32_t value = load_constant_u32(x);",
        "x[1] = x[0] + value;",
        "uint32_t value_2 = load_constant_u32(x);",
        "x[2] = value_2 + load_constant_u32(x + 1);",
        "uint32_t counter = n;",
        "uint32_t value_4 = next_of(counter);",
        "x[3] = counter + value_4;",
        "x[x[4]] = next_of(counter);",
    ]


def test_text_that_is_taken_literally_finds_the_name() -> None:
    def kernel(n: ch.Expr, x: ch.Expr) -> None:
        value = [prim.load_constant_u32(x)][0]
        ch.raw_stmt(f"x[1] = {value};")
        x[0] = value

    assert body(kernel_of(kernel)) == ["uint32_t value = load_constant_u32(x);", "x[1] = value;", "x[0] = value;"]


def test_constants_of_sums_and_products_are_one() -> None:
    def kernel(n: ch.Expr, x: ch.Expr) -> None:
        x[0] = n + 1 + 64
        x[1] = n * 2 * 4096
        x[2] = n + (x[0] * 8 + 256)
        x[3] = n + 5 - 7
        x[4] = n - 5 + 7
        x[5] = (n + 1) * 2 + 3
        x[6] = n + 3 - 3
        x[7] = n - (x[0] - 1)

    assert body(kernel_of(kernel)) == [
        "x[0] = n + 65;",
        "x[1] = n * 8192;",
        "x[2] = n + x[0] * 8 + 256;",
        "x[3] = n - 2;",
        "x[4] = n + 2;",
        "x[5] = (n + 1) * 2 + 3;",
        "x[6] = n;",
        "x[7] = n - (x[0] - 1);",
    ]
