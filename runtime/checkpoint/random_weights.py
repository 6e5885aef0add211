"""Random weights of any shape in seconds: for timing, and for tests of shapes whose weights nobody wants to fetch.

Every tensor is a window into one endless repetition of a block of normal numbers, beginning where the tensor's name
says, so its values depend on (configuration, seed, name) alone. Matrices are scaled by 1/sqrt(inputs), which keeps
activations near 1 through any number of layers; norm weights lie near 1, biases around 0, and heads of Gated DeltaNet
forget at all rates. Quantised matrices are such
numbers rounded to codes, with scales that differ a little from group to group, and zero points from the middle code.
In formats with two of four columns the other two are zero, which they are is drawn; of blocks the same are there in all
rows. Lists are full: beside two of four some fours have all their columns, beside codes every row has as many numbers
as any other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, TypeVar, cast
from zlib import crc32

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cheetah.models.config import ModelConfig
from cheetah.models.family import MatrixRows, QuantizedMatrix
from cheetah.models.formats import dense_name, is_sparse_name
from cheetah.models.formats.lists import NUMBERS_OF_UNIT, ListedRows
from cheetah.models.formats.quantized import (
    E2M1,
    LARGEST_CODE,
    MIDDLE_CODE,
    OF_E2M1,
    SCALE_DTYPES,
    Order,
    QuantizationScheme,
    QuantizedRows,
    in_natural_order,
    scheme_of_name,
)
from cheetah.models.formats.two_of_four import GROUP
from cheetah.models.formats.two_of_four_codes import zero_code
from cheetah.models.registry import family_of
from cheetah.models.rounding import Bits, Bytes, round_to_e4m3
from cheetah.plan.formats import (
    BF16,
    BLOCKS_OF_TILE,
    LISTED_TILES,
    PARTS_OF_MATRIX,
    PLUS,
    QUANTIZED_FORMATS,
    SPARSE_QUANTIZED_FORMATS,
    TWO_OF_FOUR,
    BlockRows,
    BlockTiles,
    TileFormat,
    tile_format,
)

_Element = TypeVar("_Element", bound=np.generic)

# Primes, so that no two rows of a matrix are the same: row lengths would have to divide them.
LARGE_BLOCK = 2**24 - 3
SMALL_BLOCK = 2**20 - 3
NORM_SPREAD = 0.1
BIAS_SPREAD = 0.5
BIAS_SUFFIX = ".bias"
RATES_SUFFIX, LOGARITHMS_OF_RATES = ".A_log", (-6.0, 2.0)
"""How fast heads of Gated DeltaNet forget: from nearly nothing of the token before to nearly all."""
WEIGHT_SUFFIX = ".weight"
SCALE_SPREAD = 0.1
CODE_RANGES = {"int4": 2.7, "int8": 4.5, "fp8": 7.0, "mxfp4": 2.7, "nvfp4": 2.7}
"""Standard deviations that the largest code stands for; what is farther out takes the largest code."""
LARGEST_CODES = {"int4": 7.5, "int8": 127.5, "fp8": 448.0, "mxfp4": 6.0, "nvfp4": 6.0}
ZERO_POINT_SPREAD = 2
BLOCK_ROWS = 128
BAND_ROWS, BAND_SPREAD = 128, 0.25
"""Rows that have the same blocks: a head's, or of gate and up those of 16 M-tiles. How much more likely a block is to
be there in one band than in another."""


def random_tensors(config: ModelConfig, seed: int = 0) -> RandomTensors:
    """A function from a tensor's name to its values, which also reads matrices in parts."""
    return RandomTensors(config, seed)


