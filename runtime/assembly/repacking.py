"""A device that packs weights itself: staging memory, and launches of the kernel that does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cheetah.plan import Gpu
from cheetah.plan.repacking import Repacking
from cheetah.runtime.assembly.kernels import repacking_kernel
from cheetah.runtime.assembly.texts import Generated
from cheetah.runtime.background import Started
from cheetah.runtime.device import Say
from cheetah.runtime.device.interface import DeviceError

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer, Device, Kernel


@dataclass(frozen=True)
class Spare:
    """A buffer that nobody needs yet, which holds `fill` in every byte, or, if that is None, anything."""

    buffer: Buffer
    fill: int | None

    def restore(self) -> None:
        """As it was."""
        if self.fill is not None:
            self.buffer.fill(self.fill)


def new_repacker(device: Device, machine: Gpu, weights: Buffer, spare: Spare | None, say: Say) -> DeviceRepacker | None:
    """What packs on a device, to a buffer of weights; None in the emulator, where the host is faster."""
    if machine.emulated:
        return None
    return DeviceRepacker(device, weights, spare, lambda: repacking_kernel(machine), say)


class DeviceRepacker:
    """A `cheetah.models.repacking.Repacker`. weights: where packed matrices go. spare: staging memory where no other
    is left. generate: gives the kernel; asked for when there is something to pack."""

    def __init__(
        self, device: Device, weights: Buffer, spare: Spare | None, generate: Callable[[], Generated], say: Say
    ) -> None:
        self._device, self._weights, self._spare, self._generate, self._say = device, weights, spare, generate, say
        self._staging: Buffer | None = None
        self._compiled: Started[Kernel] | None = None
        self._kernel: Kernel | None = None

    @contextmanager
    def room(self, nbytes: int) -> Iterator[bool]:
        """See `Repacker`. The kernel is compiled from now on, in a thread of its own."""
        self._staging, give_back = self._taken(nbytes) if nbytes else (None, None)
        if self._staging is None or give_back is None:
            yield False
            return
        generated = self._generate()
        self._compiled = self._device.prepare(generated.text, generated.manifest)
        try:
            yield True
            self._device.synchronize()  # memory is free only behind what uses it, and kernels will want some
        finally:
            give_back()

    def _taken(self, nbytes: int) -> tuple[Buffer, Callable[[], None]] | tuple[None, None]:
        """Staging memory, and what gives it back."""
        try:
            allocated = self._device.allocate(nbytes)
            return allocated, allocated.free
        except DeviceError as error:
            if self._spare is not None and self._spare.buffer.nbytes >= nbytes:
                return self._spare.buffer, self._spare.restore
            self._say(f"weights are packed by the host, which takes longer: {error}")
            return None, None

    def upload(self, offset: int, data: NDArray[np.uint8]) -> None:
        """See `Repacker`."""
        assert self._staging is not None
        self._staging.upload(data, offset)

    def repack(self, work: Repacking) -> None:
        """See `Repacker`."""
        assert self._compiled is not None
        self._kernel = self._kernel or self._compiled()
        self._device.launch(self._kernel, {"staging": self._staging, "weights": self._weights, **asdict(work)})
