"""The kernels that a model is launched with: the one that decodes, and those beside it over the same memory.

They are described first, which takes milliseconds and says what memory they need; each is written once, when it is
known that there is room for all. The one place of the runtime that asks the generator. Knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cheetah.errors import CheetahError
from cheetah.manifest import Buffer as BufferSpec
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.models.registry import family_of
from cheetah.plan import GPUS, Gpu, Plan, PlanError, gpu_named
from cheetah.plan.gpu import part_of, together
from cheetah.plan.handoff import Drafts
from cheetah.plan.prompt import PassPlan, default_pass_plan, pass_tokens, short_pass_plans
from cheetah.printable import shown_name
from cheetah.records import first_difference
from cheetah.runtime.assembly.memory import LABELS, MemoryEstimate, memory_of_buffers, size_text
from cheetah.runtime.assembly.options import AssemblyOptions, GenerateKernel
from cheetah.runtime.assembly.texts import Generated, KeptText, KeptTexts

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import DeviceInfo

PROMPT_TOKENS = (16, 8)
"""Tokens of a prompt that a step takes on a GPU: the first that fit. One mma has columns for 8; 16 take a third more
time a step (8B on an H200: 5.1 against 3.9 ms)."""

PASS_SHARE = 8
"""Of the memory that is left for the cache, passes over prompts may take one part in so many as their workspace."""

MOST_PREFIX_STATES, PREFIX_STATES_SHARE = 32, 10
"""Of states that are kept for other sequences; and of the memory that is left for the cache, one part in so many."""

PASSES = ("short passes", "medium passes", "longer passes", "passes")
"""Among the names of kernels, those of passes over prompts: over few tokens, and over as many as may be."""

FAMILIES, FAMILIES_BY_NUMBERS = ("int8",), ("int8", "int4", "fp8")
"""What names of formats begin with that are multiplied alike by kernels of few columns, as tests hold them to."""
OF_ONE_KERNEL = ("stages", "in_flight", "down_slices", "drafts", "fused_router")
"""Fields of a plan that say nothing of kernels of other steps."""
FAMILY_TOKENS, FAMILY_TOKENS_QUANTIZED = 16, 8
"""Most columns of kernels whose columns have the same bits as those of one with a single column: see
docs/internals/numbers.md."""

DECODING, SOLO, PROMPTS = "decoding", "solo", "prompts"
"""Names of kernels of whole steps: the one that decodes, one for a sequence by itself, one that reads prompts."""

PAGE_AXES = {"kv": 1, "features": 0, "known_rows": 0}
"""Buffers that lie by pages, and which of their axes these are."""

HEAD = "head"
"""That of the head by itself, which begins with what passes leave."""


@dataclass(frozen=True)
class KernelSpec:
    """A kernel that was chosen and is not written yet. manifest: all that is told without a text. write: makes that."""

    name: str
    manifest: Manifest
    write: Callable[[], Generated]

    def written(self) -> Generated:
        """The kernel. CheetahError where it is not the one that was described."""
        made = self.write()
        manifest = with_pages(made.manifest, pool_pages(self.manifest), pool_states(self.manifest))
        check_manifest(manifest, self.manifest)
        return KeptText(made.text, manifest)

    def with_pages(self, pages: int, states: int | None = None) -> KernelSpec:
        """The same over a cache of so many pages, as its launches are told: its text does not depend on it. states:
        over so many of these."""
        return replace(self, manifest=with_pages(self.manifest, pages, states))


@dataclass(frozen=True)
class Kernels:
    """What a model is launched with, in the order in which a first request waits for it: first the kernel that decodes,
    then those over the same weights and caches that do something better. notes: why there are not more."""

    config: ModelConfig
    specs: tuple[KernelSpec, ...]
    notes: tuple[str, ...] = ()

    @property
    def pages(self) -> int:
        """Of the cache."""
        return pool_pages(self.specs[0].manifest)

    def with_pages(self, pages: int, states: int | None = None) -> Kernels:
        """The same over a cache of so many pages. states: and over so many of these; by default as many as before."""
        states = pool_states(self.specs[0].manifest) if states is None else states
        return replace(self, specs=tuple(spec.with_pages(pages, states) for spec in self.specs))

    def memory(self) -> MemoryEstimate:
        """What all of them need."""
        return memory_needed(self.config, *(spec.manifest for spec in self.specs))

    def pages_that_fit(self, memory: MemoryEstimate, free_bytes: int) -> int:
        """How many pages of the cache there is room for, of all that is needed; all where that is more, or where one
        sequence may need more."""
        least = Plan.from_dict(self.specs[0].manifest.plan).pages_per_sequence
        page_bytes = memory.bytes_of(LABELS["kv"]) // self.pages
        pages = (free_bytes - memory.total_bytes) // page_bytes + self.pages
        return pages if least <= pages < self.pages else self.pages

    def named(self, name: str) -> KernelSpec | None:
        """The kernel of that name, if there is one."""
        return next((spec for spec in self.specs if spec.name == name), None)


@dataclass(frozen=True)
class KernelsAsked:
    """What kernels are chosen by. free_bytes: of the device's memory, before all. texts: what was written before."""

    config: ModelConfig
    machine: Gpu
    free_bytes: int
    options: AssemblyOptions
    texts: KeptTexts = field(default_factory=lambda: KeptTexts(None))

    def described(self) -> Kernels:
        """All kernels; nothing is written. PlanError where there can be none."""
        plan = self.options.overrides
        decoding = self._of_steps(DECODING, plan)
        notes, made = self.config.notes_of_context(decoding.manifest.plan["max_context"]), [decoding]
        wants_solo = not self.machine.emulated and self._is_alike_alone(Plan.from_dict(decoding.manifest.plan))
        if wants_solo if self.options.solo is None else self.options.solo:
            made += self._solo(plan, decoding.manifest)
        passes = [*self._passes(decoding.manifest, notes)]
        prompts = self._prompts(plan, decoding.manifest, notes)
        made += [*passes, *prompts]
        if passes:
            most = replace(Plan.from_dict((prompts or made)[0].manifest.plan), drafts=0)
            made.append(self._head(most, max(PassPlan.from_dict(one.manifest.plan).tokens for one in passes)))
        kernels = Kernels(self.config, tuple(made), tuple(notes)).with_pages(
            self._pages(decoding.manifest), self._states(decoding.manifest)
        )
        for other in kernels.specs[1:]:
            _check_shared(self.config, kernels.specs[0].manifest, other)
        return kernels

    def _pages(self, manifest: Manifest) -> int:
        """Of the cache of the manifest's kernel."""
        wanted, least = self.options.pool_pages, Plan.from_dict(manifest.plan).pages_per_sequence
        if wanted is not None and wanted < least:
            raise PlanError(f"pool_pages is {wanted}: one sequence of max_context tokens needs {least}: give as many")
        return pool_pages(manifest) if wanted is None else wanted

    def _states(self, manifest: Manifest) -> int:
        """Of all sequences that the manifest's kernel decodes, and those that are kept for others that begin alike."""
        own, wanted = pool_states(manifest), self.options.prefix_states
        if wanted is not None or not own:
            return own + (wanted or 0 if own else 0)
        memory = memory_needed(self.config, manifest)
        left = self.free_bytes - memory.total_bytes + memory.bytes_of(LABELS["kv"])
        each = manifest.buffer("states").bytes // own
        return own + max(0, min(MOST_PREFIX_STATES, left // PREFIX_STATES_SHARE // each))

    def _of_steps(self, name: str, overrides: Mapping[str, Any]) -> KernelSpec:
        """A kernel of whole decode steps, whose text says by what options it is made."""
        from cheetah.generate import choose_plan, describe_kernel

        plan = choose_plan(self.config, self.machine, **overrides)
        generate = keeping(self.texts, self.options.generate_kernel or own_generator())
        write = partial(generate, self.config, self.machine.name, **overrides)
        return KernelSpec(name, describe_kernel(self.config, self.machine, plan), write)

    def _is_alike_alone(self, plan: Plan) -> bool:
        """Whether a kernel of one column may decode a sequence by itself: where its bits are promised in any company,
        it must be of the same family."""
        formats = [name for _, name in self.config.weight_formats]
        families = FAMILIES_BY_NUMBERS if plan.by_numbers else FAMILIES
        most = FAMILY_TOKENS_QUANTIZED if formats else FAMILY_TOKENS
        return not plan.kv_chunk or (all(name.startswith(families) for name in formats) and plan.tokens <= most)

    def _solo(self, plan: Mapping[str, Any], manifest: Manifest) -> list[KernelSpec]:
        """A kernel like the manifest's with room for one token a step, if its own has room for more."""
        decoding = Plan.from_dict(manifest.plan)
        if decoding.tokens == 1:
            return []
        own = {"batch": 1, "tokens": 1}
        alike = {"stage_bytes": decoding.stage_bytes, "consumer_warps": decoding.consumer_warps}  # as the weights lie
        return [self._of_steps(SOLO, {**_kept(plan), **alike, **own})]

    def _prompts(self, plan: Mapping[str, Any], manifest: Manifest, notes: list[str]) -> list[KernelSpec]:
        """A kernel like the manifest's whose steps take `prompt_tokens`, if its own take fewer. Without a wish, what
        has no place in shared memory is left out."""
        of_gpu = () if self.machine.emulated else PROMPT_TOKENS
        kept, decoding = _kept(plan), Plan.from_dict(manifest.plan)
        for tokens in (self.options.prompt_tokens,) if self.options.prompt_tokens else of_gpu:
            if tokens <= decoding.tokens:
                break
            try:
                return [self._of_steps(PROMPTS, {**kept, "batch": decoding.batch, "tokens": tokens})]
            except PlanError as error:
                if self.options.prompt_tokens:
                    raise
                notes.append(f"a step reads fewer than {tokens} tokens of a prompt: {_first_line(error)}")
        return []

    # Passes over prompts ----------------------------------------------------------------------------------------------

    def _passes(self, manifest: Manifest, notes: list[str]) -> Iterator[KernelSpec]:
        """Kernels of passes beside the manifest's, which decodes, those of fewer tokens first; none where none is
        wanted, or, unless they were asked for, where there can be none, which is noted."""
        if not (not self.machine.emulated if self.options.prompt_passes is None else self.options.prompt_passes):
            return
        if self.options.prompt_passes is None and self._has_untried_passes:
            notes.append("no passes over prompts by several GPUs, which ran in the emulator alone for such models")
            return
        from cheetah.generate import describe_pass, generate_pass

        plan = Plan.from_dict(manifest.plan)
        try:
            plans = self._pass_plans_that_fit(manifest)
        except PlanError as error:
            if self.options.prompt_passes:
                raise
            notes.append(f"no passes over prompts, which are read a few tokens a step: {_first_line(error)}")
            return
        for name in sorted(plans, key=PASSES.index):
            pass_plan = plans[name]
            asked = ["pass", *_told(self.config), asdict(self.machine), plan.to_dict(), pass_plan.to_dict()]
            write = partial(generate_pass, self.config, self.machine, plan, pass_plan)
            described = describe_pass(self.config, self.machine, plan, pass_plan)
            yield KernelSpec(name, described, partial(self.texts.get, asked, write))
        notes.append(f"prompts are read in passes of up to {plans[PASSES[-1]].tokens} tokens")

    @property
    def _has_untried_passes(self) -> bool:
        """Whether passes are left to who asks for them: by several GPUs of experts, of o with biases and with norms
        over all heads."""
        shape = self.config.shape
        is_other = shape.experts is not None or shape.joint_norms or self.config.has_out_biases
        return self.machine.ranks > 1 and is_other

    def _pass_plans_that_fit(self, manifest: Manifest) -> dict[str, PassPlan]:
        """By the kernels' names: room for the most tokens that the context has and that memory allows, and shorter
        passes beside it. PlanError if there is room for none."""
        from cheetah.generate import describe_pass

        plan, memory = Plan.from_dict(manifest.plan), memory_needed(self.config, manifest)
        left = self.free_bytes - memory.total_bytes + memory.bytes_of(LABELS["kv"])
        has_choice = self.options.prompt_passes in (None, True)

        def workspace(one: PassPlan) -> int:
            return describe_pass(self.config, self.machine, plan, one).buffer("workspace").bytes

        lengths = pass_tokens(self.config.shape, self.machine, is_one_length=bool(plan.kv_chunk))
        for tokens in lengths if has_choice else (int(self.options.prompt_passes or 0),):
            long = default_pass_plan(self.machine, min(tokens, plan.max_context), self.config.shape)
            plans, nbytes = {PASSES[-1]: long}, workspace(long)
            # Cuts along k change bits: with them, those of a token would depend on how many others are read with it.
            shorter = () if plan.kv_chunk else short_pass_plans(self.machine, self.config.shape)
            for name, short in zip(PASSES, (one for one in shorter if one.tokens < long.tokens), strict=False):
                with suppress(PlanError):  # a stage of quantised weights and few tokens: no room for a tile of keys
                    nbytes += workspace(short)
                    plans[name] = short
            if not has_choice or nbytes * PASS_SHARE <= left:
                return plans
        raise PlanError(
            f"a pass of {long.tokens} tokens needs {size_text(nbytes)} beside a cache that has {size_text(left)}: it "
            "may take an eighth"
        )

    def _head(self, most: Plan, rows: int) -> KernelSpec:
        """The head behind passes, over up to `rows` hidden states, with as many columns and steps as `most`."""
        from cheetah.generate import describe_head, generate_head

        asked = [HEAD, *_told(self.config), asdict(self.machine), most.to_dict(), rows]
        write = partial(generate_head, self.config, self.machine, most, rows)
        described = describe_head(self.config, self.machine, most, rows)
        return KernelSpec(HEAD, described, partial(self.texts.get, asked, write))


def choose_gpu(info: DeviceInfo, wanted: str | None = None) -> Gpu:
    """The machine that a kernel for this device is generated for; CheetahError if there is none."""
    gpu = gpu_named(wanted or _gpu_of(info))
    if gpu.ranks > 1:
        raise CheetahError(
            f"gpu {gpu.name!r} is several GPUs: say how many by tensor_parallel_size, and which by device"
        )
    gpu = together(part_of(gpu, info.parts), info.ranks)
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


def _kept(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan that hold for kernels of other steps too."""
    return {name: value for name, value in plan.items() if name not in OF_ONE_KERNEL}


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def shared_buffers(config: ModelConfig) -> tuple[str, ...]:
    """Buffers that two kernels of a model have in common: the model, and the cache with its scales; of a head that
    drafts also what it is given."""
    return (*family_of(config).model_buffers(config), *PAGE_AXES, "kv_scales", "states")


def _check_shared(config: ModelConfig, manifest: Manifest, other: KernelSpec) -> None:
    """CheetahError unless another kernel has what it shares with the manifest's kernel as that has it. The head's has
    no cache."""
    for name in shared_buffers(config):
        mine, theirs = (next((b for b in of.buffers if b.name == name), None) for of in (manifest, other.manifest))
        if (mine != theirs and (theirs or other.name != HEAD)) or other.manifest.matrices != manifest.matrices:
            raise CheetahError(
                f"the kernel {other.name!r} lays out {name} otherwise than the kernel that decodes, so they cannot "
                "share it: use the same consumer_warps and stage_bytes for both"
            )


def pool_pages(manifest: Manifest) -> int:
    """Pages of the cache of a manifest's kernel; 0 if it has none."""
    return next((buffer.shape[1] for buffer in manifest.buffers if buffer.name == "kv"), 0)


def pool_states(manifest: Manifest) -> int:
    """What sequences may remember at a time in a manifest's kernel; 0 if they remember nothing beside their pages."""
    return next((buffer.shape[0] for buffer in manifest.buffers if buffer.name == "states"), 0)


def with_pages(manifest: Manifest, pages: int, states: int | None = None) -> Manifest:
    """The manifest of the same kernel over a cache of so many pages, if it has one; and over so many states."""
    of_pages = {name: (axis, pages) for name, axis in PAGE_AXES.items()}
    places = of_pages | ({} if states is None else {"states": (0, states)})
    buffers = tuple(
        _with_length(buffer, *places[buffer.name]) if buffer.name in places else buffer for buffer in manifest.buffers
    )
    return replace(manifest, buffers=buffers)


def _with_length(pool: BufferSpec, place: int, length: int) -> BufferSpec:
    """The buffer with another length at a place of its shape."""
    shape = (*pool.shape[:place], length, *pool.shape[place + 1 :])
    return replace(pool, shape=shape, bytes=pool.bytes // pool.shape[place] * length)


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


def check_manifest(manifest: Manifest, expected: Manifest) -> None:
    """CheetahError unless a kernel is the one that was described, `expected`.

    All behind a description is told by the model, the machine and the plan: what differs was edited by hand, or written
    by another version. What the kernel's words are (`command`, `generator`) is free, and its text is checked by its
    hash.
    """
    words = {name: getattr(manifest, name) for name in ("command", "generator", "text_sha256")}
    if difference := first_difference(asdict(manifest), asdict(replace(expected, **words))):
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
        asked = [identity, *_told(config), asdict(gpu_named(gpu)), plan]
        return texts.get(asked, lambda: generate(config, gpu, **plan))

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


def has_plan(config: ModelConfig, gpu: Gpu, **overrides: Any) -> bool:
    """Whether there can be a kernel of steps with these fields of its plan."""
    from cheetah.generate import choose_plan

    with suppress(PlanError):
        choose_plan(config, gpu, **overrides)
        return True
    return False


def handoff_kernel(manifest: Manifest, drafts: ModelConfig) -> Generated:
    """The kernel between launches of a manifest's kernel, which verifies, and of one of that model, which drafts."""
    from cheetah.generate import generate_handoff

    kind: Drafts = "head" if drafts.drafter is not None else "model" if drafts.block is None else "block"
    return generate_handoff(Gpu(**manifest.gpu, ranks=manifest.world_size), Plan.from_dict(manifest.plan), kind)


def block_kernels(config: ModelConfig, manifest: Manifest) -> list[Generated]:
    """Of a drafter of blocks, beside its manifest's kernel: the one that makes rows of taps, then, if it has one, that
    of its Markov head."""
    from cheetah.generate import generate_known_rows, generate_markov

    gpu, plan = Gpu(**manifest.gpu, ranks=manifest.world_size), Plan.from_dict(manifest.plan)
    slots = pool_pages(manifest) * plan.page_size
    assert config.block is not None
    markov = [generate_markov(config, gpu)] if config.block.markov_rank else []
    return [generate_known_rows(config, gpu, slots), *markov]
