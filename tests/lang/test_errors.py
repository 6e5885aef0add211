"""The catalogue of mistakes: each is caught where it is made, by its class, with its message and the user's line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cheetah import lang as ch
from cheetah.errors import CheetahError
from cheetah.lang import prim, ty

HERE = Path(__file__)
PARAMETERS = ch.Params(n=ty.u32, m=ty.u64, c=ty.ptr(ty.f32), x=ty.ptr_mut(ty.f32), w=ty.ptr(ty.bf16))


@contextmanager
def refused(kind: type[ch.LangError], message: str) -> Iterator[None]:
    """The body's kernel must be refused with this class and message, at the line marked `# wrong` after the call."""
    file, start = _caller()
    with pytest.raises(kind) as caught:
        yield
    text, place = str(caught.value).rsplit("\n  at ", 1)
    assert message in text, text
    marked = [number for number, line in enumerate(Path(file).read_text().splitlines(), 1) if "# wrong" in line]
    assert place == f"{file}:{next(number for number in marked if number > start)}"
    assert caught.type is kind and issubclass(kind, CheetahError)


def _caller() -> tuple[str, int]:
    """The file and line of the `with refused(...)`: above this function, `refused` and contextlib."""
    frame = sys._getframe(3)
    return frame.f_code.co_filename, frame.f_lineno


def emits(function: Callable[..., Any]) -> None:
    """Run a body as a kernel with the parameters above."""
    ch.kernel(PARAMETERS)(function)


# -- Python's control flow on device values -----------------------------------------------------------------------


def test_a_device_value_as_a_python_bool() -> None:
    with refused(ch.DeviceBoolError, "`n < 4` is a value on the device: Python cannot branch on it while generating."):

        @emits
        def kernel(n, m, c, x, w):
            if n < 4:  # wrong
                x[0] = 1


def test_and_or_and_chained_comparisons() -> None:
    with refused(ch.DeviceBoolError, "combine conditions with `&`, `|`, `~`"):

        @emits
        def kernel(n, m, c, x, w):
            with ch.if_(0 < n < 4):  # wrong
                x[0] = 1


def test_a_device_value_as_a_python_int() -> None:
    with refused(ch.TypeMixError, "`n` is a value on the device and Python needs an int here"):

        @emits
        def kernel(n, m, c, x, w):
            for _ in range(n):  # wrong
                x[0] = 1


def test_iterating_over_a_device_value() -> None:
    with refused(ch.TypeMixError, "`x` is a value on the device and cannot be iterated over; use `ch.for_`."):

        @emits
        def kernel(n, m, c, x, w):
            for _ in x:  # wrong
                pass


# -- control ------------------------------------------------------------------------------------------------------


def test_if_without_with() -> None:
    message = "`ch.if_(...)` opens a block on the device: write `with ch.if_(...):`, not `if ch.if_(...):`."
    with refused(ch.MissingWithError, message):

        @emits
        def kernel(n, m, c, x, w):
            if ch.if_(n < 4):  # wrong
                x[0] = 1


def test_for_without_with() -> None:
    message = "`ch.for_(...)` is a loop on the device: write `with ch.for_(...) as i:`, not `for i in ch.for_(...):`."
    with refused(ch.MissingWithError, message):

        @emits
        def kernel(n, m, c, x, w):
            for i in ch.for_(n):  # wrong
                x[i] = 1


def test_a_control_verb_that_is_never_entered_is_seen_at_the_next_statement() -> None:
    with refused(ch.MissingWithError, "`ch.if_(...)` was called but opens no block: write `with ch.if_(...):`"):

        @emits
        def kernel(n, m, c, x, w):
            ch.if_(n < 4)  # wrong
            x[0] = 1


def test_a_control_verb_that_is_never_entered_is_seen_at_the_end() -> None:
    with refused(ch.MissingWithError, "`ch.while_(...)` was called but opens no block"):

        @emits
        def kernel(n, m, c, x, w):
            x[0] = 1
            ch.while_(n < 4)  # wrong


