"""Tensors of a drafter that lie beside those of the model that it drafts for: what it has not itself is the model's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.family import MatrixRows, QuantizedMatrix
from cheetah.models.registry import read_drafter
from cheetah.runtime.checkpoint.loading import Checkpoint
from cheetah.runtime.checkpoint.safetensors_files import LoadingError, StoredTensor
from cheetah.runtime.checkpoint.tensor_checks import checked_tensors


def config_beside(folder: Path, target: ModelConfig, notes: list[str]) -> ModelConfig:
    """What the folder of a drafter says of it. LoadingError or ConfigError says what is wrong."""
    if not (folder / "config.json").is_file():
        raise LoadingError(f"{folder}: has no config.json")
    return read_drafter(folder / "config.json", target, notes)


def check_sizes(config: ModelConfig, target: ModelConfig, place: str, what: str) -> None:
    """LoadingError where a drafter, called `what`, has another width or other tokens than the model."""
    for name in ("hidden_size", "vocab_size"):
        own, wanted = getattr(config, name), getattr(target, name)
        if own != wanted:
            raise LoadingError(
                f"{place}: {name} is {own}, that of the model which it drafts for {wanted}: give its {what}"
            )


def tensors_beside(
    folder: Path,
    config: ModelConfig,
    found: Mapping[str, StoredTensor],
    of_target: Collection[str],
    target: Checkpoint,
    notes: list[str],
) -> tuple[Callable[[str], NDArray[Any]], Callable[[str], MatrixRows | QuantizedMatrix]]:
    """How the tensors of a drafter are read, whole and by rows. found: its own; of_target: those of the model."""
    shape = (config.vocab_size, config.hidden_size)
    absent = {name: StoredTensor(folder, "BF16", shape, 0, 0) for name in of_target}  # nobody reads them
    plain = checked_tensors(config, {**absent, **found}, str(folder), notes).plain

    def tensor(wanted: str) -> NDArray[Any]:
        return target.tensor(wanted) if wanted in absent else plain[wanted].bf16_bits()

    def rows(wanted: str) -> MatrixRows | QuantizedMatrix:
        return target.rows(wanted) if wanted in absent else plain[wanted].rows()

    return tensor, rows
