"""Quantised matrices of a checkpoint, read in blocks of rows as `QuantizedRows`: one class a way of storing them.

Every number is checked when it is read: scales are finite and positive, zero points are what the checkpoint's
configuration says, bytes of e4m3 are numbers. Codes are expanded by the thread that asks for them; where a file has a
matrix transposed it is mapped, for then a block of rows is a few bytes of each of its pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.models.formats.quantized import (
    EIGHT_ROWS,
    MIDDLE_CODE,
    Order,
    QuantizationScheme,
    QuantizedRows,
    RowScales,
)
from cheetah.models.formats.quantized_tiles import powers_of_exponents
from cheetah.models.quantization import Storage
from cheetah.models.repacking import StoredCodes, StoredMatrix
from cheetah.models.rounding import F32
from cheetah.models.scratch import scratch
from cheetah.plan.index import round_up
from cheetah.runtime.checkpoint.packed_words import (
    AWQ_ORDER,
    Codes,
    codes_of_awq_words,
    codes_of_words,
    transposed,
    words_along_inputs,
)
from cheetah.runtime.checkpoint.safetensors_files import LoadingError, StoredRows, StoredTensor

ALIGNED_ROWS = 8
"""Outputs of a word in the formats that pack them together."""
SCALE_DTYPES = {"F16": "f16", "BF16": "bf16", "F32": "f32", "U8": "f32", "F8_E4M3": "f32"}
"""As which scales are read; those of one byte are exponents, or numbers of e4m3."""
LARGEST_FINITE = {"F16": 0x7BFF, "BF16": 0x7F7F, "F32": 0x7F7FFFFF}
"""Bits of the largest number of a dtype; those of positive ones are 1 up to it."""
NOT_A_NUMBER = 0x7F
"""e4m3 without its sign; it has no infinities."""
SIGN = 0x80
DIVISOR = "weight_global_scale"
NV_CODES = {"nvfp4": "weight", "nvfp4-packed": "weight_packed"}
NV_FACTOR = {"nvfp4": "weight_scale_2", "nvfp4-packed": DIVISOR}
"""By the layout what the tensors of NVFP4 are called."""
NO_EXPONENT = 0xFF
"""Of a scale of one byte."""
PIECE_BYTES = 2**20


class StoredQuantized(ABC):
    """A quantised matrix. tensors: its parts by what follows the module's name in theirs; shapes are checked."""

    def __init__(
        self, module: str, storage: Storage, tensors: Mapping[str, StoredTensor], shape: tuple[int, int]
    ) -> None:
        self.module, self.shape, self._storage, self._tensors = module, shape, storage, tensors
        self.scheme: QuantizationScheme = replace(storage.scheme, scales=SCALE_DTYPES[self._scale_tensor.dtype])
        self.group_columns = storage.scheme.group_columns or shape[1]
        self.order = self._read_order()

    def __getitem__(self, part: slice) -> QuantizedRows:
        """Some rows; their codes may lie in memory of this thread that is overwritten when it reads again."""
        first, stop, _ = part.indices(self.shape[0])
        begin, end = self._whole_words(first, stop)
        rows = QuantizedRows(
            self.scheme.kind,
            self._codes(begin, end),
            self._checked_scales(begin, end),
            self._zero_points(begin, end),
            self.group_columns,
            self._even_first,
            self._factors(begin, end),
        )
        if (begin, end) == (first, stop):
            return rows
        wanted = slice(first - begin, max(first, stop) - begin)
        codes = rows.words if rows.has_words else rows.stored_codes
        return replace(rows, stored_codes=codes).with_planes(lambda plane: plane[wanted])

    @property
    def stored(self) -> StoredMatrix:
        """See `cheetah.models.repacking`."""
        return StoredMatrix(self._stored_codes(), _ScaleRows(self))

    def row_scales(self, first: int, stop: int) -> RowScales:
        """Of some rows all but their codes."""
        begin, end = self._whole_words(first, stop)
        scales, points = self._checked_scales(begin, end), self._zero_points(begin, end)
        rows = RowScales(self.scheme.kind, scales, points, self.group_columns, self._factors(begin, end))
        return rows.with_planes(lambda plane: plane[first - begin : max(first, stop) - begin])

    def _whole_words(self, first: int, stop: int) -> tuple[int, int]:
        """The rows [begin, end) that have these, and fill words."""
        return first // ALIGNED_ROWS * ALIGNED_ROWS, min(round_up(stop, ALIGNED_ROWS), self.shape[0])

    _even_first = False
    """Of words: see `QuantizedRows`."""

    @abstractmethod
    def _stored_codes(self) -> StoredCodes:
        """Where the file has each code."""

    def _read_order(self) -> Order | None:
        """The columns that its own are of the module, where groups are of columns that do not lie side by side."""
        return None

    @property
    @abstractmethod
    def _scale_tensor(self) -> StoredTensor: ...

    @abstractmethod
    def _codes(self, first: int, stop: int) -> NDArray[Any]:
        """As `QuantizedRows.stored_codes`."""

    @abstractmethod
    def _scales(self, first: int, stop: int) -> NDArray[Any]:
        """[rows, groups] in bits of the stored dtype: uint16, float16 or float32."""

    def _zero_points(self, first: int, stop: int) -> Codes | None:
        """uint8 [rows, groups]; None where they are all the middle code."""
        return None

    def _factors(self, first: int, stop: int) -> F32 | None:
        """float32 [rows, 1], what all scales of a row are multiplied by; None: nothing."""
        return None

    def _checked_scales(self, first: int, stop: int) -> NDArray[Any]:
        scales = np.ascontiguousarray(self._scales(first, stop))
        bits = scales.view(f"u{scales.itemsize}")
        less_one = bits - bits.dtype.type(1)  # of zero it is the largest number of all
        largest = LARGEST_FINITE[self._scale_tensor.dtype]
        if less_one.size and less_one.max() >= largest:
            row, group = np.argwhere(less_one >= bits.dtype.type(largest))[0]
            raise self._error(
                self._scale_tensor,
                f"the scale of row {first + row}, group {group} is {self._as_floats(scales)[row, group]}: scales must "
                "be positive and finite: the file is damaged, or was not written by the tool it names",
            )
        return self._as_floats(scales)

    def _as_floats(self, scales: NDArray[Any]) -> NDArray[Any]:
        return scales.view(ml_dtypes.bfloat16) if self._scale_tensor.dtype == "BF16" else scales

    def _error(self, tensor: StoredTensor, problem: str) -> LoadingError:
        names = {id(one): suffix for suffix, one in self._tensors.items()}
        return LoadingError(f"{tensor.file}: tensor {self.module}.{names[id(tensor)]}: {problem}")


