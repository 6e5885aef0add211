"""What the commands that measure share: the model that they are given, how often, and the circumstances of a record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Repeated(NamedTuple):
    """Timed launches (or requests), those before them that are not counted, and the seconds of rest before each."""

    repetitions: int
    warmup: int
    rest_s: float = 0.0

    @property
    def launches(self) -> int:
        return self.repetitions + self.warmup


@dataclass(frozen=True)
class Measured:
    """A model that is measured, and where. name: its canonical name. weights: the checkpoint, None for random ones.
    device, gpu: by the names that the command was given. ranks: GPUs that make each step together. plan: the options
    of the plan that were given."""

    config: ModelConfig
    name: str
    weights: Weights | None
    device: str | None
    gpu: str | None
    ranks: int
    plan: dict[str, Any]

    @classmethod
    def named(cls, model: str, load: dict[str, Any], plan: dict[str, Any]) -> Measured:
        """load: of --device, --tensor-parallel-size, --gpu and --revision those that were given."""
        from cheetah.runtime.checkpoint.loading import open_checkpoint

        where = load.get("device"), load.get("gpu"), load.get("tensor_parallel_size", 1), plan
        revision = load.get("revision")
        if model.startswith(RANDOM):
            named = named_config(model)
            return cls(named.config, named.canonical, None, *where)
        checkpoint = open_checkpoint(model, revision)
        print_notes(checkpoint.notes)
        return cls(checkpoint.config, named_config(model, revision).canonical, checkpoint, *where)

    @property
    def ordinal(self) -> int:
        """Of "cuda:1" the 1; of several GPUs the first one's."""
        return int((self.device or "").partition(":")[2].partition(",")[0] or 0)

    def refuse_hours_of_emulation(self, tokens: int) -> None:
        """CheetahError where there is no GPU and the emulator, for which the command was not asked by name, would take
        long for this number of tokens."""
        from cheetah.models.registry import family_of
        from cheetah.runtime.device.cuda import why_not_cuda

        parameters = sum(map(math.prod, family_of(self.config).tensor_shapes(self.config).values()))
        seconds = tokens * parameters / EMULATED_PER_S
        if self.device is None and seconds > PATIENCE_S and (reason := why_not_cuda()) is not None:
            raise CheetahError(
                f"there is no GPU to measure on ({reason}), and the emulator would take some "
                f"{seconds / 3600:,.1f} hours for {tokens} tokens of {self.name}: give --device emulator if you mean "
                "it, or a smaller model, such as demo"
            )

    def open_device(self) -> Device:
        from cheetah.runtime.device import open_device

        return open_device(self.device, ranks=self.ranks)

    def circumstances(self, device: Device) -> dict[str, Any]:
        return circumstances_of(self.name, self.config, self.weights, device)


def circumstances_of(model: str, config: ModelConfig, weights: Weights | None, device: Device) -> dict[str, Any]:
    """What every record says of where it was measured."""
    from cheetah.tools.circumstances import commit, now

    info = device.describe()
    return {
        "commit": commit(),
        "measured": now(),
        "gpu": info.name,
        **({"gpus": info.ranks} if info.ranks > 1 else {}),
        "driver": info.driver,
        "backend": info.backend,
        "model": model,
        "weights": config.formats_in_words + (" random" if weights is None else ""),
    }
