"""Functions of the program: one text for calls that emit the same, the meaning of inlining, and what they refuse."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from cheetah import lang as ch
from cheetah.emulator import compile_program
from cheetah.lang import prim, ty
from tests.lang.compilers import compile_cuda

THREADS = 64
STATE = ty.struct("State", best=ty.f32, token=ty.u32)


def functions(kernel: ch.Kernel) -> list[str]:
    """The text's functions, without the kernel."""
    parts = ch.render(kernel).split("\n\n")
    return [textwrap.dedent(part) for part in parts[1:-2]] if kernel.members else parts[:-1]


def members(kernel: ch.Kernel) -> list[str]:
    """What all functions see."""
    return [line.strip() for line in ch.render(kernel).split("\n\n")[0].splitlines()[1:]]


def lines_of_kernel(kernel: ch.Kernel) -> list[str]:
    parts = ch.render(kernel).split("\n\n")
    lines = parts[-2].splitlines()[1:-2] if kernel.members else parts[-1].splitlines()[1:-1]
    return [line.strip() for line in lines]


# -- text ---------------------------------------------------------------------------------------------------------


class Counter:
    """What a block does to a variable of its own, from wherever it is called."""

    def __init__(self, decorator: Callable[..., Any]) -> None:
        self.total = ch.var(ty.f32, 0, name="total")
        self.limit = ch.var(ty.u32, 7, name="limit")
        self.add = decorator(self._add)

    def _add(self, value: ch.Expr, scale: float, rounds: ch.Value) -> None:
        """Add a value, scaled.

        What a second paragraph says stays in Python.
        """
        scaled = value * scale
        with ch.for_(rounds) as i:
            with ch.if_(i < self.limit):
                self.total += scaled


def plain(decorator: Callable[..., Any]) -> Callable[..., Any]:
    """`decorator` for what is bound to an object already: the function below it is decorated."""
    return lambda method: decorator(method.__func__).__get__(method.__self__)


def counting(decorator: Callable[..., Any]) -> ch.Kernel:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32), n=ty.u32), max_threads=THREADS)
    def kernel(x, n):
        lane = ch.thread_idx_x()
        counter = Counter(plain(decorator))
        counter.add(x[lane], 1.0, n)
        with ch.if_(lane < 5):
            scaled = x[lane] * 3
            counter.add(scaled + 1, 1.0, n)
            counter.add(scaled, 2.0, n)
            counter.add(scaled, 2.0, 3)
        x[lane] = counter.total

    return kernel


def test_calls_that_emit_the_same_share_a_function_and_static_arguments_make_another() -> None:
    first, second, third = functions(counting(ch.function))
    assert first == (
        "// Add a value, scaled.\n"
        "__device__ __forceinline__ void add(float value, uint32_t rounds) {\n"
        "  for (uint32_t i = 0; i < rounds; ++i) {\n"
        "    if (i < limit) total += value;\n"
        "  }\n"
        "}"
    )
    assert "void add_2(float value, uint32_t rounds)" in second
    assert "void add_3(float value)" in third and "i < 3" in third
    assert members(counting(ch.function)) == ["float* x;", "uint32_t n;", "float total;", "uint32_t limit;"]
    assert lines_of_kernel(counting(ch.function)) == [
        "uint32_t lane = threadIdx.x;",
        "total = 0.0f;",
        "limit = 7;",
        "add(x[lane], n);",
        "if (lane < 5) {",
        "float scaled = x[lane] * 3.0f;",
        "add(scaled + 1.0f, n);",
        "add_2(scaled, n);",
        "add_3(scaled);",
        "}",
        "x[lane] = total;",
    ]


