"""Writing a quantised copy of a checkpoint, as compressed-tensors lays it out: what `cheetah quantize` does.

Every matrix of the layers is rounded to the nearest codes, in blocks of rows by several threads; embedding, norms,
biases, routers of experts and lm_head are copied byte for byte. Experts that lie in one tensor are written one by one.
Files appear under the folder's name only when all are written and the copy has been opened. The host holds one tensor
at a time.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.config import ModelConfig
from cheetah.models.formats.nearest import nearest_rows
from cheetah.models.formats.quantized import QuantizationError, QuantizationScheme, QuantizedRows
from cheetah.models.registry import family_of
from cheetah.models.rounding import widen
from cheetah.plan.formats import GROUP_COLUMNS, tile_format
from cheetah.runtime.checkpoint.loading import RANDOM, open_checkpoint
from cheetah.runtime.checkpoint.packed_words import transposed, words_of_codes
from cheetah.runtime.checkpoint.safetensors_files import INDEX_FILE, StoredTensor, find_tensors
from cheetah.runtime.checkpoint.tensor_checks import without_merged
from cheetah.tools.copies import appearing_whole, copy_files
from cheetah.untrusted import read_json

BLOCK_ROWS = 256
"""Rows that a thread rounds at a time: a multiple of the rows of an fp8 block."""
SCALES = "bf16"
WEIGHT = ".weight"

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """A checkpoint to write. matrices: the weights that are quantised, each with its shape."""

    source: Path
    config: ModelConfig
    scheme: QuantizationScheme
    clip: bool
    matrices: Mapping[str, tuple[int, int]]

    @property
    def block_rows(self) -> int | None:
        """Rows that share a scale."""
        return self.scheme.group_columns if self.scheme.kind == "fp8" else None


def quantization_job(model: str, scheme: QuantizationScheme, clip: bool, revision: str | None = None) -> Job:
    """What is to be done for a model; CheetahError if its weights are quantised, or do not fit the scheme."""
    checkpoint = open_checkpoint(model, revision)
    if checkpoint.folder is None or model.startswith(RANDOM):
        raise CheetahError(f"{model}: has no files: give a folder, a hub id, or demo")
    if checkpoint.config.weight_formats:
        formats = ", ".join(f"{matrix} in {name}" for matrix, name in checkpoint.config.weight_formats)
        raise CheetahError(f"{checkpoint.folder}: is quantised already ({formats}): give the original")
    tile_format(scheme.name)  # PlanError if the kernel does not have it
    family, config = family_of(checkpoint.config), checkpoint.config
    modules = family.matrix_modules(config)
    names = {name for product in config.quantisable for name in modules[product.name]}
    shapes = family.tensor_shapes(config)
    wanted = {f"{one}{WEIGHT}" for name in names for one in config.names_of(name)}
    matrices = {name: (shape[0], shape[1]) for name, shape in shapes.items() if name in wanted}
    for name, (_, columns) in matrices.items():
        _check_columns(name, columns, scheme)
    return Job(checkpoint.folder, config, scheme, clip, matrices)


def source_bytes(job: Job) -> int:
    """Bytes of all tensors that are read."""
    return sum(tensor.nbytes for tensor in find_tensors(job.source).tensors.values())


def write_quantized(job: Job, out: Path, progress: Progress, threads: int | None = None) -> None:
    """Write the copy to `out`, which must not exist. progress: gets the bytes of the source that are done."""
    with appearing_whole(out) as folder:
        _write_tensors(job, folder, progress, threads or os.cpu_count() or 1)
        values = read_json(job.source / "config.json", finite=False)
        copy_files(job.source, folder, {**values, "quantization_config": quantization_config(job)})
        open_checkpoint(folder)


def quantization_config(job: Job) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors."""
    scheme, is_float = job.scheme, job.scheme.kind == "fp8"
    strategy = "channel" if scheme.group_columns is None else "block" if is_float else "group"
    weights = {
        "num_bits": 4 if scheme.kind == "int4" else 8,
        "type": "float" if is_float else "int",
        "symmetric": scheme.symmetric,
        "strategy": strategy,
        "group_size": scheme.group_columns if strategy == "group" else None,
        "block_structure": [job.block_rows, scheme.group_columns] if strategy == "block" else None,
        "dynamic": False,
        "actorder": None,
        "observer": "mse" if job.clip else "minmax",
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if is_float else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(f"re:.*{re.escape(name)}$" for name in family_of(job.config).routers(job.config))],
        "kv_cache_scheme": None,
    }


