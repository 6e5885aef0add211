"""From a model's name to a checkpoint that is known to be whole: configuration, tensors, and the files beside them.

A name is a local folder, a hub id, "demo", or "random:" with a preset, a folder or a config.json, and perhaps "@" and a
weight format behind it. Everything is checked
before a single weight is read: what is missing, extra, misshapen or contradictory, or quantised in a way that is not
read, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import ConfigError, load_source
from cheetah.models.family import MatrixRows, QuantizedMatrix, ReadRows, ReadTensor
from cheetah.models.formats.quantized import in_natural_order
from cheetah.models.registry import (
    DEMO,
    DEMO_FOLDER,
    PRESET_NAMES,
    family_of,
    in_format,
    is_preset,
    read_config,
    resolve_config,
    split_format,
    stated_quantization,
    text_part,
)
from cheetah.models.text_part import is_seeing, text_name
from cheetah.printable import shown
from cheetah.runtime.checkpoint import hub
from cheetah.runtime.checkpoint.kv_scales import kv_scales
from cheetah.runtime.checkpoint.random_weights import random_tensors
from cheetah.runtime.checkpoint.safetensors_files import (
    LoadingError,
    StoredTensor,
    find_tensors,
    refuse_other_formats,
)
from cheetah.runtime.checkpoint.sparse_formats import with_sparse_formats
from cheetah.runtime.checkpoint.tensor_checks import CheckedTensors, checked_tensors
from cheetah.untrusted import read_json

__all__ = ["Checkpoint", "LoadingError", "open_checkpoint"]

RANDOM = "random:"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be loaded.

    name: as it was asked for. generation_config: that file's object, empty if there is none. eos_token_id and
    bos_token_id: as config.json has them (an id, a list of ids, or None). files: the tokenizer's and the chat
    template's files that are there, by name relative to the folder. notes: lines worth printing once.
    tensor: a tensor's name -> its bf16 bits, uint16, read-only; names and shapes are `tensor_shapes(config)`; of a
    quantised matrix the float32 values that it stands for, and of what the family keeps exact those that are stored.
    rows: a matrix's name -> the same bits, or codes with their scales, to be read in parts: what is not asked for is
    neither read nor made. kv_scales: what codes of keys, then values, of a cache in 8 bits are multiplied by, float32
    [layers, 2, kv_heads]; None: nothing. quantization: the method that config.json names, if the weights are quantised.
    """

    name: str
    config: ModelConfig
    tensor: ReadTensor
    rows: ReadRows
    generation_config: Mapping[str, Any]
    eos_token_id: Any
    bos_token_id: Any
    files: Mapping[str, Path]
    notes: tuple[str, ...]
    folder: Path | None
    kv_scales: NDArray[np.float32] | None = None
    quantization: str | None = None

    def check_quantization(self, wanted: str | None) -> None:
        """LoadingError unless the weights are quantised by this method, by vLLM's name for it; None for any."""
        method = (wanted or "").lower().removesuffix("_marlin")
        if method and method != self.quantization:
            found = f"quantised by {self.quantization}" if self.quantization else "not quantised"
            raise LoadingError(f"{self.name}: quantization={shown(wanted)}, but the weights are {found}: leave it out")


Readers = tuple[ReadTensor, ReadRows]
"""`tensor` and `rows` of a checkpoint."""


def open_checkpoint(
    name: str | Path,
    revision: str | None = None,
    local_files_only: bool | None = None,
    *,
    tie_word_embeddings: bool | None = None,
    sparse: str | None = None,
    seed: int = 0,
) -> Checkpoint:
    """Open a model by name; weights are mapped or made only when their tensors are asked for.

    revision: a hub repository's branch, tag or commit. local_files_only: never use the network; None does what
    HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE say. A local folder never uses it. tie_word_embeddings: overrides the file.
    sparse: "auto", "2:4" or "off", see `sparse_formats`. seed: of random weights.
    """
    text = str(name)
    if text.startswith(RANDOM):
        if sparse is not None:
            raise LoadingError(f"{text}: sparse={shown(sparse)}: random weights are in the format that @ names")
        return _random_checkpoint(text, seed, tie_word_embeddings)
    with found_folder(text, revision, local_files_only) as folder:
        return _open_folder(text, folder, tie_word_embeddings, sparse)


@contextmanager
def found_folder(name: str, revision: str | None, local_files_only: bool | None) -> Iterator[Path]:
    """The folder of a model by name, fetched if it must be; then a LoadingError within says so."""
    folder = DEMO_FOLDER if name == DEMO else Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise LoadingError(f"{name}: is a local folder, revision {revision!r} is for hub ids only")
        yield folder
        return
    if folder.exists() or not hub.is_hub_id(name) or (revision is None and folder.parent.is_dir()):
        refuse_other_formats([folder] if folder.is_file() else [])
        raise LoadingError(_not_a_model(name, folder))
    offline = hub.is_offline() if local_files_only is None else local_files_only
    folder = hub.cached_folder(name, revision) if offline else hub.fetched_folder(name, revision)
    try:
        yield folder
    except LoadingError as problem:
        state = "offline, from the cache" if offline else "fetched"
        raise LoadingError(f"{name}, revision {revision or 'main'} ({state}): {problem}") from problem


