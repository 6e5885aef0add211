"""Parts of the decode step as kernels of their own: the unfused step, and stacks of attention or of GLU blocks.

The phases are those of `cheetah.models.llama.program`, not written again. Unfused, every phase is a kernel: vectors
pass through plain memory (the launches' order is their order), and the residual, which the fused kernel keeps in shared
memory, through a buffer. A stack repeats one block of the layer; its input is the embedding of tokens[0], its output
the vector `hidden`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from benchmarks.studies.kernels import Text, finish_kernel
from cheetah import lang as ch
from cheetah.blocks.exchange import BarrierExchange, Exchange
from cheetah.blocks.machine import Machine, emit_roles, start_machine
from cheetah.blocks.sampling import Sampler
from cheetah.lang import prim, ty
from cheetah.models.llama import LlamaConfig
from cheetah.models.llama.program import PARAMETERS, Step
from cheetah.models.llama.step import StepPort, exchange_sizes
from cheetah.plan import STRIP_ROWS, Gpu, Plan, shared_map, step_matrices

MODEL = ("qkv", "attention", "merge", "o", "gate_up", "down")
STACKS = {"attention": MODEL[:4], "glu": MODEL[4:]}
"""The phases of a stack's layer, as unfused kernels."""
NEED_POSITIONS = ("qkv", "attention", "head")
NEED_RECORDS = ("attention", "merge")
FUSED_PARAMETERS = ch.Params(**PARAMETERS, epochs=ty.ptr_mut(ty.u32), layers=ty.u32)
PHASE_PARAMETERS = ch.Params(**PARAMETERS, residual=ty.ptr_mut(ty.f32), layer=ty.u32)


@dataclass(frozen=True)
class StepKernel:
    """A kernel of parts of the step. Parameters: those of the decode step; then of a fused stack `epochs` (u32
    [blocks], all 1 at first) and `layers`, of a phase `residual` (see `residual_words`) and `layer`.

    hidden_offset: byte of `exchange` where the vector `hidden` begins; word_bytes: between two payload words of it."""

    text: Text
    exchange_bytes: int
    hidden_offset: int
    word_bytes: int


def fused_stack(config: LlamaConfig, gpu: Gpu, plan: Plan, stack: str) -> StepKernel:
    """One kernel for any number of layers of a stack ("attention" or "glu")."""
    return _step_kernel(FUSED_PARAMETERS, config, gpu, plan, partial(FusedStack, stack=stack))


def phase_kernel(config: LlamaConfig, gpu: Gpu, plan: Plan, phase: str, stack: str | None = None) -> StepKernel:
    """The kernel of one phase: of MODEL, "head" or "sampling". stack: the one that it is part of; None for the model.

    "sampling" runs with one block."""
    blocks = 1 if phase == "sampling" else gpu.blocks
    return _step_kernel(PHASE_PARAMETERS, config, gpu, plan, partial(OnePhase, phase=phase, stack=stack), blocks)


def residual_words(config: LlamaConfig, gpu: Gpu, plan: Plan) -> int:
    """Elements (f32) of the buffer `residual`: every block's rows."""
    return gpu.blocks * step_matrices(config.shape, plan, gpu).o.rounds * STRIP_ROWS


def _step_kernel(
    parameters: ch.Params,
    config: LlamaConfig,
    gpu: Gpu,
    plan: Plan,
    make: Callable[[LlamaConfig, Machine, SimpleNamespace], Piece],
    blocks: int | None = None,
) -> StepKernel:
    shape = config.shape
    shared = shared_map(shape, plan, gpu)
    made: list[Piece] = []

    @ch.kernel(parameters, name="step_piece", max_threads=plan.threads)
    def step_piece(**arguments: Any) -> None:
        machine = start_machine(shape, plan, gpu, shared)
        made.append(make(config, machine, SimpleNamespace(**arguments)))
        made[0].emit()

    exchange: Exchange = made[0].exchange
    cooperative = parameters is FUSED_PARAMETERS
    text = finish_kernel(step_piece, gpu, plan, shared.total_bytes, cooperative=cooperative, blocks=blocks)
    word = exchange.word.bytes
    size = exchange.size_bytes(exchange_sizes(shape, gpu, plan))
    return StepKernel(text, size, exchange.vectors["hidden"].offset * word, word)


