"""The decode step of a dense decoder as one kernel: steps, layers, and the lines of the model's page (`page`), written
with the building blocks.

A phase says what the producer lane fetches and what the consumer warps do with it; the products say it themselves.
Nothing here knows a phase bit, a stage or a barrier. Numerics: bf16 weights and activations, f32 accumulation and
softmax, residual in f32, logits f32."""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.machine import emit_roles, start_machine
from cheetah.models.config import ModelConfig
from cheetah.models.dense.drafting_step import drafting_parts
from cheetah.models.dense.exchanged import exchanged_vectors
from cheetah.models.dense.launch import Launch, kernel_parameters
from cheetah.models.dense.page import page_of_plan
from cheetah.models.dense.step import StepParts
from cheetah.models.dense.step_sizes import phase_names, sizes
from cheetah.models.family import PhaseRow
from cheetah.plan import Gpu, Plan, shared_map

__all__ = [
    "KERNEL_NAME",
    "build_kernel",
    "exchanged_vectors",
    "kernel_parameters",
    "phase_names",
    "phase_rows",
    "sizes",
]

KERNEL_NAME = "decode_step"


def build_kernel(config: ModelConfig, gpu: Gpu, plan: Plan, traced: bool = False) -> ch.Kernel:
    """The kernel of `plan.max_steps` or fewer decode steps of `plan.batch` or fewer sequences. Shapes of the
    parameters: see the manifest. traced: with time stamps of every block and phase; else none of it is there."""
    shape = config.shape
    parameters = kernel_parameters(config, plan, traced, gpu.ranks)
    types = {name: parameter.type for name, parameter in parameters.items()}

    @ch.kernel(ch.Params(**types), name=KERNEL_NAME, max_threads=plan.threads)
    def decode_step(**arguments: Any) -> None:
        launch = Launch.of(arguments)
        machine = start_machine(shape, plan, gpu, shared_map(shape, plan, gpu), launch.rank)
        emit(drafting_parts(config)(config, machine, launch))

    return decode_step


def phase_rows(config: ModelConfig, plan: Plan) -> tuple[PhaseRow, ...]:
    """The phases of a step as people read them."""
    return page_of_plan(config, plan).rows


@ch.inline
def emit(parts: StepParts) -> None:
    """The program of the launch: set up, then every step: the layers, the head, the choice of the next token."""
    roles = parts.machine.roles
    parts.set_up()
    with ch.roles_for(roles, parts.launch.steps, name="step") as step:
        parts.begin_step(step)
        with ch.roles_for(roles, parts.shape.layers, name="layer") as layer:
            parts.begin_layer(layer)
            parts.emit_own(step, layer)
            for line in parts.page.common:
                parts.emit_line(line, step, layer)
        parts.end_layers()
        parts.emit_head(step, parts.layer_epoch)
        parts.end_step(step)
    emit_roles(parts.machine)
