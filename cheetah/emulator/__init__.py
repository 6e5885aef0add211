"""Runs generated CUDA kernel text, unchanged, on the CPU.

    program = compile_program(text, "kernel", [("x", "int32_t*"), ("n", "uint32_t")])
    program.launch(grid=8, block=160, shared_bytes=4096, arguments=[x, x.size], scheduler="random", seed=3)

Every CUDA thread is a fibre, all blocks are resident, the schedule is a function of the seed; deadlocks, misuse of
primitives and (with `sanitize=True`) races are reported by line of the kernel text. What is not seen: missing proxy
fences, memory orders weaker than the CPU's other than by the sanitizer, bank conflicts, registers.
"""

from pathlib import Path

from cheetah.emulator.build import RUNTIME_FOLDER
from cheetah.emulator.compile import compile_program
from cheetah.emulator.errors import Deadlock, EmulatorError, Misuse, Race, SwitchLimit, TimeLimit
from cheetah.emulator.explore import ExploreReport, Failure, explore
from cheetah.emulator.program import SCHEDULERS, LaunchStats, Program, allocate

__all__ = [
    "SCHEDULERS",
    "Deadlock",
    "EmulatorError",
    "ExploreReport",
    "Failure",
    "LaunchStats",
    "Misuse",
    "Program",
    "Race",
    "SwitchLimit",
    "TimeLimit",
    "allocate",
    "compile_program",
    "emulator_header",
    "explore",
    "include_directory",
]


def include_directory() -> Path:
    """The folder to give to the compiler's -I, in which cheetah_emulator.h lies."""
    return RUNTIME_FOLDER


def emulator_header() -> Path:
    """The header that kernel text includes under CHEETAH_EMULATOR."""
    return RUNTIME_FOLDER / "cheetah_emulator.h"
