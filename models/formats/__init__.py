"""What the bytes of each weight format are: packing, its inverse, and meaning, by name (see `cheetah.plan.formats`)."""

from __future__ import annotations

import numpy as np

from cheetah.models.formats.bf16 import Bf16
from cheetah.models.formats.weight_format import Bytes, PackingError, WeightFormat
from cheetah.models.rounding import Bits
from cheetah.plan import MatrixLayout

__all__ = ["WEIGHT_FORMATS", "Bytes", "PackingError", "WeightFormat", "format_of", "pack_matrix", "unpack_matrix"]

WEIGHT_FORMATS: dict[str, WeightFormat] = {"bf16": Bf16()}


def format_of(layout: MatrixLayout) -> WeightFormat:
    """The format of a matrix."""
    return WEIGHT_FORMATS[layout.format.name]


def pack_matrix(layout: MatrixLayout, matrix: Bits) -> Bytes:
    """All `layout.total_bytes` bytes of `matrix`, uint16 [rows, columns] in M-tile order; the padding is zero."""
    if matrix.shape != (layout.rows, layout.columns):
        raise PackingError(
            f"matrix {layout.name!r}: shape {list(matrix.shape)}, its layout says {[layout.rows, layout.columns]}"
        )
    padded = np.zeros((layout.padded_rows, layout.padded_columns), dtype=np.uint16)
    padded[: layout.rows, : layout.columns] = matrix
    packed = np.empty(layout.total_bytes, dtype=np.uint8)
    format_of(layout).pack_m_tiles(layout, range(layout.m_tiles), padded, packed)
    return packed


def unpack_matrix(layout: MatrixLayout, packed: Bytes) -> Bits:
    """The inverse of `pack_matrix`: uint16 [rows, columns]."""
    if packed.dtype != np.uint8 or packed.shape != (layout.total_bytes,):
        found = f"{packed.dtype} {list(packed.shape)}"
        raise PackingError(f"matrix {layout.name!r}: {found}, its layout says uint8 [{layout.total_bytes}]")
    return format_of(layout).unpack(layout, packed)
