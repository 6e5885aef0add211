"""The works of the project's table of speeds on one GPU, by groups of one to two minutes each.

    python -m benchmarks.speeds int4 fp8 --json speeds-of-today.jsonl --rests 0,0.1

Kernels are compiled side by side, then each is loaded once, and every work is measured as by `cheetah bench`: without
rests, and where --rests says so again with so many seconds before each launch in which the GPU does nothing. Weights
are random. A line a record, and at the end a table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.table import work_of
from cheetah.cli.bench import parsed_works
from cheetah.cli.configs import named_config
from cheetah.cli.measured import circumstances_of
from cheetah.errors import CheetahError
from cheetah.runtime.assembly.compile import compile_cubin
from cheetah.runtime.device import open_device
from cheetah.tools.bench import Work, open_bench, record, room_for
from cheetah.tools.regenerate import generate_named

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Device

START = time.monotonic()
STEPS, WARMUP = 64, 2
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A kernel, and the works that it does; the fields are options of `cheetah bench`."""

    model: str
    contexts: str
    batch: int = 1
    shared: int = 0
    per_step: int = 1
    kv_dtype: str = "bf16"

    @property
    def works(self) -> list[Work]:
        return parsed_works(self.contexts, self.batch, self.shared, self.per_step)

    @property
    def repetitions(self) -> int:
        """Of several tokens a step 5: their medians spread less."""
        return 7 if self.works[0].tokens_per_step == 1 else 5


