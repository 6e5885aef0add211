"""Writing a copy of a checkpoint in which two of every four weights are zero: what `cheetah sparsify` does.

Of each four neighbours of a row the two of least magnitude are left out, without any data; embedding, norms, biases,
routers of experts and lm_head are copied byte for byte.
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
from cheetah.models.registry import family_of
from cheetah.models.rounding import F32, widen
from cheetah.runtime.checkpoint.masked import KEPT, MASK, SHAPE
from cheetah.runtime.checkpoint.safetensors_files import StoredTensor
from cheetah.tools.rewriting import WEIGHT, Entry, Rewriting, layer_matrices, original

PATTERNS = ("2:4",)
PLAIN, BITMASK = "plain", "bitmask"
LAYOUTS = (PLAIN, BITMASK)
BLOCK_ROWS = 256
"""Rows that a thread works on at a time."""
KEPT_OF_GROUP = 2


@dataclass(frozen=True)
class SparseCopy(Rewriting):
    """A checkpoint to write. matrices: the weights that become sparse, each with its shape. layout: "plain", zeros and
    all, or "bitmask", as compressed-tensors has them (sparse-24-bitmask)."""

    source: Path
    config: ModelConfig
    layout: str
    matrices: Mapping[str, tuple[int, int]]

    def is_rewritten(self, name: str) -> bool:
        return name in self.matrices

    def entries(self, name: str, tensor: StoredTensor) -> Iterator[Entry]:
        if self.layout == PLAIN:
            yield Entry(name, tensor.dtype, tensor.shape, tensor.nbytes)
            return
        (rows, columns), module = self.matrices[name], name.removesuffix(WEIGHT)
        bytes_of_row, kept = -(-columns // 8), columns * KEPT_OF_GROUP // GROUP
        yield Entry(f"{module}{KEPT}", tensor.dtype, (rows, kept), tensor.nbytes * KEPT_OF_GROUP // GROUP)
        yield Entry(f"{module}{MASK}", "U8", (rows, bytes_of_row), rows * bytes_of_row)
        yield Entry(f"{module}{SHAPE}", "I64", (2, 1), 16)

    def values(self, name: str, tensor: StoredTensor, pool: ThreadPoolExecutor) -> Iterator[NDArray[Any]]:
        rows = tensor.stored_rows()

        def block(first: int) -> tuple[NDArray[Any], ...]:
            stored = rows[first : first + BLOCK_ROWS]
            values = widen(stored)
            if not np.isfinite(values).all():
                row = first + int(np.argwhere(~np.isfinite(values))[0][0])
                raise CheetahError(f"{tensor.file}: tensor {name}, row {row}: only numbers can be compared")
            kept = largest_of_four(values)
            if self.layout == PLAIN:
                return (np.where(kept, stored, stored.dtype.type(0)),)
            return stored[kept], np.packbits(kept, axis=1, bitorder="little")

        blocks = list(pool.map(block, range(0, tensor.shape[0], BLOCK_ROWS)))
        yield from (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        if self.layout == BITMASK:
            yield np.array(self.matrices[name], np.int64)

    def fields(self) -> dict[str, Any]:
        if self.layout == PLAIN:
            return {}
        routers = [f"re:.*{name}$" for name in family_of(self.config).routers(self.config)]
        sparsity = {
            "format": "sparse-24-bitmask",
            "sparsity_structure": "2:4",
            "targets": ["Linear"],
            "ignore": ["lm_head", *routers],
        }
        stated = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
        return {"quantization_config": {**stated, "sparsity_config": sparsity}}


def sparse_copy(model: str, pattern: str, layout: str, revision: str | None = None) -> SparseCopy:
    """What is to be done for a model; CheetahError if there is no such pattern or layout, its weights are quantised, or
    have columns that are no groups of four."""
    for what, value, choices in (("pattern", pattern, PATTERNS), ("layout", layout, LAYOUTS)):
        if value not in choices:
            raise CheetahError(f"--{what} {value}: there are {', '.join(choices)}")
    checkpoint = original(model, revision)
    matrices = layer_matrices(checkpoint.config)
    for name, (_, columns) in matrices.items():
        if columns % GROUP:
            raise CheetahError(f"{name}: {columns} columns are no groups of {GROUP}")
    assert checkpoint.folder is not None
    return SparseCopy(checkpoint.folder, checkpoint.config, layout, matrices)


def largest_of_four(values: F32) -> NDArray[np.bool_]:
    """Of every four neighbours of a row the two of largest magnitude, of equal ones the first."""
    fours = np.abs(values).reshape(len(values), -1, GROUP)
    ahead = np.zeros(fours.shape, np.uint8)  # of each, how many of its four are larger
    for one, other in combinations(range(GROUP), 2):
        is_first = fours[..., one] >= fours[..., other]
        ahead[..., other] += is_first
        ahead[..., one] += ~is_first
    return (ahead < KEPT_OF_GROUP).reshape(values.shape)