class RandomTensors:
    """The tensors of a configuration; the block is drawn when the first is asked for. Called with a tensor's name:
    its values, bf16 bits as uint16 in the tensor's shape."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self._shapes = family_of(config).tensor_shapes(config)
        self._size = LARGE_BLOCK if config.parameter_count > LARGE_BLOCK else SMALL_BLOCK
        self._seed = seed
        self._scaled: dict[int, Bits] = {}
        self._codes: dict[str, Bytes] = {}
        self._schemes = _schemes(config)
        formats = _weights_in(config, lambda format: True)
        self._sparse = {name for name, format in formats.items() if is_sparse_name(format)}
        self._tiles = {name: tile_format(format) for name, format in formats.items()}
        self._inputs = _inputs(config) if config.act_order else {}

    @cached_property
    def _normal(self) -> npt.NDArray[np.float32]:
        return np.random.default_rng(self._seed).standard_normal(self._size, dtype=np.float32)

    @cached_property
    def _kept(self) -> npt.NDArray[np.uint64]:
        """What leaves two of four bf16 numbers of a word."""
        pairs = list(combinations(range(GROUP), 2))
        masks = np.array([sum(0xFFFF << 16 * column for column in pair) for pair in pairs], np.uint64)
        return masks[np.random.default_rng(self._seed + 1).integers(0, len(pairs), SMALL_BLOCK)]

    def __call__(self, name: str) -> npt.NDArray[Any]:
        if name in self._schemes:
            matrix = self.quantized(name)
            return in_natural_order(matrix[:].dequantized(), matrix.order)
        if name in self._sparse:
            return cast(Bits, self.rows(name)[:])
        shape, begin = self._shapes[name], self._begin(name)
        if len(shape) == 1:
            normal = _window(self._normal, begin, shape[0])
            if name.endswith(RATES_SUFFIX):
                return _bits(np.linspace(*LOGARITHMS_OF_RATES, shape[0], dtype=np.float32))
            is_bias = name.endswith(BIAS_SUFFIX)
            return _bits(np.float32(BIAS_SPREAD) * normal if is_bias else 1 + np.float32(NORM_SPREAD) * normal)
        return _window(self._block(math.prod(shape[1:])), begin, math.prod(shape)).reshape(shape)

    def rows(self, name: str) -> MatrixRows | QuantizedMatrix:
        """The matrix `name`, of which nothing is made but what is read."""
        if name in self._schemes:
            return self.quantized(name)
        rows, columns = self._shapes[name]
        if name in self._sparse:
            return self.sparse_matrix_of(name, (rows, columns), self._tiles[name])
        return _RepeatedRows(self._block(columns), self._begin(name), (rows, columns))

    def sparse_matrix_of(self, name: str, shape: tuple[int, ...], tiles: TileFormat = TWO_OF_FOUR) -> MatrixRows:
        """A matrix of any shape with two of four columns, and more in lists, or with some of four blocks, the same for
        the same name."""
        dense = _RepeatedRows(self._block(shape[1]), self._begin(name), (shape[0], shape[1]))
        if isinstance(tiles, BlockTiles):
            return _RowsOfBlocks(dense, tiles.kept)
        if isinstance(tiles, BlockRows):
            return _RowsOfSomeBlocks(dense, _some_blocks(dense.shape, tiles, self._seed))
        return _SparseRows(dense, self._kept_rows(name, shape), whole=tiles.list_units)

    def _kept_rows(self, name: str, shape: tuple[int, ...]) -> _RepeatedRows:
        groups = -(-shape[1] // GROUP)
        return _RepeatedRows(self._kept, self._begin(f"{name}.places") % len(self._kept), (shape[0], groups))

    def quantized(self, name: str) -> QuantizedMatrix:
        """The quantised matrix `name`."""
        rows, columns = self._shapes[name]
        order = self._order(name, columns) if self._inputs else None
        tiles, is_sparse = self._tiles[name], name in self._sparse
        return self.matrix_of(name, self._schemes[name], (rows, columns), order, is_sparse=is_sparse, tiles=tiles)

    def matrix_of(
        self,
        name: str,
        scheme: QuantizationScheme,
        shape: tuple[int, int],
        order: Order | None = None,
        *,
        is_sparse: bool = False,
        tiles: TileFormat | None = None,
    ) -> QuantizedMatrix:
        """A quantised matrix of any shape and scheme, with two of four columns if is_sparse, the same for the same
        name. tiles: with the lists of this format, if it has some."""
        dense = _RepeatedRows(self._code_block(scheme.kind), self._begin(name), shape)
        kept = self._kept_rows(name, shape)
        codes = _SparseRows(dense, kept, zero=zero_code(scheme.kind)) if is_sparse else dense
        quantized = _RandomQuantized(codes, scheme, self._begin(f"{name}.scales"), order)
        if tiles is None or not tiles.list_units:
            return quantized
        numbers = _RepeatedRows(self._block(shape[1]), self._begin(f"{name}.listed"), shape)
        return _RandomListed(quantized, numbers, tiles)

    def _order(self, name: str, columns: int) -> Order:
        """Of the columns of a module: the same for all that have the same input."""
        return np.random.default_rng(self._begin(self._inputs[name])).permutation(columns)

    def _code_block(self, kind: str) -> Bytes:
        if kind not in self._codes:
            self._codes[kind] = _rounded(self._normal, kind)
        return self._codes[kind]

    def _begin(self, name: str) -> int:
        return crc32(name.encode()) % self._size

    def _block(self, inputs: int) -> Bits:
        if inputs not in self._scaled:
            self._scaled[inputs] = _bits(self._normal * np.float32(inputs**-0.5))
        return self._scaled[inputs]


@dataclass(frozen=True)
class _RepeatedRows:
    """Rows of the matrix that the endless repetition of `block` gives from `begin` on."""

    block: npt.NDArray[Any]
    begin: int
    shape: tuple[int, int]

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        first, stop, _ = part.indices(self.shape[0])
        pieces = [self.block[:0].reshape(0, self.shape[1])]
        while first < stop:
            start = (self.begin + first * self.shape[1]) % len(self.block)
            count = max(1, min(stop - first, (len(self.block) - start) // self.shape[1]))
            rows = _window(self.block, start, count * self.shape[1])  # copied only where one row meets the block's end
            pieces.append(rows.reshape(count, self.shape[1]))
            first += count
        return pieces[-1] if len(pieces) <= 2 else np.concatenate(pieces)


@dataclass(frozen=True)
class _Thinned(ABC):
    """Rows of `dense` of which some numbers are there; the others are `zero`."""

    dense: _RepeatedRows
    zero: int = field(default=0, kw_only=True)

    @property
    def shape(self) -> tuple[int, int]:
        return self.dense.shape

    def __getitem__(self, part: slice) -> npt.NDArray[Any]:
        dense = self.dense[part]
        return np.where(self._kept(part), dense, dense.dtype.type(self.zero))

    @abstractmethod
    def _kept(self, part: slice) -> npt.NDArray[np.bool_]:
        """Which are there, of some rows or of each."""


@dataclass(frozen=True)
class _SparseRows(_Thinned):
    """Rows of `dense` of which each word of `kept` leaves two of four columns; the others are `zero`. whole: so many
    fours of a chunk beside a list have all their columns."""

    kept: _RepeatedRows
    whole: int = 0

    def _kept(self, part: slice) -> npt.NDArray[np.bool_]:
        is_kept: npt.NDArray[np.bool_] = np.ascontiguousarray(self.kept[part]).view(np.uint16)[:, : self.shape[1]] != 0
        if self.whole:
            fours = -(-self.shape[1] // GROUP)
            are_whole = _spread(part, self.shape[0], fours, LISTED_TILES * TWO_OF_FOUR.columns // GROUP, self.whole)
            is_kept = is_kept | np.repeat(are_whole, GROUP, axis=1)[:, : self.shape[1]]
        return is_kept


@dataclass(frozen=True)
class _RowsOfSomeBlocks(_Thinned):
    """Rows of `dense` in bands, in each of which the blocks are there that `there` says: bool [bands, blocks]."""

    there: npt.NDArray[np.bool_]

    def _kept(self, part: slice) -> npt.NDArray[np.bool_]:
        first, stop, _ = part.indices(self.shape[0])
        bands = np.arange(first, stop) // BAND_ROWS
        return np.repeat(self.there[bands], BF16.columns, axis=1)[:, : self.shape[1]]


def _some_blocks(shape: tuple[int, int], tiles: BlockRows, seed: int) -> npt.NDArray[np.bool_]:
    """Which blocks bands of rows have, as many as the format has room for and in some bands more than in others. The
    same for all matrices of a shape, so that gate's and up's rows of an M-tile have the same."""
    draw = np.random.default_rng((seed, *shape))
    bands, blocks = -(-shape[0] // BAND_ROWS), -(-shape[1] // BF16.columns)
    sizes = draw.random((bands, blocks)) + BAND_SPREAD * draw.random((bands, 1))
    count = bands * blocks * tiles.part // PARTS_OF_MATRIX
    least = np.partition(sizes.ravel(), -count)[-count] if count else np.inf
    return sizes >= least


@dataclass(frozen=True)
class _RowsOfBlocks(_Thinned):
    """Rows of `dense` of which `kept` of every four blocks of 32 columns are there, the same ones in all rows."""

    kept: int

    def _kept(self, part: slice) -> npt.NDArray[np.bool_]:
        block = np.arange(self.shape[1]) // BF16.columns
        window, number = np.divmod(block, BLOCKS_OF_TILE)
        return (number + window) % BLOCKS_OF_TILE < self.kept


@dataclass(frozen=True)
class _RandomQuantized:
    """`QuantizedMatrix` of random codes; scales and zero points of a row come from its number and `seed`."""

    codes: _RepeatedRows | _SparseRows
    scheme: QuantizationScheme
    seed: int
    order: Order | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    def __getitem__(self, part: slice) -> QuantizedRows:
        first, stop, _ = part.indices(self.shape[0])
        columns = self.shape[1]
        numbers = _scattered(np.arange(first, stop) // self._scale_rows, self.scheme.groups(columns), self.seed)
        step = CODE_RANGES[self.scheme.kind] / LARGEST_CODES[self.scheme.kind] * columns**-0.5
        scales = (step * (1 + SCALE_SPREAD * (2 * numbers - 1))).astype(SCALE_DTYPES[self.scheme.scales])
        if self.scheme.kind == "mxfp4":  # the step's power of two, or, rarely, the next one
            scales = np.exp2(np.floor(np.log2(step)) + (numbers > 1 - SCALE_SPREAD)).astype(np.float32)
        factors = None
        if self.scheme.kind == "nvfp4":
            factors = np.full((len(scales), 1), step, np.float32)
            scales = round_to_e4m3(scales / factors)
        points = None
        if not self.scheme.symmetric:
            middle = MIDDLE_CODE[self.scheme.kind] - ZERO_POINT_SPREAD
            points = (middle + numbers * (2 * ZERO_POINT_SPREAD + 1)).astype(np.uint8)
        return QuantizedRows(
            *(self.scheme.kind, self.codes[first:stop], scales, points, self.scheme.group_columns or columns),
            factors=factors,
        )

    @property
    def _scale_rows(self) -> int:
        """Rows that share their scales."""
        return BLOCK_ROWS if self.scheme.kind == "fp8" and self.scheme.group_columns is not None else 1


@dataclass(frozen=True)
class _RandomListed:
    """Codes, and numbers of which each row has as many in every chunk as a list has room for."""

    codes: _RandomQuantized
    numbers: _RepeatedRows
    tiles: TileFormat

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def scheme(self) -> QuantizationScheme:
        return self.codes.scheme

    @property
    def order(self) -> Order | None:
        return self.codes.order

    def __getitem__(self, part: slice) -> ListedRows:
        columns, count = LISTED_TILES * self.tiles.columns, self.tiles.list_units * NUMBERS_OF_UNIT // 2
        are_listed = _spread(part, self.shape[0], self.shape[1], columns, count)
        rows = self.codes[part]
        zeros = rows.zero_codes
        codes = np.where(are_listed, zeros, rows.stored_codes)
        return ListedRows(replace(rows, stored_codes=codes), np.where(are_listed, self.numbers[part], np.uint16(0)))


def _spread(part: slice, rows: int, columns: int, window: int, count: int) -> npt.NDArray[np.bool_]:
    """Some of `rows` rows in which `count` of every `window` columns are marked, evenly, from row to row others."""
    first, stop, _ = part.indices(rows)
    begins = np.arange(first, stop)[:, None] * 0.618033988749895 % 1
    marked = (np.arange(count) + begins) * (window / count)
    of_window = np.zeros((stop - first, window), np.bool_)
    np.put_along_axis(of_window, marked.astype(np.int64), True, axis=1)
    return np.tile(of_window, -(-columns // window))[:, :columns]


def random_scheme(format: str) -> QuantizationScheme:
    """The scheme of a format of that name; scales of numbers with exponents are float32, those of whole
    numbers float16."""
    tiles = tile_format(format).parts[0] if PLUS in format else format
    name = dense_name(tiles) if is_sparse_name(tiles) else tiles
    assert name is not None, format
    return scheme_of_name(name, "f32" if name.startswith("fp8") else "f16")


def _schemes(config: ModelConfig) -> dict[str, QuantizationScheme]:
    """Of the quantised matrices, by the weight's name."""
    formats = {**QUANTIZED_FORMATS, **SPARSE_QUANTIZED_FORMATS}
    return {name: random_scheme(format) for name, format in _weights_in(config, formats.__contains__).items()}


