"""`cheetah trace`: where the time of a step goes, as a table and as a file for Perfetto."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cheetah.cli.measured import MODEL_HELP, circumstances_of, measured_model, ordinal_of, refuse_hours_of_emulation
from cheetah.cli.options import Device, DevicesGpu, Revision, takes_plan
from cheetah.errors import CheetahError

if TYPE_CHECKING:
    from rich.table import Table

    from cheetah.models.config import ModelConfig
    from cheetah.runtime.assembly.buffers import Weights
    from cheetah.tools.bench import DecodeBench, Traced
    from cheetah.tools.pass_bench import PassBench
    from cheetah.tools.timeline import KindSummary, Spans, Summary
    from cheetah.tools.trace_events import LayerRange

EPILOG = "Example: cheetah trace random:llama-3.1-8b --context 128 -o trace.json (open it at ui.perfetto.dev)"
WIDTH = 120  # the table's, whatever the terminal's
REST_S = 0.04
"""Before each pass: a GPU that has just done much lowers its clock."""
EMULATED = "emulated: these are counts of the scheduler's switches, not times"
EXPLANATION = (
    "us; medians over blocks, runs and launches. wait: from the end of the block's phase before to its input;",
    "work: from the input to the end; slowest: the block that worked longest, and which one does on average;",
    "spread: first block's end to last; trip: last block's end of the phase before to the median block's input;",
    "starved: input to first chunk landed; tail: last chunk used to the end; waiting: share of all blocks' time;",
    "step: by how much the phase's last end comes after the last end of the phase before, the mean: these add up.",
)


@takes_plan
def trace(
    *,
    model: Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Chrome trace events (JSON) of one step, for Perfetto."),
    ] = None,
    layers: Annotated[str, typer.Option(metavar="A:B", help="Only layers A to B-1 in the file.")] = ":",
    context: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Tokens in the cache before a launch, of each sequence; 128, or 0 before a pass.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="TOKENS", help="Instead of a step: a pass over so many of a prompt.", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of a launch, the last of which is looked at.")] = 8,
    repetitions: Annotated[int, typer.Option(min=1, help="Launches that are looked at.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Launches before those.")] = 2,
    device: Device = None,
    gpu: DevicesGpu = None,
    revision: Revision = None,
    plan: dict[str, Any],
) -> None:
    """Show where the time of a decode step, or of a pass over a prompt, goes: waiting and work of every phase.

    The kernel is generated with time stamps, which cost it a little; keys and values in the cache are random numbers.
    """
    from rich.console import Console

    from cheetah.runtime.device import open_device
    from cheetah.tools.bench import Work, open_bench
    from cheetah.tools.timeline import spans_of, summarise
    from cheetah.tools.trace_events import LayerRange

    chosen = LayerRange.parse(layers)
    if output is not None:
        _require_writable(output)
    config, name, weights = measured_model(model, revision)
    chosen.check(config.layers)
    refuse_hours_of_emulation(device, name, config, (prompt or steps) * (warmup + repetitions))
    if prompt is not None:
        repeated = (repetitions, warmup)
        return _trace_pass((config, name, weights), prompt, context or 0, repeated, output, chosen, device, gpu, plan)
    context = 128 if context is None else context
    work = Work((context,) * int(plan.get("batch", 1)))
    with (
        open_device(device) as opened,
        open_bench(
            config,
            name,
            weights,
            opened,
            [work],
            steps,
            gpu,
            ordinal_of(device),
            traced=True,
            **plan,
        ) as ready,
    ):
        traced = ready.trace(work, steps, repetitions, warmup)
        spans = spans_of(traced.stamps, ready.manifest.phases)
        about = {**circumstances_of(name, config, weights, opened), "batch": len(work.contexts), "context": context}
        about |= _kernel_of(ready)
        console = Console(width=WIDTH, soft_wrap=True, highlight=False, markup=False)
        console.print(_table(about, summarise(spans)))
        for line in _remarks(ready, traced, spans, steps):
            console.print(line)
    if output is not None:
        console.print(_write(output, spans, chosen, about))


def register(app: typer.Typer) -> None:
    """Make this a command of `app`."""
    app.command(epilog=EPILOG)(trace)


def _trace_pass(
    model: tuple[ModelConfig, str, Weights | None],
    tokens: int,
    cached: int,
    repeated: tuple[int, int],
    output: Path | None,
    layers: LayerRange,
    device: str | None,
    gpu: str | None,
    plan: dict[str, Any],
) -> None:
    """The same for a pass over a prompt."""
    from rich.console import Console

    from cheetah.runtime.device import open_device
    from cheetah.tools.pass_bench import open_pass_bench
    from cheetah.tools.timeline import spans_of, summarise

    config, name, weights = model
    with (
        open_device(device) as opened,
        open_pass_bench(config, weights, opened, tokens, cached, gpu, traced=True, **plan) as ready,
    ):
        traced = ready.trace(*repeated, 0.0 if ready.gpu.emulated else REST_S)
        spans = spans_of(traced.stamps, ready.phases)
        about = {**circumstances_of(name, config, weights, opened), "prompt": tokens, "context": cached}
        about |= _kernel_of(ready)
        console = Console(width=WIDTH, soft_wrap=True, highlight=False, markup=False)
        console.print(_table(about, summarise(spans)))
        middle = sorted(traced.step_ms)[len(traced.step_ms) // 2]
        for line in (*EXPLANATION, f"by device events the median of {len(traced.step_ms)} passes took {middle:.3f} ms"):
            console.print(line)
        if ready.gpu.emulated:
            console.print(EMULATED)
    if output is not None:
        console.print(_write(output, spans, layers, about))


def _require_writable(path: Path) -> None:
    """Refused before the work, not after it."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CheetahError(f"{path}: cannot be written: choose another file with -o")


