"""Small Llamas with random weights, and a rig that launches their generated kernels in the emulator.

A rig compiles one kernel once; each session on it begins with poisoned or zeroed memory and a schedule of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.emulator import compile_program
from cheetah.errors import CheetahError
from cheetah.generate import generate_kernel
from cheetah.models.config import ModelConfig
from cheetah.models.dense.reference import Reference
from cheetah.models.dense.weights import tensor_shapes
from cheetah.models.llama import LlamaConfig
from cheetah.models.registry import family_of
from cheetah.package import Generated
from cheetah.plan import GPUS, Gpu, Plan
from cheetah.plan.kv.tables import epochs_of_step
from cheetah.runtime.assembly.buffers import allocate_buffers, upload_weights
from cheetah.runtime.device.emulator import EmulatorDevice, EmulatorKernel
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.launcher import Epochs, Launcher, Part, Sampling

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
        elif len(shape) == 1:
            values = 1 + 0.1 * values
        elif "embed" not in name:
            values *= 1.5 * shape[-1] ** -0.5
        return as_bf16(values)

    def tensor(self, name: str) -> NDArray[np.uint16]:
        return self.tensors[name]


def as_bf16(values: Any) -> NDArray[np.uint16]:
    """The bf16 bits of values."""
    return np.asarray(values).astype(ml_dtypes.bfloat16).view(np.uint16)


@cache
def random_weights(config: ModelConfig, seed: int = 0) -> RandomWeights:
    return RandomWeights(config, seed)


def float32_logits(weights: Any, ids: Sequence[int]) -> F32:
    """What the model means: the reference's logits [len(ids), vocab]."""
    return Reference(weights.config, weights.tensor).forward(ids)


