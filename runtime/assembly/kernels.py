"""The kernels that a model is launched with: the one that decodes, and those beside it over the same memory.

The one place of the runtime that asks the generator, and only for texts with their manifests. Cheap: no memory of a
device is needed, and none is taken. Knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cheetah.errors import CheetahError
from cheetah.manifest import Buffer as BufferSpec
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.models.registry import family_of
from cheetah.plan import GPUS, Gpu, Plan, PlanError, gpu_named
from cheetah.plan.prompt import PASS_TOKENS, PassPlan, default_pass_plan, short_pass_plans
from cheetah.printable import shown_name
from cheetah.records import first_difference
from cheetah.runtime.assembly.memory import LABELS, MemoryEstimate, memory_of_buffers, size_text
from cheetah.runtime.assembly.texts import Generated, KeptTexts
from cheetah.runtime.device import Say

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import DeviceInfo

PROMPT_TOKENS = (16, 8)
"""Tokens of a prompt that a step takes on a GPU: the first that fit. One mma has columns for 8; 16 take a third more
time a step (8B on an H200: 5.1 against 3.9 ms)."""

PASS_SHARE = 8
"""Of the memory that is left for the cache, passes over prompts may take one part in so many as their workspace."""

PASSES = ("short passes", "medium passes", "passes")
"""Among the names of kernels, those of passes over prompts: over few tokens, and over as many as may be."""

DECODING = "decoding"
"""The name of the kernel that decodes."""

HEAD = "head"
"""That of the head by itself, which begins with what passes leave."""

GenerateKernel = Callable[..., Generated]
"""(config, gpu name, **plan overrides) -> Generated; the project's own is `cheetah.generate.generate_kernel`."""


@dataclass(frozen=True)
class Kernels:
    """The kernel that decodes, and by name those over the same weights and caches that do something better."""

    decoding: Generated
    others: Mapping[str, Generated]

    @property
    def by_name(self) -> dict[str, Generated]:
        return {DECODING: self.decoding, **self.others}

    @property
    def plan(self) -> Plan:
        return Plan.from_dict(self.decoding.manifest.plan)

    def memory(self, config: ModelConfig) -> MemoryEstimate:
        return memory_needed(config, self.decoding.manifest, *(kernel.manifest for kernel in self.others.values()))


@dataclass(frozen=True)
class PassesAsked:
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
class KernelsAsked:
    """What kernels are made of; see `assemble`. begin: gets each kernel as soon as there is its text."""

    config: ModelConfig
    machine: Gpu
    generate: GenerateKernel
    prompt_tokens: int | None
    solo: bool | None
    passes: PassesAsked
    texts: KeptTexts
    say: Say
    begin: Callable[[Generated], object]

    def kernels(self, plan: Mapping[str, Any]) -> Kernels:
        """All kernels for a plan, each as this version writes it; those first that a first request waits for."""
        decoding = self._checked(self.generate(self.config, self.machine.name, **plan))
        model, manifest = (self.config, self.machine, self.generate), decoding.manifest
        made: dict[str, Generated] = {}
        wants_solo = not (self.machine.emulated or manifest.plan["kv_chunk"])
        if wants_solo if self.solo is None else self.solo:
            solo = generate_solo_kernel(*model, plan, manifest)
            made |= {} if solo is None else {"solo": self._checked(solo)}
        for name, kernel in pass_kernels(self.config, self.machine, manifest, self.passes, self.texts, self.say):
            self.begin(kernel)
            made[name] = kernel
        has_passes = bool(made.keys() & {*PASSES})
        prompts = generate_prompt_kernel(*model, plan, manifest, self.prompt_tokens, self.say)
        made |= {} if prompts is None else {"prompts": self._checked(prompts)}
        if has_passes:
            most = Plan.from_dict((decoding if prompts is None else prompts).manifest.plan)
            made[HEAD] = self._head(manifest, most, [made[name] for name in PASSES if name in made])
        return Kernels(decoding, made)

    def _checked(self, kernel: Generated) -> Generated:
        check_manifest(self.config, kernel.manifest)
        self.begin(kernel)
        return kernel

    def _head(self, manifest: Manifest, most: Plan, passes: Iterable[Generated]) -> Generated:
        """The head behind passes, beside the manifest's kernel, with the steps of `most`, which takes most columns."""
        from cheetah.generate import generate_head

        rows = max(PassPlan.from_dict(one.manifest.plan).tokens for one in passes)
        head = self.texts.get(
            [HEAD, *_told(self.config), self.machine.name, most.to_dict(), rows],
            partial(generate_head, self.config, self.machine, most, rows),
        )
        shared = [buffer.name for buffer in head.manifest.buffers if buffer.name in shared_buffers(self.config)]
        _check_shared(shared, manifest, head.manifest, "prompt_passes")
        self.begin(head)
        return head


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


