"""Writing a copy of a checkpoint in which many weights are zero: what `cheetah sparsify` does.

Of each four neighbours of a row the two of least magnitude are left out, or of each row a part, without any data;
embedding, norms, biases, routers of experts and lm_head are copied byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.config import ModelConfig
from cheetah.models.formats.two_of_four import GROUP
from cheetah.models.quantization.compressed_tensors import ANY_MASK, TWO_OF_FOUR_MASK
from cheetah.models.registry import family_of
from cheetah.models.rounding import F32, widen
from cheetah.runtime.checkpoint.masked import KEPT, MASK, OFFSETS, SHAPE
from cheetah.runtime.checkpoint.safetensors_files import StoredTensor
from cheetah.tools.rewriting import WEIGHT, Entry, Rewriting, layer_matrices, original

TWO_OF_FOUR = "2:4"
PLAIN, BITMASK = "plain", "bitmask"
LAYOUTS = (PLAIN, BITMASK)
BLOCK_ROWS = 256
"""Rows that a thread works on at a time."""
KEPT_OF_GROUP = 2


@dataclass(frozen=True)
class SparseCopy(Rewriting):
    """A checkpoint to write. matrices: the weights that become sparse, each with its shape. part: of each row's weights
    that is kept; None: two of every four. layout: "plain", zeros and all, or "bitmask", as compressed-tensors has them
    (sparse-24-bitmask, sparse-bitmask)."""

    source: Path
    config: ModelConfig
    layout: str
    part: float | None
    matrices: Mapping[str, tuple[int, int]]

    def is_rewritten(self, name: str) -> bool:
        return name in self.matrices

    def entries(self, name: str, tensor: StoredTensor) -> Iterator[Entry]:
        if self.layout == PLAIN:
            yield Entry(name, tensor.dtype, tensor.shape, tensor.nbytes)
            return
        (rows, columns), module = self.matrices[name], name.removesuffix(WEIGHT)
        bytes_of_row, kept = -(-columns // 8), self._kept_of_row(columns)
        shape = (rows, kept) if self.part is None else (rows * kept,)
        yield Entry(f"{module}{KEPT}", tensor.dtype, shape, tensor.nbytes // columns * kept)
        yield Entry(f"{module}{MASK}", "U8", (rows, bytes_of_row), rows * bytes_of_row)
        yield Entry(f"{module}{SHAPE}", "I64", (2, 1), 16)
        if self.part is not None:
            yield Entry(f"{module}{OFFSETS}", "I64", (rows,), 8 * rows)

    def _kept_of_row(self, columns: int) -> int:
        return columns * KEPT_OF_GROUP // GROUP if self.part is None else round(columns * self.part)

    def values(self, name: str, tensor: StoredTensor, pool: ThreadPoolExecutor) -> Iterator[NDArray[Any]]:
        rows, (count, columns) = tensor.stored_rows(), self.matrices[name]

        def block(first: int) -> tuple[NDArray[Any], ...]:
            stored = rows[first : first + BLOCK_ROWS]
            values = widen(stored)
            if not np.isfinite(values).all():
                row = first + int(np.argwhere(~np.isfinite(values))[0][0])
                raise CheetahError(f"{tensor.file}: tensor {name}, row {row}: only numbers can be compared")
            kept = largest_of_four(values) if self.part is None else largest_of_row(values, self._kept_of_row(columns))
            if self.layout == PLAIN:
                return (np.where(kept, stored, stored.dtype.type(0)),)
            return stored[kept], np.packbits(kept, axis=1, bitorder="little")

        blocks = list(pool.map(block, range(0, tensor.shape[0], BLOCK_ROWS)))
        yield from (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        if self.layout == BITMASK:
            yield np.array(self.matrices[name], np.int64)
            if self.part is not None:
                yield np.arange(count) * self._kept_of_row(columns)

    def fields(self) -> dict[str, Any]:
        if self.layout == PLAIN:
            return {}
        routers = [f"re:.*{name}$" for name in family_of(self.config).routers(self.config)]
        sparsity = {
            "format": TWO_OF_FOUR_MASK if self.part is None else ANY_MASK,
            "sparsity_structure": TWO_OF_FOUR if self.part is None else "unstructured",
            "targets": ["Linear"],
            "ignore": ["lm_head", *routers],
        }
        stated = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
        return {"quantization_config": {**stated, "sparsity_config": sparsity}}


def sparse_copy(model: str, pattern: str, layout: str, revision: str | None = None) -> SparseCopy:
    """What is to be done for a model; CheetahError if there is no such pattern or layout, its weights are quantised, or
    have columns that are no groups of four."""
    if layout not in LAYOUTS:
        raise CheetahError(f"--layout {layout}: there are {', '.join(LAYOUTS)}")
    part = None if pattern == TWO_OF_FOUR else _part(pattern)
    checkpoint = original(model, revision)
    matrices = layer_matrices(checkpoint.config)
    for name, (_, columns) in matrices.items():
        if columns % GROUP and part is None:
            raise CheetahError(f"{name}: {columns} columns are no groups of {GROUP}")
    assert checkpoint.folder is not None
    return SparseCopy(checkpoint.folder, checkpoint.config, layout, part, matrices)


def _part(pattern: str) -> float:
    """Of a pattern that is a number, the part of the weights that is kept."""
    try:
        part = float(pattern)
    except ValueError:
        part = 0.0
    if not 0 < part < 1:
        raise CheetahError(
            f"--pattern {pattern}: there are {TWO_OF_FOUR}, and parts of each row that are kept, like 0.5"
        )
    return part


def largest_of_row(values: F32, count: int) -> NDArray[np.bool_]:
    """Of every row so many weights of largest magnitude, of equal ones the first."""
    kept = np.zeros(values.shape, np.bool_)
    order = np.argsort(-np.abs(values), axis=1, kind="stable")
    np.put_along_axis(kept, order[:, :count], True, axis=1)
    return kept


def largest_of_four(values: F32) -> NDArray[np.bool_]:
    """Of every four neighbours of a row the two of largest magnitude, of equal ones the first."""
    fours = np.abs(values).reshape(len(values), -1, GROUP)
    ahead = np.zeros(fours.shape, np.uint8)  # of each, how many of its four are larger
    for one, other in combinations(range(GROUP), 2):
        is_first = fours[..., one] >= fours[..., other]
        ahead[..., other] += is_first
        ahead[..., one] += ~is_first
    return (ahead < KEPT_OF_GROUP).reshape(values.shape)
