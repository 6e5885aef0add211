"""Arrays of other libraries as addresses: numpy, `__cuda_array_interface__`, DLPack. Knows nothing of attention.

Nothing is copied here, and nothing waits: an array on a GPU must be ready, as its library's synchronise makes it.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError

_TYPES = {("f", 2): "f16", ("f", 4): "f32", ("u", 1): "u8", ("u", 2): "u16", ("u", 4): "u32", ("i", 4): "i32"}
_BYTES = {"f16": 2, "f32": 4, "u8": 1, "u16": 2, "u32": 4, "i32": 4, "bf16": 2, "e4m3": 1, "i8": 1, "bool": 1}
_ML_DTYPES = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}
_DLPACK_CPU = (1, 3)
_DLPACK_CUDA = (2, 13)


class ArrayError(CheetahError):
    """An array that cannot be used as it is; the message says what to give."""


@dataclass(frozen=True)
class ArrayView:
    """A contiguous array that somebody else owns.

    dtype: "bf16", "e4m3", "f32", "u8", ...; on_gpu: where the address is. owner keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    on_gpu: bool
    owner: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


def view_array(array: Any, what: str) -> ArrayView:
    """The array as an address. ArrayError, which names it `what`, if it is no array or not contiguous."""
    if isinstance(array, np.ndarray):
        return _numpy_view(array, what)
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
    except Exception:  # torch raises for dtypes that the interface cannot name
        interface = None
    if interface is not None:
        return _cuda_view(array, interface, what)
    if hasattr(array, "__dlpack__"):
        return _dlpack_view(array, what)
    raise ArrayError(
        f"{what} is a {type(array).__name__}: give a numpy array, or one with __cuda_array_interface__ or __dlpack__"
    )


def _numpy_view(array: np.ndarray[Any, Any], what: str) -> ArrayView:
    if not array.flags.c_contiguous:
        raise ArrayError(f"{what} is not contiguous: give numpy.ascontiguousarray({what})")
    name = _ML_DTYPES.get(array.dtype.name) or _TYPES.get((array.dtype.kind, array.dtype.itemsize))
    if name is None:
        raise ArrayError(f"{what} is {array.dtype}, which no kernel reads")
    return ArrayView(array.ctypes.data, array.shape, name, False, array)


def _cuda_view(array: Any, interface: Any, what: str) -> ArrayView:
    shape = tuple(interface["shape"])
    kind, size = interface["typestr"][1], int(interface["typestr"][2:])
    name = _TYPES.get((kind, size))
    if name is None:
        raise ArrayError(f"{what} has type {interface['typestr']}, which no kernel reads; DLPack can name bf16")
    strides = interface.get("strides")
    if strides is not None:
        _require_contiguous(shape, tuple(stride // size for stride in strides), what)
    return ArrayView(int(interface["data"][0]), shape, name, True, array)


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DLPACK_TYPES = {(0, 32): "i32", (0, 8): "i8", (1, 8): "u8", (1, 16): "u16", (1, 32): "u32", (2, 16): "f16"}
_DLPACK_TYPES |= {(2, 32): "f32", (4, 16): "bf16", (6, 8): "bool", (10, 8): "e4m3"}


def _dlpack_view(array: Any, what: str) -> ArrayView:
    """The capsule is read and kept, not consumed: it frees what it holds when the view goes."""
    capsule = array.__dlpack__()
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _DLTensor.from_address(get_pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        _require_contiguous(shape, tuple(tensor.strides[i] for i in range(tensor.ndim)), what)
    name = _DLPACK_TYPES.get((tensor.dtype.code, tensor.dtype.bits))
    if name is None or tensor.dtype.lanes != 1:
        raise ArrayError(
            f"{what} has DLPack type {tensor.dtype.code} of {tensor.dtype.bits} bits, which no kernel reads"
        )
    kind = tensor.device.device_type
    if kind not in (*_DLPACK_CPU, *_DLPACK_CUDA):
        raise ArrayError(f"{what} is on a device of DLPack type {kind}: give one in host memory or on a CUDA GPU")
    address = (tensor.data or 0) + tensor.byte_offset
    return ArrayView(address, shape, name, kind in _DLPACK_CUDA, (array, capsule))


def _require_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], what: str) -> None:
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != expected:
            raise ArrayError(f"{what} has shape {shape} and strides {strides}: give a contiguous array")
        expected *= length


def host_bytes(view: ArrayView) -> NDArray[np.uint8]:
    """The bytes of an array in host memory, flat; a view."""
    if not view.nbytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * view.nbytes).from_address(view.address))
