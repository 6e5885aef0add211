"""From a configuration to a kernel's text and its manifest: the generator's front door.

Everything is decided here without a GPU: the plan by rule (and overrides), the text, the parameters, the buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from cheetah.blocks import handoff, known_rows, markov, repack
from cheetah.lang import ty
from cheetah.manifest import RANK, Launch, Manifest
from cheetah.models.config import ModelConfig
from cheetah.models.dense import head, program, prompt
from cheetah.package import RANK_NUMBER, Generated, KernelParameter, described, no_collections, packaged, peer_parameter
from cheetah.plan import Gpu, Plan, default_plan, gpu_named, shared_map, step_matrices
from cheetah.plan.defaults import default_context
from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.handoff import Drafts
from cheetah.plan.index import ceil_div, round_up
from cheetah.plan.prompt import PassPlan


def choose_plan(config: ModelConfig, gpu: Gpu, **overrides: Any) -> Plan:
    """The plan by rule for a model on a machine; overrides are fields of `Plan`."""
    given = {name: value for name, value in overrides.items() if value is not None}
    given.setdefault("max_context", default_context(config.max_position_embeddings))
    return default_plan(gpu, config.shape, **given)


@no_collections()
def generate_kernel(
    config: ModelConfig,
    gpu: str | Gpu = "h200",
    *,
    command: str = "cheetah generate",
    line_marks: bool = False,
    traced: bool = False,
    **overrides: Any,
) -> Generated:
    """The kernel of a model on a machine. `command` is what the header says regenerates it. traced: with time stamps of
    every block and phase (buffer `timeline`). The rest are plan fields.

    Errors: PlanError where no plan fits the machine; ConfigError comes from the configuration itself.
    """
    machine = gpu_named(gpu) if isinstance(gpu, str) else gpu
    plan = choose_plan(config, machine, **overrides)
    about = f"The whole decode step of a {config.dialect.title} model in one persistent kernel."
    return packaged(
        program.build_kernel(config, machine, plan, traced),
        describe_kernel(config, machine, plan, command, traced),
        _header(config, machine, plan, command, about),
        line_marks=line_marks,
    )


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
        f"weights read a step: {matrices.read_bytes(shape.experts, plan.batch)} bytes, "
        f"in {matrices.layer_stride} a layer",
        f"shared memory: {shared_map(shape, plan, gpu).summary}",
    ]
    return "\n".join(lines)


@no_collections()
def generate_pass(
    config: ModelConfig,
    gpu: str | Gpu,
    plan: Plan,
    pass_plan: PassPlan,
    *,
    command: str = "cheetah generate --prompt-pass",
    line_marks: bool = False,
    traced: bool = False,
) -> Generated:
    """The kernel of passes over prompts, beside the kernel that decodes by `plan`, over the same weights and cache.

    Errors: PlanError where the model, the plan or the machine allow none, with the reason.
    """
    machine = gpu_named(gpu) if isinstance(gpu, str) else gpu
    header = _pass_header(config, machine, plan, pass_plan, command)
    return packaged(
        prompt.build_kernel(config, machine, plan, pass_plan, traced),
        describe_pass(config, machine, plan, pass_plan, command, traced),
        header,
        line_marks=line_marks,
    )


def _pass_header(config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan, command: str) -> str:
    shared = prompt.shared(config, gpu, plan, pass_plan)
    lines = [
        f"A pass over a prompt of a {config.dialect.title} model in one persistent kernel. Generated; do not edit.",
        f"Regenerate with: {command}",
        "",
        "model: " + ", ".join(f"{name} {value}" for name, value in config.shape.describe().items()),
        f"machine: {gpu.name}, {gpu.blocks} blocks of {pass_plan.threads} threads",
        "pass: " + ", ".join(f"{name} {value}" for name, value in pass_plan.stated().items()),
        "beside a decode kernel of: " + ", ".join(f"{name} {value}" for name, value in plan.to_dict().items()),
        f"shared memory: {shared.summary}",
    ]
    return "\n".join(lines)


def describe_pass(
    config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan, command: str = "", traced: bool = False
) -> Manifest:
    """The manifest of the kernel that `generate_pass` makes for these, without its text. Its `plan` is the pass', and
    in it as `decoding` that of the kernel that decodes."""
    matrices = step_matrices(config.shape, plan, gpu)
    shared_bytes = prompt.shared(config, gpu, plan, pass_plan).total_bytes
    return described(
        prompt.KERNEL_NAME,
        gpu,
        Launch(gpu.blocks, pass_plan.threads, shared_bytes),
        prompt.pass_parameters(config, plan, traced, gpu.ranks),
        prompt.sizes(config, gpu, plan, pass_plan),
        command=command,
        config=config.to_dict(),
        plan={**pass_plan.to_dict(), "decoding": plan.to_dict()},
        matrices=matrices,
        phases=prompt.phase_names(config, gpu, plan, pass_plan),
    )


@no_collections()
def generate_head(
    config: ModelConfig, gpu: str | Gpu, plan: Plan, rows: int, *, command: str = "cheetah.generate.generate_head"
) -> Generated:
    """The kernel of the head by itself, over the `rows` hidden states that passes over prompts leave; as many steps and
    columns as those of `plan`, over the same weights."""
    machine = gpu_named(gpu) if isinstance(gpu, str) else gpu
    about = f"The head of a {config.dialect.title} model over hidden states that passes left."
    return packaged(
        head.build_kernel(config, machine, plan, rows),
        describe_head(config, machine, plan, rows, command),
        _header(config, machine, plan, command, about),
    )


def describe_head(config: ModelConfig, gpu: Gpu, plan: Plan, rows: int, command: str = "") -> Manifest:
    """The manifest of the kernel that `generate_head` makes for these, without its text."""
    parameters, sizes = head.kernel_parameters(config, plan, gpu.ranks), head.sizes(config, gpu, plan, rows)
    phases = head.phase_names(config, plan)
    return _of_steps(head.KERNEL_NAME, parameters, sizes, phases, config, gpu, plan, command)


def generate_repacking(gpu: Gpu) -> Generated:
    """The kernel that packs weights as `cheetah.plan.repacking` says."""
    gpu = replace(gpu, ranks=1)  # each GPU packs its own
    threads, team_threads = (64, 32) if gpu.emulated else (1024, 256)
    manifest = described(
        repack.KERNEL_NAME,
        gpu,
        Launch(gpu.blocks, threads, 0, cooperative=False),
        {name: KernelParameter(type_, repack.MEANINGS[name]) for name, type_ in repack.PARAMETERS.items()},
        command="cheetah.generate.generate_repacking",
    )
    about = "Packs weights from the bytes of a checkpoint's file. Generated; do not edit."
    return packaged(repack.build_repack(threads, team_threads), manifest, about)


def generate_handoff(gpu: Gpu, plan: Plan, drafts: Drafts = "model") -> Generated:
    """The kernel between launches of two models, of which the one of this plan verifies what the other drafts."""
    buffers, numbers = handoff.BUFFERS | handoff.MORE[drafts], handoff.NUMBERS[drafts]
    threads = handoff.THREADS[drafts]
    parameters = {name: KernelParameter(type_, meaning) for name, (type_, meaning) in buffers.items()}
    parameters |= {name: KernelParameter(*one) for name, one in handoff.OWN.items()}
    parameters |= {field.name: KernelParameter(ty.u32, f"Handoff.{field.name}") for field in fields(numbers)}
    parameters |= {} if gpu.ranks == 1 else {RANK: RANK_NUMBER}
    manifest = described(
        handoff.KERNEL_NAME,
        gpu,
        Launch(1, threads, 0, cooperative=False),
        parameters,
        {"batch": plan.batch, "told_room": plan.launch_tokens + 1},
        command="cheetah.generate.generate_handoff",
        plan=plan.to_dict(),
    )
    about = "Hands over between a model that drafts and one that verifies. Generated; do not edit."
    return packaged(handoff.build_handoff(drafts, gpu.ranks), manifest, about)


def generate_known_rows(config: ModelConfig, gpu: Gpu, slots: int) -> Generated:
    """The kernel that makes what a drafter of blocks knows of tokens, of what another model's layers left. slots: of
    all pages."""
    assert config.block is not None
    m_tiles = ceil_div(config.hidden_size, M_TILE_ROWS)
    columns = len(config.block.layers) * config.padded_hidden
    manifest = described(
        known_rows.KERNEL_NAME,
        gpu,
        Launch(min(m_tiles, gpu.blocks), known_rows.WARPS * 32, known_rows.SHARED_BYTES, cooperative=False),
        {name: KernelParameter(*one) for name, one in known_rows.BUFFERS.items()},
        {
            **{"fc_rows": m_tiles * M_TILE_ROWS, "fc_columns": columns, "padded_hidden": config.padded_hidden},
            **{"slots_of_pages": slots},
        },
        command="cheetah.generate.generate_known_rows",
    )
    about = "Makes rows of tokens of what layers of another model left. Generated; do not edit."
    return packaged(known_rows.build_known_rows(m_tiles, columns, config.padded_hidden), manifest, about)


def generate_markov(config: ModelConfig, gpu: Gpu) -> Generated:
    """The kernel that chooses tokens of a block of a drafter with a Markov head, one a launch."""
    assert config.block is not None
    rank, blocks = round_up(config.block.markov_rank, markov.UNIT), gpu.blocks
    tokens = KernelParameter(*markov.BUFFERS["tokens"])
    peers = {peer_parameter("tokens", further): tokens for further in range(1, gpu.ranks)}
    manifest = described(
        markov.KERNEL_NAME,
        gpu,
        Launch(blocks, markov.WARPS * 32, markov.SHARED_BYTES, cooperative=False),
        {
            **{name: KernelParameter(*one) for name, one in markov.BUFFERS.items()},
            **{name: KernelParameter(ty.u32, meaning) for name, meaning in markov.NUMBERS.items()},
            **(peers | {RANK: RANK_NUMBER} if peers else {}),
        },
        {"vocab": config.vocab_size, "rank": rank, "blocks": blocks},
        command="cheetah.generate.generate_markov",
    )
    about = "Chooses a token of a block behind the one before. Generated; do not edit."
    return packaged(markov.build_markov(blocks, config.vocab_size, rank, [*peers]), manifest, about)


def describe_kernel(config: ModelConfig, gpu: Gpu, plan: Plan, command: str = "", traced: bool = False) -> Manifest:
    """The manifest of the kernel that `generate_kernel` makes for these, without its text."""
    parameters, sizes = program.kernel_parameters(config, plan, traced, gpu.ranks), program.sizes(config, gpu, plan)
    phases = program.phase_names(config, plan)
    return _of_steps(program.KERNEL_NAME, parameters, sizes, phases, config, gpu, plan, command)


def _kv_bytes_per_token(config: ModelConfig, gpu: Gpu, plan: Plan) -> int:
    """Of keys and values that a GPU caches of a token."""
    own, all_heads = config.shape.of_rank(gpu.ranks).kv_heads, config.kv_heads
    return config.kv_bytes_per_token // all_heads * own * plan.kv_element_bytes // 2


def _of_steps(
    kernel: str,
    parameters: Mapping[str, KernelParameter],
    sizes: Mapping[str, int],
    phases: tuple[str, ...],
    config: ModelConfig,
    gpu: Gpu,
    plan: Plan,
    command: str,
) -> Manifest:
    """The manifest of a kernel whose steps are those of `plan`."""
    matrices = step_matrices(config.shape, plan, gpu)
    return described(
        kernel,
        gpu,
        Launch(gpu.blocks, plan.threads, shared_map(config.shape, plan, gpu).total_bytes),
        parameters,
        sizes,
        command=command,
        config=config.to_dict(),
        plan=plan.to_dict(),
        matrices=matrices,
        phases=phases,
        step_bytes={
            "weights": matrices.read_bytes(config.shape.experts, plan.batch),
            "kv_per_token": _kv_bytes_per_token(config, gpu, plan),
            **({} if (heads := config.shape.of_rank(gpu.ranks).delta) is None else {"state": 4 * heads.state_words}),
        },
    )
