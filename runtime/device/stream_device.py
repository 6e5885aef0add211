"""A GPU as a `Device`: buffers, launches, waiting with a time limit, faults. Knows a `Driver`, not which binding."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cheetah.manifest import Manifest
from cheetah.piece_ring import PieceRing
from cheetah.runtime.assembly.compile import compile_cubin
from cheetah.runtime.assembly.cubin import Cubin
from cheetah.runtime.background import Started, started
from cheetah.runtime.device.arguments import CheckedArgument, check_arguments
from cheetah.runtime.device.driver import Driver, DriverError, DriverEvent, Function, GraphDriver, PeerDriver
from cheetah.runtime.device.host_buffer import HostBuffer
from cheetah.runtime.device.interface import (
    Argument,
    ArgumentError,
    DeviceError,
    DeviceInfo,
    Event,
    LaunchTimeout,
    ProgressSource,
    Say,
    as_bytes,
    check_copy,
    check_range,
    check_size_and_fill,
)
from cheetah.runtime.device.progress import describe_progress
from cheetah.runtime.device.residency import check_machine, check_occupancy
from cheetah.runtime.device.staging import PIECE_BYTES, Staging

SPIN_SECONDS = 0.001  # a step takes about a millisecond: first ask without sleeping, then ever more rarely
LONGEST_SLEEP_SECONDS = 0.002
REPORT_BYTES = 64 << 10
REPORT_SECONDS = 2.0


@dataclass(frozen=True)
class StreamKernel:
    """A loaded kernel, with the cubin it came from."""

    manifest: Manifest
    function: Function
    cubin: Cubin


@dataclass(frozen=True)
class ReadyLaunch:
    """A launch of a kernel with its arguments, checked."""

    kernel: StreamKernel
    arguments: Mapping[str, Argument]
    checked: list[CheckedArgument]


@dataclass(frozen=True, eq=False)
class StreamEvent:
    """A recorded point; its driver event is used again when nothing refers to it any more."""

    handle: DriverEvent


class StreamBuffer:
    """A buffer of a StreamDevice."""

    def __init__(self, device: StreamDevice, address: int, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self._address = address
        self._release = weakref.finalize(self, device.release, address)
        self._release.atexit = False  # the driver frees everything at exit; a device that hangs would never answer

    @property
    def address(self) -> int:
        if not self._release.alive:
            raise ArgumentError(f"this buffer of {self.nbytes} bytes has been freed")
        return self._address

    def upload(self, array: NDArray[Any], offset: int = 0) -> None:
        data = as_bytes(array)
        check_range("upload", offset, data.nbytes, self.nbytes)
        self.device.upload(self.address + offset, data)

    def download(self, dtype: DTypeLike, shape: int | tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        array = np.empty(shape, dtype)
        check_range("download", offset, array.nbytes, self.nbytes)
        self.device.download(array.reshape(-1).view(np.uint8), self.address + offset)
        return array

    def fill(self, byte: int) -> None:
        check_size_and_fill(self.nbytes, byte)
        self.device.fill(self.address, byte, self.nbytes)

    def copy(self, source_offset: int, target_offset: int, nbytes: int) -> None:
        check_copy(source_offset, target_offset, nbytes, self.nbytes)
        self.device.copy(self.address + target_offset, self.address + source_offset, nbytes)

    def copy_of(self, source: Any, source_offset: int, target_offset: int, nbytes: int) -> None:
        check_range("copy", source_offset, nbytes, source.nbytes)
        check_range("copy to the place", target_offset, nbytes, self.nbytes)
        self.device.copy(self.address + target_offset, source.address + source_offset, nbytes)

    def free(self) -> None:
        self._release()


class StreamMappedBuffer(HostBuffer):
    """Pinned host memory of a StreamDevice: with unified addresses a kernel uses it at the address that it has here.
    Kept until the device is closed."""

    def __init__(self, device: StreamDevice, array: NDArray[np.uint8]) -> None:
        super().__init__(array)
        self.device = device

    def free(self) -> None:
        """Its memory goes with the device's."""


class StreamGraph:
    """Recorded launches of a StreamDevice; made by its `capture`. Keeps the buffers that they use."""

    def __init__(
        self, device: StreamDevice, handle: Any, launches: list[Mapping[str, Argument]], last: _LastLaunch | None
    ) -> None:
        self.device, self.handle, self.launches, self.last = device, handle, launches, last
        self._release = weakref.finalize(self, device.free_graph, handle)
        self._release.atexit = False  # as for buffers

    def launch(self) -> None:
        """Make the launches again, with the arguments that they had; returns at once."""
        self.device.launch_graph(self)


