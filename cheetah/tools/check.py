"""Whether a generated decode kernel is right under any schedule: the core of `cheetah check`, and of the tests.

`check_kernel` takes a kernel's text, runs the same launches in the emulator under many schedules, and requires the
same bits of all of them, agreement with float32, and (with the sanitizer) that no two accesses are unordered. The
launches are prepared by the runtime itself, so what is checked is what is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.emulator import SCHEDULERS, EmulatorError, ExploreReport, compile_program, explore
from cheetah.emulator.program import Program
from cheetah.errors import CheetahError
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.models.family import ReferenceModel
from cheetah.models.registry import family_of
from cheetah.models.rounding import F32, round_to_bf16
from cheetah.models.sampling import gumbel_noise
from cheetah.plan import Plan
from cheetah.runtime.build.assemble import allocate_buffers, upload_weights
from cheetah.runtime.device.emulator import EmulatorBuffer, EmulatorDevice, EmulatorKernel
from cheetah.runtime.engine.kv_cache import CachedSequence, PagePool
from cheetah.runtime.engine.launcher import Launcher, Part, Sampling

Bits = NDArray[np.uint16]
Tensors = Mapping[str, Bits] | Callable[[str], Bits]
Progress = Callable[[str], None]

PROMPT_TOKENS = 3
TOGETHER_STEPS = 3
TEACHER_TOKENS = 5
TEMPERATURE, SAMPLING_SEED = 0.8, 7
SAMPLING_MARGIN = 1e-3
"""How far below the best a sampled token's noisy logit may lie: logarithms differ in their last bits."""
TOLERANCE_FACTOR, LEAST_TOLERANCE = 3.0, 0.01
"""Allowed: so many times the error that rounding activations to bf16 makes in the reference itself."""
LAUNCH_TIMEOUT_S = 120.0


class KernelFault(EmulatorError):
    """A launch that ended, but not as the runtime is promised: a number of steps or a token that cannot be."""


@dataclass(frozen=True)
class Agreement:
    """The kernel's logits against float32. Errors are relative (L2, the worst position); `problems` are sentences."""

    positions: int
    error: float
    tolerance: float
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if not self.ok:
            return "\n".join(self.problems)
        return f"logits of {self.positions} positions within {self.error:.2e} of float32 (allowed {self.tolerance:.2e})"


@dataclass(frozen=True)
class Verdict:
    """What was found. exploration: over all schedules. agreement: of the first run that ended, None if none did.

    sanitized: whether the race detector ran; `race` is its report, or how that run failed, "" if it found nothing.
    """

    exploration: ExploreReport
    agreement: Agreement | None
    sanitized: bool = False
    race: str = ""

    @property
    def ok(self) -> bool:
        return self.exploration.ok and not self.race and self.agreement is not None and self.agreement.ok

    @property
    def findings(self) -> tuple[str, ...]:
        """One text for each thing that is wrong."""
        found = [str(self.exploration)] if not self.exploration.ok else []
        if self.agreement is not None:
            found += self.agreement.problems
        return tuple([*found, self.race] if self.race else found)

    def __str__(self) -> str:
        agreement = "no launch ended well" if self.agreement is None else str(self.agreement)
        race = self.race or ("no unordered accesses" if self.sanitized else "not run")
        return f"schedules: {self.exploration}\nfloat32: {agreement}\nrace detector: {race}"


def check_kernel(
    text: str,
    manifest: Manifest,
    config: ModelConfig,
    tensors: Tensors,
    seeds: Iterable[int] = range(20),
    schedulers: Sequence[str] = SCHEDULERS,
    sanitizer: bool = True,
    *,
    progress: Progress = lambda line: None,
) -> Verdict:
    """Run a decode kernel under every scheduler with every seed, and once under ThreadSanitizer.

    text, manifest: of a kernel for an emulated machine; with `sanitizer`, of few blocks. tensors: the model's, bf16
    bits as uint16 by name. progress: gets a line as each run begins. Errors of the kernel are in the verdict;
    CheetahError is raised for what is no fault of the kernel (no g++, text and manifest of different kernels).
    """
    course = Course(manifest, config, tensors)
    first: list[Transcript] = []
    program = _compiled(text, manifest)

    def run(scheduler: str, seed: int) -> list[NDArray[Any]]:
        progress(f"{scheduler}, seed {seed}")
        transcript = course.run(_Scheduled(program, scheduler, seed))
        first.append(transcript)
        del first[1:]
        return transcript.outputs

    exploration = explore(run, seeds, schedulers)
    agreement = course.agreement(first[0]) if first else None
    if not sanitizer:
        return Verdict(exploration, agreement)
    progress("race detector")
    return Verdict(exploration, agreement, sanitized=True, race=find_races(text, manifest, config, tensors))


