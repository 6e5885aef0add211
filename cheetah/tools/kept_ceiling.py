"""The read ceiling of the machine that a model runs on: measured once, and kept in the cache's folder.

A share of it that is told while a model runs is of the ceiling as it was then; `cheetah bench` measures its own in the
same run.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cheetah.caches import cache_folder
from cheetah.errors import CheetahError
from cheetah.manifest import write_atomically
from cheetah.plan import gpu_named
from cheetah.tools.measured_ceiling import ReadCeiling
from cheetah.untrusted import read_json

if TYPE_CHECKING:
    from cheetah.runtime import LLM

FILE = "read_ceilings.json"


def read_ceiling(llm: LLM) -> float | None:
    """GB/s that this model's GPU reads at most; None on the emulator. Nothing else may run on the device meanwhile."""
    device, gpu = llm.assembly.device, gpu_named(llm.manifest.gpu["name"])
    if gpu.emulated:
        return None
    info, path = device.describe(), cache_folder() / FILE
    machine, known = f"{info.name}, {info.driver}", _known(path)
    if machine not in known:
        with contextlib.closing(ReadCeiling(device, gpu, llm.assembly.buffers["weights"])) as ceiling:
            known[machine] = ceiling.gb_per_s()
        with contextlib.suppress(OSError):  # a folder that cannot be written keeps nothing
            write_atomically(path, json.dumps(known, indent=1).encode())
    return known[machine]


def _known(path: Path) -> dict[str, float]:
    """GB/s by machine, as far as the file says such."""
    try:
        found: dict[str, Any] = read_json(path) if path.is_file() else {}
    except (CheetahError, OSError):
        return {}
    return {name: float(value) for name, value in found.items() if _is_speed(value)}


def _is_speed(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6
