"""Which tensors a quantised module must have, and whether they are there: names, dtypes, shapes, groups in order.

Only what is small is read here (indices of groups, stated shapes); codes, scales and zero points are checked as they
are loaded (`cheetah.runtime.checkpoint.quantized`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from cheetah.models.config import ModelConfig
from cheetah.models.formats.quantized import MIDDLE_CODE, Order
from cheetah.models.quantization import Quantization, Storage
from cheetah.models.registry import family_of
from cheetah.plan.formats import NV_COLUMNS
from cheetah.runtime.checkpoint.marlin24 import TILE_KEPT, TILE_ROWS, Marlin24Matrix
from cheetah.runtime.checkpoint.outliers import COLUMNS, OFFSETS, VALUES, OutlierMatrix
from cheetah.runtime.checkpoint.quantized import (
    NV_CODES,
    NV_FACTOR,
    AwqMatrix,
    Float8Matrix,
    GptqMatrix,
    Mxfp4Matrix,
    Nvfp4Matrix,
    PackedMatrix,
    StoredQuantized,
    groups_of_columns,
    neighbouring_groups,
)
from cheetah.runtime.checkpoint.safetensors_files import LoadingError, StoredTensor

MATRICES: dict[str, type[StoredQuantized]] = {
    "gptq": GptqMatrix,
    "awq": AwqMatrix,
    "packed": PackedMatrix,
    "float8": Float8Matrix,
    "mxfp4": Mxfp4Matrix,
    "nvfp4": Nvfp4Matrix,
    "nvfp4-packed": Nvfp4Matrix,
    "marlin24": Marlin24Matrix,
    "outliers": OutlierMatrix,
}
"""By `Storage.layout`."""
WEIGHT_SUFFIX = ".weight"
SCALES = ("F16", "BF16", "F32")
UNUSED_SUFFIXES = (
    *(".input_scale", ".input_global_scale", ".act_scale", ".input_scale_ub", ".activation_scale_ub", ".output_scale"),
)
"""Scales of activations, which are not quantised here."""
CACHE_SUFFIXES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_output_scale")
"""Scales for a cache in 8 bits."""


@dataclass(frozen=True)
class _Part:
    """A tensor of a module. shapes: any of them; an empty one is a scalar. None: it is of any length."""

    suffix: str
    shapes: tuple[tuple[int, ...], ...] | None
    dtypes: tuple[str, ...]
    optional: bool = False


def quantized_modules(quantization: Quantization, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Storage]:
    """Of the matrices among the expected tensors those that are stored quantised, by module."""
    modules = (name.removesuffix(WEIGHT_SUFFIX) for name, shape in expected.items() if len(shape) == 2)
    found = ((module, quantization.storage_of(module)) for module in modules if not module.endswith("embed_tokens"))
    return {module: storage for module, storage in found if storage is not None}


def unused(name: str) -> bool:
    """Whether a tensor of a quantised checkpoint changes nothing here."""
    return name.endswith((*UNUSED_SUFFIXES, *CACHE_SUFFIXES))


def suffixes(storage: Storage) -> tuple[str, ...]:
    """What follows a module's name in those of its tensors."""
    return tuple(part.suffix for part in _parts(storage, (1, 1)))


