"""StreamDevice over a driver that exists only here: copies that land late, launches that hang, faults. No GPU."""

from __future__ import annotations

import contextlib
import gc
import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cheetah.manifest import Launch, Manifest, Parameter
from cheetah.runtime import interrupts
from cheetah.runtime.assembly.cubin import Cubin, ResourceReport
from cheetah.runtime.device import stream_device
from cheetah.runtime.device.driver import DriverError
from cheetah.runtime.device.interface import (
    ArgumentError,
    Device,
    DeviceError,
    DeviceInfo,
    LaunchTimeout,
    ProgressSource,
)
from cheetah.runtime.device.stream_device import StreamDevice, StreamKernel
from tests.runtime.manifests import manifest_of

TEXT = 'extern "C" __global__ void step(uint32_t* progress, uint32_t n) {}'
PIECE_BYTES = 64
MEMORY_BYTES = 1 << 20


def manifest(blocks: int = 4, text: str = TEXT) -> Manifest:
    return manifest_of(
        *(text, "step", Launch(blocks, 128, 1024)),
        Parameter("progress", "uint32_t*", "pointer", "u32", True, (blocks,), "progress of each block"),
        Parameter("n", "uint32_t", "scalar", "u32", False, None, "a number"),
        phases=("qkv", "attention"),
    )


class FakeStream:
    """Work in order. It is done one piece at a time, when somebody asks about an event: as late as it can be."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.hangs = False

    def advance(self) -> None:
        if self.work and not self.hangs:
            self.work.popleft()()


class FakeEvent:
    def __init__(self) -> None:
        self.done = False
        self.stream: FakeStream | None = None


class FakeDriver:
    """A `Driver` with memory in a numpy array. `kernel` is what a launch does; `fault` makes the next question fail."""

    name = "fake"

    def __init__(self, blocks: int = 132) -> None:
        self.memory = np.zeros(MEMORY_BYTES, np.uint8)
        self.next_address = 256
        self.live: dict[int, int] = {}
        self.blocks = blocks
        self.occupancy: int | None = 1
        self.kernel: Callable[[FakeStream, list[Any]], None] = lambda stream, values: None
        self.fault: DriverError | None = None
        self.calls: list[str] = []
        self.events_made = 0

    def describe(self) -> DeviceInfo:
        free = MEMORY_BYTES - sum(self.live.values())
        return DeviceInfo("fake", "Fake GPU", "sm_90", self.blocks, 232448, MEMORY_BYTES, free, "none")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self.calls.append("enter")
        yield
        self.calls.append("leave")

    def new_stream(self) -> FakeStream:
        return FakeStream()

    def new_event(self, timing: bool) -> FakeEvent:
        self.events_made += 1
        return FakeEvent()

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        event.done, event.stream = False, stream
        stream.work.append(lambda: setattr(event, "done", True))

    def is_done(self, event: FakeEvent) -> bool:
        if self.fault is not None:
            raise self.fault
        assert event.stream is not None, "asked about an event that was never recorded"
        event.stream.advance()
        return event.done

    def elapsed_ms(self, start: FakeEvent, end: FakeEvent) -> float:
        assert start.done and end.done
        return 1.5

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        return np.full(nbytes, 0xEE, np.uint8)

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        memory[:] = 0xEE
        self.calls.append("unpin")

    def allocate(self, nbytes: int) -> int:
        if self.next_address + nbytes > MEMORY_BYTES:
            raise DriverError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY: out of memory", is_out_of_memory=True)
        address, self.next_address = self.next_address, self.next_address + -(-nbytes // 256) * 256
        self.live[address] = nbytes
        return address

    def free(self, address: int) -> None:
        self.calls.append("free")
        del self.live[address]

    def fill(self, address: int, byte: int, nbytes: int, stream: FakeStream) -> None:
        stream.work.append(lambda: self.memory[address : address + nbytes].fill(byte))

    def copy_to_device(self, address: int, source: NDArray[np.uint8], stream: FakeStream) -> None:
        def copy() -> None:
            self.memory[address : address + len(source)] = source

        stream.work.append(copy)

    def copy_to_host(self, target: NDArray[np.uint8], address: int, stream: FakeStream) -> None:
        def copy() -> None:
            target[:] = self.memory[address : address + len(target)]

        stream.work.append(copy)

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: FakeStream) -> None:
        assert nbytes > 0

        def copy() -> None:
            self.memory[target : target + nbytes] = self.memory[source : source + nbytes]

        stream.work.append(copy)

    def load(self, image: bytes, kernel: str, shared_bytes: int) -> str:
        return kernel

    def blocks_per_sm(self, function: str, launch: Launch) -> int | None:
        return self.occupancy

    def launch(self, function: str, launch: Launch, arguments: list[Any], stream: FakeStream) -> None:
        self.calls.append("launch")
        stream.work.append(lambda: self.kernel(stream, [argument.value for argument in arguments]))

    def abandon(self) -> None:
        self.calls.append("abandon")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(text: str, kernel: str, **_: Any) -> Cubin:
        return Cubin(kernel, b"", "none", (), ResourceReport(1, 0, 0, 0, 0), 0.0, True, Path("none"))

    monkeypatch.setattr(stream_device, "compile_cubin", compile_nothing)
    monkeypatch.setattr(stream_device, "REPORT_SECONDS", 0.05)


def opened(driver: FakeDriver | None = None) -> tuple[StreamDevice, FakeDriver]:
    driver = driver or FakeDriver()
    return StreamDevice(driver, lambda _: None, piece_bytes=PIECE_BYTES), driver


def hanging(progress: list[int]) -> Callable[[FakeStream, list[Any]], None]:
    """A kernel that writes `progress` and never ends."""

    def kernel(stream: FakeStream, values: list[Any]) -> None:
        values[0].device._driver.memory[values[0].address :][: 4 * len(progress)] = np.array(progress, "<u4").view("u1")
        stream.hangs = True

    return kernel


def test_it_is_a_device() -> None:
    device: Device = opened()[0]
    assert device.describe().name == "Fake GPU"


@pytest.mark.parametrize("shared_bytes", [PIECE_BYTES // 2, 10 * PIECE_BYTES])
@pytest.mark.parametrize("nbytes", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES + 7])
def test_copies_of_any_size_come_back(nbytes: int, shared_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one thread, and by several from `shared_bytes` on."""
    monkeypatch.setattr("cheetah.runtime.device.staging.SHARED_COPY_BYTES", shared_bytes)
    monkeypatch.setattr("cheetah.runtime.device.staging.COPIERS", 3)
    device, _ = opened()
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    buffer = device.allocate(nbytes + 3)
    sent = data.copy()
    buffer.upload(sent, offset=3)
    sent[:] = 0  # the caller may reuse its array at once, though the copy has not landed
    assert np.array_equal(buffer.download(np.uint8, nbytes, offset=3), data)


