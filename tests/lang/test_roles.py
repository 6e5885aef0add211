"""Warp roles: programs that grow side by side, the loops they share, and what they may not share."""

from __future__ import annotations

import pytest

from cheetah import lang as ch
from cheetah.lang import ScopeError, prim, ty
from tests.lang.test_render import body


def test_two_roles_grow_side_by_side() -> None:
    @ch.kernel(ch.Params(n=ty.u32, x=ty.ptr_mut(ty.u32)))
    def kernel(n, x):
        copy, math = ch.Role("producer"), ch.Role("consumer")
        with copy:
            stage = ch.var(ty.u32, 0)
        with math:
            stage_of_math = ch.var(ty.u32, 0)
        with ch.roles_for((copy, math), n) as layer:
            with copy:
                stage += layer
            with math:
                stage_of_math += layer * 2
        with math:
            x[1] = stage_of_math
        with copy:
            x[0] = stage
        with ch.if_(ch.thread_idx_x() < 32):
            copy.emit_here()
        with ch.else_():
            math.emit_here()

    assert body(kernel) == [
        "  if (threadIdx.x < 32) {",
        "    uint32_t stage = 0;",
        "    for (uint32_t layer = 0; layer < n; ++layer) stage += layer;",
        "    x[0] = stage;",
        "  } else {",
        "    uint32_t stage_of_math = 0;",
        "    for (uint32_t layer = 0; layer < n; ++layer) stage_of_math += layer * 2;",
        "    x[1] = stage_of_math;",
        "  }",
    ]


def test_a_shared_counter_has_one_name_that_is_free_in_every_role() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        copy, math = ch.Role("producer"), ch.Role("consumer")
        with copy:
            layer = ch.const(ty.u32, 1)
            x[0] = layer
        with ch.roles_for((copy, math), 4) as layer:
            with copy:
                x[1] = layer
            with math:
                x[2] = layer
        with ch.if_(x[0] == 0):
            copy.emit_here()
        with ch.else_():
            math.emit_here()

    assert sum("layer_2 < 4" in line for line in body(kernel)) == 2
    assert sum(line.endswith(" x[2] = layer_2;") for line in body(kernel)) == 1


def test_a_constant_is_worked_out_in_every_role_under_a_name_that_is_free_in_all() -> None:
    @ch.kernel(ch.Params(n=ty.u32, x=ty.ptr_mut(ty.u32)))
    def kernel(n, x):
        copy, math, idle = ch.Role("producer"), ch.Role("consumer"), ch.Role("idle")
        with copy:
            epoch = ch.const(ty.u32, 1)
            x[0] = epoch
        shared = ch.roles_const((copy, math), ty.u32, n * 2, "epoch")
        with copy:
            x[1] = shared
        with math:
            x[2] = shared
        with idle, pytest.raises(ScopeError, match="used by the idle code"):
            x[3] = shared
        with ch.if_(n == 0):
            copy.emit_here()
        with ch.else_():
            math.emit_here()

    assert sum("uint32_t epoch_2 = n * 2;" in line for line in body(kernel)) == 2
    assert "    x[2] = epoch_2;" in body(kernel)


def test_a_later_common_name_is_not_hidden_by_a_roles() -> None:
    """The role's block lies inside the common one: what it binds would hide a common name bound later."""

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def kernel(x):
        math = ch.Role("consumer")
        with math:
            i = x[0]
        common = i = x[1]
        with math:
            x[2] = common
        with ch.if_(x[3] == 0):
            math.emit_here()
        assert i is common

    assert body(kernel)[0] == "  uint32_t common = x[1];"

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32)))
    def second(x):
        math = ch.Role("consumer")
        with math:
            i = x[0]
        i = x[1]
        with math:
            x[2] = i
        with ch.if_(x[3] == 0):
            math.emit_here()

    assert body(second) == [
        "  uint32_t i_2 = x[1];",
        "  if (x[3] == 0) {",
        "    uint32_t i = x[0];",
        "    x[2] = i_2;",
        "  }",
    ]


def test_an_exception_in_a_shared_loop_is_the_users() -> None:
    with pytest.raises(ZeroDivisionError):

        @ch.kernel(ch.Params(n=ty.u32))
        def kernel(n):
            roles = (ch.Role("producer"), ch.Role("consumer"))
            with ch.roles_for(roles, n):
                1 / 0  # noqa: B018

    @ch.kernel(ch.Params(n=ty.u32))
    def next_one(n):
        prim.block_barrier()

    assert body(next_one) == ["  block_barrier();"]


def test_roles_share_a_condition_and_what_is_done_otherwise() -> None:
    @ch.kernel(ch.Params(n=ty.u32, x=ty.ptr_mut(ty.u32)))
    def kernel(n, x):
        roles = copy, math = ch.Role("producer"), ch.Role("consumer")
        with ch.roles_for(roles, n) as layer:
            with ch.roles_if(roles, layer == 3):
                with copy:
                    x[0] = layer
                with math:
                    x[1] = layer
            with ch.roles_else(roles), math:
                x[2] = layer
        copy.emit_here()
        with ch.if_(n > 1):
            math.emit_here()

    assert body(kernel) == [
        "  for (uint32_t layer = 0; layer < n; ++layer) {",
        "    if (layer == 3) x[0] = layer;",
        "  }",
        "  if (n > 1) {",
        "    for (uint32_t layer = 0; layer < n; ++layer) {",
        "      if (layer == 3) {",
        "        x[1] = layer;",
        "      } else {",
        "        x[2] = layer;",
        "      }",
        "    }",
        "  }",
    ]
