"""What drafts for a model by its hidden states, an EAGLE-3 head, a drafter of blocks, or the layer that lies beside the
model for that: opened, and refused by name where it is another model's.

What lies in both is read once: embedding and head that it has not itself are the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cheetah.models.block import DSPARK
from cheetah.models.config import ModelConfig
from cheetah.models.config_json import load_source
from cheetah.models.drafter import BESIDE, KNOWN_TOKENS, OFFSETS, TOKEN_IDS, UNREAD, VERIFIER, plain_name, token_ids
from cheetah.models.family import MatrixRows, QuantizedMatrix
from cheetah.models.formats.nearest import nearest_rows
from cheetah.models.formats.quantized import QuantizationScheme, QuantizedRows, in_natural_order, scheme_of_name
from cheetah.models.quantization import Quantization, Storage
from cheetah.models.registry import (
    drafter_beside,
    drafter_quantised,
    family_of,
    read_drafter,
    stated_quantization,
    text_part,
)
from cheetah.models.rounding import Bits, as_bf16, widen
from cheetah.printable import shown_name
from cheetah.runtime.checkpoint.loading import RANDOM, Checkpoint, found_folder
from cheetah.runtime.checkpoint.random_weights import random_tensors
from cheetah.runtime.checkpoint.safetensors_files import WEIGHT_DTYPES, LoadingError, StoredTensor, find_tensors
from cheetah.runtime.checkpoint.tensor_checks import checked_tensors, without_merged

RANDOM_HEAD, RANDOM_BLOCKS = RANDOM + "eagle3", RANDOM + "dspark"
"""Of random weights, of the target's shapes: a head, and a drafter as DeepSpec's for Qwen3 are."""
RANDOM_VOCABULARY = 32000
RANDOM_COLUMNS, RANDOM_LAYERS, RANDOM_TAPS, RANDOM_RANK = 7, 5, 5, 256
OFFSET_DTYPES = {"I64": np.int64, "I32": np.int32}


def open_drafter(
    name: str, target: Checkpoint, revision: str | None = None, local_files_only: bool | None = None
) -> Checkpoint:
    """What drafts of that name, a folder or hub id, `RANDOM_HEAD` or `RANDOM_BLOCKS`, for the model of `target`. Its
    `config` has a `drafter`, or a `block`. LoadingError or ConfigError says what is wrong, and where."""
    if name in (RANDOM_HEAD, RANDOM_BLOCKS):
        return _random(name, target)
    with found_folder(name, revision, local_files_only) as folder:
        return _opened(name, folder, target)


def _opened(name: str, folder: Path, target: Checkpoint) -> Checkpoint:
    place, notes = str(folder), list[str]()
    if not (folder / "config.json").is_file():
        raise LoadingError(f"{place}: has no config.json")
    config = read_drafter(folder / "config.json", target.config, notes)
    _check_target(config, target.config, place)
    found = _own_tensors(find_tensors(folder).tensors, place, notes)
    offsets = found.pop(OFFSETS, None) if config.drafter else None
    of_target = {one: one for one in _shared(config) if one not in found}
    if of_target:
        notes.append(f"{place}: has no {' and no '.join(of_target)}: {target.name}'s are taken")
    tensor, rows = _tensors_beside(folder, config, found, of_target, target, notes)
    ids = _checked_ids(offsets, config, place) if config.drafter else None
    return Checkpoint(name, config, _with_ids(tensor, ids), rows, {}, None, None, {}, tuple(notes), folder)


def open_mtp(
    target: Checkpoint, name: str | None = None, revision: str | None = None, local_files_only: bool | None = None
) -> Checkpoint:
    """The layer beside the model of `target` that drafts for it. name: another folder or hub id in which it lies. Its
    `config` has a `drafter`. LoadingError or ConfigError says what is wrong, and where."""
    config, names = drafter_beside(target.config)
    if name is None and target.name.startswith(RANDOM):
        config = drafter_quantised(config, None, target.config)
        tensors = random_tensors(config)
        notes = ("the layer that drafts has random numbers, so few drafts will be right",)
        return Checkpoint(target.name, config, tensors, tensors.rows, {}, None, None, {}, notes, None)
    if name is None and target.folder is not None:
        return _opened_mtp(config, names, target.name, target.folder, target)
    with found_folder(name or target.name, revision, local_files_only) as folder:
        return _opened_mtp(config, names, name or target.name, folder, target)


def _opened_mtp(
    config: ModelConfig, names: Mapping[str, str], name: str, folder: Path, target: Checkpoint
) -> Checkpoint:
    place, notes = str(folder), list[str]()
    stored = {
        one.removeprefix(BESIDE): tensor
        for one, tensor in find_tensors(folder).tensors.items()
        if one.startswith(BESIDE)
    }
    if not stored:
        raise LoadingError(
            f"{place}: has no tensors {BESIDE}*, the layer that drafts: who made the file left it out: name in "
            "speculative_config as `model` a checkpoint of this model that has it, or draft by method ngram"
        )
    found = dict(without_merged(config, _own_tensors(stored, place, notes), place))
    of_target = {own: theirs for own, theirs in names.items() if own not in found}
    values = load_source(folder / "config.json")
    part = text_part(folder / "config.json", values)
    stated = stated_quantization(folder / "config.json", values if part is None else part, target.config)
    quantization = None if stated is None else _OfDrafter(**{**vars(stated), "plain": _plain_modules(found, of_target)})
    if quantization is not None:
        config = drafter_quantised(config, quantization, target.config)
    tensor, rows = _tensors_beside(folder, config, found, of_target, target, notes, quantization)
    return Checkpoint(name, config, tensor, rows, {}, None, None, {}, tuple(notes), folder)


def _plain_modules(found: Mapping[str, StoredTensor], of_target: Collection[str]) -> frozenset[str]:
    """The modules whose weights lie there as they are, and those that are the model's."""
    plain = {name for name, tensor in found.items() if tensor.dtype in WEIGHT_DTYPES}
    return frozenset(name.removesuffix(".weight") for name in (*plain, *of_target))


