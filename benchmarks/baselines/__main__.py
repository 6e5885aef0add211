"""One baseline and model: python -m benchmarks.baselines plain random:llama-3.2-1b --contexts 128,6144

With --serve it compiles, says which contexts are ready, and measures one for each line that it reads: "CONTEXT". Then
stdout has JSON lines alone: {"ready": [...]} first, then a record or {"error": ...} for each line read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks.baselines.gpt_fast import model_file
from cheetah.errors import CheetahError

if TYPE_CHECKING:
    from benchmarks.baselines.session import Session

START = time.monotonic()


class TooLate(Exception):
    """The time for compiling is over."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no record
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    try:
        if options.system == "gpt-fast":
            model_file(options.gpt_fast)  # refused before torch is loaded
        session = prepared(options)
    except CheetahError as problem:
        say(str(problem))
        return 1
    except BaseException as problem:
        say(f"{options.system}: {last_lines(problem)}")
        return 1
    if options.serve:
        serve(session, options, results)
    else:
        measure_all(session, options, results)
    return 0 if session.ready else 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.baselines", description=__doc__.splitlines()[0])
    made.add_argument("system", choices=("plain", "transformers", "gpt-fast"))
    made.add_argument("model", help="random:PRESET, for gpt-fast also @int4-g128; the weights are random always")
    made.add_argument("--gpt-fast", type=Path, metavar="FOLDER", help="a clone, for the system gpt-fast")
    made.add_argument("--contexts", default="128,6144", help="tokens taken as cached, A,B,...")
    made.add_argument("--steps", type=int, default=64, help="decode steps of a run")
    made.add_argument("--repetitions", type=int, default=5, help="timed runs")
    made.add_argument("--warmup", type=int, default=2, help="runs before those")
    made.add_argument("--json", type=Path, help="append the records here")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--eager", action="store_true", help="do not compile")
    made.add_argument("--ceiling", type=float, help="GB/s, where it cannot be measured in this process")
    made.add_argument("--compile-s", type=float, default=240.0, help="contexts not compiled by then are left out")
    made.add_argument("--lock", type=Path, help="a file on which processes that share the GPU take turns")
    made.add_argument("--serve", action="store_true", help="measure on request (see above)")
    return made


def prepared(options: argparse.Namespace) -> Session:
    """Everything compiled that could be in time."""
    from benchmarks.baselines.session import Session
    from benchmarks.baselines.turns import GpuTurn
    from cheetah.cli.configs import named_config

    named = named_config(options.model)
    say(f"{options.system}, {named.canonical}: torch imported")
    turn = GpuTurn(options.lock)
    session: Session | None = None
    try:
        with at_most(options.compile_s - (time.monotonic() - START)):
            session = Session(
                options.system,
                named.config,
                named.canonical,
                options.device,
                not options.eager,
                options.ceiling,
                say,
                options.gpt_fast,
            )
            for context in contexts_of(options):
                session.prepare(context, options.steps)
                turn.give_back()
    except Exception as problem:
        if session is None:
            raise
        say(f"{session.system.name}, {named.canonical}: only {session.ready} ready: {last_lines(problem)}")
    finally:
        turn.give_back()
    assert session is not None
    return session


def serve(session: Session, options: argparse.Namespace, results: TextIO) -> None:
    """A record for each context that stdin names."""
    print(json.dumps({"ready": session.ready}), file=results, flush=True)
    for line in sys.stdin:
        try:
            answer = session.measure(int(line), options.repetitions, options.warmup)
        except Exception as problem:
            answer = {"error": last_lines(problem)}
        print(json.dumps(answer), file=results, flush=True)


def measure_all(session: Session, options: argparse.Namespace, results: TextIO) -> None:
    """Each context once, for a person."""
    from benchmarks.baselines.session import line_of

    for context in session.ready:
        record = session.measure(context, options.repetitions, options.warmup)
        print(line_of(record), file=results, flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def contexts_of(options: argparse.Namespace) -> list[int]:
    return [int(part) for part in options.contexts.split(",")]


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TooLate inside when the time is over."""

    def ring(*_: Any) -> None:
        raise TooLate("no time is left for compiling")

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def say(line: str) -> None:
    """To stderr, with the seconds since the start."""
    print(f"[{time.monotonic() - START:6.1f} s] {line}", file=sys.stderr, flush=True)


def last_lines(problem: BaseException) -> str:
    """What went wrong, and where."""
    text = "".join(traceback.format_exception(problem))
    return text if len(text) < 3000 else text[:500] + "\n...\n" + text[-2500:]


if __name__ == "__main__":
    sys.exit(main())
