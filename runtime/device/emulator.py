"""The emulator as a device: the kernel's own text, compiled by g++ and run on the processor. For tests and for no GPU.

A launch runs to its end within `launch`; the emulator itself finds deadlocks, so there is nothing to time out. Memory
that nobody filled holds 0xFF (NaN in bf16 and f32). Any grid runs, also one made for a GPU of 132 blocks.
"""

from __future__ import annotations

import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.manifest import NO_PAGE, Manifest
from cheetah.piece_ring import PieceRing, ordinary_memory
from cheetah.runtime import interrupts
from cheetah.runtime.background import Started, started
from cheetah.runtime.device.arguments import CheckedArgument, check_arguments
from cheetah.runtime.device.host_buffer import HostBuffer
from cheetah.runtime.device.interface import (
    Argument,
    ArgumentError,
    DeviceError,
    DeviceInfo,
    Event,
    LaunchCancelled,
    ProgressSource,
    Say,
    check_size_and_fill,
)

COMPILING_IS_TOLD_AFTER_S = 0.3  # a kernel from the cache is there sooner
BLOCKS = 4  # what `describe` says, and what suits two processor cores; any other number runs too
SHARED_BYTES = 227 * 1024
ALIGNMENT = 256
POISON = 0xFF


@dataclass(frozen=True)
class EmulatorKernel:
    """A kernel compiled for the emulator. program: a `cheetah.emulator.Program`."""

    manifest: Manifest
    program: Any


@dataclass(frozen=True)
class EmulatorEvent:
    """A point in time, in seconds of the performance counter."""

    seconds: float


class EmulatorBuffer(HostBuffer):
    """A buffer in ordinary memory."""

    def __init__(self, nbytes: int, fill: int) -> None:
        super().__init__(_aligned_bytes(nbytes, fill))

    def free(self) -> None:
        self._array = None


