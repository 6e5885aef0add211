"""Under which circumstances something is measured: the commit, and what nvidia-smi says of the GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from cheetah.version import __version__

CLOCKS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
}
"""Field of nvidia-smi: its name in a record."""


def commit() -> str:
    """The checkout's commit, "-dirty" if it has changes; $CHEETAH_COMMIT or the version where this is no checkout."""
    folder = Path(__file__).resolve().parent
    described = _output(["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"])
    return described or os.environ.get("CHEETAH_COMMIT") or f"version {__version__}"


def clocks(ordinal: int = 0) -> dict[str, float]:
    """MHz, degrees and watts now; empty where there is no nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader,nounits", f"--id={ordinal}"]
    values = [value.strip() for value in _output(query).split(",")]
    if len(values) != len(CLOCKS):
        return {}
    return {name: float(value) for name, value in zip(CLOCKS.values(), values, strict=True) if _is_number(value)}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _output(command: list[str]) -> str:
    """What a command prints; "" if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
