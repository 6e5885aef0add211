"""Inline PTX: named operands, constraint letters from types, static values."""

from __future__ import annotations

import pytest

from cheetah import lang as ch
from cheetah.lang import prim, ty
from tests.lang.compilers import compile_cuda
from tests.lang.test_render import body


def bulk_copy_kernel() -> ch.Kernel:
    @ch.inline
    def bulk_copy(dst, src, size, barrier):
        """The paper's bulk copy, by one thread: the copy, then the arrival that announces its bytes."""
        dst_ptr = prim.shared_address(dst)
        barrier_ptr = prim.shared_address(barrier)
        with ch.if_(ch.thread_idx_x() == 0):
            ch.asm(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$dst_ptr], [$src_ptr], {size}, "
                "[$barrier];",
                dst_ptr=dst_ptr, src_ptr=src, size=size, barrier=barrier_ptr,
            )  # fmt: skip
            ch.asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$barrier], {size};", barrier=barrier_ptr, size=size)

    @ch.kernel(ch.Params(weights=ty.ptr(ty.u8)), max_threads=128)
    def kernel(weights):
        stage = prim.shared_arena()
        full = ch.reinterpret(ty.ptr_mut(ty.u64), stage + 1024)
        bulk_copy(stage, weights, 1024, full)

    return kernel


def test_the_papers_bulk_copy() -> None:
    assert body(bulk_copy_kernel())[-6:] == [
        "  uint32_t dst_ptr = shared_address(stage);",
        "  uint32_t barrier_ptr = shared_address(full);",
        "  if (threadIdx.x == 0) {",
        '    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];"'
        ' :: "r"(dst_ptr), "l"(weights), "r"(barrier_ptr) : "memory");',
        '    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" :: "r"(barrier_ptr) : "memory");',
        "  }",
    ]


@pytest.mark.compiler
def test_the_papers_bulk_copy_compiles() -> None:
    compile_cuda(ch.render_file(bulk_copy_kernel()))


def registers_kernel() -> ch.Kernel:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32), h=ty.u16, d=ty.f64, n=ty.u64), max_threads=32)
    def kernel(x, h, d, n):
        sum_ = ch.var(ty.f32)
        lane = ch.var(ty.u32)
        wide = ch.var(ty.u64)
        ch.asm("add.f32 $sum, $a, $ab;", ab=x[1], sum=ch.out(sum_), a=x[0])
        ch.asm("mov.u32 $lane, %laneid;", lane=ch.out(lane))
        ch.asm("{ .reg .b16 t; mov.b16 t, $h; .reg .f64 e; mov.f64 e, $d; }", h=h, d=d)
        ch.asm("add.u64 $wide, $n, $seven;", wide=ch.out(wide), n=n, seven=ty.u64(7))
        ch.asm("membar.gl;")
        x[lane] = sum_ + ty.f32(wide)

    return kernel


def test_letters_come_from_types_and_names_are_not_mixed_up() -> None:
    assert [line for line in body(registers_kernel()) if "asm" in line] == [
        '  asm volatile("add.f32 %0, %2, %1;" : "=f"(sum_) : "f"(x[1]), "f"(x[0]) : "memory");',
        '  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane) :  : "memory");',
        '  asm volatile("{ .reg .b16 t; mov.b16 t, %0; .reg .f64 e; mov.f64 e, %1; }" :: "h"(h), "d"(d) : "memory");',
        '  asm volatile("add.u64 %0, %1, %2;" : "=l"(wide) : "l"(n), "l"(7ull) : "memory");',
        '  asm volatile("membar.gl;" ::  : "memory");',
    ]


@pytest.mark.compiler
def test_every_register_class_compiles() -> None:
    compile_cuda(ch.render_file(registers_kernel()))
