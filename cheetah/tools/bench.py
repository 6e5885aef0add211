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
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.models.formats import format_of, is_sparse_name
from cheetah.models.registry import family_of
from cheetah.package import Generated
from cheetah.plan import Gpu, MatrixLayout, Plan, StepMatrices, gpu_named, step_matrices
from cheetah.plan.defaults import default_context
from cheetah.plan.delta import DIMS
from cheetah.plan.formats import BF16, BlockRows, QuantizedTiles
from cheetah.plan.plan import DEFAULT_STEPS, STEP_TOKENS
from cheetah.runtime.assembly.assemble import GPU_TIMEOUT_S, new_cache
from cheetah.runtime.assembly.buffers import Weights, allocate_buffers, free_all, upload_weights
from cheetah.runtime.assembly.kernels import choose_gpu
from cheetah.runtime.assembly.memory import memory_of_buffers
from cheetah.runtime.checkpoint.random_weights import RandomTensors, random_scheme, random_tensors
from cheetah.runtime.device.group import buffers_of_ranks, first_of, part_of_first
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launcher import Launcher, Part, Sampling
from cheetah.runtime.engine.launches import LoadedKernel
from cheetah.tools.ceiling import STAGE_BYTES, generate_ceiling
from cheetah.tools.circumstances import clocks
from cheetah.tools.regenerate import generate_named

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Argument, Buffer, Device, Event, Kernel

FIRST_TOKEN = 1
TILE_ELEMENTS = 2**24 - 3  # a prime, so that no two rows of a matrix are the same
CEILING_ROUNDS = 900  # chunks of 64 KB for each block: 7.8 GB on 132 blocks
CEILING_CHAIN = 8  # launches that are timed together, as decode steps are: a launch's beginning and end cost 1 to 2 %
CEILING_SAMPLES, CEILING_WARMUP = 7, 2
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


