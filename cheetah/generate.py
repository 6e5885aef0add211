"""From a configuration to a kernel's text and its manifest: the generator's front door.

Everything is decided here without a GPU: the plan by rule (and overrides), the text, the parameters, the buffers.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cheetah import __version__
from cheetah import lang as ch
from cheetah.blocks.timeline import EVENTS
from cheetah.lang import ty
from cheetah.manifest import Buffer, Launch, Manifest, Parameter, sha256_of_text
from cheetah.models.config import ModelConfig
from cheetah.models.registry import family_of
from cheetah.package import DTYPES, Generated
from cheetah.plan import Gpu, Plan, default_plan, gpu_named, shared_map, step_matrices
from cheetah.plan.kv import KvPlanLayout, max_plans
from cheetah.plan.kv.tables import COLUMN_WORDS, MAX_STOP_IDS, SEQUENCE_WORDS, TILE_WORDS

ROLES = {
    "weights": "packed matrices of all layers, then the head",
    "norms": "norm weights: two a layer, then the last",
    "embedding": "one row a token id",
    "rope": "cos and sin of every position",
    "kv": "paged key/value pool (HND)",
    "kv_scales": "what e4m3 codes of each layer's keys, then values, are multiplied by",
    "page_table": "every sequence's pages, in order",
    "kv_plans": "attention schedules of the launch",
    "tiles": "which columns read which keys: see cheetah.plan.kv.tables",
    "sequences": "the launch's sequences: see cheetah.plan.kv.tables",
    "columns": "the launch's columns: see cheetah.plan.kv.tables",
    "exchange": "workspace through which blocks exchange vectors; zeroed once",
    "tokens": "of every sequence: inputs, and what the kernel makes of them; -1 where no logit is a number",
    "stop_ids": "token ids that end a sequence",
    "logits": "of every step and column, if wanted",
    "progress": "how far each block is",
    "status": "[0]: steps done",
    "timeline": "nanoseconds of the events of every phase in the last step: see cheetah.blocks.timeline",
    "steps": "most steps to make",
    "head_from": "first step whose samples are wanted",
    "column_count": "columns in use",
    "plan_count": "schedules in `kv_plans`",
    "epoch": "first of the launch's exchange epochs: steps * (layers + 1) are used",
}


def choose_plan(config: ModelConfig, gpu: Gpu, **overrides: Any) -> Plan:
    """The plan by rule for a model on a machine; overrides are fields of `Plan`."""
    given = {name: value for name, value in overrides.items() if value is not None}
    given.setdefault("max_context", min(config.max_position_embeddings, 8192))
    return default_plan(gpu, **asdict(config.shape), **given)


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
    kernel = family_of(config).program.build_kernel(config, machine, plan)
    text = ch.render_file(kernel, header=_header(config, machine, plan, command), line_marks=line_marks)
    return Generated(text, _manifest(config, machine, plan, text, command))


def _header(config: ModelConfig, gpu: Gpu, plan: Plan, command: str) -> str:
    shape = config.shape
    matrices = step_matrices(shape, plan, gpu)
    lines = [
        "The whole decode step of a Llama model in one persistent kernel. Generated; do not edit.",
        f"Regenerate with: {command}",
        "",
        "model: " + ", ".join(f"{name} {value}" for name, value in asdict(shape).items()),
        f"machine: {gpu.name}, {gpu.blocks} blocks of {plan.threads} threads: {plan.math_warps} math warps",
        "plan: " + ", ".join(f"{name} {value}" for name, value in plan.to_dict().items()),
        f"weights read a step: {matrices.weight_bytes} bytes, in {matrices.layer_stride} a layer",
        "shared memory:",
        *(f"  {line}" for line in shared_map(shape, plan, gpu).budget_table().splitlines()),
    ]
    return "\n".join(lines)


def _manifest(config: ModelConfig, gpu: Gpu, plan: Plan, text: str, command: str) -> Manifest:
    shape = config.shape
    matrices, program = step_matrices(shape, plan, gpu), family_of(config).program
    parameters, shapes = program.kernel_parameters(plan), buffer_shapes(config, gpu, plan)
    return Manifest(
        kernel=program.KERNEL_NAME,
        text_sha256=sha256_of_text(text),
        generator=__version__,
        command=command,
        gpu=asdict(gpu),
        config=config.to_dict(),
        plan=plan.to_dict(),
        launch=Launch(gpu.blocks, plan.threads, shared_map(shape, plan, gpu).total_bytes),
        parameters=tuple(_parameter(name, type_, shapes) for name, type_ in parameters.items()),
        matrices=matrices.describe(),
        layer_stride=matrices.layer_stride,
        weight_bytes=matrices.weight_bytes,
        buffers=tuple(
            _buffer(name, type_, shapes[name])
            for name, type_ in parameters.items()
            if name in shapes and name != "logits"
        ),
        phases=phase_names(config),
        step_bytes={
            "weights": matrices.weight_bytes,
            "kv_per_token": config.kv_bytes_per_token * plan.kv_element_bytes // 2,
        },
    )


def phase_names(config: ModelConfig) -> tuple[str, ...]:
    """The phases of a step, as `progress` counts them."""
    phases = family_of(config).program.LAYER_PHASES
    layers = tuple(f"layer {layer} {phase}" for layer in range(config.layers) for phase in phases)
    return (*layers, "head", "sampling")


def buffer_shapes(config: ModelConfig, gpu: Gpu, plan: Plan) -> dict[str, tuple[int | str, ...]]:
    """What each pointer points to; a string is the scalar parameter that gives the length."""
    shape = config.shape
    layout = KvPlanLayout.for_step(plan, shape.group, shape.kv_heads, gpu.blocks)
    plans = max_plans(plan.max_steps, plan.kv_align, layout.tiles, plan.tokens)
    return {
        "weights": (step_matrices(shape, plan, gpu).weight_bytes,),
        "norms": (2 * shape.layers + 1, shape.padded_hidden),
        "embedding": (shape.vocab, shape.padded_hidden),
        "rope": (plan.max_context, shape.head_dim // 2, 2),
        "kv": (shape.layers, plan.kv_pages, 2, shape.kv_heads, plan.page_size, shape.head_dim),
        "kv_scales": (shape.layers, 2, shape.kv_heads),
        "page_table": (plan.batch, plan.pages_per_sequence),
        "kv_plans": (plans, layout.plan_words),
        "tiles": (layout.tiles, TILE_WORDS),
        "sequences": (plan.batch, SEQUENCE_WORDS),
        "columns": (plan.tokens, COLUMN_WORDS),
        "exchange": (family_of(config).program.workspace_bytes(config, gpu, plan),),
        "tokens": (plan.batch, plan.launch_tokens + 1),
        "stop_ids": (MAX_STOP_IDS,),
        "logits": ("steps", plan.tokens, shape.vocab),
        "progress": (gpu.blocks,),
        "status": (8,),
        "timeline": (gpu.blocks, len(phase_names(config)), len(EVENTS)),
    }


def _parameter(name: str, type_: ty.Type, shapes: dict[str, tuple[int | str, ...]]) -> Parameter:
    if isinstance(type_, ty.Pointer):
        assert isinstance(type_.element, ty.Scalar)
        nullable = name == "logits"
        return Parameter(
            name, str(type_), "pointer", DTYPES[type_.element], type_.mutable, shapes[name], ROLES[name], nullable
        )
    assert isinstance(type_, ty.Scalar)
    return Parameter(name, str(type_), "scalar", DTYPES[type_], False, None, ROLES[name])


def _buffer(name: str, type_: ty.Type, shape: tuple[int | str, ...]) -> Buffer:
    assert isinstance(type_, ty.Pointer) and isinstance(type_.element, ty.Scalar)
    lengths = tuple(length for length in shape if isinstance(length, int))
    elements = 1
    for length in lengths:
        elements *= length
    fill = {"exchange": "zero", "kv": "poison", "progress": "zero", "status": "zero", "timeline": "poison"}.get(
        name, "host"
    )
    return Buffer(name, DTYPES[type_.element], lengths, elements * type_.element.bytes, fill)