BIG = "llama-3.1-8b"
INT4, FP8, LARGE = f"{BIG}@int4-g128", f"{BIG}@fp8", "llama-3.1-70b@int4-g128"
GROUPS = {
    "readme": (
        *(Job(model, "128") for model in ("qwen3-0.6b", "llama-3.2-1b", "llama-3.2-3b")),
        Job(BIG, "128,6144"),
        Job(BIG, "128", 8),
        Job(FP8, "128"),
        Job(INT4, "128"),
        Job(INT4, "128", 8),
        Job(LARGE, "128"),
    ),
    "int4": (
        Job(INT4, "128,6144"),
        *(Job(INT4, "128", batch) for batch in (2, 4, 8)),
        Job(f"{INT4}-order", "128"),
        Job("llama-3.2-1b@int4-g128", "32"),
    ),
    "fp8": (Job(FP8, "128,6144"), Job(FP8, "128", 2), Job(FP8, "128", 4), Job(FP8, "128", 8)),
    "bf16": (
        Job(BIG, "128,1024,6144"),
        Job("llama-3.2-1b", "32,128,1024,6144,8128"),
        Job("llama-3.2-3b", "128,1024"),
        Job(BIG, "128", 2),
        Job(BIG, "128", 4),
    ),
    "eight": (
        Job(BIG, "128,1024,4096", 8),
        Job(BIG, "8192", 8, shared=8192),
        Job(BIG, "8192", 8),
        Job("llama-3.2-1b", "32,1024", 8),
        Job(BIG, "4096", 8, kv_dtype="e4m3"),
    ),
    "70b-int4": (Job(LARGE, "128,6144"), Job(LARGE, "128", 8)),
    "70b": (Job("llama-3.1-70b", "128"),),
    "families": (
        Job("qwen3-0.6b", "128,6144"),
        Job("qwen3-8b", "128,6144"),
        Job("qwen2.5-7b", "128"),
        Job("mistral-7b-v0.3", "128"),
    ),
    "mixed": (
        Job(BIG, "5375+5375+5375+5375,500+1000+4000+16000"),
        Job(BIG, "0,1024,1536", per_step=8),
        Job(BIG, "0,128,512,1024", per_step=16),
        Job(BIG, "32704"),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line a record, append the records; 1 if something was left out."""
    options = parser().parse_args(arguments)
    jobs = [job for group in options.groups for job in GROUPS[group]]
    records: list[Record] = []
    with open_device(options.device, say=lambda line: None) as device, ProcessPoolExecutor(options.compilers) as pool:
        on_gpu = device.describe().backend != "emulator"
        compiled = [pool.submit(compile_kernel, job) if on_gpu else None for job in jobs]
        done = 0
        for job, kernel in zip(jobs, compiled, strict=True):
            if time.monotonic() - START > options.budget_s:
                continue
            try:
                if kernel is not None:
                    kernel.result()
                records += measured(job, device, options)
                done += 1
            except CheetahError as problem:
                print(f"{job}: {problem}", file=sys.stderr, flush=True)
        pool.shutdown(wait=False, cancel_futures=True)  # nobody waits for what was left out
    print(table(records), flush=True)
    if done < len(jobs):
        print(f"{len(jobs) - done} of {len(jobs)} kernels were left out", flush=True)
    return int(done < len(jobs))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.speeds", description=(__doc__ or "").splitlines()[0])
    made.add_argument("groups", nargs="+", choices=list(GROUPS), help="what is measured, in this order")
    made.add_argument("--rests", type=seconds, default=(0.0,), help="seconds before each launch, in turn: A,B,...")
    made.add_argument("--steps", type=int, default=STEPS, help="steps of a launch")
    made.add_argument("--repetitions", type=int, help="timed launches of each work, by default 7 or 5")
    made.add_argument("--budget-s", type=float, default=600.0, help="seconds after which no kernel is begun")
    made.add_argument("--compilers", type=int, default=12, help="processes that compile")
    made.add_argument("--json", type=Path, help="append the records here")
    made.add_argument("--device", default="cuda", help="cuda, or emulator to try it: no speeds")
    return made


def seconds(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def plan_of(job: Job, steps: int = STEPS) -> dict[str, Any]:
    """Fields of its kernel's plan, as `cheetah bench` has them."""
    config = named_config(f"random:{job.model}").config
    return {**room_for(job.works, config, steps), "kv_dtype": job.kv_dtype}


def compile_kernel(job: Job) -> None:
    """So that the compiler's cache has it."""
    named = named_config(f"random:{job.model}")
    generated = generate_named(named.config, named.canonical, "h200", plan_of(job))
    compile_cubin(generated.text, generated.manifest.kernel)


def measured(job: Job, device: Device, options: argparse.Namespace) -> list[Record]:
    """A record of each work and each rest."""
    named, found = named_config(f"random:{job.model}"), []
    about = circumstances_of(named.canonical, named.config, None, device)
    repetitions = options.repetitions or job.repetitions
    with open_bench(
        named.config, named.canonical, None, device, job.works, options.steps, **plan_of(job, options.steps)
    ) as ready:
        for work in job.works:
            for rest in options.rests:
                found.append(record(ready.measure(work, options.steps, repetitions, WARMUP, rest), ready, about))
                print(line_of(found[-1]), flush=True)
                if options.json is not None:
                    with options.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(found[-1]) + "\n")
    return found


def line_of(one: Record) -> str:
    share = "" if one["share"] is None else f" {100 * one['share']:5.1f} % of {one['ceiling_gb_per_s']:.0f} GB/s"
    rest = f" after {one['rest_s']:g} s" if one["rest_s"] else ""
    speed = f"{one['ms_per_step']:8.4f} ms {one['tokens_per_s']:8.1f} tokens/s"
    return f"[{time.monotonic() - START:5.1f}] {one['model']:30} {work_of(one):28} {speed}{share}{rest}"


def table(records: Sequence[Record]) -> str:
    """A line a work: milliseconds and tokens/s with each rest."""
    works: dict[tuple[str, str], list[Record]] = {}
    for one in records:
        works.setdefault((one["model"], work_of(one)), []).append(one)
    lines = []
    for (model, work), found in works.items():
        cells = (
            f"{one['rest_s']:g} s: {one['ms_per_step']:.4f} ms {one['tokens_per_s']:.1f}"
            + ("" if one["share"] is None else f" {100 * one['share']:.1f} %")
            for one in found
        )
        lines.append(f"{model:30} {work:28} {'   '.join(cells)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