class ReadCeiling:
    """How fast this device reads memory by bulk copies, measured when asked.

    It reads memory of its own, or, where that does not fit beside the model, the model's weights. Of several GPUs it is
    measured on the first.
    """

    def __init__(self, device: Device, gpu: Gpu, weights: Buffer) -> None:
        self._device = device = first_of(device)
        gpu, weights = replace(gpu, ranks=1), part_of_first(weights)
        ceiling = generate_ceiling(gpu)
        self._kernel = device.load(ceiling.text, ceiling.manifest)
        self._sink = device.allocate(4 * gpu.blocks)
        round_bytes = gpu.blocks * STAGE_BYTES
        wanted = CEILING_ROUNDS * round_bytes
        self._is_own = device.describe().free_bytes > wanted + 2**28 or wanted > 4 * weights.nbytes
        self._data = device.allocate(wanted) if self._is_own else weights
        if self._is_own:
            fill_with(self._data, random_bits(1.0))
        self._rounds = min(CEILING_ROUNDS, self._data.nbytes // round_bytes)
        self._bytes = self._rounds * round_bytes

    def close(self) -> None:
        """Gives the memory back that it took."""
        self._sink.free()
        if self._is_own:
            self._data.free()

    def gb_per_s(self) -> float:
        """The median of a few samples."""
        samples = [self._sample() for _ in range(CEILING_WARMUP + CEILING_SAMPLES)]
        return CEILING_CHAIN * self._bytes / median(samples[CEILING_WARMUP:]) / 1e6

    def _sample(self) -> float:
        """Milliseconds of CEILING_CHAIN launches."""
        arguments: dict[str, Argument] = {"data": self._data, "sink": self._sink, "rounds": self._rounds}
        before = self._device.record()
        for _ in range(CEILING_CHAIN):
            self._device.launch(self._kernel, arguments)
        after = self._device.record()
        self._device.synchronize(GPU_TIMEOUT_S)
        return self._device.elapsed_ms(before, after)


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


def fill_random(config: ModelConfig, manifest: Manifest, buffers: dict[str, Buffer]) -> None:
    """Weights of any shape in seconds: random matrices of a scale that keeps activations near 1, norm weights of 1."""
    plan = Plan.from_dict(manifest.plan)
    tile = random_bits(config.hidden_size**-0.5)
    fill_with(buffers["weights"], tile)
    # What a sublayer adds is alike for all tokens. Beside embeddings as small as weights it would be most of a residual
    # stream, and nearly all tokens would choose the same experts.
    fill_with(buffers["embedding"], tile if config.shape.experts is None else random_bits(1.0))
    ones = np.ones(config.padded_hidden, ml_dtypes.bfloat16).view(np.uint16)
    fills = {"norms": ones, "norms_behind": ones, "head_norms": ones}
    fills |= {name: tile for name in buffers if name.endswith("biases") or name in ("sinks", "router_rows")}
    if (heads := config.shape.delta) is not None:  # most of what is remembered is kept
        rates, biases = (np.full(heads.value_heads, number, np.float32) for number in (0.5, -3.0))
        numbers = np.concatenate([rates, biases, np.ones(DIMS, np.float32)])
        fills |= {"delta_taps": tile, "delta_numbers": numbers.view(np.uint16)}
    for name, values in fills.items():
        if name in buffers:
            fill_with(buffers[name], values)
    if "places" in buffers:
        row = manifest.buffer("places").shape[-1]
        fill_with(buffers["places"], _random_places(min(config.hidden_size, config.query_rows), row))
    gpu = Gpu(**manifest.gpu, ranks=manifest.world_size)
    _fill_packed(config, step_matrices(config.shape, plan, gpu), buffers)
    for name, table in family_of(config).tables(config, plan).items():
        buffers[name].upload(table)
    if "kv_scales" in buffers:
        buffers["kv_scales"].upload(np.ones(buffers["kv_scales"].nbytes // 4, np.float32))


def _random_places(elements: int, row: int) -> NDArray[np.uint16]:
    """Some order of the first elements of every input, the same for all."""
    places = np.arange(row, dtype=np.uint16)
    np.random.default_rng(0).shuffle(places[:elements])
    return places


def _fill_packed(config: ModelConfig, matrices: StepMatrices, buffers: dict[str, Buffer]) -> None:
    """Random weights in matrices that are not bf16 numbers alone. Every wave has the same rows, in all layers, of all
    experts: few are packed."""
    tensors = random_tensors(config)
    for layout in matrices:
        if layout.format == BF16:
            continue
        if isinstance(layout.format, BlockRows):
            whole = np.empty(layout.total_bytes, np.uint8)
            rows = _random_rows(tensors, layout, layout.padded_rows)
            format_of(layout).pack_m_tiles(layout, range(layout.m_tiles), rows, whole)
            for layer in matrices.layers_of(layout):
                buffers["weights"].upload(whole, matrices.offset(layout.name, layer))
            continue
        waves = [_packed_wave(tensors, layout, wave) for wave in sorted({0, layout.waves - 1})]
        for layer, expert in product(matrices.layers_of(layout), range(layout.experts)):
            for wave in range(layout.waves):
                offset = matrices.offset(layout.name, layer, expert) + wave * layout.blocks * layout.m_tile_bytes
                buffers["weights"].upload(waves[-1] if wave == layout.waves - 1 else waves[0], offset)


def _packed_wave(tensors: RandomTensors, layout: MatrixLayout, wave: int) -> NDArray[np.uint8]:
    """The bytes of one wave of random rows."""
    width, first = int(layout.wave_width(wave)), wave * layout.blocks
    rows = _random_rows(tensors, layout, width * layout.tile_rows)
    packed = np.empty(width * layout.m_tile_bytes, np.uint8)
    format_of(layout).pack_m_tiles(layout, range(first, first + width), rows, packed, wave)
    return packed


def _random_rows(tensors: RandomTensors, layout: MatrixLayout, count: int) -> Any:
    """So many as the format wants them."""
    shape = count, layout.columns
    if isinstance(layout.format, QuantizedTiles):
        name = layout.format.name
        scheme, is_sparse = random_scheme(name), is_sparse_name(name)
        return tensors.matrix_of(layout.name, scheme, shape, is_sparse=is_sparse, tiles=layout.format)[:]
    rows = tensors.sparse_matrix_of(layout.name, shape, layout.format)[:]
    return np.pad(rows, ((0, 0), (0, layout.padded_columns - shape[1])))


@lru_cache(maxsize=2)
def random_bits(scale: float) -> NDArray[np.uint16]:
    """Normal numbers times `scale` as bf16 bits, the same every time: what several buffers share cannot be written."""
    numbers = np.random.default_rng(0).standard_normal(TILE_ELEMENTS, dtype=np.float32)
    bits = np.asarray((numbers * np.float32(scale)).astype(ml_dtypes.bfloat16).view(np.uint16))
    bits.flags.writeable = False
    return bits


def random_cache(plan: Plan) -> NDArray[np.uint16]:
    """Random keys and values as the plan caches them, in words of 2 bytes; none of them is a NaN."""
    if plan.kv_dtype == "bf16":
        return random_bits(1.0)
    codes = np.random.default_rng(0).integers(0, 256, 2 * TILE_ELEMENTS, np.uint8)
    return (codes & 0xBF).view(np.uint16)  # the exponent's first bit is 0: numbers below 2


def fill_with(buffer: Buffer, tile: NDArray[np.uint16]) -> None:
    """Repeats `tile` over the whole buffer."""
    for offset in range(0, buffer.nbytes, tile.nbytes):
        buffer.upload(tile[: (buffer.nbytes - offset) // 2], offset)


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
