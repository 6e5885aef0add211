"""Scales of keys and values for a cache of e4m3, from what a model makes of a text: what `cheetah calibrate` does.

The model reads the text with keys and values cached as they are; the largest of each layer, or of each of its KV heads,
becomes the largest number that a code stands for. The scales go into a copy of the checkpoint, whose weights are links
to the original's files, under the names that vLLM and compressed-tensors know.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.config import ModelConfig
from cheetah.models.rounding import F32, widen
from cheetah.runtime.checkpoint.kv_scales import usual_names
from cheetah.runtime.checkpoint.loading import RANDOM, Checkpoint, open_checkpoint
from cheetah.runtime.checkpoint.safetensors_files import INDEX_FILE, SINGLE_FILE, find_tensors
from cheetah.runtime.sampling import SamplingParams
from cheetah.tools.copies import appearing_whole, copy_files
from cheetah.untrusted import read_json

if TYPE_CHECKING:
    from cheetah.runtime.llm import LLM

LARGEST_E4M3 = 448.0
SCALES_FILE, WEIGHTS_FILE = "model-kv-scales.safetensors", "model-weights.safetensors"
"""In the copy: the scales, and the weights where the original has one file of them."""
ENDLESS, NO_SIGN = 0x7F80, 0x7FFF
"""Of bf16: the bits of infinity, above which NaN begins; a mask."""

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Source:
    """A checkpoint without scales."""

    folder: Path
    config: ModelConfig


def calibration_source(model: str, revision: str | None = None) -> Source:
    """The checkpoint of a model; CheetahError if it has no files, scales already, or no use for
    them."""
    checkpoint: Checkpoint = open_checkpoint(model, revision)
    if checkpoint.folder is None or model.startswith(RANDOM):
        raise CheetahError(f"{model}: has no files: give a folder, a hub id, or demo")
    if checkpoint.kv_scales is not None:
        raise CheetahError(f"{checkpoint.folder}: has scales of keys and values already: give the original")
    if checkpoint.config.delta_layers:
        raise CheetahError(f"{checkpoint.folder}: beside Gated DeltaNet keys and values are cached in bf16 alone")
    return Source(checkpoint.folder, checkpoint.config)


def pieces_of(ids: Sequence[int], tokens: int, context: int) -> list[list[int]]:
    """The first `tokens` ids in parts of `context`, each of which is read from position 0."""
    chosen = list(ids[:tokens])
    return [chosen[first : first + context] for first in range(0, len(chosen), context)]


def largest_of_text(llm: LLM, pieces: Sequence[Sequence[int]], progress: Progress = lambda tokens: None) -> F32:
    """The largest magnitude of keys, then values, of each KV head: float32 [layers, 2, kv_heads].

    llm: caches bf16, a sequence at a time. progress: gets the number of tokens just read.
    """
    largest = np.zeros((llm.config.layers, 2, llm.config.kv_heads), np.float32)
    for piece in pieces:
        llm.generate(list(piece), SamplingParams(max_tokens=1, temperature=0.0))
        largest = np.maximum(largest, largest_cached(llm.download_cache()))
        progress(len(piece))
    return largest


def largest_cached(pool: NDArray[np.uint16]) -> F32:
    """Of a pool of pages (bf16 bits [layers, pages, 2, kv_heads, page_size, head_dim], NaN where nothing was cached):
    float32 [layers, 2, kv_heads]. CheetahError if a key or value is infinite."""
    bits = pool & np.uint16(NO_SIGN)
    bits[bits > ENDLESS] = 0
    largest = bits.max(axis=(1, 4, 5))
    if (largest == ENDLESS).any():
        layer, part, head = np.argwhere(largest == ENDLESS)[0]
        raise CheetahError(f"{('a key', 'a value')[part]} of layer {layer}, KV head {head} is infinite: no scale fits")
    return widen(largest)


def scales_for(largest: F32, per_head: bool) -> F32:
    """What codes are multiplied by, float32 [layers, 2, heads]: one head stands for all where not `per_head`. 1 where
    all keys or values are zero."""
    of_heads = largest if per_head else largest.max(axis=2, keepdims=True)
    return np.where(of_heads > 0, of_heads / np.float32(LARGEST_E4M3), np.float32(1)).astype(np.float32)


def write_scaled(source: Source, out: Path, scales: F32) -> None:
    """Write a copy of the checkpoint with `scales` [layers, 2, 1 or kv_heads] to `out`, which must not exist."""
    with appearing_whole(out) as folder:
        values = read_json(source.folder / "config.json", finite=False)
        copy_files(source.folder, folder, _with_scheme(values, per_head=scales.shape[2] > 1))
        _write_weights(source, folder, scales)
        open_checkpoint(folder)


def _with_scheme(values: dict[str, Any], per_head: bool) -> dict[str, Any]:
    """A config.json that says of keys and values how they were scaled, where its way to quantise has a word for it."""
    stated = values.get("quantization_config")
    if stated is None:
        stated = {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": [],
        }
    elif stated.get("quant_method") != "compressed-tensors":
        return values
    strategy = "attn_head" if per_head else "tensor"
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    return {**values, "quantization_config": {**stated, "kv_cache_scheme": scheme}}


def _write_weights(source: Source, folder: Path, scales: F32) -> None:
    """Links to the files of weights, a file of scales, and an index of all."""
    from safetensors.numpy import save

    stored = find_tensors(source.folder).tensors
    tensors = {
        name: of_part if len(of_part) > 1 else of_part[0]
        for layer, of_layer in enumerate(scales)
        for name, of_part in zip(usual_names(source.config, layer), of_layer, strict=True)
    }
    data = save({name: np.array(value) for name, value in tensors.items()}, {"format": "pt"})
    (folder / SCALES_FILE).write_bytes(data)  # and not by the library, whose errors are no OSError
    weight_map = {name: WEIGHTS_FILE if one.file.name == SINGLE_FILE else one.file.name for name, one in stored.items()}
    for name, file in {one.file.name: one.file for one in stored.values()}.items():
        _link(file, folder / (WEIGHTS_FILE if name == SINGLE_FILE else name))
    total = sum(one.nbytes for one in stored.values()) + scales.nbytes
    index = {"metadata": {"total_size": total}, "weight_map": weight_map | dict.fromkeys(tensors, SCALES_FILE)}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _link(file: Path, target: Path) -> None:
    """The same file by another name; a copy where the file system has no such thing, or is another one."""
    try:
        os.link(file.resolve(), target)
    except OSError:
        shutil.copyfile(file, target)
