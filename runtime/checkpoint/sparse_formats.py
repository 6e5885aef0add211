"""Which matrices of a checkpoint are kept as two of every four weights: as its configuration says, or its values.

Labels are often wrong, and most files with such weights have none: a plain copy runs everywhere. So what counts are
values. Here some rows of every weight are looked at; whoever packs a matrix sees all, and refuses it where a row that
was not looked at has more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cheetah.models.config import ModelConfig
from cheetah.models.formats import dense_name, is_sparse_name, sparse_name
from cheetah.models.formats.two_of_four import GROUP, is_two_of_four
from cheetah.models.formats.two_of_four_codes import is_two_of_four_codes
from cheetah.models.registry import family_of
from cheetah.printable import shown
from cheetah.runtime.checkpoint.quantized_checks import WEIGHT_SUFFIX
from cheetah.runtime.checkpoint.safetensors_files import LoadingError
from cheetah.runtime.checkpoint.tensor_checks import CheckedTensors

AUTO, TWO_OF_FOUR, OFF = "auto", "2:4", "off"
CHOICES = (AUTO, TWO_OF_FOUR, OFF)
LOOKED_AT = 8
"""Rows of each weight."""


def with_sparse_formats(
    config: ModelConfig, tensors: CheckedTensors, wanted: str | None, place: str, notes: list[str]
) -> ModelConfig:
    """The configuration with the matrices that are kept so. wanted: "auto" for those whose values allow it, "2:4" for
    all, or LoadingError, "off" for none; None does as the configuration says, and a note says what is possible."""
    if wanted not in (None, *CHOICES):
        raise LoadingError(f"{place}: sparse={shown(wanted)}: there are {', '.join(CHOICES)}")
    formats = dict(config.weight_formats)
    if wanted == OFF:
        dense = {matrix: dense_name(name) if is_sparse_name(name) else name for matrix, name in formats.items()}
        return replace(config, weight_formats=tuple((matrix, name) for matrix, name in dense.items() if name))
    possible: dict[str, str] = {}
    for product in config.quantisable:
        name = formats.get(product.name)
        sparse = sparse_name(name)
        if sparse is not None and sparse != name and not (name and is_sparse_name(name)):
            denied = next((one for one in _weights(config, product.name) if not _looks_sparse(tensors, one)), None)
            if denied is not None and wanted == TWO_OF_FOUR:
                raise LoadingError(
                    f"{place}: sparse={TWO_OF_FOUR}: {denied} has three weights of some four neighbours, or more, that "
                    f"are not zero: use {AUTO}, which leaves such matrices dense, or {OFF}"
                )
            possible |= {} if denied is not None else {product.name: sparse}
    if possible and wanted is None:
        notes.append(
            f"{place}: of every four neighbouring weights of {', '.join(possible)} two seem to be zero: "
            f"--sparse {AUTO} keeps the others alone, and reads fewer bytes"
        )
    return replace(config, weight_formats=tuple({**formats, **(possible if wanted else {})}.items()))


def _weights(config: ModelConfig, matrix: str) -> Iterator[str]:
    """The weights that a matrix is made of, of all layers and experts."""
    for module in family_of(config).matrix_modules(config)[matrix]:
        yield from (f"{name}{WEIGHT_SUFFIX}" for name in config.names_of(module))


def _looks_sparse(tensors: CheckedTensors, name: str) -> bool:
    matrix = tensors.quantized.get(name)
    if matrix is not None:
        is_plain = matrix.scheme.symmetric and matrix.order is None and matrix.shape[1] % GROUP == 0
        return is_plain and all(is_two_of_four_codes(matrix[row : row + 1]) for row in _some_rows(matrix.shape[0]))
    tensor = tensors.plain[name]
    if tensor.shape[1] < GROUP:
        return False
    rows, padding = tensor.rows(), ((0, 0), (0, -tensor.shape[1] % GROUP))
    return all(is_two_of_four(np.pad(rows[row : row + 1], padding)) for row in _some_rows(tensor.shape[0]))


def _some_rows(count: int) -> list[int]:
    """Of so many rows some from all over the matrix."""
    return sorted({row * (count - 1) // (LOOKED_AT - 1) for row in range(LOOKED_AT)})
