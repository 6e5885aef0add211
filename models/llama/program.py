"""The decode step of Llama as one kernel: the model as a page, written with the building blocks.

Every phase says what the copy lane fetches and what the math warps do with it. Nothing here knows a phase bit, a
stage or a barrier. Numerics: bf16 weights and activations, f32 accumulation and softmax, residual in f32, logits f32.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cheetah import lang as ch
from cheetah.blocks.exchange import BarrierExchange, FlaggedExchange
from cheetah.blocks.linear.epilogue import HALF, add_residual, swiglu
from cheetah.blocks.linear.prologue import prefetch
from cheetah.blocks.machine import emit_roles, start_machine
from cheetah.lang import ty
from cheetah.models.config import ModelConfig
from cheetah.models.llama.step import LAYER_PHASES, StepParts, exchange_sizes
from cheetah.plan import Gpu, Plan, shared_map
from cheetah.plan.index import ceil_div

__all__ = ["KERNEL_NAME", "LAYER_PHASES", "PARAMETERS", "Step", "build_kernel", "kernel_parameters", "workspace_bytes"]

KERNEL_NAME = "decode_step"

PARAMETERS: dict[str, ty.Type] = {
    "weights": ty.ptr(ty.u8),
    "norms": ty.ptr(ty.bf16),
    "embedding": ty.ptr(ty.bf16),
    "rope": ty.ptr(ty.f32),
    "kv": ty.ptr_mut(ty.bf16),
    "page_table": ty.ptr(ty.i32),
    "kv_plans": ty.ptr(ty.i32),
    "tiles": ty.ptr(ty.i32),
    "sequences": ty.ptr(ty.i32),
    "columns": ty.ptr(ty.i32),
    "exchange": ty.ptr_mut(ty.u8),
    "tokens": ty.ptr_mut(ty.i32),
    "stop_ids": ty.ptr(ty.i32),
    "logits": ty.ptr_mut(ty.f32),
    "progress": ty.ptr_mut(ty.u32),
    "status": ty.ptr_mut(ty.i32),
    "steps": ty.u32,
    "head_from": ty.u32,
    "column_count": ty.u32,
    "plan_count": ty.u32,
    "epoch": ty.u32,
}


def kernel_parameters(plan: Plan) -> ch.Params:
    """The kernel's signature."""
    parameters = dict(PARAMETERS)
    if plan.kv_dtype == "e4m3":
        parameters |= {"kv": ty.ptr_mut(ty.u8), "kv_scales": ty.ptr(ty.f32)}
    if plan.trace:
        parameters["timeline"] = ty.ptr_mut(ty.u64)
    return ch.Params(**parameters)


def workspace_bytes(config: ModelConfig, gpu: Gpu, plan: Plan) -> int:
    """Bytes of the `exchange` buffer."""
    kind = {"flags": FlaggedExchange, "barrier": BarrierExchange}[plan.sync]
    return kind.size_bytes(exchange_sizes(config.shape, gpu, plan))


def build_kernel(config: ModelConfig, gpu: Gpu, plan: Plan) -> ch.Kernel:
    """The kernel of `plan.max_steps` or fewer decode steps of `plan.batch` or fewer sequences. Shapes of the
    parameters: see the manifest."""
    shape = config.shape

    @ch.kernel(kernel_parameters(plan), name=KERNEL_NAME, max_threads=plan.threads)
    def decode_step(**arguments: Any) -> None:
        machine = start_machine(shape, plan, gpu, shared_map(shape, plan, gpu))
        Step(config, machine, SimpleNamespace(**arguments)).emit()

    return decode_step


