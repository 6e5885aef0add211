"""Generated kernels in the emulator, with a model's weights: what checks and tests launch.

A rig compiles kernels of one model once and packs its weights once; each session on it begins with poisoned or zeroed
memory, pages in an order of its own, and a schedule of its own. Launches are prepared by the runtime itself, so what
is judged is what is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.emulator import compile_program
from cheetah.errors import CheetahError
from cheetah.generate import describe_kernel
from cheetah.models.config import ModelConfig
from cheetah.models.dense import head as head_program
from cheetah.models.dense import program
from cheetah.models.dense import prompt as pass_program
from cheetah.models.family import ReadRows, ReadTensor, Tensors
from cheetah.models.registry import family_of
from cheetah.models.rounding import F32, as_bf16, widen
from cheetah.package import Generated
from cheetah.plan import Gpu, Plan
from cheetah.plan.kv.tables import epochs_of_step
from cheetah.runtime.assembly.buffers import Weights, allocate_buffers, upload_weights
from cheetah.runtime.assembly.kernels import pool_states
from cheetah.runtime.device.emulator import EmulatorDevice, EmulatorKernel
from cheetah.runtime.device.group import EmulatorGroup, buffers_of_ranks
from cheetah.runtime.engine.heads import HeadLauncher
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.launcher import Epochs, Launcher, Part, Sampling
from cheetah.runtime.engine.launches import LoadedKernel
from cheetah.runtime.engine.prompt_passes import PassLauncher
from cheetah.runtime.engine.states import StatePool

OF_ALL_KERNELS = ("kv", "states", "hidden_states", "features")
"""Buffers that a launch writes and another kernel's reads."""


@dataclass(frozen=True)
class GivenWeights:
    """A model's tensors as the runtime's packing wants them."""

    config: ModelConfig
    tensor: ReadTensor
    rows: ReadRows | None = None
    kv_scales: F32 | None = None


def weights_of(config: ModelConfig, tensors: Tensors, kv_scales: F32 | None = None) -> GivenWeights:
    """The weights that `tensors` gives by name; its `rows`, where it has them, reads matrices in parts."""
    read = tensors.__getitem__ if isinstance(tensors, Mapping) else tensors
    return GivenWeights(config, read, getattr(tensors, "rows", None), kv_scales)


def compiled(made: Generated, *, sanitize: bool = False, watched: bool = False, often: bool = False) -> EmulatorKernel:
    """A kernel for the emulator, see `compile_program`. CheetahError where the text is not the manifest's."""
    made.manifest.check_text(made.text)
    parameters = [(parameter.name, parameter.ctype) for parameter in made.manifest.parameters]
    program = compile_program(
        made.text, made.manifest.kernel, parameters, sanitize=sanitize, watched=watched, often=often
    )
    return EmulatorKernel(made.manifest, program)


class Rig:
    """Kernels of one model, over the same weights and the same cache: of decode steps, of passes over prompts, of the
    head, whichever are given. `manifest` and `plan` are of decode steps."""

    def __init__(self, weights: Weights, *made: Generated, **mode: bool) -> None:
        self.weights, self.config = weights, weights.config
        self.family = family_of(self.config)
        first = made[0].manifest
        self.gpu = Gpu(**first.gpu, ranks=first.world_size)
        self.plan = Plan.from_dict(first.plan.get("decoding", first.plan))
        self.manifest = describe_kernel(self.config, self.gpu, self.plan)
        self.made = {one.manifest.kernel: one for one in made}
        self.kernels = {one.manifest.kernel: compiled(one, **mode) for one in made}
        self.constants: dict[str, Any] = {}
        others = [buffer.name for buffer in self.manifest.buffers if buffer.name in ("kv_scales", "router_rows")]
        for name in (*self.family.model_buffers(self.config), *others):
            self.constants[name] = self.emulated().allocate(self.manifest.buffer(name).bytes)
        upload_weights(weights, self.manifest, self.constants, lambda written: None)

    def emulated(self, **schedule: Any) -> EmulatorDevice | EmulatorGroup:
        """A device of as many ranks as the kernels are of."""
        devices = [EmulatorDevice(**schedule) for _ in range(self.gpu.ranks)]
        return devices[0] if len(devices) == 1 else EmulatorGroup(devices)

    def session(self, scheduler: str = "round_robin", seed: int = 0, **options: Any) -> Session:
        """A fresh state under a schedule; options: of `Session`."""
        return Session(self, self.emulated(scheduler=scheduler, seed=seed), **options)