class StreamDevice:
    """A `Device` (see there for the meaning of each method) over a `Driver`, with one stream for all work."""

    def __init__(self, driver: Driver, say: Say, compiler: str = "nvrtc", piece_bytes: int = PIECE_BYTES) -> None:
        self.name = driver.name
        self._driver = driver
        self._say = say
        self._compiler = compiler
        self.peers: tuple[StreamDevice, ...] = ()  # whose memory its kernels may be given besides its own
        self._unusable: str | None = None
        self._is_busy = False  # something was launched that nobody has seen finish
        self._to_free: list[int] = []
        self._spare_events: list[DriverEvent] = []
        self._last: _LastLaunch | None = None
        self._captured: list[Mapping[str, Argument]] | None = None  # arguments of what is being captured
        with self._in_use():
            self._stream = driver.new_stream()
            self._completion = driver.new_event(timing=False)
            self._launched = driver.new_event(timing=False)  # the end of the last launch
            self._met = driver.new_event(timing=False)
            self._staging = Staging(driver, self._stream, self._wait, piece_bytes)
            # What the report of a hang needs exists from the start: allocating may wait for the very launch that hangs.
            self._report_stream = driver.new_stream()
            self._report_event = driver.new_event(timing=False)
            self._report_memory = driver.pinned(REPORT_BYTES)

    # What it is, and what it holds ------------------------------------------------------------------------------------

    def describe(self) -> DeviceInfo:
        with self._in_use():
            return self._driver.describe()

    def load(self, text: str, manifest: Manifest) -> StreamKernel:
        return self.prepare(text, manifest)()

    def prepare(self, text: str, manifest: Manifest) -> Started[StreamKernel]:
        return self.compiling(text, manifest).then(lambda cubin: self.loaded(manifest, cubin))

    def compiling(self, text: str, manifest: Manifest) -> Started[Cubin]:
        """Begins to compile a text, for this GPU and others of its kind."""
        manifest.check_text(text)
        check_machine(manifest, self.describe())
        return started(lambda: compile_cubin(text, manifest.kernel, compiler=self._compiler, progress=self._say))

    def loaded(self, manifest: Manifest, cubin: Cubin) -> StreamKernel:
        """What was compiled, on this GPU."""
        with self._in_use():
            function = self._driver.load(cubin.image, manifest.kernel, manifest.launch.shared_bytes)
            blocks_per_sm = self._driver.blocks_per_sm(function, manifest.launch)
        if blocks_per_sm is not None:
            check_occupancy(manifest, self.describe(), blocks_per_sm)
        return StreamKernel(manifest, function, cubin)

    def allocate(self, nbytes: int, fill: int | None = None) -> StreamBuffer:
        check_size_and_fill(nbytes, fill)
        if self._to_free:
            self.synchronize()
        with self._in_use():
            buffer = StreamBuffer(self, self._allocate(max(nbytes, 1)), nbytes)
        if fill is not None:
            buffer.fill(fill)
        return buffer

    def allocate_mapped(self, nbytes: int) -> StreamMappedBuffer:
        check_size_and_fill(nbytes, None)
        with self._in_use():
            buffer = StreamMappedBuffer(self, self._driver.pinned(max(nbytes, 1))[:nbytes])
        buffer.fill(0)
        return buffer

    def _allocate(self, nbytes: int) -> int:
        try:
            return self._driver.allocate(nbytes)
        except DriverError as error:
            if not error.is_out_of_memory:
                raise
            info = self._driver.describe()
            raise DeviceError(
                f"cannot allocate {_gib(nbytes)} on {info.name}: {_gib(info.free_bytes)} of "
                f"{_gib(info.total_bytes)} are free ({error})"
            ) from None

    def release(self, address: int) -> None:
        """Give back a buffer's memory, for buffers; not once the device is unusable or closed.

        The driver's call waits for the running launch, for ever if that hangs, and cannot be interrupted: so while a
        launch may be running, the memory is kept until `synchronize` has seen it finish.
        """
        if self._unusable is not None:
            return
        self._to_free.append(address)
        if not self._is_busy:
            with self._in_use():
                self._free_all()

    def _free_all(self) -> None:
        while self._to_free:
            self._driver.free(self._to_free.pop())

    # Work, in order ---------------------------------------------------------------------------------------------------

    def upload(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy to the device; for buffers."""
        with self._in_use():
            self._staging.upload(address, data)

    def download(self, target: NDArray[np.uint8], address: int) -> None:
        """Copy from the device; for buffers."""
        with self._in_use():
            self._staging.download(target, address)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Set bytes; for buffers."""
        with self._in_use():
            self._driver.fill(address, byte, nbytes, self._stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy on the device, between addresses; for buffers."""
        if nbytes:
            with self._in_use():
                self._driver.copy_on_device(target, source, nbytes, self._stream)

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[PieceRing]:
        with self._in_use(), self._staging.lend(nbytes) as ring:
            yield ring

    def launch(self, kernel: Any, arguments: Mapping[str, Argument]) -> None:
        self.start(self.readied(kernel, arguments))

    def readied(self, kernel: Any, arguments: Mapping[str, Argument]) -> ReadyLaunch:
        """A launch, checked and not started."""
        if not isinstance(kernel, StreamKernel):
            raise ArgumentError(f"launch takes a kernel that this device loaded, not a {type(kernel).__name__}")
        checked = check_arguments(kernel.manifest, arguments)
        for argument in checked:
            self._check_owner(argument.parameter.name, argument.value)
        return ReadyLaunch(kernel, arguments, checked)

    def start(self, launch: ReadyLaunch) -> None:
        """Starts it; returns at once."""
        kernel = launch.kernel
        with self._in_use():
            self._driver.launch(kernel.function, kernel.manifest.launch, launch.checked, self._stream)
        if self._captured is not None:
            self._captured.append(launch.arguments)
        else:
            self._mark_end()
        self._is_busy = True
        self._last = _LastLaunch.of(kernel.manifest, launch.arguments)

    def mark(self) -> None:
        """What was asked of this device so far is what another one waits for that will `follow` it."""
        with self._in_use():
            self._driver.record(self._met, self._stream)

    def follow(self, other: StreamDevice) -> None:
        """What is asked from now on comes behind what another device was asked for before its `mark`."""
        with self._in_use():
            cast(PeerDriver, self._driver).wait(self._stream, other._met)

    def _mark_end(self) -> None:
        """From now on `is_done` asks for the end of what was launched last."""
        with self._in_use():
            self._driver.record(self._launched, self._stream)

    def capture(self, work: Callable[[], object]) -> StreamGraph:
        """The launches that `work` makes on this device, to be made again together and at once. None is made now.

        `work` launches kernels, no more: copies, events and waiting cannot be recorded. DeviceError says what cannot,
        and where the driver has no graphs: of the devices, cuda alone has.
        """
        if not hasattr(self._driver, "begin_capture"):
            raise DeviceError(f"device {self.name} cannot capture a graph: use device cuda")
        driver = cast(GraphDriver, self._driver)
        with self._in_use():
            driver.begin_capture(self._stream)
            launches = self._captured = list[Mapping[str, Argument]]()
            try:
                work()
            except BaseException:
                with contextlib.suppress(DriverError):  # what `work` raised says more
                    driver.free_graph(driver.end_capture(self._stream))
                raise
            finally:
                self._captured = None
            return StreamGraph(self, driver.end_capture(self._stream), launches, self._last)

    def launch_graph(self, graph: StreamGraph) -> None:
        """For graphs."""
        driver = cast(GraphDriver, self._driver)
        with self._in_use():
            driver.launch_graph(graph.handle, self._stream)
        self._mark_end()
        self._is_busy = True
        self._last = graph.last

    def free_graph(self, handle: Any) -> None:
        """For graphs; nothing once the device is unusable or closed."""
        driver = cast(GraphDriver, self._driver)
        if self._unusable is None:
            with self._in_use():
                driver.free_graph(handle)

    def _check_owner(self, name: str, value: Argument) -> None:
        if isinstance(value, (int, float)) or value is None:
            return
        if getattr(value, "device", None) not in (self, *self.peers):
            raise ArgumentError(f"{name!r}: the buffer belongs to another device")

    def is_done(self) -> bool:
        with self._in_use():
            return not self._is_busy or self._is_done(self._launched)

    def synchronize(
        self, timeout_s: float | None = None, progress: ProgressSource | Callable[[], str] | None = None
    ) -> None:
        if not self.ends_within(timeout_s):
            with self._in_use():
                raise self._timed_out(timeout_s or 0.0, progress)

    def ends_within(self, timeout_s: float | None) -> bool:
        """Wait for all work; False if `timeout_s` seconds pass first."""
        with self._in_use():
            self._driver.record(self._completion, self._stream)
            if not self._happens(self._completion, timeout_s):
                return False
            self._is_busy = False
            self._free_all()
        return True

    def record(self) -> StreamEvent:
        with self._in_use():
            handle = self._spare_events.pop() if self._spare_events else self._driver.new_event(timing=True)
            self._driver.record(handle, self._stream)
        event = StreamEvent(handle)
        weakref.finalize(event, self._spare_events.append, handle).atexit = False
        return event

    def elapsed_ms(self, start: Event, end: Event) -> float:
        if not (isinstance(start, StreamEvent) and isinstance(end, StreamEvent)):
            raise ArgumentError("elapsed_ms takes two events that `record` of this device gave")
        with self._in_use():
            self._wait(end.handle)
            return self._driver.elapsed_ms(start.handle, end.handle)

    def close(self) -> None:
        """Wait for the work and give everything back; after a fault or a timeout only the process's end can do that."""
        if self._unusable is None:
            try:
                self.synchronize()
                self._driver.close()
            finally:
                self._unusable = self._unusable or "it was closed"

    @property
    def unusable(self) -> str | None:
        """Why it cannot be used any more."""
        return self._unusable

    @property
    def last_work(self) -> str:
        """What it was asked for last, in words."""
        return f"kernel {self._last.manifest.kernel}" if self._last else "the device's work"

    def give_up(self, reason: str) -> None:
        """From now on refuse every call, for `reason`; the first reason stands."""
        if self._unusable is None:
            self._unusable = reason
            self._driver.abandon()

    def __enter__(self) -> StreamDevice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._is_busy:  # perhaps the launch hangs: do not keep the error from being seen
            self.give_up(f"it was left by {error!r} while a launch was running")
        self.close()

    # Waiting, faults and hangs ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Around every use of the driver: refuses an unusable device, and notes a fault that makes it so."""
        if self._unusable is not None:
            raise DeviceError(f"this device cannot be used any more: {self._unusable}")
        try:
            with self._driver.current():
                yield
        except DriverError as error:
            if error.is_fault:
                raise self._faulted(error) from None
            raise

    def _faulted(self, error: DriverError) -> DeviceError:
        during = f"kernel {self._last.manifest.kernel} faulted: " if self._last else ""
        self.give_up(f"{during}{error}")
        return DeviceError(f"{during}{error}; what the device held is lost, start a new process")

    def _wait(self, event: DriverEvent) -> None:
        self._happens(event, None)

    def _happens(self, event: DriverEvent, timeout_s: float | None) -> bool:
        """Wait until `event` has happened, by asking (so that Ctrl-C works); False if `timeout_s` passes first."""
        started = time.monotonic()
        while not self._is_done(event):
            waited = time.monotonic() - started
            if timeout_s is not None and waited > timeout_s:
                return False
            if waited > SPIN_SECONDS:
                time.sleep(min(waited / 500, LONGEST_SLEEP_SECONDS))  # late by at most 2 per mille, and a timer's slack
        return True

    def _is_done(self, event: DriverEvent) -> bool:
        try:
            return self._driver.is_done(event)
        except DriverError as error:
            # An event is asked about valid handles only: whatever comes back is the fault of work before it.
            raise self._faulted(error) from None

    def _timed_out(self, timeout_s: float, source: ProgressSource | Callable[[], str] | None) -> LaunchTimeout:
        values, report = self.progress_report(source)
        what = self.last_work
        self.give_up(f"{what} did not finish within {timeout_s:g} s and may still be running")
        return LaunchTimeout(f"{what} did not finish within {timeout_s:g} s; {report}", values)

    def progress_report(self, source: ProgressSource | Callable[[], str] | None) -> tuple[tuple[int, ...] | None, str]:
        """How far each block of the last launch is, as numbers where they could be read, and in words."""
        if source is None and self._last is not None:
            source = self._last.progress
        if source is None:
            return None, "it reports no progress"
        if not isinstance(source, ProgressSource):
            return None, source()
        try:
            with self._in_use():
                values = self._read_progress(source)
        except DeviceError as error:
            return None, f"its progress could not be read: {error}"
        if values is None:
            return None, f"its progress could not be read: the copy took more than {REPORT_SECONDS:g} s"
        return values, describe_progress(values, source.phases)

    def _read_progress(self, source: ProgressSource) -> tuple[int, ...] | None:
        """The progress words by a copy on another stream, which does not wait for the launch; None if it hangs too."""
        blocks = self._last.manifest.launch.blocks if self._last else source.buffer.nbytes // 4
        target = self._report_memory[: 4 * min(blocks, source.buffer.nbytes // 4, REPORT_BYTES // 4)]
        self._driver.copy_to_host(target, source.buffer.address, self._report_stream)
        self._driver.record(self._report_event, self._report_stream)
        if not self._happens(self._report_event, REPORT_SECONDS):
            return None
        return tuple(int(value) for value in target.view(np.uint32))


@dataclass(frozen=True)
class _LastLaunch:
    manifest: Manifest
    progress: ProgressSource | None

    @classmethod
    def of(cls, manifest: Manifest, arguments: Mapping[str, Argument]) -> _LastLaunch:
        buffer = arguments.get("progress")
        if buffer is None or isinstance(buffer, (int, float)):
            return cls(manifest, None)
        return cls(manifest, ProgressSource(buffer, manifest.phases))


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**24 else f"{nbytes} bytes"
