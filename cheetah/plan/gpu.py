"""The machines: plain constants, one `Gpu` each. To add a GPU, add one line to `GPUS`.

Several GPUs that make steps together are a machine too: "h200x2" is two of "h200". "h200.2x2" is one of them whose
blocks are shared out to two ranks, to test on.

Units: bytes are bytes, GB = 1e9 bytes, KB of shared memory = 1024 bytes.
"""

import re
from dataclasses import dataclass, replace

from cheetah.plan.errors import PlanError, require_positive
from cheetah.plan.formats import KV_TILE_TOKENS
from cheetah.printable import shown

SHARED_BYTES_SM90 = 227 * 1024
"""Most dynamic shared memory of one block on compute capability 9.0 (CUDA C++ Programming Guide)."""


RANKS = (1, 2, 4, 8)
"""How many GPUs can make steps together."""


@dataclass(frozen=True)
class Gpu:
    """What the plan needs to know of a machine.

    `blocks` is the number of SMs and the grid size: one block an SM, all resident. `read_gb_per_s` is the rate at which
    weights can be read (GB = 1e9 bytes), the ceiling of every prediction; `rate_source` says where that number is from.
    `kv_chunk_min` is M of the load-balanced KV scheduler (FlashInfer, Algorithm 1): fewest keys of an item of
    attention. 256 keys: so a context of up to 256 keys needs no merge of states, which is worth 1 to 2 % there; at 512
    keys it costs as much, beyond that little either way (H200, benchmarks/LOG.md). `kv_item_cost`: what an item costs a
    block beside its keys, in keys. `ranks` such GPUs make each step together; all else is of one of them.
    """

    name: str
    arch: str
    blocks: int
    shared_bytes: int
    read_gb_per_s: float
    memory_bytes: int
    rate_source: str
    emulated: bool = False
    kv_chunk_min: int = 256
    kv_item_cost: int = 128
    ranks: int = 1

    def __post_init__(self) -> None:
        place = f"Gpu({self.name!r})"
        require_positive(place, blocks=self.blocks, shared_bytes=self.shared_bytes, memory_bytes=self.memory_bytes)
        require_positive(place, kv_chunk_min=self.kv_chunk_min)
        if self.kv_chunk_min % KV_TILE_TOKENS or self.kv_item_cost < 0:
            raise PlanError(
                f"{place}: kv_chunk_min {self.kv_chunk_min}, kv_item_cost {self.kv_item_cost}: give a multiple of "
                f"{KV_TILE_TOKENS}, and no negative cost"
            )
        if self.ranks not in RANKS:
            raise PlanError(f"{place}: {self.ranks} GPUs together: give one of {', '.join(map(str, RANKS))}")
        if not self.read_gb_per_s > 0:
            raise PlanError(
                f"{place}: read_gb_per_s is {self.read_gb_per_s!r}: give a rate above 0 (1e9 bytes a second)"
            )


def _emulator(name: str, blocks: int) -> Gpu:
    """Small, so that little work is split too."""
    rate_source = "nominal: the emulator has no memory rate"
    fixed = (SHARED_BYTES_SM90, 1.0, 8 * 2**30, rate_source)
    return Gpu(name, "sm_90a", blocks, *fixed, emulated=True, kv_chunk_min=64, kv_item_cost=0)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "h200",
            "sm_90a",
            132,
            SHARED_BYTES_SM90,
            4720.0,
            141 * 10**9,
            "highest read rate seen; records read 4570 to 4610",
        ),
        Gpu("h100", "sm_90a", 132, SHARED_BYTES_SM90, 3350.0, 80 * 10**9, "H100 SXM data sheet; not measured here"),
        _emulator("emulator", 4),
        _emulator("emulator-2", 2),
        _emulator("emulator-8", 8),
    )
}


def gpu_named(name: object) -> Gpu:
    """The machine of that name, such as "h200", or "h200x2" for two of them; PlanError lists the names there are."""
    found = re.fullmatch(r"(.+?)(?:\.(\d))?(?:x(\d))?", name) if isinstance(name, str) else None
    if found is None or found[1] not in GPUS:
        known = f"choose one of {', '.join(GPUS)}, or add a Gpu(...) to cheetah/plan/gpu.py"
        raise PlanError(f"gpu {shown(name)} is not known: {known}")
    return together(part_of(GPUS[found[1]], int(found[2] or 1)), int(found[3] or 1))


def together(gpu: Gpu, ranks: int) -> Gpu:
    """So many such GPUs as one machine. PlanError where there can be no such machine."""
    return gpu if ranks == 1 else replace(gpu, name=f"{gpu.name}x{ranks}", ranks=ranks)


def part_of(gpu: Gpu, parts: int) -> Gpu:
    """What each of so many ranks has of a GPU that they share. PlanError where it cannot be shared so."""
    if parts == 1:
        return gpu
    if parts not in RANKS:
        raise PlanError(f"gpu {gpu.name!r} in {parts} parts: give one of {', '.join(map(str, RANKS))}")
    return replace(
        gpu,
        name=f"{gpu.name}.{parts}",
        blocks=gpu.blocks // parts,
        read_gb_per_s=gpu.read_gb_per_s / parts,
        memory_bytes=gpu.memory_bytes // parts,
    )