def test_results_get_the_callers_names() -> None:
    @ch.function
    def ordered(a, b):
        low = ch.minimum(a, b)
        return low, ch.maximum(a, b)

    @ch.function
    def half(value):
        return value * 0.5

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32)))
    def kernel(x):
        low, high = ordered(x[0], x[1])
        middle = half(low + high)
        x[2] = middle
        x[3] = half(middle)

    assert functions(kernel) == [
        "__device__ __forceinline__ void ordered(float a, float b, float& low, float& result) {\n"
        "  low = a < b ? a : b;\n"
        "  result = a < b ? b : a;\n"
        "}",
        "__device__ __forceinline__ float half(float value) {\n  return value * 0.5f;\n}",
    ]
    assert lines_of_kernel(kernel) == [
        "float low;",
        "float high;",
        "ordered(x[0], x[1], low, high);",
        "float middle = half(low + high);",
        "x[2] = middle;",
        "x[3] = half(middle);",
    ]


def test_what_needs_no_device_comes_back_as_it_is() -> None:
    @ch.function
    def described(x, count):
        x[0] = 1.0
        return x, count + 1, ty.u32(5)

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32)))
    def kernel(x):
        place, count, five = described(x, 2)
        assert count == 3
        place[count] = ty.f32(five)

    assert "void described(float* x)" not in ch.render(kernel)  # x is the parameter's own name: a result
    assert lines_of_kernel(kernel)[-1] == "place[3] = 5.0f;"


def test_a_callers_variable_goes_back_as_it_is() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32)))
    def kernel(x):
        total = ch.var(ty.f32, 1)

        @ch.function
        def mine():
            x[1] = 2.0
            return total

        same = mine()
        same_again = ch.var(ty.f32, same)
        x[0] = same_again

    assert "void mine()" in ch.render(kernel)
    assert lines_of_kernel(kernel)[1:3] == ["mine();", "float same = total;"]


def test_names_do_not_depend_on_the_caller() -> None:
    @ch.function
    def twice(value):
        doubled = value * 2
        return doubled + 1

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        doubled = twice(x[0])
        with ch.if_(doubled > 1):
            value = twice(doubled)
            x[1] = twice(value)

    (only,) = functions(kernel)
    assert "uint32_t twice(uint32_t value) {\n  uint32_t doubled = value * 2;" in only


def test_a_functions_name_is_free_where_it_is_called() -> None:
    @ch.function
    def total(x):
        x[0] = 1

    write_total = total

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        with ch.if_(x[1] == 1):
            total = ch.var(ty.u32, 2)
            x[1] = total
        write_total(x)
        total_2 = x[3] + 1
        x[4] = total_2

    assert lines_of_kernel(kernel)[-3:] == ["total_2(x);", "uint32_t total_2_2 = x[3] + 1;", "x[4] = total_2_2;"]


def test_functions_call_functions_and_stand_in_the_order_of_their_calls() -> None:
    @ch.function
    def inner(sums, x):
        sums[1] += x[0]

    @ch.function
    def outer(x):
        sums = ch.array(ty.f32, 4, zero=True)
        inner(sums, x)
        inner(sums, x + 1)
        return sums[1]

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32)))
    def kernel(x):
        x[0] = outer(x)

    first, second = functions(kernel)
    assert first.startswith("__device__ __forceinline__ void inner(float (&sums)[4], float* x)")
    assert second.startswith("__device__ __forceinline__ float outer(float* x)")


def test_numbers_given_as_arguments_share_a_function() -> None:
    @ch.function
    def scaled(value, factor, first):
        return value * factor + ty.f32(first)

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32)))
    def kernel(x):
        x[0] = scaled(x[0], ch.argument(2.0), ch.argument(0))
        x[1] = scaled(x[1], ch.argument(1.0), ch.argument(7))

    (only,) = functions(kernel)
    assert only.startswith("__device__ __forceinline__ float scaled(float value, float factor, uint32_t first) {")
    assert "value * factor + (float)(first)" in only
    assert lines_of_kernel(kernel) == ["x[0] = scaled(x[0], 2.0f, 0);", "x[1] = scaled(x[1], 1.0f, 7);"]


class Place(NamedTuple):
    first: Any
    step: Any


SPAN = ty.struct("Span", start=ty.u32, count=ty.u32, scale=ty.u64)


