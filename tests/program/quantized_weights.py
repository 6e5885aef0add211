"""Models with random quantised weights: codes, scales and zero points of every format, as a checkpoint gives them; and
with weights of which two of every four columns are there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from cheetah.models.config import ModelConfig
from cheetah.models.dense.weights import matrix_tensors
from cheetah.models.formats import dense_name, is_sparse_name
from cheetah.models.formats.lists import NUMBERS_OF_UNIT, ListedRows
from cheetah.models.formats.quantized import (
    OF_E2M1,
    SCALE_DTYPES,
    Order,
    QuantizationScheme,
    QuantizedRows,
    in_natural_order,
    scheme_of_name,
)
from cheetah.models.formats.two_of_four_codes import zero_code
from cheetah.models.rounding import Bits
from cheetah.plan.formats import BLOCK_FORMATS, PLUS, TWO_OF_FOUR, BlockRows, tile_format
from cheetah.plan.index import round_up
from tests.program.rig import RandomWeights, as_bf16

LINEAR = ("qkv", "o", "gate_up", "down")
BLOCK_ROWS = 128
LARGEST = {"int4": 8, "int8": 128, "fp8": 448, "mxfp4": 8, "nvfp4": 8}
E4M3_NAN = 0x7F


def drawn_rows(
    scheme: QuantizationScheme, rows: int, columns: int, draw: np.random.Generator, size: float = 0.02
) -> QuantizedRows:
    """Weights of about `size`, with scales that differ from row to row and from group to group."""
    groups = scheme.groups(columns)
    scales = size / LARGEST[scheme.kind] * np.exp(0.7 * draw.standard_normal((rows, groups)))
    if scheme.kind == "fp8" and scheme.group_columns is not None:
        scales = np.repeat(scales[::BLOCK_ROWS], BLOCK_ROWS, axis=0)[:rows]
    factors = None
    if scheme.kind in OF_E2M1:
        scales = np.exp2(np.rint(np.log2(scales)))
        if scheme.kind == "nvfp4":  # about one, and some smaller ones of all exponents, subnormal ones too
            factors = (size / 8 * (1 + draw.random((rows, 1)))).astype(np.float32)
            of_most = draw.random((rows, groups)) < 0.8
            scales = np.where(of_most, draw.integers(0x30, 0x40, scales.shape), draw.integers(1, 0x30, scales.shape))
            scales = scales.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        codes, points = draw.integers(0, 16, (rows, columns)).astype(np.uint8), None
    elif scheme.kind == "fp8":
        # Of every exponent, and both zeros; no NaN.
        codes = draw.integers(0, 256, (rows, columns)).astype(np.uint8)
        codes[codes & E4M3_NAN == E4M3_NAN] = 0x80
        points = None
    else:
        most = 2 * LARGEST[scheme.kind] - 1
        codes = draw.integers(0, most + 1, (rows, columns)).astype(np.uint8)
        middle, spread = LARGEST[scheme.kind], LARGEST[scheme.kind] // 4
        points = draw.integers(middle - spread, middle + spread, scales.shape).astype(np.uint8)
        points = None if scheme.symmetric else points
    group_columns = scheme.group_columns or columns
    stored = scales.astype(SCALE_DTYPES[scheme.scales])
    return QuantizedRows(scheme.kind, codes, stored, points, group_columns, factors=factors)


def two_of_four(bits: Bits, draw: np.random.Generator) -> Bits:
    """Of bf16 bits [rows, columns] two, one or none of each four neighbours; the others are zero."""
    return np.where(_kept(bits.shape, draw), bits, np.uint16(0))


def some_blocks(bits: Bits, kept: int, draw: np.random.Generator) -> Bits:
    """Of bf16 bits [rows, columns] at most so many of four neighbouring blocks of 16 x 32; the others are zero."""
    rows, columns = bits.shape
    drawn = draw.random((round_up(rows, 16) // 16, round_up(columns, 128) // 128, 4))
    there = np.argsort(np.argsort(drawn, axis=2), axis=2) < kept
    whole = np.repeat(np.repeat(there.reshape(len(there), -1), 16, axis=0), 32, axis=1)
    return np.where(whole[:rows, :columns], bits, np.uint16(0))


def two_of_four_codes(rows: QuantizedRows, draw: np.random.Generator) -> QuantizedRows:
    """The same of symmetric codes."""
    codes = np.where(_kept(rows.shape, draw), rows.codes, np.uint8(zero_code(rows.kind)))
    return replace(rows, stored_codes=codes)


def listed_columns(shape: tuple[int, ...], units: int, draw: np.random.Generator) -> np.ndarray:
    """As many columns of each row as fill a list of so many units, at most all."""
    count = units * NUMBERS_OF_UNIT // 2
    return np.asarray(np.argsort(np.argsort(draw.random(shape), axis=1), axis=1) < count)


def _kept(shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    rows, columns = shape
    drawn = draw.random((rows, round_up(columns, 4) // 4, 4))
    kept = np.argsort(drawn, axis=2) < draw.choice(3, (*drawn.shape[:2], 1), p=(0.1, 0.2, 0.7))
    return np.asarray(kept.reshape(rows, -1)[:, :columns])


@dataclass(frozen=True)
class Matrix:
    """`QuantizedMatrix` of rows in memory."""

    values: QuantizedRows | ListedRows
    scheme: QuantizationScheme
    order: Order | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape

    def __getitem__(self, part: slice) -> QuantizedRows | ListedRows:
        return self.values.with_planes(lambda plane: plane[part])


class QuantizedWeights(RandomWeights):
    """`RandomWeights` whose matrices are in the formats, and their columns in orders, if the configuration says so."""

    def __init__(self, config: ModelConfig, seed: int = 0, scales: str = "f16") -> None:
        super().__init__(config, seed)
        self.quantized: dict[str, Matrix] = {}
        draw = np.random.default_rng(seed + 1)
        for matrix, format in config.weight_formats:
            experts = config.shape.table.named(matrix).experts
            for layer, expert in product(range(config.layers), range(1 if experts is None else experts.count)):
                names = matrix_tensors(config, matrix, layer, expert)
                if names[0] not in self.tensors:  # of layers of another kind
                    continue
                tiles, units = format.partition(PLUS)[0], tile_format(format).list_units
                if isinstance(tile_format(format), BlockRows):
                    self._keep_bands(names, 8 if matrix == "gate_up" else 16, matrix == "qkv", draw)
                    continue
                if tiles in BLOCK_FORMATS:  # the same in all rows, wherever these lie in M-tiles
                    kept = BLOCK_FORMATS[tiles].kept
                    first = some_blocks(np.ones((1, self.tensors[names[0]].shape[1]), np.uint16), kept, draw)
                    self.tensors |= {name: self.tensors[name] * first for name in names}
                    continue
                if tiles == TWO_OF_FOUR.name:
                    self.tensors |= {name: self._thinned(name, units, draw) for name in names}
                    continue
                scheme = scheme_of_name(dense_name(tiles) or tiles if is_sparse_name(tiles) else tiles, scales)
                order = draw.permutation(self.tensors[names[0]].shape[1]) if config.act_order else None
                for name in names:
                    self._quantize(name, scheme, draw, order, is_sparse_name(tiles), units)

    def _keep_bands(self, names: tuple[str, ...], height: int, is_one: bool, draw: np.random.Generator) -> None:
        """Some blocks of bands of so many rows, the same of all these tensors; all rows one band if `is_one`. A band
        has none."""
        rows, columns = max(self.tensors[name].shape[0] for name in names), self.tensors[names[0]].shape[1]
        there = draw.random((1 if is_one else round_up(rows, height) // height, round_up(columns, 32) // 32)) < 0.5
        there[1:2] = False
        whole = np.repeat(there, rows if is_one else height, axis=0)
        for name in names:
            kept = np.repeat(whole[: len(self.tensors[name])], 32, axis=1)[:, :columns]
            self.tensors[name] = np.where(kept, self.tensors[name], np.uint16(0))

    def _thinned(self, name: str, units: int, draw: np.random.Generator) -> Bits:
        """Two of four, and some of the others."""
        dense = self.tensors[name]
        listed = listed_columns(dense.shape, units, draw) if units else np.zeros(dense.shape, np.bool_)
        return np.where(listed, dense, two_of_four(dense, draw))

    def _quantize(
        self,
        name: str,
        scheme: QuantizationScheme,
        draw: np.random.Generator,
        order: Order | None,
        is_sparse: bool,
        units: int = 0,
    ) -> None:
        rows, columns = self.tensors[name].shape
        drawn = drawn_rows(scheme, rows, columns, draw, 2.0 * columns**-0.5)
        values: QuantizedRows | ListedRows = two_of_four_codes(drawn, draw) if is_sparse else drawn
        if units:
            numbers = as_bf16(4.0 * columns**-0.5 * draw.standard_normal((rows, columns)))
            listed = listed_columns((rows, columns), units, draw)
            without = replace(drawn, stored_codes=np.where(listed, drawn.zero_codes, drawn.codes))
            values = ListedRows(without, np.where(listed, numbers, np.uint16(0)))
        self.quantized[name] = Matrix(values, scheme, order)
        self.tensors[name] = in_natural_order(self.quantized[name].values.dequantized(), order)

    def rows(self, name: str) -> Any:
        """What is packed: quantised rows, or bf16 bits."""
        return self.quantized.get(name, self.tensors[name])