def _kernel_of(bench: DecodeBench | PassBench) -> dict[str, Any]:
    note = {"note": EMULATED} if bench.gpu.emulated else {}
    return {"kernel": bench.manifest.text_sha256[:16], "plan": bench.manifest.plan, **note}


def _write(path: Path, spans: Spans, layers: Any, about: dict[str, Any]) -> str:
    """Of the launch whose step took the median time."""
    from cheetah.tools.trace_events import write_trace

    launch = int(spans.step.argsort()[len(spans.step) // 2])
    title = f"{about['model']}, {_work_of(about)}, context {about['context']}, {about['gpu']}"
    slices = write_trace(path, spans, launch, layers, title, about)
    return f"wrote {path} ({slices} slices): open it at ui.perfetto.dev or in chrome://tracing"


def _work_of(about: dict[str, Any]) -> str:
    return f"a pass over {about['prompt']} tokens" if "prompt" in about else f"batch {about['batch']}"


def _table(about: dict[str, Any], summary: Summary) -> Table:
    from rich.table import Table

    title = (
        f"{about['model']}, {_work_of(about)}, weights {about['weights']}, context {about['context']}",
        f"traced kernel {about['kernel']}, commit {about['commit']}",
        f"{about['gpu']}, {about['driver']}",
    )
    table = Table(title="\n".join(title), title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("phase")
    headings = (
        "runs",
        "wait",
        "work",
        "slowest",
        "block",
        "spread",
        "trip",
        "starved",
        "tail",
        "waiting",
        "step",
        "share",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for kind in summary.kinds:
        table.add_row(*_row(kind, summary))
    table.add_section()
    table.add_row("all", *[""] * 9, f"{summary.waiting:.1%}", f"{summary.step:.1f}", "100.0%")
    return table


def _row(kind: KindSummary, summary: Summary) -> tuple[str, ...]:
    return (
        kind.kind,
        str(kind.runs),
        _microseconds(kind.wait),
        _microseconds(kind.work),
        _microseconds(kind.slowest),
        str(kind.slowest_block),
        _microseconds(kind.spread),
        _microseconds(kind.trip),
        _microseconds(kind.starved),
        _microseconds(kind.tail),
        f"{kind.waiting:.1%}",
        f"{kind.advance:.1f}",
        f"{kind.advance / summary.step:.1%}",
    )


def _microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _remarks(bench: DecodeBench, traced: Traced, spans: Spans, steps: int) -> list[str]:
    launches = len(traced.step_ms)
    lines = [
        *EXPLANATION,
        f"the last step of each of {launches} launches of {steps}; by device events the median launch took "
        f"{sorted(traced.step_ms)[launches // 2]:.4f} ms a step; the clock moves in steps of {spans.tick_ns} ns",
    ]
    return [*lines, EMULATED] if bench.gpu.emulated else lines
