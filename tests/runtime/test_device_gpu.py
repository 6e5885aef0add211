"""Both bindings on a real GPU of compute capability 9.0, with kernels written by hand. `make gpu-test` runs it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cheetah.manifest import Launch, Manifest, Parameter
from cheetah.runtime.device import Device, DeviceError, LaunchTimeout, open_device
from tests.runtime.manifests import manifest_of

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone, pytest.mark.xdist_group("alone")]

SHARED_BYTES = 227 * 1024
THREADS = 256

PACKAGES = {"cuda": "cuda", "pycuda": "pycuda"}

# Every block writes, all wait for all (which only ends if all run at once), then every block reads its neighbour's.
# With `missing` blocks more awaited than there are, nobody gets past the barrier.
EXCHANGE = """
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
extern "C" __global__ void __launch_bounds__(256, 1) exchange(
    const float* x, float* y, float* sums, uint32_t* arrived, uint32_t* progress, uint32_t missing, float factor,
    uint64_t seed) {
    extern __shared__ float arena[];
    uint32_t block = blockIdx.x, thread = threadIdx.x;
    arena[thread] = x[block * blockDim.x + thread] * factor;
    arena[56 * 1024 + thread] = 0.0f;  // near the end of the 227 KB
    __syncthreads();
    if (thread == 0) {
        float total = 0.0f;
        for (uint32_t i = 0; i < blockDim.x; i++) { total += arena[i]; }
        sums[block] = total;
        progress[block] = 2 * 3 + (block == 5 ? 0 : 1);
        __threadfence();
        atomicAdd(arrived, 1u);
        while (*(volatile uint32_t*)arrived < gridDim.x + missing) { }
        __threadfence();
    }
    __syncthreads();
    if (thread == 0) {
        y[block] = *(volatile float*)&sums[(block + 1) % gridDim.x];
        if (block == 0) { y[gridDim.x] = (float)(seed >> 32); }
    }
}
"""

FAULT = """
extern "C" __global__ void fault(float* x) { *(volatile float*)0x10 = x[0]; }
"""


def pointer(name: str, shape: tuple[int, ...], dtype: str = "f32", ctype: str = "float*") -> Parameter:
    return Parameter(name, ctype, "pointer", dtype, not ctype.startswith("const"), shape, name)


def exchange_manifest(blocks: int) -> Manifest:
    parameters = (
        pointer("x", (blocks * THREADS,), ctype="const float*"),
        pointer("y", (blocks + 1,)),
        pointer("sums", (blocks,)),
        pointer("arrived", (1,), "u32", "uint32_t*"),
        pointer("progress", (blocks,), "u32", "uint32_t*"),
        Parameter("missing", "uint32_t", "scalar", "u32", False, None, "blocks that never arrive"),
        Parameter("factor", "float", "scalar", "f32", False, None, "factor"),
        Parameter("seed", "uint64_t", "scalar", "u64", False, None, "its upper half comes back"),
    )
    return manifest_of(EXCHANGE, "exchange", Launch(blocks, THREADS, SHARED_BYTES), *parameters)


def run_exchange(device: Device, missing: int = 0, timeout_s: float = 20.0) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel wrote and what it should have written, on every SM of the device."""
    blocks = device.describe().blocks
    manifest = exchange_manifest(blocks)
    kernel = device.load(EXCHANGE, manifest)
    x = np.random.default_rng().integers(-8, 8, (blocks, THREADS)).astype(np.float32)
    buffers = {parameter.name: device.allocate(4 * blocks * THREADS, 0xFF) for parameter in manifest.parameters[:5]}
    buffers["x"].upload(x)
    buffers["arrived"].fill(0)
    device.launch(kernel, {**buffers, "missing": missing, "factor": 0.5, "seed": 7 << 32})
    device.synchronize(timeout_s)
    expected = np.append(np.roll(x.sum(axis=1) * np.float32(0.5), -1), np.float32(7))
    return buffers["y"].download(np.float32, blocks + 1), expected


@pytest.fixture(params=sorted(PACKAGES))
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if importlib.util.find_spec(PACKAGES[request.param]) is None:
        pytest.skip(f"{request.param} is not installed")
    with open_device(request.param) as opened:
        yield opened


def test_what_it_is(device: Device) -> None:
    info = device.describe()
    assert info.arch == "sm_90" and info.blocks >= 100 and info.shared_bytes == SHARED_BYTES
    assert 0 < info.free_bytes <= info.total_bytes
    assert "CUDA 1" in info.driver


def test_copies_fills_and_memory(device: Device) -> None:
    before = device.describe().free_bytes
    data = np.random.default_rng().integers(0, 256, (50 << 20) + 13, np.uint8)
    buffer = device.allocate(data.nbytes + 16, fill=0xAB)
    assert buffer.address % 256 == 0
    buffer.upload(data, offset=16)
    assert (buffer.download(np.uint8, 16) == 0xAB).all()
    assert np.array_equal(buffer.download(np.uint8, data.nbytes, offset=16), data)
    assert device.describe().free_bytes <= before - data.nbytes
    buffer.free()
    assert device.describe().free_bytes > before - (8 << 20)


