"""Devices: what runs a kernel. One interface; CUDA, PyCUDA and the emulator behind it, each loaded when asked for.

device = open_device()                     # cuda where there is a GPU for it, else the emulator, and says which
kernel = device.load(text, manifest)
x = device.allocate(1024, fill=0)
device.launch(kernel, {"x": x, "n": 256})
device.synchronize(timeout_s=10)
"""

from __future__ import annotations

import sys

from cheetah.printable import printable
from cheetah.runtime.device.interface import (
    Argument,
    ArgumentError,
    Buffer,
    Device,
    DeviceError,
    DeviceInfo,
    Event,
    Kernel,
    LaunchTimeout,
    ProgressSource,
    Say,
)
from cheetah.runtime.device.progress import describe_progress

__all__ = [
    "DEVICE_NAMES",
    "Argument",
    "ArgumentError",
    "Buffer",
    "Device",
    "DeviceError",
    "DeviceInfo",
    "Event",
    "Kernel",
    "LaunchTimeout",
    "ProgressSource",
    "Say",
    "describe_progress",
    "open_device",
]

DEVICE_NAMES = ("cuda", "pycuda", "emulator")


def say_to_stderr(line: str) -> None:
    """The usual `Say`: a line on stderr, so that stdout carries the generated text alone. It may quote any file."""
    print(printable(line), file=sys.stderr, flush=True)


def open_device(name: str | None = None, *, compiler: str = "nvrtc", say: Say = say_to_stderr) -> Device:
    """The device `name`: "cuda", "pycuda" or "emulator"; a GPU other than the first as "cuda:1".

    Without a name: cuda where a driver and a GPU that can run the kernels are there, else the emulator, with one line
    that says why. compiler: "nvrtc" or "nvcc", for the two that run on a GPU. DeviceError says what is missing.
    """
    if name is None:
        name = _choose(say)
    kind, ordinal = _split(name)
    if kind == "cuda":
        from cheetah.runtime.device.cuda import open_cuda

        return open_cuda(say, ordinal, compiler)
    if kind == "pycuda":
        from cheetah.runtime.device.pycuda import open_pycuda

        return open_pycuda(say, ordinal, compiler)
    from cheetah.runtime.device.emulator import EmulatorDevice

    return EmulatorDevice(say)


def _choose(say: Say) -> str:
    from cheetah.runtime.device.cuda import why_not_cuda

    reason = why_not_cuda()
    if reason is None:
        return "cuda"
    say(f"using the emulator, which is slow: {reason}")
    return "emulator"


def _split(name: str) -> tuple[str, int]:
    kind, _, number = name.partition(":")
    if kind not in DEVICE_NAMES or (number and not number.isdecimal()) or (number and kind == "emulator"):
        raise DeviceError(f"unknown device {name!r}: use {', '.join(DEVICE_NAMES)}, or cuda:1 for the second GPU")
    return kind, int(number or 0)
