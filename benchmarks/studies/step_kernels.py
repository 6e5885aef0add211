"""Parts of the decode step as kernels of their own: the unfused step, and stacks of attention or of GLU blocks.

The phases are written with the parts of `models/dense/step.py`. Unfused, every phase is a kernel: vectors
pass through plain memory (the launches' order is their order), and the residual, which the fused kernel keeps in shared
memory, through a buffer. A stack repeats one block of the layer; its input is the embedding of tokens[0], its output
the vector `hidden`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.studies.kernels import finish_kernel
from cheetah import lang as ch
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.exchange_kinds import BarrierExchange, FlaggedExchange
from cheetah.blocks.machine import Machine, emit_roles, start_machine
from cheetah.blocks.sampling import Sampler
from cheetah.blocks.tokens import Tokens
from cheetah.lang import prim, ty
from cheetah.models.config import ModelConfig
from cheetah.models.dense.launch import Launch, kernel_parameters
from cheetah.models.dense.page import Line, Multiply
from cheetah.models.dense.step import StepParts
from cheetah.models.dense.step_sizes import exchange_sizes
from cheetah.package import Generated
from cheetah.plan import Gpu, Plan, shared_map, step_matrices
from cheetah.plan.phases import PhaseText

EMBEDDING = "embedding"
"""The kernel that comes before the layers."""
MODEL = ("qkv", "attention", "merge", "o", "gate_up", "down")
STACKS = {"attention": MODEL[:4], "glu": MODEL[4:]}
"""The phases of a stack's layer, as unfused kernels."""
NEED_POSITIONS = ("qkv", "attention", "lm_head")
NEED_RECORDS = ("attention", "merge")
FUSED_PARAMETERS: dict[str, ty.Type] = {"epochs": ty.ptr_mut(ty.u32), "layers": ty.u32}
PHASE_PARAMETERS: dict[str, ty.Type] = {"residual": ty.ptr_mut(ty.f32), "layer": ty.u32}
"""What a kernel has beside the parameters of the decode step."""


@dataclass(frozen=True)
class StepKernel:
    """A kernel of parts of the step. Parameters: those of the decode step; then of a fused stack `epochs` (u32
    [blocks], all 1 at first) and `layers`, of a phase `residual` (see `residual_words`) and `layer`.

    hidden_offset: byte of `exchange` where the vector `hidden` begins; word_bytes: between two payload words of it;
    made_small_by: the exponent of the power of two by which its numbers are smaller in tagged words, None without tags.
    """

    text: Generated
    exchange_bytes: int
    hidden_offset: int
    word_bytes: int
    made_small_by: int | None


def fused_stack(config: ModelConfig, gpu: Gpu, plan: Plan, stack: str) -> StepKernel:
    """One kernel for any number of layers of a stack ("attention" or "glu")."""
    return _step_kernel(FUSED_PARAMETERS, config, gpu, plan, partial(FusedStack, stack=stack))


def phase_kernel(config: ModelConfig, gpu: Gpu, plan: Plan, phase: str, stack: str | None = None) -> StepKernel:
    """The kernel of one phase: EMBEDDING, of MODEL, "head" or "sampling". stack: the one that it is part of; None for
    the model.

    "sampling" runs with one block."""
    blocks = 1 if phase == "sampling" else gpu.blocks
    return _step_kernel(PHASE_PARAMETERS, config, gpu, plan, partial(OnePhase, phase=phase, stack=stack), blocks)


def residual_words(config: ModelConfig, gpu: Gpu, plan: Plan) -> int:
    """Elements (f32) of the buffer `residual`: every block's rows."""
    residual = step_matrices(config.shape, plan, gpu)[config.table.onto_residual[0]]
    return gpu.blocks * residual.waves * residual.tile_rows


def _step_kernel(
    others: dict[str, ty.Type],
    config: ModelConfig,
    gpu: Gpu,
    plan: Plan,
    make: Callable[[ModelConfig, Machine, Launch], FusedStack | OnePhase],
    blocks: int | None = None,
) -> StepKernel:
    shape = config.shape
    shared = shared_map(shape, plan, gpu)
    of_step = {name: parameter.type for name, parameter in kernel_parameters(config, plan).items()}
    made: list[FusedStack | OnePhase] = []

    @ch.kernel(ch.Params(**of_step, **others), name="step_piece", max_threads=plan.threads)
    def step_piece(**arguments: Any) -> None:
        machine = start_machine(shape, plan, gpu, shared)
        own = [arguments.pop(name) for name in others]
        made.append(make(config, machine, Launch(**arguments)))
        made[0].emit(*own)

    exchange: Exchange = made[0].exchange
    cooperative = others is FUSED_PARAMETERS
    text = finish_kernel(step_piece, gpu, plan, shared.total_bytes, cooperative=cooperative, blocks=blocks)
    hidden, inputs = exchange.vectors["hidden"], exchange.inputs
    size = exchange.size_bytes(exchange_sizes(shape, gpu, plan), inputs)
    word = hidden.word.bytes
    made_small_by = inputs.get("hidden") if isinstance(exchange, FlaggedExchange) else None
    return StepKernel(text, size, hidden.offset * word, word, made_small_by)


