"""Small Llamas with random weights, and the rig (`cheetah.tools.rig`) of their kernels of decode steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cheetah.caches import cache_folder
from cheetah.generate import generate_kernel
from cheetah.models.config import ModelConfig
from cheetah.models.dense.reference import Reference
from cheetah.models.dense.weights import tensor_shapes
from cheetah.models.llama import LlamaConfig
from cheetah.models.rounding import as_bf16
from cheetah.package import Generated
from cheetah.plan import GPUS, Gpu, gpu_named
from cheetah.runtime.assembly.texts import KeptTexts
from cheetah.tools import rig as tools
from cheetah.tools.rig import Session

__all__ = ["Session", "as_bf16"]

F32 = NDArray[np.float32]


def model(
    hidden: int = 48,
    ffn: int = 40,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    vocab: int = 50,
    **more: Any,
) -> LlamaConfig:
    """A shape; by default one of which nothing divides 32, and that runs fast."""
    named = {"max_position_embeddings": 256, **more}
    return LlamaConfig(hidden, ffn, layers, heads, kv_heads, head_dim, vocab, **named)


class RandomWeights:
    """Random bf16 tensors by name, as a checkpoint gives them. Norm weights are near 1, sums keep their size."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        draw = np.random.default_rng(seed)
        self.tensors = {name: self._draw(draw, name, shape) for name, shape in tensor_shapes(config).items()}

    @staticmethod
    def _draw(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.uint16]:
        values = draw.standard_normal(shape)
        if name.endswith(".bias"):
            values *= 0.5
        elif name.endswith(".sinks"):
            values *= 2.0
        elif len(shape) == 1:
            values = 1 + 0.1 * values
        elif "embed" not in name:
            values *= 1.5 * shape[-1] ** -0.5
        return as_bf16(values)

    def tensor(self, name: str) -> NDArray[np.uint16]:
        return self.tensors[name]


@cache
def random_weights(config: ModelConfig, seed: int = 0) -> RandomWeights:
    return RandomWeights(config, seed)


def float32_logits(weights: Any, ids: Sequence[int]) -> F32:
    """What the model means: the reference's logits [len(ids), vocab]."""
    return Reference(weights.config, weights.tensor).forward(ids)


def token_ids(count: int, vocab: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


def emulated_gpu(blocks: int, kv_chunk_min: int = 64) -> str:
    """The name of an emulated machine of any number of blocks; it is added to the known ones if it is not there.
    kv_chunk_min: fewest keys of an item of attention there."""
    for gpu in GPUS.values():
        if gpu.emulated and (gpu.blocks, gpu.kv_chunk_min) == (blocks, kv_chunk_min):
            return gpu.name
    name = f"emulator-{blocks}-{kv_chunk_min}"
    GPUS[name] = replace(GPUS["emulator"], name=name, blocks=blocks, kv_chunk_min=kv_chunk_min)
    return name


def plain_kernel(*arguments: Any, **named: Any) -> Generated:
    """`generate_kernel`, of which sequences may ask for nothing but temperature and seed: without masks, biases,
    penalties and filters it takes g++ three quarters of the time, and the generator half."""
    with pytest.MonkeyPatch.context() as patch:
        for part in ("Adjustments", "Filters"):
            patch.setattr(f"cheetah.models.dense.head_parts.{part}", lambda *given: None)
        return generate_kernel(*arguments, **named)


def kept(generate: Callable[..., Generated]) -> Callable[..., Generated]:
    """The generator, asked once for all workers and runs, as long as neither the package nor the file of the
    configuration's class changes; not for kernels with something planted in them."""

    def made(config: ModelConfig, gpu: str | Gpu, *given: Any, **plan: Any) -> Generated:
        source = Path(inspect.getfile(type(config))).read_text()
        machine = gpu_named(gpu) if isinstance(gpu, str) else gpu
        asked = [generate.__name__, source, *map(repr, (config, machine, *given)), plan]
        found = KeptTexts(cache_folder() / "texts").get(asked, lambda: generate(config, gpu, *given, **plan))
        return Generated(found.text, found.manifest)

    return made


kept_kernel = kept(plain_kernel)


class Rig(tools.Rig):
    """One kernel of decode steps with its packed weights. kv_chunk_min: of the machine. `plan`: fields of the plan.
    generate: `generate_kernel` where a test asks for filters or the like."""

    def __init__(
        self,
        weights: Any,
        *,
        blocks: int = 2,
        kv_chunk_min: int = 64,
        generate: Callable[..., Generated] = plain_kernel,
        sanitize: bool = False,
        watched: bool = False,
        **plan: Any,
    ) -> None:
        chosen = {"consumer_warps": 2, "max_context": 192, **plan}
        made = generate(weights.config, emulated_gpu(blocks, kv_chunk_min), **chosen)
        super().__init__(weights, made, sanitize=sanitize, watched=watched)


def fill_cache(session: Session, tokens: int, seed: int = 0) -> None:
    """The session's sequence has so many tokens, with keys and values drawn at random: as behind other launches."""
    launcher, buffer = session.launcher, session.buffers["kv"]
    launcher.make_room(launcher.cache, tokens)
    pool = buffer.download(np.uint16, session.rig.manifest.buffer("kv").shape)  # [layers, pages, 2, kv_heads, slots, D]
    drawn, slots = as_bf16(np.random.default_rng(seed).standard_normal(pool.shape)), pool.shape[4]
    for number, page in enumerate(launcher.cache.pages):
        there = slice(0, max(0, tokens - number * slots))
        pool[:, page, :, :, there] = drawn[:, page, :, :, there]
    buffer.upload(pool)
    launcher.cache.length = tokens


def relative_error(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    """The largest relative L2 error of a row; NaN if there is one."""
    difference = np.linalg.norm(got.astype(np.float64) - wanted, axis=-1)
    return float((difference / np.linalg.norm(wanted, axis=-1)).max())


def bits(values: F32) -> NDArray[np.uint32]:
    """float32 as its bits, so that equal means equal."""
    return np.ascontiguousarray(values).view(np.uint32)


def same_bits_alone(rig: Rig, several: Sequence[Sequence[int]]) -> list[F32]:
    """The logits of sequences that share steps, which are those that each has by itself."""
    session = rig.session("priority", 2)
    together = session.score_together(several, [session.sequence() for _ in several])
    for ids, found in zip(several, together, strict=True):
        session = rig.session("random", 1)
        np.testing.assert_array_equal(bits(found), bits(session.score_together([ids], [session.sequence()])[0]))
    return together