def test_a_control_verb_that_is_never_entered_is_seen_at_the_end_of_its_block() -> None:
    with refused(ch.MissingWithError, "`ch.else_()` was called but opens no block: write `with ch.else_():`"):

        @emits
        def kernel(n, m, c, x, w):
            with ch.for_(4):
                with ch.if_(n < 4):
                    x[0] = 1
                ch.else_()  # wrong
            x[0] = 2


def test_else_without_if() -> None:
    with refused(ch.ControlError, "ch.else_() must directly follow a `with ch.if_(...)` block of the same level."):

        @emits
        def kernel(n, m, c, x, w):
            with ch.if_(n < 4):
                x[0] = 1
            x[1] = 1
            with ch.else_():  # wrong
                x[0] = 2


def test_two_elses() -> None:
    with refused(ch.ControlError, "ch.else_() must directly follow"):

        @emits
        def kernel(n, m, c, x, w):
            with ch.if_(n < 4):
                x[0] = 1
            with ch.else_():
                x[0] = 2
            with ch.else_():  # wrong
                x[0] = 3


@pytest.mark.parametrize("condition", [True, False])
def test_two_elses_of_a_static_condition(condition: bool) -> None:
    with refused(ch.ControlError, "ch.else_() must directly follow"):

        @emits
        def kernel(n, m, c, x, w):
            with ch.if_(condition):
                with ch.if_(n < 4):
                    x[0] = 1
            with ch.else_():
                with ch.if_(n < 5):
                    x[0] = 2
            with ch.else_():  # wrong
                x[0] = 3


def test_else_behind_what_follows_a_static_condition() -> None:
    with refused(ch.ControlError, "ch.else_() must directly follow"):

        @emits
        def kernel(n, m, c, x, w):
            with ch.if_(False):
                x[0] = 1
            x[1] = 1
            with ch.else_():  # wrong
                x[0] = 2


def test_a_static_condition_that_is_never_entered() -> None:
    with refused(ch.MissingWithError, "`ch.if_(...)` was called but opens no block"):

        @emits
        def kernel(n, m, c, x, w):
            ch.if_(True)  # wrong
            x[0] = 1


def test_names_of_a_body_that_is_left_out() -> None:
    with refused(ch.ScopeError, "`count` was bound in an if_ block"):

        @emits
        def kernel(n, m, c, x, w):
            with ch.if_(False):
                count = ch.var(ty.u32, n)
            x[0] = ty.f32(count)  # wrong


def test_if_of_a_number() -> None:
    with refused(ch.TypeMixError, "ch.if_ needs a condition, not `n`; compare it, e.g. `n != 0`."):

        @emits
        def kernel(n, m, c, x, w):
            with ch.if_(n):  # wrong
                x[0] = 1


def test_for_with_no_bounds() -> None:
    with refused(ch.ControlError, "ch.for_ takes (stop), (start, stop) or (start, stop, step), not 0 bounds."):

        @emits
        def kernel(n, m, c, x, w):
            with ch.for_() as i:  # wrong
                x[i] = 1


def test_for_with_a_step_of_zero() -> None:
    with refused(ch.RangeError, "ch.for_ counts upwards; a step of 0 would never end."):

        @emits
        def kernel(n, m, c, x, w):
            with ch.for_(0, n, 0) as i:  # wrong
                x[i] = 1


def test_for_downwards() -> None:
    with refused(ch.RangeError, "-1 does not fit uint32_t, which holds 0 to 4294967295."):

        @emits
        def kernel(n, m, c, x, w):
            with ch.for_(n, 0, -1) as i:  # wrong
                x[i] = 1


def test_for_over_floats() -> None:
    with refused(ch.TypeMixError, "ch.for_ counts integers; its bounds have type float."):

        @emits
        def kernel(n, m, c, x, w):
            with ch.for_(x[0]) as i:  # wrong
                x[i] = 1


def test_for_with_mixed_bounds() -> None:
    with refused(ch.TypeMixError, "`m` has type uint64_t where uint32_t is needed"):

        @emits
        def kernel(n, m, c, x, w):
            with ch.for_(n, m) as i:  # wrong
                x[i] = 1


