"""Weights on disk: the safetensors files of a folder, their headers checked, their tensors mapped into memory.

A file is a little-endian u64 (the header's length), a JSON header {name: {dtype, shape, data_offsets: [begin, end]}}
whose offsets count from the header's end, then the data, row-major. Nothing here knows what a model is. A file is
opened and mapped when the first of its tensors is asked for, and let go with the last: a model of experts has more
tensors than a process may have open files.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cheetah.errors import CheetahError
from cheetah.models.family import MatrixRows
from cheetah.models.repacking import StoredCodes, StoredMatrix
from cheetah.models.rounding import Bits, round_f16
from cheetah.printable import shown, shown_name
from cheetah.untrusted import parse_json, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_LIMIT_BYTES = 32_000_000  # a quarter of a million tensors; the library's own limit is 100 MB
FILE_NAME_BYTES = 255  # of what a file system takes
MOST_DIMENSIONS = 64
LARGEST_SIZE = 2**63 - 1

# Bits of an element of each dtype that safetensors names.
DTYPE_BITS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8} | {
    f"{sign}{bits}": bits for sign in "IU" for bits in (8, 16, 32, 64)
}
WEIGHT_DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
STORED_DTYPES: dict[str, np.dtype[Any]] = {
    **WEIGHT_DTYPES,
    **{
        "F8_E4M3": np.dtype("u1"),
        "U8": np.dtype("u1"),
        "I16": np.dtype("<u2"),
        "I32": np.dtype("<u4"),
        "I64": np.dtype("<u8"),
    },
}
"""What is read as it is stored; codes are bits, so that whole numbers have no sign."""

# Names of weights in formats that are not read: (pattern, what it is).
OTHER_FORMATS = (
    ("consolidated.*", "Meta's own layout, with interleaved rotary pairs"),
    ("*.bin", "a Python pickle, which can run code"),
    ("*.pth", "a Python pickle, which can run code"),
    ("*.pt", "a Python pickle, which can run code"),
    ("*.gguf", "GGUF, the format of llama.cpp"),
)


class LoadingError(CheetahError):
    """A checkpoint that is incomplete, contradictory, or in a form that is not supported."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `begin` is its first byte in `file`; dtype is safetensors' name, e.g. "BF16". is_transposed:
    whether its rows and columns lie there exchanged."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    is_transposed: bool = field(default=False, kw_only=True)

    def part(self, skip: int, shape: tuple[int, ...]) -> StoredTensor:
        """What lies behind its first `skip` elements, as a tensor of that shape."""
        itemsize = DTYPE_BITS[self.dtype] // 8
        return replace(self, shape=shape, begin=self.begin + skip * itemsize, nbytes=math.prod(shape) * itemsize)

    def rows(self) -> MatrixRows:
        """The matrix, to be read in parts by several threads at once, and rounded to bf16 where it must be."""
        return _TransposedRows(self) if self.is_transposed else _StoredRows(self)

    def stored_rows(self) -> StoredRows:
        """The matrix as it is stored, to be read in parts by several threads at once."""
        return StoredRows(self)

    def bf16_bits(self) -> Bits:
        """The tensor as bf16 bit patterns, uint16: mapped as it is, or rounded to nearest even from F16 and F32."""
        stored = self.mapped().view(WEIGHT_DTYPES[self.dtype])
        return np.asarray(as_bf16_bits(stored))

    def mapped(self) -> npt.NDArray[Any]:
        """The tensor as it is stored, mapped. Bytes of F8_E4M3 are uint8, whole numbers of 32 bits or more unsigned."""
        dtype = STORED_DTYPES[self.dtype]
        mapped = self.mapped_bytes().view(dtype)  # a view may lie at any byte, as tensors may
        return mapped.reshape(self.shape[::-1]).T if self.is_transposed else mapped.reshape(self.shape)

    def mapped_bytes(self) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, mapped."""
        if self.nbytes == 0:
            return np.zeros(0, np.uint8)
        return np.frombuffer(_opened(self.file), np.uint8, self.nbytes, self.begin)


class _OpenFile(mmap.mmap):
    """A file's bytes, mapped, and a descriptor to read it by. Arrays keep what they lie in, and so this."""

    descriptor: int