class EmulatorDevice:
    """A `Device` (see there). scheduler, seed: how the emulator orders the threads; None leaves the choice to it."""

    name = "emulator"

    def __init__(self, say: Say = lambda _: None, scheduler: str | None = None, seed: int | None = None) -> None:
        self._say = say
        self._schedule: dict[str, Any] = {
            key: value for key, value in (("scheduler", scheduler), ("seed", seed)) if value is not None
        }
        self._unusable: str | None = None
        self.stats: Any = None  # of the last launch, a `cheetah.emulator.LaunchStats`

    def describe(self) -> DeviceInfo:
        return DeviceInfo(
            backend=self.name,
            name="emulator",
            arch="sm_90",
            blocks=BLOCKS,
            shared_bytes=SHARED_BYTES,
            total_bytes=_memory_bytes("MemTotal"),
            free_bytes=_memory_bytes("MemAvailable"),  # counts what the system would drop from its file cache
            driver=f"g++ on {platform.machine()}",
        )

    def load(self, text: str, manifest: Manifest) -> EmulatorKernel:
        return self.prepare(text, manifest)()

    def prepare(self, text: str, manifest: Manifest) -> Started[EmulatorKernel]:
        from cheetah.emulator import compile_program

        self._check_usable()
        manifest.check_text(text)
        parameters = [(parameter.name, parameter.ctype) for parameter in manifest.parameters]

        def compiled() -> EmulatorKernel:
            with _told_if_slow(self._say, f"compiling {manifest.kernel} for the emulator (g++)..."):
                return EmulatorKernel(manifest, compile_program(text, manifest.kernel, parameters))

        return started(compiled)

    def allocate(self, nbytes: int, fill: int | None = None) -> EmulatorBuffer:
        self._check_usable()
        check_size_and_fill(nbytes, fill)
        return EmulatorBuffer(nbytes, POISON if fill is None else fill)

    def allocate_mapped(self, nbytes: int) -> EmulatorBuffer:
        return self.allocate(nbytes, 0)

    def lend(self, nbytes: int) -> AbstractContextManager[PieceRing]:
        return ordinary_memory(nbytes)

    def launch(self, kernel: Any, arguments: Mapping[str, Argument]) -> None:
        self._check_usable()
        if not isinstance(kernel, EmulatorKernel):
            raise ArgumentError(f"launch takes a kernel that this device loaded, not a {type(kernel).__name__}")
        self.launch_together(kernel, [arguments])

    def launch_together(self, kernel: EmulatorKernel, arguments: Sequence[Mapping[str, Argument]]) -> None:
        """A launch on several ranks at once, with the arguments of each."""
        self._check_usable()
        values = [[_as_emulated(one) for one in check_arguments(kernel.manifest, own)] for own in arguments]
        launch = kernel.manifest.launch
        shape = (launch.blocks, launch.threads, launch.shared_bytes)
        options = {**_promises(kernel.manifest), **self._schedule, "watch": _end_if_interrupted}
        try:
            self.stats = kernel.program.launch_together(*shape, values, **options)
        except LaunchCancelled:
            raise
        except Exception as error:
            first_line = str(error).partition("\n")[0] or type(error).__name__
            self._unusable = f"kernel {kernel.manifest.kernel} failed: {first_line}"
            raise

    def synchronize(
        self, timeout_s: float | None = None, progress: ProgressSource | Callable[[], str] | None = None
    ) -> None:
        """Nothing to wait for: a launch has ended, or failed, when it returns."""
        self._check_usable()

    def is_done(self) -> bool:
        self._check_usable()
        return True

    def record(self) -> EmulatorEvent:
        return EmulatorEvent(time.perf_counter())

    def elapsed_ms(self, start: Event, end: Event) -> float:
        if not (isinstance(start, EmulatorEvent) and isinstance(end, EmulatorEvent)):
            raise ArgumentError("elapsed_ms takes two events that `record` of this device gave")
        return (end.seconds - start.seconds) * 1000

    def close(self) -> None:
        self._unusable = self._unusable or "it was closed"

    def __enter__(self) -> EmulatorDevice:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise DeviceError(f"this device cannot be used any more: {self._unusable}")


def _promises(manifest: Manifest) -> dict[str, Any]:
    """What every launch of a kernel is held to: as many chunks under way as its plan allows, and no look at a place of
    the page table that has no page."""
    chunks = manifest.plan.get("in_flight")
    if chunks and manifest.plan.get("in_flight_waiting") == 1:
        # Of the lm_head, see `Plan.in_flight_of`, which is not to be known here.
        chunks = min(2 * chunks, manifest.plan["stages"] - 1)
    if chunks:
        several = max((one.get("chunks_at_once", 1) for one in manifest.matrices), default=1)
        chunks = max(chunks, min(several * manifest.plan["in_flight"], manifest.plan["stages"] - 1))
    return {"chunk_limit": chunks, "poisoned": {"page_table": NO_PAGE}}


def _end_if_interrupted() -> None:
    if interrupts.is_pending():
        raise LaunchCancelled("the launch was ended early: it was interrupted")


def _as_emulated(argument: CheckedArgument) -> Any:
    """A pointer as the buffer's uint8 array (None for null), a scalar as it is."""
    if argument.parameter.kind == "scalar" or argument.value is None:
        return argument.value
    if not isinstance(argument.value, EmulatorBuffer):
        raise ArgumentError(f"{argument.parameter.name!r}: the buffer belongs to another device")
    return argument.value.array


def _memory_bytes(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def _aligned_bytes(nbytes: int, fill: int) -> NDArray[np.uint8]:
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -int(memory.ctypes.data) % ALIGNMENT
    array = memory[start : start + nbytes]
    array[:] = fill
    return array


@contextmanager
def _told_if_slow(say: Say, line: str) -> Iterator[None]:
    """Says the line while the body runs, if that takes noticeably long."""
    timer = threading.Timer(COMPILING_IS_TOLD_AFTER_S, say, [line])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
