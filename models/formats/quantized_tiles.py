"""Quantised weights as the kernel streams them: codes in the order of tensor cores, with scales and zero points.

A K-tile is 16 rows x 128 columns, cut into four *parts* of 32 columns. Lane 4g + t (g 0..7, t 0..3) owns of each part
the columns 8t .. 8t+7 of rows g and g + 8, which it reads as 32-bit words:

* int4, mxfp4, nvfp4: a word is the 8 columns of a row; nibble j is column 2j, nibble j + 4 column 2j + 1, so that a
  mask of the lowest nibble of each half leaves two neighbours. A tile is [2 pairs of parts][lane][part of the pair][row
  g, row g + 8].
* int8, fp8: a word is 4 columns of a row, whose bytes are columns 0, 2, 1, 3, so that a mask of the same byte of each
  half leaves two neighbours. A tile is [part][lane][half of the 8 columns][row g, row g + 8].

Behind the codes lie the scales: for each group of columns f16 [g][row g, row g + 8]; of an fp8 block format two floats,
of rows 0 to 7 and 8 to 15; of mxfp4 the exponents of powers of two as f32 has them, u8 in the order of f16; of nvfp4
the numbers of e4m3 so, without a sign and with an exponent of 5 bits, so that none is subnormal. Then zero points, u8
in that order. Behind the last K-tile of an M-tile lies one factor (f32) a row, which takes part in all its weights: the
scale itself where the row has one only; the factor of nvfp4; a power of two where scales are bf16 or f32, which f16
holds exactly up to such a factor or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.quantized import QuantizedRows, RowScales
from cheetah.models.formats.tile_words import (
    HALF,
    Words,
    byte_words,
    bytes_in_tiles,
    even_first_in_tiles,
    int4_in_tiles,
    int4_words,
)
from cheetah.models.formats.weight_format import PackingError, TilePart, WeightFormat
from cheetah.models.rounding import F32, Bytes
from cheetah.plan.formats import INTEGER_SCALE_BYTES, M_TILE_ROWS, SCALE_BIAS, QuantizedTiles

LARGEST_F16_EXPONENT = 15
EXPONENT_AT = 23
"""The bit of a float at which its exponent begins."""


@dataclass(frozen=True)
class QuantizedFormat(WeightFormat):
    """The K-tiles of one quantised format; rows are `QuantizedRows`, padded to M-tiles with zeros."""

    tile: QuantizedTiles

    def encode(self, rows: QuantizedRows) -> tuple[TilePart, ...]:
        columns, stored = rows.shape[1], rows.stored_codes
        k_tiles = -(-columns // self.tile.columns)
        behind = self.behind_codes(rows.row_scales, k_tiles)
        codes = _widened(stored, k_tiles * self.tile.columns * stored.shape[1] // columns)
        tiles: NDArray[Any]
        if self.tile.bits == 4:
            in_order = rows.has_words and not rows.even_first
            tiles = (int4_in_tiles if in_order else even_first_in_tiles)(int4_words(codes))
        else:
            tiles = bytes_in_tiles(byte_words(codes))
        return TilePart(0, tiles), TilePart(self.tile.scales_at, behind)

    @property
    def code_bits(self) -> int:
        return self.tile.bits

    @property
    def code_columns(self) -> int:
        return self.tile.columns

    def rows_of_codes(self, codes: Bytes) -> QuantizedRows:
        scales = np.ones((len(codes), self.tile.groups), np.float16)
        points = np.zeros(scales.shape, np.uint8) if self.tile.is_asymmetric else None
        factors = np.ones((len(codes), 1), np.float32) if self.tile.kind == "nvfp4" else None
        group_columns = codes.shape[1] // self.tile.groups
        return QuantizedRows(self.tile.kind, codes, scales, points, group_columns, factors=factors)

    def behind_codes(self, rows: RowScales, k_tiles: int) -> Bytes:
        """What follows the codes of each K-tile of rows [M-tiles * 16, groups]: uint8 [M-tiles, k_tiles, bytes].
        PackingError if it has no room for them."""
        self._check(rows)
        m_tiles, groups = len(rows.scales) // M_TILE_ROWS, k_tiles * self.tile.groups
        behind = np.zeros((m_tiles, k_tiles, self.tile.tile_bytes - self.tile.scales_at), np.uint8)
        if self.tile.group_columns is not None:
            padded = _widened(rows.scales, groups)  # the padding's scales are zero
            scales = self._scales_of_kind(padded)
            behind[..., : scales.shape[-1]] = scales
        if rows.zero_points is not None:
            points = rows.zero_points
            # A row's only zero point is said in every tile.
            points = np.repeat(points, groups, 1) if self.tile.group_columns is None else _widened(points, groups)
            behind[..., self.tile.zero_points_at - self.tile.scales_at :] = self._of_lanes(points)
        return behind

    def row_factors(self, rows: RowScales) -> Bytes:
        if self.tile.group_columns is None:
            factors = rows.scales[:, 0].astype(np.float32)
        elif rows.factors is not None:
            factors = rows.factors[:, 0]
        elif self.tile.kind in ("fp8", "mxfp4"):
            factors = np.ones(len(rows.scales), np.float32)
        else:
            factors = powers_of_two(rows.scales)
        places = np.zeros((len(factors) // M_TILE_ROWS, self.tile.factor_bytes // 4), np.float32)
        places[:, :M_TILE_ROWS] = factors.reshape(-1, M_TILE_ROWS)
        return places.view(np.uint8)

    def decode(self, tiles: Bytes, factors: Bytes) -> QuantizedRows:
        """Scales are float32: those of the rows that were packed, times nothing that rounds."""
        words = np.ascontiguousarray(tiles[..., : self.tile.scales_at]).view(np.uint32)
        codes = (int4_codes if self.tile.bits == 4 else byte_codes)(words)
        points = None
        if self.tile.is_asymmetric:
            points = self._of_rows(tiles[..., self.tile.zero_points_at :])
            points = points[:, :1] if self.tile.group_columns is None else points
        columns = self.tile.group_columns or codes.shape[1]
        of_rows = None
        if self.tile.kind == "nvfp4":
            of_rows = factors.view(np.float32)[:, :M_TILE_ROWS].reshape(-1, 1)
        return QuantizedRows(self.tile.kind, codes, self.scales_of(tiles, factors), points, columns, factors=of_rows)

    def scales_of(self, tiles: Bytes, factors: Bytes) -> F32:
        """Of each group of the rows, with the factor of the row (of nvfp4 without)."""
        groups, at = tiles.shape[1] * self.tile.groups, self.tile.scales_at
        of_rows = factors.view(np.float32)[:, :M_TILE_ROWS].reshape(-1, 1)
        if self.tile.group_columns is None:
            return np.array(of_rows)
        if self.tile.kind == "fp8":
            pairs = np.ascontiguousarray(tiles[..., at : at + 8]).view(np.float32)
            return np.asarray(np.repeat(pairs.transpose(0, 2, 1).reshape(-1, groups), HALF, axis=0) * of_rows)
        if self.tile.kind == "mxfp4":
            return np.asarray(powers_of_exponents(self._of_rows(tiles[..., at:])) * of_rows)
        if self.tile.kind == "nvfp4":
            return numbers_of_scale_bytes(self._of_rows(tiles[..., at:]))
        end = at + self.tile.groups * INTEGER_SCALE_BYTES
        halves = np.ascontiguousarray(tiles[..., at:end]).view(np.float16)
        return np.asarray(self._of_rows(halves).astype(np.float32) * of_rows)

    # -- rows of the checkpoint

    def _check(self, rows: RowScales) -> None:
        wanted = self.tile.group_columns
        one_group = rows.scales.shape[1] == 1
        if rows.kind != self.tile.kind or not (one_group if wanted is None else rows.group_columns == wanted):
            raise PackingError(
                f"weight format {self.tile.name}: rows of {rows.kind} with {rows.scales.shape[1]} groups of "
                f"{rows.group_columns} columns: give {self.tile.kind} with "
                + ("one group a row" if wanted is None else f"groups of {wanted}")
            )
        if (rows.zero_points is not None) != self.tile.is_asymmetric:
            wanted_points = "zero points" if self.tile.is_asymmetric else "no zero points"
            raise PackingError(f"weight format {self.tile.name}: give rows with {wanted_points}")
        if len(rows.scales) % M_TILE_ROWS:
            raise PackingError(f"weight format {self.tile.name}: {len(rows.scales)} rows are no whole M-tiles")

    def _scales_of_kind(self, scales: NDArray[Any]) -> Bytes:
        """[rows, groups] as tiles have them."""
        if self.tile.kind == "fp8":
            return self._block_scales(scales)
        if self.tile.kind == "nvfp4":
            return self._scale_bytes(scales)
        return self._exponents(scales) if self.tile.kind == "mxfp4" else self._group_scales(scales)

    def _scale_bytes(self, scales: NDArray[Any]) -> Bytes:
        wide = scales.astype(np.float32)
        mantissas, exponents = np.frexp(wide)
        bits = (exponents + (SCALE_BIAS - 1) << 3) + (mantissas * 16 - 8).astype(np.int64)
        found: Bytes = np.where(wide == 0, 0, bits).clip(0, 255).astype(np.uint8)
        if not np.array_equal(numbers_of_scale_bytes(found), wide):
            row, group = np.argwhere(numbers_of_scale_bytes(found) != wide)[0]
            raise PackingError(
                f"weight format {self.tile.name}: scale {scales[row, group]} of row {row}, group {group}, is no "
                "positive number of e4m3"
            )
        return self._of_lanes(found)

    def _exponents(self, scales: NDArray[Any]) -> Bytes:
        wide = scales.astype(np.float32)
        exponents = (wide.view(np.uint32) >> EXPONENT_AT).astype(np.uint8)
        is_power = (powers_of_exponents(exponents) == wide) | (wide == 0)
        if not is_power.all():
            row, group = np.argwhere(~is_power)[0]
            raise PackingError(
                f"weight format {self.tile.name}: scale {scales[row, group]} of row {row}, group {group}, is no power "
                "of two"
            )
        return self._of_lanes(exponents)

    def _group_scales(self, scales: NDArray[Any]) -> Bytes:
        """f16 up to the factor of the row."""
        if scales.dtype == np.float16:
            return self._of_lanes(scales).view(np.uint8)
        wide = scales.astype(np.float32) / powers_of_two(scales)[:, None]
        with np.errstate(over="ignore"):
            halves = wide.astype(np.float16)
        if not np.array_equal(halves.astype(np.float32), wide):
            row, group = np.argwhere(halves.astype(np.float32) != wide)[0]
            raise PackingError(
                f"weight format {self.tile.name}: scale {scales[row, group]} of row {row}, group {group}, is no "
                f"f16 number times a power of two that the row shares: round the scales to f16 or bf16"
            )
        return self._of_lanes(halves).view(np.uint8)

    def _block_scales(self, scales: NDArray[Any]) -> Bytes:
        of_halves = scales.astype(np.float32).reshape(len(scales) // M_TILE_ROWS, 2, HALF, -1)
        of_eights = of_halves.max(axis=2)
        # Behind the last row there are rows whose scale is 0.
        if ((of_halves != of_eights[:, :, None]) & (of_halves != 0)).any():
            raise PackingError(
                f"weight format {self.tile.name}: scales differ within 8 rows that lie side by side in an M-tile: give "
                f"blocks of a multiple of 8 rows"
            )
        return np.ascontiguousarray(of_eights.transpose(0, 2, 1)).view(np.uint8)

    def _of_lanes(self, of_groups: NDArray[Any]) -> NDArray[Any]:
        """[rows, groups] as [M-tiles, K-tiles, all of a tile], there by group, g, and row g or g + 8."""
        m_tiles, groups = len(of_groups) // M_TILE_ROWS, self.tile.groups
        axes = of_groups.reshape(m_tiles, 2, HALF, -1, groups)
        return np.ascontiguousarray(axes.transpose(0, 3, 4, 2, 1)).reshape(m_tiles, -1, groups * M_TILE_ROWS)

    def _of_rows(self, of_lanes: NDArray[Any]) -> NDArray[Any]:
        """The inverse of `_of_lanes`, for [M-tiles, K-tiles, all of a tile]."""
        m_tiles, k_tiles = of_lanes.shape[:2]
        axes = of_lanes.reshape(m_tiles, k_tiles, self.tile.groups, HALF, 2)
        return np.ascontiguousarray(axes.transpose(0, 4, 3, 1, 2)).reshape(m_tiles * M_TILE_ROWS, -1)


def powers_of_exponents(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """2^(exponent - 127), float32, whose smallest is subnormal."""
    bits = exponents.astype(np.uint32) << EXPONENT_AT
    return np.where(exponents == 0, np.uint32(1 << EXPONENT_AT - 1), bits).astype(np.uint32).view(np.float32)


def numbers_of_scale_bytes(found: NDArray[np.uint8]) -> NDArray[np.float32]:
    """5 bits of exponent over 3 of mantissa, float32; the byte 0 is zero."""
    numbers = np.ldexp(np.float32(1) + (found & 7).astype(np.float32) / 8, (found >> 3).astype(np.int32) - SCALE_BIAS)
    return np.where(found == 0, np.float32(0), numbers).astype(np.float32)


def powers_of_two(scales: NDArray[Any]) -> NDArray[np.float32]:
    """float32 [rows]: what a row's scales are divided by so that f16 has room for them; 1 for scales that are f16."""
    if scales.dtype == np.float16:
        return np.ones(len(scales), np.float32)
    largest = np.abs(scales.astype(np.float32)).max(axis=1)
    exponents = np.frexp(largest)[1] - LARGEST_F16_EXPONENT
    return np.asarray(np.ldexp(np.float32(1), exponents), np.float32)


def _widened(values: NDArray[Any], columns: int) -> NDArray[Any]:
    """With columns of zeros behind."""
    if values.shape[1] == columns:
        return values
    wide = np.zeros((len(values), columns), values.dtype)
    wide[:, : values.shape[1]] = values
    return wide


# -- codes: uint32 [M-tiles, K-tiles, words] to uint8 [rows, columns]


def int4_codes(words: Words) -> Bytes:
    packed = words.view(np.uint8).reshape(*words.shape[:2], 2, HALF, 4, 2, 2, 4)
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:7], 2, 4)
    return np.ascontiguousarray(nibbles.transpose(0, 6, 3, 1, 2, 5, 4, 8, 7)).reshape(len(words) * M_TILE_ROWS, -1)


def byte_codes(words: Words) -> Bytes:
    quads = words.view(np.uint8).reshape(*words.shape[:2], 4, HALF, 4, 2, 2, 4)[..., [0, 2, 1, 3]]
    return np.ascontiguousarray(quads.transpose(0, 6, 3, 1, 2, 4, 5, 7)).reshape(len(words) * M_TILE_ROWS, -1)
