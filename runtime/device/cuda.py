"""The CUDA driver through cuda-bindings: the usual way onto a GPU. Launches are cooperative.

libcuda comes with the GPU's driver and is loaded at the first call, so this module can be imported without one.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.extras import installing
from cheetah.manifest import Launch
from cheetah.runtime.device.arguments import CheckedArgument, as_ctypes
from cheetah.runtime.device.driver import DriverError
from cheetah.runtime.device.group import StreamGroup, require_alike
from cheetah.runtime.device.interface import DeviceError, DeviceInfo, Say
from cheetah.runtime.device.stream_device import StreamDevice

# After one of these every call on the context answers the same; only a new process helps.
_FAULTS = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT",
        "CONTAINED",
        "CONTEXT_IS_DESTROYED",
        "ECC_UNCORRECTABLE",
        "EXTERNAL_DEVICE",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_ADDRESS",
        "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "MISALIGNED_ADDRESS",
        "NVLINK_UNCORRECTABLE",
        "TENSOR_MEMORY_LEAK",
    )
)


def open_cuda(say: Say, ordinal: int = 0, compiler: str = "nvrtc") -> StreamDevice:
    """The GPU number `ordinal` as a device; DeviceError says what is missing."""
    return StreamDevice(CudaDriver(load_api(), ordinal), say, compiler)


def open_cuda_group(say: Say, ordinals: Sequence[int], compiler: str = "nvrtc") -> StreamGroup:
    """GPUs whose kernels reach one another's memory, as one device; DeviceError says what is missing."""
    api = load_api()
    count = checked(api, "cuDeviceGetCount")
    if max(ordinals) >= count:
        raise DeviceError(
            f"{len(set(ordinals))} GPUs are asked for ({', '.join(map(str, ordinals))}): here are {count}"
        )
    _require_peers(api, ordinals)
    drivers = [CudaDriver(api, ordinal) for ordinal in ordinals]
    for driver in drivers:
        for other in drivers:
            driver.enable_peer(other)
    devices = [StreamDevice(driver, say, compiler) for driver in drivers]
    require_alike([device.describe() for device in devices], ordinals)
    return StreamGroup(devices, ordinals)


def _require_peers(api: Any, ordinals: Sequence[int]) -> None:
    """DeviceError unless each of the GPUs can reach the memory of each other."""
    devices = {ordinal: checked(api, "cuDeviceGet", ordinal) for ordinal in ordinals}
    for one, other in permutations(devices, 2):
        if not checked(api, "cuDeviceCanAccessPeer", devices[one], devices[other]):
            raise DeviceError(
                f"GPU {one} cannot reach the memory of GPU {other}: GPUs that make steps together are joined by "
                "NVLink or one PCIe switch"
            )


def why_not_cuda() -> str | None:
    """Why cuda cannot run our kernels here, in a few words, or None if it can."""
    try:
        api = load_api()
        device = checked(api, "cuDeviceGet", 0)
        arch, name = _arch(api, device), _name(api, device)
    except DeviceError as error:
        return str(error)
    return None if arch == "sm_90" else f"{name} is {arch}, the kernels need sm_90 (H100, H200)"


def load_api() -> Any:
    """cuda.bindings.driver, with the driver initialised; DeviceError if package, driver or GPU is missing."""
    try:
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        fix = f"install it with: {installing('cuda')}"
        raise DeviceError(f"the package cuda-bindings is missing ({error}): {fix}") from None
    try:
        checked(api, "cuInit", 0)
    except RuntimeError as error:  # the bindings' way to say that libcuda cannot be loaded
        raise DeviceError(f"no NVIDIA driver here ({error})") from None
    if checked(api, "cuDeviceGetCount") == 0:
        raise DeviceError("the NVIDIA driver sees no GPU")
    return api


def checked(api: Any, call: str, *arguments: Any) -> Any:
    """The call's result, a tuple if it has several; DriverError with the driver's name and text of the error."""
    status, *results = getattr(api, call)(*arguments)
    if status != api.CUresult.CUDA_SUCCESS:
        raise _driver_error(api, call, status)
    return results[0] if len(results) == 1 else tuple(results)


def _driver_error(api: Any, call: str, status: Any) -> DriverError:
    name = _text(api.cuGetErrorName(status), f"error {int(status)}")
    text = _text(api.cuGetErrorString(status), "no text")
    return DriverError(
        call, f"{name}: {text}", is_fault=name in _FAULTS, is_out_of_memory=name == "CUDA_ERROR_OUT_OF_MEMORY"
    )


def _text(answer: tuple[Any, Any], otherwise: str) -> str:
    return answer[1].decode(errors="replace") if answer[1] else otherwise


