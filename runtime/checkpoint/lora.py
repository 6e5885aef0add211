"""A LoRA adapter as PEFT writes it, merged into a checkpoint's matrices as they are read.

A module's matrix [out, in] becomes W + scale * B @ A, with A [rank, in] and B [out, rank] of the adapter and scale =
lora_alpha / rank (or / sqrt(rank), where the adapter says use_rslora): summed in float32, rounded to bf16 once. The
original is Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. What an adapter says that would mean
something else is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.registry import family_of
from cheetah.models.rounding import F32, Bits, as_bf16, widen
from cheetah.printable import shown
from cheetah.runtime.checkpoint.loading import Checkpoint
from cheetah.runtime.checkpoint.safetensors_files import LoadingError, StoredTensor, read_header
from cheetah.untrusted import read_json

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PART = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(\.default)?\.weight")
DTYPES = ("BF16", "F16", "F32")
LARGEST_RANK = 4096

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""Entries of adapter_config.json that change what an adapter means, with the values that do not. Other ways to begin
an adapter change the model's own weights too, as PiSSA does."""


@dataclass(frozen=True)
class Adapter:
    """Rank and scale of every module, and by the name of a matrix its A and scale * B, float32."""

    rank: int
    scale: float
    parts: Mapping[str, tuple[F32, F32]]


def with_adapter(checkpoint: Checkpoint, adapter: object) -> Checkpoint:
    """The checkpoint with an adapter merged in. adapter: its folder. LoadingError where that cannot be, with the place.

    Matrices that it does not touch are read as before; the others are packed by the host."""
    if isinstance(adapter, list | tuple) and len(adapter) == 1:
        (adapter,) = adapter
    if not isinstance(adapter, str | Path):
        raise LoadingError(
            f"lora={shown(adapter)}: give the folder of one adapter; several at a time are not supported"
        )
    if checkpoint.quantization is not None or checkpoint.config.weight_formats:
        raise LoadingError(
            f"{checkpoint.name}: its weights are quantised; an adapter is merged into 16-bit weights alone"
        )
    if checkpoint.config.routing is not None:
        raise LoadingError(f"{checkpoint.name}: a model of experts: adapters are merged into dense models alone")
    read = read_adapter(Path(adapter).expanduser(), matrix_shapes(checkpoint))
    tensor, rows = checkpoint.tensor, checkpoint.rows

    def merged_tensor(name: str) -> NDArray[Any]:
        return _sum(tensor(name), *read.parts[name]) if name in read.parts else tensor(name)

    def merged_rows(name: str) -> Any:
        return MergedRows(rows(name), *read.parts[name]) if name in read.parts else rows(name)

    note = f"{adapter}: rank {read.rank}, scale {read.scale:g}, merged into {len(read.parts)} matrices"
    return replace(checkpoint, tensor=merged_tensor, rows=merged_rows, notes=(*checkpoint.notes, note))


def matrix_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """[out, in] of each matrix that an adapter may change, by its tensor's name."""
    config, family = checkpoint.config, family_of(checkpoint.config)
    of_matrices = [module for matrix in family.matrix_modules(config).values() for module in matrix]
    of_layers = [f"model.layers.{{layer}}.{module}" for module in family.never_quantised(config)]
    modules = {module.format(layer=layer) for module in (*of_matrices, *of_layers) for layer in range(config.layers)}
    shapes = family.tensor_shapes(config)
    return {name: shape for name, shape in shapes.items() if name.removesuffix(".weight") in modules}


class MergedRows:
    """`MatrixRows` of a matrix with an adapter: W + b @ a."""

    def __init__(self, base: Any, a: F32, b: F32) -> None:
        self._base, self._a, self._b = base, a, b
        self.shape: tuple[int, ...] = base.shape

    def __getitem__(self, part: slice) -> Bits:
        return _sum(self._base[part], self._a, self._b[part])


def _sum(bits: Bits, a: F32, b: F32) -> Bits:
    return as_bf16(widen(bits) + b @ a)


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Adapter:
    """An adapter for matrices of these shapes. LoadingError where a file, a rank, a shape or a module is not right."""
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise LoadingError(f"{folder}: is no adapter: give a folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}")
    rank, scale = _rank_and_scale(folder / CONFIG_FILE)
    stored: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in read_header(folder / WEIGHTS_FILE).items():
        module, part = _named(folder, name)
        stored.setdefault(f"{module}.weight", {})[part] = tensor
    if unknown := sorted(stored.keys() - shapes.keys()):
        raise LoadingError(
            f"{folder}: adapts {_some(unknown)}, of which the model has no such matrix; it has {_some(sorted(shapes))}"
        )
    if not stored:
        raise LoadingError(f"{folder}: {WEIGHTS_FILE} has no tensors")
    parts = {name: _parts(folder, name, found, rank, shapes[name]) for name, found in stored.items()}
    return Adapter(rank, scale, {name: (a, b * np.float32(scale)) for name, (a, b) in parts.items()})


def _rank_and_scale(path: Path) -> tuple[int, float]:
    stated = read_json(path, error=LoadingError)
    if str(stated.get("peft_type", "")).upper() != "LORA":
        raise LoadingError(f"{path}: peft_type is {shown(stated.get('peft_type'))}: LORA alone is merged")
    for name, neutral in NEUTRAL.items():
        if name in stated and stated[name] not in neutral:
            raise LoadingError(f"{path}: {name} is {shown(stated[name])}, which is not supported")
    rank, alpha = stated.get("r"), stated.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= LARGEST_RANK:
        raise LoadingError(f"{path}: r is {shown(rank)}: expected an integer from 1 to {LARGEST_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise LoadingError(f"{path}: lora_alpha is {shown(alpha)}: expected a number")
    if not isinstance(rooted := stated.get("use_rslora", False), bool):
        raise LoadingError(f"{path}: use_rslora is {shown(rooted)}: expected true or false")
    return rank, alpha / (math.sqrt(rank) if rooted else rank)


def _named(folder: Path, name: str) -> tuple[str, str]:
    """(module, "A" or "B") of a tensor's name."""
    found = PART.fullmatch(name.removeprefix(PREFIX))
    if found is None:
        raise LoadingError(f"{folder}: tensor {shown(name)} is no lora_A or lora_B of a linear layer")
    return found["module"], found["part"]


def _parts(
    folder: Path, name: str, found: Mapping[str, StoredTensor], rank: int, shape: tuple[int, ...]
) -> tuple[F32, F32]:
    """A and B of a matrix."""
    wanted = {"A": (rank, shape[1]), "B": (shape[0], rank)}
    for part, expected in wanted.items():
        if part not in found:
            raise LoadingError(f"{folder}: {name} has lora_{'B' if part == 'A' else 'A'} and no lora_{part}")
        if found[part].shape != expected or found[part].dtype not in DTYPES:
            here = f"{list(found[part].shape)} of {found[part].dtype}"
            raise LoadingError(f"{folder}: lora_{part} of {name} is {here}, expected {list(expected)} of {DTYPES}")
    a, b = (widen(found[part].mapped()) for part in "AB")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise LoadingError(f"{folder}: {name} has numbers that are infinite or NaN")
    return a, b


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(shown, names[:3])) + more
