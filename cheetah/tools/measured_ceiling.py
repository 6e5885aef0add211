"""How fast a device reads memory, measured by the kernel of `ceiling` whenever it is asked."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from cheetah.plan import Gpu
from cheetah.runtime.assembly.assemble import GPU_TIMEOUT_S
from cheetah.runtime.device.group import first_of, part_of_first
from cheetah.tools.ceiling import STAGE_BYTES, generate_ceiling
from cheetah.tools.random_buffers import fill_with, random_bits

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Argument, Buffer, Device

CEILING_ROUNDS = 900  # chunks of 64 KB for each block: 7.8 GB on 132 blocks
CEILING_CHAIN = 8  # launches that are timed together, as decode steps are: a launch's beginning and end cost 1 to 2 %
CEILING_SAMPLES, CEILING_WARMUP = 7, 2


class ReadCeiling:
    """How fast this device reads memory by bulk copies, measured when asked.

    It reads memory of its own, or, where that does not fit beside the model, the model's weights. Of several GPUs it is
    measured on the first.
    """

    def __init__(self, device: Device, gpu: Gpu, weights: Buffer) -> None:
        self._device = device = first_of(device)
        gpu, weights = replace(gpu, ranks=1), part_of_first(weights)
        ceiling = generate_ceiling(gpu)
        self._kernel = device.load(ceiling.text, ceiling.manifest)
        self._sink = device.allocate(4 * gpu.blocks)
        round_bytes = gpu.blocks * STAGE_BYTES
        wanted = CEILING_ROUNDS * round_bytes
        self._is_own = device.describe().free_bytes > wanted + 2**28 or wanted > 4 * weights.nbytes
        self._data = device.allocate(wanted) if self._is_own else weights
        if self._is_own:
            fill_with(self._data, random_bits(1.0))
        self._rounds = min(CEILING_ROUNDS, self._data.nbytes // round_bytes)
        self._bytes = self._rounds * round_bytes

    def close(self) -> None:
        """Gives the memory back that it took."""
        self._sink.free()
        if self._is_own:
            self._data.free()

    def gb_per_s(self) -> float:
        """The median of a few samples."""
        samples = [self._sample() for _ in range(CEILING_WARMUP + CEILING_SAMPLES)]
        return CEILING_CHAIN * self._bytes / median(samples[CEILING_WARMUP:]) / 1e6

    def _sample(self) -> float:
        """Milliseconds of CEILING_CHAIN launches."""
        arguments: dict[str, Argument] = {"data": self._data, "sink": self._sink, "rounds": self._rounds}
        before = self._device.record()
        for _ in range(CEILING_CHAIN):
            self._device.launch(self._kernel, arguments)
        after = self._device.record()
        self._device.synchronize(GPU_TIMEOUT_S)
        return self._device.elapsed_ms(before, after)
