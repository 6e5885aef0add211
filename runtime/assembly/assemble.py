"""A checkpoint, a device and a generated kernel put together, ready to launch.

The order is: the kernels are described, memory is computed and refused if it does not fit, the kernels are written,
buffers are allocated, weights are packed and uploaded. Each kernel is compiled from when there is its text, in a thread
of its own, and what is not needed for a first token is waited for by the first launch of it. Knows nothing of text or
requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from cheetah.caches import cache_folder
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.options import takes
from cheetah.plan import Gpu, Plan, PlanError, gpu_named
from cheetah.plan.delta import state_slots
from cheetah.runtime.assembly.blocks import bytes_beside, options_of_blocks, put_together
from cheetah.runtime.assembly.buffers import (
    Progress,
    Weights,
    allocate_buffers,
    free_all,
    new_buffer,
    upload_weights,
)
from cheetah.runtime.assembly.kernels import (
    DECODING,
    HEAD,
    PASSES,
    PROMPTS,
    SOLO,
    Kernels,
    KernelsAsked,
    KernelSpec,
    choose_gpu,
    handoff_kernel,
    logits_rows,
    own_generator,
    pool_pages,
    pool_states,
    shared_buffers,
)
from cheetah.runtime.assembly.memory import LABELS, MemoryEstimate, size_text
from cheetah.runtime.assembly.options import AssemblyOptions
from cheetah.runtime.assembly.texts import KeptTexts
from cheetah.runtime.background import Started, started
from cheetah.runtime.device import open_device
from cheetah.runtime.engine.block_launches import BlockLauncher, KnownRows
from cheetah.runtime.engine.heads import HeadLauncher
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.launcher import Launcher
from cheetah.runtime.engine.launches import LoadedKernel
from cheetah.runtime.engine.prompt_passes import PassLauncher
from cheetah.runtime.engine.states import StatePool

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer, Device, DeviceInfo, Kernel, MappedBuffer

GPU_TIMEOUT_S = 60.0
"""A launch makes at most max_steps tokens, each within milliseconds: one that takes this long hangs. The emulator is
slow, and finds deadlocks by itself."""

HEAD_TOKENS = 8
"""Columns of a head that drafts, which reads what the other model has read in so many."""

RATE_BYTES = 10**8
"""Of fewer bytes, the rate says nothing."""

FIRST_LAUNCHED = (SOLO, DECODING)
"""Names of kernels, of which the start waits for the first that there is: a sequence by itself is decoded by it. The
others are waited for when they are launched first."""


@dataclass
class Assembly:
    """What `assemble` made. `prompts` launches a kernel that takes more tokens a step, `solo` one that is faster for a
    sequence by itself, if there are such; `passes` those that read many tokens of a prompt at once,
    with room for fewest first. drafts: that of another model over pages of the same
    numbers; handoff: the kernel between launches of the two; known_rows: of one that drafts blocks, what comes before
    its launches."""

    manifest: Manifest
    launcher: Launcher
    prompts: Launcher | None
    solo: Launcher | None
    passes: tuple[PassLauncher, ...]
    memory: MemoryEstimate
    buffers: dict[str, Buffer]
    device: Device
    owns_device: bool
    drafts: Assembly | None = None
    handoff: LoadedKernel | None = None
    known_rows: KnownRows | None = None

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
        launchers = (self.launcher, self.prompts, self.solo, self.passes[0].head if self.passes else None)
        rows = max(logits_rows(one.max_steps, one.tokens) for one in launchers if one is not None)
        return rows * self.launcher.vocab_size * 4

    def close(self) -> None:
        """Frees the buffers, and closes the device if it was opened here. A second call does nothing."""
        if self.drafts is not None:
            self.drafts.close()
        free_all(self.buffers)
        if self.owns_device:
            self.device.close()


def assemble_with(weights: Weights, options: AssemblyOptions, drafts: Weights | None = None) -> Assembly:
    """Everything that is needed to launch, and that a second model drafts. What was taken is given back on failure."""
    with options.watch("open the device"):
        device = _open_device(options, weights.config)
    owns_device = device is not options.device
    try:
        config = None if drafts is None else drafts.config
        kernels, drafting, memory = _chosen_kernels(weights.config, config, device, options)
        made = _built(weights, kernels, memory, device, options)
        if drafts is not None and drafting is not None:
            try:
                of_drafts = _options_of_drafts(options, kernels, drafts.config)
                made.drafts = _built(drafts, drafting, drafting.memory(), device, of_drafts)
                if isinstance(made.drafts.launcher, BlockLauncher):
                    made.known_rows = _known_rows(device, drafts, made.drafts)
                made.handoff = _handoff(device, weights.config, made, drafts.config)
            except BaseException:
                made.close()
                raise
    except BaseException:
        if owns_device:
            device.close()
        raise
    return replace(made, owns_device=owns_device)


assemble = takes(AssemblyOptions)(assemble_with)
"""The same, with the fields of the options by their names."""


def _built(
    weights: Weights, kernels: Kernels, memory: MemoryEstimate, device: Device, options: AssemblyOptions
) -> Assembly:
    """What was chosen, and fits, on an open device. What was taken is given back on failure."""
    buffers: dict[str, Buffer] = {}
    try:
        with options.watch("write the kernels"):
            made = {spec.name: _Made.of(device, spec) for spec in kernels.specs}
        with options.watch("allocate"):
            _allocate(device, weights.config, made, buffers)
        manifest = made[DECODING].manifest
        _load(weights, manifest, buffers, device, options)
        with options.watch("wait for compilers, load kernels"):
            awaited = next(name for name in FIRST_LAUNCHED if name in made)
            codes = {name: one.kernel(name == awaited) for name, one in made.items()}
        is_emulated = gpu_named(manifest.gpu["name"]).emulated
        timeout_s = GPU_TIMEOUT_S if options.timeout_s is None and not is_emulated else options.timeout_s
        launchers = _launchers(device, weights.config, made, codes, timeout_s)
        return Assembly(manifest, *launchers, memory, buffers, device, owns_device=False)
    except BaseException:
        free_all(buffers)
        raise


def _handoff(device: Device, config: ModelConfig, made: Assembly, drafts: ModelConfig) -> LoadedKernel:
    """The kernel between launches of two models, the first of which is the one that verifies."""
    generated = handoff_kernel(made.manifest, drafts)
    buffers = {one.name: new_buffer(device, one) for one in generated.manifest.buffers}
    made.buffers.update({f"handoff.{name}": buffer for name, buffer in buffers.items()})
    return LoadedKernel(device, device.prepare(generated.text, generated.manifest), generated.manifest, config, buffers)


def _known_rows(device: Device, weights: Weights, made: Assembly) -> KnownRows:
    """What makes rows for a drafter of blocks, with what else it has beside its steps."""
    assert isinstance(made.launcher, BlockLauncher)
    return put_together(device, weights, made.manifest, made.launcher, made.buffers)


def _chosen_kernels(
    config: ModelConfig, of_drafts: ModelConfig | None, device: Device, options: AssemblyOptions
) -> tuple[Kernels, Kernels | None, MemoryEstimate]:
    """The kernels, described, those of a model that drafts, and what all of them need, which fits into the device's
    memory: else that is refused."""
    info = device.describe()
    machine = choose_gpu(info, options.gpu)
    texts = KeptTexts(cache_folder() / "texts")
    free_bytes = min(info.free_bytes, int(options.memory_share * info.total_bytes))
    drafts = None
    with options.watch("choose the kernels"):
        kernels = KernelsAsked(config, machine, free_bytes, options, texts).described()
        memory = kernels.memory()
        if of_drafts is not None:
            left = free_bytes - memory.total_bytes + memory.bytes_of(LABELS["kv"])
            asked = _options_of_drafts(options, kernels, of_drafts)
            try:
                drafts = KernelsAsked(of_drafts, machine, left, asked, texts).described()
            except PlanError as error:
                raise PlanError(f"speculative_config: of what drafts, {error}") from None
            memory = memory.beside(_memory_of_drafts(drafts))
        pages = kernels.pages_that_fit(memory, free_bytes)
        if options.pool_follows_memory and options.pool_pages is None and pages < kernels.pages:
            options.say(f"the cache has {pages} pages, not {kernels.pages}: there is no room for more")
            kernels, drafts = kernels.with_pages(pages), None if drafts is None else drafts.with_pages(pages)
            memory = kernels.memory() if drafts is None else kernels.memory().beside(_memory_of_drafts(drafts))
    for line in (*kernels.notes, _memory_line(memory, info)):
        options.say(line)
    memory.check(free_bytes, info.name)
    return kernels, drafts, memory


def _memory_of_drafts(drafts: Kernels) -> MemoryEstimate:
    """With what a drafter of blocks has beside its steps."""
    memory = drafts.memory()
    if drafts.config.block is None:
        return memory
    beside = bytes_beside(drafts.config, drafts.specs[0].manifest)
    return replace(memory, parts=(*memory.parts, ("beside its steps", beside)))


def _options_of_drafts(options: AssemblyOptions, kernels: Kernels, drafts: ModelConfig) -> AssemblyOptions:
    """What a model is assembled by that drafts for one of these kernels: as many sequences, in pages of the same
    numbers. No bit of it is promised, so its kernels are those that are fastest. A head reads prompts in steps."""
    manifest = kernels.specs[0].manifest
    plan, gpu = manifest.plan, Gpu(**manifest.gpu, ranks=manifest.world_size)
    overrides = {name: plan[name] for name in ("max_context", "page_size", "batch")}
    if drafts.drafter is not None:
        overrides["tokens"] = HEAD_TOKENS
        options = replace(options, prompt_passes=False)
    found = replace(
        options,
        overrides=overrides,
        generate_kernel=None,
        prompt_tokens=1,
        pool_pages=kernels.pages,
    )
    return found if drafts.block is None else options_of_blocks(found, drafts, gpu, plan["drafts"])


@dataclass(frozen=True)
class _Made:
    """A kernel whose text is written, which is compiled meanwhile. buffers: by the names of its parameters."""

    manifest: Manifest
    compiled: Started[Kernel]
    buffers: dict[str, Buffer] = field(default_factory=dict)

    @classmethod
    def of(cls, device: Device, spec: KernelSpec) -> _Made:
        """Writes it, and has it compiled."""
        generated = spec.written()
        return cls(generated.manifest, device.prepare(generated.text, generated.manifest))

    def kernel(self, is_awaited: bool) -> Kernel | Started[Kernel]:
        """It, loaded; or what waits for it and loads it, where it is not compiled yet and the start does not wait."""
        return self.compiled() if is_awaited or self.compiled.is_done else self.compiled


def _allocate(device: Device, config: ModelConfig, made: Mapping[str, _Made], buffers: dict[str, Buffer]) -> None:
    """The buffers of each kernel. `buffers` gets every one of them once, as they are made, to free them."""
    allocate_buffers(device, made[DECODING].manifest, buffers)
    made[DECODING].buffers.update(buffers)
    shared = {name: buffers[name] for name in shared_buffers(config) if name in buffers}
    for kernel, one in made.items():
        if kernel != DECODING:
            one.buffers.update(shared)
            _allocate_others(device, kernel, one.manifest, one.buffers, buffers)
    for name in PASSES:
        if name in made:
            made[name].buffers["hidden_states"] = made[HEAD].buffers["hidden_states"]


def _load(
    weights: Weights, manifest: Manifest, buffers: dict[str, Buffer], device: Device, options: AssemblyOptions
) -> None:
    """Packs and uploads the weights, with a bar, and says how fast that was."""
    started, upload = time.monotonic(), options.upload or upload_weights
    with options.watch("weights"), _weights_progress(manifest, options.quiet) as progress:
        upload(weights, manifest, buffers, progress, device, options.watch, options.say)
    if _loaded_bytes(manifest) >= RATE_BYTES:
        options.say(_loading_line(manifest, time.monotonic() - started))


def _launchers(
    device: Device,
    config: ModelConfig,
    made: Mapping[str, _Made],
    codes: Mapping[str, Kernel | Started[Kernel]],
    timeout_s: float | None,
) -> tuple[Launcher, Launcher | None, Launcher | None, tuple[PassLauncher, ...]]:
    """Launches of each kernel over one cache, in the order of `Assembly`'s fields."""

    def loaded(name: str) -> LoadedKernel:
        return LoadedKernel(device, codes[name], made[name].manifest, config, made[name].buffers, timeout_s)

    cache = new_cache(config, made[DECODING].manifest)
    kind = Launcher if config.block is None else BlockLauncher
    steps = {name: kind(loaded(name), cache) for name in (DECODING, PROMPTS, SOLO) if name in made}
    head = HeadLauncher(loaded(HEAD)) if HEAD in made else None
    passes = tuple(PassLauncher(loaded(name), head) for name in PASSES if name in made)
    return steps[DECODING], steps.get(PROMPTS), steps.get(SOLO), passes


