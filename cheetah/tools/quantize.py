"""Writing a quantised copy of a checkpoint, as compressed-tensors lays it out: what `cheetah quantize` does.

Every matrix of the layers is rounded to the nearest codes, in blocks of rows by several threads; embedding, norms,
biases, routers of experts, the numbers of heads of Gated DeltaNet and lm_head are copied byte for byte. Experts that
lie in one tensor are written one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.config import ModelConfig
from cheetah.models.formats.nearest import nearest_rows
from cheetah.models.formats.outliers import outlier_count, outliers_of
from cheetah.models.formats.quantized import OF_E2M1, QuantizationError, QuantizationScheme, QuantizedRows
from cheetah.models.quantization.compressed_tensors import FLOAT, OUTLIERS, PACKED
from cheetah.models.registry import family_of
from cheetah.models.rounding import Bits, as_bf16, widen
from cheetah.plan.formats import GROUP_COLUMNS, can_be_listed, tile_format
from cheetah.runtime.checkpoint.outliers import COLUMNS, OFFSETS, VALUES
from cheetah.runtime.checkpoint.packed_words import transposed, words_of_codes
from cheetah.runtime.checkpoint.safetensors_files import StoredTensor
from cheetah.tools.rewriting import WEIGHT, Entry, Rewriting, layer_matrices, original

BLOCK_ROWS = 256
"""Rows that a thread rounds at a time: a multiple of the rows of an fp8 block."""
SCALES = "bf16"
MOST_OUTLIERS = 0.05
"""Of all weights: with more the codes are not what is read."""


@dataclass(frozen=True)
class Job(Rewriting):
    """A checkpoint to write. matrices: the weights that are quantised, each with its shape. outliers: the part of them
    that is kept as it is, beside the codes, in a layout of our own."""

    source: Path
    config: ModelConfig
    scheme: QuantizationScheme
    clip: bool
    matrices: Mapping[str, tuple[int, int]]
    outliers: float = 0.0

    @property
    def block_rows(self) -> int | None:
        """Rows that share a scale."""
        return self.scheme.group_columns if self.scheme.kind == "fp8" else None

    def is_rewritten(self, name: str) -> bool:
        return name in self.matrices

    def entries(self, name: str, tensor: StoredTensor) -> Iterator[Entry]:
        rows, columns = self.matrices[name]
        module, groups = name.removesuffix(WEIGHT), self.scheme.groups(columns)
        if self.scheme.kind == "fp8":
            scale_rows = rows if self.block_rows is None else -(-rows // self.block_rows)
            yield Entry(f"{module}.weight", "F8_E4M3", (rows, columns), rows * columns)
            yield Entry(f"{module}.weight_scale", "BF16", (scale_rows, groups), scale_rows * groups * 2)
            return
        per_word = 32 // int(self.scheme.kind.removeprefix("int"))
        words, packed_rows = -(-columns // per_word), -(-rows // per_word)
        yield Entry(f"{module}.weight_packed", "I32", (rows, words), rows * words * 4)
        yield Entry(f"{module}.weight_scale", "BF16", (rows, groups), rows * groups * 2)
        if not self.scheme.symmetric:
            yield Entry(f"{module}.weight_zero_point", "I32", (packed_rows, groups), packed_rows * groups * 4)
        yield Entry(f"{module}.weight_shape", "I64", (2,), 16)
        if self.outliers:
            count = outlier_count(rows, columns, self.outliers)
            yield Entry(f"{module}.{VALUES}", "BF16", (count,), 2 * count)
            yield Entry(f"{module}.{COLUMNS}", "I32", (count,), 4 * count)
            yield Entry(f"{module}.{OFFSETS}", "I64", (rows + 1,), 8 * (rows + 1))

    def values(self, name: str, tensor: StoredTensor, pool: ThreadPoolExecutor) -> Iterator[NDArray[Any]]:
        quantized, outliers = _quantized(self, name, tensor, pool)
        if self.scheme.kind == "fp8":
            yield quantized.codes
            yield quantized.scales[:: self.block_rows or 1].view(np.uint16)
            return
        bits = int(self.scheme.kind.removeprefix("int"))
        yield words_of_codes(quantized.codes, bits)
        yield quantized.scales.view(np.uint16)
        if quantized.zero_points is not None:
            yield transposed(words_of_codes(np.ascontiguousarray(quantized.zero_points.T), bits))
        yield np.array(self.matrices[name], np.int64)
        if outliers is not None:
            yield outliers.numbers
            yield np.nonzero(outliers.chosen)[1].astype(np.int32)
            yield np.append(0, np.cumsum(outliers.chosen.sum(axis=1, dtype=np.int64)))

    def fields(self) -> dict[str, Any]:
        return {"quantization_config": quantization_config(self)}


def quantization_job(
    model: str, scheme: QuantizationScheme, clip: bool, revision: str | None = None, outliers: float = 0.0
) -> Job:
    """What is to be done for a model; CheetahError if its weights are quantised, or do not fit the scheme.

    outliers: the part of the weights that is kept as it is."""
    checkpoint = original(model, revision)
    if not 0 <= outliers <= MOST_OUTLIERS:
        raise CheetahError(f"outliers: {outliers:.3%} of the weights: give at most {MOST_OUTLIERS:.0%}")
    if outliers and not can_be_listed(tile_format(scheme.name)):
        raise CheetahError(f"outliers lie beside int4 and int8, not beside {scheme.name}")
    if outliers and checkpoint.config.routing is not None:
        raise CheetahError(f"{model}: outliers of experts are not supported")
    if scheme.kind in OF_E2M1:
        raise CheetahError(f"{scheme.kind} is read, not written: give another format")
    tile_format(scheme.name)  # PlanError if the kernel does not have it
    matrices = layer_matrices(checkpoint.config)
    for name, (_, columns) in matrices.items():
        _check_columns(name, columns, scheme)
    assert checkpoint.folder is not None
    return Job(checkpoint.folder, checkpoint.config, scheme, clip, matrices, outliers)


def quantization_config(job: Job) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors; of outliers the format is our own, which others refuse by name
    and do not read without them."""
    scheme, is_float = job.scheme, job.scheme.kind == "fp8"
    strategy = "channel" if scheme.group_columns is None else "block" if is_float else "group"
    weights = {
        "num_bits": 4 if scheme.kind == "int4" else 8,
        "type": "float" if is_float else "int",
        "symmetric": scheme.symmetric,
        "strategy": strategy,
        "group_size": scheme.group_columns if strategy == "group" else None,
        "block_structure": [job.block_rows, scheme.group_columns] if strategy == "block" else None,
        "dynamic": False,
        "actorder": None,
        "observer": "mse" if job.clip else "minmax",
    }
    family = family_of(job.config)
    left_out = [f".*{re.escape(name)}$" for name in family.never_quantised(job.config)]
    left_out += [f"{re.escape(prefix)}.*" for prefix in family.unread]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": FLOAT if is_float else OUTLIERS if job.outliers else PACKED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(f"re:{one}" for one in left_out)],
        "kv_cache_scheme": None,
    }