class Piece(StepParts):
    """Some phases of the decode step, once: step 0 of a launch with one token. stack: which block a layer is, or None.

    In a stack, a block's input is the output of the same block a layer before."""

    def __init__(
        self,
        config: ModelConfig,
        machine: Machine,
        launch: Launch,
        stack: str | None,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(config, machine, launch, exchange)
        self.stack = stack
        self.step = ty.u32(0)

    def layer_phases(self, layer: Any) -> dict[str, Callable[[], None]]:
        """The phases of a layer, by name."""
        return {line.name: partial(self._emit_alone, line, layer) for line in self.page.layer}

    def _emit_alone(self, line: Line, layer: Any) -> None:
        if not isinstance(line, Multiply):
            return self.attend(self.step, layer)
        prologue, epilogue = self.input_of(line.product, layer), self.epilogue_of(line, layer)
        (first, _, _, last), is_part = self.table.products, self.stack is not None
        if is_part and line.product.input.is_normed:
            prologue = self.input_of(first, layer)
        if is_part and line.product.adds:
            behind = self.norm(self.table.norm_behind(last, layer))
            epilogue = self.onto_residual(last.output, behind, self.layer_epoch)
        self.linear(self.matrices[line.product], prologue, epilogue)


class FusedStack(Piece):
    """All layers of a stack in one kernel. The first epoch of a launch comes from memory, so a graph can repeat it."""

    @ch.inline
    def emit(self, epochs: ch.Expr, layers: ch.Expr) -> None:
        machine = self.machine
        first_epoch = ch.const(ty.u32, epochs[machine.block])
        self.first_epoch = first_epoch
        self.set_up()
        self.begin_step(self.step)
        with ch.roles_for(machine.roles, layers, name="layer") as layer:
            self.begin_layer(layer)
            phases = self.layer_phases(layer)
            for name in STACKS[self.stack or ""]:
                if name in phases:  # the merge is the end of the fused attention
                    about = "As in the decode step, beside the others of this stack only."
                    with self.phase(PhaseText(name, about, (), ())):
                        phases[name]()
        with machine.consumer:
            machine.meet()  # every thread has read the epoch
            with ch.if_(machine.thread == 0):
                epochs[machine.block] = self.step_epoch + (layers + 1)
        emit_roles(machine)

    def begin_epochs(self, step: Any) -> None:
        self.step_epoch = self.first_epoch


class KernelBoundary(BarrierExchange):
    """Plain words; writers and readers are different kernels, and the stream's order is all that orders them."""

    def start(self) -> None:
        """Nothing: nobody meets."""

    def meet(self, when: ch.Value = True) -> None:
        """The kernel's end does it."""


class OnePhase(Piece):
    """One phase of one layer."""

    def __init__(self, config: ModelConfig, machine: Machine, launch: Launch, phase: str, stack: str | None) -> None:
        sizes = exchange_sizes(machine.model, machine.gpu, machine.plan)
        super().__init__(config, machine, launch, stack, KernelBoundary(machine, launch.exchange, sizes))
        self.name = phase
        self.tokens = FirstToken(self.columns, launch)
        self.two_kernels = SamplerInTwoKernels(self.linear.adding, self.exchange, self.shape.vocab)
        self.sampler = self.two_kernels

    @ch.inline
    def emit(self, residual: ch.Expr, layer: ch.Expr) -> None:
        machine = self.machine
        self.kept = residual
        self._set_up()
        self._begin_phase(layer)
        self.begin_layer(layer)
        self._phases(layer)[self.name]()
        if self.name in (EMBEDDING, "o", "down"):
            with machine.consumer:
                self._store_residual()
        emit_roles(machine)

    def _phases(self, layer: Any) -> dict[str, Callable[[], None]]:
        return {
            **self.layer_phases(layer),
            EMBEDDING: self._embedding,
            "attention": lambda: self._attention(layer),
            "merge": self._merge,
            "lm_head": self._head,
            "sampling": self._sampling,
        }

    @ch.inline
    def _set_up(self) -> None:
        with ch.if_(self.machine.thread == 0):
            self.ring.initialise()
            self.linear.initialise()
            prim.mbarrier_fence_init()
        prim.block_barrier()  # orders the barriers' initialisation before their first use by either role
        self.ring.start()

    @ch.inline
    def _begin_phase(self, layer: Any) -> None:
        """What the fused kernel does once a step, as far as this phase needs it."""
        machine = self.machine
        with machine.consumer:
            self.step_epoch = ty.u32(0)
            if self.name in NEED_POSITIONS:
                self.columns.begin_step(self.step)
            if self.name in NEED_RECORDS:
                self.schedule.keep_plan()
            if self.name in NEED_POSITIONS + NEED_RECORDS:
                machine.meet()
            if self.name == "qkv":
                self.load_angles()
            if self.name in ("o", "down"):
                self._load_residual()

    @ch.inline
    def _embedding(self) -> None:
        first = self.table.products[0]
        with self.machine.consumer:
            self.publish_embeddings(first.input, self.norm(self.table.norm_row(first, 0)))

    @ch.inline
    def _load_residual(self) -> None:
        """The block's rows. Other threads see them after the barrier that follows the loading of the input."""
        residual, kept, places = self._residual_places()
        with ch.for_(self.machine.thread, places, self.machine.consumer_threads, unroll=1) as place:
            residual[place] = kept[place]

    @ch.inline
    def _store_residual(self) -> None:
        residual, kept, places = self._residual_places()
        self.machine.meet()  # every warp has finished its rows
        with ch.for_(self.machine.thread, places, self.machine.consumer_threads, unroll=1) as place:
            kept[place] = residual[place]

    def _residual_places(self) -> tuple[Any, Any, int]:
        """The block's rows in shared memory and in the buffer, and how many places there are."""
        places = self.residual.waves * self.residual.tile_rows
        kept = self.kept + self.machine.block * places
        return self.machine.region("residual", ty.f32), kept, places

    @ch.inline
    def _attention(self, layer: Any) -> None:
        """The block's items: outputs of whole heads, partial states of split ones."""
        with self.machine.producer:
            self.attention.copy(layer, self.step)
        with self.machine.consumer:
            self.port.layer = layer
            self.attention.attend(self.step, self.layer_epoch)

    @ch.inline
    def _merge(self) -> None:
        with self.machine.consumer:
            self.attention.merge(self.layer_epoch)

    def _head(self) -> None:
        """The logits, and the block's best candidates. The last layer's output is in memory."""
        self.linear.end_layers()
        self.start_sampling()
        hidden = self.normalised(self.table.head.input, self.layer_epoch, None)
        self.linear(self.matrices.head, hidden, self.take_logits(self.step), when=self.needs_head(self.step))
        with self.machine.adding():
            self.two_kernels.lay_down()
        with self.machine.consumer:
            self.two_kernels.publish_best(self.step)

    @ch.inline
    def _sampling(self) -> None:
        """One block takes the best of all blocks' candidates."""
        with self.machine.consumer:
            self.two_kernels.choose_of_blocks()
            with ch.if_(self.machine.thread == 0):
                chosen = self.machine.region("chosen", ty.u32)[0]
                self.launch.tokens[1] = ty.i32(ch.minimum(chosen, self.shape.vocab - 1))
                self.launch.status[0] = 1


class FirstToken(Tokens):
    """The token that the launch begins with."""

    def embedding(self, column: Any) -> Any:
        return self.launch.embedding + ty.u64(self.launch.tokens[0]) * self.model.padded_hidden


class SamplerInTwoKernels(Sampler):
    """`publish_best` ends the head's kernel; `choose_of_blocks` is the kernel after it."""

    @ch.inline
    def publish_best(self, step: ch.Expr) -> None:
        """Publish the block's best candidates."""
        machine, groups = self.machine, self.machine.plan.finishing_groups
        self.adding.reductions.wait_for_step(step)
        for column in self._columns_of_warp():
            best, best_token = self._best_of("warp_candidates", column, self.columns.limit, groups)
            with ch.if_(machine.lane < 2):
                word = ch.select(machine.lane == 0, prim.float_bits(best), best_token)
                place = (machine.block * self.places + column) * 2 + machine.lane
                self.exchange.publish("candidates", place, word, ty.u32(0))

    @ch.inline
    def choose_of_blocks(self) -> None:
        """Leaves it in the region `chosen`; ends with a barrier of the consumer warps."""
        machine = self.machine
        self._gather(ty.u32(0), ty.u32(0))
        machine.meet()
        for column in self._columns_of_warp():
            _, best_token = self._best_of("candidates", column, self.places, machine.gpu.blocks)
            with ch.if_(machine.lane == 0):
                machine.region("chosen", ty.u32)[column] = best_token
        machine.meet()
