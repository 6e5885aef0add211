"""What the bytes of each weight format are: packing, its inverse, and meaning, by name (see `cheetah.plan.formats`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from cheetah.models.formats.bf16 import Bf16
from cheetah.models.formats.block_rows import LotsOfBlocks
from cheetah.models.formats.blocks import Blocks
from cheetah.models.formats.lists import Listed, ListedRows
from cheetah.models.formats.quantized import QuantizedRows, rows_of_element
from cheetah.models.formats.quantized_tiles import QuantizedFormat
from cheetah.models.formats.two_of_four import TwoOfFour
from cheetah.models.formats.two_of_four_codes import SparseQuantized
from cheetah.models.formats.weight_format import PackingError, WeightFormat
from cheetah.models.rounding import Bytes
from cheetah.plan import MatrixLayout
from cheetah.plan.formats import (
    BLOCK_FORMATS,
    BLOCKS,
    LIST,
    PLUS,
    QUANTIZED_FORMATS,
    SPARSE,
    SPARSE_FORMATS,
    SPARSE_QUANTIZED_FORMATS,
    BlockRows,
    tile_format,
)

__all__ = [
    "WEIGHT_FORMATS",
    "Bytes",
    "PackingError",
    "WeightFormat",
    "dense_name",
    "format_named",
    "format_of",
    "is_blocks_name",
    "is_sparse_name",
    "pack_matrix",
    "sparse_name",
    "unpack_matrix",
    "without_list",
]

WEIGHT_FORMATS: dict[str, WeightFormat] = {
    "bf16": Bf16(),
    "2of4": TwoOfFour(),
    **{name: Blocks(one, Bf16()) for name, one in BLOCK_FORMATS.items()},
    **{name: QuantizedFormat(one) for name, one in QUANTIZED_FORMATS.items()},
    **{name: SparseQuantized(one) for name, one in SPARSE_QUANTIZED_FORMATS.items()},
}


def is_sparse_name(name: str) -> bool:
    """Whether there is a format of that name that keeps some weights only."""
    return without_list(name) in SPARSE_FORMATS or is_blocks_name(name)


def is_blocks_name(name: str) -> bool:
    """Whether there is a format of that name that keeps some blocks only."""
    return name in BLOCK_FORMATS or name.startswith(BLOCKS) and isinstance(tile_format(name), BlockRows)


def sparse_name(name: str | None) -> str | None:
    """The format that keeps two of every four of what another has, None for bf16; the other, where there is none."""
    wanted = SPARSE if name is None else f"{SPARSE}-{name}"
    return wanted if wanted in SPARSE_FORMATS else name


def dense_name(name: str) -> str | None:
    """The inverse, for the name of a format that keeps some only: None is bf16."""
    return None if is_blocks_name(name) else without_list(name).removeprefix(SPARSE).removeprefix("-") or None


def without_list(name: str) -> str:
    """The name of the K-tiles of a format's name, which may end in a list's; any other name as it is."""
    tiles, plus, units = name.partition(f"{PLUS}{LIST}")
    return tiles if plus and units.isdecimal() else name


def format_named(name: str) -> WeightFormat:
    """The format of that name, or of its parts."""
    tile = tile_format(name)
    if isinstance(tile, BlockRows):
        return LotsOfBlocks(tile, Bf16())
    tiles, *lists = tile.parts
    return Listed(WEIGHT_FORMATS[tiles]) if lists else WEIGHT_FORMATS[tiles]


def format_of(layout: MatrixLayout) -> WeightFormat:
    """The format of a matrix."""
    return format_named(layout.format.name)


def pack_matrix(layout: MatrixLayout, matrix: Any) -> Bytes:
    """All `layout.total_bytes` bytes of `matrix`, [rows, columns] in M-tile order, uint16 or `QuantizedRows` as the
    format wants them; the padding is zero."""
    if matrix.shape != (layout.rows, layout.columns):
        raise PackingError(
            f"matrix {layout.name!r}: shape {list(matrix.shape)}, its layout says {[layout.rows, layout.columns]}"
        )
    packed = np.empty(layout.total_bytes, dtype=np.uint8)
    format_of(layout).pack_m_tiles(layout, range(layout.m_tiles), _padded(layout, matrix), packed)
    return packed


def unpack_matrix(layout: MatrixLayout, packed: Bytes) -> Any:
    """The inverse of `pack_matrix`: [rows, columns]; scales are float32 then."""
    if packed.dtype != np.uint8 or packed.shape != (layout.total_bytes,):
        found = f"{packed.dtype} {list(packed.shape)}"
        raise PackingError(f"matrix {layout.name!r}: {found}, its layout says uint8 [{layout.total_bytes}]")
    return _cut(layout, format_of(layout).unpack(layout, packed))


def _padded(layout: MatrixLayout, matrix: Any) -> Any:
    if isinstance(matrix, QuantizedRows | ListedRows):
        return matrix.with_planes(
            lambda plane: _with_zeros(plane, layout.padded_rows // rows_of_element(plane), plane.shape[1])
        )
    return _with_zeros(matrix, layout.padded_rows, layout.padded_columns)


def _with_zeros(plane: Any, rows: int, columns: int) -> Any:
    padded = np.zeros((rows, columns), plane.dtype)
    padded[: plane.shape[0], : plane.shape[1]] = plane
    return padded


def _cut(layout: MatrixLayout, rows: Any) -> Any:
    if isinstance(rows, ListedRows):
        return ListedRows(_cut(layout, rows.rows), _cut(layout, rows.listed))
    if not isinstance(rows, QuantizedRows):
        return np.ascontiguousarray(rows[: layout.rows, : layout.columns])
    group_columns = min(rows.group_columns, layout.columns) if rows.scales.shape[1] == 1 else rows.group_columns
    groups = -(-layout.columns // group_columns)
    points = None if rows.zero_points is None else rows.zero_points[: layout.rows, :groups]
    codes, scales = rows.codes[: layout.rows, : layout.columns], rows.scales[: layout.rows, :groups]
    factors = None if rows.factors is None else rows.factors[: layout.rows]
    return QuantizedRows(rows.kind, codes, scales, points, group_columns, factors=factors)