def test_break_outside_of_a_loop() -> None:
    with refused(ch.ControlError, "ch.break_() outside of a loop."):

        @emits
        def kernel(n, m, c, x, w):
            with ch.if_(n < 4):
                ch.break_()  # wrong


def test_a_while_condition_that_would_be_computed_once() -> None:
    with refused(ch.ControlError, "the condition of ch.while_ calls a primitive, which runs once, before the loop"):

        @emits
        def kernel(n, m, c, x, w):
            with ch.while_(prim.shuffle_u32(n, 0) < 4):  # wrong
                x[0] = 1


# -- names --------------------------------------------------------------------------------------------------------


def test_a_name_used_after_its_block() -> None:
    with refused(ch.ScopeError, "`y` was bound in the loop over i"):

        @emits
        def kernel(n, m, c, x, w):
            with ch.for_(n):
                y = x[0] + 1
            x[0] = y  # wrong


def test_a_sum_rebound_in_a_loop_instead_of_stored_to() -> None:
    with refused(ch.ScopeError, "bind it outside, or use `ch.var`."):

        @emits
        def kernel(n, m, c, x, w):
            total = ch.const(ty.f32, 0)
            with ch.for_(n) as i:
                total = total + x[i]
            x[0] = total  # wrong


def test_a_counter_used_in_its_own_condition_of_another_block() -> None:
    with refused(ch.ScopeError, "`row` was bound in the loop over row"):

        @emits
        def kernel(n, m, c, x, w):
            with ch.for_(n) as row:
                x[row] = 0
            with ch.if_(row < 3):  # wrong
                x[0] = 1


def test_a_name_of_another_role() -> None:
    message = "is used by the consumer code: roles share only what both compute"
    with refused(ch.ScopeError, message):

        @emits
        def kernel(n, m, c, x, w):
            copy, math = ch.Role("producer"), ch.Role("consumer")
            with copy:
                stage = n + 1
            with math:
                x[stage] = 1  # wrong


def test_a_role_that_is_never_placed() -> None:
    with refused(ch.RoleError, "the producer role has a program that no warp runs: call `emit_here()`"):

        @emits
        def kernel(n, m, c, x, w):
            copy = ch.Role("producer")  # wrong
            with copy:
                x[0] = 1


def test_a_role_continued_after_it_was_placed() -> None:
    with refused(ch.RoleError, "the producer role is continued after it was placed in the kernel"):

        @emits
        def kernel(n, m, c, x, w):
            copy = ch.Role("producer")
            copy.emit_here()
            with copy:  # wrong
                x[0] = 1


def test_a_role_placed_where_its_names_clash() -> None:
    with refused(ch.RoleError, "the consumer role binds `y`, as does an if_ block, where it is placed"):

        @emits
        def kernel(n, m, c, x, w):
            math = ch.Role("consumer")
            with math:
                y = x[0]
                x[1] = y
            with ch.if_(n < 1):
                y = x[2]
                x[3] = y
                math.emit_here()  # wrong


def test_a_statement_outside_of_any_kernel() -> None:
    x = ch.Name(ty.ptr_mut(ty.f32), "x", ())
    with refused(ch.NoKernelError, "a device statement outside of a kernel"):
        x[0] = 1  # wrong


def test_a_variable_without_a_name() -> None:
    with refused(ch.TypeMixError, "a float without a name was used: assign it to a name first"):

        @emits
        def kernel(n, m, c, x, w):
            sums = [ch.var(ty.f32, 0) for _ in range(4)]
            sums[0].set(1)  # wrong


# -- types --------------------------------------------------------------------------------------------------------


def test_types_mixed() -> None:
    with refused(ch.TypeMixError, "`n` (uint32_t) + `m` (uint64_t): the types differ; convert one side"):

        @emits
        def kernel(n, m, c, x, w):
            x[n + m] = 1  # wrong