def test_records_and_named_tuples_tell_a_functions_calls_apart() -> None:
    @ch.function
    def total(x, span, place):
        sums = ch.var(ty.f32, 0)
        with ch.for_(span.start, span.start + span.count) as i:
            sums += x[place.first + i * place.step]
        return sums

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32), n=ty.u32))
    def kernel(x, n):
        early = ch.record(SPAN, "EARLY", start=0, count=3, scale=1)
        late = ch.record(SPAN, "LATE", start=4, count=1, scale=1 << 40)
        x[0] = total(x, early, Place(n, ch.argument(2)))
        x[1] = total(x, late, Place(n + 1, ch.argument(1)))
        assert ch.record(SPAN, "EARLY", start=0, count=3, scale=1) is early

    (only,) = functions(kernel)
    assert only.startswith(
        "__device__ __forceinline__ float total(float* x, Span span, uint32_t first, uint32_t step) {"
    )
    assert "i < span.start + span.count" in only
    assert lines_of_kernel(kernel) == ["x[0] = total(x, EARLY, n, 2);", "x[1] = total(x, LATE, n + 1, 1);"]
    definitions = ch.render_file(kernel).split("#endif\n")[1]
    assert definitions.startswith(
        "\nstruct Span {\n  uint32_t start, count;\n  uint64_t scale;\n};\n\n"
        "__device__ constexpr Span EARLY = {0, 3, 1};\n__device__ constexpr Span LATE = {4, 1, 1099511627776};\n"
    )


def test_what_a_pointer_points_to_is_read_by_an_arrow() -> None:
    @ch.kernel(ch.Params(states=ty.ptr_mut(STATE)))
    def kernel(states):
        best = ch.address_of(states[3])
        ch.pointee(best).token = ch.pointee(best + 1).token + 1
        states[0].best = ch.pointee(best).best

    assert lines_of_kernel(kernel) == [
        "State* best = &states[3];",
        "best->token = (best + 1)->token + 1;",
        "states[0].best = best->best;",
    ]


def test_a_variables_member_goes_by_reference() -> None:
    @ch.function
    def raise_to(best, value):
        with ch.if_(value > best):
            best.set(value)

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32)))
    def kernel(x):
        state = ch.var(STATE)
        state.best = x[0]
        raise_to(state.best, x[1])
        x[2] = state.best

    (only,) = functions(kernel)
    assert only.startswith("__device__ __forceinline__ void raise_to(float& best, float value) {")
    assert lines_of_kernel(kernel)[-2:] == ["raise_to(state.best, x[1]);", "x[2] = state.best;"]


def test_an_outline_takes_what_it_uses() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32), n=ty.u32))
    def kernel(x, n):
        total = ch.var(ty.f32, 0)
        with ch.outline("sum", "The sum of all."):
            with ch.for_(n) as i:
                total += x[i]
        x[0] = total

    assert functions(kernel)[0].startswith("// The sum of all.\n__device__ __forceinline__ void sum() {\n")
    assert lines_of_kernel(kernel) == ["total = 0.0f;", "sum();", "x[0] = total;"]
    assert ch.render(kernel).endswith("kernel(float* x, uint32_t n) {\n  Kernel{x, n}.run();\n}\n")


def test_names_of_loops_and_arrays_become_parameters() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32), n=ty.u32))
    def kernel(x, n):
        sums = ch.array(ty.f32, 4, zero=True)
        with ch.for_(n) as i:
            doubled = i * 2
            with ch.outline("add"):
                sums[1] += x[doubled + i]
        x[0] = sums[1]

    (add,) = functions(kernel)
    assert add.startswith("__device__ __forceinline__ void add(float (&sums)[4], uint32_t doubled, uint32_t i) {")
    assert members(kernel) == ["float* x;", "uint32_t n;"]


def test_a_name_of_the_body_is_no_members() -> None:
    """A function that uses the kernel's `total` has a `total` of its own under another name; one that does not keeps
    it."""

    @ch.function
    def own(x):
        total = x[1] + 1
        x[1] = total * 2

    @ch.function
    def both(x, kernels):
        total = x[2] + 1
        own(x)
        kernels[0].set(total)

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        total = ch.var(ty.u32, 3)
        kernels = {0: total}
        both(x, kernels)
        x[2] = total

    alone, outer = functions(kernel)
    assert "uint32_t total = x[1] + 1;" in alone
    assert "uint32_t total_2 = x[2] + 1;" in outer and "  total = total_2;" in outer


