"""Rounding weights to a quantisation scheme: each to the nearest code, without any data.

The range of a group is its largest magnitude (or least and greatest number), or whatever smaller range leaves the
smallest squared error. Scales are rounded to the scheme's dtype first and the codes chosen for the rounded ones, so
that what is stored is what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.quantized import (
    LARGEST_CODE,
    MIDDLE_CODE,
    SCALE_DTYPES,
    QuantizationError,
    QuantizationScheme,
    QuantizedRows,
)
from cheetah.models.rounding import F32

LARGEST_E4M3 = 448.0
LEAST_SCALE = 2.0**-20
"""Of a group, beside the largest of its row: what is smaller is nothing, and formats of scales have no room for it."""
SHRUNK_RANGES = (1.0, *(1 - step / 50 for step in range(1, 20)))
"""Ranges that clipping tries, as parts of the whole one."""


def nearest_rows(
    values: F32, scheme: QuantizationScheme, *, clip: bool = False, block_rows: int | None = None
) -> QuantizedRows:
    """The rows [rows, columns] in a scheme. clip: take the range with the least squared error of each group.

    block_rows: rows that share their scales, in an fp8 block format; the first row begins a block. The last group of a
    row may be a part of one. QuantizationError if a value is not finite.
    """
    rows, columns = values.shape
    group_columns = scheme.group_columns or columns
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise QuantizationError(f"row {row}, column {column} is {values[row, column]}: only numbers can be quantised")
    padded = np.pad(values, ((0, 0), (0, -columns % group_columns)))  # zeros, which change neither range nor error
    groups = padded.reshape(rows, padded.shape[1] // group_columns, group_columns)
    best = _rounded(groups, scheme, 1.0, block_rows)
    for part in SHRUNK_RANGES[1:] if clip else ():
        best = _better(best, _rounded(groups, scheme, part, block_rows), block_rows)
    codes = np.ascontiguousarray(best.codes.reshape(padded.shape)[:, :columns])
    return QuantizedRows(scheme.kind, codes, best.scales, best.zero_points, group_columns)


@dataclass(frozen=True)
class _Rounded:
    """codes [rows, groups, columns of a group]; scales, zero points and squared errors [rows, groups]."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.generic]
    zero_points: NDArray[np.uint8] | None
    errors: F32


def _rounded(groups: F32, scheme: QuantizationScheme, part: float, block_rows: int | None) -> _Rounded:
    """All groups with `part` of their range."""
    if scheme.kind == "fp8":
        largest = _of_blocks(np.abs(groups).max(axis=2), block_rows)
        scales = _scales(largest * np.float32(part / LARGEST_E4M3), scheme)
        scaled = groups / _wide(scales)
        floats = np.clip(scaled, -LARGEST_E4M3, LARGEST_E4M3).astype(ml_dtypes.float8_e4m3fn)
        return _Rounded(floats.view(np.uint8), scales, None, _errors(groups, floats.astype(np.float32), scales))
    steps = LARGEST_CODE[scheme.kind]
    zero_points, offset = None, np.float32(MIDDLE_CODE[scheme.kind])
    if scheme.symmetric:
        scales = _scales(np.abs(groups).max(axis=2) * np.float32(2 * part / steps), scheme)
    else:
        least, most = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
        scales = _scales((most - least) * np.float32(part / steps), scheme)
        zero_points = np.clip(np.rint(-least * np.float32(part) / _wide(scales)[..., 0]), 0, steps).astype(np.uint8)
        offset = zero_points.astype(np.float32)[..., None]
    codes = np.clip(np.rint(groups / _wide(scales)) + offset, 0, steps).astype(np.uint8)
    return _Rounded(codes, scales, zero_points, _errors(groups, codes - offset, scales))


def _scales(wanted: F32, scheme: QuantizationScheme) -> NDArray[np.generic]:
    """Positive scales [rows, groups]; 1 for a row of zeros."""
    of_rows = wanted.max(axis=1, keepdims=True)
    floor = np.where(of_rows > 0, of_rows * np.float32(LEAST_SCALE), np.float32(1))
    scales = np.maximum(wanted, floor).astype(SCALE_DTYPES[scheme.scales])
    if not (scales > 0).all():
        raise QuantizationError(f"weights below {of_rows[of_rows > 0].min()} have no scale in {scheme.scales}")
    return scales


def _wide(scales: NDArray[np.generic]) -> F32:
    return scales.astype(np.float32)[..., None]


def _errors(groups: F32, numbers: F32, scales: NDArray[np.generic]) -> F32:
    return np.asarray(np.square(groups - numbers * _wide(scales)).sum(axis=2), np.float32)


def _of_blocks(of_rows: F32, block_rows: int | None) -> F32:
    """The largest of each block of rows in the place of each of its rows."""
    if block_rows is None:
        return of_rows
    firsts = np.arange(0, len(of_rows), block_rows)
    return np.repeat(np.maximum.reduceat(of_rows, firsts, axis=0), block_rows, axis=0)[: len(of_rows)]


def _better(first: _Rounded, second: _Rounded, block_rows: int | None) -> _Rounded:
    """Of each group, or block, the one with the smaller error; the first if they are equal."""
    errors = [one.errors if block_rows is None else _sums(one.errors, block_rows) for one in (first, second)]
    is_better = errors[1] < errors[0]
    points = None
    if first.zero_points is not None and second.zero_points is not None:
        points = np.where(is_better, second.zero_points, first.zero_points)
    return _Rounded(
        np.where(is_better[..., None], second.codes, first.codes),
        np.where(is_better, second.scales, first.scales),
        points,
        np.where(is_better, second.errors, first.errors),
    )


def _sums(of_rows: F32, block_rows: int) -> F32:
    """The sum of each block of rows in the place of each of its rows."""
    firsts = np.arange(0, len(of_rows), block_rows)
    return np.repeat(np.add.reduceat(of_rows, firsts, axis=0), block_rows, axis=0)[: len(of_rows)]
