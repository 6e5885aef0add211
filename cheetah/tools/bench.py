"""Decode speed at given depths of the cache, beside the read ceiling measured in the same run.

A launch makes `steps` steps of one or several sequences, each after the tokens that it has cached. Its time is taken by
device events, and by the host's clock around the whole launch with the tokens read out; warm-up is not counted. Cached
keys and values are random numbers: speed does not depend on them. How it is shown is the command line's business.
GB = 1e9 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.package import Generated
from cheetah.plan import Plan, gpu_named
from cheetah.plan.defaults import default_context
from cheetah.plan.plan import DEFAULT_STEPS, STEP_TOKENS
from cheetah.runtime.assembly.assemble import GPU_TIMEOUT_S, new_cache
from cheetah.runtime.assembly.buffers import Weights, allocate_buffers, free_all, upload_weights
from cheetah.runtime.assembly.kernels import choose_gpu
from cheetah.runtime.assembly.memory import memory_of_buffers
from cheetah.runtime.device.group import buffers_of_ranks
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launcher import Launcher, Part, Sampling
from cheetah.runtime.engine.launches import LoadedKernel
from cheetah.tools.circumstances import clocks
from cheetah.tools.measured_ceiling import ReadCeiling
from cheetah.tools.random_buffers import fill_random, fill_with, random_cache
from cheetah.tools.regenerate import generate_named

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Argument, Buffer, Device, Event, Kernel

FIRST_TOKEN = 1
EMULATED = "emulated: not a speed"


@dataclass(frozen=True)
class Work:
    """What a launch finds and does. contexts: tokens cached of each sequence. shared: how many of them, from the first
    on, are the same pages in all. per_step: tokens of a step that each sequence has; above 1, they are a prompt's."""

    contexts: tuple[int, ...]
    shared: int = 0
    per_step: int = 1

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values have to be read in the first step, shared ones once."""
        shared = self.shared if len(self.contexts) > 1 else 0
        return sum(context - shared for context in self.contexts) + shared

    @property
    def tokens_per_step(self) -> int:
        """Of all sequences."""
        return len(self.contexts) * self.per_step

    def __str__(self) -> str:
        same = len(set(self.contexts)) == 1
        text = str(self.contexts[0]) if same else "+".join(map(str, self.contexts))
        text += f", {self.shared} shared" if self.shared else ""
        return text + (f", {self.per_step} a step" if self.per_step > 1 else "")


@dataclass(frozen=True)
class Measurement:
    """One work. Every list has an entry for each repetition.

    step_ms: by device events, a launch's time over its steps. host_step_ms: the same by the host's clock, preparing the
    launch and reading its tokens out included. bytes_per_step: weights, and K and V of the tokens cached before, shared
    ones once. ceilings_gb_per_s: before and after; None on the emulator. clocks: what nvidia-smi said right after,
    empty where there is none. rest_s: seconds before each launch in which the GPU did nothing.
    """

    work: Work
    steps: int
    step_ms: tuple[float, ...]
    host_step_ms: tuple[float, ...]
    bytes_per_step: int
    ceilings_gb_per_s: tuple[float, float] | None
    clocks: dict[str, float]
    rest_s: float = 0.0

    @property
    def ms_per_step(self) -> float:
        """The median."""
        return median(self.step_ms)

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together."""
        return 1e3 * self.work.tokens_per_step / self.ms_per_step

    @property
    def host_tokens_per_s(self) -> float:
        """Tokens a second as the host gets them, of all sequences together."""
        return 1e3 * self.work.tokens_per_step / median(self.host_step_ms)

    @property
    def gb_per_s(self) -> float:
        return self.bytes_per_step / self.ms_per_step / 1e6

    @property
    def ceiling_gb_per_s(self) -> float | None:
        """The mean of before and after."""
        return None if self.ceilings_gb_per_s is None else fmean(self.ceilings_gb_per_s)

    @property
    def share(self) -> float | None:
        """Of the ceiling, 0 to 1."""
        ceiling = self.ceiling_gb_per_s
        return None if ceiling is None else self.gb_per_s / ceiling


