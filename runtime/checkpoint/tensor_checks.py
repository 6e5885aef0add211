"""Whether the tensors of a checkpoint are those of its configuration: names, shapes, dtypes, and what may be ignored.

Where configuration and tensors disagree, the checkpoint is refused with both sides' numbers; nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cheetah.models.config import ModelConfig
from cheetah.models.quantization import Quantization, Storage
from cheetah.models.registry import family_of
from cheetah.printable import shown_name
from cheetah.runtime.checkpoint.masked import with_masked
from cheetah.runtime.checkpoint.outliers import COLUMNS, OFFSETS, VALUES
from cheetah.runtime.checkpoint.quantized import StoredQuantized
from cheetah.runtime.checkpoint.quantized_checks import (
    WEIGHT_SUFFIX,
    convention_note,
    open_matrix,
    problems_of_dtypes,
    problems_of_module,
    problems_of_orders,
    quantized_modules,
    refuse_stated_otherwise,
    suffixes,
    unused,
)
from cheetah.runtime.checkpoint.safetensors_files import WEIGHT_DTYPES, LoadingError, StoredTensor

IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # a constant that old checkpoints store
QUANTISED_SUFFIXES = (
    *(".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_scale", ".weight_scale_inv"),
    *(
        ".scale_packed",
        ".meta",
        ".weight_shape",
        ".weight_zero_point",
        ".weight_g_idx",
        *(f".{suffix}" for suffix in (VALUES, COLUMNS, OFFSETS)),
        ".input_scale",
        ".act_scale",
        ".k_scale",
        ".v_scale",
    ),
    *(".kv_scale", ".output_scale", ".absmax", ".quant_map", ".SCB", ".blocks"),
)
SHOWN_LINES = 6
COMPARED_ROWS = 4096


@dataclass(frozen=True)
class CheckedTensors:
    """The tensors of `tensor_shapes(config)`, by name: those stored as they are, and the quantised matrices."""

    plain: Mapping[str, StoredTensor]
    quantized: Mapping[str, StoredQuantized]


def checked_tensors(
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    place: str,
    notes: list[str],
    quantization: Quantization | None = None,
) -> CheckedTensors:
    """The tensors of `tensor_shapes(config)`, each present with its shape; LoadingError lists what is wrong."""
    family = family_of(config)
    shapes = family.tensor_shapes(config)
    stored = without_merged(config, with_masked(_read(config, stored, notes), place), place)
    modules = quantized_modules(quantization, shapes) if quantization else {}
    if quantization is None:
        _refuse_quantised(stored, place)
    else:
        refuse_stated_otherwise(quantization, modules, stored, place)
    _check_layer_count(config, stored, place)
    if family.head_tensor.removesuffix(WEIGHT_SUFFIX) not in modules:
        _check_head(config, stored, place)
    expected = {name: shape for name, shape in shapes.items() if name.removesuffix(WEIGHT_SUFFIX) not in modules}
    others = _not_quantized(modules, stored) if quantization else dict(stored)
    matrices, problems = _quantized(modules, shapes, stored)
    problems += [
        *problems_of_dtypes(config, matrices),
        *problems_of_orders(config, matrices),
        *_missing(expected, others),
        *_misshapen(family.shape_meaning, expected, others),
        *_mistyped(expected, others),
        *_unknown(config, expected, others, notes),
    ]
    if problems:
        method = f" ({quantization.method})" if quantization else ""
        lines = _lines(problems)
        raise LoadingError(f"{place}: the tensors are not those that config.json describes{method}:\n{lines}")
    notes += _convention_notes(modules, stored)
    return CheckedTensors({name: stored[name] for name in expected}, matrices)


def _read(config: ModelConfig, stored: Mapping[str, StoredTensor], notes: list[str]) -> Mapping[str, StoredTensor]:
    """The tensors without those that nobody reads here, whatever is wrong with them."""
    read = {name: tensor for name, tensor in stored.items() if not name.startswith(family_of(config).unread)}
    if len(read) < len(stored):
        prefixes = " and ".join(prefix.rstrip(".") for prefix in family_of(config).unread)
        notes.append(f"{len(stored) - len(read)} tensors of {prefixes} are not read, but by what drafts")
    return read


def without_merged(config: ModelConfig, stored: Mapping[str, StoredTensor], place: str) -> Mapping[str, StoredTensor]:
    """The tensors with those that lie one behind the other in a merged one in its place, each where it lies."""
    tensors = dict(stored)
    for name, merged in family_of(config).merged_tensors(config).items():
        if name not in stored or [name] == [*merged.parts]:
            continue
        whole = tensors.pop(name)
        if whole.shape != merged.shape:
            raise LoadingError(f"{place}: misshapen: {name} is {list(whole.shape)}, expected {list(merged.shape)}")
        if twice := next((part for part in merged.parts if part in stored), None):
            raise LoadingError(f"{place}: {twice} stands by itself and in {name}")
        skip = 0
        for part, shape in merged.parts.items():
            tensors[part] = replace(whole.part(skip, shape), is_transposed=merged.is_transposed)
            skip += math.prod(shape)
    return tensors


def _not_quantized(modules: Mapping[str, Storage], stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors that belong to no quantised module, without scales that nobody uses."""
    taken = {f"{module}.{suffix}" for module, storage in modules.items() for suffix in suffixes(storage)}
    return {name: tensor for name, tensor in stored.items() if name not in taken and not unused(name)}


