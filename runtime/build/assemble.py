"""A checkpoint, a device and a generated kernel put together, ready to launch.

The order is: the kernels are generated (cheap, no device memory), memory is computed and refused if it does not fit,
buffers are allocated, weights are packed and uploaded while the kernels are compiled, each in a thread of its own.
Knows nothing of text or requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.manifest import Buffer as BufferSpec
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.models.family import Rows
from cheetah.models.registry import family_of
from cheetah.piece_ring import Lend, ordinary_memory
from cheetah.plan import GPUS, Gpu, Plan, PlanError, StepMatrices, gpu_named
from cheetah.plan.kv.tables import MAX_STOP_IDS
from cheetah.plan.prompt import PASS_TOKENS, PassPlan, default_pass_plan, short_pass_plan
from cheetah.printable import shown_name
from cheetah.records import first_difference
from cheetah.runtime.background import started
from cheetah.runtime.build.cubin import cache_folder
from cheetah.runtime.build.memory import LABELS, MemoryEstimate, memory_of_buffers, size_text
from cheetah.runtime.build.texts import Generated, KeptTexts
from cheetah.runtime.build.tuned import with_tuned
from cheetah.runtime.device import Say, open_device, say_to_stderr
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.prompt_passes import PassLauncher
from cheetah.stopwatch import Stopwatch

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer, Device, DeviceInfo, Kernel, MappedBuffer

GPU_TIMEOUT_S = 60.0
"""A launch makes at most max_steps tokens, each within milliseconds: one that takes this long hangs. The emulator is
slow, and finds deadlocks by itself."""

STOP_IDS = MAX_STOP_IDS
"""Stop ids that the device can check; the host checks the rest."""

PROMPT_TOKENS = (16, 8)
"""Tokens of a prompt that a step takes on a GPU: the first that fit. One mma has columns for 8; 16 take a third more
time a step (8B on an H200: 5.1 against 3.9 ms)."""

PASS_SHARE = 8
"""Of the memory that is left for the cache, passes over prompts may take one part in so many as their workspace."""

RATE_BYTES = 10**8
"""Of fewer bytes, the rate says nothing."""

PASSES = ("short passes", "passes")
"""Among the names of kernels, those of passes over prompts: over few tokens, and over as many as may be."""

FILL_BYTES = {"zero": 0, "poison": 0xFF, "host": None}


def new_buffer(device: Device, buffer: BufferSpec) -> Buffer:
    """A buffer of a manifest, filled as it says."""
    if buffer.fill == "mapped":
        return device.allocate_mapped(buffer.bytes)
    return device.allocate(buffer.bytes, FILL_BYTES[buffer.fill])


class Weights(Protocol):
    """What is needed of a checkpoint: the model's numbers, and its tensors as bf16 bits (uint16) by name.

    One that has `rows` as well, a function from a matrix's name to `Rows`, has its matrices read in parts by it; where
    matrices are quantised it must, and gives a `QuantizedMatrix`. `kv_scales` may be those of a cache in 8 bits, f32
    [layers, 2, kv_heads]; without them, or where they are None, its codes are the numbers themselves.
    """

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> NDArray[np.uint16]: ...


GenerateKernel = Callable[..., Generated]
"""(config, gpu name, **plan overrides) -> Generated; the project's own is `cheetah.generate.generate_kernel`."""

Progress = Callable[[int], None]
"""Takes the number of bytes of weights that were just written."""

UploadWeights = Callable[["Weights", Manifest, dict[str, "Buffer"], Progress, Lend, Stopwatch], None]