@dataclass(frozen=True)
class Traced:
    """stamps: nanoseconds, u64 [ranks, launches, blocks, phases, events], of each launch's last step, by the clock of
    each rank. step_ms: of each launch, by device events, over its steps."""

    stamps: NDArray[np.uint64]
    step_ms: tuple[float, ...]


class KernelBench:
    """A kernel on a device with its buffers, ready to be launched. Weights and what is cached are random numbers, but
    for `weights` that are given. decoding: the manifest by which they are packed."""

    def __init__(
        self, config: ModelConfig, weights: Weights | None, device: Device, generated: Generated, decoding: Manifest
    ) -> None:
        self.config, self.device, self.generated, self.manifest = config, device, generated, generated.manifest
        info, self.gpu = device.describe(), gpu_named(self.manifest.gpu["name"])
        memory_of_buffers(config, self.manifest.buffers).check(info.free_bytes, info.name)
        self._timed = TimedLaunches(device)
        self._buffers: dict[str, Buffer] = {}
        try:
            kernel = device.load(generated.text, self.manifest)
            allocate_buffers(device, self.manifest, self._buffers)
            if weights is None:
                fill_random(config, decoding, self._buffers)
            else:
                upload_weights(weights, decoding, self._buffers, lambda written: None, device)
            fill_with(self._buffers["kv"], random_cache(Plan.from_dict(decoding.plan)))
        except BaseException:
            self.close()
            raise
        timeout_s = None if self.gpu.emulated else GPU_TIMEOUT_S
        timed = cast("Device", self._timed)
        self._loaded = LoadedKernel(timed, kernel, self.manifest, config, self._buffers, timeout_s)

    @property
    def phases(self) -> tuple[str, ...]:
        """Those of a launch."""
        return self.manifest.phases

    def _stamps(self) -> NDArray[np.uint64]:
        """Of the last launch of a traced kernel: [ranks, blocks, phases, events]."""
        shape = self.manifest.buffer("timeline").shape
        return np.stack([one.download(np.uint64, shape) for one in buffers_of_ranks(self._buffers["timeline"])])

    def close(self) -> None:
        """Gives the device's memory back."""
        free_all(self._buffers)


