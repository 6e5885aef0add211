"""`cheetah trace`: where the time of a step goes, as a table and as a file for Perfetto."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cheetah.cli.measured import MODEL_HELP, Measured
from cheetah.cli.options import takes_load, takes_plan
from cheetah.cli.tables import console, table_of
from cheetah.errors import CheetahError

if TYPE_CHECKING:
    from rich.table import Table

    from cheetah.runtime.device import Device
    from cheetah.tools.bench import DecodeBench, KernelBench, Traced
    from cheetah.tools.pass_bench import PassBench
    from cheetah.tools.timeline import KindSummary, Spans, Summary
    from cheetah.tools.trace_events import LayerRange

EPILOG = "Example: cheetah trace random:llama-3.1-8b --context 128 -o trace.json (open it at ui.perfetto.dev)"
WIDTH = 120  # the table's, whatever the terminal's
FIGURES = "runs wait work slowest block spread trip starved tail waiting step share".split()
EMULATED = "emulated: these are counts of the scheduler's switches, not times"
EXPLANATION = (
    "us; medians over blocks, runs and launches. wait: from the end of the block's phase before to its input;",
    "work: from the input to the end; slowest: the block that worked longest, and which one does on average;",
    "spread: first block's end to last; trip: last block's end of the phase before to the median block's input;",
    "starved: input to first chunk landed; tail: last chunk used to the end; waiting: share of all blocks' time;",
    "step: by how much the phase's last end comes after the last end of the phase before, the mean: these add up.",
)
Bench = TypeVar("Bench", bound="KernelBench")


@takes_load("device tensor_parallel_size gpu revision")
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
            min=1, metavar="TOKENS", help="Instead of a step: a pass of a prompt of this length.", show_default=False
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of a launch, the last of which is looked at.")] = 8,
    repetitions: Annotated[int, typer.Option(min=1, help="Launches that are looked at.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Launches before those.")] = 2,
    load: dict[str, Any],
    plan: dict[str, Any],
) -> None:
    """Show where the time of a decode step, or of a pass over a prompt, goes: waiting and work of every phase.

    The kernel is generated with time stamps, which cost it a little; keys and values in the cache are random numbers.
    """
    from cheetah.tools.bench import Work, open_bench
    from cheetah.tools.pass_bench import open_pass_bench
    from cheetah.tools.trace_events import LayerRange

    chosen = LayerRange.parse(layers)
    if output is not None:
        _require_writable(output)
    measured, counts = Measured.named(model, load, plan), (repetitions, warmup)
    chosen.check(measured.config.layers)
    measured.refuse_hours_of_emulation((prompt or steps) * sum(counts))
    context = (0 if prompt else 128) if context is None else context
    work = Work((context,) * int(plan.get("batch", 1)))

    def open_steps(device: Device) -> AbstractContextManager[DecodeBench]:
        subject = measured.config, measured.name, measured.weights, device
        return open_bench(*subject, [work], steps, measured.gpu, measured.ordinal, traced=True, **plan)

    def open_pass(device: Device) -> AbstractContextManager[PassBench]:
        subject = measured.config, measured.weights, device
        return open_pass_bench(*subject, prompt, context, measured.gpu, traced=True, **plan)

    if prompt is None:
        about = {"batch": len(work.contexts), "context": context}
        _trace(measured, open_steps, lambda ready: ready.trace(work, steps, *counts), about, output, chosen)
    else:
        about = {"prompt": prompt, "context": context}
        _trace(measured, open_pass, lambda ready: ready.trace(*counts), about, output, chosen)


def _trace(
    measured: Measured,
    open_bench: Callable[[Device], AbstractContextManager[Bench]],
    launch: Callable[[Bench], Traced],
    about: dict[str, Any],
    output: Path | None,
    layers: LayerRange,
) -> None:
    """Launch, and show what the stamps say; write them to `output`. about: the work, in the file's words."""
    from cheetah.tools.timeline import spans_of, summarise

    shown = console(WIDTH)
    with measured.open_device() as device, open_bench(device) as ready:
        traced = launch(ready)
        ranks = [spans_of(stamps, ready.phases) for stamps in traced.stamps]
        about = {**measured.circumstances(device), **about, **_kernel_of(ready)}
        for rank, spans in enumerate(ranks):
            shown.print(_table(about, summarise(spans), "" if len(ranks) == 1 else f", rank {rank} of {len(ranks)}"))
        for line in (*EXPLANATION, *_remarks(traced, ranks[0], about)):
            shown.print(line)
    if output is not None:
        shown.print(_write(output, ranks, layers, about))


def _require_writable(path: Path) -> None:
    """Refused before the work, not after it."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CheetahError(f"{path}: cannot be written: choose another file with -o")


def _kernel_of(bench: KernelBench) -> dict[str, Any]:
    note = {"note": EMULATED} if bench.gpu.emulated else {}
    return {"kernel": bench.manifest.text_sha256[:16], "plan": bench.manifest.plan, **note}


def _write(path: Path, ranks: Sequence[Spans], layers: Any, about: dict[str, Any]) -> str:
    """Of the launch whose step took the first rank the median time."""
    from cheetah.tools.trace_events import write_trace

    steps = ranks[0].step
    launch = int(steps.argsort()[len(steps) // 2])
    title = f"{about['model']}, {_work_of(about)}, context {about['context']}, {about['gpu']}"
    slices = write_trace(path, ranks, launch, layers, title, about)
    return f"wrote {path} ({slices} slices): open it at ui.perfetto.dev or in chrome://tracing"


def _work_of(about: dict[str, Any]) -> str:
    return f"a pass over {about['prompt']} tokens" if "prompt" in about else f"batch {about['batch']}"


def _table(about: dict[str, Any], summary: Summary, rank: str) -> Table:
    """rank: which it is of several, in words."""
    title = (
        f"{about['model']}, {_work_of(about)}, weights {about['weights']}, context {about['context']}",
        f"traced kernel {about['kernel']}, commit {about['commit']}",
        f"{about['gpu']}, {about['driver']}{rank}",
    )
    table = table_of(title, FIGURES, (_row(kind, summary) for kind in summary.kinds), ("phase",))
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


def _remarks(traced: Traced, spans: Spans, about: dict[str, Any]) -> list[str]:
    launches = len(traced.step_ms)
    middle = sorted(traced.step_ms)[launches // 2]
    if "prompt" in about:
        lines = [f"by device events the median of {launches} passes took {middle:.3f} ms"]
    else:
        lines = [
            f"the last step of each of {launches} launches; by device events the median launch took {middle:.4f} ms a "
            f"step; the clock moves in steps of {spans.tick_ns} ns"
        ]
    return [*lines, EMULATED] if "note" in about else lines
