"""Runs one launch under many schedules and requires that nothing depends on the schedule.

A kernel that is right gives the same bits under every scheduler and seed; a wait that is missing shows as different
bits, a deadlock or a misuse under some of them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from cheetah.emulator.errors import EmulatorError
from cheetah.emulator.program import SCHEDULERS

Outputs = bytes | bytearray | memoryview | np.ndarray | Sequence[np.ndarray] | Mapping[str, np.ndarray]
Bits = dict[str, bytes]


@dataclass(frozen=True)
class Failure:
    """One schedule under which the launch failed: an emulator's error, or "different output"."""

    scheduler: str
    seed: int
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.scheduler}, seed {self.seed}: {self.kind}: {self.message}"


@dataclass(frozen=True)
class ExploreReport:
    """How many launches ran, how many failed under each scheduler, and the first failures with their reports."""

    runs: int
    failed: dict[str, int]
    failures: tuple[Failure, ...]

    @property
    def ok(self) -> bool:
        return not any(self.failed.values())

    def __str__(self) -> str:
        if self.ok:
            return f"{self.runs} launches, no error, the same bits in all"
        counts = ", ".join(f"{count} under {scheduler}" for scheduler, count in self.failed.items() if count)
        return "\n".join(
            [f"{sum(self.failed.values())} of {self.runs} launches failed: {counts}", *map(str, self.failures)]
        )


def explore(
    run: Callable[[str, int], Outputs],
    seeds: Iterable[int],
    schedulers: Sequence[str] = SCHEDULERS,
    *,
    expected: Outputs | None = None,
    kept_failures: int = 5,
    stop_after: int | None = None,
) -> ExploreReport:
    """Calls `run(scheduler, seed)`, which launches afresh and returns its outputs, for every scheduler and seed.

    Outputs are compared bit by bit with `expected`, or with those of the first launch that ended well. Of the failures
    the first `kept_failures` are kept with their reports; after `stop_after` of them nothing more is launched. Errors
    other than EmulatorError pass through.
    """
    reference = None if expected is None else _bits(expected)
    failed = dict.fromkeys(schedulers, 0)
    failures: list[Failure] = []
    runs = 0
    for scheduler, seed in product(schedulers, list(seeds)):
        if stop_after is not None and len(failures) >= stop_after:
            break
        runs += 1
        outcome = _run_one(run, scheduler, seed, reference)
        if isinstance(outcome, Failure):
            failed[scheduler] += 1
            failures.append(outcome)
        elif reference is None:
            reference = outcome
    return ExploreReport(runs, failed, tuple(failures[:kept_failures]))


def _run_one(run: Callable[[str, int], Outputs], scheduler: str, seed: int, reference: Bits | None) -> Failure | Bits:
    try:
        outputs = _bits(run(scheduler, seed))
    except EmulatorError as error:
        return Failure(scheduler, seed, type(error).__name__, str(error))
    if reference is not None and outputs != reference:
        return Failure(scheduler, seed, "different output", _first_difference(outputs, reference))
    return outputs


def _bits(outputs: Outputs) -> Bits:
    """By the name of each, or its number."""
    if isinstance(outputs, Mapping):
        return {name: array.tobytes() for name, array in outputs.items()}
    if isinstance(outputs, bytes | bytearray | memoryview):
        return {"output 0": bytes(outputs)}
    arrays = [outputs] if isinstance(outputs, np.ndarray) else outputs
    return {f"output {number}": array.tobytes() for number, array in enumerate(arrays)}


def _first_difference(outputs: Bits, reference: Bits) -> str:
    for (name, ours), theirs in zip(outputs.items(), reference.values(), strict=False):
        if len(ours) != len(theirs):
            return f"{name} has {len(ours)} bytes, expected {len(theirs)}"
        if ours != theirs:
            at = int(np.flatnonzero(np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8))[0])
            return f"{name} differs from byte {at} on"
    return f"{len(outputs)} outputs, expected {len(reference)}"
