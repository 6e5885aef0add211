"""Matrices that a device packs: their bytes go up as a file has them, with tables of where each code of them belongs.

A code is 4 or 8 bits; a weight of 16 bits is two codes. In every way of storing a matrix that is read, the code of row
r and column c is number `row_offsets[r] + column_offsets[c]`: so two tables tell where to find it, whatever the format,
the order of rows or that of columns. A third, made by the packing itself (`WeightFormat.code_order`), tells which code
each place of a K-tile has, and a fourth where chunks lie. What lies behind a tile's codes is made by the host.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats import Bytes
from cheetah.models.formats.quantized import Order, RowScales
from cheetah.plan.repacking import Repacking

Read = Callable[[int, Bytes], None]
"""Fills memory with codes from a byte of them on; any thread may call it. What it reads is checked. Weights of 16 bits
come whole."""


@dataclass(frozen=True)
class StoredCodes:
    """The codes of a matrix in a file.

    bits: of a code, 4 or 8; the first of a byte is in its lowest bits. nbytes: of all. row_offsets, column_offsets:
    int64 [rows], [columns of codes]; see above. row_bytes: bytes of a row, where each lies behind the row before; None:
    the codes of rows lie among one another. open: begins to read, and gives what does. is_f16: whether weights are f16,
    which who packs has to round to bf16.
    """

    bits: int
    nbytes: int
    row_offsets: NDArray[np.int64]
    column_offsets: NDArray[np.int64]
    row_bytes: int | None
    open: Callable[[], Read]
    is_f16: bool = False

    def lies_like(self, other: StoredCodes) -> bool:
        """Whether every code lies where one of the other's does, in bytes of its own."""
        if (self.bits, self.nbytes, self.row_bytes) != (other.bits, other.nbytes, other.row_bytes):
            return False
        mine, theirs = ((one.row_offsets, one.column_offsets) for one in (self, other))
        return all(np.array_equal(*pair) for pair in zip(mine, theirs, strict=True))

    def with_rows(self, order: Order) -> StoredCodes:
        """The same with row `order[i]` as row i."""
        return replace(self, row_offsets=self.row_offsets[order], row_bytes=None)


class ScaleRows(Protocol):
    """As `QuantizedMatrix`, its rows without their codes."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, part: slice) -> RowScales: ...


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix as its file has it; without scales it is of bf16."""

    codes: StoredCodes
    scales: ScaleRows | None


def stored_matrix(matrix: Any) -> StoredMatrix | None:
    """Of what reads a matrix, the matrix as its file has it; None where there is no file."""
    stored: StoredMatrix | None = getattr(matrix, "stored", None)
    return stored


class Repacker(Protocol):
    """A device that packs, in the order of the calls."""

    def room(self, nbytes: int) -> AbstractContextManager[bool]:
        """Staging memory of so many bytes for as long as the context lasts; False if the device has no room for it."""

    def upload(self, offset: int, data: Bytes) -> None:
        """Copy bytes to the staging memory, behind all work so far. They may change when their ring says so."""

    def repack(self, work: Repacking) -> None:
        """Pack what was uploaded to its places in the weights."""
