"""The head of a dense decoder as a kernel by itself: logits and tokens of hidden states that a pass over prompts left.

It is the decode step without its layers, written with the same blocks: so the token behind a prompt is chosen as any
other is. A column's "token" is a row of those states. A step takes as many columns as one that decodes, and reads the
head's weights once for them.
"""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.exchange import Peers
from cheetah.blocks.exchange_kinds import make_exchange
from cheetah.blocks.machine import Machine, emit_roles, start_machine
from cheetah.lang import ty
from cheetah.models.config import ModelConfig
from cheetah.models.dense.head_parts import HeadParts
from cheetah.models.dense.launch import Launch, buffer_of, hidden_states_parameter
from cheetah.models.dense.launch import kernel_parameters as parameters_of_step
from cheetah.models.dense.page import page_of_head
from cheetah.models.dense.step_sizes import head_exchange_sizes, published_kinds, workspace_bytes
from cheetah.models.dense.step_sizes import sizes as sizes_of_step
from cheetah.package import KernelParameter
from cheetah.plan import Gpu, Plan, shared_map

KERNEL_NAME = "lm_head"
OF_LAYERS = (
    *("rope", "kv", "page_table", "kv_pages", "kv_plans", "tiles", "plan_count", "kv_scales"),
    *("biases", "head_norms", "sinks", "norms_behind", "taps"),
)
"""Parameters of a step that its layers alone need."""


def kernel_parameters(config: ModelConfig, plan: Plan, ranks: int = 1) -> dict[str, KernelParameter]:
    """The parameters by name, in the order of the signature. ranks: GPUs that make its steps together."""
    of_step = parameters_of_step(config, plan, ranks=ranks)
    of_step["embedding"] = hidden_states_parameter(ty.ptr(ty.bf16))
    renamed = {"embedding": "hidden_states"}
    return {renamed.get(name, name): one for name, one in of_step.items() if buffer_of(name) not in OF_LAYERS}


def sizes(config: ModelConfig, gpu: Gpu, plan: Plan, rows: int) -> dict[str, int]:
    """The sizes that the parameters' shapes name. rows: of hidden states."""
    nbytes = workspace_bytes(head_exchange_sizes(config.shape, gpu, plan), plan, _inputs(config))
    own = {"hidden_rows": rows, "exchange_bytes": nbytes, "phases": page_of_head(config).names.count}
    return {**sizes_of_step(config, gpu, plan), **own}


def _inputs(config: ModelConfig) -> dict[str, int]:
    """What its product takes whole, with the exponent of its exchange."""
    hidden = config.table.head.input
    return {hidden.name: hidden.exponent}


def phase_names(config: ModelConfig, plan: Plan) -> tuple[str, ...]:
    """The phases of a step, as `progress` counts them."""
    return page_of_head(config).names.names


def build_kernel(config: ModelConfig, gpu: Gpu, plan: Plan, rows: int) -> ch.Kernel:
    """The kernel of `plan.max_steps` or fewer steps over up to `plan.tokens` of `rows` hidden states each."""
    types = {name: parameter.type for name, parameter in kernel_parameters(config, plan, gpu.ranks).items()}

    @ch.kernel(ch.Params(**types), name=KERNEL_NAME, max_threads=plan.threads)
    def lm_head(**arguments: Any) -> None:
        given = {**dict.fromkeys(OF_LAYERS), **arguments, "embedding": arguments["hidden_states"]}
        del given["hidden_states"]
        launch = Launch.of(given)
        machine = start_machine(config.shape, plan, gpu, shared_map(config.shape, plan, gpu), launch.rank)
        Head(config, machine, launch, rows).emit()

    return lm_head


class Head(HeadParts):
    """The program of a launch: steps of two phases."""

    def __init__(self, config: ModelConfig, machine: Machine, launch: Launch, rows: int) -> None:
        exchange = make_exchange(
            *(machine, launch.exchange, head_exchange_sizes(machine.model, machine.gpu, machine.plan)),
            inputs=_inputs(config),
            copied=published_kinds(config, machine.plan),
            peers=Peers(launch.peers.get("exchange", ())),
        )
        super().__init__(config, machine, launch, exchange, page_of_head(config), rows)

    @ch.inline
    def emit(self) -> None:
        """Set up, then every step."""
        machine = self.machine
        self.set_up()
        with ch.roles_for(machine.roles, self.launch.steps, name="step") as step:
            self._begin_step(step)
            self.emit_head(step, self.step_epoch)
            with machine.consumer:
                self.tokens.end_step(step)
            with machine.adding():
                self.tokens.leave_after(step)
        emit_roles(machine)

    @ch.inline
    def _begin_step(self, step: Any) -> None:
        """Nothing is fetched before the step before is known not to have been the last."""
        machine = self.machine
        self.phase.step = step
        with machine.producer, ch.if_(step > 0), ch.if_(self.tokens.launch_is_over(step)):
            ch.return_()
        self.begin_epochs(step)
        head = self.table.head
        with machine.consumer:
            self.publish_embeddings(head.input, self.norm(self.table.norm_row(head, None)))
            self.columns.begin_step(step)
            machine.meet()
            self.exchange.meet()
