"""Quantised weights on their way from a checkpoint to the kernel's tiles: codes, scales and zero points of whole rows.

Every checkpoint format becomes this one record, and every device format is packed from it. A weight is
`scale * (code - zero point)`, or `scale * number(code)` of e4m3 or e2m1, of nvfp4 times a factor of the row; scales
stay in the checkpoint's own dtype, so nothing is rounded on the way. Where codes come from is not known here, nor how a
kernel keeps them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.rounding import F32
from cheetah.models.scratch import scratch
from cheetah.plan.formats import MX_COLUMNS, NV_COLUMNS

KINDS = ("int4", "int8", "fp8", "mxfp4", "nvfp4")
MIDDLE_CODE = {"int4": 8, "int8": 128}
"""The code of zero where the scheme is symmetric."""
EVEN_FIRST = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word of int4 codes is column EVEN_FIRST[i] of its eight, as tiles have it."""
EIGHT_ROWS = np.dtype("V32")
"""Eight words, the same of eight neighbouring rows: numpy copies them whole."""
LARGEST_CODE = {"int4": 15, "int8": 255, "fp8": 255, "mxfp4": 15, "nvfp4": 15}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The number of each code of mxfp4 and nvfp4: sign, two bits of exponent, one of mantissa."""
OF_E2M1 = {"mxfp4": MX_COLUMNS, "nvfp4": NV_COLUMNS}
"""The kinds whose codes these are, with the columns of a group."""
SCALE_DTYPES: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
}

Order = NDArray[np.int64]
"""Column i of a matrix is column `order[i]` of the module that it is made of."""

_NAME = re.compile(r"(int4|int8)(?:-g([1-9][0-9]{0,4}))?(-asym)?|(fp8)(?:-block([1-9][0-9]{0,4}))?|(mxfp4|nvfp4)")


class QuantizationError(CheetahError):
    """Quantised weights that contradict themselves, or a scheme that does not exist."""


@dataclass(frozen=True)
class QuantizationScheme:
    """What the numbers of a quantised matrix are.

    kind: "int4", "int8", "fp8" (e4m3), "mxfp4" (e2m1 in groups of 32, whose scales are powers of two) or "nvfp4" (e2m1
    in groups of 16, whose scales are of e4m3, times a factor of the row). group_columns: so many neighbouring columns
    of a row share a scale; None: the whole row does. symmetric: zero points are the middle code; numbers with exponents
    have none and are symmetric. scales: "f16", "bf16" or "f32", the dtype that the checkpoint keeps scales in, or of
    those of mxfp4 and nvfp4 that they are read in.
    """

    kind: str
    group_columns: int | None = None
    symmetric: bool = True
    scales: str = "f16"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise QuantizationError(f"quantisation {self.kind!r}: there are {', '.join(KINDS)}")
        if self.group_columns is not None and self.group_columns < 1:
            raise QuantizationError(f"quantisation {self.kind}: groups of {self.group_columns} columns")
        if self.scales not in SCALE_DTYPES:
            raise QuantizationError(f"scales of dtype {self.scales!r}: there are {', '.join(SCALE_DTYPES)}")
        if not self.kind.startswith("int") and not self.symmetric:
            raise QuantizationError(f"{self.kind} weights have no zero points")
        wanted = OF_E2M1.get(self.kind)
        if wanted is not None and (self.group_columns, self.scales) != (wanted, "f32"):
            raise QuantizationError(f"{self.kind} has groups of {wanted} columns, whose scales are read in f32")

    @property
    def name(self) -> str:
        """The format's name: "int4-g128", "int4-g128-asym", "int4" (a scale a row), "int8", "fp8", "fp8-block128",
        "mxfp4", "nvfp4"."""
        if self.kind in OF_E2M1:
            return self.kind
        group = "" if self.group_columns is None else f"-{'block' if self.kind == 'fp8' else 'g'}{self.group_columns}"
        return f"{self.kind}{group}{'' if self.symmetric else '-asym'}"

    def groups(self, columns: int) -> int:
        """Scales of a row of so many columns; the last group may be a part of one."""
        return 1 if self.group_columns is None else -(-columns // self.group_columns)


def is_scheme_name(name: str) -> bool:
    """Whether there is a scheme of that name."""
    return _NAME.fullmatch(name) is not None


def scheme_of_name(name: str, scales: str = "f16") -> QuantizationScheme:
    """The inverse of `QuantizationScheme.name`; QuantizationError if there is no such scheme."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise QuantizationError(
            f"there is no quantisation {name!r}: write int4, int8, fp8, mxfp4 or nvfp4, and for groups -g128 or, with "
            "fp8, -block128"
        )
    integer, group, asymmetric, _, block, microscaled = found.groups()
    if microscaled:
        return QuantizationScheme(microscaled, OF_E2M1[microscaled], scales="f32")
    columns = group or block
    return QuantizationScheme(integer or "fp8", int(columns) if columns else None, asymmetric is None, scales)


