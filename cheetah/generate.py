"""From a configuration to a kernel's text and its manifest: the generator's front door.

Everything is decided here without a GPU: the plan by rule (and overrides), the text, the parameters, the buffers.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from cheetah import lang as ch
from cheetah.blocks import repack
from cheetah.manifest import Launch, Manifest, Parameter, sha256_of_text
from cheetah.models.config import ModelConfig
from cheetah.models.registry import family_of
from cheetah.package import Generated, KernelParameter
from cheetah.plan import Gpu, Plan, default_plan, gpu_named, shared_map, step_matrices
from cheetah.plan.defaults import default_context
from cheetah.plan.prompt import PassPlan, widest_format
from cheetah.version import __version__


def choose_plan(config: ModelConfig, gpu: Gpu, **overrides: Any) -> Plan:
    """The plan by rule for a model on a machine; overrides are fields of `Plan`."""
    given = {name: value for name, value in overrides.items() if value is not None}
    given.setdefault("max_context", default_context(config.max_position_embeddings))
    return default_plan(gpu, config.shape, **given)


def generate_kernel(
    config: ModelConfig,
    gpu: str | Gpu = "h200",
    *,
    command: str = "cheetah generate",
    line_marks: bool = False,
    **overrides: Any,
) -> Generated:
    """The kernel of a model on a machine. `command` is what the header says regenerates it; the rest are plan fields.

    Errors: PlanError where no plan fits the machine; ConfigError comes from the configuration itself.
    """
    machine = gpu_named(gpu) if isinstance(gpu, str) else gpu
    plan = choose_plan(config, machine, **overrides)
    about = f"The whole decode step of a {config.dialect.title} model in one persistent kernel."
    with _no_collections():
        kernel = family_of(config).program.build_kernel(config, machine, plan)
        text = ch.render_file(kernel, header=_header(config, machine, plan, command, about), line_marks=line_marks)
    return Generated(text, describe_kernel(config, machine, plan, text, command))


@contextmanager
def _no_collections() -> Iterator[None]:
    """A program is a hundred thousand objects that live until its text is written: looking for garbage among them takes
    a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _header(config: ModelConfig, gpu: Gpu, plan: Plan, command: str, about: str) -> str:
    shape = config.shape
    matrices = step_matrices(shape, plan, gpu)
    lines = [
        f"{about} Generated; do not edit.",
        f"Regenerate with: {command}",
        "",
        "model: " + ", ".join(f"{name} {value}" for name, value in shape.describe().items()),
        f"machine: {gpu.name}, {gpu.blocks} blocks of {plan.threads} threads: {plan.consumer_warps} consumer warps",
        "plan: " + ", ".join(f"{name} {value}" for name, value in plan.to_dict().items()),
        f"weights read a step: {matrices.weight_bytes} bytes, in {matrices.layer_stride} a layer",
        "shared memory:",
        *(f"  {line}" for line in shared_map(shape, plan, gpu).budget_table().splitlines()),
    ]
    return "\n".join(lines)


def generate_pass(
    config: ModelConfig,
    gpu: str | Gpu,
    plan: Plan,
    pass_plan: PassPlan,
    *,
    command: str = "cheetah generate --prompt-pass",
    line_marks: bool = False,
) -> Generated:
    """The kernel of passes over prompts, beside the kernel that decodes by `plan`, over the same weights and cache.

    Errors: PlanError where the model, the plan or the machine allow none, with the reason.
    """
    machine = gpu_named(gpu) if isinstance(gpu, str) else gpu
    header = _pass_header(config, machine, plan, pass_plan, command)
    with _no_collections():
        kernel = family_of(config).prompt_program.build_kernel(config, machine, plan, pass_plan)
        text = ch.render_file(kernel, header=header, line_marks=line_marks)
    return Generated(text, describe_pass(config, machine, plan, pass_plan, text, command))


def _pass_header(config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan, command: str) -> str:
    format = widest_format(step_matrices(config.shape, plan, gpu).of_layer)
    lines = [
        f"A pass over a prompt of a {config.dialect.title} model in one persistent kernel. Generated; do not edit.",
        f"Regenerate with: {command}",
        "",
        "model: " + ", ".join(f"{name} {value}" for name, value in config.shape.describe().items()),
        f"machine: {gpu.name}, {gpu.blocks} blocks of {pass_plan.threads} threads",
        "pass: " + ", ".join(f"{name} {value}" for name, value in pass_plan.to_dict().items()),
        "beside a decode kernel of: " + ", ".join(f"{name} {value}" for name, value in plan.to_dict().items()),
        "shared memory:",
        *(f"  {line}" for line in pass_plan.shared(format, gpu.shared_bytes).budget_table().splitlines()),
    ]
    return "\n".join(lines)