@dataclass
class Assembly:
    """What `assemble` made. `prompts` launches a kernel that takes more tokens a step, `solo` one that is faster for a
    sequence by itself, if there are such; `passes` those that read many tokens of a prompt at once,
    with room for fewest first."""

    manifest: Manifest
    launcher: Launcher
    prompts: Launcher | None
    solo: Launcher | None
    passes: tuple[PassLauncher, ...]
    memory: MemoryEstimate
    buffers: dict[str, Buffer]
    device: Device
    owns_device: bool

    def logits_buffer(self) -> Buffer:
        """Room for the logits of about max_steps tokens, f32 [steps, tokens, vocab], with each of the launchers;
        allocated when first asked for."""
        if "logits" not in self.buffers:
            self.buffers["logits"] = self.device.allocate(self._logits_bytes, 0xFF)
        return self.buffers["logits"]

    def hosts_logits_buffer(self, number: int) -> MappedBuffer:
        """The same in the host's memory: one of several, so that one is read while a launch writes another."""
        name = f"logits of the host {number}"
        if name not in self.buffers:
            self.buffers[name] = self.device.allocate_mapped(self._logits_bytes)
        return cast("MappedBuffer", self.buffers[name])

    @property
    def _logits_bytes(self) -> int:
        launchers = (self.launcher, self.prompts, self.solo)
        rows = max(_logits_rows(one.max_steps, one.tokens) for one in launchers if one is not None)
        return rows * self.launcher.vocab_size * 4

    def close(self) -> None:
        """Frees the buffers, and closes the device if it was opened here. A second call does nothing."""
        free_all(self.buffers)
        if self.owns_device:
            self.device.close()


def assemble(
    weights: Weights,
    *,
    device: str | Device | None = None,
    gpu: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    generate_kernel: GenerateKernel | None = None,
    tuned: bool = True,
    quiet: bool = False,
    prompt_tokens: int | None = None,
    solo: bool | None = None,
    prompt_passes: bool | int | None = None,
    pool_follows_memory: bool = False,
    upload: UploadWeights | None = None,
    watch: Stopwatch | None = None,
) -> Assembly:
    """Everything that is needed to launch. What was taken is given back on failure.

    overrides: fields of the plan. tuned: take what `cheetah tune` found for the others, where they allow it.
    prompt_tokens: tokens of a prompt that a step should take; if the plan's steps take fewer, another kernel over the
    same weights and caches does it. By default the first of PROMPT_TOKENS that fits on a GPU, and on the emulator no
    other kernel. solo: whether another kernel over the same shall decode a sequence that is by itself; by default on a
    GPU, where `kv_chunk` does not promise the same bits in any company. prompt_passes: whether a kernel over the same
    shall read prompts in passes, and another one few tokens where `kv_chunk` does not promise the same bits however
    much is cached; by default on a GPU, where weights are bf16 and there can be one. A number: tokens of a pass; by
    default as many as memory allows. pool_follows_memory: the cache of several sequences has fewer pages where the
    device has no room for all, but as many as one sequence may need. upload: brings the weights into the
    buffers; by default `upload_weights`. watch: takes the seconds of each stage.
    """
    watch = watch or Stopwatch()
    with watch("open the device"):
        opened = _open_device(device, quiet, weights.config)
    owns_device = opened is not device
    buffers: dict[str, Buffer] = {}
    try:
        info = opened.describe()
        machine = choose_gpu(info, gpu)
        plan = dict(overrides or {})
        plan_of_one = {name: value for name, value in plan.items() if name != "batch"}
        if tuned:
            plan_of_one = with_tuned(weights.config, machine, info.name, plan_of_one, _say(quiet))
            plan = plan if "batch" in plan else plan_of_one
        texts = KeptTexts(None if machine.emulated else cache_folder() / "texts")
        generate = _keeping(texts, generate_kernel or _own_generator())
        asked = _Asked(
            *(weights.config, machine, generate, prompt_tokens, solo, plan_of_one),
            _PassesAsked(prompt_passes, info.free_bytes),
            texts,
            _say(quiet),
        )
        with watch("write the kernels"):
            kernels = asked.kernels(plan)
        memory = kernels.memory(weights.config)
        if pool_follows_memory and (pages := _pages_that_fit(kernels.plan, memory, info.free_bytes)):
            _say(quiet)(f"the cache has {pages} pages, not {kernels.plan.kv_pages}: there is no room for more")
            kernels = asked.kernels({**plan, "pool_pages": pages})
            memory = kernels.memory(weights.config)
        memory.check(info.free_bytes, info.name)
        if not quiet:
            say_to_stderr(_memory_line(memory, info))
        manifest = kernels.decoding.manifest
        prepared = [opened.prepare(kernel.text, kernel.manifest) for kernel in kernels.every]
        with watch("allocate"):
            allocate_buffers(opened, manifest, buffers)
            shared = {name: buffers[name] for name in shared_buffers(weights.config) if name in buffers}
            others = {name: dict(shared) for name in kernels.others}
            for name, kernel in kernels.others.items():
                _allocate_others(opened, name, kernel.manifest, others[name], buffers)
        started = time.monotonic()
        with watch("weights"), _weights_progress(manifest, quiet) as progress:
            (upload or upload_weights)(weights, manifest, buffers, progress, opened.lend, watch)
        if _loaded_bytes(manifest) >= RATE_BYTES:
            _say(quiet)(_loading_line(manifest, time.monotonic() - started))
        with watch("wait for compilers, load kernels"):
            loaded = [load() for load in prepared]
    except BaseException:
        free_all(buffers)
        if owns_device:
            opened.close()
        raise
    cache = new_cache(weights.config, kernels.plan)
    if timeout_s is None and not machine.emulated:
        timeout_s = GPU_TIMEOUT_S
    codes = dict(zip(["decoding", *kernels.others], loaded, strict=True))

    def launched(name: str) -> tuple[Device, Kernel, Manifest, ModelConfig, dict[str, Buffer]]:
        return opened, codes[name], codes[name].manifest, weights.config, others.get(name, buffers)

    launchers = {name: Launcher(*launched(name), cache, timeout_s) for name in codes if name not in PASSES}
    first, prompts, alone = launchers["decoding"], launchers.get("prompts"), launchers.get("solo")
    passes = tuple(PassLauncher(*launched(name), timeout_s) for name in PASSES if name in codes)
    return Assembly(manifest, first, prompts, alone, passes, memory, buffers, opened, owns_device)