def test_a_store_of_another_type() -> None:
    with refused(ch.TypeMixError, "`n` has type uint32_t where float is needed; convert it"):

        @emits
        def kernel(n, m, c, x, w):
            x[0] = n  # wrong


def test_a_fraction_where_an_integer_is() -> None:
    with refused(ch.TypeMixError, "the Python value 0.5 cannot become a device value of type uint32_t."):

        @emits
        def kernel(n, m, c, x, w):
            x[n * 0.5] = 1  # wrong


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda n, w: n / 2, "uint32_t has no operator `/`. Integers divide with `//`."),
        (lambda n, w: ty.i32(n) // 2, "int32_t has no operator `//`. C truncates where Python floors"),
        (lambda n, w: ty.f32(n) % 2, "float has no operator `%`."),
        (lambda n, w: w[0] + w[1], "bf16 has no operator `+`. Convert with `bf16_to_f32` first."),
        (lambda n, w: ty.f32(w[0]), "cannot be converted to float. Use `bf16_to_f32` and `f32_to_bf16`."),
        (lambda n, w: ~ty.f32(n), "float has no bits to invert; use `float_bits`."),
        (lambda n, w: ty.u8(n) + ty.u8(n), "C computes uint8_t as int; convert first"),
        (lambda n, w: n << ty.f32(n), "shifts are by integers, not by float."),
        (lambda n, w: w * 2, "a pointer has + and - with integers"),
        (lambda n, w: w + 0.5, "a pointer moves by integers, not by float."),
        (lambda n, w: n[0], "`n` of type uint32_t cannot be indexed; only pointers and arrays can."),
        (lambda n, w: w[0.5], "is indexed by `0.5f` of type float; an index is an integer."),
        (lambda n, w: ch.select(n == 0, n, ty.u64(n)), "the types differ"),
        (lambda n, w: ch.reinterpret(ty.ptr_mut(ty.u8), w), "its constness cannot be cast away."),
        (lambda n, w: ch.address_of(n), "`n` has no address"),
        (lambda n, w: prim.warp_sum_f32(n), "warp_sum_f32: argument `value`: `n` has type uint32_t where float is"),
        (lambda n, w: prim.shuffle_u32(n), "shuffle_u32 takes 2 arguments (value, lane), not 1."),
        (lambda n, w: prim.mbarrier_arrive(w), "mbarrier_arrive: `barrier` is uint64_t*, but `w` has type"),
    ],
)
def test_operations_that_a_type_does_not_have(operation: Callable[[Any, Any], Any], message: str) -> None:
    with pytest.raises(ch.TypeMixError) as caught:

        @emits
        def kernel(n, m, c, x, w):
            operation(n, w)

    assert message in str(caught.value)
    assert f"\n  at {HERE}:" in str(caught.value)


