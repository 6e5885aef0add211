"""`cheetah bench`: decode speed at given depths, as a table or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cheetah.cli.measured import MODEL_HELP, circumstances_of, measured_model, ordinal_of, refuse_hours_of_emulation
from cheetah.cli.options import Device, DevicesGpu, PromptPasses, Revision, takes_plan
from cheetah.errors import CheetahError, writing

if TYPE_CHECKING:
    from cheetah.tools.bench import DecodeBench, Measurement, Work
    from cheetah.tools.prompt_bench import PromptBench, PromptMeasurement

EPILOG = "Example: cheetah bench random:llama-3.1-8b --contexts 128,1024,6144 --json results.jsonl"
CONTEXTS = "128,1024,6144"
STDOUT = "-"


@takes_plan
def bench(
    *,
    model: Annotated[
        str,
        typer.Argument(help=MODEL_HELP, show_default=False),
    ],
    contexts: Annotated[
        str, typer.Option(metavar="A,B+C,...", help="Tokens in the cache before a launch; B+C: of two sequences.")
    ] = CONTEXTS,
    shared: Annotated[int, typer.Option(min=0, help="So many of the cached tokens are the same pages in all.")] = 0,
    per_step: Annotated[int, typer.Option(min=1, max=64, help="Tokens of a prompt that a step takes together.")] = 1,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="Instead: time to the first token of prompts of so many.", show_default=False
        ),
    ] = None,
    prompt_passes: PromptPasses = None,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of a launch.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed launches at each context.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Launches before those.")] = 2,
    rest: Annotated[float, typer.Option(min=0.0, help="Seconds before each launch in which the GPU idles.")] = 0.0,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Append a JSON line a context; - for stdout.")
    ] = None,
    device: Device = None,
    gpu: DevicesGpu = None,
    revision: Revision = None,
    plan: dict[str, Any],
) -> None:
    """Measure decode speed: greedy sampling on the GPU, prompts not included (those alone: --prompts, --per-step).

    Beside it, in the same run, how fast the GPU reads memory: the ceiling, of which the share is told.
    """
    from cheetah.runtime.device import open_device
    from cheetah.tools.bench import open_bench

    if prompts is not None:
        _bench_prompts(model, prompts, prompt_passes, repetitions, warmup, rest, json_file, device, gpu, revision, plan)
        return
    works = parsed_works(contexts, plan.get("batch", 1), shared, per_step)
    if json_file not in (None, STDOUT):
        _append(str(json_file), "")  # refused before the work, not after it
    config, name, weights = measured_model(model, revision)
    refuse_hours_of_emulation(device, name, config, len(works) * (warmup + repetitions) * steps)
    with (
        open_device(device) as opened,
        open_bench(
            config,
            name,
            weights,
            opened,
            works,
            steps,
            gpu,
            ordinal_of(device),
            **plan,
        ) as ready,
    ):
        circumstances = circumstances_of(name, config, weights, opened)
        measured = []
        for work in works:
            measured.append(ready.measure(work, steps, repetitions, warmup, rest))
            if json_file is not None:
                _write_record(json_file, measured[-1], ready, circumstances)
        if json_file != STDOUT:
            _print_table(circumstances, ready, measured)


def _bench_prompts(
    model: str,
    prompts: str,
    prompt_passes: bool | None,
    repetitions: int,
    warmup: int,
    rest: float,
    json_file: str | None,
    device: str | None,
    gpu: str | None,
    revision: str | None,
    plan: dict[str, Any],
) -> None:
    """The same for prompts: the time to the first token, of an engine with nothing else to do."""
    from cheetah.runtime.device import open_device
    from cheetah.tools.prompt_bench import open_prompt_bench, parsed_prompts, prompt_record

    lengths = parsed_prompts(prompts)
    config, name, weights = measured_model(model, revision)
    refuse_hours_of_emulation(device, name, config, sum(lengths) * (warmup + repetitions))
    with (
        open_device(device) as opened,
        open_prompt_bench(config, weights, opened, max(lengths), gpu, prompt_passes, **plan) as ready,
    ):
        circumstances = circumstances_of(name, config, weights, opened)
        measured = []
        for length in lengths:
            measured.append(ready.measure(length, repetitions, warmup, rest))
            if json_file is not None:
                _write_line(json_file, prompt_record(measured[-1], ready, circumstances))
        if json_file != STDOUT:
            _print_prompts(circumstances, ready, measured)


def register(app: typer.Typer) -> None:
    """Make this a command of `app`."""
    app.command(epilog=EPILOG)(bench)


def parsed_works(text: str, batch: int = 1, shared: int = 0, per_step: int = 1) -> list[Work]:
    """ "128,500+1000" -> `batch` sequences of 128 tokens, then two of 500 and 1000."""
    from cheetah.tools.bench import Work

    works = []
    for lengths in parsed_lengths(text):
        contexts = tuple(lengths) if len(lengths) > 1 else tuple(lengths) * batch
        if len(contexts) > 8:
            raise CheetahError(f"--contexts {text}: {len(contexts)} sequences: at most 8 share a step")
        works.append(Work(contexts, shared, per_step))
    return works


def parsed_lengths(text: str) -> list[list[int]]:
    """ "128,500+1000" -> [[128], [500, 1000]]."""
    try:
        lengths = [[int(number) for number in part.split("+")] for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(min(part) for part in lengths) < 0:
        raise CheetahError(f"--contexts {text}: expected numbers of tokens, e.g. --contexts {CONTEXTS}")
    return lengths


def _write_record(target: str, measurement: Measurement, bench: DecodeBench, circumstances: dict[str, Any]) -> None:
    from cheetah.tools.bench import record

    _write_line(target, record(measurement, bench, circumstances))


def _write_line(target: str, values: dict[str, Any]) -> None:
    line = json.dumps(values)
    if target == STDOUT:
        print(line, flush=True)
    else:
        _append(target, line + "\n")


def _append(target: str, text: str) -> None:
    with writing(f"--json {target}"), open(target, "a", encoding="utf-8") as file:
        file.write(text)


def _print_table(circumstances: dict[str, Any], bench: DecodeBench, measured: Sequence[Measurement]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = [
        f"{circumstances['model']}, batch {_batches(measured)}, weights {circumstances['weights']}",
        f"kernel {bench.manifest.text_sha256[:16]}, commit {circumstances['commit']}",
        f"{circumstances['gpu']}, {circumstances['driver']}",
    ]
    table = Table(title="\n".join(title), title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("context", "tokens/s", "ms/step", "least", "most", "GB/s", "ceiling", "share", "host tok/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for measurement in measured:
        table.add_row(*_row(measurement))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    for line in _remarks(measured, bench):
        console.print(line)


def _print_prompts(circumstances: dict[str, Any], bench: PromptBench, measured: Sequence[PromptMeasurement]) -> None:
    from rich.console import Console
    from rich.table import Table

    passes = bench.assembly.passes
    way = f"in passes of up to {passes[-1].tokens} tokens" if passes else "in steps"
    title = [
        f"{circumstances['model']}, weights {circumstances['weights']}, prompts read {way}",
        f"commit {circumstances['commit']}",
        f"{circumstances['gpu']}, {circumstances['driver']}",
    ]
    table = Table(title="\n".join(title), title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("prompt", "ms to first token", "least", "most", "tokens/s", "launches"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in measured:
        times = (f"{ms:.3f}" for ms in (one.ms, min(one.first_token_ms), max(one.first_token_ms)))
        table.add_row(str(one.tokens), *times, f"{one.tokens_per_s:.0f}", str(one.launches))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    console.print(
        f"median of {len(measured[0].first_token_ms)} by the host's clock, from a request of an idle engine on"
    )


def _batches(measured: Sequence[Measurement]) -> str:
    return ", ".join(map(str, sorted({len(measurement.work.contexts) for measurement in measured})))


def _remarks(measured: Sequence[Measurement], bench: DecodeBench) -> list[str]:
    from cheetah.tools.bench import EMULATED

    first = measured[0]
    lines = [
        f"median of {len(first.step_ms)} launches of {first.steps} steps by device events; host: with tokens read out",
        "context: tokens in the cache before a launch, of each sequence; tokens/s: of all together",
        "ceiling: GB/s before and after, in this run",
    ]
    if first.rest_s:
        lines.append(f"before each launch the GPU rested for {first.rest_s:g} s")
    for measurement in measured:
        if state := measurement.clocks:
            text = ", ".join(f"{name} {value:g}" for name, value in state.items())
            lines.append(f"after context {measurement.work}: {text}")
    return [*lines, EMULATED] if bench.gpu.emulated else lines


def _row(measurement: Measurement) -> tuple[str, ...]:
    ceilings, share = measurement.ceilings_gb_per_s, measurement.share
    return (
        str(measurement.work),
        f"{measurement.tokens_per_s:.1f}",
        f"{measurement.ms_per_step:.4f}",
        f"{min(measurement.step_ms):.4f}",
        f"{max(measurement.step_ms):.4f}",
        f"{measurement.gb_per_s:.0f}",
        "-" if ceilings is None else f"{ceilings[0]:.0f} {ceilings[1]:.0f}",
        "-" if share is None else f"{share:.1%}",
        f"{measurement.host_tokens_per_s:.1f}",
    )
