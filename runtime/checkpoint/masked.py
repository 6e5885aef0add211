"""Weights of which a file has those that are not zero, and a bit for each that says which they are.

Of a weight `P.weight` [rows, columns] compressed-tensors stores the kept values `P.compressed`, in its dtype and row
by row; `P.bitmask`, uint8 [rows, ceil(columns / 8)], bit b of byte j for column 8j + b; and `P.shape`. In the layout
`sparse-24-bitmask` two of every four columns are kept, and `P.compressed` is [rows, columns / 2]; in `sparse-bitmask`
any are, `P.compressed` is flat, and `P.row_offsets` says where each row begins. Here such a weight is a stored tensor
like others, whose rows are expanded, and checked, when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.repacking import StoredMatrix
from cheetah.runtime.checkpoint.safetensors_files import (
    STORED_DTYPES,
    LoadingError,
    StoredRows,
    StoredTensor,
    as_bf16_bits,
)

MASK, KEPT, SHAPE, OFFSETS = ".bitmask", ".compressed", ".shape", ".row_offsets"
KEPT_DTYPES = ("BF16", "F16", "F32", "F8_E4M3")
GROUP, KEPT_OF_GROUP = 4, 2
COUNTS = np.array([number.bit_count() for number in range(256)], np.uint8)
TWO_IN_BOTH = np.array([(byte & 15).bit_count() == 2 == (byte >> 4).bit_count() for byte in range(256)])
"""Whether a byte of the mask keeps two of its first four columns, and two of the others."""


def with_masked(stored: Mapping[str, StoredTensor], place: str) -> dict[str, StoredTensor]:
    """The tensors with every masked weight under the name that it would have as it is. LoadingError names the tensor
    that does not belong to the others."""
    found = dict(stored)
    for name in [name for name in stored if name.endswith(MASK)]:
        module = name.removesuffix(MASK)
        parts = {suffix: found.pop(f"{module}{suffix}", None) for suffix in (MASK, KEPT, SHAPE, OFFSETS)}
        if f"{module}.weight" in found:
            raise LoadingError(f"{place}: {module}.weight stands there twice, as it is and with {name}")
        if missing := next((suffix for suffix in (KEPT, SHAPE) if parts[suffix] is None), None):
            raise LoadingError(f"{place}: {name} is there, but {module}{missing} is missing: the file is not whole")
        found[f"{module}.weight"] = _masked(module, {suffix: one for suffix, one in parts.items() if one is not None})
    return found


def _masked(module: str, parts: Mapping[str, StoredTensor]) -> MaskedTensor:
    mask, kept, shape = parts[MASK], parts[KEPT], parts[SHAPE]
    rows, columns = _sizes(module, shape)
    _require(mask, f"{module}{MASK}", ("U8",), (rows, -(-columns // 8)))
    offsets = parts.get(OFFSETS)
    if offsets is None:
        if columns % GROUP:
            raise _error(shape, f"{module}{SHAPE}", f"{columns} columns are no groups of {GROUP}")
        _require(kept, f"{module}{KEPT}", KEPT_DTYPES, (rows, columns * KEPT_OF_GROUP // GROUP))
    else:
        _require(offsets, f"{module}{OFFSETS}", ("I64",), (rows,))
        _require(kept, f"{module}{KEPT}", KEPT_DTYPES, (kept.nbytes // STORED_DTYPES[kept.dtype].itemsize,))
    nbytes = rows * columns * STORED_DTYPES[kept.dtype].itemsize
    return MaskedTensor(kept.file, kept.dtype, (rows, columns), kept.begin, nbytes, module, mask, kept, offsets)


def _sizes(module: str, shape: StoredTensor) -> tuple[int, int]:
    """[rows, columns] as the file says them."""
    if shape.dtype not in ("I64", "I32") or shape.shape not in ((2,), (2, 1)):
        raise _error(shape, f"{module}{SHAPE}", f"{shape.dtype} {list(shape.shape)}: expected I64 [2] or [2, 1]")
    rows, columns = (int(value) for value in shape.mapped().reshape(-1))
    if not (0 < rows < 2**31 and 0 < columns < 2**31):
        raise _error(shape, f"{module}{SHAPE}", f"says {[rows, columns]}, which are no rows and columns")
    return rows, columns


def _require(tensor: StoredTensor, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if tensor.dtype not in dtypes or tensor.shape != shape:
        wanted = f"{' or '.join(dtypes)} {list(shape)}"
        raise _error(tensor, name, f"{tensor.dtype} {list(tensor.shape)}: expected {wanted}")


def _error(tensor: StoredTensor, name: str, problem: str) -> LoadingError:
    return LoadingError(f"{tensor.file}: tensor {name}: {problem}")


@dataclass(frozen=True)
class MaskedTensor(StoredTensor):
    """A weight that is stored so. dtype, shape and nbytes are the weight's. offsets: of rows among the kept values;
    None: two of every four columns are kept. first: the first row that is read of the file's tensors."""

    module: str
    mask: StoredTensor
    kept: StoredTensor
    offsets: StoredTensor | None
    first: int = 0

    def part(self, skip: int, shape: tuple[int, ...]) -> MaskedTensor:
        rows, columns = self.shape
        nbytes = self.nbytes // rows * shape[0]
        return replace(self, shape=shape, nbytes=nbytes, first=self.first + skip // columns)

    def rows(self) -> MaskedRows:
        return MaskedRows(self, is_rounded=True)

    def stored_rows(self) -> MaskedRows:
        return MaskedRows(self, is_rounded=False)

    def mapped_bytes(self) -> NDArray[np.uint8]:
        return self.stored_rows()[:].reshape(-1).view(np.uint8)


class MaskedRows(StoredRows):
    """Rows of a masked weight in parts, as they are stored or rounded to bf16; several threads may read at once."""

    def __init__(self, tensor: MaskedTensor, is_rounded: bool) -> None:
        self.tensor, self.shape, self._is_rounded = tensor, tensor.shape, is_rounded
        self._masked = tensor
        self._mask = tensor.mask.stored_rows()
        self._kept = replace(tensor.kept, shape=(1, tensor.kept.nbytes // self._itemsize)).stored_rows()

    stored: StoredMatrix | None = None

    @property
    def _itemsize(self) -> int:
        return STORED_DTYPES[self._masked.kept.dtype].itemsize

    @cached_property
    def _ends(self) -> NDArray[np.int64] | None:
        """Where the values of each of the file's rows begin, and where those of the last end; checked."""
        offsets = self._masked.offsets
        if offsets is None:
            return None
        begins = offsets.mapped().view(np.int64)
        count = self._masked.kept.shape[0]
        ends = np.append(begins, count)
        if ends[0] != 0 or (np.diff(ends) < 0).any():
            row = 0 if ends[0] != 0 else int(np.argmax(np.diff(ends) < 0))
            raise self._error(OFFSETS, f"row {row} begins at {ends[row]}, the next one at {ends[row + 1]} of {count}")
        return ends

    def __getitem__(self, part: slice) -> NDArray[Any]:
        first, stop, _ = part.indices(self.shape[0])
        begin, end = self._masked.first + first, self._masked.first + max(first, stop)
        mask = np.array(self._mask[begin:end])  # the next read takes its memory
        self._check(mask, begin)
        columns = self.shape[1]
        is_kept = np.unpackbits(mask, axis=1, bitorder="little")[:, :columns].view(np.bool_)
        values = self._values(begin, end)
        bits = as_bf16_bits(values) if self._is_rounded else values
        expanded = np.zeros((end - begin, columns), bits.dtype)
        expanded[is_kept] = bits
        return expanded

    def _values(self, begin: int, end: int) -> NDArray[Any]:
        ends, each = self._ends, self.shape[1] * KEPT_OF_GROUP // GROUP
        first, stop = (begin * each, end * each) if ends is None else (int(ends[begin]), int(ends[end]))
        values = np.empty(stop - first, STORED_DTYPES[self._masked.kept.dtype])
        self._kept.read(first * self._itemsize, values.view(np.uint8))
        return values

    def _check(self, mask: NDArray[np.uint8], begin: int) -> None:
        """Of the rows from `begin` on: as many bits as values, and none behind the last column."""
        columns = self.shape[1]
        behind = columns % 8
        if behind and (mask[:, -1] >> behind).any():
            row = int(np.argmax(mask[:, -1] >> behind != 0))
            raise self._error(MASK, f"row {begin + row} has bits behind column {columns - 1}")
        ends = self._ends
        if ends is None:
            whole = mask if not behind else mask[:, :-1]
            rest = () if not behind else (COUNTS[mask[:, -1]] == KEPT_OF_GROUP,)
            for number, right in enumerate((TWO_IN_BOTH[whole].all(axis=1), *rest)):
                if not right.all():
                    row = int(np.argmin(right))
                    byte = columns // 8 if number else int(np.argmin(TWO_IN_BOTH[whole[row]]))
                    where = f"row {begin + row}, columns {8 * byte} to {min(8 * byte + 7, columns - 1)}"
                    raise self._error(MASK, f"{where}: keeps other than two of every four: {mask[row, byte]:#04x}")
            return
        counts = COUNTS[mask].sum(axis=1, dtype=np.int64)
        wanted = np.diff(ends)[begin : begin + len(mask)]
        if not np.array_equal(counts, wanted):
            row = int(np.argmax(counts != wanted))
            raise self._error(
                MASK, f"row {begin + row} keeps {counts[row]}, {OFFSETS[1:]} has values for {wanted[row]}"
            )

    def read(self, begin: int, memory: NDArray[np.uint8]) -> None:
        """Fill memory with the weight's bytes from `begin` on."""
        row_bytes = self.shape[1] * self._itemsize
        first, stop = begin // row_bytes, -(-(begin + memory.nbytes) // row_bytes)
        skipped = begin - first * row_bytes
        memory[:] = self[first:stop].reshape(-1).view(np.uint8)[skipped : skipped + memory.nbytes]

    def _error(self, suffix: str, problem: str) -> LoadingError:
        parts = {MASK: self._masked.mask, OFFSETS: self._masked.offsets}
        tensor = parts[suffix]
        assert tensor is not None
        return _error(tensor, f"{self._masked.module}{suffix}", problem)
