"""Ours beside the baselines on one GPU in one run: all records in one file, and a table.

    python benchmarks/compare.py --json results.jsonl --budget-s 240

First the baselines compile, side by side on the CPU; each stays in a process of its own that waits while others are
measured. Then every system is measured in turn, three times, in an order that alternates. A system that fails or is
late is told and left out. Ours is `cheetah bench` in a process of its own.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS = "cheetah"
SYSTEMS = (OURS, "plain", "transformers")
MODELS = ("llama-3.2-1b", "llama-3.1-8b")
OWN_COMMAND = "import sys; from cheetah.cli import main; sys.exit(main())"
MEASURE_S = 50.0  # what measuring one model with every system takes at most, by which compiling has to end
START = time.monotonic()
Record = dict[str, Any]


class Failed(Exception):
    """A system that cannot be measured, and why."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    deadline = START + options.budget_s
    contestants = [made(system, model, options) for model in options.models for system in options.systems]
    records: list[Record] = []
    try:
        records = compete(contestants, options, deadline)
    finally:
        for contestant in contestants:
            contestant.close()
    print(table(records), flush=True)
    for contestant in contestants:
        if contestant.failure:
            print(f"left out from some point on: {contestant.name}: {contestant.failure}", flush=True)
    return 0 if records else 1


def parser() -> argparse.ArgumentParser:
    made_here = argparse.ArgumentParser(prog="compare.py", description=__doc__.splitlines()[0])
    made_here.add_argument("--systems", type=names_of(SYSTEMS), default=list(SYSTEMS), help=",".join(SYSTEMS))
    made_here.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help="presets, A,B,...")
    made_here.add_argument("--contexts", type=numbers, default=[128, 6144], help="tokens in the cache, A,B,...")
    made_here.add_argument("--rounds", type=int, default=3, help="how often each system has its turn")
    made_here.add_argument("--steps", type=int, default=64, help="decode steps of a run")
    made_here.add_argument("--repetitions", type=int, default=3, help="timed runs in a turn")
    made_here.add_argument("--warmup", type=int, default=1, help="runs before those")
    made_here.add_argument("--json", type=Path, default=Path("compare.jsonl"), help="append every record here")
    made_here.add_argument("--budget-s", type=float, default=240.0, help="seconds after which no turn is begun")
    made_here.add_argument("--ours", default="", help="further options of cheetah bench, e.g. '--sync barrier'")
    made_here.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it, no speeds")
    return made_here


def names_of(known: Sequence[str]) -> Any:
    def parsed(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}: choose from {', '.join(known)}")
        return names

    return parsed


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


class Own:
    """`cheetah bench`, started anew for each turn."""

    def __init__(self, model: str, options: argparse.Namespace, lock: Path) -> None:
        self.name, self.model, self.failure = f"{OURS} {model}", model, ""
        self._options, self._lock = options, lock

    def wait_ready(self, deadline: float) -> None:
        """One run that nobody records: its kernel is in the compiler's cache from then on. Failed if it fails."""
        with self._lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ended with the file; baselines tune when nobody else uses the GPU
            begin = time.monotonic()
            self._bench(deadline, repetitions=1, warmup=0)
        say(f"{self.name}: ready after {time.monotonic() - begin:.1f} s")

    def turn(self, deadline: float) -> list[Record]:
        """Records of every context. Failed if it fails; what it said is on stderr."""
        return self._bench(deadline, self._options.repetitions, self._options.warmup)

    def _bench(self, deadline: float, repetitions: int, warmup: int) -> list[Record]:
        options = self._options
        numbers = {"steps": options.steps, "repetitions": repetitions, "warmup": warmup}
        command = [sys.executable, "-c", OWN_COMMAND, "bench", f"random:{self.model}", "--json", "-"]
        command += ["--contexts", ",".join(map(str, options.contexts))]
        command += [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
        command += ["--device", "cuda" if options.device == "cuda" else "emulator", *options.ours.split()]
        limit = max(deadline - time.monotonic(), 1.0)
        try:
            done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, timeout=limit)
        except subprocess.TimeoutExpired as late:
            raise Failed(f"no time was left ({limit:.0f} s)") from late
        records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode and not records:
            raise Failed(f"exit code {done.returncode}, see above")
        return records

    def close(self) -> None:
        """Nothing is left running."""