@dataclass(frozen=True)
class _OfDrafter(Quantization):
    """What a file says of its modules, asked by the names that a drafter's have here. plain: those that are not
    quantised, whatever it says: tools leave them out, and few say so."""

    plain: frozenset[str] = frozenset()

    def storage_of(self, module: str) -> Storage | None:
        return None if module in self.plain else super().storage_of(BESIDE + module.removeprefix("model."))


def _shared(config: ModelConfig) -> tuple[str, ...]:
    """The tensors that may be those of the model; a head that drafts has its own head."""
    family = family_of(config)
    has_own_head = config.drafter is not None or config.tied_embeddings
    return (family.embedding_tensor,) if has_own_head else (family.embedding_tensor, family.head_tensor)


def _check_target(config: ModelConfig, target: ModelConfig, place: str) -> None:
    """LoadingError where a drafter is of another model than the target: its width, its tokens, its layers."""
    for name in ("hidden_size", "vocab_size"):
        own, wanted = getattr(config, name), getattr(target, name)
        if own != wanted:
            raise LoadingError(
                f"{place}: {name} is {own}, that of the model which it drafts for {wanted}: give its drafter"
            )
    what = config.drafter or config.block
    assert what is not None
    if (last := what.layers[-1]) >= target.layers - 1:
        taken = f"the input of layer {last + 1}" if config.drafter else f"what layer {last} leaves"
        raise LoadingError(
            f"{place}: takes {taken}, the model which it drafts for has {target.layers}: supported are layers below "
            f"{target.layers - 1}"
        )


def _own_tensors(stored: Mapping[str, StoredTensor], place: str, notes: list[str]) -> dict[str, StoredTensor]:
    """The tensors that are read, by their names here."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        own = plain_name(name)
        if own in found:
            raise LoadingError(f"{place}: {shown_name(name)} is there twice, under another name too")
        if own != KNOWN_TOKENS and not own.startswith(UNREAD):
            found[own] = tensor
    if unread := sum(plain_name(name).startswith(VERIFIER) for name in stored):
        notes.append(f"{unread} tensors of the model that it drafts for are not read")
    return found


def _tensors_beside(
    folder: Path,
    config: ModelConfig,
    found: Mapping[str, StoredTensor],
    of_target: Mapping[str, str],
    target: Checkpoint,
    notes: list[str],
    quantization: Quantization | None = None,
) -> tuple[Callable[[str], NDArray[Any]], Callable[[str], MatrixRows | QuantizedMatrix]]:
    """How the tensors of a drafter are read, whole and by rows, each in the format that `config` has for its matrix.
    found: its own; of_target: those of the model, by their names there; quantization: of its own."""
    formats = _formats_of_tensors(config)
    shapes = family_of(config).tensor_shapes(config)
    absent = {name: StoredTensor(folder, "BF16", shapes[name], 0, 0) for name in of_target}  # nobody reads them
    checked = checked_tensors(config, {**absent, **found}, str(folder), notes, quantization)

    def stored(wanted: str) -> MatrixRows | QuantizedMatrix:
        if wanted in absent:
            return target.rows(of_target[wanted])
        return checked.quantized[wanted] if wanted in checked.quantized else checked.plain[wanted].rows()

    def rows(wanted: str) -> MatrixRows | QuantizedMatrix:
        matrix, scheme = stored(wanted), formats.get(wanted)
        if scheme is None:
            return _InBf16(matrix)
        return matrix if wanted in checked.quantized else _QuantisedHere(_InBf16(matrix), scheme)

    def tensor(wanted: str) -> NDArray[Any]:
        if wanted in formats or wanted in checked.quantized:
            return dequantised(rows(wanted), slice(None))
        return target.tensor(of_target[wanted]) if wanted in absent else checked.plain[wanted].bf16_bits()

    return tensor, rows


def _formats_of_tensors(config: ModelConfig) -> dict[str, QuantizationScheme]:
    """The schemes of the tensors of quantised matrices, by name."""
    modules, formats = family_of(config).matrix_modules(config), dict(config.weight_formats)
    return {
        f"{name}.weight": scheme_of_name(format, "bf16")
        for matrix, format in formats.items()
        for module in modules[matrix]
        for name in config.names_of(module)
    }


def dequantised(matrix: MatrixRows | QuantizedMatrix, part: slice) -> NDArray[Any]:
    """Rows as bf16 bits where they are that, else, in the order of the module's columns, as the numbers that codes
    stand for, f32."""
    rows = matrix[part]
    if isinstance(rows, np.ndarray):
        return rows
    return in_natural_order(rows.dequantized(), cast(QuantizedMatrix, matrix).order)


@dataclass(frozen=True)
class _QuantisedHere:
    """A matrix in bf16 [rows, columns], to be read in a scheme: each number rounded to the nearest code."""

    matrix: MatrixRows
    scheme: QuantizationScheme
    order: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    def __getitem__(self, part: slice) -> QuantizedRows:
        return nearest_rows(widen(self.matrix[part]), self.scheme)


class _InBf16:
    """A matrix in parts, rounded to bf16 where it is quantised."""

    def __init__(self, matrix: MatrixRows | QuantizedMatrix) -> None:
        self._matrix = matrix
        self.shape = matrix.shape

    def __getitem__(self, part: slice) -> Bits:
        rows = dequantised(self._matrix, part)
        return rows if rows.dtype == np.uint16 else as_bf16(rows)


def _with_ids(tensor: Callable[[str], NDArray[Any]], ids: NDArray[np.int64] | None) -> Callable[[str], NDArray[Any]]:
    """Tensors, and which tokens a head's rows stand for."""
    return lambda name: ids if name == TOKEN_IDS and ids is not None else tensor(name)


