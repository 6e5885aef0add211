"""For which machine weights are packed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cheetah.cli.check import NARROW_BLOCKS, shrunk
from cheetah.generate import choose_plan, describe_kernel
from cheetah.models.family import Packing
from cheetah.models.registry import PRESETS, family_of
from cheetah.plan import StepMatrices, gpu_named
from cheetah.runtime.assembly import buffers
from cheetah.runtime.checkpoint.random_weights import random_tensors
from cheetah.runtime.device.emulator import EmulatorDevice
from cheetah.tools.rig import weights_of


def test_weights_are_packed_for_the_machine_of_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the one of its name: `cheetah check` looks at narrow M-tiles on an emulator of more blocks."""
    config, gpu = shrunk(PRESETS["qwen3-0.6b"]), replace(gpu_named("emulator"), blocks=NARROW_BLOCKS)
    manifest, taken = describe_kernel(config, gpu, choose_plan(config, gpu, max_context=64)), list[StepMatrices]()

    def take(_: object, config: object, matrices: StepMatrices, packing: Packing) -> None:
        taken.append(matrices)

    monkeypatch.setattr(type(family_of(config)), "pack_weights", take)
    tables = {"rope": EmulatorDevice().allocate(manifest.buffer("rope").bytes)}
    buffers.upload_weights(weights_of(config, random_tensors(config)), manifest, tables, lambda written: None)
    assert {one.name: one.tile_rows for one in taken[0]}["o"] == 8
