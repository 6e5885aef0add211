"""Memory that is somebody else's as a launch's argument, and where a launch's outputs go."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.attention.arrays import ArrayError, ArrayView, host_bytes, view_array
from cheetah.attention.errors import AttentionError


class Borrowed:
    """Memory on a device that somebody else owns, as a launch's argument."""

    def __init__(self, device: Any, view: ArrayView) -> None:
        self.device, self.address, self.nbytes, self.owner = device, view.address, view.nbytes, view.owner

    def upload(self, array: NDArray[Any], offset: int = 0) -> None:
        raise AttentionError("this memory belongs to the caller")


class DeviceArray:
    """An output on the GPU, with `__cuda_array_interface__` (bf16 as 16-bit integers). Keeps its memory."""

    def __init__(self, buffer: Any, shape: tuple[int, ...], typestr: str) -> None:
        self.buffer, self.shape = buffer, shape
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (buffer.address, False),
            "version": 3,
            "strides": None,
        }


class Output:
    """Where an output goes: the caller's array on the host or on the GPU, or a new one."""

    def __init__(self, buffer: Any, shape: tuple[int, ...], target: Any, on_gpu: bool) -> None:
        self.buffer, self.shape, self.target, self.on_gpu = buffer, shape, target, on_gpu

    @classmethod
    def of(cls, device: Any, target: Any, shape: tuple[int, ...], size: int, on_gpu: bool) -> Output:
        nbytes = int(np.prod(shape)) * size
        if target is None:
            return cls(device.allocate(nbytes, 0xFF), shape, None, on_gpu)
        view = view_array(target, "out" if size == 2 else "lse")
        kinds = ("bf16", "u16") if size == 2 else ("f32",)
        if view.shape != shape or view.dtype not in kinds:
            raise ArrayError(f"output is {view.dtype} {view.shape}: give {kinds[0]} {shape}")
        if view.on_gpu:
            return cls(Borrowed(device, view), shape, target, True)
        return cls(device.allocate(nbytes, 0xFF), shape, view, False)

    def finish(self, dtype: np.dtype[Any]) -> Any:
        """The caller's array, filled, or a new one."""
        if self.on_gpu:
            typestr = "<u2" if dtype.itemsize == 2 else "<f4"
            return DeviceArray(self.buffer, self.shape, typestr) if self.target is None else self.target
        made = self.buffer.download(np.uint8, int(np.prod(self.shape)) * dtype.itemsize).view(dtype).reshape(self.shape)
        if self.target is None:
            return made
        host_bytes(self.target)[:] = made.reshape(-1).view(np.uint8)
        return self.target.owner