class _OfInteger(StoredQuantized):
    """What matrices of whole numbers have in common: a tensor of zero points that a symmetric one need not have."""

    zero_suffix: str
    index_suffix = ""

    def _read_order(self) -> Order | None:
        if self.index_suffix not in self._tensors:
            return None
        return order_of_groups(self._tensors[self.index_suffix], self._storage, self.shape[1])

    def _column_offsets(self, of_columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of the module's columns, as the matrix has them."""
        return of_columns if self.order is None else of_columns[self.order]

    def _in_order(self, codes: Codes) -> Codes:
        """Codes [rows, columns] of the module as the matrix has them."""
        if self.order is None:
            return codes
        # mode: all are in range, which numpy else looks at; a third faster.
        return np.take(codes, self.order, axis=1, mode="clip", out=scratch("codes in order", codes.shape, np.uint8))

    def _zero_points(self, first: int, stop: int) -> Codes | None:
        if self.zero_suffix not in self._tensors:
            return None
        stored = self._stored_zero_points(first, stop)
        if self.scheme.symmetric:
            self._check_symmetric(stored, first)
            return None
        mask = (1 << self._bits) - 1
        return np.ascontiguousarray(stored + np.uint8(self._storage.zero_offset) & np.uint8(mask))

    @property
    def _bits(self) -> int:
        return int(self.scheme.kind.removeprefix("int"))

    @abstractmethod
    def _stored_zero_points(self, first: int, stop: int) -> Codes:
        """uint8 [rows, groups] as they are stored."""

    def _check_symmetric(self, stored: Codes, first: int) -> None:
        """All the middle code, as it is or less one: which of the two the label says is often wrong, and no matter."""
        middle = MIDDLE_CODE[self.scheme.kind]
        if len(stored) and not (np.all(stored == middle) or np.all(stored == middle - 1)):
            usual = middle if stored.flat[0] == middle else middle - 1
            row, group = np.argwhere(stored != usual)[0]
            raise self._error(
                self._tensors[self.zero_suffix],
                f"the zero point of row {first + row}, group {group} is stored as {stored[row, group]}; symmetric "
                f"weights have {middle - 1} everywhere (GPTQ's first format) or {middle}: if they are not symmetric, "
                "say so in the quantization_config",
            )


class _Transposed(_OfInteger):
    """Scales [groups, rows] and zero points in words along the rows, as GPTQ and AWQ have them."""

    zero_suffix = "qzeros"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._words, self._all_scales, self._zeros = (
            self._tensors[suffix].mapped() for suffix in ("qweight", "scales", "qzeros")
        )

    @property
    def _scale_tensor(self) -> StoredTensor:
        return self._tensors["scales"]

    def _scales(self, first: int, stop: int) -> NDArray[Any]:
        return self._all_scales[:, first:stop].T

    def _among_one_another(self, of_rows: NDArray[np.int64], of_columns: NDArray[np.int64]) -> StoredCodes:
        """Where codes of `qweight` are."""
        tensor = self._tensors["qweight"]
        return StoredCodes(self._bits, tensor.nbytes, of_rows, of_columns, None, lambda: tensor.stored_rows().read)

    def _packed_rows(self, first: int, stop: int) -> slice:
        """Of words along the rows those of some whole ones."""
        per_word = 32 // self._bits
        return slice(first // per_word, stop // per_word)


class GptqMatrix(_Transposed):
    """qweight int32 [columns / 8, rows]; zero points of rows 8c .. 8c+7 in word c (AutoGPTQ, qlinear_cuda_old.py)."""

    index_suffix = "g_idx"

    def _stored_codes(self) -> StoredCodes:
        rows, columns = self.shape
        per_word = 32 // self._bits
        word, place = np.divmod(np.arange(columns), per_word)
        of_columns = self._column_offsets(word * (rows * per_word) + place)
        return self._among_one_another(np.arange(rows) * per_word, of_columns)

    def _codes(self, first: int, stop: int) -> NDArray[Any]:
        words = self._words[:, first:stop]
        if self._bits == 4 and self.order is None:
            return words.view(EIGHT_ROWS).T
        turned = transposed(words, scratch("turned words of gptq", words.shape[::-1], np.uint32))
        return self._in_order(codes_of_words(turned, self._bits))

    def _stored_zero_points(self, first: int, stop: int) -> Codes:
        return codes_of_words(self._zeros[:, self._packed_rows(first, stop)], self._bits).T


class AwqMatrix(_Transposed):
    """qweight int32 [columns, rows / 8] and zero points in AWQ's order of nibbles (AutoAWQ, WQLinear_GEMM)."""

    _even_first = True

    def _stored_codes(self) -> StoredCodes:
        rows, columns = self.shape
        word, output = np.divmod(np.arange(rows), 8)
        return self._among_one_another(word * 8 + np.argsort(AWQ_ORDER)[output], np.arange(columns) * rows)

    def _codes(self, first: int, stop: int) -> NDArray[Any]:
        return words_along_inputs(self._words[:, self._packed_rows(first, stop)])

    def _stored_zero_points(self, first: int, stop: int) -> Codes:
        return codes_of_awq_words(self._zeros[:, self._packed_rows(first, stop)]).T


class PackedMatrix(_OfInteger):
    """weight_packed int32 [rows, columns / 8]; zero points [rows / 8, groups], packed along the rows
    (compressed_tensors/compressors/pack_quantized)."""

    zero_suffix = "weight_zero_point"
    index_suffix = "weight_g_idx"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._words = self._tensors["weight_packed"].stored_rows()
        self._all_scales = self._scale_tensor.mapped().reshape(self.shape[0], -1)
        self._zeros = self._tensors[self.zero_suffix].mapped() if self.zero_suffix in self._tensors else None

    @property
    def _scale_tensor(self) -> StoredTensor:
        return self._tensors["weight_scale"]

    def _stored_codes(self) -> StoredCodes:
        rows, columns = self.shape
        tensor, read = self._words.tensor, self._words.read
        row_bytes = 4 * tensor.shape[1]
        of_columns = self._column_offsets(np.arange(columns))
        of_rows = np.arange(rows) * (row_bytes * 8 // self._bits)
        return StoredCodes(self._bits, tensor.nbytes, of_rows, of_columns, row_bytes, lambda: read)

    def _codes(self, first: int, stop: int) -> NDArray[Any]:
        words = self._words[first:stop]
        if self._bits == 4 and self.shape[1] % 8 == 0 and self.order is None:
            return words
        return self._in_order(codes_of_words(words, self._bits)[:, : self.shape[1]])

    def _scales(self, first: int, stop: int) -> NDArray[Any]:
        return self._all_scales[first:stop]

    def _stored_zero_points(self, first: int, stop: int) -> Codes:
        assert self._zeros is not None
        per_word = 32 // self._bits
        words = self._zeros[first // per_word : -(-stop // per_word)]
        return codes_of_words(transposed(words), self._bits).T[: stop - first]


class Float8Matrix(StoredQuantized):
    """weight e4m3 [rows, columns], times a scale of the tensor, the row or the block."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._bytes = self._tensors["weight"].stored_rows()
        self._all_scales = self._scale_tensor.mapped()

    @property
    def _scale_tensor(self) -> StoredTensor:
        return next(self._tensors[suffix] for suffix in ("weight_scale", "weight_scale_inv") if suffix in self._tensors)

    def _stored_codes(self) -> StoredCodes:
        rows, columns = self.shape
        offsets = np.arange(rows) * columns, np.arange(columns)
        return StoredCodes(8, rows * columns, *offsets, columns, lambda: self._read_numbers)

    def _read_numbers(self, begin: int, memory: Codes) -> None:
        self._bytes.read(begin, memory)
        self._check_numbers(memory, begin)

    def _codes(self, first: int, stop: int) -> Codes:
        codes: Codes = self._bytes[first:stop]
        self._check_numbers(codes.reshape(-1), first * self.shape[1])
        return codes

    def _check_numbers(self, codes: Codes, begin: int) -> None:
        """Of codes from number `begin` of the matrix on."""
        if _are_numbers(codes):
            return
        place = int(np.argmax(codes & NOT_A_NUMBER == NOT_A_NUMBER))
        row, column = divmod(begin + place, self.shape[1])
        raise self._error(
            self._tensors["weight"],
            f"row {row}, column {column} is 0x{codes[place]:02x}, which is not a number in e4m3: "
            "the file is damaged, or its weights overflowed when they were quantised",
        )

    def _scales(self, first: int, stop: int) -> NDArray[Any]:
        stored = self._all_scales
        if self._storage.block_rows is not None:
            return stored[np.arange(first, stop) // self._storage.block_rows]
        if stored.size == 1:
            return np.full((stop - first, 1), stored.reshape(-1)[0], stored.dtype)
        return stored.reshape(-1, 1)[first:stop]


class _PairsOfCodes(StoredQuantized):
    """Codes u8 [rows, columns / 2], the even column of two in the lower four bits; scales [rows, groups]."""

    _stored: StoredRows
    _all_scales: NDArray[Any]

    def _stored_codes(self) -> StoredCodes:
        rows, columns = self.shape
        read, offsets = self._stored.read, (np.arange(rows) * columns, np.arange(columns))
        return StoredCodes(4, rows * columns // 2, *offsets, columns // 2, lambda: read)

    def _codes(self, first: int, stop: int) -> NDArray[Any]:
        return self._stored[first:stop].view(np.uint32)

    def _scales(self, first: int, stop: int) -> NDArray[Any]:
        return self._all_scales[first:stop]


class Mxfp4Matrix(_PairsOfCodes):
    """blocks u8 [rows, columns / 2], the even column of two in the lower four bits; scales u8 [rows, groups], the
    exponents of powers of two as floats have them (openai/gpt-oss, gpt_oss/torch/weights.py)."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stored = self._tensors["blocks"].stored_rows()
        self._all_scales = self._scale_tensor.mapped()

    @property
    def _scale_tensor(self) -> StoredTensor:
        return self._tensors["scales"]

    def _checked_scales(self, first: int, stop: int) -> NDArray[Any]:
        exponents = np.ascontiguousarray(self._scales(first, stop))
        if exponents.size and exponents.max() == NO_EXPONENT:
            row, group = np.argwhere(exponents == NO_EXPONENT)[0]
            raise self._error(
                self._scale_tensor,
                f"the scale of row {first + row}, group {group} is byte {NO_EXPONENT}, which is no number: the file is "
                "damaged",
            )
        return powers_of_exponents(exponents)


class Nvfp4Matrix(_PairsOfCodes):
    """weight u8 [rows, columns / 2], the even column of two in the lower four bits; weight_scale e4m3 [rows, groups]; a
    factor of the tensor: weight_scale_2, which scales are multiplied by (ModelOpt, qtensor/nvfp4_tensor.py), or
    weight_global_scale, which they are divided by, beside weight_packed (compressed_tensors, nvfp4_quantized.py)."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stored = self._tensors[NV_CODES[self._storage.layout]].stored_rows()
        self._all_scales = self._scale_tensor.mapped()
        self._factor = self._checked_factor()

    @property
    def _scale_tensor(self) -> StoredTensor:
        return self._tensors["weight_scale"]

    def _checked_scales(self, first: int, stop: int) -> NDArray[Any]:
        stored = np.ascontiguousarray(self._scales(first, stop))
        numbers = stored.view(ml_dtypes.float8_e4m3fn)
        if stored.size and (stored - np.uint8(1)).max() >= NOT_A_NUMBER - 1:  # of zero it is the largest byte of all
            row, group = np.argwhere(stored - np.uint8(1) >= NOT_A_NUMBER - 1)[0]
            raise self._error(
                self._scale_tensor,
                f"the scale of row {first + row}, group {group} is {numbers[row, group]}: scales must be positive and "
                "finite: the file is damaged, or was not written by the tool it names",
            )
        return np.asarray(numbers, np.float32)

    def _factors(self, first: int, stop: int) -> F32:
        return np.full((stop - first, 1), self._factor, np.float32)

    def _checked_factor(self) -> np.float32:
        suffix = NV_FACTOR[self._storage.layout]
        stored = self._tensors[suffix].mapped().reshape(-1)[0]
        with np.errstate(all="ignore"):
            factor = np.float32(1) / stored if suffix == DIVISOR else stored
        if not (np.isfinite(stored) and np.isfinite(factor) and factor > 0):
            raise self._error(self._tensors[suffix], f"it is {stored}: it must be positive and finite")
        return np.float32(factor)


@dataclass(frozen=True)
class _ScaleRows:
    """The rows of a matrix without their codes."""

    matrix: StoredQuantized

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    def __getitem__(self, part: slice) -> RowScales:
        first, stop, _ = part.indices(self.shape[0])
        return self.matrix.row_scales(first, stop)


def order_of_groups(indices: StoredTensor, storage: Storage, columns: int) -> Order | None:
    """The columns of a module group by group, by the group that each is in; None where they lie so already, or where
    all indices are -1, which says that there are none (compressed-tensors)."""
    of_columns = groups_of_columns(indices)
    if np.all(of_columns == -1) or np.array_equal(of_columns, neighbouring_groups(storage, columns)):
        return None
    return np.argsort(of_columns, kind="stable")


def groups_of_columns(indices: StoredTensor) -> Order:
    """The group of every column, as a file says it."""
    return indices.mapped().view(np.int32).astype(np.int64)


def neighbouring_groups(storage: Storage, columns: int) -> Order:
    """The group of every column where groups are of neighbours."""
    return np.arange(columns) // (storage.scheme.group_columns or columns)


def _are_numbers(codes: Codes) -> bool:
    """Whether no byte of e4m3 is NaN: the largest byte of all with a sign, and without."""
    pieces = (codes[first : first + PIECE_BYTES] for first in range(0, codes.size, PIECE_BYTES))
    return all(piece.max() < NOT_A_NUMBER | SIGN and piece.view(np.int8).max() < NOT_A_NUMBER for piece in pieces)
