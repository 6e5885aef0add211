"""Which matrices of a checkpoint are kept as two of every four weights, or as those and lists: as its configuration
says, or its values.

Labels are often wrong, and most files with such weights have none: a plain copy runs everywhere. So what counts are
values. Here some rows of every weight are looked at; whoever packs a matrix sees all, and refuses it where a row that
was not looked at has more. Where lists lie, all weights are counted (`listed_formats`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from cheetah.models.config import ModelConfig
from cheetah.models.formats import dense_name, is_sparse_name, sparse_name
from cheetah.models.formats.two_of_four import GROUP, is_two_of_four
from cheetah.models.formats.two_of_four_codes import is_two_of_four_codes
from cheetah.printable import shown
from cheetah.runtime.checkpoint.listed_formats import look_thin, some_rows, thin_name, weights_of, with_outliers
from cheetah.runtime.checkpoint.masked import MaskedTensor
from cheetah.runtime.checkpoint.outliers import OutlierMatrix
from cheetah.runtime.checkpoint.safetensors_files import LoadingError
from cheetah.runtime.checkpoint.tensor_checks import CheckedTensors

AUTO, TWO_OF_FOUR, OFF = "auto", "2:4", "off"
CHOICES = (AUTO, TWO_OF_FOUR, OFF)


def with_sparse_formats(
    config: ModelConfig, tensors: CheckedTensors, wanted: str | None, place: str, notes: list[str]
) -> ModelConfig:
    """The configuration with the matrices that are kept so. wanted: "auto" for those whose values allow it, "2:4" for
    all, or LoadingError, "off" for none; None does as the configuration says, and a note says what is possible."""
    if wanted not in (None, *CHOICES):
        raise LoadingError(f"{place}: sparse={shown(wanted)}: there are {', '.join(CHOICES)}")
    config = with_outliers(config, tensors, place)
    formats = dict(config.weight_formats)
    if wanted == OFF:
        dense = {matrix: dense_name(name) if is_sparse_name(name) else name for matrix, name in formats.items()}
        return replace(config, weight_formats=tuple((matrix, name) for matrix, name in dense.items() if name))
    possible: dict[str, str] = {}
    for product in config.quantisable:
        name = formats.get(product.name)
        sparse = sparse_name(name)
        if sparse is None or sparse == name or name and is_sparse_name(name):
            continue
        denied = next((one for one in weights_of(config, product.name) if not _looks_sparse(tensors, one)), None)
        if denied is None:
            possible[product.name] = sparse
        elif wanted == TWO_OF_FOUR:
            raise LoadingError(
                f"{place}: sparse={TWO_OF_FOUR}: {denied} has three weights of some four neighbours, or more, that "
                f"are not zero: use {AUTO}, which keeps such matrices otherwise, or {OFF}"
            )
        elif name is None and (thin := thin_name(config, tensors, product.name, has_plain=wanted == AUTO)):
            formats[product.name] = thin
    notes += _notes(config, tensors, formats, possible, wanted is None, place)
    return replace(config, weight_formats=tuple({**formats, **(possible if wanted else {})}.items()))


def _notes(
    config: ModelConfig,
    tensors: CheckedTensors,
    formats: dict[str, str],
    possible: dict[str, str],
    is_free: bool,
    place: str,
) -> list[str]:
    """What is kept otherwise than it lies in the file, and, if that is_free, what might be kept otherwise."""
    matrices = {product.name: weights_of(config, product.name) for product in config.quantisable}
    plain = {name: weights for name, weights in matrices.items() if name not in formats and name not in possible}
    dense = [name for name, weights in plain.items() if all(map(partial(_is_masked, tensors), weights))]
    dense += [name for name in formats if any(map(partial(_is_masked, tensors), matrices.get(name, ())))]
    dense = [name for name in dense if not is_sparse_name(formats.get(name, ""))]
    others = [name for name in plain if is_free and name not in dense]
    thin = [name for name in others if look_thin([tensors.plain[one] for one in plain[name]])]
    notes = []
    if possible and is_free:
        notes.append(
            f"{place}: of every four neighbouring weights of {', '.join(possible)} two seem to be zero: "
            f"--sparse {AUTO} keeps the others alone, and reads fewer bytes"
        )
    if dense:
        notes.append(f"{place}: {', '.join(dense)} are sparse without a pattern, and kept as dense matrices")
    if thin:
        notes.append(
            f"{place}: many weights of {', '.join(thin)} seem to be zero: --sparse {AUTO} keeps the others in lists or "
            "blocks, where that reads fewer bytes"
        )
    return notes


def _is_masked(tensors: CheckedTensors, name: str) -> bool:
    """Whether a weight lies in the file without those that are zero, wherever they are."""
    tensor = tensors.plain.get(name)
    return isinstance(tensor, MaskedTensor) and tensor.offsets is not None


def _looks_sparse(tensors: CheckedTensors, name: str) -> bool:
    matrix = tensors.quantized.get(name)
    if isinstance(matrix, OutlierMatrix):
        return False
    if matrix is not None:
        is_plain = matrix.scheme.symmetric and matrix.order is None and matrix.shape[1] % GROUP == 0
        return is_plain and all(is_two_of_four_codes(matrix[row : row + 1]) for row in some_rows(matrix.shape[0]))
    tensor = tensors.plain[name]
    if tensor.shape[1] < GROUP:
        return False
    rows, padding = tensor.rows(), ((0, 0), (0, -tensor.shape[1] % GROUP))
    return all(is_two_of_four(np.pad(rows[row : row + 1], padding)) for row in some_rows(tensor.shape[0]))
