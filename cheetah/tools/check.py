"""Whether the kernels that are generated for a model are right under any schedule: the core of `cheetah check`.

`check_kernel` takes a kernel's text, runs the same launches (`course`) in the emulator under many schedules, and
requires the same bits of all of them, agreement with float32, and (with the sanitizer) that no two accesses are
unordered. Every load and store is watched (`cheetah/emulator/runtime/watch.h`). `check_model` does that for a model's
kernel, and for that of an awkward small model of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from cheetah.emulator import SCHEDULERS, EmulatorError, ExploreReport, compile_program, explore
from cheetah.emulator.program import Program
from cheetah.generate import generate_kernel
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.tools.awkward import awkward_config, awkward_plan, awkward_tensors
from cheetah.tools.course import Agreement, Course, KernelFault, Tensors, Transcript

Progress = Callable[[str], None]

LAUNCH_TIMEOUT_S = 120.0
AWKWARD_SHARE = 4
"""One of so many schedules is spent on the awkward model."""
MANY_CHUNKS = 2
"""Copies of a launch, for each block and chunk in flight, from which on they must come as far ahead as they may."""
RACE_GPU = "emulator-2"
"""The race detector is slow: two blocks are all that it gets."""


@dataclass(frozen=True)
class Verdict:
    """What was found. exploration: over all schedules. agreement: of the first run that ended, None if none did.

    sanitized: whether the race detector ran; `race` is its report, or how that run failed, "" if it found nothing.
    pace: what is wrong with how far the copies ran ahead, or "".
    """

    exploration: ExploreReport
    agreement: Agreement | None
    sanitized: bool = False
    race: str = ""
    pace: str = ""

    @property
    def ok(self) -> bool:
        agrees = self.agreement is not None and self.agreement.ok
        return self.exploration.ok and agrees and not self.race and not self.pace

    @property
    def findings(self) -> tuple[str, ...]:
        """One text for each thing that is wrong."""
        found = [str(self.exploration)] if not self.exploration.ok else []
        if self.agreement is not None:
            found += self.agreement.problems
        return (*found, *filter(None, (self.pace, self.race)))

    def __str__(self) -> str:
        agreement = "no launch ended well" if self.agreement is None else str(self.agreement)
        race = self.race or ("no unordered accesses" if self.sanitized else "not run")
        pace = f"\ncopies: {self.pace}" if self.pace else ""
        return f"schedules: {self.exploration}\nfloat32: {agreement}{pace}\nrace detector: {race}"


@dataclass(frozen=True)
class Subject:
    """A model to check, with fields of its kernels' plan. kind: what it is, in words."""

    kind: str
    config: ModelConfig
    tensors: Tensors
    plan: Mapping[str, Any] = field(default_factory=dict)


def awkward_subject(config: ModelConfig, plan: Mapping[str, Any]) -> Subject:
    """The awkward small model of the same kind as `config`."""
    small = awkward_config(config)
    sizes = f"hidden {small.hidden_size}, ffn {small.intermediate_size}, vocab {small.vocab_size}"
    kind = f"an awkward small model of its kind ({sizes}; faint embeddings, equal logits)"
    return Subject(kind, small, awkward_tensors(small), awkward_plan(plan))


