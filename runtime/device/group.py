"""Several GPUs (ranks) as one `Device`: every buffer once on each, every launch on all of them at once.

Who uses a device does not know of ranks: what is uploaded goes to each, what is downloaded is the first one's, which is
also the one that the host hears from while a launch runs. Loading alone brings each its part (`GroupBuffer.ranks`).

**The gate.** Ranks publish into one another's exchange, which is zeroed before each launch. A word that one rank
published before the other had zeroed its exchange would be lost, and both would wait for ever; a word of a launch that
has ended here, but not there, would land in an exchange that is zero already, and be taken for one of the next launch.
So before the kernels of a launch start, each rank's stream waits for all that was asked of the others' before it, and
behind them for the ends of all. Nothing between the first and the last launch of a group may wait for a GPU: the ranks
that were started wait for those that were not. So all arguments are made and all kernels loaded before, and if one of
the later launches is refused, the group is given up.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Generic, TypeVar

from numpy.typing import DTypeLike, NDArray

from cheetah.manifest import FIRST_RANKS, RANK, Manifest, of_peer
from cheetah.piece_ring import PieceRing
from cheetah.runtime.background import Started
from cheetah.runtime.device.emulator import EmulatorDevice, EmulatorKernel
from cheetah.runtime.device.interface import (
    Argument,
    ArgumentError,
    Buffer,
    Device,
    DeviceError,
    DeviceInfo,
    Event,
    Kernel,
    LaunchTimeout,
    MappedBuffer,
    ProgressSource,
)
from cheetah.runtime.device.progress import NOT_STARTED
from cheetah.runtime.device.stream_device import StreamDevice, StreamKernel

One = TypeVar("One", bound=Device)


class GroupBuffer:
    """A buffer of the same size on every rank. ranks: each one's."""

    def __init__(self, ranks: Sequence[Buffer]) -> None:
        self.ranks = tuple(ranks)

    @property
    def nbytes(self) -> int:
        return self.ranks[0].nbytes

    @property
    def address(self) -> int:
        return self.ranks[0].address

    def upload(self, array: NDArray[Any], offset: int = 0) -> None:
        for buffer in self.ranks:
            buffer.upload(array, offset)

    def download(self, dtype: DTypeLike, shape: int | tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        """What the first rank has."""
        return self.ranks[0].download(dtype, shape, offset)

    def fill(self, byte: int) -> None:
        for buffer in self.ranks:
            buffer.fill(byte)

    def copy(self, source_offset: int, target_offset: int, nbytes: int) -> None:
        for buffer in self.ranks:
            buffer.copy(source_offset, target_offset, nbytes)

    def copy_of(self, source: Buffer, source_offset: int, target_offset: int, nbytes: int) -> None:
        for buffer, other in zip(self.ranks, buffers_of_ranks(source), strict=True):
            buffer.copy_of(other, source_offset, target_offset, nbytes)

    def free(self) -> None:
        for buffer in self.ranks:
            buffer.free()


def buffers_of_ranks(buffer: Any) -> tuple[Any, ...]:
    """Each rank's, or that of a single device."""
    return buffer.ranks if isinstance(buffer, GroupBuffer) else (buffer,)


class DeviceGroup(ABC, Generic[One]):
    """A `Device` (see there) of several, one a rank. All are given up when one is."""

    def __init__(self, name: str, devices: Sequence[One], places: Sequence[object]) -> None:
        self.name, self.devices = name, tuple(devices)
        self._parts = max(Counter(places).values())

    def describe(self) -> DeviceInfo:
        """What each rank has."""
        found = [device.describe() for device in self.devices]
        return replace(
            found[0],
            blocks=found[0].blocks // self._parts,
            total_bytes=found[0].total_bytes // self._parts,
            free_bytes=min(one.free_bytes for one in found) // self._parts,
            ranks=len(found),
            parts=self._parts,
        )

    def load(self, text: str, manifest: Manifest) -> Kernel:
        return self.prepare(text, manifest)()

    @abstractmethod
    def prepare(self, text: str, manifest: Manifest) -> Started[Kernel]: ...

    def allocate(self, nbytes: int, fill: int | None = None) -> GroupBuffer:
        with self._together():
            return GroupBuffer([device.allocate(nbytes, fill) for device in self.devices])

    def allocate_mapped(self, nbytes: int) -> MappedBuffer:
        """One for all: it lies in the host's memory."""
        return self.devices[0].allocate_mapped(nbytes)

    def lend(self, nbytes: int) -> AbstractContextManager[PieceRing]:
        return self.devices[0].lend(nbytes)

    @abstractmethod
    def launch(self, kernel: Kernel, arguments: Mapping[str, Argument]) -> None: ...

    @abstractmethod
    def synchronize(
        self, timeout_s: float | None = None, progress: ProgressSource | Callable[[], str] | None = None
    ) -> None: ...

    def is_done(self) -> bool:
        with self._together():
            return all([device.is_done() for device in self.devices])

    def record(self) -> Event:
        return self.devices[0].record()

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return self.devices[0].elapsed_ms(start, end)

    def close(self) -> None:
        for device in self.devices:
            device.close()

    def __enter__(self) -> DeviceGroup[One]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for device in self.devices:
            device.__exit__(kind, error, trace)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around calls after which all devices are given up if one is."""
        yield

    def _arguments(self, manifest: Manifest, arguments: Mapping[str, Argument]) -> list[dict[str, Argument]]:
        """Those of each rank: its part of every buffer, its number, and its peers' parts."""
        if manifest.world_size != len(self.devices):
            raise ArgumentError(
                f"kernel {manifest.kernel} is of {manifest.world_size} GPUs, and {self.name} has {len(self.devices)}"
            )
        own = [
            {name: self._part(name, value, rank) for name, value in arguments.items()}
            for rank in range(len(self.devices))
        ]
        for rank, of_rank in enumerate(own):
            of_rank |= self._of_ranks(manifest, arguments, rank)
        return own

    def _part(self, name: str, value: Argument, rank: int) -> Argument:
        if isinstance(value, GroupBuffer):
            return value.ranks[0 if name in FIRST_RANKS else rank]
        if value is None or isinstance(value, (int, float)) or hasattr(value, "array"):
            return value  # a number, or memory of the host
        raise ArgumentError(f"{name!r}: the buffer belongs to one of the group's devices, or to another")

    def _of_ranks(self, manifest: Manifest, arguments: Mapping[str, Argument], rank: int) -> dict[str, Argument]:
        found: dict[str, Argument] = {}
        for parameter in manifest.parameters:
            if parameter.name == RANK:
                found[RANK] = rank
            elif (peer := of_peer(parameter.name)) is not None:
                name, further = peer
                found[parameter.name] = self._part(name, arguments[name], (rank + further) % len(self.devices))
        return found


@dataclass(frozen=True)
class GroupKernel:
    """A kernel as each rank has loaded it."""

    manifest: Manifest
    ranks: tuple[StreamKernel, ...]


class StreamGroup(DeviceGroup[StreamDevice]):
    """GPUs of one host whose kernels reach one another's memory. ordinals: of the devices; one that comes several times
    has so many ranks."""

    def __init__(self, devices: Sequence[StreamDevice], ordinals: Sequence[int]) -> None:
        super().__init__(f"{devices[0].name}:{','.join(map(str, ordinals))}", devices, ordinals)
        self._ordinals = tuple(ordinals)
        for device in devices:
            device.peers = tuple(other for other in devices if other is not device)

    def prepare(self, text: str, manifest: Manifest) -> Started[Kernel]:
        """Compiled once, loaded on each."""
        compiled = self.devices[0].compiling(text, manifest)
        return compiled.then(
            lambda cubin: GroupKernel(manifest, tuple(device.loaded(manifest, cubin) for device in self.devices))
        )

    def launch(self, kernel: Kernel, arguments: Mapping[str, Argument]) -> None:
        if not isinstance(kernel, GroupKernel):
            raise ArgumentError(f"launch takes a kernel that this group loaded, not a {type(kernel).__name__}")
        of_ranks = self._arguments(kernel.manifest, arguments)
        ready = [
            device.readied(own, of_rank)
            for device, own, of_rank in zip(self.devices, kernel.ranks, of_ranks, strict=True)
        ]
        with self._together():
            self._meet()
            try:
                for device, one in zip(self.devices, ready, strict=True):
                    device.start(one)
            except BaseException as error:
                self._give_up(f"{kernel.manifest.kernel} was launched on some GPUs alone: {error}")
                raise
            self._meet()

    def _meet(self) -> None:
        """What is asked of a rank from now on comes behind all that was asked of any before."""
        for device in self.devices:
            device.mark()
        for device in self.devices:
            for other in device.peers:
                device.follow(other)

    def synchronize(
        self, timeout_s: float | None = None, progress: ProgressSource | Callable[[], str] | None = None
    ) -> None:
        """With one deadline for all."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._together():
            for device in self.devices:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not device.ends_within(left):
                    raise self._timed_out(timeout_s or 0.0, progress)

    def _timed_out(self, timeout_s: float, progress: ProgressSource | Callable[[], str] | None) -> LaunchTimeout:
        what = self.devices[0].last_work
        reports = [device.progress_report(_of_rank(progress, rank)) for rank, device in enumerate(self.devices)]
        lines = [
            f"rank {rank} ({self.devices[rank].name}:{self._ordinals[rank]}): {report}"
            for rank, (_, report) in enumerate(reports)
        ]
        lines += _who_is_behind([words for words, _ in reports])
        self._give_up(f"{what} did not finish within {timeout_s:g} s and may still be running")
        words = reports[0][0]
        return LaunchTimeout("\n".join([f"{what} did not finish within {timeout_s:g} s", *lines]), words)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except DeviceError:
            found = next((reason for device in self.devices if (reason := device.unusable) is not None), None)
            if found is not None:
                self._give_up(f"another GPU of the group: {found}")
            raise

    def _give_up(self, reason: str) -> None:
        for device in self.devices:
            device.give_up(reason)


def _who_is_behind(progress: Sequence[Sequence[int] | None]) -> list[str]:
    """The rank with the block that is furthest behind, where that is a single one; as a line of a report."""
    lasts = {
        rank: min(-1 if word == NOT_STARTED else word for word in words) for rank, words in enumerate(progress) if words
    }
    behind = [rank for rank, last in lasts.items() if last == min(lasts.values())]
    return [f"furthest behind is rank {behind[0]}"] if len(behind) == 1 else []


def _of_rank(
    progress: ProgressSource | Callable[[], str] | None, rank: int
) -> ProgressSource | Callable[[], str] | None:
    if isinstance(progress, ProgressSource) and isinstance(progress.buffer, GroupBuffer):
        return ProgressSource(progress.buffer.ranks[rank], progress.phases)
    return progress


class EmulatorGroup(DeviceGroup[EmulatorDevice]):
    """Ranks in the emulator: all blocks of all of them run in one machine."""

    def __init__(self, devices: Sequence[EmulatorDevice]) -> None:
        super().__init__(devices[0].name, devices, range(len(devices)))

    def prepare(self, text: str, manifest: Manifest) -> Started[Kernel]:
        prepared: Started[Kernel] = self.devices[0].prepare(text, manifest)
        return prepared

    def launch(self, kernel: Kernel, arguments: Mapping[str, Argument]) -> None:
        if not isinstance(kernel, EmulatorKernel):
            raise ArgumentError(f"launch takes a kernel that this group loaded, not a {type(kernel).__name__}")
        self.devices[0].launch_together(kernel, self._arguments(kernel.manifest, arguments))

    def synchronize(
        self, timeout_s: float | None = None, progress: ProgressSource | Callable[[], str] | None = None
    ) -> None:
        self.devices[0].synchronize(timeout_s, progress)


def first_of(device: Device) -> Device:
    """The device itself, or the first of several."""
    first: Device = device.devices[0] if isinstance(device, DeviceGroup) else device
    return first


def part_of_first(buffer: Buffer) -> Buffer:
    """The buffer itself, or what the first of several devices has of it."""
    return buffer.ranks[0] if isinstance(buffer, GroupBuffer) else buffer


def require_alike(infos: Sequence[DeviceInfo], ordinals: Sequence[int]) -> None:
    """DeviceError unless GPUs are of one kind, and ranks are dealt to them evenly."""
    counts = Counter(ordinals)
    if len(set(counts.values())) > 1:
        raise DeviceError(f"GPUs {', '.join(map(str, ordinals))}: give each as many ranks as the others")
    names = [info.name for info in infos]
    if len(set(names)) > 1:
        listed = ", ".join(f"{ordinal} is {name}" for ordinal, name in zip(ordinals, names, strict=True))
        raise DeviceError(f"GPUs that make steps together are of one kind, and {listed}")