def test_a_member_that_is_not_there() -> None:
    with refused(ch.NoMemberError, "`x` of type float* has no member `length`; its members: none."):

        @emits
        def kernel(n, m, c, x, w):
            x[0] = x.length  # wrong


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: ty.ptr(ty.array(ty.f32, 4)), ch.TypeMixError, "a pointer to float[4]: point to its elements, float."),
        (lambda: ty.array(ty.f32), ch.RangeError, "an array of float with lengths (): give at least one"),
        (lambda: ty.array(ty.f32, 4, 0), ch.RangeError, "an array of float with lengths (4, 0)"),
        (lambda: ty.struct("Empty"), ch.SignatureError, "struct Empty has no members."),
    ],
)
def test_types_that_cannot_be(make: Callable[[], Any], kind: type[ch.LangError], message: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert message in str(caught.value)


# -- stores -------------------------------------------------------------------------------------------------------


def test_a_store_through_a_const_pointer() -> None:
    with refused(ch.ConstStoreError, "store to `c[n]` through const float*, which is constant; declare it with"):

        @emits
        def kernel(n, m, c, x, w):
            c[n] = 1  # wrong


def test_a_store_to_a_constant_name() -> None:
    with refused(ch.ConstStoreError, "`i` is a constant; make it with `ch.var` to store to it."):

        @emits
        def kernel(n, m, c, x, w):
            i = n + 1
            i += 1  # wrong


def test_a_store_to_a_named_constant() -> None:
    with refused(ch.ConstStoreError, "`limit` is a constant"):

        @emits
        def kernel(n, m, c, x, w):
            limit = ch.const(ty.u32, 7)
            limit.set(8)  # wrong


def test_a_store_to_a_copy() -> None:
    with refused(ch.ConstStoreError, "`v` is a constant copy; store to the place itself, `p[i].member = ...`"):

        @emits
        def kernel(n, m, c, x, w):
            v = prim.make_u32x4(n, n, n, n)
            v.x = n  # wrong


def test_a_store_to_a_value() -> None:
    with refused(ch.ConstStoreError, "`n + 1` is a value, not a place that can be stored to."):

        @emits
        def kernel(n, m, c, x, w):
            (n + 1).set(3)  # wrong


# -- ranges -------------------------------------------------------------------------------------------------------


def test_a_static_index_out_of_range() -> None:
    with refused(ch.RangeError, "index 4 of `sums`, which has 4 elements."):

        @emits
        def kernel(n, m, c, x, w):
            sums = ch.array(ty.f32, 4)
            sums[4] = 1  # wrong


def test_a_literal_out_of_range() -> None:
    with refused(ch.RangeError, "4294967296 does not fit uint32_t, which holds 0 to 4294967295."):

        @emits
        def kernel(n, m, c, x, w):
            x[n + 2**32] = 1  # wrong


def test_a_float_out_of_range() -> None:
    with refused(ch.RangeError, "1e+300 does not fit float"):

        @emits
        def kernel(n, m, c, x, w):
            x[0] = 1e300  # wrong


def test_a_shift_out_of_range() -> None:
    with refused(ch.RangeError, "`n` << 32: uint32_t has 32 bits; shift by 0 to 31."):

        @emits
        def kernel(n, m, c, x, w):
            x[n << 32] = 1  # wrong


def test_a_division_by_zero() -> None:
    with refused(ch.RangeError, "division of `n` by the constant zero."):

        @emits
        def kernel(n, m, c, x, w):
            x[n // 0] = 1  # wrong


# -- bulk copies, stages, shared memory ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "offset", "message"),
    [
        (24, 0, "a bulk copy of 24 bytes: the copy engine moves multiples of 16 bytes; pad it to 32."),
        (0, 0, "a bulk copy of 0 bytes"),
        (2**20, 0, "a barrier counts at most 1048575 bytes a phase; copy in parts."),
        (32, 8, "lies 8 bytes into its buffer: it must be 16-byte aligned."),
        (32, -8, "lies -8 bytes into its buffer"),
    ],
)
def test_bulk_copies_that_the_hardware_cannot_do(size: int, offset: int, message: str) -> None:
    with refused(ch.CopySizeError, message):

        @emits
        def kernel(n, m, c, x, w):
            stage = prim.shared_arena()
            full = ch.reinterpret(ty.ptr_mut(ty.u64), stage + 2**20)
            prim.bulk_copy(stage, ch.reinterpret(ty.ptr(ty.u8), c) + offset, size, full)  # wrong


def test_alignment_is_judged_by_all_static_offsets_together() -> None:
    @emits
    def kernel(n, m, c, x, w):
        stage = prim.shared_arena() + ch.constexpr(ty.u32, "STAGE", 128)
        full = ch.reinterpret(ty.ptr_mut(ty.u64), stage + 64)
        prim.bulk_copy(stage + 8 + 8, c + 8 - 4, 32, full)
        prim.bulk_copy(stage + n * 8 + 8, ch.address_of(c[4]), n, full)


def test_a_stage_that_is_never_used() -> None:
    with refused(ch.UnusedStageError, "the weight ring: the stages of `qkv` are filled but never used"):

        @emits
        def kernel(n, m, c, x, w):
            streams = ch.Streams("weight ring")
            streams.consume(streams.open("o"))
            streams.open("qkv")  # wrong


def test_a_stage_that_is_used_twice() -> None:
    with refused(ch.UnusedStageError, "the ring: the stages of `qkv` are used twice, first at"):

        @emits
        def kernel(n, m, c, x, w):
            streams = ch.Streams()
            qkv = streams.open("qkv")
            streams.consume(qkv)
            streams.consume(qkv)  # wrong


def test_a_stage_that_is_never_filled() -> None:
    with refused(ch.UnusedStageError, "the ring: a stream is used that nobody fills"):

        @emits
        def kernel(n, m, c, x, w):
            ch.Streams().consume(0)  # wrong


def test_a_named_constant_that_is_two_numbers() -> None:
    with refused(ch.SignatureError, "ch.constexpr: `WIDTH` is uint32_t 5 here and uint32_t 4 at"):

        @emits
        def kernel(n, m, c, x, w):
            x[ch.constexpr(ty.u32, "WIDTH", 4)] = 1
            ch.constexpr(ty.u32, "WIDTH", 5)  # wrong


def test_a_named_constant_whose_name_is_taken() -> None:
    with refused(ch.SignatureError, "ch.constexpr: the name `n` is taken, by a value or by a word of C++."):

        @emits
        def kernel(n, m, c, x, w):
            ch.constexpr(ty.u32, "n", 4)  # wrong


# -- signatures and templates -------------------------------------------------------------------------------------


def test_parameter_lists_that_differ() -> None:
    with refused(ch.SignatureError, "kernel scale takes (x, n), but ch.Params declares (n, x); name them alike"):

        @ch.kernel(ch.Params(n=ty.u32, x=ty.ptr_mut(ty.f32)))  # wrong
        def scale(x, n):
            x[0] = 1


def test_a_parameter_named_like_a_word_of_c() -> None:
    with refused(ch.SignatureError, "a parameter cannot be called `float`"):
        ch.Params(float=ty.f32)  # wrong


def test_a_parameter_of_no_type() -> None:
    with refused(ch.SignatureError, "parameter `v` cannot have the type void."):
        ch.Params(v=ty.void)  # wrong


def test_inline_above_another_decorator() -> None:
    with refused(ch.SignatureError, "twice is decorated already: put `@ch.inline` or `@ch.kernel` directly above"):

        @ch.inline  # wrong
        @contextmanager
        def twice(v):
            yield v * 2


def test_a_structure_member_named_like_a_word_of_the_language() -> None:
    with refused(ch.SignatureError, "struct Pair: a member cannot be called `name`"):
        ty.struct("Pair", name=ty.u32)  # wrong


@pytest.mark.parametrize(
    ("template", "operands", "message"),
    [
        ("mov.u32 $a, $b;", ["a"], "the template needs $b; give it as `b=...`."),
        ("mov.u32 $a, 1;", ["a", "b"], "the template has no $b; its text is 'mov.u32 $a, 1;'."),
        ("mov.b32 $p, 1;", ["p"], "$p is `n < 1` of type bool, which no register holds; convert it."),
    ],
)
def test_asm_operands(template: str, operands: list[str], message: str) -> None:
    with refused(ch.AsmError, message):

        @emits
        def kernel(n, m, c, x, w):
            given = {"a": n, "b": m, "p": n < 1}
            ch.asm(template, **{name: given[name] for name in operands})  # wrong


# -- what a mistake leaves behind ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [lambda x: ch.if_(x[0] == 0), lambda x: 1 // 0, lambda x: ch.continue_()])
def test_a_refused_kernel_leaves_no_trace(wrong: Callable[[Any], Any]) -> None:
    with pytest.raises((ch.MissingWithError, ch.ControlError, ZeroDivisionError)):

        @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32)))
        def broken(x):
            with ch.if_(x[0] == 0):
                wrong(x)

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.f32)))
    def fine(x):
        x[0] = 1

    assert ch.render(fine).splitlines()[1] == "  x[0] = 1.0f;"
    with pytest.raises(ch.NoKernelError):
        ch.comment("outside")
