"""Whether the kernels that are generated for a model are right under any schedule: the core of `cheetah check`.

The same launches (`judged_steps`, `judged_passes`) run in the emulator under many schedules, and must give the same
bits under all of them, agree with float32, and (with the sanitizer) access nothing unordered. Every load and store is
watched (`cheetah/emulator/runtime/watch.h`). `check_model` does that for a model's kernels, and for those of an awkward
small model of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from cheetah.emulator import SCHEDULERS, EmulatorError, ExploreReport, explore
from cheetah.generate import choose_plan, describe_pass, generate_head, generate_kernel, generate_pass
from cheetah.models.config import ModelConfig
from cheetah.models.family import Tensors
from cheetah.package import Generated
from cheetah.plan import PlanError, gpu_named
from cheetah.plan.prompt import PassPlan, default_pass_plan, short_pass_plans
from cheetah.runtime.assembly.buffers import Weights
from cheetah.tools.awkward import awkward_config, awkward_plan, awkward_tensors
from cheetah.tools.judged_passes import JudgedPasses
from cheetah.tools.judged_steps import Agreement, JudgedSteps, KernelFault
from cheetah.tools.rig import Rig, weights_of

Progress = Callable[[str], None]

AWKWARD_SHARE = 4
"""One of so many schedules is spent on the awkward model."""
PASS_SHARE = 4
"""One of so many schedules is spent on passes over prompts."""
PASS_TOKENS = 64
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
    how = partial(_explored, schedulers=schedulers, stop_after=stop_after, progress=progress)
    awkward = awkward_subject(subject.config, subject.plan)
    few = max(1, seeds // AWKWARD_SHARE)
    yield awkward, how(JudgedSteps(_step_rig(awkward, gpu)), range(few))
    verdict = how(JudgedSteps(_step_rig(subject, gpu)), range(max(1, seeds - few)))
    yield subject, _with_races(verdict, sanitizer, progress, lambda: JudgedSteps(_race_rig(subject)))


class Launches(Protocol):
    """What a rig is judged by."""

    def run(self, scheduler: str, seed: int) -> Any:
        """What they gave under one schedule. EmulatorError where one fails."""

    def outputs(self, found: Any) -> list[NDArray[Any]]:
        """All of it that must not depend on the schedule."""

    def agreement(self, found: Any) -> Agreement:
        """It beside float32."""

    def pace_problem(self) -> str:
        """What is wrong with how far the copies ran ahead in all runs, or ""."""


def check_kernel(
    made: Generated,
    weights: Weights,
    seeds: Sequence[int] = range(20),
    schedulers: Sequence[str] = SCHEDULERS,
    sanitizer: bool = True,
    *,
    stop_after: int | None = None,
    progress: Progress = lambda line: None,
) -> Verdict:
    """Run a decode kernel under every scheduler with every seed, and once under ThreadSanitizer.

    made: a kernel for an emulated machine; with `sanitizer`, of few blocks. progress: gets a line as each run begins.
    Errors of the kernel are in the verdict; CheetahError is raised for what is no fault of the kernel (no g++, text and
    manifest of different kernels).
    """
    verdict = _explored(JudgedSteps(Rig(weights, made, watched=True)), seeds, schedulers, stop_after, progress)
    return _with_races(verdict, sanitizer, progress, lambda: JudgedSteps(Rig(weights, made, sanitize=True)))


def check_passes(
    subject: Subject,
    gpu: str,
    seeds: int,
    schedulers: Sequence[str],
    sanitizer: bool,
    *,
    stop_after: int | None = None,
    progress: Progress = lambda line: None,
) -> Iterator[tuple[Subject, Verdict]]:
    """The verdict on passes over the subject's prompts, from a quarter of the `seeds` schedules of each scheduler, and
    with `sanitizer` one run under the race detector; then on those that have phases in which parts of products are
    added, from as many schedules, if there are such. Nothing where there are no passes over such weights. stop_after:
    schedules that failed."""
    machine = gpu_named(gpu)
    head_dim = subject.config.head_dim
    whole, cut = default_pass_plan(machine, PASS_TOKENS, head_dim), short_pass_plans(machine, head_dim)[0]
    how = partial(_explored, schedulers=schedulers, stop_after=stop_after, progress=progress)
    subject = replace(subject, plan={"batch": 2, **subject.plan})
    few = range(max(1, seeds // PASS_SHARE))
    try:
        rig = _pass_rig(subject, gpu, whole)
    except PlanError:
        return
    verdict = _with_races(
        how(JudgedPasses(rig), few),
        sanitizer,
        progress,
        lambda: JudgedPasses(_pass_rig(subject, RACE_GPU, whole, True)),
    )
    yield replace(subject, kind="passes over its prompts"), verdict
    (passes,) = (one.manifest.phases for name, one in rig.kernels.items() if "pass" in name)
    if describe_pass(subject.config, machine, rig.plan, cut).phases != passes:
        named = replace(subject, kind="passes over few tokens, whose products are cut")
        yield named, how(JudgedPasses(_pass_rig(subject, gpu, cut)), few)


def _step_rig(subject: Subject, gpu: str, **mode: bool) -> Rig:
    made = generate_kernel(subject.config, gpu, **subject.plan)
    return Rig(weights_of(subject.config, subject.tensors), made, **(mode or {"watched": True}))


def _race_rig(subject: Subject) -> Rig:
    return _step_rig(subject, RACE_GPU, sanitize=True)


def _pass_rig(subject: Subject, gpu: str, pass_plan: PassPlan, sanitize: bool = False) -> Rig:
    """PlanError where the model has no passes."""
    config, plan = subject.config, choose_plan(subject.config, gpu_named(gpu), **subject.plan)
    made = generate_pass(config, gpu, plan, pass_plan), generate_head(config, gpu, plan, PASS_TOKENS)
    return Rig(weights_of(config, subject.tensors), *made, sanitize=sanitize, watched=not sanitize)


def _explored(
    launches: Launches, seeds: Sequence[int], schedulers: Sequence[str], stop_after: int | None, progress: Progress
) -> Verdict:
    first: list[Any] = []

    def run(scheduler: str, seed: int) -> list[NDArray[Any]]:
        progress(f"{scheduler}, seed {seed}")
        found = launches.run(scheduler, seed)
        if not first and stop_after and not (agreement := launches.agreement(found)).ok:
            raise KernelFault(str(agreement))
        first.append(found)
        del first[1:]
        return launches.outputs(found)

    exploration = explore(run, seeds, schedulers, stop_after=stop_after)
    return Verdict(exploration, launches.agreement(first[0]) if first else None, pace=launches.pace_problem())


def _with_races(verdict: Verdict, sanitizer: bool, progress: Progress, launches: Callable[[], Launches]) -> Verdict:
    """The verdict with what the race detector says of one more run, if that is wanted."""
    if not sanitizer:
        return verdict
    progress("race detector")
    return replace(verdict, sanitized=True, race=find_races(launches()))


def find_races(launches: Launches) -> str:
    """Of launches of a rig under ThreadSanitizer, once: its report, or how the run failed, or ""."""
    try:
        launches.run("random", 0)
    except EmulatorError as error:
        return f"{type(error).__name__}: {error}"
    return ""