def find_races(text: str, manifest: Manifest, config: ModelConfig, tensors: Tensors) -> str:
    """The same launches once under ThreadSanitizer: its report, or how the run failed, or "" if nothing was found."""
    program = _compiled(text, manifest, sanitize=True)
    try:
        Course(manifest, config, tensors).run(_Scheduled(program, "random", 0))
    except EmulatorError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _compiled(text: str, manifest: Manifest, sanitize: bool = False) -> Program:
    manifest.check_text(text)
    parameters = [(parameter.name, parameter.ctype) for parameter in manifest.parameters]
    return compile_program(text, manifest.kernel, parameters, sanitize=sanitize)


@dataclass(frozen=True)
class _Scheduled:
    """A program whose launches all run under one schedule, with a limit of time."""

    program: Program
    scheduler: str
    seed: int

    def launch(self, blocks: int, threads: int, shared_bytes: int, values: Sequence[Any], **promises: Any) -> None:
        schedule: dict[str, Any] = {"scheduler": self.scheduler, "seed": self.seed, "timeout_s": LAUNCH_TIMEOUT_S}
        self.program.launch(blocks, threads, shared_bytes, values, **promises, **schedule)


@dataclass(frozen=True)
class Transcript:
    """What one run of the course gave. `ids` is the sequence from an empty cache: the prompt, then what was sampled.

    late_logits: f32 [TEACHER_TOKENS, vocab] after the cache that the reference filled. logits: f32 [len(ids), vocab].
    together: (ids, f32 [some last ids, vocab]) of sequences that shared steps, and of a prompt read several tokens a
    step. launches: the ids that each launch sampled. pool, exchange: the KV pool and the exchanged vectors at the end:
    f32 states show what bf16 and the choice of a token hide.
    """

    ids: tuple[int, ...]
    launches: tuple[tuple[int, ...], ...]
    late_logits: F32
    logits: F32
    together: tuple[tuple[tuple[int, ...], F32], ...]
    pool: Bits
    exchange: NDArray[np.uint8]

    @property
    def outputs(self) -> list[NDArray[Any]]:
        """Everything that must not depend on the schedule."""
        sampled = [np.array(tokens, np.int64) for tokens in self.launches]
        together = [logits for _, logits in self.together]
        return [*sampled, self.late_logits, self.logits, *together, self.pool, self.exchange]