def _weights_in(config: ModelConfig, is_wanted: Callable[[str], bool]) -> dict[str, str]:
    """The weights of matrices that are in some formats, each with its format."""
    formats = dict(config.weight_formats)
    return {
        f"{name}{WEIGHT_SUFFIX}": formats[matrix]
        for matrix, modules in family_of(config).matrix_modules(config).items()
        if matrix in formats and is_wanted(tile_format(formats[matrix]).parts[0])
        for module in modules
        for name in config.names_of(module)
    }


def _inputs(config: ModelConfig) -> dict[str, str]:
    """A name for what each weight is multiplied with, which modules of one matrix share."""
    return {
        f"{module.format(layer=layer)}{WEIGHT_SUFFIX}": f"input of {matrix} {layer}"
        for matrix, modules in family_of(config).matrix_modules(config).items()
        for module in modules
        for layer in range(config.layers)
    }


def _rounded(normal: npt.NDArray[np.float32], kind: str) -> Bytes:
    """Normal numbers as codes."""
    scaled = normal * np.float32(LARGEST_CODES[kind] / CODE_RANGES[kind])
    codes: Bytes
    if kind in OF_E2M1:
        between = (E2M1[1:8] + E2M1[:7]) / 2
        codes = np.searchsorted(between, np.abs(scaled)).astype(np.uint8) | (scaled < 0).astype(np.uint8) << np.uint8(3)
    elif kind == "fp8":
        codes = round_to_e4m3(scaled).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    else:
        codes = np.clip(np.rint(scaled) + MIDDLE_CODE[kind], 0, LARGEST_CODE[kind]).astype(np.uint8)
    return codes


def _scattered(rows: npt.NDArray[np.int64], groups: int, seed: int) -> npt.NDArray[np.float64]:
    """Numbers from 0 to below 1 [rows, groups], each from its place alone: multiples of an irrational number."""
    return (rows[:, None] * 0.7548776662466927 + np.arange(groups) * 0.5698402909980532 + seed * 0.618033988749895) % 1


def _bits(values: npt.NDArray[np.float32]) -> Bits:
    return np.asarray(values.astype(ml_dtypes.bfloat16)).view(np.uint16)


def _window(block: npt.NDArray[_Element], begin: int, count: int) -> npt.NDArray[_Element]:
    """`count` elements of the endless repetition of `block`, from `begin` on."""
    if begin + count <= len(block):
        return block[begin : begin + count]
    window = np.empty(count, dtype=block.dtype)
    done = 0
    while done < count:
        part = block[(begin + done) % len(block) :][: count - done]
        window[done : done + len(part)] = part
        done += len(part)
    return window
