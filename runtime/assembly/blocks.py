"""What a drafter of blocks has beside its steps: the kernel that makes rows of taps, and its Markov head, each with its
weights as a checkpoint has them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cheetah.models.block import FC, MARKOV
from cheetah.models.config import ModelConfig
from cheetah.plan import Gpu, Plan
from cheetah.plan.plan import STEP_TOKENS
from cheetah.runtime.assembly.buffers import Weights, new_buffer
from cheetah.runtime.assembly.kernels import block_kernels, has_plan
from cheetah.runtime.assembly.texts import Generated
from cheetah.runtime.engine.block_launches import BlockLauncher, KnownRows, MarkovChain, padded_rows
from cheetah.runtime.engine.launches import LoadedKernel

if TYPE_CHECKING:
    from cheetah.manifest import Manifest
    from cheetah.runtime.assembly.options import AssemblyOptions
    from cheetah.runtime.device.interface import Buffer, Device


def step_tokens(config: ModelConfig, gpu: Gpu, drafts: int, **overrides: Any) -> int:
    """Columns of a drafter's step: of a block that drafts so many tokens, and before it of what a step that verified
    them has made known; where such a step has no place in shared memory, of a block alone."""
    assert config.block is not None
    width = config.block.ahead + min(drafts, config.block.drafts)
    whole, alone = (next(size for size in STEP_TOKENS if size >= least) for least in (width + drafts + 1, width))
    return whole if has_plan(config, gpu, tokens=whole, **overrides) else alone


def options_of_blocks(options: AssemblyOptions, config: ModelConfig, gpu: Gpu, drafts: int) -> AssemblyOptions:
    """What a drafter of blocks, of so many tokens, is assembled by: one kernel does all."""
    overrides = {**options.overrides, "tokens": step_tokens(config, gpu, drafts, **options.overrides)}
    return replace(options, overrides=overrides, solo=False, prompt_passes=False)


def bytes_beside(config: ModelConfig, manifest: Manifest) -> int:
    """Of device memory, for what is beside the steps of that manifest's kernel."""
    kernels = block_kernels(config, manifest)
    buffers = sum(buffer.bytes for kernel in kernels for buffer in kernel.manifest.buffers)
    return buffers + (_logits_bytes(config, manifest) if len(kernels) > 1 else 0)


def put_together(
    device: Device, weights: Weights, manifest: Manifest, launcher: BlockLauncher, buffers: dict[str, Buffer]
) -> KnownRows:
    """Loads what is beside the steps that `launcher` launches. buffers: gets all of it, to be freed."""
    config = weights.config
    block = config.block
    assert block is not None
    rows, *others = (_loaded(device, config, made, buffers) for made in block_kernels(config, manifest))
    fc = rows.manifest.buffer("fc")
    rows.buffers["fc"].upload(padded_rows(weights.tensor(FC), fc.shape[0], len(block.layers), config.padded_hidden))
    markov = None
    if others:
        for name, buffer in zip(MARKOV, ("looked_up", "multiplied"), strict=True):
            count, width = others[0].manifest.buffer(buffer).shape
            others[0].buffers[buffer].upload(padded_rows(weights.tensor(name), count, 1, width))
        buffers["markov.logits"] = device.allocate(_logits_bytes(config, manifest), 0xFF)
        markov = MarkovChain(others[0], buffers["markov.logits"])
    if markov is not None:
        launcher.chain(markov)
    known = manifest.buffer("known_rows")
    return KnownRows(rows, buffers[known.name], known.bytes // known.shape[0])


def _logits_bytes(config: ModelConfig, manifest: Manifest) -> int:
    """Of one step's columns."""
    return Plan.from_dict(manifest.plan).tokens * config.vocab_size * np.dtype(np.float32).itemsize


def _loaded(device: Device, config: ModelConfig, made: Generated, buffers: dict[str, Buffer]) -> LoadedKernel:
    own = {one.name: new_buffer(device, one) for one in made.manifest.buffers}
    buffers.update({f"{made.manifest.kernel}.{name}": buffer for name, buffer in own.items()})
    return LoadedKernel(device, device.prepare(made.text, made.manifest), made.manifest, config, own)