class Piece(Step):
    """Some phases of the decode step, once: step 0 of a launch with one token. stack: which block a layer is, or None.

    In a stack, a block's input is the output of the same block a layer before."""

    def __init__(self, config: LlamaConfig, machine: Machine, launch: SimpleNamespace, stack: str | None) -> None:
        super().__init__(config, machine, launch)
        self.stack = stack
        self.step = ty.u32(0)

    @ch.inline
    def _begin_layer(self, layer: Any) -> None:
        super()._begin_layer(layer)
        self.layer = layer

    @ch.inline
    def _o(self, step: Any, layer: Any) -> None:
        target = "middle" if self.stack is None else "hidden"
        self._project_onto_residual(step, layer, "o", self.matrices.o, "attention", target, self.shape.query_rows)

    def _reader(self, name: str, epoch: Any) -> Any:
        if name == "middle" and self.stack is not None:
            return self._read_previous_hidden
        return super()._reader(name, epoch)

    def _waiter(self, name: str, epoch: Any) -> Any:
        if name == "middle" and self.stack is not None:
            return self._wait_for_previous_hidden
        return super()._waiter(name, epoch)

    def _wait_for_previous_hidden(self, unit: Any, when: Any) -> None:
        later = self.layer > 0  # the first layer reads the embedding
        self.exchange.wait_for_one("hidden", unit, self.layer_epoch - 1, later if when is True else later & when)

    def _read_previous_hidden(self, data: Any, unit: Any, count: int) -> None:
        with ch.if_(self.layer == 0):
            self._read_embedding(data, unit, count)
        with ch.else_():
            self._reader("hidden", self.layer_epoch - 1)(data, unit, count)


class FusedStack(Piece):
    """All layers of a stack in one kernel. The first epoch of a launch comes from memory, so a graph can repeat it."""

    @ch.inline
    def emit(self) -> None:
        machine, launch = self.machine, self.launch
        launch.epoch = launch.epochs[machine.block]
        self._set_up()
        self._begin_step(self.step)
        with ch.roles_for(machine.roles, launch.layers, name="layer") as layer:
            self._begin_layer(layer)
            for phase in STACKS[self.stack or ""]:
                if phase != "merge":  # it is the end of the fused attention
                    getattr(self, f"_{phase}")(self.step, layer)
        with machine.math:
            machine.meet()  # every thread has read the epoch
            with ch.if_(machine.thread == 0):
                launch.epochs[machine.block] = self.step_epoch + launch.layers
        emit_roles(machine)


class KernelBoundary(BarrierExchange):
    """Plain words; writers and readers are different kernels, and the stream's order is all that orders them."""

    def start(self) -> None:
        """Nothing: nobody meets."""

    def meet(self) -> None:
        """The kernel's end does it."""