def test_copies_keep_dtype_shape_and_order() -> None:
    device, _ = opened()
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    buffer = device.allocate(96)
    buffer.upload(array.T)
    assert np.array_equal(buffer.download(np.float32, (6, 4)), array.T)


def test_uploads_from_lent_memory_are_read_by_the_device_itself() -> None:
    """Pieces are taken again only when the device has read them, and the memory is given back at the end."""
    device, driver = opened()
    buffer = device.allocate(8 * 256)
    with device.lend(2 * 256) as ring:
        for value in range(8):
            while (piece := ring.take(200)) is None:
                ring.give_back()
            piece[:] = value + 1
            buffer.upload(piece, offset=256 * value)
            ring.give_back()
        with pytest.raises(DeviceError, match="is in use"), device.lend(256):
            pass
        assert "unpin" not in driver.calls
    assert driver.calls.count("unpin") == 1
    found = buffer.download(np.uint8, (8, 256))
    assert np.array_equal(found[:, :200], np.repeat(np.arange(1, 9, dtype=np.uint8)[:, None], 200, 1))


def test_lent_memory_is_kept_when_its_use_ends_in_an_error() -> None:
    device, driver = opened()
    with pytest.raises(KeyError), device.lend(256) as ring:
        assert ring.take(1) is not None
        raise KeyError
    assert "unpin" not in driver.calls
    with device.lend(256):
        pass


def test_a_mapped_buffer_is_the_host_s_own_memory() -> None:
    device, _ = opened()
    buffer = device.allocate_mapped(16)
    assert buffer.address == buffer.array.ctypes.data and not buffer.array.any()
    buffer.upload(np.arange(4, dtype=np.uint32))
    buffer.copy(4, 12, 4)
    assert buffer.array.view(np.uint32).tolist() == buffer.download(np.uint32, 4).tolist() == [0, 1, 2, 1]
    with pytest.raises(ArgumentError, match="outside a buffer of 16 bytes"):
        buffer.upload(np.zeros(5, np.uint32))


