"""One thread block as the building blocks see it: who a thread is, where shared memory lies, the warp roles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cheetah import lang as ch
from cheetah.lang import prim, ty
from cheetah.plan import Gpu, ModelShape, Plan, SharedMap
from cheetah.plan.products import StepTable
from cheetah.plan.world import world_of

Sizes = TypeVar("Sizes", Gpu, Plan)

CONSUMER_BARRIER = 1
"""The named barrier at which the consumer warps meet; the others never do."""


@dataclass(eq=False)
class Machine:
    """The parts that every building block needs.

    model: all of it; rank: which of the GPUs that make its steps together this is, a parameter of the launch where
    there are several. block, thread, warp and lane are device values; arena is the start of shared memory, laid out by
    `shared`. The consumer role is every thread of the first warps, the producer role is one lane of the next one, the
    adder role every thread of those behind it.
    """

    model: ModelShape
    plan: Plan
    gpu: Gpu
    shared: SharedMap
    arena: ch.Expr
    block: ch.Expr
    thread: ch.Expr
    warp: ch.Expr
    lane: ch.Expr
    producer: ch.Role
    consumer: ch.Role
    adder: ch.Role
    rank: ch.Expr | int = 0

    def __post_init__(self) -> None:
        self.at_first = self.thread, self.warp, self.lane
        self.consumer_threads = ch.named("CONSUMERS", self.plan.consumer_warps * 32)
        self.hidden = ch.named("HIDDEN", self.model.padded_hidden)
        self.head_dim = ch.named("HEAD_DIM", self.model.head_dim)
        self.warp_sums = ch.named("WARP_SUMS", self.plan.warp_sums)
        self.sequence_tokens = ch.named("LAUNCH_TOKENS", self.plan.launch_tokens) + 1
        """Places of a sequence in the launch's tokens."""
        self.world = world_of(self.gpu)
        self.shape = self.model.of_rank(self.world.size)
        """What this rank has of the model: its heads and their cache."""

    @property
    def projected_rows(self) -> int:
        """Queries, keys and values of a column."""
        return ch.named("PROJECTED_ROWS", self.shape.qkv_rows)

    @property
    def stack(self) -> StepTable:
        """The layers that are running, as a table of products."""
        return self.model.table

    @property
    def number(self) -> ch.Expr:
        """Which of all blocks that exchange this is."""
        number: ch.Expr = self.world.number(self.block, self.rank)
        return number

    @property
    def roles(self) -> tuple[ch.Role, ch.Role, ch.Role]:
        return self.producer, self.consumer, self.adder

    @property
    def adder_number(self) -> ch.Expr:
        """In the adder role: which of the adding warps this is."""
        return self.warp - (self.plan.consumer_warps + 1)

    def region(self, name: str, element: ty.Type) -> ch.Expr:
        """A pointer to a region of shared memory."""
        return shared_region(self.shared, self.arena, name, element)

    @property
    def chosen(self) -> ch.Expr:
        """The token that was chosen for each column (u32)."""
        return ch.whole("chosen_tokens", self.region("chosen", ty.u32))

    @contextmanager
    @ch.inline
    def placed_anew(self, always: bool = False) -> Iterator[None]:
        """Inside, a thread's place is read again, where a step has 2 to 8 tokens, or always.

        Else what follows from it (addresses, conditions) is worked out once a launch, kept in registers from phase to
        phase, and some of it spilled: without it 8B's kernel of 8 tokens spills 68 + 92 bytes in int4 and 48 + 164 in
        bf16, with it none and 4 + 4. With one token nothing is spilled, and 16 are 1.4 % slower (8B on an H200).
        """
        if not (always or 2 <= self.plan.tokens <= 8):
            yield
            return
        thread = prim.thread_index()
        warp = thread // 32
        lane = thread % 32
        with self._placed(thread, warp, lane):
            yield

    @contextmanager
    def adding(self) -> Iterator[None]:
        """The adder role, which does not see what the consumer role has read anew."""
        with self.adder, self._placed(*self.at_first):
            yield

    @contextmanager
    def _placed(self, thread: ch.Expr, warp: ch.Expr, lane: ch.Expr) -> Iterator[None]:
        before = self.thread, self.warp, self.lane
        self.thread, self.warp, self.lane = thread, warp, lane
        yield
        self.thread, self.warp, self.lane = before

    def meet(self) -> None:
        """All consumer warps meet: what each wrote to shared memory before is seen by all after."""
        prim.named_barrier(CONSUMER_BARRIER, self.consumer_threads)


def with_names(sizes: Sizes, names: tuple[str, ...]) -> Sizes:
    """The record with these of its numbers under names of their own in the text."""
    named: dict[str, Any] = {name: ch.named(name.upper(), getattr(sizes, name)) for name in names}
    return replace(sizes, **named)


def shared_region(shared: SharedMap, arena: ch.Expr, name: str, element: ty.Type) -> ch.Expr:
    """A pointer to a region of the arena; the text calls where it begins by its name: `(float*)(arena + SCALES)`."""
    return ch.reinterpret(ty.ptr_mut(element), arena + _first_byte(shared, name))


def _first_byte(shared: SharedMap, name: str) -> ch.Expr:
    return ch.constexpr(ty.u32, name.upper(), shared.offset(name), shared.extent(name))


@ch.inline
def start_machine(shape: ModelShape, plan: Plan, gpu: Gpu, shared: SharedMap, rank: ch.Expr | None = None) -> Machine:
    """Name the thread's place and the regions of shared memory, and open the roles."""
    for region in shared.regions:
        _first_byte(shared, region.name)  # so that the text lists them in the order in which they lie
    arena = prim.shared_arena()
    block = ch.block_idx_x()
    thread = ch.thread_idx_x()
    warp = thread // 32
    lane = thread % 32
    roles = ch.Role("producer"), ch.Role("consumer"), ch.Role("adder")
    plan, gpu = with_names(plan, ("stage_bytes", "max_context", "page_size")), with_names(gpu, ("blocks",))
    return Machine(shape, plan, gpu, shared, arena, block, thread, warp, lane, *roles, 0 if rank is None else rank)


_GIVES = {12 * 32: prim.keep_104_registers, 16 * 32: prim.keep_64_registers}
_TAKES = {12 * 32: prim.take_200_registers, 16 * 32: prim.take_192_registers}
"""By the threads of a block, where some warps add up: so that a block has no more than 65536 registers."""


@ch.inline
def emit_roles(machine: Machine) -> None:
    """The kernel's fork: one lane of the producer warp copies, the consumer warps compute, the adding warps finish."""
    plan, adds = machine.plan, not machine.adder.is_empty
    with ch.if_(machine.warp >= plan.consumer_warps):
        if plan.moves_registers:
            (_GIVES[plan.threads] if adds else prim.give_registers)()
        ch.comment("the producer warp: one lane walks the whole model's chunk list")
        with ch.if_(machine.thread == machine.consumer_threads):
            machine.producer.emit_here()
        if adds:
            ch.comment("the adding warps")
            with ch.if_(
                (machine.warp > plan.consumer_warps) & (machine.warp <= plan.consumer_warps + plan.adding_warps)
            ):
                machine.adder.emit_here()
    with ch.else_():
        if plan.moves_registers:
            (_TAKES[plan.threads] if adds else prim.take_registers)()
        ch.comment("the consumer warps")
        machine.consumer.emit_here()
