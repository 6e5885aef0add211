"""Can a device run all blocks of a launch at once? They wait for each other: one that never starts hangs the rest."""

from __future__ import annotations

from cheetah.manifest import Manifest
from cheetah.runtime.device.interface import DeviceError, DeviceInfo


def check_machine(manifest: Manifest, info: DeviceInfo) -> None:
    """DeviceError, in one sentence, if the GPU has the wrong architecture, too few SMs or too little shared memory."""
    launch = manifest.launch
    wanted = str(manifest.gpu.get("arch", "sm_90a"))
    if not _runs(wanted, info.arch):
        raise DeviceError(
            f"kernel {manifest.kernel} is made for {wanted} (compute capability {_capability(wanted)}), but "
            f"{info.name} is {info.arch}: it needs an H100 or H200, or --device emulator"
        )
    if launch.blocks > info.blocks:
        raise DeviceError(
            f"kernel {manifest.kernel} needs {launch.blocks} blocks running at once, one an SM, but {info.name} has "
            f"{info.blocks} SMs: generate it for a GPU of {info.blocks} blocks"
        )
    if launch.shared_bytes > info.shared_bytes:
        raise DeviceError(
            f"kernel {manifest.kernel} needs {launch.shared_bytes} bytes of shared memory a block, but a block has "
            f"{info.shared_bytes} on {info.name}: generate it with fewer or smaller stages"
        )


def check_occupancy(manifest: Manifest, info: DeviceInfo, blocks_per_sm: int) -> None:
    """DeviceError if the compiled kernel does not fit an SM, or its blocks not all SMs together."""
    launch = manifest.launch
    if blocks_per_sm < 1:
        raise DeviceError(
            f"kernel {manifest.kernel} does not fit an SM of {info.name}: {launch.threads} threads, their registers "
            f"and {launch.shared_bytes} bytes of shared memory are too much; use fewer threads or smaller stages"
        )
    if launch.blocks > blocks_per_sm * info.blocks:
        raise DeviceError(
            f"kernel {manifest.kernel} needs {launch.blocks} blocks at once; {info.name} holds "
            f"{blocks_per_sm} x {info.blocks} = {blocks_per_sm * info.blocks}"
        )


def _runs(wanted: str, found: str) -> bool:
    """Code for sm_XYa runs on compute capability X.Y alone; code for sm_XY also on a later minor version."""
    if wanted.endswith("a"):
        return wanted[:-1] == found
    return wanted[:-1] == found[:-1] and wanted <= found


def _capability(arch: str) -> str:
    digits = arch.removeprefix("sm_").rstrip("af")
    return f"{digits[:-1]}.{digits[-1]}"