def pass_kernels(
    config: ModelConfig, machine: Gpu, manifest: Manifest, asked: PassesAsked, texts: KeptTexts, say: Say
) -> Iterator[tuple[str, Generated]]:
    """Kernels of passes beside the manifest's, which decodes, with their names, those of fewer tokens first; none where
    none is wanted, or, unless they were asked for, where there can be none, which is said."""
    if not asked.is_wanted(machine):
        return
    from cheetah.generate import generate_pass

    plan, has_some = Plan.from_dict(manifest.plan), False
    try:
        plans = _pass_plans_that_fit(config, machine, manifest, asked)
        for name in sorted(plans, key=PASSES.index):
            made = texts.get(
                ["pass", *_told(config), machine.name, plan.to_dict(), plans[name].to_dict()],
                partial(generate_pass, config, machine, plan, plans[name]),
            )
            _check_shared(shared_buffers(config), manifest, made.manifest, "prompt_passes")
            has_some = True
            yield name, made
    except PlanError as error:
        if asked.wanted or has_some:  # where there can be one kernel, there can be all that fit
            raise
        say(f"no passes over prompts, which are read a few tokens a step: {str(error).partition(chr(10))[0]}")
        return
    say(f"prompts are read in passes of up to {plans[PASSES[-1]].tokens} tokens")


def _pass_plans_that_fit(
    config: ModelConfig, machine: Gpu, manifest: Manifest, asked: PassesAsked
) -> dict[str, PassPlan]:
    """By the kernels' names: room for the most tokens that the context has and that memory allows, and shorter passes
    beside it. PlanError if there is room for none."""
    from cheetah.generate import describe_pass

    plan, memory = Plan.from_dict(manifest.plan), memory_needed(config, manifest)
    left = asked.free_bytes - memory.total_bytes + memory.bytes_of(LABELS["kv"])

    def workspace(one: PassPlan) -> int:
        return describe_pass(config, machine, plan, one, "", "").buffer("workspace").bytes

    for tokens in asked.tokens:
        long = default_pass_plan(machine, min(tokens, plan.max_context), config.head_dim)
        plans, nbytes = {PASSES[-1]: long}, workspace(long)
        # Cuts along k change bits: with them, those of a token would depend on how many others are read with it.
        shorter = () if plan.kv_chunk else short_pass_plans(machine, config.head_dim)
        for name, short in zip(PASSES, (one for one in shorter if one.tokens < long.tokens), strict=False):
            with suppress(PlanError):  # a stage of quantised weights and few tokens may have no room for a tile of keys
                nbytes += workspace(short)
                plans[name] = short
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


def memory_needed(config: ModelConfig, manifest: Manifest, *others: Manifest) -> MemoryEstimate:
    """Device memory of the manifest's buffers, of what other kernels have of their own, and of the logits that
    `LLM.score` needs."""
    plan = Plan.from_dict(manifest.plan)
    plans = [plan, *(Plan.from_dict(one.plan) for one in others if _has_logits(one))]
    shape = (max(logits_rows(one.max_steps, one.tokens) for one in plans), config.vocab_size)
    logits = BufferSpec("logits", "f32", shape, shape[0] * shape[1] * 4, "poison")
    shared = shared_buffers(config)
    own = [buffer for other in others for buffer in other.buffers if buffer.name not in shared]
    return memory_of_buffers(config, [*manifest.buffers, *own, logits], plan.batch)


def _has_logits(manifest: Manifest) -> bool:
    return any(parameter.name == "logits" for parameter in manifest.parameters)


def logits_rows(max_steps: int, tokens: int) -> int:
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


def keeping(texts: KeptTexts, generate: GenerateKernel) -> GenerateKernel:
    """The generator, asked only for what is not kept; itself where it has no `identity`, what its texts' commands say
    that is told by nothing else."""
    identity: str | None = getattr(generate, "identity", None)
    if generate is not own_generator() and identity is None:
        return generate

    def kept(config: ModelConfig, gpu: str, **plan: Any) -> Generated:
        return texts.get([identity, *_told(config), gpu, plan], lambda: generate(config, gpu, **plan))

    return kept


def _told(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """All that a configuration says; `to_dict` is what config.json would hold, without the formats of weights."""
    return type(config).__qualname__, asdict(config)


def own_generator() -> GenerateKernel:
    from cheetah.generate import generate_kernel  # the runtime meets the generator here only, and only when asked

    return generate_kernel


def repacking_kernel(gpu: Gpu) -> Generated:
    """The kernel that packs weights on a device."""
    from cheetah.generate import generate_repacking

    return generate_repacking(gpu)


def import_program(config: ModelConfig) -> None:
    """Import what `generate_kernel` writes a model's kernel with, which it would do itself."""
    own_generator()
    _ = family_of(config).program