def _check_columns(name: str, columns: int, scheme: QuantizationScheme) -> None:
    """Blocks of fp8 may end with the matrix, groups may not: so say the tools that read them."""
    if scheme.kind != "fp8" and scheme.group_columns is not None and columns % scheme.group_columns:
        fitting = [str(size) for size in GROUP_COLUMNS if columns % size == 0]
        other = f"groups of {' or '.join(fitting)}, or " if fitting else ""
        raise CheetahError(
            f"{name}: {columns} columns are no whole groups of {scheme.group_columns}: use {other}{scheme.kind}"
        )


# -- files


def _write_tensors(job: Job, folder: Path, progress: Progress, threads: int) -> None:
    stored = without_merged(job.config, find_tensors(job.source).tensors, str(job.source))
    files: dict[str, list[str]] = {}
    for name, tensor in stored.items():
        files.setdefault(tensor.file.name, []).append(name)
    weight_map: dict[str, str] = {}
    nbytes = 0
    with ThreadPoolExecutor(threads, "quantize") as pool:
        for file, names in files.items():
            entries = [entry for name in names for entry in _entries(job, name, stored[name])]
            weight_map |= {entry.name: file for entry in entries}
            nbytes += sum(entry.nbytes for entry in entries)
            with (folder / file).open("wb") as out:
                _write_header(out, entries)
                for name in names:
                    for values in _values(job, name, stored[name], pool):
                        out.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
                    progress(stored[name].nbytes)
    if (job.source / INDEX_FILE).is_file() and len(files) > 1:
        index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file that is written; dtype is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def _write_header(out: BinaryIO, entries: list[_Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        offsets = [position, position + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        position += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    out.write(struct.pack("<Q", len(text)) + text)


# -- tensors


def _entries(job: Job, name: str, tensor: StoredTensor) -> Iterator[_Entry]:
    """What becomes of a tensor, in the order of `_values`."""
    if name not in job.matrices:
        yield _Entry(name, tensor.dtype, tensor.shape, tensor.nbytes)
        return
    rows, columns = job.matrices[name]
    module, groups = name.removesuffix(WEIGHT), job.scheme.groups(columns)
    if job.scheme.kind == "fp8":
        scale_rows = rows if job.block_rows is None else -(-rows // job.block_rows)
        yield _Entry(f"{module}.weight", "F8_E4M3", (rows, columns), rows * columns)
        yield _Entry(f"{module}.weight_scale", "BF16", (scale_rows, groups), scale_rows * groups * 2)
        return
    per_word = 32 // int(job.scheme.kind.removeprefix("int"))
    words, packed_rows = -(-columns // per_word), -(-rows // per_word)
    yield _Entry(f"{module}.weight_packed", "I32", (rows, words), rows * words * 4)
    yield _Entry(f"{module}.weight_scale", "BF16", (rows, groups), rows * groups * 2)
    if not job.scheme.symmetric:
        yield _Entry(f"{module}.weight_zero_point", "I32", (packed_rows, groups), packed_rows * groups * 4)
    yield _Entry(f"{module}.weight_shape", "I64", (2,), 16)


def _values(job: Job, name: str, tensor: StoredTensor, pool: ThreadPoolExecutor) -> Iterator[NDArray[Any]]:
    if name not in job.matrices:
        yield tensor.mapped_bytes()
        return
    quantized = _quantized(job, name, tensor, pool)
    if job.scheme.kind == "fp8":
        yield quantized.codes
        yield quantized.scales[:: job.block_rows or 1].view(np.uint16)
        return
    bits = int(job.scheme.kind.removeprefix("int"))
    yield words_of_codes(quantized.codes, bits)
    yield quantized.scales.view(np.uint16)
    if quantized.zero_points is not None:
        yield transposed(words_of_codes(np.ascontiguousarray(quantized.zero_points.T), bits))
    yield np.array(job.matrices[name], np.int64)


def _quantized(job: Job, name: str, tensor: StoredTensor, pool: ThreadPoolExecutor) -> QuantizedRows:
    """A whole matrix, rounded by all threads."""
    rows = tensor.stored_rows()

    def round_block(first: int) -> QuantizedRows:
        values = widen(rows[first : first + BLOCK_ROWS])
        try:
            return nearest_rows(values, job.scheme, clip=job.clip, block_rows=job.block_rows)
        except QuantizationError as problem:
            raise CheetahError(f"{tensor.file}: tensor {name}, rows from {first} on: {problem}") from problem

    blocks = list(pool.map(round_block, range(0, tensor.shape[0], BLOCK_ROWS)))
    planes = zip(*((block.codes, block.scales, block.zero_points) for block in blocks), strict=True)
    codes, scales, points = planes
    zero_points = None if job.scheme.symmetric else np.concatenate([one for one in points if one is not None])
    return QuantizedRows(
        job.scheme.kind, np.concatenate(codes), np.concatenate(scales), zero_points, blocks[0].group_columns
    )