class OnePhase(Piece):
    """One phase of one layer."""

    sampler: SamplerInTwoKernels

    def __init__(
        self, config: LlamaConfig, machine: Machine, launch: SimpleNamespace, phase: str, stack: str | None
    ) -> None:
        super().__init__(config, machine, launch, stack)
        self.phase = phase
        sizes = exchange_sizes(self.shape, machine.gpu, machine.plan)
        self.exchange = KernelBoundary(machine, launch.exchange, sizes)
        self.attention.exchange = self.exchange
        self.attention.port = StepPort(machine, self.exchange, self.columns)
        self.sampler = SamplerInTwoKernels(self.matvec, self.exchange, self.shape.vocab)

    @ch.inline
    def emit(self) -> None:
        machine, layer = self.machine, self.launch.layer
        self._set_up()
        self._begin_phase(layer)
        self._begin_layer(layer)
        emit_phase = getattr(self, f"_{self.phase}")
        if self.phase in ("head", "sampling"):
            emit_phase(self.step)
        else:
            emit_phase(self.step, layer)
        if self.phase in ("o", "down"):
            with machine.math:
                self._store_residual()
        emit_roles(machine)

    @ch.inline
    def _set_up(self) -> None:
        with ch.if_(self.machine.thread == 0):
            self.ring.initialise()
            prim.mbarrier_fence_init()
        prim.block_barrier()  # orders the barriers' initialisation before their first use by either role
        self.ring.start()

    @ch.inline
    def _begin_phase(self, layer: Any) -> None:
        """What the fused kernel does once a step, as far as this phase needs it."""
        machine = self.machine
        with machine.math:
            self.step_epoch = ty.u32(0)
            if self.phase in NEED_POSITIONS:
                self.columns.begin_step(self.step)
            if self.phase in NEED_RECORDS:
                self.schedule.keep()
            if self.phase in NEED_POSITIONS + NEED_RECORDS:
                machine.meet()
            if self.phase == "qkv":
                self._load_angles()
            if self.phase == ("down" if self.stack == "glu" else "o"):
                with ch.if_(layer == 0):
                    self._start_residual()
                with ch.else_():
                    self._load_residual()
            elif self.phase in ("o", "down"):
                self._load_residual()

    def _embedded(self, column: Any) -> Any:
        return self.launch.embedding + ty.u64(self.launch.tokens[0]) * self.shape.padded_hidden

    @ch.inline
    def _load_residual(self) -> None:
        """The block's rows. Other threads see them after the barrier that follows the loading of the input."""
        residual, kept, places = self._residual_places()
        with ch.for_(self.machine.thread, places, self.machine.math_threads, unroll=1) as place:
            residual[place] = kept[place]

    @ch.inline
    def _store_residual(self) -> None:
        residual, kept, places = self._residual_places()
        self.machine.meet()  # every warp has finished its rows
        with ch.for_(self.machine.thread, places, self.machine.math_threads, unroll=1) as place:
            kept[place] = residual[place]

    def _residual_places(self) -> tuple[Any, Any, int]:
        """The block's rows in shared memory and in the buffer, and how many places there are."""
        places = self.matrices.o.rounds * STRIP_ROWS
        kept = self.launch.residual + self.machine.block * places
        return self.machine.region("residual", ty.f32), kept, places

    @ch.inline
    def _attention(self, step: Any, layer: Any) -> None:
        """The block's items: outputs of whole heads, partial states of split ones."""
        with self.machine.copy:
            self.attention.copy(layer, step)
        with self.machine.math:
            self.attention.attend(step, self.layer_epoch)

    @ch.inline
    def _merge(self, step: Any, layer: Any) -> None:
        with self.machine.math:
            self.attention.merge(self.layer_epoch)

    @ch.inline
    def _sampling(self, step: Any) -> None:
        """One block takes the best of all blocks' candidates."""
        with self.machine.math:
            self.sampler.choose_of_blocks()
            with ch.if_(self.machine.thread == 0):
                chosen = self.machine.region("chosen", ty.u32)[0]
                self.launch.tokens[1] = ty.i32(ch.minimum(chosen, self.shape.vocab - 1))
                self.launch.status[0] = 1


class SamplerInTwoKernels(Sampler):
    """`choose` ends the head's kernel: it publishes the block's best; `choose_of_blocks` is the kernel after it."""

    @ch.inline
    def choose(self, epoch: Any, step: Any) -> None:
        machine = self.machine
        self._lay_down_warps()
        machine.meet()
        for column in self._columns_of_warp():
            best, best_token = self._best_of("warp_candidates", column, self.columns.limit, self._groups)
            with ch.if_(machine.lane < 2):
                word = ch.select(machine.lane == 0, prim.float_bits(best), best_token)
                place = (machine.block * self.places + column) * 2 + machine.lane
                self.exchange.publish("candidates", place, word, epoch)

    @ch.inline
    def choose_of_blocks(self) -> None:
        """Leaves it in the region `chosen`; ends with a barrier of the math warps."""
        machine = self.machine
        self._gather(ty.u32(0), ty.u32(0))
        machine.meet()
        for column in self._columns_of_warp():
            _, best_token = self._best_of("candidates", column, self.places, machine.gpu.blocks)
            with ch.if_(machine.lane == 0):
                machine.region("chosen", ty.u32)[column] = best_token
        machine.meet()
