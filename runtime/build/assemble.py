"""A checkpoint, a device and a generated kernel put together, ready to launch.

The order is: the kernel is generated (cheap, no device memory), memory is computed and refused if it does not fit, the
kernel is compiled, buffers are allocated, weights are packed and uploaded. Knows nothing of text or requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.manifest import Buffer as BufferSpec
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.models.family import Rows
from cheetah.models.registry import family_of
from cheetah.plan import GPUS, Gpu, Plan, PlanError, StepMatrices, gpu_named
from cheetah.plan.kv.tables import MAX_STOP_IDS
from cheetah.printable import shown_name
from cheetah.records import first_difference
from cheetah.runtime.build.memory import LABELS, MemoryEstimate, memory_of_buffers, size_text
from cheetah.runtime.build.tuned import with_tuned
from cheetah.runtime.device import Say, open_device, say_to_stderr
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.launcher import Launcher

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer, Device, DeviceInfo

GPU_TIMEOUT_S = 60.0
"""A launch makes at most max_steps tokens, each within milliseconds: one that takes this long hangs. The emulator is
slow, and finds deadlocks by itself."""

STOP_IDS = MAX_STOP_IDS
"""Stop ids that the device can check; the host checks the rest."""

PROMPT_TOKENS = (16, 8)
"""Tokens of a prompt that a step takes on a GPU: the first that fit. One mma has columns for 8; 16 take a third more
time a step (8B on an H200: 5.1 against 3.9 ms)."""

RATE_BYTES = 10**8
"""Of fewer bytes, the rate says nothing."""

FILL_BYTES = {"zero": 0, "poison": 0xFF, "host": None}


class Generated(Protocol):
    """A kernel's text with its manifest."""

    @property
    def text(self) -> str: ...

    @property
    def manifest(self) -> Manifest: ...


class Weights(Protocol):
    """What is needed of a checkpoint: the model's numbers, and its tensors as bf16 bits (uint16) by name.

    One that has `rows` as well, a function from a matrix's name to `Rows`, has its matrices read in parts by it; where
    matrices are quantised it must, and gives a `QuantizedMatrix`.
    """

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> NDArray[np.uint16]: ...


GenerateKernel = Callable[..., Generated]
"""(config, gpu name, **plan overrides) -> Generated; the project's own is `cheetah.generate.generate_kernel`."""

Progress = Callable[[int], None]
"""Takes the number of bytes of weights that were just written."""


@dataclass
class Assembly:
    """What `assemble` made. `prompts` launches a kernel that takes more tokens a step, if there is one."""

    manifest: Manifest
    launcher: Launcher
    prompts: Launcher | None
    memory: MemoryEstimate
    buffers: dict[str, Buffer]
    device: Device
    owns_device: bool

    def logits_buffer(self) -> Buffer:
        """Room for the logits of about max_steps tokens, f32 [steps, tokens, vocab]; allocated when first asked for."""
        if "logits" not in self.buffers:
            nbytes = _logits_rows(Plan.from_dict(self.manifest.plan)) * self.launcher.vocab_size * 4
            self.buffers["logits"] = self.device.allocate(nbytes, 0xFF)
        return self.buffers["logits"]

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
) -> Assembly:
    """Everything that is needed to launch. What was taken is given back on failure.

    overrides: fields of the plan. tuned: take what `cheetah tune` found for the others, where they allow it.
    prompt_tokens: tokens of a prompt that a step should take; if the plan's steps take fewer, another kernel over the
    same weights and caches does it. By default the first of PROMPT_TOKENS that fits on a GPU, and on the emulator no
    other kernel.
    """
    opened = _open_device(device, quiet)
    owns_device = opened is not device
    buffers: dict[str, Buffer] = {}
    try:
        info = opened.describe()
        machine = choose_gpu(info, gpu)
        plan = dict(overrides or {})
        if tuned:
            plan = with_tuned(weights.config, machine, info.name, plan, _say(quiet))
        generate = generate_kernel or _own_generator()
        generated = generate(weights.config, machine.name, **plan)
        manifest = generated.manifest
        check_manifest(weights.config, manifest)
        prompt_kernel = generate_prompt_kernel(
            weights.config, machine, generate, plan, manifest, prompt_tokens, _say(quiet)
        )
        if prompt_kernel:
            check_manifest(weights.config, prompt_kernel.manifest)
        memory = memory_needed(weights.config, manifest, prompt_kernel.manifest if prompt_kernel else None)
        memory.check(info.free_bytes, info.name)
        if not quiet:
            say_to_stderr(_memory_line(memory, info))
        kernel = opened.load(generated.text, manifest)
        reader = opened.load(prompt_kernel.text, prompt_kernel.manifest) if prompt_kernel else None
        allocate_buffers(opened, manifest, buffers)
        reading = {name: buffers[name] for name in shared_buffers(weights.config) if name in buffers}
        if prompt_kernel:
            _allocate_others(opened, prompt_kernel.manifest, reading, buffers)
        started = time.monotonic()
        with _weights_progress(manifest, quiet) as progress:
            upload_weights(weights, manifest, buffers, progress)
        if _loaded_bytes(manifest) >= RATE_BYTES:
            _say(quiet)(_loading_line(manifest, time.monotonic() - started))
    except BaseException:
        free_all(buffers)
        if owns_device:
            opened.close()
        raise
    cache = new_cache(weights.config, Plan.from_dict(manifest.plan))
    if timeout_s is None and not machine.emulated:
        timeout_s = GPU_TIMEOUT_S
    launcher = Launcher(opened, kernel, manifest, weights.config, buffers, cache, timeout_s)
    prompts = None
    if prompt_kernel and reader:
        prompts = Launcher(opened, reader, prompt_kernel.manifest, weights.config, reading, cache, timeout_s)
    return Assembly(manifest, launcher, prompts, memory, buffers, opened, owns_device)


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
    kept = {name: value for name, value in plan.items() if name not in ("stages", "in_flight", "down_slices", "trace")}
    for tokens in (wanted,) if wanted else of_gpu:
        if tokens <= int(manifest.plan["tokens"]):
            return None
        try:
            generated = generate(config, machine.name, **{**kept, "batch": manifest.plan["batch"], "tokens": tokens})
        except PlanError as error:
            if wanted:
                raise
            say(f"a step reads fewer than {tokens} tokens of a prompt: {str(error).partition(chr(10))[0]}")
        else:
            _check_shared(shared_buffers(config), manifest, generated.manifest, tokens)
            return generated
    return None