def test_a_launch_is_done_when_it_has_run() -> None:
    device, driver = opened()
    ran: list[int] = []
    driver.kernel = lambda stream, values: ran.append(1)
    assert device.is_done()
    device.launch(device.load(TEXT, manifest()), {"progress": device.allocate(16), "n": 0})
    while not device.is_done():
        pass
    assert ran == [1]


def test_uploads_fills_and_launches_happen_in_order() -> None:
    device, driver = opened()
    seen: list[int] = []
    driver.kernel = lambda stream, values: seen.append(int(driver.memory[values[0].address]))
    kernel = device.load(TEXT, manifest())
    buffer = device.allocate(16, fill=7)
    for value in (1, 2, 3):
        buffer.upload(np.full(16, value, np.uint8))
        device.launch(kernel, {"progress": buffer, "n": 0})
    device.synchronize()
    assert seen == [1, 2, 3]


def test_copies_on_the_device_happen_in_order_with_launches() -> None:
    device, driver = opened()
    seen: list[list[int]] = []

    def kernel(stream: FakeStream, values: list[Any]) -> None:
        first = driver.memory[values[0].address :]
        seen.append(first[:16:4].tolist())
        first[:4] += 1

    driver.kernel = kernel
    loaded = device.load(TEXT, manifest())
    buffer = device.allocate(16)
    buffer.upload(np.repeat(np.array([1, 20, 30, 40], np.uint8), 4))
    for target in (4, 8, 12):
        device.launch(loaded, {"progress": buffer, "n": 0})
        buffer.copy(0, target, 4)
    assert seen == [], "a copy waited for the launch before it"
    device.launch(loaded, {"progress": buffer, "n": 0})
    device.synchronize()
    assert seen == [[1, 20, 30, 40], [2, 2, 30, 40], [3, 2, 3, 40], [4, 2, 3, 4]]


def test_a_copy_on_the_device_is_checked() -> None:
    device, driver = opened()
    buffer = device.allocate(16, fill=7)
    for source, target, nbytes, message in (
        (0, 8, 9, "copy to the place of bytes 8 to 17 is outside a buffer of 16 bytes"),
        (12, 0, 8, "copy of bytes 12 to 20 is outside a buffer of 16 bytes"),
        (-4, 8, 4, "copy of bytes -4 to 0 is outside"),
        (0, 8, -1, "cannot copy -1 bytes"),
        (0, 4, 8, "copy of bytes 0 to 8 over 4 to 12: the two overlap, copy in pieces"),
        (5, 5, 1, "the two overlap"),
    ):
        with pytest.raises(ArgumentError, match=message):
            buffer.copy(source, target, nbytes)
    buffer.copy(0, 8, 8)
    buffer.copy(3, 3, 0)
    buffer.free()
    with pytest.raises(ArgumentError, match="has been freed"):
        buffer.copy(0, 8, 8)


