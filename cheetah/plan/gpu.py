"""The machines: plain constants, one `Gpu` each. To add a GPU, add one line to `GPUS`.

Units: bytes are bytes, GB = 1e9 bytes, KB of shared memory = 1024 bytes.
"""

from dataclasses import dataclass

from cheetah.plan.errors import PlanError, require_positive
from cheetah.printable import shown

SHARED_BYTES_SM90 = 227 * 1024
"""Most dynamic shared memory of one block on compute capability 9.0 (CUDA C++ Programming Guide)."""


@dataclass(frozen=True)
class Gpu:
    """What the plan needs to know of a machine.

    `blocks` is the number of SMs and the grid size: one block an SM, all resident. `read_gb_per_s` is the rate at which
    weights can be read (GB = 1e9 bytes), the ceiling of every prediction; `rate_source` says where that number is from.
    """

    name: str
    arch: str
    blocks: int
    shared_bytes: int
    read_gb_per_s: float
    memory_bytes: int
    rate_source: str
    emulated: bool = False

    def __post_init__(self) -> None:
        place = f"Gpu({self.name!r})"
        require_positive(place, blocks=self.blocks, shared_bytes=self.shared_bytes, memory_bytes=self.memory_bytes)
        if not self.read_gb_per_s > 0:
            raise PlanError(
                f"{place}: read_gb_per_s is {self.read_gb_per_s!r}: give a rate above 0 (1e9 bytes a second)"
            )


def _emulator(name: str, blocks: int) -> Gpu:
    rate_source = "nominal: the emulator has no memory rate"
    return Gpu(name, "sm_90a", blocks, SHARED_BYTES_SM90, 1.0, 8 * 2**30, rate_source, emulated=True)


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
    """The machine of that name; PlanError lists the names there are."""
    if not isinstance(name, str) or name not in GPUS:
        known = f"choose one of {', '.join(GPUS)}, or add a Gpu(...) to cheetah/plan/gpu.py"
        raise PlanError(f"gpu {shown(name)} is not known: {known}")
    return GPUS[name]
