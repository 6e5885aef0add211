"""Kernels of one model under several plans, on one device and over the same weights, measured in turn.

The weights are random numbers and are uploaded once: under another plan the same bytes are another matrix, which takes
as long to multiply with. So no plan needs them packed again, and no checkpoint is needed at all. GB = 1e9 bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, cast

from cheetah.errors import CheetahError
from cheetah.models.config import ModelConfig
from cheetah.plan import Gpu, Plan
from cheetah.runtime.assembly.assemble import GPU_TIMEOUT_S, new_cache
from cheetah.runtime.assembly.buffers import free_all, new_buffer
from cheetah.runtime.assembly.compile import compile_cubin
from cheetah.runtime.assembly.kernels import shared_buffers
from cheetah.runtime.assembly.memory import memory_of_buffers
from cheetah.runtime.engine.launcher import Launcher, Sampling
from cheetah.tools.bench import FIRST_TOKEN, TimedLaunches, fill_random, fill_with, random_cache, room_needed
from cheetah.tools.regenerate import generate_named
from cheetah.tools.tune import choice_of

if TYPE_CHECKING:
    from cheetah.package import Generated
    from cheetah.runtime.device.interface import Buffer, Device

MOST_COMPILERS = 8


@dataclass
class PlanVariant:
    """A plan's kernel. launcher: None if it was not loaded. remark: why it is not measured, or "". ms_per_step: medians
    by context, of the last time it was measured. tokens: what the launches at a context must all make."""

    plan: Plan
    launcher: Launcher | None
    remark: str
    ms_per_step: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """The geometric mean over the contexts, so that a long one counts no more than a short one; infinite for a
        variant that was not measured."""
        if not self.ms_per_step:
            return math.inf
        return math.exp(fmean(math.log(value) for value in self.ms_per_step.values()))


class Variants:
    """Variants of a model on a device. contexts: tokens in the cache before a launch. steps: of a launch. Close it."""

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        device: Device,
        gpu: Gpu,
        contexts: Sequence[int],
        steps: int,
        repetitions: int,
    ) -> None:
        self.config, self.name, self.gpu = config, name, gpu
        self.contexts, self.steps, self.repetitions = contexts, steps, repetitions
        self.room = room_needed(config, max(contexts) + steps, steps)
        self.found: dict[Plan, PlanVariant] = {}
        self._device, self._timed = device, TimedLaunches(device)
        self._texts: dict[Plan, Generated] = {}
        self._own: list[dict[str, Buffer]] = []
        self._shared: dict[str, Buffer] = {}
        self._compilers: ProcessPoolExecutor | None = None
        self._compiling: dict[Plan, Future[None]] = {}

    def fill(self, rule: Plan) -> None:
        """Allocates what all share (no searched field changes its size), and fills it. CheetahError if the model does
        not fit."""
        manifest = self._generated(rule).manifest
        info = self._device.describe()
        memory_of_buffers(self.config, manifest.buffers).check(info.free_bytes, info.name)
        for buffer in manifest.buffers:
            if buffer.name in shared_buffers(self.config):
                self._shared[buffer.name] = self._device.allocate(buffer.bytes)
        fill_random(self.config, manifest, self._shared)
        fill_with(self._shared["kv"], random_cache(rule))

    def compile_ahead(self, plans: Sequence[Plan]) -> None:
        """Has other processes compile into the cache: NVRTC compiles one text at a time in a process."""
        if self.gpu.emulated:
            return
        if self._compilers is None:
            workers = max(1, min(MOST_COMPILERS, os.cpu_count() or 1))
            self._compilers = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        for plan in plans:
            if plan not in self._compiling and plan not in self.found:
                generated = self._generated(plan)
                job = self._compilers.submit(_compile, generated.text, generated.manifest.kernel)
                self._compiling[plan] = job

    def measure(self, plans: Sequence[Plan], repetitions: int | None = None) -> list[float]:
        """Scores of the plans, measured in turn: there, back, there, ... after a warm-up launch of each.

        All share one cache, and under another packing the weights are another model: what a launch at a short context
        appends is read at a longer one. So tokens are compared among the launches of one context and one call.
        """
        self.compile_ahead(plans)
        variants = [self.variant(plan) for plan in plans]
        loaded = [variant for variant in variants if variant.launcher is not None]
        for context in self.contexts:
            for variant in loaded:
                variant.tokens.pop(context, None)
                self._launch(variant, context)
            taken: list[list[float]] = [[] for _ in loaded]
            for repetition in range(repetitions or self.repetitions):
                turn = list(zip(loaded, taken, strict=True))
                for variant, samples in reversed(turn) if repetition % 2 else turn:
                    samples.append(self._launch(variant, context))
            for variant, samples in zip(loaded, taken, strict=True):
                variant.ms_per_step[context] = median(samples)
        return [variant.score for variant in variants]

    def variant(self, plan: Plan) -> PlanVariant:
        """The plan's kernel, loaded when first asked for."""
        if plan not in self.found:
            self.found[plan] = self._load(plan)
        return self.found[plan]

    def _load(self, plan: Plan) -> PlanVariant:
        if plan in self._compiling:
            self._compiling.pop(plan).exception()  # what went wrong there goes wrong here, with its message
        generated = self._generated(plan)
        manifest = generated.manifest
        kernel = self._device.load(generated.text, manifest)
        cubin = getattr(kernel, "cubin", None)
        if cubin is not None and cubin.resources.uses_local_memory:
            return PlanVariant(plan, None, "spills")
        own: dict[str, Buffer] = {}
        self._own.append(own)
        for buffer in manifest.buffers:
            if buffer.name not in shared_buffers(self.config):
                own[buffer.name] = new_buffer(self._device, buffer)
        timeout_s = None if self.gpu.emulated else GPU_TIMEOUT_S
        buffers, timed = {**self._shared, **own}, cast("Device", self._timed)
        cache = new_cache(self.config, plan)
        return PlanVariant(plan, Launcher(timed, kernel, manifest, self.config, buffers, cache, timeout_s), "")

    def _generated(self, plan: Plan) -> Generated:
        if plan not in self._texts:
            options = {**self.room, **choice_of(plan)}
            self._texts[plan] = generate_named(self.config, self.name, self.gpu.name, options)
        return self._texts[plan]

    def _launch(self, variant: PlanVariant, context: int) -> float:
        """Milliseconds a step. CheetahError if the variant makes other tokens than before: it is worth nothing."""
        assert variant.launcher is not None
        variant.launcher.cache.clear()
        variant.launcher.cache.length = context
        result = variant.launcher.launch((FIRST_TOKEN,), self.steps, Sampling())
        if variant.tokens.setdefault(context, result.token_ids) != result.token_ids:
            raise CheetahError(f"{choice_of(variant.plan)}: the same launch made different tokens at context {context}")
        return self._timed.elapsed_ms() / self.steps

    def close(self) -> None:
        """Gives the device's memory back, and ends the compilers."""
        if self._compilers is not None:
            self._compilers.shutdown(cancel_futures=True)
        for buffers in (*self._own, self._shared):
            free_all(buffers)


def _compile(text: str, kernel: str) -> None:
    """In a process of its own."""
    compile_cubin(text, kernel)


@contextmanager
def open_variants(*arguments: Any, **options: Any) -> Iterator[Variants]:
    """`Variants` that are closed at the end."""
    with ExitStack() as stack:
        variants = Variants(*arguments, **options)
        stack.callback(variants.close)
        yield variants