@dataclass(frozen=True)
class Kernels:
    """The kernel that decodes, and by name those over the same weights and caches that do something better."""

    decoding: Generated
    others: Mapping[str, Generated]

    @property
    def every(self) -> list[Generated]:
        return [self.decoding, *self.others.values()]

    @property
    def plan(self) -> Plan:
        return Plan.from_dict(self.decoding.manifest.plan)

    def memory(self, config: ModelConfig) -> MemoryEstimate:
        return memory_needed(config, self.decoding.manifest, *(kernel.manifest for kernel in self.others.values()))


@dataclass(frozen=True)
class _PassesAsked:
    """Whether prompts shall be read in passes, as `assemble` is told, and what memory is free before all."""

    wanted: bool | int | None
    free_bytes: int

    def is_wanted(self, machine: Gpu) -> bool:
        return not machine.emulated if self.wanted is None else bool(self.wanted)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of a pass, best first."""
        return PASS_TOKENS if self.wanted in (None, True) else (int(self.wanted or 0),)


@dataclass(frozen=True)
class _Asked:
    """What kernels are made of; see `assemble`. plan_of_one: fields of the plan for a sequence by itself."""

    config: ModelConfig
    machine: Gpu
    generate: GenerateKernel
    prompt_tokens: int | None
    solo: bool | None
    plan_of_one: Mapping[str, Any]
    passes: _PassesAsked
    texts: KeptTexts
    say: Say

    def kernels(self, plan: Mapping[str, Any]) -> Kernels:
        """All kernels for a plan, each as this version writes it."""
        decoding = self.generate(self.config, self.machine.name, **plan)
        model = (self.config, self.machine, self.generate)
        found = {"prompts": generate_prompt_kernel(*model, plan, decoding.manifest, self.prompt_tokens, self.say)}
        wants_solo = not (self.machine.emulated or decoding.manifest.plan["kv_chunk"])
        if wants_solo if self.solo is None else self.solo:
            found["solo"] = generate_solo_kernel(*model, self.plan_of_one, decoding.manifest)
        made = {name: kernel for name, kernel in found.items() if kernel is not None}
        for kernel in (decoding, *made.values()):
            check_manifest(self.config, kernel.manifest)
        made |= generate_pass_kernels(self.config, self.machine, decoding.manifest, self.passes, self.texts, self.say)
        return Kernels(decoding, made)


def _pages_that_fit(plan: Plan, memory: MemoryEstimate, free_bytes: int) -> int | None:
    """How many pages the cache can have beside everything else, if that is fewer than the plan's but enough for one
    sequence; else None."""
    page_bytes = memory.bytes_of(LABELS["kv"]) // plan.kv_pages
    pages = (free_bytes - memory.total_bytes) // page_bytes + plan.kv_pages
    return pages if plan.pages_per_sequence <= pages < plan.kv_pages else None


def generate_solo_kernel(
    config: ModelConfig, machine: Gpu, generate: GenerateKernel, plan: Mapping[str, Any], manifest: Manifest
) -> Generated | None:
    """A kernel like the manifest's with room for one token a step; None if its own has no room for more."""
    decoding = Plan.from_dict(manifest.plan)
    if decoding.tokens == 1:
        return None
    own = {"batch": 1, "tokens": 1, "pool_pages": decoding.kv_pages}
    alike = {"stage_bytes": decoding.stage_bytes, "consumer_warps": decoding.consumer_warps}  # as the weights lie
    generated = generate(config, machine.name, **{**_kept(plan), **alike, **own})
    _check_shared(shared_buffers(config), manifest, generated.manifest, "one token a step")
    return generated