def describe_pass(config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan, text: str, command: str) -> Manifest:
    """The manifest of the kernel that `generate_pass` makes for these, whose text is `text`. Its `plan` is the pass',
    and in it as `decoding` that of the kernel that decodes."""
    program, matrices = family_of(config).prompt_program, step_matrices(config.shape, plan, gpu)
    parameters, sizes = (
        program.pass_parameters(config, plan, pass_plan.trace),
        program.sizes(config, gpu, plan, pass_plan),
    )
    shared_bytes = pass_plan.shared(widest_format(matrices.of_layer), gpu.shared_bytes).total_bytes
    return Manifest(
        kernel=program.KERNEL_NAME,
        text_sha256=sha256_of_text(text),
        generator=__version__,
        command=command,
        gpu=asdict(gpu),
        config=config.to_dict(),
        plan={**pass_plan.to_dict(), "decoding": plan.to_dict()},
        launch=Launch(gpu.blocks, pass_plan.threads, shared_bytes),
        parameters=tuple(one.parameter(name, sizes) for name, one in parameters.items()),
        matrices=matrices.describe(),
        layer_stride=matrices.layer_stride,
        weight_bytes=matrices.weight_bytes,
        buffers=tuple(made for name, one in parameters.items() if (made := one.buffer(name, sizes))),
        phases=program.phase_names(config, gpu, plan, pass_plan),
        step_bytes={"weights": matrices.weight_bytes},
    )


def generate_head(
    config: ModelConfig, gpu: str | Gpu, plan: Plan, rows: int, *, command: str = "cheetah.generate.generate_head"
) -> Generated:
    """The kernel of the head by itself, over the `rows` hidden states that passes over prompts leave; as many steps and
    columns as those of `plan`, over the same weights."""
    machine = gpu_named(gpu) if isinstance(gpu, str) else gpu
    with _no_collections():
        kernel = family_of(config).head_program.build_kernel(config, machine, plan, rows)
        about = f"The head of a {config.dialect.title} model over hidden states that passes left."
        text = ch.render_file(kernel, header=_header(config, machine, plan, command, about))
    return Generated(text, describe_head(config, machine, plan, rows, text, command))


def describe_head(config: ModelConfig, gpu: Gpu, plan: Plan, rows: int, text: str, command: str) -> Manifest:
    """The manifest of the kernel that `generate_head` makes for these, whose text is `text`."""
    program = family_of(config).head_program
    parameters, sizes = program.kernel_parameters(config, plan), program.sizes(config, gpu, plan, rows)
    phases = program.phase_names(config)
    return _described(config, gpu, plan, text, command, program.KERNEL_NAME, parameters, sizes, phases)


def generate_repacking(gpu: Gpu) -> Generated:
    """The kernel that packs weights as `cheetah.plan.repacking` says."""
    threads, team_threads = (64, 32) if gpu.emulated else (1024, 256)
    about = "Packs weights from the bytes of a checkpoint's file. Generated; do not edit."
    text = ch.render_file(repack.build_repack(threads, team_threads), header=about)
    manifest = Manifest(
        kernel=repack.KERNEL_NAME,
        text_sha256=sha256_of_text(text),
        generator=__version__,
        command="cheetah.generate.generate_repacking",
        gpu=asdict(gpu),
        config={},
        plan={},
        launch=Launch(gpu.blocks, threads, 0, cooperative=False),
        parameters=(
            Parameter("staging", "const uint8_t*", "pointer", "u8", False, None, "tables, scales and codes"),
            Parameter("weights", "uint8_t*", "pointer", "u8", True, None, "packed weights"),
            *(
                KernelParameter(type_, f"Repacking.{name}").parameter(name, {})
                for name, type_ in repack.NUMBERS.items()
            ),
        ),
        matrices=(),
        layer_stride=0,
        weight_bytes=0,
        buffers=(),
        phases=(),
        step_bytes={},
    )
    return Generated(text, manifest)


def describe_kernel(config: ModelConfig, gpu: Gpu, plan: Plan, text: str, command: str) -> Manifest:
    """The manifest of the kernel that `generate_kernel` makes for these, whose text is `text`."""
    program = family_of(config).program
    parameters, sizes = program.kernel_parameters(config, plan), program.sizes(config, gpu, plan)
    phases = program.phase_names(config)
    return _described(config, gpu, plan, text, command, program.KERNEL_NAME, parameters, sizes, phases)


def _described(
    config: ModelConfig,
    gpu: Gpu,
    plan: Plan,
    text: str,
    command: str,
    kernel: str,
    parameters: Mapping[str, KernelParameter],
    sizes: Mapping[str, int],
    phases: tuple[str, ...],
) -> Manifest:
    """The manifest of a kernel whose steps are those of `plan`."""
    shape = config.shape
    matrices = step_matrices(shape, plan, gpu)
    return Manifest(
        kernel=kernel,
        text_sha256=sha256_of_text(text),
        generator=__version__,
        command=command,
        gpu=asdict(gpu),
        config=config.to_dict(),
        plan=plan.to_dict(),
        launch=Launch(gpu.blocks, plan.threads, shared_map(shape, plan, gpu).total_bytes),
        parameters=tuple(one.parameter(name, sizes) for name, one in parameters.items()),
        matrices=matrices.describe(),
        layer_stride=matrices.layer_stride,
        weight_bytes=matrices.weight_bytes,
        buffers=tuple(made for name, one in parameters.items() if (made := one.buffer(name, sizes))),
        phases=phases,
        step_bytes={
            "weights": matrices.weight_bytes,
            "kv_per_token": config.kv_bytes_per_token * plan.kv_element_bytes // 2,
        },
    )
