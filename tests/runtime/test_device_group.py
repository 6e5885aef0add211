"""Several devices as one, over drivers that exist only here: the gate, launches that fail, hangs told by rank. No
GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from test_device_stream import TEXT, FakeDriver, FakeEvent, FakeStream, hanging, manifest, no_compiler

from cheetah.manifest import Manifest, Parameter
from cheetah.runtime.device import open_device
from cheetah.runtime.device.driver import DriverError
from cheetah.runtime.device.emulator import EmulatorDevice
from cheetah.runtime.device.group import EmulatorGroup, GroupBuffer, StreamGroup, first_of, require_alike
from cheetah.runtime.device.interface import ArgumentError, Device, DeviceError, DeviceInfo, LaunchTimeout
from cheetah.runtime.device.stream_device import StreamDevice

__all__ = ["no_compiler"]

Kernel = Callable[[FakeStream, list[Any]], None]
EXCHANGE = Parameter("exchange", "uint8_t*", "pointer", "u8", True, (16,), "what ranks exchange")


ALL_RECORDS: dict[FakeEvent, int] = {}
REACHED: dict[FakeEvent, int] = {}
"""How often each event was recorded, and how many of these times its stream has come to."""


class PeerDriver(FakeDriver):
    """One whose streams wait for events of others: for as long as nobody asks about those, nothing of theirs is
    done."""

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        """An event that is recorded again is waited for as it was recorded last before the wait was asked for."""
        super().record(event, stream)
        number = ALL_RECORDS[event] = ALL_RECORDS.get(event, 0) + 1
        stream.work.append(lambda: REACHED.__setitem__(event, number))

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        wanted = ALL_RECORDS[event]

        def waiting() -> None:
            if REACHED.get(event, 0) < wanted:
                assert event.stream is not None
                event.stream.advance()
                stream.work.appendleft(waiting)

        stream.work.append(waiting)


def of_ranks(size: int = 2) -> Manifest:
    """A kernel that several ranks launch together."""
    more = (
        EXCHANGE,
        *(replace(EXCHANGE, name=f"peer_{further}_exchange") for further in range(1, size)),
        Parameter("rank", "uint32_t", "scalar", "u32", False, None, "which"),
        Parameter("logits", "float*", "pointer", "f32", True, None, "of all", True),
    )
    one = manifest()
    return replace(one, parameters=(*one.parameters, *more), world_size=size)


def opened(size: int = 2, ordinals: list[int] | None = None) -> tuple[StreamGroup, list[PeerDriver]]:
    drivers = [PeerDriver() for _ in range(size)]
    devices = [StreamDevice(driver, lambda _: None, piece_bytes=64) for driver in drivers]
    return StreamGroup(devices, ordinals or list(range(size))), drivers


class Launches:
    """Launches of a kernel over its buffers."""

    def __init__(self, size: int = 2) -> None:
        self.group, self.drivers = opened(size)
        self.kernel = self.group.load(TEXT, of_ranks(size))
        self.progress, self.exchange = self.group.allocate(16), self.group.allocate(16)

    def launch(self, **more: Any) -> None:
        self.group.launch(
            self.kernel, {"progress": self.progress, "n": 3, "exchange": self.exchange, "logits": None, **more}
        )


def test_it_is_a_device_that_says_what_each_rank_has() -> None:
    group: Device = opened()[0]
    assert (group.name, group.describe().ranks, group.describe().blocks) == ("fake:0,1", 2, 132)
    shared = opened(4, [0, 0, 1, 1])[0].describe()
    assert (shared.ranks, shared.parts, shared.blocks) == (4, 2, 66)
    assert shared.total_bytes == group.describe().total_bytes // 2
    assert first_of(group) is not group and first_of(first_of(group)) is first_of(group)


def test_buffers_are_on_every_rank() -> None:
    group, _ = opened()
    buffer = group.allocate(8, fill=7)
    buffer.upload(np.arange(4, dtype=np.uint8), offset=2)
    assert all(part.download(np.uint8, 8).tolist() == [7, 7, 0, 1, 2, 3, 7, 7] for part in buffer.ranks)
    buffer.copy(0, 6, 2)
    buffer.ranks[0].fill(9)
    assert buffer.download(np.uint8, 8).tolist() == [9] * 8 and buffer.ranks[1].download(np.uint8, 8)[6] == 7
    buffer.free()
    with pytest.raises(ArgumentError, match="freed"):
        _ = buffer.ranks[1].address


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_has_its_number_its_part_and_those_of_its_peers(size: int) -> None:
    launches, found = Launches(size), dict[int, list[Any]]()
    logits = launches.group.allocate(4)
    for driver in launches.drivers:
        driver.kernel = lambda stream, values: found.setdefault(values[-2], values)
    launches.launch(logits=logits)
    launches.group.synchronize(5)
    parts = launches.exchange.ranks
    for rank, (progress, n, exchange, *peers, number, rows) in found.items():
        assert (number, n, progress, exchange) == (rank, 3, launches.progress.ranks[rank], parts[rank])
        assert peers == [parts[(rank + further) % size] for further in range(1, size)]
        assert rows is logits.ranks[0], "all write the rows of the first"
    assert sorted(found) == list(range(size))


def order_of_two_launches() -> list[list[str]]:
    """In which order ranks zero their exchange and run their kernels, twice, in fours. Each does as much as it can
    before another one does anything."""
    launches, order = Launches(), list[str]()
    for rank, driver in enumerate(launches.drivers):

        def zeroed(*given: Any, rank: int = rank) -> None:
            given[-1].work.append(lambda: order.append(f"{rank} zeroed"))

        driver.kernel = lambda stream, values: order.append(f"{values[4]} ran")
        driver.fill = zeroed  # type: ignore[method-assign]
    for _ in range(2):
        launches.exchange.fill(0)
        launches.launch()
    launches.group.synchronize(5)
    return [order[:4], order[4:]]


def test_kernels_begin_when_all_have_zeroed_their_exchange_and_none_is_zeroed_under_a_kernel() -> None:
    for of_launch in order_of_two_launches():
        assert sorted(of_launch[:2]) == ["0 zeroed", "1 zeroed"] and sorted(of_launch[2:]) == ["0 ran", "1 ran"]


@pytest.mark.parametrize(
    ("left_out", "found"), [(0, ["0 zeroed", "0 ran"]), (1, ["0 zeroed", "1 zeroed", "0 ran", "0 zeroed"])]
)
def test_without_either_half_of_the_gate_they_do_not(
    monkeypatch: pytest.MonkeyPatch, left_out: int, found: list[str]
) -> None:
    """That before the kernels, and that behind them."""
    meet, turns = StreamGroup._meet, count()

    def half(group: StreamGroup) -> None:
        if next(turns) % 2 != left_out:
            meet(group)

    monkeypatch.setattr(StreamGroup, "_meet", half)
    first, second = order_of_two_launches()
    assert [*first, *second][: len(found)] == found


def test_a_launch_that_not_all_ranks_make_gives_the_group_up() -> None:
    launches = Launches()

    def refused(*_: Any) -> None:
        raise DriverError("cuLaunchCooperativeKernel", "too many resources requested")

    launches.drivers[1].launch = refused  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="too many resources"):
        launches.launch()
    for call in (launches.group.is_done, launches.group.describe, lambda: launches.group.allocate(4)):
        with pytest.raises(DeviceError, match="step was launched on some GPUs alone"):
            call()
    assert all("abandon" in driver.calls for driver in launches.drivers)


def test_a_hang_is_told_by_rank_with_the_one_that_is_furthest_behind() -> None:
    launches = Launches()
    launches.drivers[0].kernel = hanging([5, 5, 5, 4])
    launches.drivers[1].kernel = hanging([5, 3, 5, 5])
    launches.launch()
    assert not any(launches.group.is_done() for _ in range(9)), "each time the fake GPUs do a little"
    with pytest.raises(LaunchTimeout) as caught:
        launches.group.synchronize(0.05)
    lines = str(caught.value).split("\n")
    assert lines == [
        "kernel step did not finish within 0.05 s",
        "rank 0 (fake:0): blocks 0-2: step 2, phase attention; block 3: step 2, phase qkv",
        "rank 1 (fake:1): blocks 0,2-3: step 2, phase attention; block 1: step 1, phase attention",
        "furthest behind is rank 1",
    ]
    with pytest.raises(DeviceError, match="did not finish within"):
        launches.launch()


def test_where_ranks_are_as_far_behind_none_is_named() -> None:
    launches = Launches()
    for driver in launches.drivers:
        driver.kernel = hanging([5, 3, 5, 5])
    launches.launch()
    assert not any(launches.group.is_done() for _ in range(9))
    with pytest.raises(LaunchTimeout) as caught:
        launches.group.synchronize(0.05)
    assert "rank 1 (fake:1)" in str(caught.value) and "furthest" not in str(caught.value)


def test_one_deadline_is_that_of_all_ranks() -> None:
    launches = Launches()
    launches.drivers[1].kernel = hanging([0, 0, 0, 0])
    launches.launch()
    with pytest.raises(LaunchTimeout, match=r"rank 1 \(fake:1\): blocks 0-3: step 0, phase qkv"):
        launches.group.synchronize(0.05)


def test_a_fault_of_one_rank_is_that_of_all() -> None:
    launches = Launches()
    launches.launch()
    launches.drivers[1].fault = DriverError("cuEventQuery", "CUDA_ERROR_ECC_UNCORRECTABLE", is_fault=True)
    with pytest.raises(DeviceError, match="ECC"):
        launches.group.synchronize(5)
    with pytest.raises(DeviceError, match="another GPU of the group: kernel step faulted: .*ECC"):
        launches.group.devices[0].describe()


def test_what_belongs_elsewhere_is_refused() -> None:
    launches, other = Launches(), opened()[0]
    for foreign in (launches.exchange.ranks[0], first_of(other).allocate(16)):
        with pytest.raises(ArgumentError, match="'exchange': the buffer belongs to one of the group's devices, or to"):
            launches.launch(exchange=foreign)
    with pytest.raises(ArgumentError, match="'exchange': the buffer belongs to another device"):
        launches.launch(exchange=other.allocate(16))
    swapped = GroupBuffer(launches.progress.ranks[:1] * 2)
    launches.launch(progress=swapped)  # peers' memory may be given: a kernel is trusted with what it is told
    alone = replace(of_ranks(), world_size=1)
    with pytest.raises(ArgumentError, match="kernel step is of 1 GPUs, and fake:0,1 has 2"):
        launches.group.launch(launches.group.load(TEXT, alone), {})
    with pytest.raises(ArgumentError, match="that this group loaded"):
        launches.group.launch(first_of(launches.group).load(TEXT, alone), {})


def test_gpus_of_a_group_are_of_one_kind_and_have_as_many_ranks() -> None:
    one = DeviceInfo("fake", "H200", "sm_90", 132, 1, 1, 1, "none")
    require_alike([one, one], [0, 1])
    with pytest.raises(DeviceError, match="of one kind, and 0 is H200, 1 is H100"):
        require_alike([one, replace(one, name="H100")], [0, 1])
    with pytest.raises(DeviceError, match="as many ranks as the others"):
        require_alike([one] * 3, [0, 0, 1])


def test_ranks_in_the_emulator_are_as_many_as_are_asked_for() -> None:
    with open_device("emulator", say=lambda _: None, ranks=2) as group:
        assert isinstance(group, EmulatorGroup) and group.describe().ranks == 2
    with pytest.raises(DeviceError, match="is of 2 GPUs, and 4 are to make steps together"):
        open_device("cuda:0,1", ranks=4)
    with pytest.raises(DeviceError, match="pycuda opens one GPU"):
        open_device("pycuda:0,1")
    assert isinstance(open_device("emulator"), EmulatorDevice)