class CudaDriver:
    """A `Driver` (see there) over the functions of cuda.bindings.driver, in the GPU's primary context."""

    name = "cuda"

    def __init__(self, api: Any, ordinal: int) -> None:
        self._api = api
        self._device = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._pinned: list[int] = []
        self._modules: list[Any] = []
        self._streams: list[Any] = []

    def _call(self, call: str, *arguments: Any) -> Any:
        return checked(self._api, call, *arguments)

    def enable_peer(self, other: CudaDriver) -> None:
        """From now on kernels here reach the other GPU's memory."""
        if int(self._device) == int(other._device):
            return
        with self.current():
            (status,) = self._api.cuCtxEnablePeerAccess(other._context, 0)
        already = self._api.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
        if status not in (self._api.CUresult.CUDA_SUCCESS, already):
            raise _driver_error(self._api, "cuCtxEnablePeerAccess", status)

    def describe(self) -> DeviceInfo:
        free, total = self._call("cuMemGetInfo")
        return DeviceInfo(
            backend=self.name,
            name=_name(self._api, self._device),
            arch=_arch(self._api, self._device),
            blocks=_attribute(self._api, self._device, "MULTIPROCESSOR_COUNT"),
            shared_bytes=_attribute(self._api, self._device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            total_bytes=int(total),
            free_bytes=int(free),
            driver=describe_driver(int(self._call("cuDriverGetVersion"))),
        )

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._api.cuCtxPopCurrent()  # its status is nothing beside an error of the calls within

    def new_stream(self) -> Any:
        # Non-blocking: work on the default stream, ours or another library's, does not order itself against this one.
        stream = self._call("cuStreamCreate", self._api.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
        self._streams.append(stream)
        return stream

    def new_event(self, timing: bool) -> Any:
        flags = self._api.CUevent_flags
        return self._call("cuEventCreate", (flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING).value)

    def record(self, event: Any, stream: Any) -> None:
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: Any, event: Any) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def is_done(self, event: Any) -> bool:
        (status,) = self._api.cuEventQuery(event)
        if status == self._api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if status != self._api.CUresult.CUDA_SUCCESS:
            raise _driver_error(self._api, "cuEventQuery", status)
        return True

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return float(self._call("cuEventElapsedTime", start, end))

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        address = int(self._call("cuMemHostAlloc", nbytes, 0))
        self._pinned.append(address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        self._pinned.remove(int(memory.ctypes.data))
        self._call("cuMemFreeHost", int(memory.ctypes.data))

    def allocate(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def fill(self, address: int, byte: int, nbytes: int, stream: Any) -> None:
        self._call("cuMemsetD8Async", address, byte, nbytes, stream)

    def copy_to_device(self, address: int, source: NDArray[np.uint8], stream: Any) -> None:
        self._call("cuMemcpyHtoDAsync", address, source.ctypes.data, source.nbytes, stream)

    def copy_to_host(self, target: NDArray[np.uint8], address: int, stream: Any) -> None:
        self._call("cuMemcpyDtoHAsync", target.ctypes.data, address, target.nbytes, stream)

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._call("cuMemcpyDtoDAsync", target, source, nbytes, stream)

    def load(self, image: bytes, kernel: str, shared_bytes: int) -> Any:
        module = self._call("cuModuleLoadData", image)
        self._modules.append(module)
        function = self._call("cuModuleGetFunction", module, kernel.encode())
        attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", function, attribute, shared_bytes)
        return function

    def blocks_per_sm(self, function: Any, launch: Launch) -> int:
        call = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(self._call(call, function, launch.threads, launch.shared_bytes))

    def launch(self, function: Any, launch: Launch, arguments: list[CheckedArgument], stream: Any) -> None:
        values = as_ctypes(arguments)  # must outlive the call: the driver copies them during it
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        shape = (launch.blocks, 1, 1, launch.threads, 1, 1, launch.shared_bytes, stream, ctypes.addressof(pointers))
        if launch.cooperative:
            # The driver itself refuses a grid whose blocks are not all resident at once.
            self._call("cuLaunchCooperativeKernel", function, *shape)
        else:
            self._call("cuLaunchKernel", function, *shape, 0)

    def begin_capture(self, stream: Any) -> None:
        # Thread-local: what other threads do with the driver meanwhile is none of this capture's business.
        self._call("cuStreamBeginCapture", stream, self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

    def end_capture(self, stream: Any) -> Any:
        recorded = self._call("cuStreamEndCapture", stream)
        try:
            return self._call("cuGraphInstantiate", recorded, 0)
        finally:
            self._api.cuGraphDestroy(recorded)  # its status is nothing beside an error of the call before

    def launch_graph(self, graph: Any, stream: Any) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def free_graph(self, graph: Any) -> None:
        self._call("cuGraphExecDestroy", graph)

    def abandon(self) -> None:
        """Nothing to do: these bindings free nothing by themselves."""

    def close(self) -> None:
        with self.current():
            for module in self._modules:
                self._call("cuModuleUnload", module)
            for stream in self._streams:
                self._call("cuStreamDestroy", stream)
            for address in self._pinned:
                self._call("cuMemFreeHost", address)
        self._call("cuDevicePrimaryCtxRelease", self._device)


def describe_driver(version: int) -> str:
    """Such as "driver 580.159.04, CUDA 13.0", from cuDriverGetVersion's 13000 and, where there, the module."""
    cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
    try:
        return f"driver {Path('/sys/module/nvidia/version').read_text().strip()}, {cuda}"
    except OSError:
        return cuda


def _attribute(api: Any, device: Any, name: str) -> int:
    attribute = getattr(api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(checked(api, "cuDeviceGetAttribute", attribute, device))


def _arch(api: Any, device: Any) -> str:
    major = _attribute(api, device, "COMPUTE_CAPABILITY_MAJOR")
    return f"sm_{major}{_attribute(api, device, 'COMPUTE_CAPABILITY_MINOR')}"


def _name(api: Any, device: Any) -> str:
    name: bytes = checked(api, "cuDeviceGetName", 128, device)
    return name.partition(b"\0")[0].decode(errors="replace")  # what follows the terminator is whatever was there