_open_files: weakref.WeakValueDictionary[tuple[int, int, int], _OpenFile] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def _opened(path: Path) -> _OpenFile:
    """The file, opened once for all who read it now; another that has taken its name since is another file."""
    with _opening:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            which = status.st_dev, status.st_ino, status.st_size
            file = _open_files.get(which)
            if file is not None:
                os.close(descriptor)
                return file
            file = _OpenFile(descriptor, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(descriptor)
            raise
        file.descriptor = descriptor
        weakref.finalize(file, os.close, descriptor)
        _open_files[which] = file
        return file


class StoredRows:
    """A stored matrix in parts. They are read, not mapped: a page fault for each 4 KB would cost more than the copy,
    and large reads by several threads keep a disk busy."""

    def __init__(self, tensor: StoredTensor) -> None:
        self.tensor = tensor
        self.shape = tensor.shape
        self._file = _opened(tensor.file)
        advice = os.POSIX_FADV_WILLNEED  # begin to read it now
        os.posix_fadvise(self._file.descriptor, tensor.begin, tensor.nbytes, advice)

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        """Rows as they are stored, in memory of this thread, overwritten when it reads again; of a transposed matrix
        copied from pages that are mapped."""
        if self.tensor.is_transposed:
            return np.ascontiguousarray(self.tensor.mapped()[part])
        first, stop, _ = part.indices(self.shape[0])
        dtype = STORED_DTYPES[self.tensor.dtype]
        row_bytes = self.shape[1] * dtype.itemsize
        memory = _thread_memory((stop - first) * row_bytes)
        self.read(first * row_bytes, memory)
        return memory.view(dtype).reshape(stop - first, self.shape[1])

    def read(self, begin: int, memory: npt.NDArray[np.uint8]) -> None:
        """Fill memory with the tensor's bytes from `begin` on, as they lie there."""
        offset, done = self.tensor.begin + begin, 0
        while done < memory.nbytes:
            count = os.preadv(self._file.descriptor, [memory[done:].data], offset + done)
            if count == 0:
                raise LoadingError(f"{self.tensor.file}: ends at byte {offset + done}: it was cut while it was read")
            done += count


class _StoredRows:
    """`MatrixRows` of a stored matrix."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._stored = StoredRows(tensor)
        self.shape = tensor.shape

    @property
    def stored(self) -> StoredMatrix:
        """See `cheetah.models.repacking`."""
        rows, columns = self.shape
        offsets = np.arange(rows) * (2 * columns), np.arange(2 * columns)
        dtype = self._stored.tensor.dtype
        read = self._read_rounded if dtype == "F32" else self._stored.read
        codes = StoredCodes(8, 2 * rows * columns, *offsets, 2 * columns, lambda: read, is_f16=dtype == "F16")
        return StoredMatrix(codes, None)

    def _read_rounded(self, begin: int, memory: npt.NDArray[np.uint8]) -> None:
        """Fill memory with bf16 from byte `begin` of them on, of F32; both are even."""
        stored = _thread_memory(memory.nbytes * 2)
        self._stored.read(begin * 2, stored)
        _round_into(memory.view(np.uint16), stored.view(WEIGHT_DTYPES["F32"]))

    def __getitem__(self, part: slice) -> Bits:
        """Bits in memory of this thread, overwritten when it reads again."""
        return as_bf16_bits(self._stored[part])


class _TransposedRows:
    """`MatrixRows` of a matrix whose rows and columns lie exchanged in its file."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor, self._stored, self.shape = tensor, tensor.stored_rows(), tensor.shape

    @property
    def stored(self) -> StoredMatrix | None:
        """See `cheetah.models.repacking`; None of F32, which would have to be rounded before."""
        if self._tensor.dtype == "F32":
            return None
        rows, columns = self.shape
        of_columns = (np.arange(columns)[:, None] * (2 * rows) + np.arange(2)).reshape(-1)
        read, is_f16 = self._stored.read, self._tensor.dtype == "F16"
        codes = StoredCodes(8, self._tensor.nbytes, np.arange(rows) * 2, of_columns, None, lambda: read, is_f16)
        return StoredMatrix(codes, None)

    def __getitem__(self, part: slice) -> Bits:
        return as_bf16_bits(self._stored[part])


_of_thread = threading.local()


def _thread_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory of this thread, the same every time."""
    memory: npt.NDArray[np.uint8] | None = getattr(_of_thread, "memory", None)
    if memory is None or memory.nbytes < nbytes:
        memory = _of_thread.memory = np.empty(nbytes, np.uint8)
    return memory[:nbytes]


def as_bf16_bits(stored: npt.NDArray[Any]) -> Bits:
    """Numbers as they are stored, as bf16 bits: those of F16 and F32 rounded to nearest even."""
    if stored.dtype == WEIGHT_DTYPES["BF16"]:
        return stored
    rounded = np.empty(stored.shape, np.uint16)
    _round_into(rounded.reshape(-1), stored.reshape(-1))
    return rounded


def _round_into(rounded: Bits, stored: npt.NDArray[Any]) -> None:
    """Numbers of F16 or F32, rounded to nearest even as bf16 bits."""
    if stored.dtype == np.float16:
        return round_f16(stored.view(np.uint16), rounded)
    with np.errstate(over="ignore"):  # a float32 beyond bf16's range becomes infinite, as IEEE rounding says
        rounded.view(ml_dtypes.bfloat16)[:] = stored


@dataclass(frozen=True)
class StoredTensors:
    """All tensors of a checkpoint by name, and lines worth printing."""

    tensors: Mapping[str, StoredTensor]
    notes: list[str] = field(default_factory=list)


def find_tensors(folder: Path) -> StoredTensors:
    """The tensors of a model folder: of model.safetensors if it is there, else of the shards that the index names."""
    if (folder / SINGLE_FILE).is_file():
        return StoredTensors(read_header(folder / SINGLE_FILE))
    if (folder / INDEX_FILE).is_file():
        return _find_sharded(folder)
    refuse_other_formats(folder.iterdir())
    raise LoadingError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")


def refuse_other_formats(paths: Iterable[Path]) -> None:
    """LoadingError if one of these files has weights in a format that is not read."""
    files = sorted(paths)
    for pattern, what in OTHER_FORMATS:
        for path in files:
            if path.match(pattern):
                raise LoadingError(
                    f"{path}: {what}; only safetensors are read: convert it to {SINGLE_FILE} "
                    "(transformers: model.save_pretrained(folder))"
                )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. The header is checked: every byte of the data belongs to exactly one tensor."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 0 < length <= min(size - 8, HEADER_LIMIT_BYTES):
            raise LoadingError(
                f"{path}: not a whole safetensors file: {size} bytes, and a header of {length} bytes is announced"
            )
        header = parse_json(file.read(length), str(path), LoadingError)
    header.pop("__metadata__", None)
    tensors = {name: _stored_tensor(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_coverage(path, tensors, 8 + length, size)
    return tensors


def shard_names(folder: Path) -> list[str]:
    """The files that the index of a folder names, sorted."""
    path = folder / INDEX_FILE
    return sorted(set(_weight_map(path, read_json(path, error=LoadingError)).values()))


def _find_sharded(folder: Path) -> StoredTensors:
    path = folder / INDEX_FILE
    index = read_json(path, error=LoadingError)
    weight_map = _weight_map(path, index)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise LoadingError(f"{folder / shard}: is missing, but {INDEX_FILE} names it: fetch it again")
        for name, tensor in read_header(folder / shard).items():
            if name in tensors:
                raise LoadingError(
                    f"{folder}: tensor {name} stands in two files, {tensors[name].file.name} and {shard}"
                )
            if weight_map.get(name) != shard:
                place = weight_map.get(name, "nowhere")
                raise LoadingError(f"{folder / shard}: holds tensor {name}, which {INDEX_FILE} places in {place}")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise LoadingError(f"{folder / shard}: tensor {name} is missing, but {INDEX_FILE} places it there")
    return StoredTensors(tensors, _size_notes(path, index, tensors))


def _size_notes(path: Path, index: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> list[str]:
    metadata = index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    found = sum(tensor.nbytes for tensor in tensors.values())
    if stated is None or stated == found:
        return []
    return [f"{path}: total_size is {shown(stated)}, the tensors have {found} bytes"]


def _weight_map(path: Path, index: Mapping[str, Any]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadingError(f"{path}: weight_map is missing or empty: it must map each tensor to its file")
    for name, shard in weight_map.items():
        if not _is_file_name(shard) or not shard.endswith(".safetensors"):
            placed = f"{shown_name(name)} in {shown(shard)}"
            raise LoadingError(f"{path}: weight_map places {placed}: expected a .safetensors file beside it")
    return weight_map


def _is_file_name(name: Any) -> bool:
    """Whether a folder can have a file of that name."""
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        return False
    return len(name.encode("utf-8", "surrogatepass")) <= FILE_NAME_BYTES


def _stored_tensor(path: Path, name: str, entry: Any, data_begin: int) -> StoredTensor:
    place = f"{path}: tensor {shown_name(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise LoadingError(f"{place}: its header entry must hold dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise LoadingError(f"{place}: dtype {shown(dtype)} is not known")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        found = f"shape {shown(shape)} or data_offsets {shown(offsets)}"
        raise LoadingError(f"{place}: {found} are not lists of at most {MOST_DIMENSIONS} sizes below 2**63")
    wanted = math.prod(shape) * DTYPE_BITS[dtype] // 8
    begin, end = offsets
    if end - begin != wanted:
        raise LoadingError(f"{place}: {end - begin} bytes, but {dtype} {shown(shape)} needs {shown(wanted)}")
    return StoredTensor(path, dtype, tuple(shape), data_begin + begin, wanted)


def _check_coverage(path: Path, tensors: Mapping[str, StoredTensor], data_begin: int, size: int) -> None:
    position = data_begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if tensor.begin != position:
            what = "overlaps the tensor before it" if tensor.begin < position else "leaves a hole before it"
            raise LoadingError(f"{path}: tensor {name} {what}: it begins at byte {tensor.begin}, not {position}")
        position += tensor.nbytes
    if position != size:
        what = "cut short" if size < position else "followed by unknown bytes"
        raise LoadingError(f"{path}: {what}: its header describes {position} bytes, the file has {size}")


def _is_sizes(value: Any) -> bool:
    """Whether this may be a shape: short enough that the product of its sizes is no work."""
    if not isinstance(value, list) or len(value) > MOST_DIMENSIONS:
        return False
    return all(type(size) is int and 0 <= size <= LARGEST_SIZE for size in value)
