"""Buffers as a manifest lists them: allocated, filled, and the model's weights brought into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from cheetah.manifest import Buffer as BufferSpec
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.models.family import MatrixRows, Packing
from cheetah.models.registry import family_of
from cheetah.plan import Gpu, Plan, step_matrices
from cheetah.plan.world import Rank
from cheetah.runtime.assembly.repacking import Spare, new_repacker
from cheetah.runtime.device.group import DeviceGroup, GroupBuffer
from cheetah.stopwatch import Stopwatch

if TYPE_CHECKING:
    from cheetah.runtime.device import Say
    from cheetah.runtime.device.interface import Buffer, Device

FILL_BYTES = {"zero": 0, "poison": 0xFF, "host": None}


class Weights(Protocol):
    """What is needed of a checkpoint: the model's numbers, and its tensors as bf16 bits (uint16) by name.

    One that has `rows` as well, a function from a matrix's name to `MatrixRows`, has its matrices read in parts by it;
    where matrices are quantised it must, and gives a `QuantizedMatrix`. `kv_scales` may be those of a cache in 8 bits,
    f32 [layers, 2, kv_heads]; without them, or where they are None, its codes are the numbers themselves.
    """

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> NDArray[np.uint16]: ...


Progress = Callable[[int], None]
"""Takes the number of bytes of weights that were just written."""


def new_buffer(device: Device, buffer: BufferSpec) -> Buffer:
    """A buffer of a manifest, filled as it says."""
    if buffer.fill == "mapped":
        return device.allocate_mapped(buffer.bytes)
    return device.allocate(buffer.bytes, FILL_BYTES[buffer.fill])


def allocate_buffers(device: Device, manifest: Manifest, buffers: dict[str, Buffer]) -> None:
    """Puts every buffer of the manifest into `buffers`, filled as it says, but for those that are there already."""
    for buffer in manifest.buffers:
        if buffer.name not in buffers:
            buffers[buffer.name] = new_buffer(device, buffer)


def free_all(buffers: dict[str, Buffer]) -> None:
    """Frees and forgets all buffers."""
    while buffers:
        buffers.popitem()[1].free()


def _spare(buffers: Mapping[str, Buffer], manifest: Manifest) -> Spare:
    """The cache, which is empty as long as weights are loaded."""
    return Spare(buffers["kv"], FILL_BYTES[manifest.buffer("kv").fill])


def upload_weights(
    weights: Weights,
    manifest: Manifest,
    buffers: Mapping[str, Buffer],
    progress: Progress,
    device: Device | None = None,
    watch: Stopwatch | None = None,
    say: Say = lambda line: None,
) -> None:
    """Writes the family's tables, and packs every tensor into its buffer. Of several GPUs each gets what it has of
    them, all at once, by a thread each. device: whose the buffers are, where it can do its part; `say` is told if it
    has no room for that."""
    if manifest.world_size == 1:
        return _upload_rank(weights, manifest, buffers, progress, device, watch, say)

    def upload(rank: int) -> None:
        of_rank = {name: buffer.ranks[rank] for name, buffer in buffers.items() if isinstance(buffer, GroupBuffer)}
        own = None if device is None else cast("DeviceGroup[Any]", device).devices[rank]
        _upload_rank(weights, manifest, of_rank, progress, own, watch, say, rank)

    with ThreadPoolExecutor(manifest.world_size, "upload") as pool:
        for uploaded in [pool.submit(upload, rank) for rank in range(manifest.world_size)]:
            uploaded.result()


def _upload_rank(
    weights: Weights,
    manifest: Manifest,
    buffers: Mapping[str, Buffer],
    progress: Progress,
    device: Device | None,
    watch: Stopwatch | None,
    say: Say,
    rank: int = 0,
) -> None:

    def write(name: str, offset: int, data: NDArray[np.uint8]) -> None:
        buffers[name].upload(data, offset)

    rows: Callable[[str], MatrixRows] | None = getattr(weights, "rows", None)
    if "kv_scales" in buffers:
        scales: NDArray[np.float32] | None = getattr(weights, "kv_scales", None)
        ones = np.ones(manifest.buffer("kv_scales").shape, np.float32)
        buffers["kv_scales"].upload(ones if scales is None else scales[:, :, _kv_heads(weights, manifest, rank)])
    config, family = weights.config, family_of(weights.config)
    for name, table in family.tables(config, Plan.from_dict(manifest.plan)).items():
        buffers[name].upload(table)
    plan, gpu = Plan.from_dict(manifest.plan), Gpu(**manifest.gpu, ranks=manifest.world_size)
    matrices = step_matrices(config.shape, plan, gpu)
    packing = Packing(weights.tensor, write, progress, rows, rank, bool(plan.fused_router), watch=watch or Stopwatch())
    if device is not None:
        repacker = new_repacker(device, gpu, buffers["weights"], _spare(buffers, manifest), say)
        packing = replace(packing, lend=device.lend, repacker=repacker)
    family.pack_weights(config, matrices, packing)


def _kv_heads(weights: Weights, manifest: Manifest, rank: int) -> slice:
    heads = Rank(rank, manifest.world_size).part(weights.config.kv_heads)
    return slice(heads.start, heads.stop)
