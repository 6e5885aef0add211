"""The few calls to a CUDA driver that `StreamDevice` is built on: two bindings (and a fake in tests) provide them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cheetah.manifest import Launch
from cheetah.runtime.device.arguments import CheckedArgument
from cheetah.runtime.device.interface import DeviceError, DeviceInfo

Stream = Any
DriverEvent = Any
Function = Any
GraphHandle = Any


class DriverError(DeviceError):
    """A call that the driver refused. is_fault: nothing on the device works any more, whatever the call was."""

    def __init__(self, call: str, text: str, is_fault: bool = False, is_out_of_memory: bool = False) -> None:
        super().__init__(f"{call} failed: {text}")
        self.is_fault = is_fault
        self.is_out_of_memory = is_out_of_memory


class Driver(Protocol):
    """One GPU through one binding. Addresses are ints; every method raises DriverError with the driver's own text."""

    name: str

    def describe(self) -> DeviceInfo:
        """What the GPU is and has."""

    def current(self) -> AbstractContextManager[None]:
        """Around calls: the GPU's context is that of the calling thread, and afterwards again what it was before."""

    def new_stream(self) -> Stream:
        """A stream that waits for no other stream."""

    def new_event(self, timing: bool) -> DriverEvent:
        """An event, with or without a time stamp."""

    def record(self, event: DriverEvent, stream: Stream) -> None:
        """Have `event` happen when the stream's work so far is done."""

    def is_done(self, event: DriverEvent) -> bool:
        """Has it happened? Does not wait. Raises DriverError if a launch before it has faulted."""

    def elapsed_ms(self, start: DriverEvent, end: DriverEvent) -> float:
        """Between two timing events that have happened."""

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory that copies can use without staging, kept until `unpin` or `close`. May wait for the GPU."""

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        """Give back what `pinned` gave. May wait for the GPU."""

    def allocate(self, nbytes: int) -> int:
        """Device memory (never managed memory), 256-byte aligned."""

    def free(self, address: int) -> None:
        """Give back what `allocate` gave. May wait for the GPU."""

    def fill(self, address: int, byte: int, nbytes: int, stream: Stream) -> None:
        """Set bytes, in the stream's order."""

    def copy_to_device(self, address: int, source: NDArray[np.uint8], stream: Stream) -> None:
        """Copy from pinned memory, in the stream's order."""

    def copy_to_host(self, target: NDArray[np.uint8], address: int, stream: Stream) -> None:
        """Copy to pinned memory, in the stream's order."""

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy at least one byte between two addresses, in the stream's order."""

    def load(self, image: bytes, kernel: str, shared_bytes: int) -> Function:
        """The kernel of a cubin, allowed so many bytes of dynamic shared memory."""

    def blocks_per_sm(self, function: Function, launch: Launch) -> int | None:
        """How many blocks an SM holds, or None where the binding cannot tell."""

    def launch(self, function: Function, launch: Launch, arguments: list[CheckedArgument], stream: Stream) -> None:
        """Start the kernel; returns at once."""

    def abandon(self) -> None:
        """Never touch the GPU again, not even when the process ends: a launch may hang, and what waits for it too."""

    def close(self) -> None:
        """Give back streams, events, pinned memory, modules and the context."""


class GraphDriver(Driver, Protocol):
    """A driver that can also record launches and start them again together. Of the bindings, cuda-bindings alone."""

    def begin_capture(self, stream: Stream) -> None:
        """From now on the stream's work is recorded, not done."""

    def end_capture(self, stream: Stream) -> GraphHandle:
        """The recorded work, ready to be launched; DriverError if something in it cannot be recorded."""

    def launch_graph(self, graph: GraphHandle, stream: Stream) -> None:
        """Start the recorded work; returns at once."""

    def free_graph(self, graph: GraphHandle) -> None:
        """Give it back."""


class PeerDriver(Driver, Protocol):
    """A driver of one of several GPUs that launch together. Of the bindings, cuda-bindings alone."""

    def wait(self, stream: Stream, event: DriverEvent) -> None:
        """Have what comes next in the stream wait for what was recorded as `event`, of this GPU or another."""
