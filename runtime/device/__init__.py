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


def open_device(
    name: str | None = None, *, compiler: str = "nvrtc", say: Say = say_to_stderr, ranks: int = 1
) -> Device:
    """The device `name`: "cuda", "pycuda" or "emulator"; a GPU other than the first as "cuda:1", several that make
    steps together as "cuda:0,1".

    Without a name: cuda where a driver and a GPU that can run the kernels are there, else the emulator, with one line
    that says why. compiler: "nvrtc" or "nvcc", for the two that run on a GPU. ranks: how many GPUs make steps together,
    by default the first that there are; of the emulator, as many ranks in it. DeviceError says what is missing.
    """
    if name is None:
        name = _choose(say)
    kind, ordinals = _split(name)
    ordinals = ordinals or tuple(range(ranks))
    if len(ordinals) != ranks and ranks > 1:
        raise DeviceError(f"device {name!r} is of {len(ordinals)} GPUs, and {ranks} are to make steps together")
    if kind == "cuda":
        from cheetah.runtime.device.cuda import open_cuda, open_cuda_group

        return open_cuda_group(say, ordinals, compiler) if len(ordinals) > 1 else open_cuda(say, ordinals[0], compiler)
    if kind == "pycuda":
        from cheetah.runtime.device.pycuda import open_pycuda

        if len(ordinals) > 1:
            raise DeviceError("pycuda opens one GPU: use device cuda for several")
        return open_pycuda(say, ordinals[0], compiler)
    return _open_emulator(say, ranks)


def _open_emulator(say: Say, ranks: int) -> Device:
    from cheetah.runtime.device.emulator import EmulatorDevice

    if ranks == 1:
        return EmulatorDevice(say)
    from cheetah.runtime.device.group import EmulatorGroup

    return EmulatorGroup([EmulatorDevice(say) for _ in range(ranks)])


def _choose(say: Say) -> str:
    from cheetah.runtime.device.cuda import why_not_cuda

    reason = why_not_cuda()
    if reason is None:
        return "cuda"
    say(f"using the emulator, which is slow: {reason}")
    return "emulator"


def _split(name: str) -> tuple[str, tuple[int, ...]]:
    """The kind of device, and which GPUs; none where that is not said."""
    kind, colon, listed = name.partition(":")
    numbers = listed.split(",") if colon else []
    are_numbers = all(number.isdecimal() and len(number) < 4 for number in numbers)
    if kind not in DEVICE_NAMES or not are_numbers or (numbers and kind == "emulator"):
        names = ", ".join(DEVICE_NAMES)
        raise DeviceError(f"unknown device {name!r}: use {names}, cuda:1 for the second GPU, or cuda:0,1 for two")
    return kind, tuple(map(int, numbers))
