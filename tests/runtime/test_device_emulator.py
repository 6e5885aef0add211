"""The emulator as a device: the interface that the GPUs have, on any machine with g++."""

from __future__ import annotations

import shutil
import threading

import numpy as np
import pytest

from cheetah.errors import CheetahError
from cheetah.manifest import Launch, Manifest, Parameter
from cheetah.runtime.device import ArgumentError, Device, DeviceError, open_device
from cheetah.runtime.device.emulator import EmulatorDevice
from tests.runtime.manifests import manifest_of

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
]

TEXT = """
#include "cheetah_emulator.h"
extern "C" __global__ void __launch_bounds__(32, 1) scale(const float* x, float* y, uint32_t n, float factor) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { y[i] = x[i] * factor; }
    block_barrier();
    if (i == 0 && factor < 0.0f) { mbarrier_wait((uint64_t*) shared_arena(), 1); }
}
"""


def manifest(blocks: int = 4) -> Manifest:
    return manifest_of(
        *(TEXT, "scale", Launch(blocks, 32, 1024)),
        Parameter("x", "const float*", "pointer", "f32", False, ("n",), "input"),
        Parameter("y", "float*", "pointer", "f32", True, ("n",), "output"),
        Parameter("n", "uint32_t", "scalar", "u32", False, None, "length"),
        Parameter("factor", "float", "scalar", "f32", False, None, "factor"),
    )


def run_scale(device: Device, blocks: int, factor: float = 2.0) -> None:
    n = blocks * 32 - 5
    kernel = device.load(TEXT, manifest(blocks))
    x, y = device.allocate(4 * n), device.allocate(4 * blocks * 32)
    values = np.arange(n, dtype=np.float32)
    x.upload(values)
    start = device.record()
    device.launch(kernel, {"x": x, "y": y, "n": n, "factor": factor})
    device.synchronize(timeout_s=60)
    assert device.elapsed_ms(start, device.record()) > 0
    assert np.array_equal(y.download(np.float32, n), values * factor)
    assert np.isnan(y.download(np.float32, 5, offset=4 * n)).all()  # untouched memory is poison


@pytest.mark.parametrize("blocks", [1, 4, 132])
def test_a_kernel_runs_on_any_grid(blocks: int) -> None:
    with open_device("emulator") as device:
        run_scale(device, blocks)


def test_the_schedule_can_be_chosen() -> None:
    run_scale(EmulatorDevice(scheduler="random", seed=3), 2)
    with pytest.raises(CheetahError, match="no scheduler 'none'"):
        run_scale(EmulatorDevice(scheduler="none"), 2)


def test_a_failed_launch_makes_the_device_unusable_and_says_why() -> None:
    device = open_device("emulator")
    buffer = device.allocate(16)
    with pytest.raises(CheetahError):
        run_scale(device, 1, factor=-1.0)  # waits on an mbarrier that nobody has initialised
    with pytest.raises(DeviceError, match="cannot be used any more: kernel scale failed: "):
        device.allocate(16)
    buffer.free()
    device.close()


def test_buffers_are_aligned_checked_and_freed() -> None:
    device = open_device("emulator")
    buffer = device.allocate(100, fill=3)
    assert buffer.address % 256 == 0 and (buffer.download(np.uint8, 100) == 3).all()
    buffer.fill(9)
    buffer.upload(np.array([[1, 2], [3, 4]], np.uint16).T, offset=92)
    assert buffer.download(np.uint16, (2, 2), offset=92).tolist() == [[1, 3], [2, 4]]
    with pytest.raises(ArgumentError, match="outside a buffer of 100 bytes"):
        buffer.download(np.float32, 25, offset=4)
    buffer.free()
    buffer.free()
    with pytest.raises(ArgumentError, match="has been freed"):
        buffer.fill(0)


def test_a_buffer_is_copied_within() -> None:
    buffer = open_device("emulator").allocate(100)
    buffer.upload(np.arange(100, dtype=np.uint8))
    buffer.copy(2, 50, 48)
    buffer.copy(99, 0, 1)
    buffer.copy(7, 7, 0)
    assert buffer.download(np.uint8, 100).tolist() == [99, *range(1, 50), *range(2, 50), 98, 99]
    for source, target, nbytes in ((0, 60, 41), (60, 0, 41), (0, -1, 1), (0, 3, 4), (0, 50, -1)):
        with pytest.raises(ArgumentError, match="outside a buffer of 100 bytes|overlap|cannot copy -1 bytes"):
            buffer.copy(source, target, nbytes)
    buffer.free()
    with pytest.raises(ArgumentError, match="has been freed"):
        buffer.copy(0, 50, 1)


def test_the_text_must_be_that_of_the_manifest() -> None:
    with pytest.raises(CheetahError, match="regenerate both with: cheetah generate demo"):
        open_device("emulator").load(TEXT + " ", manifest())


def test_arguments_are_checked_before_anything_runs() -> None:
    device = open_device("emulator")
    kernel = device.load(TEXT, manifest())
    x = device.allocate(64)
    with pytest.raises(ArgumentError, match="'y' .*: the buffer has 64 bytes; f32.n. needs 68"):
        device.launch(kernel, {"x": device.allocate(68), "y": x, "n": 17, "factor": 1})
    with pytest.raises(ArgumentError, match="no argument for 'factor'"):
        device.launch(kernel, {"x": x, "y": x, "n": 16})
    device.synchronize()


def test_what_it_is() -> None:
    info = open_device("emulator").describe()
    assert info.backend == "emulator" and info.shared_bytes == 227 * 1024
    assert 0 < info.free_bytes <= info.total_bytes


@pytest.mark.slow
def test_only_slow_compiling_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    spoken = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        spoken.set()

    def compile_slowly(*_: object) -> object:
        assert spoken.wait(10)
        return object()

    monkeypatch.setattr("cheetah.emulator.compile_program", lambda *_: object())
    EmulatorDevice(say).load(TEXT, manifest())
    assert said == []
    monkeypatch.setattr("cheetah.emulator.compile_program", compile_slowly)
    EmulatorDevice(say).load(TEXT, manifest())
    assert said == ["compiling scale for the emulator (g++)..."]