def test_roles_whose_names_are_alike_share_a_member_if_they_are_of_one_type() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        roles = ch.Role("producer"), ch.Role("consumer"), ch.Role("adder")
        for role, type_ in zip(roles, (ty.u32, ty.u32, ty.u64), strict=True):
            with role:
                turn = ch.var(type_, 0)
                with ch.outline("advance"):
                    turn += 1
                x[0] = ty.u32(turn)
        for number, role in enumerate(roles):
            with ch.if_(x[5] == number):
                role.emit_here()

    assert members(kernel) == ["uint32_t* x;", "uint32_t turn;"]
    of_two, of_one = functions(kernel)
    assert "void advance()" in of_two and "void advance_2(uint64_t& turn)" in of_one
    assert lines_of_kernel(kernel).count("turn = 0;") == 2 and "uint64_t turn = 0;" in lines_of_kernel(kernel)


def test_long_lists_are_broken() -> None:
    names = [f"parameter_number_{number}" for number in range(12)]

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        with ch.for_(1):
            values = {name: ch.var(ty.u32, x[1], name=name) for name in names}
            with ch.outline("all_of_them"):
                for name in names:
                    x[0] += values[name]

    (function,) = functions(kernel)
    lines = function.splitlines()
    assert max(map(len, lines)) <= 120 and len(lines) > 14
    assert lines[1].startswith("    uint32_t parameter_number_")


# -- roles --------------------------------------------------------------------------------------------------------


def test_a_function_grows_in_the_role_that_calls_it() -> None:
    @ch.function
    def advance(stage):
        stage += 1

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        copy, math = ch.Role("producer"), ch.Role("consumer")
        for role, place in ((copy, 0), (math, 1)):
            with role:
                stage = ch.var(ty.u32, 0)
                advance(stage)
                x[place] = stage
        with ch.if_(ch.thread_idx_x() < 32):
            copy.emit_here()
        with ch.else_():
            math.emit_here()

    assert functions(kernel) == ["__device__ __forceinline__ void advance(uint32_t& stage) {\n  stage += 1;\n}"]
    assert lines_of_kernel(kernel).count("advance(stage);") == 2


def test_what_the_whole_kernel_knows_is_declared_once_and_seen_by_all_roles() -> None:
    def total(x):
        return ch.whole("pairs", ch.reinterpret(ty.ptr_mut(ty.f32x2), x + 4))[1].x

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32)))
    def kernel(x):
        pairs = x[0] + 1.0
        thread = ch.thread_idx_x()
        early, late = ch.Role("early"), ch.Role("late")
        with early:
            x[0] = total(x) + pairs
        with late, ch.outline("write"):
            x[1] = total(x) + ch.whole("own", x + thread)[0]
        with ch.if_(thread == 0):
            early.emit_here()
        with ch.else_():
            late.emit_here()

    # `own` behind `thread`, which it is made of; both before all that uses them, under names that nothing else has.
    assert members(kernel)[:3] == ["float* x;", "float2* pairs_2;", "float* own;"]
    lines = lines_of_kernel(kernel)
    assert lines[0] == "pairs_2 = (float2*)(x + 4);"
    assert lines.index("own = x + thread;") == lines.index("uint32_t thread = threadIdx.x;") + 1
    assert lines.count("pairs_2 = (float2*)(x + 4);") == 1


def test_what_a_function_says_to_another_role_goes_to_that_roles_program() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        copy, math = ch.Role("producer"), ch.Role("consumer")

        @ch.function
        def both():
            with copy:
                x[0] = 1
            with math:
                x[1] = 2

        with math:
            both()
        with ch.if_(x[5] == 0):
            copy.emit_here()
        with ch.else_():
            math.emit_here()

    assert functions(kernel) == ["__device__ __forceinline__ void both() {\n  x[1] = 2;\n}"]
    assert lines_of_kernel(kernel) == ["if (x[5] == 0) {", "x[0] = 1;", "} else {", "both();", "}"]


