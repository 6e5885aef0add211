"""What a device is: a place that holds buffers and runs a kernel. Protocols, data and errors; no implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cheetah.errors import CheetahError
from cheetah.manifest import Manifest
from cheetah.piece_ring import PieceRing
from cheetah.runtime.background import Started

Say = Callable[[str], None]
"""Takes one line for the user: what is being compiled, which device was chosen and why."""


class DeviceError(CheetahError):
    """A device that is not there, cannot run the kernel, or failed; a driver's error is quoted with its call."""


class ArgumentError(DeviceError):
    """Arguments of a launch, a buffer or a copy that do not fit; the message names the parameter and the sizes."""


class LaunchTimeout(DeviceError):
    """A launch that did not finish in time. progress: what each block had reported, where that could be read."""

    def __init__(self, message: str, progress: tuple[int, ...] | None = None) -> None:
        super().__init__(message)
        self.progress = progress


class LaunchCancelled(DeviceError):
    """A launch that was ended early for an interrupt that waits (`runtime.interrupts`): what it writes is half written.
    The device is none the worse."""


@dataclass(frozen=True)
class DeviceInfo:
    """What a device is and has now.

    backend: "cuda", "pycuda" or "emulator". name: of the GPU. arch: e.g. "sm_90". blocks: SMs, each of which holds one
    block of our kernels. shared_bytes: the most that one block can use. driver: versions, as text. ranks: of several
    GPUs that launch together, how many; all else is what each has. parts: how many of them share a GPU.
    """

    backend: str
    name: str
    arch: str
    blocks: int
    shared_bytes: int
    total_bytes: int
    free_bytes: int
    driver: str
    ranks: int = 1
    parts: int = 1


class Buffer(Protocol):
    """Bytes on a device, 256-byte aligned. Freed by `free`, and at the latest when nothing refers to it any more."""

    @property
    def nbytes(self) -> int:
        """Its size as it was asked for."""

    @property
    def address(self) -> int:
        """Where it lies on the device; ArgumentError once it is freed."""

    def upload(self, array: NDArray[Any], offset: int = 0) -> None:
        """Copy the array's bytes to byte `offset`, after the launches so far. The array may be reused on return."""

    def download(self, dtype: DTypeLike, shape: int | tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        """A new array of the bytes from byte `offset` on, after the launches so far have finished.

        It waits for them without limit: `Device.synchronize(timeout_s)` before it sets one.
        """

    def fill(self, byte: int) -> None:
        """Set every byte, after the launches so far. 0xFF makes NaN in bf16 and f32."""

    def copy(self, source_offset: int, target_offset: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from one place in it to another, after the launches so far and before the next.

        ArgumentError if a range is outside the buffer or the two overlap. A GPU may be still at it on return.
        """

    def copy_of(self, source: Buffer, source_offset: int, target_offset: int, nbytes: int) -> None:
        """The same of another buffer of the device, to a place in this one."""

    def free(self) -> None:
        """Give the memory back; a second call does nothing."""


class MappedBuffer(Buffer, Protocol):
    """A buffer that lies in the host's memory. A copy from it or to it does not wait for launches."""

    @property
    def array(self) -> NDArray[np.uint8]:
        """Its bytes, as launches see them."""


class Kernel(Protocol):
    """A loaded kernel."""

    @property
    def manifest(self) -> Manifest:
        """The manifest it was loaded with."""


class Event(Protocol):
    """A point in the order of a device's work; made by `Device.record`."""


Argument = Buffer | int | float | None


@dataclass(frozen=True)
class ProgressSource:
    """Where a launch reports how far it is: a u32 for each block, progress[block] = step * len(phases) + phase."""

    buffer: Buffer
    phases: tuple[str, ...]


class Device(Protocol):
    """Runs kernels one after another, in the order of the calls. Use it from one thread at a time.

    After a fault or a timeout in a launch nothing that the device holds can be trusted: every later call raises
    DeviceError with the reason, and a new process is needed (the emulator: a new device).

    Ctrl-C while a launch runs loses nothing but what that launch writes. A GPU goes on with it, and what is asked of
    the device afterwards comes after it; the emulator ends it, with the KeyboardInterrupt, or with LaunchCancelled if
    that waits.
    """

    name: str

    def describe(self) -> DeviceInfo:
        """What the device is, with the memory that is free now."""

    def load(self, text: str, manifest: Manifest) -> Kernel:
        """Compile `text` (through the cache) and load it. DeviceError if its blocks cannot all run at once."""

    def prepare(self, text: str, manifest: Manifest) -> Started[Kernel]:
        """Begin to compile `text` in a thread of its own; what is given back does the rest of `load`, once."""

    def allocate(self, nbytes: int, fill: int | None = None) -> Buffer:
        """A buffer of `nbytes`, each byte set to `fill` if given. DeviceError tells what is free if too little is."""

    def allocate_mapped(self, nbytes: int) -> MappedBuffer:
        """A zeroed buffer in the host's memory that launches can read and write while the host does too."""

    def lend(self, nbytes: int) -> AbstractContextManager[PieceRing]:
        """A ring of host memory from whose pieces uploads of this device need no copy on the host. A piece may be given
        back once it is uploaded, as if the upload were done."""

    def launch(self, kernel: Kernel, arguments: Mapping[str, Argument]) -> None:
        """Start the kernel with `arguments` by parameter name, checked against the manifest; returns at once."""

    def synchronize(
        self, timeout_s: float | None = None, progress: ProgressSource | Callable[[], str] | None = None
    ) -> None:
        """Wait for all work. After `timeout_s` seconds raise LaunchTimeout that says how far each block is.

        progress: where to read that, or a function that tells it; by default the argument called "progress" of the last
        launch, with its manifest's phases.
        """

    def is_done(self) -> bool:
        """Whether all work so far has been done. Does not wait; raises what a launch has failed with."""

    def record(self) -> Event:
        """Mark this point in the order of work."""

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Milliseconds from one recorded point to a later one; waits for the later one."""

    def close(self) -> None:
        """Free everything. The device and its buffers cannot be used afterwards."""

    def __enter__(self) -> Device: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of any array, in its C order, as a flat uint8 array (a view where the array is contiguous)."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def check_range(what: str, offset: int, nbytes: int, available: int) -> None:
    """ArgumentError unless bytes [offset, offset + nbytes) lie in a buffer of `available` bytes."""
    if offset < 0 or offset + nbytes > available:
        raise ArgumentError(f"{what} of bytes {offset} to {offset + nbytes} is outside a buffer of {available} bytes")


def check_copy(source_offset: int, target_offset: int, nbytes: int, available: int) -> None:
    """ArgumentError unless both ranges of a copy within a buffer of `available` bytes lie in it, and are apart."""
    if nbytes < 0:
        raise ArgumentError(f"cannot copy {nbytes} bytes")
    check_range("copy", source_offset, nbytes, available)
    check_range("copy to the place", target_offset, nbytes, available)
    if abs(source_offset - target_offset) < nbytes:
        ranges = f"{source_offset} to {source_offset + nbytes} over {target_offset} to {target_offset + nbytes}"
        raise ArgumentError(f"copy of bytes {ranges}: the two overlap, copy in pieces")


def check_size_and_fill(nbytes: int, fill: int | None) -> None:
    """ArgumentError for a size or a fill byte that no buffer can have."""
    if nbytes < 0:
        raise ArgumentError(f"cannot allocate {nbytes} bytes")
    if fill is not None and not 0 <= fill <= 255:
        raise ArgumentError(f"fill must be a byte from 0 to 255, not {fill}")
