"""`cheetah bench`: decode speed at given depths, as a table or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cheetah.cli.measured import MODEL_HELP, Measured, Repeated
from cheetah.cli.options import takes_load, takes_plan
from cheetah.cli.tables import console, table_of
from cheetah.errors import CheetahError, writing

if TYPE_CHECKING:
    from cheetah.models.config import ModelConfig
    from cheetah.runtime.device import Device
    from cheetah.tools.bench import DecodeBench, Measurement, Work
    from cheetah.tools.prompt_bench import PromptBench, PromptMeasurement
    from cheetah.tools.round_bench import RoundBench, RoundMeasurement, Rounds

EPILOG = "Example: cheetah bench random:llama-3.1-8b --contexts 128,1024,6144 --json results.jsonl"
CONTEXTS = "128,1024,6144"
STDOUT = "-"
Circumstances = dict[str, Any]


@takes_load("device tensor_parallel_size gpu revision prompt_passes")
@takes_plan
def bench(
    *,
    model: Annotated[
        str,
        typer.Argument(help=MODEL_HELP, show_default=False),
    ],
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="A,B+C,...",
            help=f"Tokens in the cache before a launch; B+C: of two sequences; by default {CONTEXTS}, as far as the "
            "model has positions.",
            show_default=False,
        ),
    ] = None,
    shared: Annotated[int, typer.Option(min=0, help="How many of the cached tokens are the same pages in all.")] = 0,
    per_step: Annotated[int, typer.Option(min=1, max=64, help="Tokens of a prompt that a step takes together.")] = 1,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="Instead: time to the first token of prompts of N tokens.", show_default=False
        ),
    ] = None,
    speculative: Annotated[
        str | None,
        typer.Option(
            metavar="K:L,...",
            help="Instead: steps that verify K drafts, at made-up mean lengths of L tokens a step.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --speculative K: prompts between lines of ---, answered with drafts and without.",
            show_default=False,
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="With --text: drafts them, instead of what is looked up; mtp: the model's own layer for that.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer, with --text.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of a launch.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed launches at each context.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Launches before those.")] = 2,
    rest: Annotated[float, typer.Option(min=0.0, help="Seconds before each launch in which the GPU idles.")] = 0.0,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Append a JSON line a context; - for stdout.")
    ] = None,
    load: dict[str, Any],
    plan: dict[str, Any],
) -> None:
    """Measure decode speed: greedy sampling on the GPU, prompts not included (those alone: --prompts, --per-step).

    Beside it, in the same run, how fast the GPU reads memory: the ceiling, and the share of it that decoding reaches.
    """
    from cheetah.tools import bench as of_steps
    from cheetah.tools import prompt_bench as of_prompts
    from cheetah.tools import round_bench as of_rounds

    if text is not None:
        _bench_text(model, text, speculative, draft_model, max_tokens, json_file, load, plan)
        return
    if draft_model is not None:
        raise CheetahError(f"--draft-model {draft_model}: drafts of a model are measured on text: give --text FILE")
    if prompts is not None and (given := "--speculative" if speculative else "--contexts" if contexts else None):
        raise CheetahError(f"--prompts {prompts}: measures the time to the first token alone: leave out {given}")
    repeated = Repeated(repetitions, warmup, rest)
    measured = Measured.named(model, load, plan)
    contexts = contexts or usual_contexts(measured.config, plan, steps * per_step)
    lengths = () if prompts is None else of_prompts.parsed_prompts(prompts)
    rounds = () if speculative is None else parsed_rounds(speculative, contexts)
    works = () if lengths else parsed_works(contexts, plan.get("batch", 1), shared, per_step)
    if json_file not in (None, STDOUT):
        _append(str(json_file), "")  # refused before the work, not after it
    measured.refuse_hours_of_emulation(repeated.launches * (sum(lengths) or len(rounds or works) * steps))

    def open_steps(device: Device) -> AbstractContextManager[DecodeBench]:
        subject = measured.config, measured.name, measured.weights, device
        return of_steps.open_bench(*subject, works, steps, measured.gpu, measured.ordinal, **plan)

    def open_prompts(device: Device) -> AbstractContextManager[PromptBench]:
        subject = measured.config, measured.weights, device, max(lengths)
        return of_prompts.open_prompt_bench(*subject, measured.gpu, load.get("prompt_passes"), **plan)

    def open_rounds(device: Device) -> AbstractContextManager[RoundBench]:
        subject = measured.config, measured.name, measured.weights, device
        where = {"gpu": measured.gpu, "ordinal": measured.ordinal}
        return of_rounds.open_rounds(*subject, works=rounds, steps=steps, **where, **plan)

    if rounds:
        way = _Way(open_rounds, (steps, *repeated), of_rounds.round_record, _print_rounds)
    elif lengths:
        way = _Way(open_prompts, repeated, of_prompts.prompt_record, _print_prompts)
    else:
        way = _Way(open_steps, (steps, *repeated), of_steps.record, _print_steps)
    way.measure(measured, rounds or lengths or works, json_file)


def _bench_text(
    model: str,
    file: str,
    speculative: str | None,
    draft_model: str | None,
    max_tokens: int,
    json_file: str | None,
    load: dict[str, Any],
    plan: dict[str, Any],
) -> None:
    from cheetah.cli.bench_text import TextAsked, bench_text

    if speculative is None or not speculative.isdecimal() or int(speculative) < 1:
        raise CheetahError("--text: say how many drafts a step takes, and no made-up lengths: --speculative 7")
    write = partial(_write_line, json_file) if json_file is not None else lambda record: None
    asked = TextAsked(int(speculative), draft_model, file, max_tokens, write, json_file != STDOUT)
    bench_text(model, Measured.named(model, load, plan), asked, load)


@dataclass(frozen=True)
class _Way:
    """What is measured: by which bench, whose `measure` takes a work and `how`, what of that a record says and a person
    sees."""

    open: Callable[[Device], AbstractContextManager[Any]]
    how: tuple[Any, ...]
    record: Callable[[Any, Any, Circumstances], dict[str, Any]]
    show: Callable[[Circumstances, Any, Sequence[Any]], None]

    def measure(self, measured: Measured, works: Sequence[Any], json_file: str | None) -> None:
        """Do the works, write a line of JSON for each as it is done, and show them all."""
        with measured.open_device() as device, self.open(device) as ready:
            circumstances, found = measured.circumstances(device), []
            for work in works:
                found.append(ready.measure(work, *self.how))
                if json_file is not None:
                    _write_line(json_file, self.record(found[-1], ready, circumstances))
            if json_file != STDOUT:
                self.show(circumstances, ready, found)


def usual_contexts(config: ModelConfig, plan: Mapping[str, Any], tokens: int) -> str:
    """Those behind which there is room for so many tokens; where that is none, the deepest."""
    most = min(config.max_position_embeddings, plan.get("max_context", config.max_position_embeddings)) - tokens
    fitting = [one for one in CONTEXTS.split(",") if int(one) <= most]
    return ",".join(fitting) or str(max(0, most))


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


def parsed_rounds(text: str, contexts: str) -> list[Rounds]:
    """ "7:1,3" -> at each context steps without drafts, and such with 7 that make 1 and 3 tokens on average."""
    from cheetah.tools.round_bench import Rounds, parsed_lengths_of_rounds

    drafts, lengths = parsed_lengths_of_rounds(text)
    depths = parsed_lengths(contexts)
    if any(len(depth) > 1 for depth in depths):
        raise CheetahError(f"--contexts {contexts}: with --speculative one sequence is measured: give no +")
    return [
        Rounds(context, *one) for (context,) in depths for one in ((0, 1.0), *((drafts, length) for length in lengths))
    ]


def _write_line(target: str, values: dict[str, Any]) -> None:
    line = json.dumps(values)
    if target == STDOUT:
        print(line, flush=True)
    else:
        _append(target, line + "\n")


def _append(target: str, text: str) -> None:
    with writing(f"--json {target}"), open(target, "a", encoding="utf-8") as file:
        file.write(text)


def _print_steps(circumstances: Circumstances, bench: DecodeBench, found: Sequence[Measurement]) -> None:
    figures = ("context", "tokens/s", "ms/step", "least", "most", "GB/s", "ceiling", "share", "host tok/s")
    about = f"batch {_batches(found)}, weights {circumstances['weights']}"
    _print(circumstances, about, _kernel_of(bench), figures, map(_row, found), _remarks(found, bench))


def _print_prompts(circumstances: Circumstances, bench: PromptBench, found: Sequence[PromptMeasurement]) -> None:
    passes = bench.assembly.passes
    way = f"in passes of up to {passes[-1].tokens} tokens" if passes else "in steps"
    figures = ("prompt", "ms to first token", "least", "most", "tokens/s", "launches")
    about = f"weights {circumstances['weights']}, prompts read {way}"
    remark = f"median of {len(found[0].first_token_ms)} by the host's clock, from a request of an idle engine on"
    _print(circumstances, about, "", figures, map(_prompt_row, found), [remark])


def _print_rounds(circumstances: Circumstances, bench: RoundBench, found: Sequence[RoundMeasurement]) -> None:
    from cheetah.tools.bench import EMULATED

    figures = ("context", "drafts", "synthetic mean length", "ms/step", "least", "most", "tokens/s")
    remarks = [
        "identical: yes, the tokens of every launch are those that are made without drafts",
        "how many drafts turn out right is made up; tokens/s holds for text with that mean length alone",
        *([EMULATED] if bench.bench.gpu.emulated else ()),
    ]
    about = f"weights {circumstances['weights']}"
    _print(circumstances, about, _kernel_of(bench.bench), figures, map(_round_row, found), remarks)


def _print(
    circumstances: Circumstances,
    about: str,
    kernel: str,
    figures: Sequence[str],
    rows: Iterable[tuple[str, ...]],
    remarks: Iterable[str],
) -> None:
    title = (
        f"{circumstances['model']}, {about}",
        f"{kernel}commit {circumstances['commit']}",
        f"{circumstances['gpu']}, {circumstances['driver']}",
    )
    shown = console()
    shown.print(table_of(title, figures, rows))
    for line in remarks:
        shown.print(line)


def _kernel_of(bench: DecodeBench) -> str:
    return f"kernel {bench.manifest.text_sha256[:16]}, "


def _round_row(one: RoundMeasurement) -> tuple[str, ...]:
    times = (f"{ms:.4f}" for ms in (one.ms_per_step, min(one.step_ms), max(one.step_ms)))
    return str(one.rounds.context), str(one.rounds.drafts), f"{one.rounds.length:g}", *times, f"{one.tokens_per_s:.1f}"


def _prompt_row(one: PromptMeasurement) -> tuple[str, ...]:
    times = (f"{ms:.3f}" for ms in (one.ms, min(one.first_token_ms), max(one.first_token_ms)))
    return str(one.tokens), *times, f"{one.tokens_per_s:.0f}", str(one.launches)


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
