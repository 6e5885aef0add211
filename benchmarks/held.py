"""Decode speed that is held for seconds, beside that of the first second, with clock and power meanwhile.

    python -m benchmarks.held random:llama-3.1-8b@int4-g128 --batch 8 --seconds 10 --json held-of-today.jsonl

Launches follow one another without rests, as when a server is busy; random weights. A line of JSON a model.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from cheetah.cli.bench import parsed_works
from cheetah.cli.configs import named_config
from cheetah.cli.measured import circumstances_of
from cheetah.runtime.device import open_device
from cheetah.tools.bench import open_bench, record, room_for
from cheetah.tools.circumstances import clocks

FIRST_S, LAST_S = 1.0, 2.0
CLOCK_EVERY_S = 0.5
REST_S = 3.0
"""Before it begins, so that the first second is that of a cool GPU."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each model, print a line each, append the records."""
    options = parser().parse_args(arguments)
    with open_device(options.device, say=lambda line: None) as device:
        for model in options.models:
            found = held(model, device, options)
            print(line_of(found), flush=True)
            if options.json is not None:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.held", description=(__doc__ or "").splitlines()[0])
    made.add_argument("models", nargs="+", help="random:PRESET, one after the other")
    made.add_argument("--context", default="128", help="tokens in the cache before a launch")
    made.add_argument("--batch", type=int, default=1, help="sequences")
    made.add_argument("--seconds", type=float, default=10.0, help="how long launches follow one another")
    made.add_argument("--steps", type=int, default=64, help="steps of a launch")
    made.add_argument("--json", type=Path, help="append the records here")
    made.add_argument("--device", default="cuda", help="cuda, or emulator to try it: no speeds")
    return made


def held(model: str, device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """A record as `cheetah bench` makes it, of all launches, with what was held."""
    named = named_config(model)
    (work,) = works = parsed_works(options.context, options.batch)
    about = circumstances_of(named.canonical, named.config, None, device)
    plan = room_for(works, named.config, options.steps)
    with open_bench(named.config, named.canonical, None, device, works, options.steps, **plan) as ready:
        launch_s = options.steps * ready.measure(work, options.steps, 1, 1).ms_per_step / 1e3
        time.sleep(0.0 if ready.gpu.emulated else REST_S)
        with sampled_clocks() as samples:
            measurement = ready.measure(work, options.steps, ceil(options.seconds / launch_s), 0)
        return {**record(measurement, ready, about), **of_time(measurement.step_ms, options.steps), "samples": samples}


def of_time(step_ms: Sequence[float], steps: int) -> dict[str, float]:
    """Medians of the launches that ended in the first second, and began in the last two; the first and the last at
    least."""
    ends = list(accumulate(ms * steps / 1e3 for ms in step_ms))
    first = [ms for ms, end in zip(step_ms, ends, strict=True) if end <= FIRST_S]
    last = [ms for ms, begin in zip(step_ms, [0.0, *ends], strict=False) if begin >= ends[-1] - LAST_S]
    return {
        "held_s": float(f"{ends[-1]:.6g}"),
        "first_second_ms": median(first or step_ms[:1]),
        "last_seconds_ms": median(last or step_ms[-1:]),
    }


@contextmanager
def sampled_clocks() -> Iterator[list[dict[str, float]]]:
    """What nvidia-smi says, every half second, with the seconds since the beginning."""
    samples: list[dict[str, float]] = []
    done, begin = threading.Event(), time.monotonic()

    def look() -> None:
        while not done.wait(CLOCK_EVERY_S):
            if state := clocks():
                samples.append({"s": round(time.monotonic() - begin, 2), **state})

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def line_of(one: dict[str, Any]) -> str:
    first, last = one["first_second_ms"], one["last_seconds_ms"]
    tokens = 1e3 * one["batch"]
    watts = [sample["power_w"] for sample in one["samples"] if "power_w" in sample]
    clock = [sample["sm_mhz"] for sample in one["samples"] if "sm_mhz" in sample]
    state = f", {min(clock):.0f} to {max(clock):.0f} MHz, {max(watts):.0f} W at most" if watts and clock else ""
    return (
        f"{one['model']} x {one['batch']}, {one['held_s']:.1f} s: first second {first:.4f} ms {tokens / first:.1f} "
        f"tokens/s, last two {last:.4f} ms {tokens / last:.1f} tokens/s ({last / first:.4f}){state}"
    )


if __name__ == "__main__":
    sys.exit(main())