class Step(StepParts):
    """The program of the launch: steps, layers, phases."""

    @ch.inline
    def emit(self) -> None:
        """Set up, then every step: the layers, the head, the choice of the next token."""
        machine, launch = self.machine, self.launch
        self._set_up()
        with ch.roles_for(machine.roles, launch.steps, name="step") as step:
            self._begin_step(step)
            with ch.roles_for(machine.roles, self.shape.layers, name="layer") as layer:
                self._begin_layer(layer)
                self._qkv(step, layer)
                self._attention(step, layer)
                self._o(step, layer)
                self._gate_up(step, layer)
                self._down(step, layer)
            self._head(step)
            self._end_step(step)
        emit_roles(machine)

    @ch.inline
    def _qkv(self, step: Any, layer: Any) -> None:
        """Input norm, q, k and v projections, RoPE; the new keys and values go to the cache and, with q, to the
        exchange."""
        matrix = self.matrices.qkv
        with self.machine.copy:
            ch.comment("qkv")
            self.matvec.copy(matrix, self.layer_offset)
        with self.machine.math:
            ch.comment("qkv: input norm, q, k and v of these tokens, rotary embedding")
            self._note(step, layer, "qkv")
            prefetch(self.machine, self._norm(layer * 2 + 1), self.shape.padded_hidden * 2)
            self.matvec.multiply(matrix, lambda _: self._load_hidden(layer), lambda rows: self._finish_qkv(rows, layer))
            self._stamp(layer, "qkv", "done")
            self.exchange.meet()

    @ch.inline
    def _load_hidden(self, layer: Any) -> None:
        with ch.if_(layer == 0):
            self._load_norm(self.launch.norms, self._read_embedding)
        with ch.else_():
            epoch = self.layer_epoch - 1
            self._load_norm(self._norm(layer * 2), self._reader("hidden", epoch), self._waiter("hidden", epoch))
        self._stamp(layer, "qkv", "ready")

    @ch.inline
    def _attention(self, step: Any, layer: Any) -> None:
        """The block's items of the KV plan, then its merges of heads that were split."""
        with self.machine.copy:
            ch.comment("keys and values of earlier tokens")
            with ch.if_(layer == 0):
                self._wait_for_step(step)
            self.attention.copy(layer, step)
        with self.machine.math:
            ch.comment("attention")
            self._note(step, layer, "attention")
            self.port.layer = layer
            self.attention.attend(step, self.layer_epoch)
            self._stamp(layer, "attention", "attended")
            self.exchange.meet()
            ch.comment("merge of partial states")
            self.attention.merge(self.layer_epoch)
            self._stamp(layer, "attention", "done")
            self.exchange.meet()

    @ch.inline
    def _o(self, step: Any, layer: Any) -> None:
        """Output projection and residual."""
        self._project_onto_residual(step, layer, "o", self.matrices.o, "attention", "middle", self.shape.query_rows)

    @ch.inline
    def _gate_up(self, step: Any, layer: Any) -> None:
        """Norm, gate and up projections, SwiGLU."""
        matrix = self.matrices.gate_up

        def load(_: int) -> None:
            read, wait = self._reader("middle", self.layer_epoch), self._waiter("middle", self.layer_epoch)
            self._load_norm(self._norm(layer * 2 + 1), read, wait)
            self._stamp(layer, "gate_up", "ready")

        with self.machine.copy:
            ch.comment("gate_up")
            self.matvec.copy(matrix, self.layer_offset)
        with self.machine.math:
            ch.comment("gate_up: norm, gate and up, SwiGLU")
            self._note(step, layer, "gate_up")
            prefetch(self.machine, self._norm(layer * 2 + 2), self.shape.padded_hidden * 2)
            self.matvec.multiply(
                matrix, load, lambda rows: swiglu(self.machine, self.exchange, "gated", rows, self.layer_epoch)
            )
            self._stamp(layer, "gate_up", "done")
            self.exchange.meet()

    @ch.inline
    def _down(self, step: Any, layer: Any) -> None:
        """Down projection and residual: the hidden vectors of the next layer."""
        available = ceil_div(self.shape.ffn, HALF) * HALF
        self._project_onto_residual(step, layer, "down", self.matrices.down, "gated", "hidden", available)

    @ch.inline
    def _head(self, step: Any) -> None:
        """Final norm, logits, each block's best candidates; left out for prompt tokens whose logits nobody wants."""
        matrix = self.matrices.head

        def load(_: int) -> None:
            last = self.step_epoch + (self.shape.layers - 1)
            norm = self._norm(ty.u32(2 * self.shape.layers))
            self._load_norm(norm, self._reader("hidden", last), self._waiter("hidden", last))
            self.timeline.stamp(self.phases - 2, "ready")

        with self.machine.copy:
            ch.comment("head")
            with ch.if_(self._needs_head(step)):
                self.matvec.copy(matrix, ty.u64(0))
        with self.machine.math:
            ch.comment("head: final norm, logits, candidates")
            self._note_phase(step, self.phases - 2)
            self.sampler.start()
            with ch.if_(self._needs_head(step)):
                self.matvec.multiply(matrix, load, lambda rows: self._finish_head(rows, step))
                self.timeline.stamp(self.phases - 2, "done")
            self._note_phase(step, self.phases - 1)
            self.sampler.choose(self.step_epoch + self.shape.layers, step)
            self.timeline.stamp(self.phases - 1, "done")

    @ch.inline
    def _project_onto_residual(
        self, step: Any, layer: Any, name: str, matrix: Any, source: str, target: str, available: int
    ) -> None:
        load = self._slice_loader(matrix, source, available, lambda: self._stamp(layer, name, "ready"))
        with self.machine.copy:
            ch.comment(name)
            self.matvec.copy(matrix, self.layer_offset)
        with self.machine.math:
            ch.comment(f"{name}: projection onto the residual")
            self._note(step, layer, name)
            self.matvec.multiply(
                matrix, load, lambda rows: add_residual(self.machine, self.exchange, target, rows, self.layer_epoch)
            )
            self._stamp(layer, name, "done")
            self.exchange.meet()