def _not_a_model(name: str, path: Path) -> str:
    if is_preset(name):
        return f"{name}: a preset has no weights: use {RANDOM}{name} for random ones, or a folder or hub id"
    if path.exists():
        return f"{name}: is a file: give the folder that holds config.json and model.safetensors"
    if hub.is_hub_id(name):
        return f"{name}: there is a folder {path.parent}, but no {path.name} in it; for the hub's give --revision main"
    return f"{name}: no such folder, and not a hub id (organisation/name); {RANDOM}PRESET gives random weights"


def _open_folder(name: str, folder: Path, tied: bool | None, sparse: str | None) -> Checkpoint:
    if not (folder / "config.json").is_file():
        refuse_other_formats(folder.iterdir())
        raise LoadingError(f"{folder}: has no config.json")
    notes: list[str] = []
    config = read_config(folder / "config.json", notes)
    if tied is not None:
        config = replace(config, tied_embeddings=tied)
    stored = find_tensors(folder)
    notes += stored.notes
    path, values = folder / "config.json", load_source(folder / "config.json")
    part = text_part(path, values)
    found = stored.tensors if part is None else _text_tensors(stored.tensors, notes)
    quantization = stated_quantization(path, values if part is None else part, config)
    notes += quantization.notes if quantization else ()
    tensors = checked_tensors(config, found, str(folder), notes, quantization)
    _note_dtype(folder, tensors.plain, family_of(config).kept_exact, notes)
    config = with_sparse_formats(config, tensors, sparse, str(folder), notes)
    config = replace(config, act_order=any(matrix.order is not None for matrix in tensors.quantized.values()))
    scales = kv_scales(config, found, str(folder)) if quantization else None
    method = quantization.method.partition(",")[0].strip() if quantization else None
    readers = _readers(tensors, family_of(config).kept_exact)
    return replace(_checkpoint(name, config, folder, readers, notes), kv_scales=scales, quantization=method)


def _text_tensors(stored: Mapping[str, StoredTensor], notes: list[str]) -> dict[str, StoredTensor]:
    """Of a model that sees the tensors of its text part; a note says what is left out."""
    left_out = sorted({name.removeprefix("model.").partition(".")[0] for name in stored if is_seeing(name)})
    if left_out:
        count = sum(map(is_seeing, stored))
        notes.append(f"{count} tensors of {' and '.join(left_out)} are not read: the model is used for text alone")
    return {text_name(name): tensor for name, tensor in stored.items() if not is_seeing(name)}


def _readers(tensors: CheckedTensors, kept_exact: tuple[str, ...]) -> Readers:
    def tensor(name: str) -> NDArray[Any]:
        if name in tensors.quantized:
            matrix = tensors.quantized[name]
            return in_natural_order(matrix[:].dequantized(), matrix.order)
        stored = tensors.plain[name]
        return stored.mapped() if stored.dtype == "F32" and name.endswith(kept_exact) else stored.bf16_bits()

    def rows(name: str) -> MatrixRows | QuantizedMatrix:
        return tensors.quantized[name] if name in tensors.quantized else tensors.plain[name].rows()

    return tensor, rows


def _random_checkpoint(name: str, seed: int, tied: bool | None) -> Checkpoint:
    source, format = split_format(name.removeprefix(RANDOM))
    notes = [f"{name}: the weights are random numbers, and so will the text be"]
    try:
        config = in_format(resolve_config(source, notes), format)
    except ConfigError as problem:
        raise LoadingError(f"{name}: {problem}") from problem
    if tied is not None:
        config = replace(config, tied_embeddings=tied)
    folder = DEMO_FOLDER if source == DEMO else None if source in PRESET_NAMES else Path(source).expanduser()
    folder = folder.parent if folder is not None and folder.is_file() else folder
    tensors = random_tensors(config, seed)
    return _checkpoint(name, config, folder, (tensors, tensors.rows), notes)


def _checkpoint(name: str, config: ModelConfig, folder: Path | None, readers: Readers, notes: list[str]) -> Checkpoint:
    raw = _optional_json(folder, "config.json")
    raw = {**(raw.get("text_config") or {}), **raw}  # of a model that sees either has the ids
    return Checkpoint(
        name=name,
        config=config,
        tensor=readers[0],
        rows=readers[1],
        generation_config=_optional_json(folder, "generation_config.json"),
        eos_token_id=raw.get("eos_token_id"),
        bos_token_id=raw.get("bos_token_id"),
        files=_text_files(folder),
        notes=tuple(notes),
        folder=folder,
    )


def _optional_json(folder: Path | None, name: str) -> dict[str, Any]:
    if folder is None or not (folder / name).is_file():
        return {}
    return read_json(folder / name, error=LoadingError, finite=False)


def _text_files(folder: Path | None) -> dict[str, Path]:
    if folder is None:
        return {}
    paths = [folder / name for name in TEXT_FILES] + sorted(folder.glob("chat_templates/*.jinja"))
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}


def _note_dtype(
    folder: Path, stored: Mapping[str, StoredTensor], kept_exact: tuple[str, ...], notes: list[str]
) -> None:
    """One line if weights have to be rounded."""
    rounded = {name: tensor.dtype for name, tensor in stored.items() if not name.endswith(kept_exact)}
    dtypes = sorted({*rounded.values()} & {"F16", "F32"})
    if dtypes:
        notes.append(f"{folder}: weights stored as {' and '.join(dtypes)} are rounded to the nearest bf16")
