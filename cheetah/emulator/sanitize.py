"""A program under ThreadSanitizer: a process of its own, fed through files, its race reports told by kernel line.

A library with ThreadSanitizer cannot be loaded into Python, so each launch writes its arrays to files, runs the program
(`runtime/sanitize_main.cpp`) and reads them back. Races are reported once for each pair of places.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cheetah.emulator.build import RUNTIME_FOLDER
from cheetah.emulator.errors import Race, TimeLimit
from cheetah.emulator.program import (
    Argument,
    LaunchShape,
    LaunchStats,
    Program,
    raise_for_outcome,
    scalar_bytes,
)
from cheetah.errors import CheetahError

MAXIMUM_FIBRES = 8000
"""ThreadSanitizer's own limit is 8128 threads; copies in flight are fibres too."""

_OPTIONS = "exitcode=0 atexit_sleep_ms=0 halt_on_error=0 history_size=5 report_thread_leaks=0 report_signal_unsafe=0"
_OWN_FILES = {"unpacking.cpp", "<null>", *(path.name for path in RUNTIME_FOLDER.iterdir())}
_FRAME_FORMAT = "    @%f|%s|%l"


class SanitizedProgram(Program):
    """Raises Race with one line for each pair of accesses that nothing orders."""

    def _run(
        self,
        shape: LaunchShape,
        arguments: Sequence[Sequence[Argument]],
        timeout_s: float | None,
        watch: Callable[[], None] | None,
    ) -> LaunchStats:
        if len(arguments) != 1:
            raise CheetahError("the race detector follows one GPU: launch without others")
        return self._run_alone(shape, arguments[0], timeout_s)

    def _run_alone(self, shape: LaunchShape, arguments: Sequence[Argument], timeout_s: float | None) -> LaunchStats:
        threads = int(np.prod(shape.grid)) * int(np.prod(shape.block))
        if threads > MAXIMUM_FIBRES:
            raise CheetahError(f"{threads} threads; the race detector has room for {MAXIMUM_FIBRES}: use fewer blocks")
        needed_bytes = sum(argument.nbytes for argument in arguments if isinstance(argument, np.ndarray))
        with tempfile.TemporaryDirectory(prefix="cheetah-sanitize-", dir=_fast_folder(needed_bytes)) as name:
            folder = Path(name)
            arrays = self._write_request(folder, shape, arguments)
            started = time.perf_counter()
            errors = self._execute(folder, timeout_s)
            seconds = time.perf_counter() - started
            result = _read_result(folder / "result", errors)
            for path, array in arrays:
                _read_back(path, array)
        races = race_lines(errors, result.regions)
        if races:
            ending = f"\nthe launch then ended with: {result.report.strip()}" if result.outcome else ""
            raise Race("\n".join(races) + ending)
        raise_for_outcome(result.outcome, result.report)
        return LaunchStats(*result.counts, seconds)

    def _write_request(
        self, folder: Path, shape: LaunchShape, arguments: Sequence[Argument]
    ) -> list[tuple[Path, np.ndarray]]:
        lines = [
            "grid {} {} {}".format(*shape.grid),
            "block {} {} {}".format(*shape.block),
            f"shared {shape.shared_bytes}",
            f"scheduler {shape.scheduler}",
            f"seed {shape.seed}",
            f"switch_limit {shape.switch_limit}",
            f"chunk_limit {shape.chunk_limit}",
        ]
        arrays = []
        for parameter, argument in zip(self.parameters, arguments, strict=True):
            if isinstance(argument, np.ndarray):
                path = folder / f"{parameter.name}.array"
                argument.tofile(path)
                lines.append(f"array {parameter.name} {argument.nbytes} {path}")
                if not parameter.is_const:
                    arrays.append((path, argument))
            else:
                bits = b"\0" * 8 if argument is None else scalar_bytes(parameter, argument)
                lines.append(f"value {int.from_bytes(bits, 'little'):x}")
        (folder / "request").write_text("\n".join(lines) + "\n")
        return arrays

    def _execute(self, folder: Path, timeout_s: float | None) -> str:
        command = [str(self.path), str(folder / "request"), str(folder / "result")]
        errors = _execute(command, timeout_s)
        # Some kernels place memory where this ThreadSanitizer does not expect it; without random addresses it fits.
        if "unexpected memory mapping" in errors and shutil.which("setarch"):
            errors = _execute(["setarch", "-R", *command], timeout_s)
        return errors


