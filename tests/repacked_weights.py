"""All buffers of a checkpoint, packed by the host or by a device."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.generate import choose_plan, generate_repacking
from cheetah.models.dense.weights import buffer_bytes
from cheetah.models.family import Packing
from cheetah.models.registry import family_of
from cheetah.plan import Gpu, step_matrices
from cheetah.plan.repacking import Repacking
from cheetah.runtime.assembly.repacking import DeviceRepacker, Spare
from cheetah.runtime.checkpoint.loading import Checkpoint

POISON = 0xA5


class WatchedRepacker(DeviceRepacker):
    """Counts what it does, and spoils its staging memory before what is uploaded first for each part."""

    works = 0

    def upload(self, offset: int, data: NDArray[np.uint8]) -> None:
        if offset == 0:
            assert self._staging is not None
            self._staging.fill(0xEE)
        super().upload(offset, data)

    def repack(self, work: Repacking) -> None:
        self.works += 1
        super().repack(work)


def packed(
    checkpoint: Checkpoint, device: Any, gpu: Gpu, by_device: bool, spare: Spare | None = None
) -> tuple[dict[str, NDArray[np.uint8]], int, list[str]]:
    """The buffers' bytes by name, how many parts of matrices the device packed, and what was said."""
    config, family = checkpoint.config, family_of(checkpoint.config)
    matrices = step_matrices(config.shape, choose_plan(config, gpu), gpu)
    buffers = {name: device.allocate(size, POISON) for name, size in buffer_bytes(config, matrices).items()}
    said, done = list[str](), list[int]()
    generate = partial(generate_repacking, gpu)
    repacker = WatchedRepacker(device, buffers["weights"], spare, generate, said.append) if by_device else None
    packing = Packing(
        checkpoint.tensor,
        lambda name, offset, data: buffers[name].upload(data, offset),
        done.append,
        rows=checkpoint.rows,
        threads=2,
        lend=device.lend,
        repacker=repacker,
    )
    family.pack_weights(config, matrices, packing)
    assert sum(done) == sum(buffer.nbytes for buffer in buffers.values())
    found = {name: buffer.download(np.uint8, buffer.nbytes) for name, buffer in buffers.items()}
    for buffer in buffers.values():
        buffer.free()
    return found, repacker.works if repacker else 0, said