def _kept(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan that hold for kernels of other steps too."""
    return {name: value for name, value in plan.items() if name not in ("stages", "in_flight", "down_slices", "trace")}


def generate_prompt_kernel(
    config: ModelConfig,
    machine: Gpu,
    generate: GenerateKernel,
    plan: Mapping[str, Any],
    manifest: Manifest,
    wanted: int | None,
    say: Say,
) -> Generated | None:
    """A kernel like the manifest's whose steps take `wanted` tokens; None if its own take as many.

    Without a wish, what has no place in shared memory is left out.
    """
    of_gpu = () if machine.emulated else PROMPT_TOKENS
    kept, decoding = _kept(plan), Plan.from_dict(manifest.plan)
    for tokens in (wanted,) if wanted else of_gpu:
        if tokens <= decoding.tokens:
            return None
        try:
            generated = generate(config, machine.name, **{**kept, "batch": decoding.batch, "tokens": tokens})
        except PlanError as error:
            if wanted:
                raise
            say(f"a step reads fewer than {tokens} tokens of a prompt: {str(error).partition(chr(10))[0]}")
        else:
            _check_shared(shared_buffers(config), manifest, generated.manifest, f"prompt_tokens={tokens}")
            return generated
    return None


def generate_pass_kernels(
    config: ModelConfig, machine: Gpu, manifest: Manifest, asked: _PassesAsked, texts: KeptTexts, say: Say
) -> dict[str, Generated]:
    """Kernels of passes beside the manifest's, which decodes; none where none is wanted, or, unless they were asked
    for, where there can be none, which is said."""
    if not asked.is_wanted(machine):
        return {}
    from cheetah.generate import generate_pass

    try:
        plans = _pass_plans_that_fit(config, machine, manifest, asked)
        plan = Plan.from_dict(manifest.plan)
        made: dict[str, Generated] = {
            name: texts.get(
                ["pass", *_told(config), machine.name, plan.to_dict(), one.to_dict()],
                partial(generate_pass, config, machine, plan, one),
            )
            for name, one in plans.items()
        }
    except PlanError as error:
        if asked.wanted:
            raise
        say(f"no passes over prompts, which are read a few tokens a step: {str(error).partition(chr(10))[0]}")
        return {}
    for one in made.values():
        _check_shared(shared_buffers(config), manifest, one.manifest, "prompt_passes")
    say(f"prompts are read in passes of up to {plans[PASSES[-1]].tokens} tokens")
    return made


def _pass_plans_that_fit(
    config: ModelConfig, machine: Gpu, manifest: Manifest, asked: _PassesAsked
) -> dict[str, PassPlan]:
    """By the kernels' names: room for the most tokens that the context has and that memory allows, and a short pass
    beside it where it is shorter. PlanError if there is room for none."""
    from cheetah.generate import describe_pass

    plan, memory = Plan.from_dict(manifest.plan), memory_needed(config, manifest)
    left = asked.free_bytes - memory.total_bytes + memory.bytes_of(LABELS["kv"])

    def workspace(one: PassPlan) -> int:
        return describe_pass(config, machine, plan, one, "", "").buffer("workspace").bytes

    for tokens in asked.tokens:
        long, short = default_pass_plan(machine, min(tokens, plan.max_context)), short_pass_plan(machine)
        plans, nbytes = {PASSES[-1]: long}, workspace(long)
        # Cuts along k change bits: with them, those of a token would depend on how many others are read with it.
        if short.tokens < long.tokens and not plan.kv_chunk:
            with suppress(PlanError):  # a stage of quantised weights and few tokens may have no room for a tile of keys
                nbytes += workspace(short)
                plans = dict(zip(PASSES, (short, long), strict=True))
        if asked.wanted not in (None, True) or nbytes * PASS_SHARE <= left:
            return plans
    raise PlanError(
        f"a pass of {long.tokens} tokens needs {size_text(nbytes)} beside a cache that has {size_text(left)}: it may "
        "take an eighth"
    )


def shared_buffers(config: ModelConfig) -> tuple[str, ...]:
    """Buffers that two kernels of a model have in common: the model, and the cache with its scales."""
    return (*family_of(config).model_buffers(config), "kv", "kv_scales")


def _check_shared(shared: Iterable[str], manifest: Manifest, other: Manifest, what: str) -> None:
    """CheetahError unless another kernel, `what`, has the shared buffers as the manifest's kernel has."""
    for name in shared:
        mine, theirs = (next((b for b in of.buffers if b.name == name), None) for of in (manifest, other))
        if mine != theirs or other.matrices != manifest.matrices:
            raise CheetahError(
                f"{what}: such a kernel lays out {name} otherwise than the kernel that decodes, so they cannot share "
                f"it: use the same consumer_warps and stage_bytes for both"
            )


def _allocate_others(
    device: Device, kernel: str, manifest: Manifest, buffers: dict[str, Buffer], of_first: dict[str, Buffer]
) -> None:
    """Adds to `buffers`, which has the shared ones, those of another kernel; `of_first` frees them with its own."""
    for buffer in manifest.buffers:
        if buffer.name not in buffers:
            buffers[buffer.name] = new_buffer(device, buffer)
            of_first[f"{kernel}.{buffer.name}"] = buffers[buffer.name]


def _keeping(texts: KeptTexts, generate: GenerateKernel) -> GenerateKernel:
    """The generator, asked only for what is not kept; itself where it has no `identity`, what its texts' commands say
    that is told by nothing else."""
    identity: str | None = getattr(generate, "identity", None)
    if generate is not _own_generator() and identity is None:
        return generate

    def kept(config: ModelConfig, gpu: str, **plan: Any) -> Generated:
        return texts.get([identity, *_told(config), gpu, plan], lambda: generate(config, gpu, **plan))

    return kept


def _told(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """All that a configuration says; `to_dict` is what config.json would hold, without the formats of weights."""
    return type(config).__qualname__, asdict(config)


def _own_generator() -> GenerateKernel:
    from cheetah.generate import generate_kernel  # the runtime meets the generator here only, and only when asked

    return generate_kernel


def _open_device(device: str | Device | None, quiet: bool, config: ModelConfig) -> Device:
    """A GPU is opened while the generator's modules are imported: both take some tenths of a second."""
    if device is not None and not isinstance(device, str):
        return device
    if device is not None and device.startswith("pycuda"):  # which is for the thread that opened it
        return open_device(device, say=_say(quiet))
    opening = started(lambda: open_device(device, say=_say(quiet)))
    _import_program(config)
    return opening()


def _import_program(config: ModelConfig) -> None:
    """Import what `generate_kernel` writes a model's kernel with, which it would do itself."""
    _own_generator()
    _ = family_of(config).program


def _say(quiet: bool) -> Say:
    return (lambda line: None) if quiet else say_to_stderr


def choose_gpu(info: DeviceInfo, wanted: str | None = None) -> Gpu:
    """The machine that a kernel for this device is generated for; CheetahError if there is none."""
    gpu = gpu_named(wanted or _gpu_of(info))
    emulated = info.backend == "emulator"
    if gpu.emulated != emulated:
        raise CheetahError(f"gpu {gpu.name!r} does not go with device {info.backend!r}, which is {info.name}")
    if not emulated and info.blocks < gpu.blocks:
        raise CheetahError(
            f"{info.name} has {info.blocks} SMs, a kernel for {gpu.name} needs {gpu.blocks} resident blocks: use a "
            f"whole {gpu.name.upper()}, or device='emulator'"
        )
    return gpu


def _gpu_of(info: DeviceInfo) -> str:
    if info.backend == "emulator":
        return "emulator"
    for name, gpu in GPUS.items():
        if not gpu.emulated and name.upper() in info.name.upper():
            return name
    known = ", ".join(name.upper() for name, gpu in GPUS.items() if not gpu.emulated)
    raise CheetahError(
        f"{info.name} ({info.arch}) is not supported: kernels are made for {known}; device='emulator' runs anywhere"
    )


def memory_needed(config: ModelConfig, manifest: Manifest, *others: Manifest) -> MemoryEstimate:
    """Device memory of the manifest's buffers, of what other kernels have of their own, and of the logits that
    `LLM.score` needs."""
    plan = Plan.from_dict(manifest.plan)
    plans = [plan, *(Plan.from_dict(one.plan) for one in others if _has_logits(one))]
    shape = (max(_logits_rows(one.max_steps, one.tokens) for one in plans), config.vocab_size)
    logits = BufferSpec("logits", "f32", shape, shape[0] * shape[1] * 4, "poison")
    shared = shared_buffers(config)
    own = [buffer for other in others for buffer in other.buffers if buffer.name not in shared]
    return memory_of_buffers(config, [*manifest.buffers, *own, logits], plan.batch)


def _has_logits(manifest: Manifest) -> bool:
    return any(parameter.name == "logits" for parameter in manifest.parameters)


def _logits_rows(max_steps: int, tokens: int) -> int:
    """Whole steps' rows: `max_steps` of them, or one step's if that is more."""
    return max(1, max_steps // tokens) * tokens


def check_manifest(config: ModelConfig, manifest: Manifest) -> None:
    """CheetahError unless the manifest is the one that this version writes for this model, its machine and its plan.

    Everything behind it is told by those three: what differs was edited by hand, or written by another version. What
    the kernel's words are (`command`, `generator`) is free, and its text is checked by its hash.
    """
    from cheetah.generate import describe_kernel

    plan, gpu = Plan.from_dict(manifest.plan), gpu_named(manifest.gpu.get("name"))
    plan.check(config.shape, gpu)
    ours = describe_kernel(config, gpu, plan, "", manifest.command)
    expected = replace(ours, generator=manifest.generator, text_sha256=manifest.text_sha256)
    if difference := first_difference(asdict(manifest), asdict(expected)):
        raise CheetahError(
            f"manifest of kernel {manifest.kernel}: {difference}: generate text and manifest again with: "
            f"{shown_name(manifest.command)}"
        )


def allocate_buffers(device: Device, manifest: Manifest, buffers: dict[str, Buffer]) -> None:
    """Puts every buffer of the manifest into `buffers`, filled as it says, but for those that are there already."""
    for buffer in manifest.buffers:
        if buffer.name not in buffers:
            buffers[buffer.name] = new_buffer(device, buffer)


def free_all(buffers: dict[str, Buffer]) -> None:
    """Frees and forgets all buffers."""
    while buffers:
        buffers.popitem()[1].free()


def upload_weights(
    weights: Weights,
    manifest: Manifest,
    buffers: Mapping[str, Buffer],
    progress: Progress,
    lend: Lend = ordinary_memory,
    watch: Stopwatch | None = None,
) -> None:
    """Writes the family's tables, and packs every tensor into its buffer. lend: the device's, where it has memory from
    which uploads are fastest."""

    def write(name: str, offset: int, data: NDArray[np.uint8]) -> None:
        buffers[name].upload(data, offset)

    rows: Callable[[str], Rows] | None = getattr(weights, "rows", None)
    if "kv_scales" in buffers:
        scales: NDArray[np.float32] | None = getattr(weights, "kv_scales", None)
        ones = np.ones(manifest.buffer("kv_scales").shape, np.float32)
        buffers["kv_scales"].upload(ones if scales is None else scales)
    config, family = weights.config, family_of(weights.config)
    for name, table in family.tables(config, Plan.from_dict(manifest.plan)).items():
        buffers[name].upload(table)
    matrices = _matrices(config, manifest)
    family.pack_weights(config, matrices, weights.tensor, write, progress, rows=rows, lend=lend, watch=watch)


def new_cache(config: ModelConfig, plan: Plan) -> CachedSequence:
    """The empty cache of one sequence over a pool of its own; `fork` gives others over the same."""
    context = min(plan.max_context, config.max_position_embeddings)
    reason = "max_context" if context == plan.max_context else "max_position_embeddings of the model"
    return CachedSequence(PagePool(plan.kv_pages), plan.page_size, context, reason)


def _matrices(config: ModelConfig, manifest: Manifest) -> StepMatrices:
    return family_of(config).matrices(config, Plan.from_dict(manifest.plan), gpu_named(manifest.gpu["name"]))


def _memory_line(memory: MemoryEstimate, info: DeviceInfo) -> str:
    cache = f"keys and values of {memory.kv_tokens} tokens {size_text(memory.bytes_of(LABELS['kv']))}"
    weights = size_text(memory.bytes_of(LABELS["weights"]))
    return f"memory on {info.name}: {size_text(memory.total_bytes)} of which weights {weights}, {cache}"


def _loading_line(manifest: Manifest, seconds: float) -> str:
    nbytes = _loaded_bytes(manifest)
    return f"weights read, packed and uploaded in {seconds:.1f} s: {nbytes / seconds / 1e9:.2f} GB/s"


def _loaded_bytes(manifest: Manifest) -> int:
    return sum(manifest.buffer(name).bytes for name in ("weights", "norms", "embedding"))


@contextmanager
def _weights_progress(manifest: Manifest, quiet: bool) -> Iterator[Progress]:
    """A bar on standard error over the bytes of weights that are packed and uploaded."""
    if quiet:
        yield lambda written: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    total = _loaded_bytes(manifest)
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Bar(*columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("packing weights", total=total)
        yield lambda written: bar.advance(task, written)