def test_a_fault_refuses_copies_on_the_device() -> None:
    device, driver = opened()
    buffer = device.allocate(16)
    driver.fault = DriverError("cuEventQuery", "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
    with pytest.raises(DeviceError):
        device.synchronize()
    with pytest.raises(DeviceError, match="cannot be used any more: cuEventQuery failed"):
        buffer.copy(0, 8, 8)


def test_ranges_and_fills_are_checked() -> None:
    device, _ = opened()
    buffer = device.allocate(16)
    with pytest.raises(ArgumentError, match="upload of bytes 8 to 24 is outside a buffer of 16 bytes"):
        buffer.upload(np.zeros(16, np.uint8), offset=8)
    with pytest.raises(ArgumentError, match="download of bytes -4 to 0"):
        buffer.download(np.uint32, 1, offset=-4)
    with pytest.raises(ArgumentError, match="fill must be a byte from 0 to 255, not 256"):
        buffer.fill(256)
    with pytest.raises(ArgumentError, match="cannot allocate -1 bytes"):
        device.allocate(-1)


def test_too_little_memory_is_told_with_numbers_and_does_no_harm() -> None:
    device, _ = opened()
    with pytest.raises(DeviceError) as caught:
        device.allocate(1 << 31)
    assert "cannot allocate 2.00 GiB on Fake GPU: 1048576 bytes of 1048576 bytes are free" in str(caught.value)
    assert "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY: out of memory" in str(caught.value)
    device.allocate(16, fill=0)


def test_buffers_are_freed_by_call_and_by_nobody_holding_them() -> None:
    device, driver = opened()
    first, second = device.allocate(16), device.allocate(16)
    first.free()
    first.free()
    assert list(driver.live) == [second.address]
    with pytest.raises(ArgumentError, match="this buffer of 16 bytes has been freed"):
        first.upload(np.zeros(1, np.uint8))
    del second
    gc.collect()
    assert not driver.live


def test_freeing_waits_for_no_running_launch() -> None:
    device, driver = opened()
    kernel = device.load(TEXT, manifest())
    buffer, other = device.allocate(16), device.allocate(16)
    device.launch(kernel, {"progress": buffer, "n": 0})
    other.free()
    assert "free" not in driver.calls
    device.synchronize()
    assert driver.calls.count("free") == 1 and list(driver.live) == [buffer.address]


def test_events_measure_and_are_used_again() -> None:
    device, driver = opened()
    made = driver.events_made
    for _ in range(3):
        start, end = device.record(), device.record()
        assert device.elapsed_ms(start, end) == 1.5
        del start, end
    assert driver.events_made == made + 2
    with pytest.raises(ArgumentError, match="two events"):
        device.elapsed_ms("a", "b")


def test_a_launch_that_hangs_is_reported_with_the_phase_of_each_block() -> None:
    device, driver = opened()
    driver.kernel = hanging([7, 7, 6, 7])
    kernel = device.load(TEXT, manifest())
    device.launch(kernel, {"progress": device.allocate(16, fill=0xFF), "n": 0})
    with pytest.raises(LaunchTimeout) as caught:
        device.synchronize(timeout_s=0.02)
    assert str(caught.value) == (
        "kernel step did not finish within 0.02 s; blocks 0-1,3: step 3, phase attention; block 2: step 3, phase qkv"
    )
    assert caught.value.progress == (7, 7, 6, 7)


def test_after_a_hang_every_call_says_why_and_nothing_waits() -> None:
    device, driver = opened()
    driver.kernel = hanging([0, 0, 0, 0])
    kernel = device.load(TEXT, manifest())
    buffer = device.allocate(16)
    device.launch(kernel, {"progress": buffer, "n": 0})
    with pytest.raises(LaunchTimeout):
        device.synchronize(timeout_s=0.01)
    driver.calls.clear()
    for use in (
        device.synchronize,
        device.describe,
        device.record,
        lambda: device.allocate(16),
        lambda: buffer.download(np.uint8, 1),
        lambda: device.launch(kernel, {"progress": buffer, "n": 0}),
    ):
        with pytest.raises(DeviceError, match="cannot be used any more: kernel step did not finish within 0.01 s"):
            use()
    buffer.free()
    device.close()
    assert driver.calls == []


def test_progress_can_come_from_elsewhere() -> None:
    device, driver = opened()
    driver.kernel = hanging([2, 2, 2, 2])
    kernel = device.load(TEXT, manifest())
    buffer = device.allocate(16, fill=0)
    device.launch(kernel, {"progress": buffer, "n": 0})
    with pytest.raises(LaunchTimeout, match="blocks 0-3: step 0, phase c"):
        device.synchronize(0.02, ProgressSource(buffer, ("a", "b", "c")))


def test_progress_can_be_told_by_a_function() -> None:
    device, driver = opened()
    driver.kernel = hanging([2, 2, 2, 2])
    kernel = device.load(TEXT, manifest())
    device.launch(kernel, {"progress": device.allocate(16), "n": 0})
    with pytest.raises(LaunchTimeout, match="within 0.01 s; as I said"):
        device.synchronize(0.01, lambda: "as I said")


def test_a_report_that_hangs_as_well_is_given_up() -> None:
    device, driver = opened()
    driver.kernel = hanging([0, 0, 0, 0])
    kernel = device.load(TEXT, manifest())
    device.launch(kernel, {"progress": device.allocate(16), "n": 0})
    device._report_stream.hangs = True
    with pytest.raises(LaunchTimeout, match="its progress could not be read: the copy took more than 0.05 s"):
        device.synchronize(timeout_s=0.01)


def test_a_fault_is_told_once_with_the_drivers_text_and_then_every_time() -> None:
    device, driver = opened()
    kernel = device.load(TEXT, manifest())
    buffer = device.allocate(16)
    device.launch(kernel, {"progress": buffer, "n": 0})
    driver.fault = DriverError("cuEventQuery", "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")
    with pytest.raises(DeviceError) as caught:
        device.synchronize()
    assert str(caught.value) == (
        "kernel step faulted: cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
        "; what the device held is lost, start a new process"
    )
    driver.calls.clear()
    with pytest.raises(
        DeviceError, match="cannot be used any more: kernel step faulted: cuEventQuery failed: CUDA_ERR"
    ):
        buffer.download(np.uint8, 1)
    buffer.free()
    device.close()
    assert driver.calls == []


def test_a_refused_call_leaves_the_device_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    device, driver = opened()
    kernel = device.load(TEXT, manifest())
    buffer = device.allocate(16, fill=0)

    def refuse(*_: Any) -> None:
        raise DriverError("cuLaunchCooperativeKernel", "CUDA_ERROR_INVALID_VALUE: invalid argument")

    monkeypatch.setattr(driver, "launch", refuse)
    with pytest.raises(DeviceError, match="cuLaunchCooperativeKernel failed: CUDA_ERROR_INVALID_VALUE"):
        device.launch(kernel, {"progress": buffer, "n": 0})
    monkeypatch.undo()
    device.synchronize()
    assert buffer.download(np.uint8, 1)[0] == 0


def test_a_with_block_closes_and_an_error_in_it_is_not_held_up() -> None:
    device, driver = opened()
    with device:
        pass
    assert driver.calls[-1] == "close"
    with pytest.raises(DeviceError, match="cannot be used any more: it was closed"):
        device.allocate(1)
    device, driver = opened()
    driver.kernel = hanging([0, 0, 0, 0])
    with pytest.raises(KeyboardInterrupt), device:
        device.launch(device.load(TEXT, manifest()), {"progress": device.allocate(16), "n": 0})
        raise KeyboardInterrupt
    assert driver.calls[-1] == "abandon" and "close" not in driver.calls


def interrupted_at(driver: FakeDriver, *questions: int) -> None:
    """Has Ctrl-C come when the driver is asked for the so manyeth time whether something is done."""
    asked = iter(range(1, 1000))
    is_done = driver.is_done

    def interrupted(event: FakeEvent) -> bool:
        if next(asked) in questions:
            signal.raise_signal(signal.SIGINT)
        return is_done(event)

    driver.is_done = interrupted  # type: ignore[method-assign]


def test_an_interrupt_that_waits_lets_the_launch_end() -> None:
    device, driver = opened()
    ran = []
    driver.kernel = lambda stream, values: ran.append(values[1])
    kernel, buffer = device.load(TEXT, manifest()), device.allocate(16, fill=0)
    interrupted_at(driver, 1)
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        for number in range(3):
            device.launch(kernel, {"progress": buffer, "n": number})
        device.synchronize(timeout_s=10)
        assert ran == [0, 1, 2]
    device.launch(kernel, {"progress": buffer, "n": 3})
    device.synchronize(timeout_s=10)
    assert ran == [0, 1, 2, 3]


def test_a_second_interrupt_ends_the_wait_for_a_launch_that_hangs() -> None:
    device, driver = opened()
    driver.kernel = hanging([0, 0, 0, 0])
    interrupted_at(driver, 2, 5)
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        device.launch(device.load(TEXT, manifest()), {"progress": device.allocate(16), "n": 0})
        device.synchronize()


def test_loading_checks_text_machine_and_occupancy() -> None:
    device, driver = opened()
    with pytest.raises(DeviceError, match="needs 133 blocks running at once, one an SM, but Fake GPU has 132 SMs"):
        device.load(TEXT, manifest(blocks=133))
    with pytest.raises(Exception, match="regenerate both"):
        device.load(TEXT + " ", manifest())
    driver.occupancy = 0
    with pytest.raises(DeviceError, match="does not fit an SM"):
        device.load(TEXT, manifest())
    driver.occupancy = None
    assert isinstance(device.load(TEXT, manifest()), StreamKernel)


def test_what_belongs_to_another_device_is_refused() -> None:
    device, _ = opened()
    other, _ = opened()
    kernel = device.load(TEXT, manifest())
    with pytest.raises(ArgumentError, match="'progress': the buffer belongs to another device"):
        device.launch(kernel, {"progress": other.allocate(16), "n": 0})
    with pytest.raises(ArgumentError, match="takes a kernel that this device loaded, not a str"):
        device.launch("step", {})
    freed = device.allocate(16)
    freed.free()
    with pytest.raises(ArgumentError, match="has been freed"):
        device.launch(kernel, {"progress": freed, "n": 0})


class GraphDriver(FakeDriver):
    """A FakeDriver whose streams can be captured: what is launched meanwhile waits for `launch_graph`."""

    def __init__(self) -> None:
        super().__init__()
        self.freed = 0

    def begin_capture(self, stream: FakeStream) -> None:
        stream.before, stream.work = stream.work, deque()  # type: ignore[attr-defined]

    def end_capture(self, stream: FakeStream) -> tuple[Callable[[], None], ...]:
        recorded, stream.work = tuple(stream.work), stream.before  # type: ignore[attr-defined]
        return recorded

    def launch_graph(self, graph: tuple[Callable[[], None], ...], stream: FakeStream) -> None:
        stream.work.extend(graph)

    def free_graph(self, graph: tuple[Callable[[], None], ...]) -> None:
        self.freed += 1


def capturing() -> tuple[StreamDevice, GraphDriver, Callable[[int], None], list[int]]:
    """A device, its driver, a function that launches a kernel with a number, and the numbers of launches that ran."""
    driver, ran = GraphDriver(), list[int]()
    driver.kernel = lambda stream, values: ran.append(values[1])
    device = opened(driver)[0]
    kernel, buffer = device.load(TEXT, manifest()), device.allocate(16, fill=0)
    return device, driver, lambda n: device.launch(kernel, {"progress": buffer, "n": n}), ran


def test_captured_launches_run_when_the_graph_is_launched_each_time() -> None:
    device, _, launch, ran = capturing()
    launch(1)
    graph = device.capture(lambda: [launch(n) for n in (2, 3)])
    launch(4)
    graph.launch()
    launch(5)
    graph.launch()
    device.synchronize()
    assert ran == [1, 4, 2, 3, 5, 2, 3]


def test_a_graph_keeps_its_buffers_and_is_given_back() -> None:
    device, driver, launch, _ = capturing()
    kernel = device.load(TEXT, manifest())
    graph = device.capture(lambda: device.launch(kernel, {"progress": device.allocate(16), "n": 1}))
    device.synchronize()
    gc.collect()
    assert len(driver.live) == 2 and driver.freed == 0
    del graph
    launch(2)  # the last launch's progress may be asked for: its buffer is kept too
    device.synchronize()
    gc.collect()
    assert len(driver.live) == 1 and driver.freed == 1


def test_work_that_fails_ends_the_capture() -> None:
    device, driver, launch, ran = capturing()

    def work() -> None:
        launch(1)
        raise KeyError("in the middle")

    with pytest.raises(KeyError, match="in the middle"):
        device.capture(work)
    launch(2)
    device.synchronize()
    assert ran == [2] and driver.freed == 1


def test_a_capture_that_cannot_begin_keeps_no_arguments_of_later_launches() -> None:
    device, driver, launch, ran = capturing()

    def refused(stream: FakeStream) -> None:
        raise DriverError("cuStreamBeginCapture", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")

    driver.begin_capture = refused  # type: ignore[method-assign]
    with pytest.raises(DriverError, match="cuStreamBeginCapture"):
        device.capture(lambda: launch(1))
    kernel, freed = device.load(TEXT, manifest()), weakref.ref(late := device.allocate(16))
    device.launch(kernel, {"progress": late, "n": 2})
    del late
    launch(3)
    device.synchronize()
    assert ran == [2, 3] and freed() is None


def test_a_driver_without_graphs_says_so() -> None:
    with pytest.raises(DeviceError, match="device fake cannot capture a graph: use device cuda"):
        opened()[0].capture(lambda: None)


def test_a_graph_that_hangs_is_reported_as_its_last_launch() -> None:
    device, driver, launch, _ = capturing()
    driver.kernel = hanging([1, 0, 1, 1])
    graph = device.capture(lambda: launch(3))
    graph.launch()
    with pytest.raises(LaunchTimeout, match="kernel step did not finish within 0.01 s") as caught:
        device.synchronize(timeout_s=0.01)
    assert caught.value.progress == (1, 0, 1, 1)
