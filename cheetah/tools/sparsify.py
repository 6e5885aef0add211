"""Writing a copy of a checkpoint in which many weights are zero: what `cheetah sparsify` does.

Of each four neighbours of a row the two of least magnitude are left out, or of each row a part, or of
every four blocks some, without any data;
embedding, norms, biases, routers of experts and lm_head are copied byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.config import ModelConfig
from cheetah.models.formats.two_of_four import GROUP
from cheetah.models.quantization.compressed_tensors import TWO_OF_FOUR_MASK
from cheetah.models.registry import family_of
from cheetah.models.rounding import widen
from cheetah.runtime.checkpoint.masked import KEPT, MASK, OFFSETS, SHAPE
from cheetah.runtime.checkpoint.safetensors_files import StoredTensor, find_tensors
from cheetah.runtime.checkpoint.tensor_checks import without_merged
from cheetah.tools.rewriting import WEIGHT, Entry, Rewriting, layer_matrices, original
from cheetah.tools.sparse_patterns import TWO_OF_FOUR, Pattern, pattern_of

PLAIN, BITMASK = "plain", "bitmask"
LAYOUTS = (PLAIN, BITMASK)
BLOCK_ROWS = 256
"""Rows that a thread works on at a time."""


@dataclass(frozen=True)
class SparseCopy(Rewriting):
    """A checkpoint to write. matrices: the weights that become sparse, each with its shape. layout: "plain", zeros and
    all, or "bitmask", as compressed-tensors has them (sparse-24-bitmask, sparse-bitmask)."""

    source: Path
    config: ModelConfig
    layout: str
    pattern: Pattern
    matrices: Mapping[str, tuple[int, int]]

    @property
    def has_offsets(self) -> bool:
        """Whether rows keep numbers of their own."""
        return self.pattern.layout != TWO_OF_FOUR_MASK

    def is_rewritten(self, name: str) -> bool:
        return name in self.matrices

    def entries(self, name: str, tensor: StoredTensor) -> Iterator[Entry]:
        if self.layout == PLAIN:
            yield Entry(name, tensor.dtype, tensor.shape, tensor.nbytes)
            return
        (rows, columns), module = self.matrices[name], name.removesuffix(WEIGHT)
        bytes_of_row, kept = -(-columns // 8), int(self.pattern.kept_of_rows(name, (rows, columns)).sum())
        shape = (kept,) if self.has_offsets else (rows, kept // rows)
        yield Entry(f"{module}{KEPT}", tensor.dtype, shape, tensor.nbytes // (rows * columns) * kept)
        yield Entry(f"{module}{MASK}", "U8", (rows, bytes_of_row), rows * bytes_of_row)
        yield Entry(f"{module}{SHAPE}", "I64", (2, 1), 16)
        if self.has_offsets:
            yield Entry(f"{module}{OFFSETS}", "I64", (rows,), 8 * rows)

    def values(self, name: str, tensor: StoredTensor, pool: ThreadPoolExecutor) -> Iterator[NDArray[Any]]:
        rows, shape = tensor.stored_rows(), self.matrices[name]

        def block(first: int) -> tuple[NDArray[Any], ...]:
            stored = rows[first : first + BLOCK_ROWS]
            values = widen(stored)
            if not np.isfinite(values).all():
                row = first + int(np.argwhere(~np.isfinite(values))[0][0])
                raise CheetahError(f"{tensor.file}: tensor {name}, row {row}: only numbers can be compared")
            kept = self.pattern.kept(name, first, values)
            if self.layout == PLAIN:
                return (np.where(kept, stored, stored.dtype.type(0)),)
            return stored[kept], np.packbits(kept, axis=1, bitorder="little")

        blocks = list(pool.map(block, range(0, tensor.shape[0], BLOCK_ROWS)))
        yield from (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        if self.layout == BITMASK:
            yield np.array(shape, np.int64)
            if self.has_offsets:
                yield np.append(0, np.cumsum(self.pattern.kept_of_rows(name, shape))[:-1])

    def fields(self) -> dict[str, Any]:
        if self.layout == PLAIN:
            return {}
        routers = [f"re:.*{name}$" for name in family_of(self.config).never_quantised(self.config)]
        sparsity = {
            "format": self.pattern.layout,
            "sparsity_structure": self.pattern.structure,
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
    checkpoint = original(model, revision)
    if checkpoint.config.delta_layers:
        raise CheetahError(f"{checkpoint.folder}: beside Gated DeltaNet kernels have no sparse weights")
    matrices = layer_matrices(checkpoint.config)
    assert checkpoint.folder is not None
    stored = without_merged(checkpoint.config, find_tensors(checkpoint.folder).tensors, str(checkpoint.folder))
    found = pattern_of(pattern, checkpoint, stored)
    for name, (_, columns) in matrices.items():
        if columns % GROUP and found.structure == TWO_OF_FOUR:
            raise CheetahError(f"{name}: {columns} columns are no groups of {GROUP}")
    return SparseCopy(checkpoint.folder, checkpoint.config, layout, found, matrices)