class Course:
    """The launches that every schedule goes through, over the pages of the pool in a shuffled order.

    1. A cache filled by the reference to just below the length at which a head's keys are split over blocks: some given
       tokens with logits, across that length, then some more that are sampled.
    2. An empty cache: a prompt and three sampled tokens in one launch. 3. A launch that goes on at a temperature; the
    same again from the same place with a stop id, which ends it early. 4. A launch that goes on from there. 5. The
    logits of that whole sequence in one launch from an empty cache. 6. If the kernel takes several sequences: as many
    as it takes, of different lengths, with logits. If it takes several
       tokens of a sequence: that whole sequence again, so many tokens a step.
    """

    def __init__(self, manifest: Manifest, config: ModelConfig, tensors: Tensors) -> None:
        read = tensors.__getitem__ if isinstance(tensors, Mapping) else tensors
        self.manifest, self.config = manifest, config
        self.plan = Plan.from_dict(manifest.plan)
        self.reference = family_of(config).reference(config, read)
        self.rounded = family_of(config).reference(config, read, round_to_bf16)
        draw = np.random.default_rng(0)
        context = min(self.plan.max_context, config.max_position_embeddings)
        needed = PROMPT_TOKENS + 3 + 3 + 3 + 2
        if context < needed or self.plan.max_steps < needed:
            raise CheetahError(
                f"check needs max_context and max_steps of at least {needed}, not {context}, {self.plan.max_steps}"
            )
        filled = max(0, min(self.plan.kv_chunk_min - 2, context - TEACHER_TOKENS - 2))
        self.prompt = tuple(int(token) for token in draw.integers(0, config.vocab_size, PROMPT_TOKENS))
        self.filling = tuple(int(token) for token in draw.integers(0, config.vocab_size, filled))
        self.teacher = tuple(int(token) for token in draw.integers(0, config.vocab_size, TEACHER_TOKENS))
        self.context = context
        self.page_order = [int(page) for page in draw.permutation(self.plan.kv_pages)]
        self.late_reference, self.late_rounded = self._after_filling(self.reference), self._after_filling(self.rounded)
        keys, values = self.rounded.keys[:, :, :filled], self.rounded.values[:, :, :filled]
        self.filled_keys, self.filled_values = _bf16_bits(keys), _bf16_bits(values)
        self._fixed = self._fixed_buffers(read)

    def run(self, program: _Scheduled) -> Transcript:
        """One run. EmulatorError where a launch fails or breaks its promises."""
        device = EmulatorDevice()
        buffers: dict[str, Any] = {}
        allocate_buffers(device, self.manifest, buffers)
        buffers.update(self._fixed)
        cache = CachedSequence(PagePool(self.plan.kv_pages, self.page_order), self.plan.page_size, self.context)
        kernel = EmulatorKernel(self.manifest, program)
        launcher = Launcher(device, kernel, self.manifest, self.config, buffers, cache)
        logits = device.allocate(self.plan.max_steps * self.plan.tokens * self.config.vocab_size * 4)
        try:
            return self._launches(launcher, buffers, logits)
        except EmulatorError:
            raise
        except CheetahError as error:
            raise KernelFault(str(error)) from error

    def _launches(self, launcher: Launcher, buffers: Mapping[str, Any], logits: Any) -> Transcript:
        cache = launcher.cache
        self._fill_cache(cache, buffers)
        late_logits = launcher.score(self.teacher, logits, 1)
        late = launcher.launch(self.teacher[-1:], 2, Sampling()).token_ids
        launcher.restart()
        prompted = launcher.launch(self.prompt, PROMPT_TOKENS + 2, Sampling()).token_ids
        drawn = launcher.launch(prompted[-1:], 3, Sampling(TEMPERATURE, SAMPLING_SEED)).token_ids
        cache.length -= len(drawn)
        stopped = launcher.launch(prompted[-1:], 3, Sampling(TEMPERATURE, SAMPLING_SEED, (drawn[1],))).token_ids
        if stopped != drawn[: drawn.index(drawn[1]) + 1]:
            raise KernelFault(f"with stop id {drawn[1]} a launch sampled {stopped}; without it {drawn}")
        continued = launcher.launch(stopped[-1:], 2, Sampling()).token_ids
        launcher.restart()
        logits.fill(0xFF)
        ids = (*self.prompt, *prompted, *stopped, *continued)
        scores = launcher.score(ids, logits, 1)
        together = self._together(launcher, ids, logits)
        pool = buffers["kv"].download(np.uint16, self.manifest.buffer("kv").shape)
        exchange = buffers["exchange"].download(np.uint8, self.manifest.buffer("exchange").bytes)
        launches = (late, prompted, drawn, stopped, continued)
        return Transcript(ids, launches, late_logits, scores, together, pool, exchange)

    def _together(self, launcher: Launcher, ids: Sequence[int], logits: Any) -> tuple[tuple[tuple[int, ...], F32], ...]:
        """What more than one column gives; the caches are empty again afterwards."""
        cache, found = launcher.cache, []
        if self.plan.tokens > 1:
            launcher.restart()
            found.append((tuple(ids), launcher.score(ids, logits)))
        if self.plan.batch > 1:
            launcher.restart()
            caches = [CachedSequence(cache.pool, cache.page_size, self.context) for _ in range(self.plan.batch)]
            sequences = [tuple(ids[: number + TOGETHER_STEPS]) for number in range(self.plan.batch)]
            for sequence, own in zip(sequences, caches, strict=True):
                if len(sequence) > TOGETHER_STEPS:
                    begun = len(sequence) - TOGETHER_STEPS
                    launcher.launch_together([Part(own, sequence[: begun + 1], begun)])
            parts = [
                Part(own, sequence[-TOGETHER_STEPS:], TOGETHER_STEPS)
                for sequence, own in zip(sequences, caches, strict=True)
            ]
            launcher.launch_together(parts, logits)
            scores = logits.download(np.float32, (TOGETHER_STEPS, self.plan.tokens, self.config.vocab_size))
            order = [part for part, _ in launcher.columns]
            found += [(ids_, scores[:, order.index(number)].copy()) for number, ids_ in enumerate(sequences)]
            for own in caches:
                own.clear()
        return tuple(found)

    def agreement(self, transcript: Transcript) -> Agreement:
        """The transcript against the reference, and its sampled ids against its own logits."""
        found = np.concatenate([transcript.logits, transcript.late_logits, *(part for _, part in transcript.together)])
        wanted, rounded = (
            np.concatenate(
                [
                    *(reference.forward(transcript.ids), late),
                    *(reference.forward(ids)[-len(part) :] for ids, part in transcript.together),
                ]
            )
            for reference, late in ((self.reference, self.late_reference), (self.rounded, self.late_rounded))
        )
        errors = relative_errors(found, wanted)
        tolerance = max(LEAST_TOLERANCE, TOLERANCE_FACTOR * float(relative_errors(rounded, wanted).max()))
        problems = []
        if not np.all(errors <= tolerance):  # a NaN is no agreement
            worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
            problems.append(
                f"the logits of position {worst} are {errors[worst]:.2e} from float32, allowed is {tolerance:.2e}"
            )
        problems += self._sampling_problems(transcript)
        return Agreement(len(found), float(errors.max()), tolerance, tuple(problems))

    def _sampling_problems(self, transcript: Transcript) -> list[str]:
        """Tokens that the logits before them do not explain."""
        _, prompted, _, stopped, _ = transcript.launches
        drawn = range(PROMPT_TOKENS + len(prompted), PROMPT_TOKENS + len(prompted) + len(stopped))
        problems = []
        for position in range(PROMPT_TOKENS, len(transcript.ids)):
            token, scores = transcript.ids[position], transcript.logits[position - 1]
            if position in drawn:
                noise = gumbel_noise(np.arange(len(scores)), SAMPLING_SEED, position)
                scores = scores / np.float32(TEMPERATURE) + noise
            margin = SAMPLING_MARGIN if position in drawn else 0.0
            if not scores[token] >= scores.max() - margin:
                problems.append(
                    f"token {token} was sampled at position {position}, its logits give {int(scores.argmax())}"
                )
        return problems

    def _after_filling(self, reference: ReferenceModel) -> F32:
        """The reference's logits of the given tokens after `filling`."""
        reference.reset()
        for token in self.filling:
            reference.step(token)
        return np.stack([reference.step(token) for token in self.teacher])

    def _fixed_buffers(self, read: Callable[[str], Bits]) -> dict[str, EmulatorBuffer]:
        """The buffers that no launch writes, filled once for all runs."""
        device = EmulatorDevice()
        constant = family_of(self.config).model_buffers(self.config)
        fixed = {name: device.allocate(self.manifest.buffer(name).bytes) for name in constant}
        upload_weights(_Weights(self.config, read), self.manifest, fixed, lambda written: None)
        return fixed

    def _fill_cache(self, cache: CachedSequence, buffers: Mapping[str, Any]) -> None:
        """Writes `filling`'s keys and values to the cache's pages; all else in the pool stays poisoned."""
        cache.reserve(len(self.filling))
        table = cache.table(self.plan.pages_per_sequence)
        shape = self.manifest.buffer("kv").shape
        pool = buffers["kv"].download(np.uint16, shape)
        for position in range(len(self.filling)):
            page, slot = table[position // self.plan.page_size], position % self.plan.page_size
            pool[:, page, 0, :, slot] = self.filled_keys[:, :, position]
            pool[:, page, 1, :, slot] = self.filled_values[:, :, position]
        buffers["kv"].upload(pool)
        cache.length = len(self.filling)


@dataclass(frozen=True)
class _Weights:
    """A model's tensors as the runtime's packing wants them."""

    config: ModelConfig
    tensor: Callable[[str], Bits]


def relative_errors(found: F32, wanted: F32) -> F32:
    """|found - wanted| / |wanted| (L2) of each row."""
    return np.asarray(np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1))


def _bf16_bits(values: F32) -> Bits:
    return np.asarray(round_to_bf16(values).view(np.uint32) >> 16).astype(np.uint16)
