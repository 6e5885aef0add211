"""A pass over a prompt by itself: how long it takes on a device, and where its time goes. Nothing of the engine.

Weights, and the keys and values that are cached before the pass, are random numbers.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, closing
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cheetah.generate import choose_plan, describe_kernel, generate_pass
from cheetah.models.config import ModelConfig
from cheetah.plan.prompt import pass_plan_for
from cheetah.runtime.assembly.assemble import GPU_TIMEOUT_S, new_cache
from cheetah.runtime.assembly.buffers import Weights, allocate_buffers, free_all, upload_weights
from cheetah.runtime.assembly.kernels import choose_gpu
from cheetah.runtime.assembly.memory import memory_of_buffers
from cheetah.runtime.device import Device
from cheetah.runtime.device.interface import Buffer
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launches import LoadedKernel, Part
from cheetah.runtime.engine.prompt_passes import PassLauncher
from cheetah.tools.bench import TimedLaunches, Traced, fill_random, fill_with, random_cache


class PassBench:
    """A kernel of passes on a device.

    tokens, cached: of the prompt, read together, and before them in the cache; the kernel is that by which the engine
    reads so many. weights: the model's, or None for random ones, made in seconds. traced: with time stamps. gpu: to
    generate for, by default the device's. plan: overrides of the decode kernel's, beside which it lies.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights | None,
        device: Device,
        tokens: int,
        cached: int,
        gpu: str | None = None,
        *,
        traced: bool = False,
        **plan: Any,
    ) -> None:
        self.tokens, self.cached, self.config = tokens, cached, config
        info = device.describe()
        self.gpu = choose_gpu(info, gpu)
        self.plan = choose_plan(config, self.gpu, **{"max_context": tokens + cached, **plan})
        self.pass_plan = pass_plan_for(self.gpu, tokens, self.config.head_dim, cuts=not self.plan.kv_chunk)
        self.generated = generate_pass(config, self.gpu, self.plan, self.pass_plan, traced=traced)
        self.manifest = self.generated.manifest
        memory_of_buffers(config, self.manifest.buffers).check(info.free_bytes, info.name)
        self._timed = TimedLaunches(device)
        self._buffers: dict[str, Buffer] = {}
        try:
            self._prepare(weights, device)
        except BaseException:
            self.close()
            raise

    def _prepare(self, weights: Weights | None, device: Device) -> None:
        kernel = device.load(self.generated.text, self.manifest)
        allocate_buffers(device, self.manifest, self._buffers)
        decoding = describe_kernel(self.config, self.gpu, self.plan)
        if weights is None:
            fill_random(self.config, decoding, self._buffers)
        else:
            upload_weights(weights, decoding, self._buffers, lambda written: None, device)
        fill_with(self._buffers["kv"], random_cache(self.plan))
        timeout_s = None if self.gpu.emulated else GPU_TIMEOUT_S
        timed = cast("Device", self._timed)
        self._launcher = PassLauncher(LoadedKernel(timed, kernel, self.manifest, self.config, self._buffers, timeout_s))
        self._cache = new_cache(self.config, decoding)
        ids = np.random.default_rng(0).integers(0, self.config.vocab_size, self.tokens)
        self._inputs = (*map(int, ids), 0)  # what follows the last token is nobody's

    def measure(self, repetitions: int, warmup: int, rest_s: float = 0.0) -> tuple[float, ...]:
        """Milliseconds of each launch by device events, each after `rest_s` seconds in which the GPU does nothing."""
        found = []
        for _ in range(warmup + repetitions):
            time.sleep(rest_s)
            found.append(self._launch())
        return tuple(found[warmup:])

    @property
    def phases(self) -> tuple[str, ...]:
        """Those of a launch that leaves keys and values, and no hidden states."""
        return self.manifest.phases[: self.manifest.phases.index(f"layer {self.config.layers - 1} attention")]

    def trace(self, repetitions: int, warmup: int, rest_s: float = 0.0) -> Traced:
        """Time stamps of `phases` of so many launches."""
        spec, buffer = self.manifest.buffer("timeline"), self._buffers["timeline"]
        milliseconds: list[float] = []
        stamps: list[NDArray[np.uint64]] = []
        for _ in range(warmup + repetitions):
            buffer.fill(0)
            milliseconds += self.measure(1, 0, rest_s)
            stamps.append(buffer.download(np.uint64, spec.shape)[:, : len(self.phases)])
        return Traced(np.stack(stamps[warmup:]), tuple(milliseconds[warmup:]))

    def _launch(self) -> float:
        self._launcher.launch_together([Part(self._as_cached(), self._inputs, self.tokens)])
        return self._timed.elapsed_ms()

    def _as_cached(self) -> CachedSequence:
        """The sequence with as many tokens as are cached before the pass, in the same pages each time."""
        self._cache.clear()
        self._cache.reserve(self.cached)
        self._cache.length = self.cached
        return self._cache

    def close(self) -> None:
        """Gives the device's memory back."""
        free_all(self._buffers)


def open_pass_bench(*arguments: Any, **options: Any) -> AbstractContextManager[PassBench]:
    """A `PassBench` that is closed at the end."""
    return closing(PassBench(*arguments, **options))
