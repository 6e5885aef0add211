"""`cheetah inspect`: what a plan comes to, without generating anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cheetah.cli.configs import named_config, print_notes
from cheetah.cli.options import DEFAULT_GPU, Config, MachineGpu, Revision, takes_plan
from cheetah.cli.tables import console, named_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from cheetah.cli.configs import NamedConfig
    from cheetah.models.config import ModelConfig
    from cheetah.plan import Gpu, Plan
    from cheetah.plan.report import PhaseShare, Report
    from cheetah.plan.shared_memory import SharedMap

DEFAULT_CONTEXT = 1024
EPILOG = "Example: cheetah inspect llama-3.1-8b --context 6144 --plot shares.png"


@takes_plan
def inspect(
    *,
    config: Config,
    gpu: MachineGpu = DEFAULT_GPU,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens in the cache, the new one included; by default 1024, or what there is room for."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw each block's share by phase (png, svg, pdf).")
    ] = None,
    phases: Annotated[
        bool, typer.Option("--phases", help="Print instead what each phase waits for and makes.")
    ] = False,
    mtp: Annotated[
        bool, typer.Option("--mtp", help="Instead the layer that the model brings to draft, and its copy of the head.")
    ] = False,
    sparse: Annotated[
        str | None,
        typer.Option(metavar="CHOICE", help="Of a checkpoint's folder: auto or 2:4, as for run; looks at all weights."),
    ] = None,
    revision: Revision = None,
    plan: dict[str, Any],
) -> None:
    """Print what the plan comes to: bytes a block and phase, shared memory, exchanges, bytes and time of a step."""
    from cheetah.generate import choose_plan
    from cheetah.plan import gpu_named
    from cheetah.plan.report import inspect_plan, plot_shares

    named, m_tiles = named_config(config, revision), None
    if sparse is not None:
        from cheetah.runtime.checkpoint.block_bytes import m_tile_bytes
        from cheetah.runtime.checkpoint.loading import open_checkpoint

        checkpoint = open_checkpoint(config, revision, sparse=sparse)
        named, m_tiles = replace(named, config=checkpoint.config, notes=checkpoint.notes), m_tile_bytes(checkpoint)
    print_notes(named.notes)
    if mtp:
        named = _drafting(named)
    machine = gpu_named(gpu)
    chosen = choose_plan(named.config, machine, **plan)
    if phases:
        return _print_phases(named.config, chosen, machine)
    depth = min(DEFAULT_CONTEXT, chosen.max_context) if context is None else context
    report = inspect_plan(named.config.shape, chosen, machine, depth, m_tiles)
    shown = console()
    tables = (named_values(named.canonical, report.summary()), _shares(report), _shared_memory(report.shared))
    for table in (*tables, *_passes(named.config, chosen, machine)):
        shown.print(table)
        shown.print()
    if plot is not None:
        plot_shares(report, plot)
        shown.print(f"wrote {plot}")


def _drafting(named: NamedConfig) -> NamedConfig:
    """The layer that drafts for a model, in the formats that publishers give it beside the model's."""
    from cheetah.models.registry import drafter_beside, drafter_quantised

    layer = drafter_quantised(drafter_beside(named.config)[0], None, named.config)
    return replace(named, config=layer, canonical=f"{named.canonical}, the layer that drafts")


def _print_phases(config: ModelConfig, plan: Plan, gpu: Gpu) -> None:
    """Of a step, and of a pass over as many tokens as a pass may have; of none where there can be none."""
    from cheetah.models.dense import program, prompt
    from cheetah.models.family import lines_of
    from cheetah.plan import PlanError
    from cheetah.plan.prompt import default_pass_plan, pass_tokens

    typer.echo("\n".join(["a step", *lines_of(program.phase_rows(config, plan))]))
    pass_plan = default_pass_plan(gpu, pass_tokens(config.shape, gpu)[0], config.shape)
    try:
        rows = prompt.phase_rows(config, gpu, plan, pass_plan)
    except PlanError:
        return
    typer.echo("\n".join(["", f"a pass of {pass_plan.tokens} tokens", *lines_of(rows)]))


def _passes(config: ModelConfig, plan: Plan, gpu: Gpu) -> Iterator[Table]:
    """What passes over prompts take beside the plan's kernel, by the tokens that they have room for; nothing where
    there are none."""
    from rich.table import Table

    from cheetah.generate import describe_pass
    from cheetah.plan import PlanError
    from cheetah.plan.prompt import default_pass_plan, pass_tokens, short_pass_plans

    table = Table(title="passes over prompts", title_justify="left")
    for heading in ("tokens", "a tile", "shared memory", "workspace, MB"):
        table.add_column(heading, justify="right")
    long = (default_pass_plan(gpu, tokens, config.shape) for tokens in pass_tokens(config.shape, gpu))
    try:
        for one in (*long, *short_pass_plans(gpu, config.shape)):
            manifest = describe_pass(config, gpu, plan, one)
            workspace = f"{manifest.buffer('workspace').bytes / 1e6:.0f}"
            table.add_row(str(one.tokens), str(one.tile_tokens), str(manifest.launch.shared_bytes), workspace)
    except PlanError:
        return
    yield table


def _shares(report: Report) -> Table:
    from rich.table import Table

    table = Table(title=f"kB that a block reads in a phase, {report.gpu.blocks} blocks", title_justify="left")
    table.add_column("phase")
    for heading in ("runs a step", "smallest", "mean", "largest", "imbalance", "MB a step"):
        table.add_column(heading, justify="right")
    for phase in report.phases:
        table.add_row(*_share_row(phase))
    table.add_section()
    table.add_row(*_share_row(report.step_share))
    return table


def _share_row(phase: PhaseShare) -> tuple[str, ...]:
    sizes = (f"{size / 1e3:.1f}" for size in (phase.smallest_bytes, phase.mean_bytes, phase.largest_bytes))
    imbalance = f"{phase.imbalance_percent:.1f} %"
    return (phase.name, str(phase.runs), *sizes, imbalance, f"{phase.step_bytes / 1e6:.1f}")


def _shared_memory(shared: SharedMap) -> Table:
    from rich.table import Table

    table = Table(title="shared memory of a block, bytes", title_justify="left")
    for heading in ("offset", "size"):
        table.add_column(heading, justify="right")
    table.add_column("region")
    for region in shared.regions:
        over = f" (over {region.over})" if region.over else ""
        table.add_row(str(shared.offset(region.name)), str(region.nbytes), region.name + over)
    table.add_section()
    table.add_row("", str(shared.total_bytes), "total")
    if shared.budget_bytes is not None:
        free = shared.budget_bytes - shared.total_bytes
        table.add_row("", str(shared.budget_bytes), f"a block has; {free} are free")
    return table
