"""One thread block as the building blocks see it: who a thread is, where shared memory lies, the two warp roles."""

from __future__ import annotations

from dataclasses import dataclass

from cheetah import lang as ch
from cheetah.lang import prim, ty
from cheetah.plan import Gpu, ModelShape, Plan, SharedMap

MATH_BARRIER = 1
"""The named barrier at which the math warps meet; the copy warp never does."""


@dataclass(frozen=True, eq=False)
class Machine:
    """The parts that every building block needs.

    block, thread, warp and lane are device values; arena is the start of shared memory, laid out by `shared`.
    The math role is every thread of the first warps, the copy role is one lane of the next one.
    """

    shape: ModelShape
    plan: Plan
    gpu: Gpu
    shared: SharedMap
    arena: ch.Expr
    block: ch.Expr
    thread: ch.Expr
    warp: ch.Expr
    lane: ch.Expr
    copy: ch.Role
    math: ch.Role

    @property
    def math_threads(self) -> int:
        return self.plan.math_warps * 32

    @property
    def roles(self) -> tuple[ch.Role, ch.Role]:
        return self.copy, self.math

    def region(self, name: str, element: ty.Type) -> ch.Expr:
        """A pointer to a region of shared memory."""
        return shared_region(self.shared, self.arena, name, element)

    def meet(self) -> None:
        """All math warps meet: what each wrote to shared memory before is seen by all after."""
        prim.named_barrier(MATH_BARRIER, self.math_threads)


def shared_region(shared: SharedMap, arena: ch.Expr, name: str, element: ty.Type) -> ch.Expr:
    """A pointer to a region of the arena; the text calls where it begins by its name: `(float*)(arena + SCALES)`."""
    return ch.reinterpret(ty.ptr_mut(element), arena + _first_byte(shared, name))


def _first_byte(shared: SharedMap, name: str) -> ch.Expr:
    return ch.constexpr(ty.u32, name.upper(), shared.offset(name))


@ch.inline
def start_machine(shape: ModelShape, plan: Plan, gpu: Gpu, shared: SharedMap) -> Machine:
    """Name the thread's place and the regions of shared memory, and open the two roles."""
    for region in shared.regions:
        _first_byte(shared, region.name)  # so that the text lists them in the order in which they lie
    arena = prim.shared_arena()
    block = ch.block_idx_x()
    thread = ch.thread_idx_x()
    warp = thread // 32
    lane = thread % 32
    return Machine(shape, plan, gpu, shared, arena, block, thread, warp, lane, ch.Role("copy"), ch.Role("math"))


@ch.inline
def emit_roles(machine: Machine) -> None:
    """The kernel's fork: one lane of the copy warps copies, the math warps compute."""
    plan = machine.plan
    with ch.if_(machine.warp >= plan.math_warps):
        if plan.moves_registers:
            prim.give_registers()
        ch.comment("the copy warp: one lane walks the whole model's chunk list")
        with ch.if_(machine.thread == machine.math_threads):
            machine.copy.emit_here()
    with ch.else_():
        if plan.moves_registers:
            prim.take_registers()
        ch.comment("the math warps")
        machine.math.emit_here()
