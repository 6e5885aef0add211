"""What control statements do when they run: programs in the emulator against the same programs in Python."""

from __future__ import annotations

import numpy as np
import pytest

from cheetah import lang as ch
from cheetah.emulator import compile_program
from cheetah.lang import ty

COUNT = 64


def run(kernel: ch.Kernel, *arguments: np.ndarray | int) -> None:
    """One block of COUNT threads."""
    parameters = [(name, str(type_)) for name, type_ in kernel.params.items()]
    compile_program(ch.render_file(kernel), kernel.name, parameters).launch(1, COUNT, 0, arguments)


def test_of_a_loop_of_one_round_the_body_stands_by_itself() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        for _ in range(2):
            with ch.for_(2, 5, 3) as i:
                place = x[i] + i
                x[place] = 1
        with ch.for_(1) as j:
            with ch.if_(x[0] == j):
                ch.break_()
            x[j] = 2
        with ch.for_(2, 5, 2) as k:
            x[k] = 3

    body = [line.strip() for line in ch.render(kernel).splitlines()[1:-1]]
    assert body[:4] == [
        "uint32_t place = x[2] + 2;",
        "x[place] = 1;",
        "uint32_t place_2 = x[2] + 2;",
        "x[place_2] = 1;",
    ]
    assert body[4:8] == ["for (uint32_t j = 0; j < 1; ++j) {", "if (x[0] == 0) break;", "x[0] = 2;", "}"]
    assert body[8:] == ["for (uint32_t k = 2; k < 5; k += 2) x[k] = 3;"]


def test_an_else_does_not_belong_to_what_a_loop_of_one_round_ends_with() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        with ch.for_(1), ch.if_(x[0] == 1):
            x[1] = 2
        with pytest.raises(ch.ControlError, match="must directly follow"), ch.else_():
            pass

    assert "else" not in ch.render(kernel)


@pytest.mark.compiler
@pytest.mark.slow
def test_loops_branches_and_jumps() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)), max_threads=COUNT)
    def kernel(x):
        i = ch.thread_idx_x()
        n = ch.var(ty.u32, i + 1)
        steps = ch.var(ty.u32, 0)
        with ch.while_(n != 1):
            with ch.if_(n % 2 == 0):
                n //= 2
            with ch.else_():
                with ch.if_(n > 1000):
                    ch.break_()
                n.set(3 * n + 1)
            steps += 1
        with ch.for_(i % 5, i, 3) as k:
            with ch.if_(k % 4 == 1):
                ch.continue_()
            with ch.for_(2, unroll=True) as j:
                steps ^= k << (j + 1)
        with ch.if_(i % 7 == 6):
            ch.return_()
        x[i] = steps

    def expected(i: int) -> int:
        n, steps = i + 1, 0
        while n != 1:
            if n % 2 == 0:
                n //= 2
            elif n > 1000:
                break
            else:
                n = 3 * n + 1
            steps += 1
        for k in range(i % 5, i, 3):
            if k % 4 == 1:
                continue
            for j in range(2):
                steps ^= k << (j + 1)
        return 0xFFFFFFFF if i % 7 == 6 else steps

    x = np.full(COUNT, 0xFFFFFFFF, dtype=np.uint32)
    run(kernel, x)
    assert x.tolist() == [expected(i) for i in range(COUNT)]


@pytest.mark.compiler
def test_structures_arrays_and_shared_memory() -> None:
    pair = ty.struct("Pair", flag=ty.u8, count=ty.u64, parts=ty.array(ty.f32, 2))

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32)), max_threads=COUNT)
    def kernel(x):
        i = ch.thread_idx_x()
        pairs = ch.reinterpret(ty.ptr_mut(pair), ch.prim.shared_arena())
        mine = ch.address_of(pairs[i])
        mine[0].flag = ty.u8(i & 1)
        mine[0].count = ty.u64(i) << 33
        pairs[i].parts[1] = ty.f32(i) * 0.5
        ch.prim.block_barrier()
        other = COUNT - 1 - i
        local = ch.array(ty.f32, 2, 2, zero=True)
        local[1][0] = pairs[other].parts[1]
        with ch.if_(pairs[other].flag == 1):
            local[1][0] += ty.f32(ty.u32(pairs[other].count >> 33))
        x[i] = local[1][0] + local[0][1]

    x = np.full(COUNT, np.nan, dtype=np.float32)
    parameters = [(name, str(type_)) for name, type_ in kernel.params.items()]
    program = compile_program(ch.render_file(kernel), kernel.name, parameters)
    program.launch(1, COUNT, COUNT * pair.bytes, [x], scheduler="random")
    assert pair.bytes == 24
    assert x.tolist() == [other * 0.5 + (other & 1) * other for other in reversed(range(COUNT))]
