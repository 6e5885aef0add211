"""What the commands that measure share: the model that they are given, and the circumstances that they tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cheetah.cli.configs import RANDOM, named_config, print_notes

if TYPE_CHECKING:
    from cheetah.models.config import ModelConfig
    from cheetah.runtime.assembly.buffers import Weights
    from cheetah.runtime.device import Device

MODEL_HELP = "random:PRESET (weights made on the spot), a folder, a hub id, or demo."


def measured_model(name: str, revision: str | None) -> tuple[ModelConfig, str, Weights | None]:
    """The configuration, its canonical name, and the checkpoint (None for random weights)."""
    from cheetah.runtime.checkpoint.loading import open_checkpoint

    if name.startswith(RANDOM):
        named = named_config(name)
        return named.config, named.canonical, None
    checkpoint = open_checkpoint(name, revision)
    print_notes(checkpoint.notes)
    return checkpoint.config, named_config(name, revision).canonical, checkpoint


def ordinal_of(device: str | None) -> int:
    """Of "cuda:1" the 1."""
    return int((device or "").partition(":")[2] or 0)


def circumstances_of(model: str, config: ModelConfig, weights: Weights | None, device: Device) -> dict[str, Any]:
    """What every record says of where it was measured."""
    from cheetah.tools.circumstances import commit, now

    info = device.describe()
    return {
        "commit": commit(),
        "measured": now(),
        "gpu": info.name,
        "driver": info.driver,
        "backend": info.backend,
        "model": model,
        "weights": config.formats_in_words + (" random" if weights is None else ""),
    }