def _check_columns(name: str, columns: int, scheme: QuantizationScheme) -> None:
    """Blocks of fp8 may end with the matrix, groups may not: so say the tools that read them."""
    if scheme.kind != "fp8" and scheme.group_columns is not None and columns % scheme.group_columns:
        fitting = [str(size) for size in GROUP_COLUMNS if columns % size == 0]
        other = f"groups of {' or '.join(fitting)}, or " if fitting else ""
        whole = scheme.kind if scheme.symmetric else f"{scheme.kind}-asym"
        raise CheetahError(
            f"{name}: {columns} columns are no whole groups of {scheme.group_columns}: use {other}{whole}"
        )


@dataclass(frozen=True)
class _Outliers:
    """Weights that are kept as they are: bool [rows, columns], and their bf16 bits, row by row."""

    chosen: NDArray[np.bool_]
    numbers: Bits


def _quantized(
    job: Job, name: str, tensor: StoredTensor, pool: ThreadPoolExecutor
) -> tuple[QuantizedRows, _Outliers | None]:
    """A whole matrix, rounded by all threads."""
    rows = tensor.stored_rows()

    def round_block(first: int) -> tuple[QuantizedRows, _Outliers | None]:
        values, outliers = widen(rows[first : first + BLOCK_ROWS]), None
        if job.outliers:
            chosen = outliers_of(values, job.outliers, first)
            outliers = _Outliers(chosen, as_bf16(values[chosen]))
            values = np.where(chosen, np.float32(0), values)
        try:
            return nearest_rows(values, job.scheme, clip=job.clip, block_rows=job.block_rows), outliers
        except QuantizationError as problem:
            raise CheetahError(f"{tensor.file}: tensor {name}, rows from {first} on: {problem}") from problem

    blocks, of_blocks = zip(*pool.map(round_block, range(0, tensor.shape[0], BLOCK_ROWS)), strict=True)
    planes = zip(*((block.codes, block.scales, block.zero_points) for block in blocks), strict=True)
    codes, scales, points = planes
    zero_points = None if job.scheme.symmetric else np.concatenate([one for one in points if one is not None])
    group_columns = blocks[0].group_columns
    made = QuantizedRows(job.scheme.kind, np.concatenate(codes), np.concatenate(scales), zero_points, group_columns)
    found = [one for one in of_blocks if one is not None]
    if not found:
        return made, None
    return made, _Outliers(
        *(np.concatenate(parts) for parts in zip(*((one.chosen, one.numbers) for one in found), strict=True))
    )