def _allocate_others(
    device: Device, kernel: str, manifest: Manifest, buffers: dict[str, Buffer], of_first: dict[str, Buffer]
) -> None:
    """Adds to `buffers`, which has the shared ones, those of another kernel; `of_first` frees them with its own."""
    for buffer in manifest.buffers:
        if buffer.name not in buffers:
            buffers[buffer.name] = new_buffer(device, buffer)
            of_first[f"{kernel}.{buffer.name}"] = buffers[buffer.name]


def _open_device(options: AssemblyOptions, config: ModelConfig) -> Device:
    """A GPU is opened while the generator's modules are imported: both take some tenths of a second."""
    name = options.device
    if name is not None and not isinstance(name, str):
        return name
    if name is not None and name.startswith("pycuda"):  # which is for the thread that opened it
        return open_device(name, say=options.say, ranks=options.tensor_parallel_size)
    opening = started(lambda: open_device(name, say=options.say, ranks=options.tensor_parallel_size))
    own_generator()
    return opening()


def new_cache(config: ModelConfig, manifest: Manifest) -> CachedSequence:
    """The empty cache of one sequence over a pool of its own; `fork` gives others over the same."""
    plan = Plan.from_dict(manifest.plan)
    context = min(plan.max_context, config.max_position_embeddings)
    reason = "max_context" if context == plan.max_context else "max_position_embeddings of the model"
    count = pool_states(manifest)
    states = StatePool(count, max(0, count - state_slots(plan.batch)))
    pool = PagePool(pool_pages(manifest), states=states)
    return CachedSequence(pool, plan.page_size, context, reason)


def _memory_line(memory: MemoryEstimate, info: DeviceInfo) -> str:
    cache = f"keys and values of {memory.kv_tokens} tokens {size_text(memory.bytes_of(LABELS['kv']))}"
    weights = size_text(memory.bytes_of(LABELS["weights"]))
    return f"memory on {info.name}: {size_text(memory.total_bytes)} of which weights {weights}, {cache}"


def _loading_line(manifest: Manifest, seconds: float) -> str:
    nbytes = _loaded_bytes(manifest)
    return f"weights read, packed and uploaded in {seconds:.1f} s: {nbytes / seconds / 1e9:.2f} GB/s"


def _loaded_bytes(manifest: Manifest) -> int:
    """On all GPUs together."""
    return manifest.world_size * sum(manifest.buffer(name).bytes for name in ("weights", "norms", "embedding"))


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