# -- meaning ------------------------------------------------------------------------------------------------------


def run(kernel: ch.Kernel, *arguments: np.ndarray | int) -> None:
    parameters = [(name, str(type_)) for name, type_ in kernel.params.items()]
    compile_program(ch.render_file(kernel), kernel.name, parameters).launch(1, THREADS, 0, arguments)


@pytest.mark.compiler
def test_a_function_means_what_the_same_function_inlined_means() -> None:
    found = []
    for decorator in (ch.inline, ch.function):
        x = np.linspace(-3, 4, THREADS, dtype=np.float32)
        run(counting(decorator), x, 9)
        found.append(x)
    start = np.linspace(-3, 4, THREADS, dtype=np.float32)
    assert found[1].tobytes() == found[0].tobytes() and not np.array_equal(found[0], start)


def everything(decorator: Callable[..., Any]) -> ch.Kernel:
    """Variables, arrays of arrays, vectors, structures and warps' primitives as arguments and results."""

    @decorator
    def scale(vector, factor):
        vector.x = vector.x * factor
        vector.w += 1

    @decorator
    def row_sum(row, count):
        total = ch.var(ty.u32, 0)
        for number in range(count):
            total += row[number]
            row[number] = number
        return total

    @decorator
    def better(state, value, token):
        with ch.if_(value > state.best):
            state.best = value
            state.token = token

    @decorator
    def spread(values):
        first, second = values
        return [prim.shuffle_xor_f32(first, 1), first + second], second > first

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)), max_threads=THREADS)
    def kernel(x):
        lane = ch.thread_idx_x()
        vector = ch.var(ty.u32x4, prim.make_u32x4(lane, 1, 2, 3))
        scale(vector, 3)
        scale(vector, lane)
        grid = ch.array(ty.u32, 2, 3)
        for number in range(6):
            grid[number // 3][number % 3] = lane + number
        total = ch.var(ty.u32, row_sum(grid[1], 3) + row_sum(grid[0], 2))
        state = ch.var(STATE)
        state.best = 0.5
        state.token = 100
        (other, both), larger = spread((ty.f32(lane), ty.f32(x[lane])))
        better(state, other, lane)
        better(state, both, lane + 1)
        with ch.if_(larger):
            total += 1000
        x[lane] = vector.x + vector.w + total * 7 + grid[1][2] + state.token * 13 + ty.u32(state.best)

    return kernel


@pytest.mark.compiler
def test_every_kind_of_argument_and_result() -> None:
    found = []
    for decorator in (ch.inline, ch.function):
        x = np.arange(THREADS, dtype=np.uint32) ** 2 % 37
        run(everything(decorator), x)
        found.append(x.tolist())
    assert found[0] == found[1] and len(set(found[0])) > 20
    assert "State& state" in ch.render(everything(ch.function))
    assert "uint32_t (&row)[3]" in ch.render(everything(ch.function))


@pytest.mark.compiler
def test_nvrtc_takes_the_text() -> None:
    compile_cuda(ch.render_file(everything(ch.function)))


@pytest.mark.compiler
def test_a_wait_inside_a_function_lets_other_threads_run() -> None:
    @ch.function
    def meet(counter):
        with ch.if_(ch.thread_idx_x() % 32 == 0):
            prim.add_release_u64(counter, 1)
        prim.wait_at_least_u64(counter, THREADS // 32)

    @ch.kernel(ch.Params(counter=ty.ptr_mut(ty.u64), x=ty.ptr_mut(ty.u32)), max_threads=THREADS)
    def kernel(counter, x):
        meet(counter)
        x[ch.thread_idx_x()] = ty.u32(counter[0])

    counter, x = np.zeros(1, dtype=np.uint64), np.zeros(THREADS, dtype=np.uint32)
    run(kernel, counter, x)
    assert set(x.tolist()) == {THREADS // 32}
