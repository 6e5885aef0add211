"""What the examples share: print a kernel's CUDA, or run it in the emulator. Not part of the language."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

import cheetah as ch
from cheetah.emulator import SCHEDULERS, compile_program


def emulate(
    kernel: ch.Kernel, *, grid: int, block: int, arguments: Sequence[np.ndarray | int | float], shared_bytes: int = 0
) -> None:
    """Launch `kernel` as the command line says; arrays are written in place. With --cuda, print its text and end."""
    parser = argparse.ArgumentParser(description="Run this example in the emulator and check it against numpy.")
    parser.add_argument("--cuda", action="store_true", help="print the generated CUDA instead of running it")
    parser.add_argument("--scheduler", choices=SCHEDULERS, default="random", help="which thread runs next")
    parser.add_argument("--seed", type=int, default=0, help="of the scheduler")
    parser.add_argument("--sanitize", action="store_true", help="report races (slow)")
    options = parser.parse_args()
    text = ch.render_file(kernel)
    if options.cuda:
        print(text, end="")
        raise SystemExit
    parameters = [(name, str(type_)) for name, type_ in kernel.params.items()]
    program = compile_program(text, kernel.name, parameters, sanitize=options.sanitize)
    program.launch(grid, block, shared_bytes, arguments, scheduler=options.scheduler, seed=options.seed)
    print(f"{kernel.name}: ran {grid} blocks of {block} threads, {shared_bytes} bytes of shared memory each")


def check(name: str, found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    """Compare with numpy's result, relative to its largest value; ends the program where they differ."""
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not error <= tolerance:  # also where it is NaN
        raise SystemExit(f"{name} differs from numpy by {error:.2g}; {tolerance:.2g} is allowed")
    print(f"{name} agrees with numpy to {error:.2g}")
