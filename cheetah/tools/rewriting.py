"""A copy of a checkpoint in which some tensors are others: files, header and index as the original has them.

Files appear under the folder's name only when all are written and the copy has been opened. The host holds one tensor
at a time.
"""

from __future__ import annotations

import json
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.config import ModelConfig
from cheetah.models.registry import family_of
from cheetah.runtime.checkpoint.loading import RANDOM, Checkpoint, open_checkpoint
from cheetah.runtime.checkpoint.safetensors_files import INDEX_FILE, StoredTensor, find_tensors
from cheetah.runtime.checkpoint.tensor_checks import without_merged
from cheetah.tools.copies import appearing_whole, copy_files
from cheetah.untrusted import read_json

WEIGHT = ".weight"
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Entry:
    """A tensor of a file that is written; dtype is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Rewriting(ABC):
    """What becomes of a checkpoint's tensors; the others are copied byte for byte."""

    source: Path
    config: ModelConfig

    @abstractmethod
    def is_rewritten(self, name: str) -> bool:
        """Whether a tensor becomes others."""

    @abstractmethod
    def entries(self, name: str, tensor: StoredTensor) -> Iterator[Entry]:
        """What becomes of it, in the order of `values`."""

    @abstractmethod
    def values(self, name: str, tensor: StoredTensor, pool: ThreadPoolExecutor) -> Iterator[NDArray[Any]]:
        """Their values."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Fields of config.json that the copy has in place of the original's."""

    def source_bytes(self) -> int:
        """Bytes of all tensors that are read."""
        return sum(tensor.nbytes for tensor in find_tensors(self.source).tensors.values())

    def write(self, out: Path, progress: Progress, threads: int | None = None) -> None:
        """Write the copy to `out`, which must not exist. progress: gets the bytes of the source that are done."""
        with appearing_whole(out) as folder:
            self._write_tensors(folder, progress, threads or os.cpu_count() or 1)
            values = read_json(self.source / "config.json", finite=False)
            copy_files(self.source, folder, {**values, **self.fields()})
            open_checkpoint(folder)

    def _write_tensors(self, folder: Path, progress: Progress, threads: int) -> None:
        stored = without_merged(self.config, find_tensors(self.source).tensors, str(self.source))
        files: dict[str, list[str]] = {}
        for name, tensor in stored.items():
            files.setdefault(tensor.file.name, []).append(name)
        weight_map: dict[str, str] = {}
        nbytes = 0
        with ThreadPoolExecutor(threads, "rewrite") as pool:
            for file, names in files.items():
                entries = [entry for name in names for entry in self._entries(name, stored[name])]
                weight_map |= {entry.name: file for entry in entries}
                nbytes += sum(entry.nbytes for entry in entries)
                with (folder / file).open("wb") as out:
                    _write_header(out, entries)
                    for name in names:
                        for values in self._values(name, stored[name], pool):
                            out.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
                        progress(stored[name].nbytes)
        if (self.source / INDEX_FILE).is_file() and len(files) > 1:
            index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def _entries(self, name: str, tensor: StoredTensor) -> Iterator[Entry]:
        if self.is_rewritten(name):
            yield from self.entries(name, tensor)
        else:
            yield Entry(name, tensor.dtype, tensor.shape, tensor.nbytes)

    def _values(self, name: str, tensor: StoredTensor, pool: ThreadPoolExecutor) -> Iterator[NDArray[Any]]:
        if self.is_rewritten(name):
            yield from self.values(name, tensor, pool)
        else:
            yield tensor.mapped_bytes()


def _write_header(out: BinaryIO, entries: list[Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        offsets = [position, position + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        position += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    out.write(struct.pack("<Q", len(text)) + text)


def original(model: str, revision: str | None = None) -> Checkpoint:
    """The checkpoint of that name; CheetahError if it has no files, or weights that are in a format already."""
    checkpoint = open_checkpoint(model, revision)
    if checkpoint.folder is None or model.startswith(RANDOM):
        raise CheetahError(f"{model}: has no files: give a folder, a hub id, or demo")
    if checkpoint.config.weight_formats:
        formats = ", ".join(f"{matrix} in {name}" for matrix, name in checkpoint.config.weight_formats)
        raise CheetahError(f"{checkpoint.folder}: is quantised already ({formats}): give the original")
    return checkpoint


def layer_matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The weights of the layers' matrices that need not be bf16, each with its shape."""
    family = family_of(config)
    modules = family.matrix_modules(config)
    names = {name for product in config.quantisable for name in modules[product.name]}
    wanted = {f"{one}{WEIGHT}" for name in names for one in config.names_of(name)}
    return {name: (shape[0], shape[1]) for name, shape in family.tensor_shapes(config).items() if name in wanted}