def test_a_buffer_is_copied_within_after_the_launch_before(device: Device) -> None:
    blocks = device.describe().blocks
    manifest = exchange_manifest(blocks)
    kernel = device.load(EXCHANGE, manifest)
    buffers = {parameter.name: device.allocate(4 * blocks * THREADS, 0xFF) for parameter in manifest.parameters[:5]}
    buffers["x"].upload(np.arange(blocks * THREADS, dtype=np.float32))
    buffers["arrived"].fill(0)
    device.launch(kernel, {**buffers, "missing": 0, "factor": 1.0, "seed": 0})
    buffers["sums"].copy(0, 4 * blocks, 4 * blocks)
    buffers["arrived"].fill(0)
    device.launch(kernel, {**buffers, "missing": 0, "factor": 2.0, "seed": 0})
    device.synchronize(20.0)
    second, first = buffers["sums"].download(np.float32, (2, blocks))
    assert np.array_equal(first * 2, second) and first.all()


def test_too_much_memory_is_refused_with_numbers(device: Device) -> None:
    with pytest.raises(DeviceError, match=r"cannot allocate 10240.00 GiB on NVIDIA .* are free \(cuMemAlloc"):
        device.allocate(10 << 40)
    device.allocate(16, fill=0).download(np.uint8, 16)


def test_every_sm_holds_a_block_and_all_exchange(device: Device) -> None:
    found, expected = run_exchange(device)
    assert np.array_equal(found, expected)


def test_launches_repeat_and_are_timed(device: Device) -> None:
    start = device.record()
    for _ in range(3):
        found, expected = run_exchange(device)
        assert np.array_equal(found, expected)
    assert 0 < device.elapsed_ms(start, device.record()) < 60_000


def test_more_blocks_than_sms_are_refused_before_they_hang(device: Device) -> None:
    blocks = device.describe().blocks
    with pytest.raises(DeviceError, match=f"needs {blocks + 1} blocks running at once, one an SM, .* has {blocks} SMs"):
        device.load(EXCHANGE, exchange_manifest(blocks + 1))


def test_a_driver_refuses_in_its_own_words(device: Device) -> None:
    text = EXCHANGE.replace("(256, 1)", "(128, 1)")  # compiled for 128 threads, launched with 256
    blocks = device.describe().blocks
    parameters = exchange_manifest(blocks).parameters
    manifest = manifest_of(text, "exchange", Launch(blocks, THREADS, SHARED_BYTES), *parameters)
    with pytest.raises(DeviceError, match=r"does not fit an SM|cu\w+ failed: "):
        kernel = device.load(text, manifest)
        buffers = {parameter.name: device.allocate(4 * blocks * THREADS, 0) for parameter in parameters[:5]}
        device.launch(kernel, {**buffers, "missing": 0, "factor": 1.0, "seed": 0})
    found, expected = run_exchange(device)
    assert np.array_equal(found, expected)


def test_a_long_launch_takes_no_harm_from_a_long_limit(device: Device) -> None:
    found, expected = run_exchange(device, timeout_s=600)
    assert np.array_equal(found, expected)


# What breaks the process's context runs in a process of its own, which must also come to an end by itself.


def in_child(function: str, backend: str, seconds: float = 120.0) -> str:
    here = Path(__file__)
    code = f"import sys; sys.path[:0] = [{str(here.parent)!r}, {str(here.parents[2])!r}]; import {here.stem} as t; "
    code += f"t.{function}({backend!r})"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds)
    assert child.returncode == 2, child.stdout + child.stderr
    return child.stdout


def hang(backend: str) -> None:
    """Waits for a block that does not exist, prints what it is told, and ends as the command line would."""
    device = open_device(backend)
    try:
        run_exchange(device, missing=1, timeout_s=2.0)
    except LaunchTimeout as error:
        print(error, flush=True)
    try:
        device.synchronize()
    except DeviceError as error:
        print(error, flush=True)
    device.close()
    sys.exit(2)


def fault(backend: str) -> None:
    """Writes where nothing is, prints what it is told twice."""
    device = open_device(backend)
    kernel = device.load(FAULT, manifest_of(FAULT, "fault", Launch(1, 32, 0), pointer("x", (1,))))
    buffer = device.allocate(4, fill=0)
    device.launch(kernel, {"x": buffer})
    for _ in range(2):
        try:
            buffer.download(np.float32, 1)
        except DeviceError as error:
            print(error, flush=True)
    device.close()
    sys.exit(2)


@pytest.fixture(params=sorted(PACKAGES))
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{name} is not installed")
    return name


def test_a_hang_is_reported_by_block_and_phase_and_the_process_ends(backend: str) -> None:
    first, second = in_child("hang", backend).splitlines()
    assert first.startswith("kernel exchange did not finish within 2 s; blocks 0-4,6-"), first
    assert ": step 2, phase attention; block 5: step 2, phase qkv" in first
    assert second.startswith("this device cannot be used any more: kernel exchange did not finish within 2 s")


def test_a_fault_is_told_in_the_drivers_words_and_the_process_ends(backend: str) -> None:
    first, second = in_child("fault", backend).splitlines()
    assert first.startswith("kernel fault faulted: cuEventQuery failed: "), first
    assert "an illegal memory access was encountered" in first
    assert second.startswith("this device cannot be used any more: kernel fault faulted: ")
