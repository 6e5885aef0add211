"""A pass over a prompt by itself: how long it takes on a device, and where its time goes. Nothing of the engine.

Weights, and the keys and values that are cached before the pass, are random numbers.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.generate import choose_plan, describe_kernel, generate_pass
from cheetah.models.config import ModelConfig
from cheetah.plan.prompt import pass_plan_for
from cheetah.runtime.assembly.assemble import new_cache
from cheetah.runtime.assembly.buffers import Weights
from cheetah.runtime.assembly.kernels import choose_gpu
from cheetah.runtime.device import Device
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launches import Part
from cheetah.runtime.engine.prompt_passes import PassLauncher, phases_of_keys
from cheetah.tools.bench import KernelBench, Traced

REST_S = 0.04
"""Before each pass that is traced: a GPU that has just done much lowers its clock."""


class PassBench(KernelBench):
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
        self.tokens, self.cached = tokens, cached
        machine = choose_gpu(device.describe(), gpu)
        self.plan = choose_plan(config, machine, **{"max_context": tokens + cached, **plan})
        self.pass_plan = pass_plan_for(machine, tokens, config.shape, cuts=not self.plan.kv_chunk)
        generated = generate_pass(config, machine, self.plan, self.pass_plan, traced=traced)
        decoding = describe_kernel(config, machine, self.plan)
        super().__init__(config, weights, device, generated, decoding)
        self._launcher = PassLauncher(self._loaded)
        self._cache = new_cache(config, decoding)
        ids = np.random.default_rng(0).integers(0, config.vocab_size, tokens)
        self._inputs = (*map(int, ids), 0)  # the token behind the last one is not used

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
        return self.manifest.phases[: phases_of_keys(self.manifest.phases, self.config.layers)]

    def trace(self, repetitions: int, warmup: int, rest_s: float = REST_S) -> Traced:
        """Time stamps of `phases` of so many launches, on a GPU each after a rest."""
        rest_s = 0.0 if self.gpu.emulated else rest_s
        milliseconds: list[float] = []
        stamps: list[NDArray[np.uint64]] = []
        for _ in range(warmup + repetitions):
            self._buffers["timeline"].fill(0)
            milliseconds += self.measure(1, 0, rest_s)
            stamps.append(self._stamps()[:, :, : len(self.phases)])
        return Traced(np.stack(stamps[warmup:], axis=1), tuple(milliseconds[warmup:]))

    def _launch(self) -> float:
        self._launcher.launch_together([Part(self._as_cached(), self._inputs, self.tokens)])
        return self._timed.elapsed_ms()

    def _as_cached(self) -> CachedSequence:
        """The sequence with as many tokens as are cached before the pass, in the same pages each time."""
        self._cache.clear()
        self._cache.reserve(self.cached)
        self._cache.length = self.cached
        return self._cache


def open_pass_bench(*arguments: Any, **options: Any) -> AbstractContextManager[PassBench]:
    """A `PassBench` that is closed at the end."""
    return closing(PassBench(*arguments, **options))
