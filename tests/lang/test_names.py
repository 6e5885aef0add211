"""How Python's names become the device's: bindings, copies, scopes, results of primitives, closures."""

from __future__ import annotations

import contextlib

from cheetah import lang as ch
from cheetah.lang import prim, ty
from tests.lang.test_render import body

FACTOR = 3


def test_a_name_taken_in_an_open_block_gets_a_number() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        i = ch.thread_idx_x() + 1
        start = i
        with ch.if_(i < 5):
            first = i + 1
            i = first + 2
            x[i] = first
        with ch.if_(start > 5):
            first = start + 3
            x[0] = first

    assert body(kernel) == [
        "  uint32_t i = threadIdx.x + 1;",
        "  if (i < 5) {",
        "    uint32_t first = i + 1;",
        "    uint32_t i_2 = first + 2;",
        "    x[i_2] = first;",
        "  }",
        "  if (i > 5) {",
        "    uint32_t first = i + 3;",
        "    x[0] = first;",
        "  }",
    ]


def test_rebinding_makes_a_new_constant() -> None:
    @ch.kernel(ch.Params(n=ty.u32, x=ty.ptr_mut(ty.u32)))
    def kernel(n, x):
        n = n + 1
        n = n * 2
        x[0] = n

    assert body(kernel) == ["  uint32_t n_2 = n + 1;", "  uint32_t n_3 = n_2 * 2;", "  x[0] = n_3;"]


def test_a_variable_is_copied_a_constant_is_not() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        v = ch.var(ty.u32, 1)
        before = v
        v += 1
        same = before
        x[0] = before + same

    assert body(kernel) == [
        "  uint32_t v = 1;",
        "  uint32_t before = v;",
        "  v += 1;",
        "  x[0] = before + before;",
    ]


def test_results_of_primitives_take_the_users_name() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32)))
    def kernel(x):
        listed = [prim.warp_sum_f32(x[0])]
        total = listed[0]
        x[0] = total + listed[0]
        x[1] = prim.shuffle_xor_f32(total, 1)

    assert body(kernel) == [
        "  float total = warp_sum_f32(x[0]);",
        "  x[0] = total + total;",
        "  x[1] = shuffle_xor_f32(total, 1);",
    ]


def test_a_constant_called_value_keeps_its_name() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        value = x[0] + 1
        other = value
        x[1] = value + other

    assert body(kernel) == ["  uint32_t value = x[0] + 1;", "  x[1] = value + value;"]


def test_tuples_walrus_annotations_and_attributes_are_named() -> None:
    class Box:
        pass

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        a, b = x[0], x[1]
        c: ch.Expr = a + b
        x[2] = (d := c + 1) + d
        box = Box()
        box.count = ch.var(ty.u32, 5)
        box.count += c
        numbers = [7, 8]
        numbers[0], (e, f) = 1, (2, 3)
        x[3] = numbers[0] + e + f + a
        first, *rest = [x[4]]
        assert first is not None and rest == []
        x[5] = both = x[6] + 1
        x[7] = both

    assert body(kernel) == [
        "  uint32_t a = x[0];",
        "  uint32_t b = x[1];",
        "  uint32_t c = a + b;",
        "  uint32_t d = c + 1;",
        "  x[2] = d + d;",
        "  uint32_t count = 5;",
        "  count += c;",
        "  x[3] = 6 + a;",
        "  uint32_t both = x[6] + 1;",
        "  x[5] = both;",
        "  x[7] = both;",
    ]


def test_words_of_c_and_primitives_are_not_used_as_names() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        double = x[0] * 2
        namespace = x[1]
        warp_sum_f32 = prim.warp_sum_f32(1.0)
        x[2] = double + namespace + ty.u32(warp_sum_f32)

    assert [line.split("=")[0].split()[1] for line in body(kernel)[:3]] == ["double_2", "namespace_2", "warp_sum_f32_2"]


def test_inline_functions_are_named_where_they_are_called() -> None:
    @ch.inline
    def twice(v, scale=FACTOR, *, offset=0):
        result = v * scale + offset
        return result

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        a = twice(x[0])
        b = twice(x[1], 2, offset=1)
        x[2] = a + b

    assert body(kernel) == [
        "  uint32_t result = x[0] * 3;",
        "  uint32_t result_2 = x[1] * 2 + 1;",
        "  x[2] = result + result_2;",
    ]
    assert twice.__name__ == "twice"


def test_closures_are_the_functions_own() -> None:
    step = 1

    @ch.inline
    def advance(v):
        moved = v + step + later
        return moved

    step = 10
    later = 5

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        x[0] = advance(x[1])

    assert body(kernel) == ["  uint32_t moved = x[1] + 15;", "  x[0] = moved;"]


def test_methods_super_and_generators_can_emit() -> None:
    class Base:
        def scale(self):
            return 2

    class Derived(Base):
        @ch.inline
        def scale(self):
            return super().scale() + 1

        @contextlib.contextmanager
        @ch.inline
        def only(self, n):
            """A docstring
            that is indented less than the code."""
            limit = n * self.scale()
            with ch.if_(ch.thread_idx_x() < limit):
                yield limit

    @ch.kernel(ch.Params(n=ty.u32, x=ty.ptr_mut(ty.u32)))
    def kernel(n, x):
        with Derived().only(n) as limit:
            x[0] = limit

    assert body(kernel) == [
        "  uint32_t limit = n * 3;",
        "  if (threadIdx.x < limit) x[0] = limit;",
    ]


def test_loops_are_named_by_their_target() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        with ch.for_(4) as row:
            with ch.for_(4) as row_2, ch.for_(4) as row:
                x[row] = row_2
        with ch.for_(4, name="named") as row:
            x[row] = 0

    assert [line.split()[2] for line in body(kernel) if "for" in line] == ["row", "row_2", "row_3", "named"]


def test_names_given_by_hand() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        sums = [ch.var(ty.u32, 0, name=f"sum_{number}") for number in range(2)]
        sums[1] += x[0]

    assert body(kernel)[:2] == ["  uint32_t sum_0 = 0;", "  uint32_t sum_1 = 0;"]