class Session:
    """Launches of a rig's kernels from a fresh state. page_order: in which the pool hands its pages out."""

    def __init__(
        self,
        rig: Rig,
        device: EmulatorDevice | EmulatorGroup,
        page_order: Iterable[int] | None = None,
        first_epoch: int = 1,
        launch_steps: int | None = None,
    ) -> None:
        self.rig, self.config, self.plan, self.device = rig, rig.config, rig.plan, device
        self.pool = PagePool(rig.plan.kv_pages, page_order, StatePool(pool_states(rig.manifest)))
        self._shared = dict(rig.constants)
        steps, head, passes = (rig.kernels.get(one.KERNEL_NAME) for one in (program, head_program, pass_program))
        if steps is not None:
            self.buffers = self._buffers_of(steps)
            self.launcher = Launcher(self._loaded(steps, self.buffers), self.sequence())
            self.launcher._epochs = Epochs(epochs_of_step(rig.config.layers), first_epoch)
            self.launch_steps = launch_steps or self.launcher.max_steps
            self.logits = device.allocate(self.launcher.max_steps * rig.plan.tokens * rig.config.vocab_size * 4, 0xFF)
        self.head = None
        if head is not None:
            self.head = HeadLauncher(self._loaded(head, self._buffers_of(head)))
        if passes is not None:
            rows = passes.manifest.plan["tokens"] * rig.config.padded_hidden
            self._shared.setdefault("hidden_states", device.allocate(2 * rows))
            self.buffers = self._buffers_of(passes)
            self.passes = PassLauncher(self._loaded(passes, self.buffers), self.head)

    def _loaded(self, kernel: EmulatorKernel, buffers: dict[str, Any]) -> LoadedKernel:
        return LoadedKernel(self.device, kernel, kernel.manifest, self.config, buffers)

    def _buffers_of(self, kernel: EmulatorKernel) -> dict[str, Any]:
        own = dict(self._shared)
        allocate_buffers(self.device, kernel.manifest, own)
        self._shared |= {name: own[name] for name in OF_ALL_KERNELS if name in own}
        return own

    def sequence(self) -> CachedSequence:
        """An empty sequence over the session's pool."""
        return CachedSequence(self.pool, self.plan.page_size, self.plan.max_context)

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
        return self.logits_of_parts(steps, len(ids))

    def logits_of_parts(self, steps: int, count: int) -> list[F32]:
        """float32 [steps, vocab]: of each of `count` parts of the last launch, one token of each a step."""
        found = self.logits.download(np.float32, (steps, self.plan.tokens, self.config.vocab_size))
        order = [part for part, _ in self.launcher.columns]
        return [found[:, order.index(number)].copy() for number in range(count)]

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

    def cached(self) -> NDArray[Any]:
        """The bits of the KV pool [layers, pages, 2, kv_heads, page_size, head_dim]: u16, or u8 of e4m3 codes. Of
        several ranks the heads of all, one behind the other."""
        buffer = self.rig.manifest.buffer("kv")
        kind = np.uint8 if buffer.dtype == "u8" else np.uint16
        return np.concatenate(
            [part.download(kind, buffer.shape) for part in buffers_of_ranks(self.buffers["kv"])], axis=3
        )

    def cache(self, pool: NDArray[Any]) -> None:
        """Makes this the KV pool."""
        parts = buffers_of_ranks(self.buffers["kv"])
        for part, heads in zip(parts, np.split(pool, len(parts), axis=3), strict=True):
            part.upload(heads)

    def states(self) -> NDArray[np.uint32]:
        """What sequences remember in layers of Gated DeltaNet, u32 [states, layers, shares, words], if they do."""
        if "states" not in self.buffers:
            return np.zeros(0, np.uint32)
        shape = self.rig.manifest.buffer("states").shape
        parts = [part.download(np.uint32, shape) for part in buffers_of_ranks(self.buffers["states"])]
        return np.concatenate(parts, axis=2)

    def remembered_by(self, cache: CachedSequence) -> NDArray[np.uint32]:
        """What a sequence remembers, u32 [layers, shares, words]; nothing where it has no state."""
        return self.states()[cache.state].copy() if cache.state is not None else np.zeros(0, np.uint32)

    def remember(self, state: int, words: NDArray[np.uint32]) -> None:
        """Makes these [layers, shares, words] the words of a state; each rank has its heads' shares."""
        parts = buffers_of_ranks(self.buffers["states"])
        for part, own in zip(parts, np.split(words, len(parts), axis=1), strict=True):
            part.upload(np.ascontiguousarray(own), state * own.nbytes)

    def words_of(self, name: str) -> list[NDArray[np.uint16]]:
        """A buffer's words of 16 bits, as every rank has them."""
        return [part.array.view(np.uint16) for part in buffers_of_ranks(self.buffers[name])]

    def cached_of(self, cache: CachedSequence) -> NDArray[Any]:
        """The bits of a sequence's keys and values [layers, 2, kv_heads, tokens, head_dim]."""
        pages = self.cached()[:, cache.pages].transpose(0, 2, 3, 1, 4, 5)
        layers, _, kv_heads, _, _, head_dim = pages.shape
        return np.ascontiguousarray(pages.reshape(layers, 2, kv_heads, -1, head_dim)[:, :, :, : cache.length])

    def stored(self, numbers: F32) -> NDArray[Any]:
        """Keys and values [layers, 2, kv_heads, ...] as the pool has them."""
        if self.plan.kv_dtype == "bf16":
            return as_bf16(numbers)
        return (numbers / self._kv_scales).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    def numbers_of(self, cached: NDArray[Any]) -> F32:
        """Cached bits [layers, 2, kv_heads, ...] as the numbers that they stand for."""
        if cached.dtype == np.uint16:
            return widen(cached)
        return np.asarray(cached.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * self._kv_scales)

    @property
    def _kv_scales(self) -> F32:
        """f32 [layers, 2, kv_heads, 1, 1]."""
        shape = self.rig.manifest.buffer("kv_scales").shape
        parts = (
            part.download(np.float32, (*shape, 1, 1)) for part in buffers_of_ranks(self.rig.constants["kv_scales"])
        )
        return np.concatenate([*parts], axis=2)

    def exchanged(self) -> NDArray[np.uint8]:
        """The bytes of the exchange: what the blocks published last, before later roundings hide differences."""
        return np.concatenate([part.array for part in buffers_of_ranks(self.buffers["exchange"])])
