"""The CUDA driver through PyCUDA, for programs that use it already.

PyCUDA has no cooperative launch. The kernel's blocks are still all resident at once, because the grid has at most one
block an SM (checked when the kernel is loaded) and each block asks for more than half of an SM's shared memory (so that
every block gets an SM of its own), **as long as nothing else runs on the GPU**: another kernel can keep an SM, and then
the launch hangs until its time limit. On a GPU that is shared, use `cuda`.

Only the thread that opened it can use it: PyCUDA keeps a stack of contexts for each thread, and refuses to destroy or
free from another one what it made in this.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cheetah.extras import installing
from cheetah.manifest import Launch
from cheetah.runtime.device.arguments import CheckedArgument
from cheetah.runtime.device.cuda import describe_driver
from cheetah.runtime.device.driver import DriverError
from cheetah.runtime.device.interface import DeviceError, DeviceInfo, Say
from cheetah.runtime.device.stream_device import StreamDevice

Result = TypeVar("Result")

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING; PyCUDA passes flags through and names none

# cuGetErrorString of what leaves a context unusable: PyCUDA gives no error names, and its classes mix these up.
_FAULTS = frozenset(
    (
        "an illegal instruction was encountered",
        "an illegal memory access was encountered",
        "device-side assert triggered",
        "hardware stack error",
        "invalid program counter",
        "misaligned address",
        "operation not supported on global/shared address space",
        "the launch timed out and was terminated",
        "uncorrectable ECC error encountered",
        "unspecified launch failure",
    )
)
_SCALARS = {"u8": np.uint8, "u32": np.uint32, "i32": np.int32, "u64": np.uint64, "f32": np.float32}


def open_pycuda(say: Say, ordinal: int = 0, compiler: str = "nvrtc") -> StreamDevice:
    """The GPU number `ordinal` as a device; DeviceError says what is missing."""
    try:
        api = importlib.import_module("pycuda.driver")
    except ImportError as error:
        fix = f"install it with: {installing('pycuda')} (built from source: it needs the CUDA toolkit)"
        raise DeviceError(f"PyCUDA cannot be imported ({error}): {fix}") from None
    return StreamDevice(PyCudaDriver(api, ordinal), say, compiler)


class PyCudaDriver:
    """A `Driver` (see there) over pycuda.driver, in the GPU's primary context."""

    name = "pycuda"

    def __init__(self, api: Any, ordinal: int) -> None:
        self._api = api
        self._call("cuInit", api.init)
        self._device = self._call("cuDeviceGet", lambda: api.Device(ordinal))
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device.retain_primary_context)
        self._context.push()
        self._thread = threading.get_ident()
        self._allocations: dict[int, Any] = {}
        self._modules: list[Any] = []
        self._pinned: list[Any] = []
        # PyCUDA aborts a process that ends with a context on its stack.
        atexit.register(self._pop)

    def _call(self, name: str, function: Callable[[], Result]) -> Result:
        try:
            return function()
        except self._api.Error as error:
            raise self._driver_error(name, error) from None

    def _driver_error(self, name: str, error: Exception) -> DriverError:
        # PyCUDA's text is "cuXyz failed: text": the name given here stands in where it has another form.
        call, found, text = str(error).partition(" failed: ")
        is_out_of_memory = isinstance(error, self._api.MemoryError)
        text = text if found else str(error)
        return DriverError(call if found else name, text, text in _FAULTS, is_out_of_memory)

    def describe(self) -> DeviceInfo:
        free, total = self._call("cuMemGetInfo", self._api.mem_get_info)
        major, minor = self._device.compute_capability()
        return DeviceInfo(
            backend=self.name,
            name=self._device.name(),
            arch=f"sm_{major}{minor}",
            blocks=self._attribute("MULTIPROCESSOR_COUNT"),
            shared_bytes=self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            total_bytes=int(total),
            free_bytes=int(free),
            driver=describe_driver(int(self._api.get_driver_version())),
        )

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._api.device_attribute, name)
        return int(self._call("cuDeviceGetAttribute", lambda: self._device.get_attribute(attribute)))

    def current(self) -> AbstractContextManager[None]:
        """Nothing to do: the context stays on the stack of the thread that opened the device. DeviceError else."""
        if threading.get_ident() != self._thread:
            raise DeviceError(
                "device pycuda can be used from the thread that opened it only: use device cuda for several threads"
            )
        return nullcontext()

    def new_stream(self) -> Any:
        return self._call("cuStreamCreate", lambda: self._api.Stream(NON_BLOCKING))

    def new_event(self, timing: bool) -> Any:
        flags = 0 if timing else self._api.event_flags.DISABLE_TIMING
        return self._call("cuEventCreate", lambda: self._api.Event(flags))

    def record(self, event: Any, stream: Any) -> None:
        self._call("cuEventRecord", lambda: event.record(stream))

    def is_done(self, event: Any) -> bool:
        return bool(self._call("cuEventQuery", event.query))

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return float(self._call("cuEventElapsedTime", lambda: end.time_since(start)))

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        memory: NDArray[np.uint8] = self._call("cuMemHostAlloc", lambda: self._api.pagelocked_empty(nbytes, np.uint8))
        self._pinned.append(memory)
        return memory

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        # PyCUDA frees what nobody holds; arrays compare by element, so they are told apart by identity.
        self._pinned = [kept for kept in self._pinned if kept is not memory]

    def allocate(self, nbytes: int) -> int:
        allocation = self._call("cuMemAlloc", lambda: self._api.mem_alloc(nbytes))
        self._allocations[int(allocation)] = allocation  # PyCUDA frees what nobody holds
        return int(allocation)

    def free(self, address: int) -> None:
        self._call("cuMemFree", self._allocations.pop(address).free)

    def fill(self, address: int, byte: int, nbytes: int, stream: Any) -> None:
        self._call("cuMemsetD8Async", lambda: self._api.memset_d8_async(address, byte, nbytes, stream))

    def copy_to_device(self, address: int, source: NDArray[np.uint8], stream: Any) -> None:
        self._call("cuMemcpyHtoDAsync", lambda: self._api.memcpy_htod_async(address, source, stream))

    def copy_to_host(self, target: NDArray[np.uint8], address: int, stream: Any) -> None:
        self._call("cuMemcpyDtoHAsync", lambda: self._api.memcpy_dtoh_async(target, address, stream))

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._call("cuMemcpyDtoDAsync", lambda: self._api.memcpy_dtod_async(target, source, nbytes, stream))

    def load(self, image: bytes, kernel: str, shared_bytes: int) -> Any:
        module = self._call("cuModuleLoadDataEx", lambda: self._api.module_from_buffer(image))
        self._modules.append(module)
        function = self._call("cuModuleGetFunction", lambda: module.get_function(kernel))
        attribute = self._api.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        shared_bytes = max(shared_bytes, self._own_sm_bytes())
        self._call("cuFuncSetAttribute", lambda: function.set_attribute(attribute, shared_bytes))
        return function

    def _own_sm_bytes(self) -> int:
        """Dynamic shared memory of a block that no second block fits beside."""
        return self._attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") // 2

    def blocks_per_sm(self, function: Any, launch: Launch) -> None:
        """PyCUDA cannot tell; the launch itself fails if a block does not fit."""
        return None

    def launch(self, function: Any, launch: Launch, arguments: list[CheckedArgument], stream: Any) -> None:
        values = [_as_numpy(argument) for argument in arguments]
        shared_bytes = max(launch.shared_bytes, self._own_sm_bytes()) if launch.cooperative else launch.shared_bytes
        shape: dict[str, Any] = {"grid": (launch.blocks, 1), "block": (launch.threads, 1, 1), "shared": shared_bytes}
        self._call("cuLaunchKernel", lambda: function(*values, stream=stream, **shape))

    def abandon(self) -> None:
        # PyCUDA's objects free themselves when they are collected, at the latest when Python ends, and the driver
        # makes that wait for the running launch. One reference that nobody gives back keeps them from it.
        for kept in (self._context, self._allocations, self._modules, self._pinned):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def close(self) -> None:
        for allocation in self._allocations.values():
            self._call("cuMemFree", allocation.free)
        self._allocations.clear()
        self._modules.clear()
        self._pinned.clear()
        atexit.unregister(self._pop)
        self._pop()
        self._context = None

    def _pop(self) -> None:
        self._context.pop()


def _as_numpy(argument: CheckedArgument) -> Any:
    """A numpy scalar of the parameter's size: PyCUDA packs arguments by the types they have."""
    if argument.parameter.kind == "scalar":
        return _SCALARS[argument.parameter.dtype](argument.value)
    buffer: Any = argument.value
    return np.uintp(0 if buffer is None else buffer.address)
