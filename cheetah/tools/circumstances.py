"""Under which circumstances something is measured: the commit, the time, and what nvidia-smi says of the GPU."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
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


def now() -> str:
    """The time in UTC, by which records are told apart: "2026-11-22T21:50:07Z"."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def clocks(ordinal: int = 0) -> dict[str, float]:
    """MHz, degrees and watts now; empty where there is no nvidia-smi."""
    fields, gpu = ",".join(CLOCKS), visible(ordinal)
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={gpu}"]
    values = [value.strip() for value in _output(query).split(",")]
    if len(values) != len(CLOCKS):
        return {}
    return {name: float(value) for name, value in zip(CLOCKS.values(), values, strict=True) if _is_number(value)}


def visible(ordinal: int) -> str:
    """By which nvidia-smi knows the GPU that a process has as `ordinal`: it looks past $CUDA_VISIBLE_DEVICES."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return names[ordinal].strip() if any(names) and ordinal < len(names) else str(ordinal)


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