def check_model(
    subject: Subject,
    gpu: str = "emulator",
    seeds: int = 20,
    schedulers: Sequence[str] = SCHEDULERS,
    sanitizer: bool = True,
    *,
    stop_after: int | None = None,
    progress: Progress = lambda line: None,
) -> Iterator[tuple[Subject, Verdict]]:
    """Check a model's kernel and that of the awkward one, which gets a quarter of the `seeds` schedules of each
    scheduler (one at least): each subject with its verdict, as it is found, the awkward one first, which takes less.

    With `sanitizer` the model's own kernel also runs once under the race detector, on two blocks. After `stop_after`
    schedules that failed, or disagree with float32, a subject is explored no further.
    """
    explored = partial(_explored, gpu=gpu, schedulers=schedulers, stop_after=stop_after, progress=progress)
    awkward = awkward_subject(subject.config, subject.plan)
    few = max(1, seeds // AWKWARD_SHARE)
    yield awkward, explored(awkward, range(few))
    verdict = explored(subject, range(max(1, seeds - few)))
    if sanitizer:
        progress("race detector")
        made = generate_kernel(subject.config, RACE_GPU, **subject.plan)
        race = find_races(made.text, made.manifest, subject.config, subject.tensors)
        verdict = replace(verdict, sanitized=True, race=race)
    yield subject, verdict


def _explored(subject: Subject, seeds: Sequence[int], gpu: str, **how: Any) -> Verdict:
    made = generate_kernel(subject.config, gpu, **subject.plan)
    return check_kernel(made.text, made.manifest, subject.config, subject.tensors, seeds, sanitizer=False, **how)


def check_kernel(
    text: str,
    manifest: Manifest,
    config: ModelConfig,
    tensors: Tensors,
    seeds: Sequence[int] = range(20),
    schedulers: Sequence[str] = SCHEDULERS,
    sanitizer: bool = True,
    *,
    stop_after: int | None = None,
    progress: Progress = lambda line: None,
) -> Verdict:
    """Run a decode kernel under every scheduler with every seed, and once under ThreadSanitizer.

    text, manifest: of a kernel for an emulated machine; with `sanitizer`, of few blocks. tensors: the model's, bf16
    bits as uint16 by name. progress: gets a line as each run begins. Errors of the kernel are in the verdict;
    CheetahError is raised for what is no fault of the kernel (no g++, text and manifest of different kernels).
    """
    course = Course(manifest, config, tensors)
    first: list[Transcript] = []
    program = _Paced(_compiled(text, manifest), int(manifest.plan["in_flight"]))

    def run(scheduler: str, seed: int) -> list[NDArray[Any]]:
        progress(f"{scheduler}, seed {seed}")
        transcript = course.run(Scheduled(program, scheduler, seed))
        if not first and stop_after and not (agreement := course.agreement(transcript)).ok:
            raise KernelFault(str(agreement))
        first.append(transcript)
        del first[1:]
        return transcript.outputs

    exploration = explore(run, seeds, schedulers, stop_after=stop_after)
    verdict = Verdict(exploration, course.agreement(first[0]) if first else None, pace=program.problem())
    if not sanitizer:
        return verdict
    progress("race detector")
    return replace(verdict, sanitized=True, race=find_races(text, manifest, config, tensors))


def find_races(text: str, manifest: Manifest, config: ModelConfig, tensors: Tensors) -> str:
    """The same launches once under ThreadSanitizer: its report, or how the run failed, or "" if nothing was found."""
    program = _compiled(text, manifest, sanitize=True)
    course = Course(manifest, config, tensors)
    try:
        course.run(Scheduled(program, "random", 0))
    except EmulatorError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _compiled(text: str, manifest: Manifest, sanitize: bool = False) -> Program:
    """With every load and store watched, or under the race detector."""
    manifest.check_text(text)
    parameters = [(parameter.name, parameter.ctype) for parameter in manifest.parameters]
    return compile_program(text, manifest.kernel, parameters, sanitize=sanitize, watched=not sanitize)


@dataclass
class _Paced:
    """A program that notes how many chunks its blocks had under way. in_flight: how many its plan wants."""

    program: Program
    in_flight: int
    most_chunks: int = 0
    has_enough: bool = False

    def launch(self, blocks: int, *arguments: Any, **options: Any) -> None:
        stats = self.program.launch(blocks, *arguments, **options)
        self.most_chunks = max(self.most_chunks, stats.most_chunks)
        self.has_enough = self.has_enough or stats.copies > MANY_CHUNKS * blocks * self.in_flight

    def problem(self) -> str:
        """That the copies never came as far ahead as the plan lets them, where there was enough to copy."""
        if not self.has_enough or self.most_chunks >= self.in_flight:
            return ""
        return (
            f"a block never had more than {self.most_chunks} chunks under way, its plan lets it have {self.in_flight}: "
            "the producer lane waits for a chunk that it need not wait for yet"
        )


@dataclass(frozen=True)
class Scheduled:
    """A program whose launches all run under one schedule, with a limit of time."""

    program: Program | _Paced
    scheduler: str
    seed: int

    def launch(self, blocks: int, threads: int, shared_bytes: int, values: Sequence[Any], **promises: Any) -> None:
        schedule: dict[str, Any] = {"scheduler": self.scheduler, "seed": self.seed, "timeout_s": LAUNCH_TIMEOUT_S}
        self.program.launch(blocks, threads, shared_bytes, values, **promises, **schedule)
