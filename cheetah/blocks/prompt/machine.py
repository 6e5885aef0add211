"""One thread block of a pass: its warps' roles and shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.machine import CONSUMER_BARRIER, shared_region, with_names
from cheetah.lang import prim, ty
from cheetah.plan import Gpu, SharedMap, prompt
from cheetah.plan.prompt import PassPlan
from cheetah.plan.world import World, world_of

GROUP_BYTES = ch.named("GROUP_BYTES", prompt.GROUP_BYTES)
UNIT_BYTES = ch.named("UNIT_BYTES", prompt.UNIT_BYTES)
ACCUMULATOR_BYTES = ch.named("ACCUMULATOR_BYTES", prompt.ACCUMULATOR_BYTES)
PUSH_BARRIER = 3
"""Of 8 tokens: 32 columns, a pair of each 8 of them, and what a warp has of an M-tile's sums."""


@dataclass(frozen=True, eq=False)
class PassMachine:
    """The parts that every building block of a pass needs.

    rank: which of the GPUs that make a pass together this is, a parameter of the launch where there are several.
    The consumer role is every thread of the warpgroups that multiply. Of the warpgroup behind them one warp has the
    weights role (a lane an M-tile of the tile), one lane of the next the activations role; the others the weights role
    too, or, of several GPUs, the pushes role (`cheetah.blocks.prompt.pushes`), or nothing.
    """

    plan: PassPlan
    gpu: Gpu
    shared: SharedMap
    arena: ch.Expr
    block: ch.Expr
    thread: ch.Expr
    warp: ch.Expr
    lane: ch.Expr
    weights: ch.Role
    activations: ch.Role
    consumer: ch.Role
    pushes: ch.Role
    rank: ch.Expr | int = 0
    name: str = "tiles"
    """What the text tells functions of its tiles by, from those of other tiles."""

    @property
    def consumer_threads(self) -> int:
        return ch.named("CONSUMERS", self.plan.consumer_threads)

    @property
    def activation_tile_bytes(self) -> int:
        """Activations of a tile's tokens and one K-tile."""
        return ch.named("ACTIVATION_TILE_BYTES", self.plan.activation_tile_bytes)

    @property
    def world(self) -> World:
        """Who makes a pass together."""
        return world_of(self.gpu)

    def of_all(self, number: ch.Expr | int, count: int) -> Any:
        """The number over all ranks of a thing of which each has `count`."""
        return number if self.world.size == 1 else self.rank * count + number

    @property
    def weights_lane(self) -> Any:
        """In the weights role: the number of this lane, of neighbouring ones in one warp after the other."""
        if self.plan.weights_warps == 1:
            return self.lane
        # Of the warpgroup that copies the second warp brings activations.
        warp = (self.warp - (self.plan.consumer_warps - 1)) // 2
        return self.lane * self.plan.weights_warps + warp

    def tiles(self, row_tiles: ch.Value, token_tiles: ch.Value) -> Any:
        """In any role: a loop over this block's tiles of so many rows of tiles and tiles of tokens."""
        return ch.for_(self.block, token_tiles * row_tiles, self.gpu.blocks, unroll=1, name="tile")

    @property
    def has_pushes(self) -> bool:
        """Whether there are warps that bring other GPUs what this one has made: where no product is cut, so that its
        tiles are finished at once, and these warps bring no weights."""
        return self.world.size > 1 and not self.plan.cut_tokens and self.plan.weights_warps == 1

    @property
    def pushing_threads(self) -> int:
        """The warps behind those that bring weights and activations."""
        return self.plan.threads - self.plan.consumer_threads - 2 * 32

    @property
    def pushing_thread(self) -> Any:
        """In the pushes role: the number of this thread there."""
        return self.thread - (self.plan.consumer_threads + 2 * 32)

    @property
    def roles(self) -> tuple[ch.Role, ...]:
        return (self.weights, self.activations, self.consumer, *([self.pushes] if self.has_pushes else []))

    def region(self, name: str, element: ty.Type) -> ch.Expr:
        """A pointer to a region of shared memory."""
        return shared_region(self.shared, self.arena, name, element)

    @ch.function
    def renew(self) -> None:
        """In any role: what follows from a thread's place is worked out anew. Kept from phase to phase, it would take
        the registers that the sums of a tile need."""
        for place in (self.block, self.thread, self.warp, self.lane):
            place.set(prim.renewed_u32(place))

    def meet(self) -> None:
        """All consumer warps meet: what each wrote to shared memory before is seen by all after."""
        prim.named_barrier(CONSUMER_BARRIER, self.consumer_threads)

    def hand_on(self) -> None:
        """All consumer warps meet, and with them those that push, if there are such."""
        if not self.has_pushes:
            return self.meet()
        threads = self.plan.consumer_threads + self.pushing_threads
        prim.named_barrier(PUSH_BARRIER, ch.named("HANDING_ON", threads))


@ch.inline
def start_pass(plan: PassPlan, gpu: Gpu, shared: SharedMap, rank: ch.Expr | None = None) -> PassMachine:
    """Name the thread's place and the regions of shared memory, and open the roles."""
    arena = prim.shared_arena()
    block = ch.var(ty.u32, ch.block_idx_x())
    thread = ch.var(ty.u32, ch.thread_idx_x())
    warp = ch.var(ty.u32, thread // 32)
    lane = ch.var(ty.u32, thread % 32)
    roles = ch.Role("weights"), ch.Role("activations"), ch.Role("consumer"), ch.Role("pushes")
    tokens, tile_tokens = ch.named("PASS_TOKENS", plan.tokens), ch.named("TILE_TOKENS", plan.tile_tokens)
    plan, gpu = replace(plan, tokens=tokens, tile_tokens=tile_tokens), with_names(gpu, ("blocks",))
    return PassMachine(plan, gpu, shared, arena, block, thread, warp, lane, *roles, 0 if rank is None else rank)


@ch.inline
def emit_pass(machine: PassMachine) -> None:
    """The kernel's fork."""
    plan = machine.plan
    with ch.if_(machine.warp >= plan.consumer_warps):
        prim.give_registers()
        several = plan.weights_warps > 1
        with ch.if_(machine.warp != plan.consumer_warps + 1 if several else machine.warp == plan.consumer_warps):
            ch.comment("the weights: a lane an M-tile of the tile")
            machine.weights.emit_here()
        with ch.if_(machine.thread == machine.consumer_threads + 32):
            ch.comment("the activations: one lane")
            machine.activations.emit_here()
        if machine.has_pushes:
            with ch.if_(machine.warp >= plan.consumer_warps + 2):
                ch.comment("what other GPUs get")
                machine.pushes.emit_here()
    with ch.else_():
        prim.take_registers()
        ch.comment("the warpgroups that multiply")
        machine.consumer.emit_here()
