"""Two trees of this project on one GPU in one run: the same works, measured in turns, so that a change shows.

    python -m benchmarks.turns ../before llama-3.1-8b:1:128 llama-3.1-8b@int4-g128:8:128 llama-3.1-8b:pass:2048

Of each work both trees have a process of their own that generates, compiles and loads its kernel beside its own random
weights. Then they take turns, in an order that alternates, each after the same rest. A line a work: the medians, their
ratio, and by how much each tree's own turns differ. One GPU beside two is the same tree twice:

    python -m benchmarks.turns . llama-3.1-8b:1:128 --device cuda:0 --after-device cuda:0,1
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve()
STEPS, WARMUP = 64, 2
BEFORE, AFTER = "before", "after"


@dataclass(frozen=True)
class TurnWork:
    """What both trees do: steps of `batch` sequences behind `context` cached tokens, or (batch 0) a pass over a prompt
    of so many."""

    model: str
    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> TurnWork:
        """ "MODEL:BATCH:CONTEXT", or "MODEL:pass:TOKENS"."""
        try:
            model, batch, context = text.rsplit(":", 2)
            return cls(model, 0 if batch == "pass" else int(batch), int(context))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: give MODEL:BATCH:CONTEXT or MODEL:pass:TOKENS") from None

    def __str__(self) -> str:
        what = f"pass of {self.context}" if not self.batch else f"{self.batch} at {self.context}"
        return f"{self.model:32} {what:14}"


class Tree:
    """A tree's process for one work."""

    def __init__(self, root: Path, work: TurnWork, device: str) -> None:
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE), "--worker", json.dumps({**asdict(work), "device": device})],
            cwd=root,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> Any:
        """What the process says next; RuntimeError if it has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a tree's process ended with code {self._process.wait()}: see what it said above")
        return json.loads(line)

    def turn(self) -> dict[str, float]:
        """One launch: its milliseconds (a step's, or a pass'), and the share of the read ceiling where there is one."""
        assert self._process.stdin is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        found: dict[str, float] = self.answer()
        return found

    def close(self) -> None:
        """Ends the process; whatever it held of the GPU is given back."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line a work, append the records; 1 if a work could not be measured."""
    options = parser().parse_args(arguments)
    roots = {BEFORE: options.before.resolve(), AFTER: options.after.resolve()}
    failed = 0
    for work in options.works:
        try:
            record = in_turns(work, roots, options.turns, (options.device, options.after_device or options.device))
        except RuntimeError as problem:
            print(f"{work} {problem}", file=sys.stderr, flush=True)
            failed += 1
            continue
        print(line_of(work, record), flush=True)
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**asdict(work), **record}) + "\n")
    return int(failed > 0)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=(__doc__ or "").splitlines()[0])
    made.add_argument("before", type=Path, help="the other tree: a checkout of an older commit")
    made.add_argument("works", nargs="+", type=TurnWork.parse, help="MODEL:BATCH:CONTEXT, or MODEL:pass:TOKENS")
    made.add_argument("--after", type=Path, default=HERE.parents[1], help="the tree that is compared, by default this")
    made.add_argument("--turns", type=int, default=7, help="timed launches of each tree")
    made.add_argument("--json", type=Path, help="append the records here")
    made.add_argument("--device", default="cuda", help="cuda, or emulator to try it: no speeds")
    made.add_argument("--after-device", help="of the tree that is compared, if another: cuda:0,1")
    return made


def in_turns(work: TurnWork, roots: dict[str, Path], turns: int, devices: tuple[str, str]) -> dict[str, Any]:
    """Every tree's turns: {tree}_ms, {tree}_share (of the read ceiling, of steps on a GPU). devices: of each tree."""
    with ExitStack() as stack:
        trees = {name: Tree(root, work, device) for (name, root), device in zip(roots.items(), devices, strict=True)}
        for tree in trees.values():
            stack.callback(tree.close)
        for tree in trees.values():
            tree.answer()
        found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for number in range(WARMUP + turns):
            for name in (BEFORE, AFTER) if number % 2 else (AFTER, BEFORE):
                one = trees[name].turn()
                if number >= WARMUP:
                    found[name].append(one)
    return {
        f"{name}_{what}": [one[what] for one in launches] for name, launches in found.items() for what in launches[0]
    }


def line_of(work: TurnWork, record: dict[str, Any]) -> str:
    """Medians, their ratio, the spread of each tree's turns, shares where there are."""
    before, after = record[f"{BEFORE}_ms"], record[f"{AFTER}_ms"]
    change = 100 * (median(after) / median(before) - 1)
    spreads = " / ".join(f"{100 * (max(ms) - min(ms)) / median(ms):.1f}" for ms in (before, after))
    line = f"{work} {median(before):9.4f} -> {median(after):9.4f} ms  {change:+6.2f} %  (turns differ by {spreads} %)"
    shares = [record.get(f"{name}_share") for name in (BEFORE, AFTER)]
    return line + "".join(f"  {100 * median(one):.1f}" for one in shares if one) + (" % of the ceiling" * any(shares))


# -- in a tree's own process ------------------------------------------------------------------------------------------


def work_for_tree(text: str) -> None:
    """Opens the work with the tree's own code, then measures a launch for each line of standard input."""
    sys.path = [path for path in sys.path if Path(path or ".").resolve() != HERE.parent]
    given = json.loads(text)
    work, device = TurnWork(given["model"], given["batch"], given["context"]), given["device"]
    with (opened_steps if work.batch else opened_pass)(work, device) as turn:
        print(json.dumps("ready"), flush=True)
        for _ in sys.stdin:
            print(json.dumps(turn()), flush=True)


@contextmanager
def opened_steps(work: TurnWork, device: str) -> Iterator[Any]:
    from benchmarks.speeds import Job, plan_of
    from cheetah.cli.configs import named_config
    from cheetah.runtime.device import open_device
    from cheetah.tools.bench import open_bench

    job, named = Job(work.model, str(work.context), work.batch), named_config(f"random:{work.model}")
    steps = STEPS if device != "emulator" else 2
    with (
        open_device(device, say=lambda line: None) as opened,
        open_bench(named.config, named.canonical, None, opened, job.works, steps, **plan_of(job, steps)) as ready,
    ):

        def turn() -> dict[str, float]:
            found = ready.measure(job.works[0], steps, 1, 0)
            return {"ms": found.ms_per_step} | ({} if found.share is None else {"share": found.share})

        yield turn


@contextmanager
def opened_pass(work: TurnWork, device: str) -> Iterator[Any]:
    from cheetah.cli.configs import named_config
    from cheetah.runtime.device import open_device
    from cheetah.tools.pass_bench import open_pass_bench

    config = named_config(f"random:{work.model}").config
    with (
        open_device(device, say=lambda line: None) as opened,
        open_pass_bench(config, None, opened, work.context, 0) as ready,
    ):
        yield lambda: {"ms": ready.measure(1, 0, 0.1)[0]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work_for_tree(sys.argv[2])
        sys.exit(0)
    sys.exit(main())
