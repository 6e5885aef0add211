"""Quantised matrices beside which single weights lie as they are: a layout of our own.

Beside the tensors of `PackedMatrix` a module has in CSR, as SparseTIR calls sparse_variable: `weight_outlier_values`,
bf16 [count], row by row, `weight_outlier_columns`, int32 [count], ascending in a row, and `weight_outlier_offsets`,
int64 [rows + 1], where each row begins among them. The code of a weight that has a number is that of zero. No layout
of compressed-tensors has such numbers.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.lists import ListedRows
from cheetah.runtime.checkpoint.quantized import PackedMatrix
from cheetah.runtime.checkpoint.safetensors_files import LoadingError, StoredTensor

VALUES, COLUMNS, OFFSETS = "weight_outlier_values", "weight_outlier_columns", "weight_outlier_offsets"
EXPONENT = 0x7F80
"""Of a bf16 number; all of it is set where that is none."""


class OutlierMatrix(PackedMatrix):
    """Its rows are `ListedRows`. Offsets are checked as a whole, numbers and columns with the rows that are read."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._numbers, self._places = (self._tensors[suffix].mapped() for suffix in (VALUES, COLUMNS))

    def __getitem__(self, part: slice) -> Any:
        rows = super().__getitem__(part)
        first, stop, _ = part.indices(self.shape[0])
        listed = np.zeros(rows.shape, np.uint16)
        row, column, numbers = self._outliers(first, max(first, stop))
        listed[row, column] = numbers
        if (both := rows.codes[row, column] != rows.zero_codes[row, column]).any():
            at = int(np.argmax(both))
            raise self._wrong(
                COLUMNS, f"row {first + row[at]}, column {column[at]} has a code too, which is not zero's"
            )
        return ListedRows(rows, listed)

    def listed_counts(self, chunk_columns: int) -> NDArray[np.uint16]:
        """Of every row, the numbers in each so many columns."""
        rows, columns = self.shape
        row, column, _ = self._outliers(0, rows)
        chunks = -(-columns // chunk_columns)
        counts = np.bincount(row * chunks + column // chunk_columns, minlength=rows * chunks)
        return counts.reshape(rows, chunks).astype(np.uint16)

    def _outliers(self, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint16]]:
        """Of some rows: the row of each number, counted from the first, its column, and its bits."""
        ends = self._ends[first : stop + 1]
        own = slice(int(ends[0]), int(ends[-1]))
        row, column = (
            np.repeat(np.arange(stop - first), np.diff(ends)),
            np.array(self._places[own]).view(np.int32).astype(np.int64),
        )
        outside = (column < 0) | (column >= self.shape[1])
        outside[1:] |= (row[1:] == row[:-1]) & (column[1:] <= column[:-1])
        if outside.any():
            at = int(np.argmax(outside))
            raise self._wrong(
                COLUMNS, f"row {first + row[at]} has column {column[at]}: columns ascend and are below {self.shape[1]}"
            )
        numbers = np.array(self._numbers[own]).view(np.uint16)
        if (no_number := (numbers & EXPONENT) == EXPONENT).any():
            at = int(np.argmax(no_number))
            value = numbers[at : at + 1].view(ml_dtypes.bfloat16)[0]
            raise self._wrong(VALUES, f"row {first + row[at]}, column {column[at]} is {value}: give numbers")
        return row, column, numbers

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        ends, count = np.array(self._tensors[OFFSETS].mapped()).view(np.int64), len(self._places)
        falls = np.diff(ends) < 0
        if ends[0] != 0 or ends[-1] != count or falls.any():
            row = int(np.argmax(falls)) if falls.any() else 0 if ends[0] != 0 else self.shape[0] - 1
            raise self._wrong(OFFSETS, f"row {row} is {ends[row]} to {ends[row + 1]} of {count} numbers")
        return ends

    def _wrong(self, suffix: str, problem: str) -> LoadingError:
        tensor: StoredTensor = self._tensors[suffix]
        return LoadingError(f"{tensor.file}: tensor {self.module}.{suffix}: {problem}")