class DecodeBench(KernelBench):
    """A model on a device, ready to be measured.

    name: as `cheetah generate` would be told. weights: the model's, or None for random ones, made in seconds. works,
    steps: what the kernel has room for. gpu: to generate for, by default the device's. ordinal: the GPU's number for
    nvidia-smi. plan: overrides. The kernel is the one that `cheetah generate` writes for these.
    """

    def __init__(
        self,
        config: ModelConfig,
        name: str,
        weights: Weights | None,
        device: Device,
        works: Sequence[Work | int],
        steps: int,
        gpu: str | None = None,
        ordinal: int = 0,
        *,
        traced: bool = False,
        **plan: Any,
    ) -> None:
        self._ordinal = ordinal
        room = room_for([as_work(work) for work in works], config, steps)
        machine = choose_gpu(device.describe(), gpu)
        generated = generate_named(config, name, machine.name, {**room, **plan}, traced=traced)
        for work in works:
            check_room(as_work(work), steps, Plan.from_dict(generated.manifest.plan))
        super().__init__(config, weights, device, generated, generated.manifest)
        self.launcher = Launcher(self._loaded, new_cache(config, self.manifest))

    def elapsed_ms(self) -> float:
        """Milliseconds of the last launch on the device."""
        return self._timed.elapsed_ms()

    @property
    def plan(self) -> Plan:
        """The kernel's."""
        return Plan.from_dict(self.manifest.plan)

    @cached_property
    def _ceiling(self) -> ReadCeiling | None:
        return None if self.gpu.emulated else ReadCeiling(self.device, self.gpu, self._buffers["weights"])

    def measure(self, work: Work | int, steps: int, repetitions: int, warmup: int, rest_s: float = 0.0) -> Measurement:
        """Ceiling, the model `repetitions` times after `warmup` launches, ceiling again. Before each launch the GPU
        rests for `rest_s` seconds: launches that follow one another make it hot, and hot ones may be slower.

        CheetahError if two repetitions make different tokens: such a kernel's speed is worth nothing.
        """
        work = as_work(work)
        before = self._ceiling.gb_per_s() if self._ceiling else 0.0
        launches = []
        for _ in range(warmup + repetitions):
            time.sleep(rest_s)
            launches.append(self._launch(work, steps))
        state = {} if self.gpu.emulated else clocks(self._ordinal)
        after = self._ceiling.gb_per_s() if self._ceiling else 0.0
        _check_same(work, launches)
        timed = launches[warmup:]
        step_bytes = self.manifest.step_bytes
        return Measurement(
            work=work,
            steps=steps,
            step_ms=tuple(milliseconds / steps for milliseconds, _, _ in timed),
            host_step_ms=tuple(1e3 * seconds / steps for _, seconds, _ in timed),
            bytes_per_step=step_bytes["weights"]
            + work.cached_tokens * step_bytes["kv_per_token"]
            + len(work.contexts) * step_bytes.get("state", 0),
            ceilings_gb_per_s=(before, after) if self._ceiling else None,
            clocks=state,
            rest_s=rest_s,
        )

    def trace(self, work: Work | int, steps: int, repetitions: int, warmup: int) -> Traced:
        """Time stamps of `repetitions` launches after `warmup` others, of a traced kernel."""
        launches, stamps = [], []
        for _ in range(warmup + repetitions):
            self._buffers["timeline"].fill(0)
            launches.append(self._launch(as_work(work), steps))
            stamps.append(self._stamps())
        _check_same(as_work(work), launches)
        milliseconds = tuple(milliseconds / steps for milliseconds, _, _ in launches[warmup:])
        return Traced(np.stack(stamps[warmup:], axis=1), milliseconds)

    def _launch(self, work: Work, steps: int) -> Launched:
        """One launch of the work."""
        parts = [
            Part(cache, (FIRST_TOKEN,) * (work.per_step * steps if work.per_step > 1 else 1), work.per_step * steps,
                 Sampling(), work.per_step)
            for cache in self._caches(work)
        ]  # fmt: skip
        self.forget()
        results = self.launcher.launch_together(parts)
        for part in reversed(parts):  # so that every launch finds the same pages, and the same random keys in them
            part.cache.clear()
        return self._timed.elapsed_ms(), results[0].seconds, tuple(result.token_ids for result in results)

    def forget(self) -> None:
        """Has no sequence remember anything, so that every launch begins with the same."""
        if "states" in self._buffers:
            self._buffers["states"].fill(0)

    def _caches(self, work: Work) -> list[CachedSequence]:
        """Sequences with so many tokens cached, whatever their values; the first `shared` in the same pages."""
        first = self.launcher.cache
        first.clear()
        first.reserve(work.shared)
        first.length = work.shared
        caches = [first, *(first.fork() for _ in work.contexts[1:])]
        for cache, context in zip(caches, work.contexts, strict=True):
            cache.length = context
        return caches


Launched = tuple[float, float, tuple[tuple[int, ...], ...]]
"""Milliseconds by events, seconds by the host's clock, tokens of every sequence."""


def as_work(work: Work | int) -> Work:
    """One sequence with so many tokens cached, unless it is a work already."""
    return work if isinstance(work, Work) else Work((work,))


def _check_same(work: Work, launches: Sequence[Launched]) -> None:
    if len({tokens for _, _, tokens in launches}) > 1:
        raise CheetahError(f"context {work}: the same launch made different tokens: its speed is worth nothing")