def _quantized(
    modules: Mapping[str, Storage], shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredQuantized], list[str]]:
    """The quantised matrices by their weights' names, and what is wrong with them."""
    matrices: dict[str, StoredQuantized] = {}
    problems: list[str] = []
    for module, storage in modules.items():
        rows, columns = shapes[f"{module}{WEIGHT_SUFFIX}"]
        found = problems_of_module(module, storage, (rows, columns), stored)
        if not found:
            matrices[f"{module}{WEIGHT_SUFFIX}"] = open_matrix(module, storage, (rows, columns), stored)
        problems += found
    return matrices, problems


def _convention_notes(modules: Mapping[str, Storage], stored: Mapping[str, StoredTensor]) -> list[str]:
    """A line if the first module stores its zero points otherwise than their label says."""
    module, storage = next(iter(modules.items()), ("", None))
    if storage is None or storage.layout != "gptq":
        return []
    note = convention_note(module, storage, stored[f"{module}.qzeros"])
    return [note] if note else []


def _refuse_quantised(stored: Mapping[str, StoredTensor], place: str) -> None:
    for name, tensor in stored.items():
        quantised = name.endswith(QUANTISED_SUFFIXES)
        if quantised or (tensor.dtype not in WEIGHT_DTYPES and not name.endswith(IGNORED_SUFFIX)):
            what = "is part of a quantised weight" if quantised else "is not a plain weight"
            described = f"tensor {shown_name(name)} ({tensor.dtype} {list(tensor.shape)})"
            raise LoadingError(
                f"{place}: {described} {what}, though config.json names no quantisation: its quantization_config is "
                "missing, or use the unquantised checkpoint"
            )


def _check_layer_count(config: ModelConfig, stored: Mapping[str, StoredTensor], place: str) -> None:
    layer_of = family_of(config).layer_of
    count = max((layer for name in stored if (layer := layer_of(name)) is not None), default=-1) + 1
    if count != config.layers:
        raise LoadingError(
            f"{place}: the tensors have {count} layers, config.json says num_hidden_layers = {config.layers}"
        )


def _check_head(config: ModelConfig, stored: Mapping[str, StoredTensor], place: str) -> None:
    embedding, head = family_of(config).embedding_tensor, family_of(config).head_tensor
    if embedding not in stored:
        return
    if not config.tied_embeddings and head not in stored:
        raise LoadingError(
            f"{place}: {head} is missing and tie_word_embeddings is false: if the head is the embedding, set it to "
            "true in config.json, or open with tie_word_embeddings=True"
        )
    if config.tied_embeddings and head in stored and not _same_bits(stored[head], stored[embedding]):
        raise LoadingError(
            f"{place}: tie_word_embeddings is true, but {head} differs from {embedding}: if the head is its own "
            "matrix, set it to false in config.json, or open with tie_word_embeddings=False"
        )


def _missing(expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor]) -> list[str]:
    return [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in stored]


def _misshapen(
    meaning: Callable[[str], str], expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor]
) -> list[str]:
    return [
        f"misshapen: {name} is {list(stored[name].shape)}, expected {list(shape)} = {meaning(name)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]


def _mistyped(expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor]) -> list[str]:
    return [
        f"{name} is {stored[name].dtype}, expected {' or '.join(WEIGHT_DTYPES)}"
        for name in expected
        if name in stored and stored[name].dtype not in WEIGHT_DTYPES
    ]


def _unknown(
    config: ModelConfig,
    expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
    notes: list[str],
) -> list[str]:
    """Tensors that the configuration does not have. Biases of zeros change nothing and are dropped with a note."""
    extra = [name for name in stored if name not in expected and not name.endswith(IGNORED_SUFFIX)]
    if config.tied_embeddings and family_of(config).head_tensor in extra:
        extra.remove(family_of(config).head_tensor)
    biases = [name for name in extra if name.endswith(".bias") and stored[name].dtype in WEIGHT_DTYPES]
    zeros = {name for name in biases if not np.any(stored[name].bf16_bits() & 0x7FFF)}
    if zeros:
        notes.append(f"{len(zeros)} biases are all zero and are left out")
    others = [shown_name(name) for name in biases if name not in zeros]
    problems = [f"a bias that is not zero, which is not supported: {name}" for name in others]
    unknown = [name for name in extra if name not in biases]
    return problems + [f"extra: {shown_name(name)} {list(stored[name].shape)}" for name in unknown]


def _same_bits(first: StoredTensor, second: StoredTensor) -> bool:
    if first.shape != second.shape:
        return False
    a, b = first.bf16_bits(), second.bf16_bits()
    starts = range(0, len(a), COMPARED_ROWS)
    return all(np.array_equal(a[at : at + COMPARED_ROWS], b[at : at + COMPARED_ROWS]) for at in starts)


def _lines(problems: Iterable[str]) -> str:
    lines = list(problems)
    shown = [f"  {line}" for line in lines[:SHOWN_LINES]]
    left = len(lines) - len(shown)
    return "\n".join([*shown, f"  and {left} more"] if left else shown)
