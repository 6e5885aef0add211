"""What a start took, stage by stage, for `--verbose`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from cheetah.stopwatch import Stopwatch


def process_seconds() -> float:
    """Seconds since this process was started, to a hundredth; Linux only."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_ticks = int(after_name[19])  # field 22, "starttime" (proc_pid_stat(5)); after_name begins with field 3
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def stage_lines(watch: Stopwatch) -> list[str]:
    """A line for each stage, in the order in which stages ended first."""
    return [f"{seconds:8.2f} s  {stage}" for stage, seconds in watch.seconds.items()]
