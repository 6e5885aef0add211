"""The two bindings behind StreamDevice, as far as they can be tried without a GPU: calls, errors, arguments, choice."""

from __future__ import annotations

import ctypes
import enum
import importlib
import importlib.util
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cheetah.manifest import Launch, Parameter
from cheetah.runtime.device import DeviceError, open_device
from cheetah.runtime.device import cuda as cuda_module
from cheetah.runtime.device import pycuda as pycuda_module
from cheetah.runtime.device.arguments import CheckedArgument
from cheetah.runtime.device.cuda import CudaDriver, describe_driver, why_not_cuda
from cheetah.runtime.device.driver import DriverError
from cheetah.runtime.device.pycuda import PyCudaDriver

LAUNCH = Launch(blocks=4, threads=64, shared_bytes=1000)
ARGUMENTS = [
    CheckedArgument(Parameter("n", "uint32_t", "scalar", "u32", False, None, ""), 7),
    CheckedArgument(Parameter("x", "float*", "pointer", "f32", True, None, "", nullable=True), None),
    CheckedArgument(Parameter("seed", "uint64_t", "scalar", "u64", False, None, ""), 2**63 + 1),
    CheckedArgument(Parameter("t", "float", "scalar", "f32", False, None, ""), 0.5),
]


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class FakeApi:
    """Answers like cuda.bindings.driver: a tuple that begins with the status. Notes the calls."""

    CUresult = Result

    def __init__(self, **answers: tuple[Any, ...]) -> None:
        self.answers = answers
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def cuGetErrorName(self, status: Result) -> tuple[Any, Any]:  # noqa: N802
        return Result.CUDA_SUCCESS, status.name.encode()

    def cuGetErrorString(self, status: Result) -> tuple[Any, Any]:  # noqa: N802
        return Result.CUDA_SUCCESS, b"as the driver words it"

    def __getattr__(self, call: str) -> Any:
        def answer(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((call, arguments))
            return self.answers.get(call, (Result.CUDA_SUCCESS, 1))

        return answer


def test_errors_carry_the_call_and_the_drivers_words() -> None:
    driver = CudaDriver(FakeApi(cuMemAlloc=(Result.CUDA_ERROR_OUT_OF_MEMORY, None)), 0)
    with pytest.raises(DriverError) as caught:
        driver.allocate(100)
    assert str(caught.value) == "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY: as the driver words it"
    assert caught.value.is_out_of_memory and not caught.value.is_fault


def test_a_name_ends_at_its_first_nul() -> None:
    name = b"NVIDIA H200\0left over\0"
    assert cuda_module._name(FakeApi(cuDeviceGetName=(Result.CUDA_SUCCESS, name)), 0) == "NVIDIA H200"


def test_an_event_that_is_not_ready_is_no_error_and_a_fault_is() -> None:
    assert not CudaDriver(FakeApi(cuEventQuery=(Result.CUDA_ERROR_NOT_READY,)), 0).is_done(1)
    assert CudaDriver(FakeApi(cuEventQuery=(Result.CUDA_SUCCESS,)), 0).is_done(1)
    with pytest.raises(DriverError, match="cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        CudaDriver(FakeApi(cuEventQuery=(Result.CUDA_ERROR_ILLEGAL_ADDRESS,)), 0).is_done(1)
    assert caught.value.is_fault


def test_a_launch_passes_pointers_to_values_of_the_right_size() -> None:
    seen: list[Any] = []

    class Api(FakeApi):
        def cuLaunchCooperativeKernel(self, *arguments: Any) -> tuple[Any, ...]:  # noqa: N802
            pointers = (ctypes.c_void_p * 4).from_address(arguments[-1])
            kinds: tuple[Any, ...] = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_float)
            seen.extend(kind.from_address(pointer).value for kind, pointer in zip(kinds, pointers, strict=True))
            seen.append(arguments[:-1])
            return (Result.CUDA_SUCCESS,)

    CudaDriver(Api(), 0).launch("function", LAUNCH, ARGUMENTS, "stream")
    assert seen == [7, None, 2**63 + 1, 0.5, ("function", 4, 1, 1, 64, 1, 1, 1000, "stream")]


def test_the_threads_context_is_put_back_after_every_call() -> None:
    api = FakeApi()
    with pytest.raises(KeyError), CudaDriver(api, 0).current():
        raise KeyError
    assert [call for call, _ in api.calls if "Ctx" in call][1:] == ["cuCtxPushCurrent", "cuCtxPopCurrent"]


def test_a_copy_on_the_device_names_its_target_first() -> None:
    api = FakeApi()
    CudaDriver(api, 0).copy_on_device(256, 512, 16, "stream")
    assert api.calls[-1] == ("cuMemcpyDtoDAsync", (256, 512, 16, "stream"))
    fake, seen = FakePyCuda(), list[tuple[Any, ...]]()
    fake.memcpy_dtod_async = lambda *arguments: seen.append(arguments)
    driver = PyCudaDriver(fake, 0)
    driver.copy_on_device(256, 512, 16, "stream")
    assert seen == [(256, 512, 16, "stream")]
    driver.close()


def test_only_a_cooperative_launch_is_one() -> None:
    api = FakeApi()
    CudaDriver(api, 0).launch("function", Launch(4, 64, 0, cooperative=False), [], "stream")
    assert [call for call, _ in api.calls if "Launch" in call] == ["cuLaunchKernel"]


def test_what_was_recorded_is_given_back_even_if_it_cannot_be_instantiated() -> None:
    api = FakeApi(cuGraphInstantiate=(Result.CUDA_ERROR_OUT_OF_MEMORY, None))
    api.CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    driver = CudaDriver(api, 0)
    driver.begin_capture("stream")
    with pytest.raises(DriverError, match="cuGraphInstantiate failed"):
        driver.end_capture("stream")
    calls = [call for call, _ in api.calls if "Graph" in call or "Capture" in call]
    assert calls == ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphDestroy"]


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed")
def test_the_real_bindings_accept_every_call_that_we_make() -> None:
    """Without a driver they answer that libcuda is missing, but only after they have taken the arguments."""
    api = importlib.import_module("cuda.bindings.driver")
    try:
        api.cuInit(0)
    except RuntimeError:
        pass
    else:
        pytest.skip("a driver is here: the gpu tests make these calls in earnest")
    driver = CudaDriver.__new__(CudaDriver)
    driver._api, driver._device, driver._context = api, api.CUdevice(0), api.CUcontext(0)
    driver._pinned, driver._modules, driver._streams = [], [], []
    stream, event, function, module = api.CUstream(0), api.CUevent(0), api.CUfunction(0), api.CUmodule(0)
    memory = np.zeros(16, np.uint8)
    shared = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    calls: list[Any] = [
        driver.describe,
        lambda: driver._call("cuCtxPushCurrent", driver._context),
        api.cuCtxPopCurrent,
        driver.new_stream,
        lambda: driver.new_event(timing=True),
        lambda: driver.new_event(timing=False),
        lambda: driver.record(event, stream),
        lambda: driver.is_done(event),
        lambda: driver.elapsed_ms(event, event),
        lambda: driver.pinned(16),
        lambda: driver.allocate(16),
        lambda: driver.free(256),
        lambda: driver.fill(256, 1, 16, stream),
        lambda: driver.copy_to_device(256, memory, stream),
        lambda: driver.copy_to_host(memory, 256, stream),
        lambda: driver.copy_on_device(256, 512, 16, stream),
        lambda: driver.load(b"cubin", "kernel", 1000),
        lambda: driver._call("cuModuleGetFunction", module, b"kernel"),
        lambda: driver._call("cuFuncSetAttribute", function, shared, 1000),
        lambda: driver.blocks_per_sm(function, LAUNCH),
        lambda: driver.launch(function, LAUNCH, ARGUMENTS, stream),
        lambda: driver.launch(function, Launch(1, 32, 0, cooperative=False), ARGUMENTS, stream),
        lambda: driver.begin_capture(stream),
        lambda: driver.end_capture(stream),
        lambda: driver._call("cuGraphInstantiate", api.CUgraph(0), 0),
        lambda: driver.launch_graph(api.CUgraphExec(0), stream),
        lambda: driver.free_graph(api.CUgraphExec(0)),
        lambda: cuda_module._name(api, driver._device),
        lambda: cuda_module._arch(api, driver._device),
        lambda: driver._call("cuDevicePrimaryCtxRetain", driver._device),
        lambda: driver._call("cuModuleUnload", module),
        lambda: driver._call("cuStreamDestroy", stream),
        lambda: driver._call("cuMemFreeHost", 256),
        lambda: driver._call("cuDriverGetVersion"),
        lambda: cuda_module._driver_error(api, "cuInit", api.CUresult.CUDA_ERROR_OUT_OF_MEMORY),
        driver.close,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="libcuda"):
            call()


def test_driver_versions_read_well() -> None:
    assert describe_driver(13000).endswith("CUDA 13.0")
    assert describe_driver(12080).endswith("CUDA 12.8")


class FakePyCuda(types.SimpleNamespace):
    """The part of pycuda.driver that opening and launching touch."""

    class Error(Exception): ...

    class MemoryError(Error): ...

    class LaunchError(Error): ...

    class Context:
        pushed = 0

        def push(self) -> None:
            self.pushed += 1

        def pop(self) -> None:
            self.pushed -= 1

    def __init__(self) -> None:
        super().__init__()
        self.context = self.Context()
        self.device_attribute = types.SimpleNamespace(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR="per_sm")

    def init(self) -> None: ...

    def Device(self, ordinal: int) -> Any:  # noqa: N802
        return types.SimpleNamespace(
            retain_primary_context=lambda: self.context, get_attribute={"per_sm": 233472}.__getitem__
        )


@pytest.mark.parametrize(
    ("error", "text", "is_fault", "is_out_of_memory"),
    [
        (FakePyCuda.MemoryError, "cuMemAlloc failed: out of memory", False, True),
        (FakePyCuda.LaunchError, "cuEventQuery failed: unspecified launch failure", True, False),
        (FakePyCuda.Error, "cuEventQuery failed: an illegal memory access was encountered", True, False),
        (FakePyCuda.LaunchError, "cuLaunchKernel failed: too many resources requested for launch", False, False),
    ],
)
def test_pycudas_errors_keep_their_words(
    error: type[Exception], text: str, is_fault: bool, is_out_of_memory: bool
) -> None:
    def fail() -> None:
        raise error(text)

    driver = PyCudaDriver(FakePyCuda(), 0)
    with pytest.raises(DriverError) as caught:
        driver._call("cuSomething", fail)
    assert str(caught.value) == text
    assert (caught.value.is_fault, caught.value.is_out_of_memory) == (is_fault, is_out_of_memory)
    driver.close()


def test_pycuda_gets_numbers_of_the_right_type_and_an_sm_for_each_block() -> None:
    seen: list[Any] = []
    driver = PyCudaDriver(FakePyCuda(), 0)
    driver.launch(lambda *values, **shape: seen.append((values, shape)), LAUNCH, ARGUMENTS, "stream")
    values, shape = seen[0]
    assert [type(value) for value in values] == [np.uint32, np.uintp, np.uint64, np.float32]
    assert list(values) == [7, 0, 2**63 + 1, 0.5]
    assert shape == {"grid": (4, 1), "block": (64, 1, 1), "shared": 116736, "stream": "stream"}
    assert 2 * (shape["shared"] + 1024) > 233472  # each block takes 1 KB more: no second one fits
    driver.close()


def test_pycudas_context_is_popped_once() -> None:
    api = FakePyCuda()
    driver = PyCudaDriver(api, 0)
    assert api.context.pushed == 1
    driver.close()
    assert api.context.pushed == 0


def test_pycuda_refuses_other_threads_than_its_own() -> None:
    driver = PyCudaDriver(FakePyCuda(), 0)
    with driver.current():
        pass
    with ThreadPoolExecutor(1) as threads, pytest.raises(DeviceError, match="from the thread that opened it only"):
        threads.submit(driver.current).result()
    driver.close()


def test_an_abandoned_pycuda_keeps_what_would_free_itself() -> None:
    driver = PyCudaDriver(FakePyCuda(), 0)
    before = sys.getrefcount(driver._allocations)
    driver.abandon()
    assert sys.getrefcount(driver._allocations) > before
    driver.close()


def test_a_missing_package_or_driver_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(DeviceError, match=r"pip install '\.\[cuda\]' in Cheetah's checkout"):
        open_device("cuda")
    with pytest.raises(DeviceError, match=r"pip install '\.\[pycuda\]' in Cheetah's checkout"):
        open_device("pycuda")

    def no_libcuda(*_: Any) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(importlib, "import_module", lambda name: types.SimpleNamespace(cuInit=no_libcuda))
    assert why_not_cuda() == "no NVIDIA driver here (Failed to dlopen libcuda.so.1)"
    no_gpu = FakeApi(cuDeviceGetCount=(Result.CUDA_SUCCESS, 0))
    monkeypatch.setattr(importlib, "import_module", lambda name: no_gpu)
    assert why_not_cuda() == "the NVIDIA driver sees no GPU"


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "emulator:1", "", "cuda:-1"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(
        DeviceError, match=r"use cuda, pycuda, emulator, cuda:1 for the second GPU, or cuda:0,1 for two"
    ):
        open_device(name)


def test_without_a_gpu_the_emulator_is_taken_with_one_line_why(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(cuda_module, "why_not_cuda", lambda: "A100 is sm_80, the kernels need sm_90 (H100, H200)")
    assert open_device(say=lines.append).name == "emulator"
    assert lines == ["using the emulator, which is slow: A100 is sm_80, the kernels need sm_90 (H100, H200)"]


def test_with_a_gpu_it_is_taken_and_a_number_chooses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(cuda_module, "why_not_cuda", lambda: None)
    monkeypatch.setattr(cuda_module, "open_cuda", lambda say, ordinal, compiler: opened.append((ordinal, compiler)))
    monkeypatch.setattr(pycuda_module, "open_pycuda", lambda say, ordinal, compiler: opened.append("pycuda"))
    open_device()
    open_device("cuda:2", compiler="nvcc")
    open_device("pycuda")
    assert opened == [(0, "nvrtc"), (2, "nvcc"), "pycuda"]