def rows_of_element(plane: NDArray[Any]) -> int:
    """How many rows an element of one of the arrays of `QuantizedRows` holds."""
    return 8 if plane.dtype == EIGHT_ROWS else 1


def words_of_rows(eights: NDArray[Any], out: NDArray[np.uint32] | None = None) -> NDArray[np.uint32]:
    """Words uint32 [rows, words] of EIGHT_ROWS [rows / 8, words], in `out` if given."""
    count, words = eights.shape
    rows = np.empty((count * 8, words), np.uint32) if out is None else out
    together = scratch("words of eight rows", eights.shape, EIGHT_ROWS)
    together[:] = eights
    rows.reshape(count, 8, words)[:] = together.view(np.uint32).reshape(count, words, 8).transpose(0, 2, 1)
    return rows


def in_natural_order(values: F32, order: Order | None) -> F32:
    """Columns of a matrix [rows, columns] as its module has them."""
    if order is None:
        return values
    natural = np.empty_like(values)
    natural[:, order] = values
    return natural


class RowPlanes(ABC):
    """Some whole rows of one matrix as arrays, each [rows, ...]."""

    @property
    @abstractmethod
    def planes(self) -> tuple[NDArray[Any], ...]:
        """The arrays."""

    @abstractmethod
    def with_planes(self, made: Callable[[NDArray[Any]], NDArray[Any]]) -> Self:
        """The same of other arrays, each `made` of one of these."""

    def room(self, rows: int) -> Self:
        """As many rows of the same kind; what is in them is not said, and the next call in this thread gives the same
        memory."""
        planes = (
            scratch(f"plane {number} of rows", (rows // rows_of_element(plane), plane.shape[1]), plane.dtype)
            for number, plane in enumerate(self.planes)
        )
        return self.with_planes(lambda plane: next(planes))


@dataclass(frozen=True)
class RowScales(RowPlanes):
    """What the codes of some whole rows are counted from and multiplied by; each field as `QuantizedRows` has it."""

    kind: str
    scales: NDArray[Any]
    zero_points: NDArray[np.uint8] | None
    group_columns: int
    factors: F32 | None = None

    @property
    def planes(self) -> tuple[NDArray[Any], ...]:
        """Scales, and zero points and factors if there are some."""
        return tuple(plane for plane in (self.scales, self.zero_points, self.factors) if plane is not None)

    def with_planes(self, made: Callable[[NDArray[Any]], NDArray[Any]]) -> RowScales:
        planes = self.scales, self.zero_points, self.factors
        scales, points, factors = (None if plane is None else made(plane) for plane in planes)
        assert scales is not None
        return replace(self, scales=scales, zero_points=points, factors=factors)


@dataclass(frozen=True)
class QuantizedRows(RowPlanes):
    """Some whole rows of one matrix.

    stored_codes: uint8 [rows, columns]; int4: 0 .. 15, int8: the value + 128, fp8: the byte of e4m3, mxfp4,
        nvfp4: the bits of e2m1. Or, of 4 bits, words of eight neighbouring columns: uint32 [rows, columns / 8], or
        those of eight rows side by side, EIGHT_ROWS [rows / 8, columns / 8]. In any order in memory.
    scales: [rows, groups], float16, bfloat16 or float32 as the checkpoint has them.
    zero_points: uint8 [rows, groups], in codes; None: all of them `MIDDLE_CODE[kind]` (with exponents: none).
    group_columns: columns of a group, `columns` where a row has one scale; the last group may be shorter.
    even_first: whether words have their columns in the order EVEN_FIRST; else nibble j is column j.
    factors: nvfp4: float32 [rows, 1], what all scales of a row are multiplied by.
    """

    kind: str
    stored_codes: NDArray[Any]
    scales: NDArray[Any]
    zero_points: NDArray[np.uint8] | None
    group_columns: int
    even_first: bool = False
    factors: F32 | None = None

    def __post_init__(self) -> None:
        rows, columns = self.shape
        wanted = (rows, -(-columns // self.group_columns))
        if self.scales.shape != wanted:
            raise QuantizationError(
                f"scales are {list(self.scales.shape)}, {columns} columns in groups of {self.group_columns} need "
                f"{list(wanted)}"
            )
        if self.zero_points is not None and (not self.kind.startswith("int") or self.zero_points.shape != wanted):
            raise QuantizationError(
                f"zero points are {list(self.zero_points.shape)} of {self.kind}, not {list(wanted)}"
            )
        if (self.kind == "nvfp4") != (self.factors is not None):
            raise QuantizationError(f"rows of {self.kind} have {'no ' if self.factors is None else ''}factors")

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns]."""
        rows, columns = self.stored_codes.shape
        return rows * rows_of_element(self.stored_codes), columns * (8 if self.has_words else 1)

    @property
    def has_words(self) -> bool:
        """Whether eight codes are a word."""
        return self.stored_codes.dtype in (np.uint32, EIGHT_ROWS)

    @property
    def words(self) -> NDArray[np.uint32]:
        """Where there are words, those of each row by itself: uint32 [rows, columns / 8]."""
        return words_of_rows(self.stored_codes) if self.stored_codes.dtype == EIGHT_ROWS else self.stored_codes

    @property
    def codes(self) -> NDArray[np.uint8]:
        """Every code by itself, uint8 [rows, columns]."""
        if not self.has_words:
            return self.stored_codes
        places = [EVEN_FIRST.index(column) if self.even_first else column for column in range(8)]
        shifts = np.array([4 * place for place in places], np.uint32)
        nibbles = self.words[:, :, None] >> shifts & np.uint32(15)
        return nibbles.astype(np.uint8).reshape(self.shape)

    @property
    def zero_codes(self) -> NDArray[np.uint8]:
        """Of whole numbers the code of each weight that stands for zero: uint8 [rows, columns]."""
        return self._of_columns(self._zero_points()).astype(np.uint8)

    @property
    def row_scales(self) -> RowScales:
        """All but the codes."""
        return RowScales(self.kind, self.scales, self.zero_points, self.group_columns, self.factors)

    @property
    def planes(self) -> tuple[NDArray[Any], ...]:
        """Codes as they are stored, then those of `row_scales`."""
        return (self.stored_codes, *self.row_scales.planes)

    def with_planes(self, made: Callable[[NDArray[Any]], NDArray[Any]]) -> QuantizedRows:
        codes, rows = made(self.stored_codes), self.row_scales.with_planes(made)
        return replace(self, stored_codes=codes, scales=rows.scales, zero_points=rows.zero_points, factors=rows.factors)

    def dequantized(self) -> F32:
        """float32 [rows, columns]: what the checkpoint says that the weights are. Exact for scales of 16 bits, and of
        nvfp4 up to the factor."""
        if self.kind == "fp8":
            values = self.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        elif self.kind in OF_E2M1:
            values = E2M1[self.codes]
        else:
            values = self.codes.astype(np.float32) - self._of_columns(self._zero_points())
        scaled = np.asarray(values * self._of_columns(self.scales.astype(np.float32)), np.float32)
        return scaled if self.factors is None else scaled * self.factors

    def _zero_points(self) -> F32:
        if self.zero_points is None:
            return np.full(self.scales.shape, MIDDLE_CODE[self.kind], np.float32)
        return self.zero_points.astype(np.float32)

    def _of_columns(self, of_groups: F32) -> F32:
        """[rows, groups] spread over [rows, columns]."""
        return np.repeat(of_groups, self.group_columns, axis=1)[:, : self.shape[1]]