def _checked_ids(offsets: StoredTensor | None, config: ModelConfig, place: str) -> NDArray[np.int64]:
    """The model's token that each row of the head stands for, int64 [draft_vocab_size]."""
    assert config.drafter is not None
    count, vocab = config.drafter.vocabulary, config.vocab_size
    if offsets is None:
        if count != vocab:
            raise LoadingError(f"{place}: {OFFSETS} is missing: draft_vocab_size is {count}, vocab_size {vocab}")
        return token_ids(None, count)
    if offsets.dtype not in OFFSET_DTYPES or offsets.shape != (count,):
        described = f"{offsets.dtype} {list(offsets.shape)}"
        raise LoadingError(f"{place}: {OFFSETS} is {described}, expected I64 [{count}] = [draft_vocab_size]")
    values = offsets.mapped().view(OFFSET_DTYPES[offsets.dtype]).astype(np.int64)
    wrong = np.flatnonzero((values < -count) | (values > vocab))  # no sum of others overflows
    ids = token_ids(np.clip(values, -count, vocab), count)
    wrong = np.union1d(wrong, np.flatnonzero((ids < 0) | (ids >= vocab)))
    if len(wrong):
        first = int(wrong[0])
        raise LoadingError(
            f"{place}: {OFFSETS}[{first}] is {int(values[first])}: token {first} of the head would be none of the "
            f"{vocab} tokens"
        )
    if len(np.unique(ids)) < count:
        raise LoadingError(f"{place}: {OFFSETS}: two tokens of the head are the same one of the model's")
    return ids


def _random(name: str, target: Checkpoint) -> Checkpoint:
    """Layers of the target's shapes: one over the first tokens, or some that take what layers evenly apart leave."""
    model = target.config
    values = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.query_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.rms_norm_eps,
    }
    config = read_drafter({**values, **(_of_a_head(model) if name == RANDOM_HEAD else _of_blocks(model))}, model)
    _check_target(config, model, name)
    tensors = random_tensors(config)
    ids = None if config.drafter is None else token_ids(None, config.drafter.vocabulary)
    notes = (f"{name}: the weights are random numbers, so few drafts will be right",)
    return Checkpoint(name, config, _with_ids(tensors, ids), tensors.rows, {}, None, None, {}, notes, None)


def _of_a_head(model: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": min(RANDOM_VOCABULARY, model.vocab_size),
    }


def _of_blocks(model: ModelConfig) -> dict[str, Any]:
    taps = min(RANDOM_TAPS, model.layers - 1)
    return {
        "architectures": [DSPARK],
        "model_type": "qwen3",
        "num_hidden_layers": RANDOM_LAYERS,
        "max_position_embeddings": model.max_position_embeddings,
        "block_size": RANDOM_COLUMNS,
        "mask_token_id": 0,
        "target_layer_ids": [number * (model.layers - 1) // taps for number in range(taps)],
        "markov_rank": min(RANDOM_RANK, model.hidden_size),
        "markov_head_type": "vanilla",
    }
