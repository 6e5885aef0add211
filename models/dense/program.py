"""The decode step of a dense decoder as one kernel: the model as a page, written with the building blocks.

A phase says what the producer lane fetches and what the consumer warps do with it; the products say it themselves.
Nothing here knows a phase bit, a stage or a barrier. Numerics: bf16 weights and activations, f32 accumulation and
softmax, residual in f32, logits f32."""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.linear.epilogue import swiglu
from cheetah.blocks.machine import emit_roles, start_machine
from cheetah.models.config import ModelConfig
from cheetah.models.dense.launch import Launch, kernel_parameters
from cheetah.models.dense.step import StepParts, phase_names, sizes
from cheetah.plan import Gpu, Plan, shared_map

__all__ = ["KERNEL_NAME", "Step", "build_kernel", "kernel_parameters", "phase_names", "sizes"]

KERNEL_NAME = "decode_step"


def build_kernel(config: ModelConfig, gpu: Gpu, plan: Plan) -> ch.Kernel:
    """The kernel of `plan.max_steps` or fewer decode steps of `plan.batch` or fewer sequences. Shapes of the
    parameters: see the manifest."""
    shape = config.shape
    types = {name: parameter.type for name, parameter in kernel_parameters(config, plan).items()}

    @ch.kernel(ch.Params(**types), name=KERNEL_NAME, max_threads=plan.threads)
    def decode_step(**arguments: Any) -> None:
        machine = start_machine(shape, plan, gpu, shared_map(shape, plan, gpu))
        Step(config, machine, Launch(**arguments)).emit()

    return decode_step


class Step(StepParts):
    """The program of the launch: steps, layers, phases."""

    @ch.inline
    def emit(self) -> None:
        """Set up, then every step: the layers, the head, the choice of the next token."""
        roles = self.machine.roles
        self.set_up()
        with ch.roles_for(roles, self.launch.steps, name="step") as step:
            self.begin_step(step)
            with ch.roles_for(roles, self.shape.layers, name="layer") as layer:
                self.begin_layer(layer)
                self.emit_layer(step, layer)
            self.end_layers()
            hidden = self.normalised(self.table.head.input, self.layer_epoch, self.places(self.table.head))
            self.emit_head(step, hidden, waits="hidden of the last layer")
            self.end_step(step)
        emit_roles(self.machine)

    def emit_layer(self, step: Any, layer: Any) -> None:
        """Attention and feed-forward, each added to the residual."""
        machine, matrices, phase, linear = self.machine, self.matrices, self.phase, self.linear
        qkv, o, gate_up, down = self.table.products
        with phase(
            "qkv",
            "Input norm; q, k and v of these tokens; rotary embedding.",
            waits="hidden of the layer before; in the first layer for nothing, the tokens' embeddings are there",
            makes="qkv, and the keys and values in the cache",
        ):
            linear(matrices[qkv], self.input_of(qkv, layer), self.project_heads(layer))
        with phase(
            "attention",
            "The block's items of the KV plan; then its merges of rows whose keys were split.",
            waits="the queries, newest keys and values of an item (qkv); the states of a row (partials)",
            makes="attention, where keys were split by way of partials",
            fetched="keys and values of earlier tokens",
        ):
            self.attend(step, layer)
        with phase("o", "Projection onto the residual.", waits="attention", makes="middle"):
            linear(matrices[o], self.input_of(o, layer), self.onto_residual(o, layer))
        with phase("gate_up", "Norm; gate and up; SwiGLU.", waits="middle", makes="gated"):
            linear(matrices[gate_up], self.input_of(gate_up, layer), swiglu(machine, self.vector(gate_up.output)))
        with phase("down", "Projection onto the residual.", waits="gated", makes="hidden"):
            linear(matrices[down], self.input_of(down, layer), self.onto_residual(down, layer))