class Baseline:
    """`python -m benchmarks.baselines --serve`, which compiles from now on and then waits for its turns."""

    def __init__(self, system: str, model: str, options: argparse.Namespace, lock: Path) -> None:
        self.name, self.model, self.failure = f"{system} {model}", model, ""
        self._ready: list[int] = []
        self._answers: queue.Queue[str | None] = queue.Queue()
        left = options.budget_s - (time.monotonic() - START) - MEASURE_S * len(options.models)
        self._ready_by = time.monotonic() + max(left, 30.0)
        command = [sys.executable, "-m", "benchmarks.baselines", system, f"random:{model}", "--serve"]
        command += ["--contexts", ",".join(map(str, options.contexts)), "--steps", str(options.steps)]
        command += ["--repetitions", str(options.repetitions), "--warmup", str(options.warmup)]
        command += ["--device", options.device, "--lock", str(lock), "--compile-s", str(max(left, 30.0))]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def wait_ready(self, deadline: float) -> None:
        """Until it has compiled what it can. Failed if it ended, or is late."""
        self._ready = self._answer(min(deadline, self._ready_by + 10.0))["ready"]

    def turn(self, deadline: float) -> list[Record]:
        """Records of the contexts that are ready."""
        records = []
        for context in self._ready:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(f"{context}\n")
                self._process.stdin.flush()
            except OSError as gone:
                raise Failed(f"its process has ended: {gone}") from gone
            records.append(self._answer(deadline))
        return records

    def _answer(self, deadline: float) -> Record:
        try:
            line = self._answers.get(timeout=max(deadline - time.monotonic(), 0.1))
        except queue.Empty as late:
            raise Failed("it did not answer in time") from late
        if line is None:
            raise Failed(f"its process has ended with exit code {self._process.wait()}, see above")
        answer: Record = json.loads(line)
        if "error" in answer:
            raise Failed(str(answer["error"]))
        return answer

    def close(self) -> None:
        """Ends its process."""
        self._process.kill()
        self._process.wait()


def made(system: str, model: str, options: argparse.Namespace) -> Own | Baseline:
    """A contestant; a baseline begins to compile at once."""
    lock = Path(tempfile.gettempdir()) / f"cheetah-compare-{os.getpid()}.lock"
    return Own(model, options, lock) if system == OURS else Baseline(system, model, options, lock)


def compete(contestants: Sequence[Own | Baseline], options: argparse.Namespace, deadline: float) -> list[Record]:
    """Every record, in the order in which it was measured; each is in the file before the next is begun."""
    for contestant in contestants:
        attempt(contestant, lambda one=contestant: one.wait_ready(deadline))
    say("measuring begins")
    records: list[Record] = []
    for number in range(options.rounds):
        order = contestants if number % 2 == 0 else contestants[::-1]
        for contestant in order:
            if contestant.failure or time.monotonic() > deadline:
                continue
            new = attempt(contestant, lambda one=contestant: one.turn(deadline)) or []
            for record in new:
                record["round"] = number
                lend_ceiling(record, records)
                append(options.json, record)
                say(f"round {number + 1}: {line_of(record)}")
            records += new
    return records


def attempt(contestant: Own | Baseline, action: Any) -> Any:
    """The action's result; a failure is told, remembered, and harms no other system."""
    try:
        return action()
    except Exception as problem:
        contestant.failure = str(problem) or type(problem).__name__
        say(f"{contestant.name}: {contestant.failure}")
        contestant.close()
        return None


def lend_ceiling(record: Record, earlier: Sequence[Record]) -> None:
    """Where a baseline could not measure the ceiling, it is the last one that this run measured."""
    known = [one["ceiling_gb_per_s"] for one in earlier if one["ceiling_gb_per_s"]]
    if record["ceiling_gb_per_s"] is None and known and "note" not in record:
        record["ceiling_gb_per_s"] = known[-1]
        record["share"] = float(f"{record['gb_per_s'] / known[-1]:.6g}")
        record.setdefault("settings", {})["ceiling"] = "measured by another system's process of this run"


def append(path: Path, record: Record) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def table(records: Sequence[Record]) -> str:
    """Median over the rounds, and from the slowest to the fastest; models and contexts together."""
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["model"], record["context"], system_of(record)), []).append(record)
    heading = ("system", "model", "context", "tok/s", "of each round", "ms/step", "share")
    models = list(dict.fromkeys(record["model"] for record in records))
    ordered = sorted(groups.items(), key=lambda item: (models.index(item[0][0]), item[0][1]))
    rows = [heading, *(row_of(*key, group) for key, group in ordered)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heading))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def row_of(model: str, context: int, system: str, group: Sequence[Record]) -> tuple[str, ...]:
    speeds = [record["tokens_per_s"] for record in group]
    shares = [record["share"] for record in group if record["share"] is not None]
    return (
        system,
        model,
        str(context),
        f"{median(speeds):.1f}",
        " ".join(f"{speed:.1f}" for speed in speeds),
        f"{median(record['ms_per_step'] for record in group):.4f}",
        f"{median(shares):.1%}" if shares else "-",
    )


def line_of(record: Record) -> str:
    return "  ".join(row_of(record["model"], record["context"], system_of(record), [record]))


def system_of(record: Record) -> str:
    """The system, and how many sequences and tokens of each it had in a step if that is not one."""
    sizes = {"batch": record.get("batch", 1), "tokens a step": record.get("per_step", 1)}
    return ", ".join([record["system"], *(f"{name} {size}" for name, size in sizes.items() if size > 1)])


def environment() -> dict[str, str]:
    """So that the processes find the project from anywhere."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def say(line: str) -> None:
    print(f"[{time.monotonic() - START:6.1f} s] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