class TimedLaunches:
    """A device that records an event before and after each launch; all else it leaves to the device it stands for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: tuple[Event, Event] | None = None

    def launch(self, kernel: Kernel, arguments: dict[str, Argument]) -> None:
        before = self._device.record()
        self._device.launch(kernel, arguments)
        self._events = before, self._device.record()

    def elapsed_ms(self) -> float:
        """Milliseconds of the last launch on the device."""
        assert self._events is not None
        return self._device.elapsed_ms(*self._events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def room_for(works: Sequence[Work], config: ModelConfig, steps: int) -> dict[str, int]:
    """Plan fields for launches of these works. CheetahError where the model or a kernel has no room for them."""
    for work in works:
        check_depths(config, work.contexts, steps * work.per_step)
        if work.shared > min(work.contexts):
            raise CheetahError(f"context {work}: more tokens are shared than the shortest sequence has")
    most = max(max(work.contexts) + steps * work.per_step for work in works)
    batch = max(len(work.contexts) for work in works)
    columns = max(work.tokens_per_step for work in works)
    room = {**room_needed(config, most, steps), "batch": next(size for size in (1, 2, 4, 8, batch) if size >= batch)}
    if columns > room["batch"]:
        room["tokens"] = next((size for size in STEP_TOKENS if size >= columns), columns)
    return room


def check_room(work: Work, steps: int, plan: Plan) -> None:
    """CheetahError where fields of the plan that were given leave no room for a work."""
    if len(work.contexts) > plan.batch:
        raise CheetahError(f"context {work}: {len(work.contexts)} sequences, and batch is {plan.batch}: leave it out")
    if work.tokens_per_step > plan.tokens:
        raise CheetahError(f"context {work}: {work.tokens_per_step} tokens a step, and tokens is {plan.tokens}")
    if work.shared % plan.page_size:
        raise CheetahError(f"context {work}: whole pages are shared: use a multiple of {plan.page_size}")
    if steps > plan.max_steps:
        raise CheetahError(f"context {work}: {steps} steps, and max_steps is {plan.max_steps}: use fewer --steps")
    if max(work.contexts) + steps * work.per_step > plan.max_context:
        raise CheetahError(f"context {work} and {steps} steps: max_context is {plan.max_context}: leave it out")


def check_depths(config: ModelConfig, contexts: Sequence[int], steps: int) -> None:
    """CheetahError unless the model can make `steps` tokens after each of `contexts`."""
    most = config.max_position_embeddings
    for context in contexts:
        if context < 0 or context + steps > most:
            raise CheetahError(f"context {context} and {steps} steps: the model has positions for {most} tokens")


def room_needed(config: ModelConfig, tokens: int, steps: int) -> dict[str, int]:
    """Plan fields for `tokens` in the cache and `steps` a launch; the usual ones where they are enough."""
    return {
        "max_context": max(tokens, default_context(config.max_position_embeddings)),
        "max_steps": max(DEFAULT_STEPS, steps),
    }


def open_bench(*arguments: Any, **options: Any) -> AbstractContextManager[DecodeBench]:
    """A `DecodeBench` that is closed at the end."""
    return closing(DecodeBench(*arguments, **options))


def record(measurement: Measurement, bench: DecodeBench, circumstances: dict[str, Any]) -> dict[str, Any]:
    """One line of a results file. `circumstances`: commit, gpu, driver, backend, model, weights."""
    emulated = {"note": EMULATED} if bench.gpu.emulated else {}
    return {
        **circumstances,
        "clocks": measurement.clocks,
        "system": "cheetah",
        "batch": len(measurement.work.contexts),
        "context": measurement.work.contexts[0],
        "contexts": list(measurement.work.contexts),
        "shared": measurement.work.shared,
        "per_step": measurement.work.per_step,
        "kernel": bench.manifest.text_sha256[:16],
        **emulated,
        "tokens_per_s": _rounded(measurement.tokens_per_s),
        "ms_per_step": _rounded(measurement.ms_per_step),
        "ms_per_step_samples": _rounded(measurement.step_ms),
        "host_tokens_per_s": _rounded(measurement.host_tokens_per_s),
        "host_ms_per_step_samples": _rounded(measurement.host_step_ms),
        "bytes_per_step": measurement.bytes_per_step,
        "gb_per_s": _rounded(measurement.gb_per_s),
        "ceiling_gb_per_s": _rounded(measurement.ceiling_gb_per_s),
        "ceiling_gb_per_s_samples": _rounded(measurement.ceilings_gb_per_s),
        "share": _rounded(measurement.share),
        "repetitions": len(measurement.step_ms),
        "steps": measurement.steps,
        "rest_s": measurement.rest_s,
        "plan": bench.manifest.plan,
    }


def _rounded(value: float | Sequence[float] | None) -> float | list[float] | None:
    """Six significant digits: more were never measured."""
    if value is None:
        return None
    return float(f"{value:.6g}") if isinstance(value, float) else [float(f"{one:.6g}") for one in value]