def token_ids(count: int, vocab: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


def emulated_gpu(blocks: int) -> str:
    """The name of an emulated machine of any number of blocks; it is added to the known ones if it is not there."""
    for gpu in GPUS.values():
        if gpu.emulated and gpu.blocks == blocks:
            return gpu.name
    name = f"emulator-{blocks}"
    GPUS[name] = Gpu(name, "sm_90a", blocks, GPUS["emulator"].shared_bytes, 1.0, 2**33, "nominal", emulated=True)
    return name


class Rig:
    """One compiled kernel with its packed weights. `plan`: fields of the plan."""

    def __init__(
        self,
        weights: Any,
        *,
        blocks: int = 2,
        generate: Callable[..., Generated] = generate_kernel,
        sanitize: bool = False,
        **plan: Any,
    ) -> None:
        self.weights, self.config = weights, weights.config
        chosen = {"consumer_warps": 2, "max_context": 192, **plan}
        self.generated = generate(weights.config, emulated_gpu(blocks), **chosen)
        self.manifest = self.generated.manifest
        self.plan = Plan.from_dict(self.manifest.plan)
        parameters = [(parameter.name, parameter.ctype) for parameter in self.manifest.parameters]
        program = compile_program(self.generated.text, self.manifest.kernel, parameters, sanitize=sanitize)
        self.kernel = EmulatorKernel(self.manifest, program)
        self.constants: dict[str, Any] = {}
        allocate_buffers(EmulatorDevice(), self.manifest, self.constants)
        upload_weights(weights, self.manifest, self.constants, lambda written: None)

    def session(self, scheduler: str = "round_robin", seed: int = 0, **options: Any) -> Session:
        return Session(self, scheduler, seed, **options)


class Session:
    """Launches of a rig's kernel from a fresh state: KV pool, logits and tokens poisoned, exchange zeroed."""

    def __init__(
        self,
        rig: Rig,
        scheduler: str,
        seed: int,
        page_order: Iterable[int] | None = None,
        first_epoch: int = 1,
        launch_steps: int | None = None,
    ) -> None:
        self.rig, self.config = rig, rig.config
        self.device = EmulatorDevice(scheduler=scheduler, seed=seed)
        self.buffers: dict[str, Any] = {}
        allocate_buffers(self.device, rig.manifest, self.buffers)
        constant = (*family_of(rig.config).model_buffers(rig.config), "kv_scales")
        self.buffers.update({name: rig.constants[name] for name in constant if name in rig.constants})
        self.pool = PagePool(rig.plan.kv_pages, page_order)
        self.launcher = Launcher(self.device, rig.kernel, rig.manifest, rig.config, self.buffers, self.sequence())
        self.launcher._epochs = Epochs(epochs_of_step(rig.config.layers), first_epoch)
        self.launch_steps = launch_steps or self.launcher.max_steps
        rows = self.launcher.max_steps * rig.plan.tokens
        self.logits = self.device.allocate(rows * rig.config.vocab_size * 4, 0xFF)

    def sequence(self) -> CachedSequence:
        """An empty sequence over the session's pool."""
        return CachedSequence(self.pool, self.rig.plan.page_size, self.rig.plan.max_context)

    def score(self, ids: Sequence[int], per_step: int = 1) -> F32:
        """float32 [len(ids), vocab]: the logits after each id, `per_step` of them a step."""
        most = self.launch_steps * per_step
        parts = [ids[i : i + most] for i in range(0, len(ids), most)]
        return np.concatenate([self.launcher.score(part, self.logits, per_step) for part in parts])

    def score_together(self, ids: Sequence[Sequence[int]], caches: Sequence[CachedSequence]) -> list[F32]:
        """The logits after each id of several sequences, one token of each a step; all have equally many ids."""
        steps = len(ids[0])
        parts = [Part(cache, tokens, steps) for cache, tokens in zip(caches, ids, strict=True)]
        self.launcher.launch_together(parts, self.logits)
        found = self.logits.download(np.float32, (steps, self.rig.plan.tokens, self.config.vocab_size))
        order = [part for part, _ in self.launcher.columns]
        return [found[:, order.index(number)].copy() for number in range(len(ids))]

    def generate(
        self,
        ids: Sequence[int],
        count: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        **asked: Any,
    ) -> list[int]:
        """`count` tokens or fewer after `ids`, in one launch if `launch_steps` allows. asked: other fields of
        `Sampling`."""
        made: list[int] = []
        inputs = list(ids)
        sampling = Sampling(temperature, seed, tuple(stop_ids), **asked)
        cache = self.launcher.cache
        while len(made) < count:
            if len(inputs) > self.launch_steps:
                self.launcher.launch(inputs[: self.launch_steps + 1], self.launch_steps, sampling)
                inputs = inputs[self.launch_steps :]
                continue
            steps = min(len(inputs) - 1 + count - len(made), self.launch_steps)
            part = Part(cache, inputs, steps, sampling, known=[*ids, *made], prompt=len(ids))
            result = self.launcher.launch_together([part])[0]
            if result.has_failed:
                raise CheetahError("none of the logits is a number")
            made += result.token_ids
            if made[-1] in stop_ids:
                break
            inputs = made[-1:]
        return made

    def cached(self) -> NDArray[np.uint16]:
        """The bits of the KV pool [layers, pages, 2, kv_heads, page_size, head_dim]."""
        pool: NDArray[np.uint16] = self.buffers["kv"].download(np.uint16, self.rig.manifest.buffer("kv").shape)
        return pool

    def exchanged(self) -> NDArray[np.uint8]:
        """The bytes of the exchange: what the blocks published last, before later roundings hide differences."""
        return self.buffers["exchange"].array.copy()


def relative_error(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    """The largest relative L2 error of a row; NaN if there is one."""
    difference = np.linalg.norm(got.astype(np.float64) - wanted, axis=-1)
    return float((difference / np.linalg.norm(wanted, axis=-1)).max())


def bits(values: F32) -> NDArray[np.uint32]:
    """float32 as its bits, so that equal means equal."""
    return np.ascontiguousarray(values).view(np.uint32)