@dataclass(frozen=True)
class _Region:
    start: int
    size: int
    name: str


@dataclass(frozen=True)
class _Result:
    outcome: int
    counts: tuple[int, int, int, int, int]
    regions: tuple[_Region, ...]
    report: str


def race_lines(text: str, regions: Sequence[_Region]) -> list[str]:
    """One line for each different race in ThreadSanitizer's output, in the order of their first appearance."""
    lines: dict[str, None] = {}
    for block in text.split("WARNING: ThreadSanitizer: ")[1:]:
        names = {tid: name for tid, name in re.findall(r"Thread (T\d+) '([^']*)'", block)}
        accesses = list(_accesses(block, names, regions))
        if accesses:
            lines[f"race: {' with '.join(accesses)}"] = None
    return _without_repetition(list(lines))


def _without_repetition(lines: list[str]) -> list[str]:
    """The first race of each pair of places, with how many more there are between other threads."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(re.sub(r" by .*?(?= with |$)", "", line), []).append(line)
    return [first if not more else f"{first} (and {len(more)} more such pairs)" for first, *more in groups.values()]


def _accesses(block: str, names: dict[str, str], regions: Sequence[_Region]) -> Iterator[str]:
    pattern = (
        r"  (?:Previous )?((?:[Aa]tomic )?(?:[Ww]rite|[Rr]ead)) of size (\d+) at (0x[0-9a-f]+)"
        r" by (main thread|thread (T\d+))[^\n]*:\n((?:    @[^\n]*\n?)*)"
    )
    for kind, size, address, _, thread, frames in re.findall(pattern, block):
        where = _kernel_line(frames)
        what = _location(int(address, 16), regions)
        yield f"{kind.lower()} of {size} bytes at {where} by {names.get(thread, 'the launcher')}, on {what}"


def _kernel_line(frames: str) -> str:
    """The innermost frame that is not the emulator's own: the kernel text, or what its #line marks name."""
    for frame in frames.splitlines():
        _, file, line = frame.strip().lstrip("@").rsplit("|", 2)
        name = Path(file).name
        if name not in _OWN_FILES:
            return f"{name}:{line}"
    return "an unknown place"


def _location(address: int, regions: Sequence[_Region]) -> str:
    for region in regions:
        if region.start <= address < region.start + region.size:
            return f"{region.name}+{address - region.start}"
    return hex(address)


def _execute(command: Sequence[str], timeout_s: float | None) -> str:
    environment = {**os.environ, "TSAN_OPTIONS": f"{_OPTIONS} stack_trace_format='{_FRAME_FORMAT}'"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeLimit(f"the sanitized launch did not end within {timeout_s} s") from None
    return done.stderr.decode(errors="replace")


def _read_result(path: Path, errors: str) -> _Result:
    if not path.exists():
        raise CheetahError(f"the sanitized program ended without a result:\n{errors[-4000:].strip()}")
    head, _, report = path.read_text(errors="replace").partition("report\n")
    outcome, counts, *regions = head.splitlines()
    switches, collectives, copies, copied_bytes, most_chunks = map(int, counts.split()[1:])
    return _Result(
        outcome=int(outcome.split()[1]),
        counts=(switches, collectives, copies, copied_bytes, most_chunks),
        regions=tuple(_read_region(line) for line in regions),
        report=report,
    )


def _read_region(line: str) -> _Region:
    _, start, size, name = line.split(" ", 3)
    return _Region(int(start, 16), int(size), name)


def _read_back(path: Path, array: np.ndarray) -> None:
    array.reshape(-1).view(np.uint8)[:] = np.fromfile(path, np.uint8)


def _fast_folder(needed_bytes: int) -> str | None:
    """Memory-backed where it has room for the arrays (containers often have little), else the usual folder."""
    if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2 * needed_bytes:
        return "/dev/shm"
    return None
