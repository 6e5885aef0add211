"""What the commands that measure share: the model that they are given, and the circumstances that they tell."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cheetah.cli.configs import RANDOM, named_config, print_notes
from cheetah.errors import CheetahError

if TYPE_CHECKING:
    from cheetah.models.config import ModelConfig
    from cheetah.runtime.assembly.buffers import Weights
    from cheetah.runtime.device import Device

EMULATED_PER_S = 3e7
"""Parameters that the emulator multiplies a second, on two cores."""
PATIENCE_S = 600.0
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


def refuse_hours_of_emulation(device: str | None, name: str, config: ModelConfig, tokens: int) -> None:
    """CheetahError where there is no GPU and the emulator, which nobody has asked for by name, would take long for so
    many tokens."""
    from cheetah.models.registry import family_of
    from cheetah.runtime.device.cuda import why_not_cuda

    seconds = tokens * sum(map(math.prod, family_of(config).tensor_shapes(config).values())) / EMULATED_PER_S
    if device is None and seconds > PATIENCE_S and (reason := why_not_cuda()) is not None:
        raise CheetahError(
            f"there is no GPU to measure on ({reason}), and the emulator would take some {seconds / 3600:,.1f} hours "
            f"for {tokens} tokens of {name}: give --device emulator if you mean it, or a smaller model, such as demo"
        )


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