def shared_buffers(config: ModelConfig) -> tuple[str, ...]:
    """Buffers that two kernels of a model have in common: the model, and the cache with its scales."""
    return (*family_of(config).model_buffers(config), "kv", "kv_scales")


def _check_shared(shared: Iterable[str], manifest: Manifest, other: Manifest, tokens: int) -> None:
    """CheetahError unless a kernel of `tokens` tokens a step has the shared buffers as the manifest's kernel has."""
    for name in shared:
        mine, theirs = (next((b for b in of.buffers if b.name == name), None) for of in (manifest, other))
        if mine != theirs or other.matrices != manifest.matrices:
            raise CheetahError(
                f"prompt_tokens={tokens}: a kernel of that many tokens a step lays out {name} otherwise than the "
                f"kernel that decodes, so they cannot share it: use the same consumer_warps and stage_bytes for both"
            )


def _allocate_others(
    device: Device, manifest: Manifest, buffers: dict[str, Buffer], of_first: dict[str, Buffer]
) -> None:
    """Adds to `buffers`, which has the shared ones, those of a second kernel; `of_first` frees them with its own."""
    for buffer in manifest.buffers:
        if buffer.name not in buffers:
            buffers[buffer.name] = device.allocate(buffer.bytes, FILL_BYTES[buffer.fill])
            of_first[f"prompts.{buffer.name}"] = buffers[buffer.name]


def _own_generator() -> GenerateKernel:
    from cheetah.generate import generate_kernel  # the runtime meets the generator here only, and only when asked

    return generate_kernel


def _open_device(device: str | Device | None, quiet: bool) -> Device:
    if device is not None and not isinstance(device, str):
        return device
    return open_device(device, say=_say(quiet))


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


def memory_needed(config: ModelConfig, manifest: Manifest, prompts: Manifest | None = None) -> MemoryEstimate:
    """Device memory of the manifest's buffers, of what a second kernel has of its own, and of the logits that
    `LLM.score` needs."""
    plan = Plan.from_dict(manifest.plan)
    shape = (_logits_rows(plan), config.vocab_size)
    logits = BufferSpec("logits", "f32", shape, shape[0] * shape[1] * 4, "poison")
    shared = shared_buffers(config)
    others = [buffer for buffer in prompts.buffers if buffer.name not in shared] if prompts else []
    return memory_of_buffers(config, [*manifest.buffers, *others, logits], plan.batch)


def _logits_rows(plan: Plan) -> int:
    """Whole steps' rows: `max_steps` of them, or one step's if that is more."""
    return max(1, plan.max_steps // plan.tokens) * plan.tokens


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
            buffers[buffer.name] = device.allocate(buffer.bytes, FILL_BYTES[buffer.fill])


def free_all(buffers: dict[str, Buffer]) -> None:
    """Frees and forgets all buffers."""
    while buffers:
        buffers.popitem()[1].free()


def upload_weights(weights: Weights, manifest: Manifest, buffers: Mapping[str, Buffer], progress: Progress) -> None:
    """Writes the family's tables, and packs every tensor into its buffer."""

    def write(name: str, offset: int, data: NDArray[np.uint8]) -> None:
        buffers[name].upload(data, offset)

    rows: Callable[[str], Rows] | None = getattr(weights, "rows", None)
    if "kv_scales" in buffers:
        buffers["kv_scales"].upload(np.ones(manifest.buffer("kv_scales").shape, np.float32))
    config, family = weights.config, family_of(weights.config)
    for name, table in family.tables(config, Plan.from_dict(manifest.plan)).items():
        buffers[name].upload(table)
    family.pack_weights(config, _matrices(config, manifest), weights.tensor, write, progress, rows=rows)


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
