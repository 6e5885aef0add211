"""Buffers whose bytes this process reads and writes: the emulator's, and pinned memory of a GPU's host."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cheetah.runtime.device.interface import (
    ArgumentError,
    Buffer,
    as_bytes,
    check_copy,
    check_range,
    check_size_and_fill,
)


class HostBuffer:
    """A `Buffer` over an array of bytes, until it is freed."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.nbytes = array.nbytes
        self._array: NDArray[np.uint8] | None = array

    @property
    def array(self) -> NDArray[np.uint8]:
        """Its bytes; ArgumentError once it is freed."""
        if self._array is None:
            raise ArgumentError(f"this buffer of {self.nbytes} bytes has been freed")
        return self._array

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    def upload(self, array: NDArray[Any], offset: int = 0) -> None:
        data = as_bytes(array)
        check_range("upload", offset, data.nbytes, self.nbytes)
        self.array[offset : offset + data.nbytes] = data

    def download(self, dtype: DTypeLike, shape: int | tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        found = np.empty(shape, dtype)
        check_range("download", offset, found.nbytes, self.nbytes)
        found.reshape(-1).view(np.uint8)[:] = self.array[offset : offset + found.nbytes]
        return found

    def fill(self, byte: int) -> None:
        check_size_and_fill(self.nbytes, byte)
        self.array[:] = byte

    def copy(self, source_offset: int, target_offset: int, nbytes: int) -> None:
        check_copy(source_offset, target_offset, nbytes, self.nbytes)
        self.array[target_offset : target_offset + nbytes] = self.array[source_offset : source_offset + nbytes]

    def copy_of(self, source: Buffer, source_offset: int, target_offset: int, nbytes: int) -> None:
        assert isinstance(source, HostBuffer), "the buffers of a device are of one kind"
        check_range("copy", source_offset, nbytes, source.nbytes)
        check_range("copy to the place", target_offset, nbytes, self.nbytes)
        self.array[target_offset : target_offset + nbytes] = source.array[source_offset : source_offset + nbytes]