def _found(module: str, storage: Storage, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The stored tensors of a module, by what follows its name."""
    return {suffix: stored[f"{module}.{suffix}"] for suffix in suffixes(storage) if f"{module}.{suffix}" in stored}


def problems_of_module(
    module: str, storage: Storage, shape: tuple[int, int], stored: Mapping[str, StoredTensor]
) -> list[str]:
    """What is wrong with the tensors of a module, a line each."""
    if problem := _indivisible(storage, shape):
        return [f"{module}: {problem}"]
    found = _found(module, storage, stored)
    lines = list(_wrong_parts(module, _parts(storage, shape), found, stored))
    return lines or [f"{module}.{suffix} {problem}" for suffix, problem in _wrong_contents(storage, shape, found)]


def open_matrix(
    module: str, storage: Storage, shape: tuple[int, int], stored: Mapping[str, StoredTensor]
) -> StoredQuantized:
    """The matrix of a module without problems."""
    return MATRICES[storage.layout](module, storage, _found(module, storage, stored), shape)


def convention_note(matrix: str, storage: Storage, zeros: StoredTensor) -> str | None:
    """A line where symmetric GPTQ weights store their zero points otherwise than their label says."""
    middle = MIDDLE_CODE[storage.scheme.kind]
    values = zeros.mapped()
    if not storage.scheme.symmetric or values.size == 0:
        return None
    found = int(values.reshape(-1)[0]) & (2 * middle - 1)
    if found + storage.zero_offset == middle or found not in (middle, middle - 1):
        return None
    label, other = ("gptq", "gptq_v2") if storage.zero_offset else ("gptq_v2", "gptq")
    return f"{matrix}: stores zero points as {other} does, though the checkpoint is labelled {label}: {other} is meant"


def _parts(storage: Storage, shape: tuple[int, int]) -> tuple[_Part, ...]:
    rows, columns = shape
    groups = storage.scheme.groups(columns)
    if storage.layout == "float8":
        return _float8_parts(storage, shape)
    if storage.layout == "mxfp4":
        halves, scales = ((rows, columns // 2),), ((rows, groups),)
        return _Part("blocks", halves, ("U8",)), _Part("scales", scales, ("U8",))
    if storage.layout in NV_CODES:
        return (
            _Part(NV_CODES[storage.layout], ((rows, columns // 2),), ("U8",)),
            _Part("weight_scale", ((rows, groups),), ("F8_E4M3",)),
            _Part(NV_FACTOR[storage.layout], ((), (1,)), ("F32",)),
        )
    per_word = 32 // int(storage.scheme.kind.removeprefix("int"))
    if storage.layout == "marlin24":
        tiles = columns // (2 * TILE_KEPT)
        return (
            _Part("weight_packed", ((tiles, rows * TILE_KEPT // per_word),), ("I32",)),
            _Part("scale_packed", ((groups, rows),), SCALES),
            _Part("meta", ((tiles, 2 * rows),), ("I16",)),
        )
    if storage.layout in ("packed", "outliers"):
        words = (rows, -(-columns // per_word))
        zeros = ((-(-rows // per_word), groups),)
        return (
            _Part("weight_packed", (words,), ("I32",)),
            _Part("weight_scale", ((rows, groups), *(((rows,),) if groups == 1 else ())), SCALES),
            _Part("weight_zero_point", zeros, ("I32",), optional=storage.scheme.symmetric),
            _Part("weight_shape", ((2,),), ("I64", "I32"), optional=True),
            *(_outlier_parts(rows) if storage.layout == "outliers" else ()),
            *((_Part("weight_g_idx", ((columns,),), ("I32",), optional=True),) if storage.layout == "packed" else ()),
        )
    along_inputs = storage.layout == "gptq"
    words = (columns // per_word, rows) if along_inputs else (columns, rows // per_word)
    return (
        _Part("qweight", (words,), ("I32",)),
        _Part("qzeros", ((groups, rows // per_word),), ("I32",)),
        _Part("scales", ((groups, rows),), SCALES),
        *((_Part("g_idx", ((columns,),), ("I32",), optional=True),) if along_inputs else ()),
    )


def _outlier_parts(rows: int) -> tuple[_Part, ...]:
    return _Part(VALUES, None, ("BF16",)), _Part(COLUMNS, None, ("I32",)), _Part(OFFSETS, ((rows + 1,),), ("I64",))


def _float8_parts(storage: Storage, shape: tuple[int, int]) -> tuple[_Part, ...]:
    rows, columns = shape
    scales: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (rows,), (rows, 1))
    if storage.block_rows is not None:
        scales = ((-(-rows // storage.block_rows), storage.scheme.groups(columns)),)
    return (
        _Part("weight", (shape,), ("F8_E4M3",)),
        _Part("weight_scale", scales, SCALES, optional=True),
        _Part("weight_scale_inv", scales, SCALES, optional=True),
    )


def _indivisible(storage: Storage, shape: tuple[int, int]) -> str | None:
    if storage.layout == "marlin24" and (shape[0] % TILE_ROWS or shape[1] % (2 * TILE_KEPT)):
        return f"{shape[0]} outputs of {shape[1]} inputs are no whole tiles of {TILE_ROWS} by {2 * TILE_KEPT}"
    if storage.layout in NV_CODES and shape[1] % NV_COLUMNS:
        return f"{shape[1]} inputs are no whole groups of {NV_COLUMNS}"
    if storage.layout not in ("gptq", "awq"):
        return None
    per_word = 32 // int(storage.scheme.kind.removeprefix("int"))
    for what, count in zip(("outputs", "inputs"), shape, strict=True):
        if count % per_word:
            return f"{count} {what} are no multiple of the {per_word} codes of a word of {storage.layout}"
    return None


def _wrong_parts(
    module: str, parts: tuple[_Part, ...], found: Mapping[str, StoredTensor], stored: Mapping[str, StoredTensor]
) -> Iterator[str]:
    for part in parts:
        name = f"{module}.{part.suffix}"
        wanted = "one dimension" if part.shapes is None else " or ".join(str(list(shape)) for shape in part.shapes)
        if part.suffix not in found:
            if not part.optional:
                plain = f"{module}{WEIGHT_SUFFIX}" in stored
                yield f"missing: {name} {wanted}" + (f": {module}.weight is there, not quantised" if plain else "")
            continue
        tensor = found[part.suffix]
        if tensor.dtype not in part.dtypes:
            yield f"{name} is {tensor.dtype}, expected {' or '.join(part.dtypes)}"
        if len(tensor.shape) != 1 if part.shapes is None else tensor.shape not in part.shapes:
            yield f"misshapen: {name} is {list(tensor.shape)}, expected {wanted}"
    scales = [suffix for suffix in ("weight_scale", "weight_scale_inv") if suffix in found]
    if "weight" in found and len(scales) != 1 and "weight_scale_2" not in found:
        yield f"{module} has {' and '.join(scales) or 'no scale'}: expected weight_scale or weight_scale_inv"
    plainly = stored.get(f"{module}{WEIGHT_SUFFIX}")
    if plainly is not None and any(suffix in found for suffix in ("weight_packed", "qweight", "blocks")):
        yield f"{module} is there twice, quantised and as {module}.weight ({plainly.dtype}): remove one"


def _wrong_contents(
    storage: Storage, shape: tuple[int, int], found: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, str]]:
    """Suffix and problem of what small tensors hold."""
    if "weight_shape" in found:
        stated = [int(value) for value in found["weight_shape"].mapped()]
        if stated != list(shape):
            yield "weight_shape", f"says {stated}, the matrix is {list(shape)}"
    if VALUES in found and found[VALUES].shape != found[COLUMNS].shape:
        yield VALUES, f"has {found[VALUES].shape[0]} numbers for {found[COLUMNS].shape[0]} columns"
    for suffix in ("g_idx", "weight_g_idx"):
        if suffix in found and (problem := _wrong_order(storage, shape[1], found[suffix])):
            yield suffix, problem


def _wrong_order(storage: Storage, columns: int, tensor: StoredTensor) -> str | None:
    """Every group has its columns, wherever they lie; -1 everywhere says that there are none (compressed-tensors)."""
    of_columns = groups_of_columns(tensor)
    groups = storage.scheme.groups(columns)
    if np.all(of_columns == -1):
        return None
    outside = (of_columns < 0) | (of_columns >= groups)
    if np.any(outside):
        column = int(np.argmax(outside))
        return f"places column {column} in group {of_columns[column]}: there are groups 0 to {groups - 1}"
    found, wanted = (np.bincount(of, minlength=groups) for of in (of_columns, neighbouring_groups(storage, columns)))
    if np.array_equal(found, wanted):
        return None
    group = int(np.argmax(found != wanted))
    return f"places {found[group]} columns in group {group}, which has {wanted[group]}: the file is damaged"


def problems_of_dtypes(config: ModelConfig, matrices: Mapping[str, StoredQuantized]) -> list[str]:
    """Modules of one matrix whose scales are of different dtypes: the matrix would keep but one."""
    lines = []
    for modules in _weights_of_several(config):
        parts = {matrices[name].scheme.scales: name for name in modules if name in matrices}
        if len(parts) > 1:
            stated = ", ".join(f"those of {name} {dtype}" for dtype, name in parts.items())
            lines.append(f"scales of one matrix are of different dtypes: {stated}: store them alike")
    return lines


def _weights_of_several(config: ModelConfig) -> Iterator[tuple[str, ...]]:
    """The weights of every matrix that several modules make."""
    for names in family_of(config).matrix_modules(config).values():
        for layer in range(config.layers) if len(names) > 1 else ():
            of_layer = [f"{name}{WEIGHT_SUFFIX}" for name in names if config.has_module(name, layer)]
            yield from zip(*(config.names_of(name, (layer,)) for name in of_layer), strict=True)


def problems_of_orders(config: ModelConfig, matrices: Mapping[str, StoredQuantized]) -> list[str]:
    """Modules of one matrix, which have one input, whose columns are ordered differently: it comes in one order.
    With experts, which have one input too, all whose columns are."""
    if config.routing is not None:
        ordered = [name for name, matrix in matrices.items() if matrix.order is not None]
        return [f"the columns of {name} are in act-order, which is not supported with experts" for name in ordered]
    lines = []
    for modules in _weights_of_several(config):
        orders = {name: matrices[name].order for name in modules if name in matrices}
        first = next(iter(orders), "")
        lines += [
            f"the columns of {name} are grouped otherwise than those of {first} (act-order): they have one input, "
            "which the kernel brings in one order: quantise them together"
            for name, order in orders.items()
            if not _same_order(order, orders[first])
        ]
    return lines


def _same_order(one: Order | None, other: Order | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)


def refuse_stated_otherwise(
    quantization: Quantization, modules: Mapping[str, Storage], stored: Mapping[str, StoredTensor], place: str
) -> None:
    """LoadingError where a module that the configuration leaves out is quantised in the file."""
    for name in stored:
        module, _, suffix = name.rpartition(".")
        if (
            suffix in ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "blocks")
            and module not in modules
        ):
            raise LoadingError(
                f"{place}: tensor {name}: {module} is quantised, but {quantization.place} ({quantization.method}) says "
                "that it is not: correct its list of ignored modules"
            )
