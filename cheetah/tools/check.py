"""Whether the kernels that are generated for a model are right under any schedule: the core of `cheetah check`.

The same launches (`judged_steps`, `judged_passes`) run in the emulator under many schedules, and must give the same
bits under all of them, agree with float32, and (with the sanitizer) access nothing unordered. Every load and store is
watched (`cheetah/emulator/runtime/watch.h`). `check_model` does that for a model's kernels, and for those of small
models of its kind which have what the named model's plan has on a GPU (`subjects`, `features`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from cheetah.emulator import SCHEDULERS, EmulatorError, ExploreReport, explore
from cheetah.generate import choose_plan, describe_pass, generate_head, generate_kernel, generate_pass
from cheetah.package import Generated
from cheetah.plan import Gpu, ModelShape, Plan, PlanError, gpu_named
from cheetah.plan.formats import KV_TILE_TOKENS
from cheetah.plan.gpu import together
from cheetah.plan.prompt import PassPlan, default_pass_plan, short_pass_plans
from cheetah.tools.explained import kept_text
from cheetah.tools.features import features_of, features_of_passes
from cheetah.tools.judged_drafts import JudgedDrafts
from cheetah.tools.judged_passes import JudgedPasses
from cheetah.tools.judged_steps import Agreement, JudgedSteps
from cheetah.tools.judged_taps import JudgedTaps, JudgedTapsOfPasses
from cheetah.tools.judging_device import KernelFault
from cheetah.tools.rig import Rig
from cheetah.tools.side_by_side import Work, in_order
from cheetah.tools.step_course import judged_context
from cheetah.tools.subjects import (
    MANY_TOKENS,
    MOST_LAYERS,
    Subject,
    awkward_subject,
    barrier_subject,
    drafting_subject,
    fused_subject,
    many_tokens_subject,
    tapped_subject,
)

Progress = Callable[[str], None]

TOGETHER = 2
"""Processes: launches of one process go one after the other. One at a time where the next may never be wanted."""
OFTEN = 2
"""Schedules from which on to optimise a text takes less time than it saves."""
EARLY = 1
"""So many subjects are begun before those of the race detector, whose runs are the longest pieces of work."""

WARPS = {"consumer_warps": 8}
"""As on a GPU: fewer than the emulator's rule gives would move no registers."""
AWKWARD_SHARE = 2
"""So many times as many schedules are spent on awkward models, which are small and are found to be wrong first."""
PASS_TOKENS, LARGE_TILE = 64, 64
SHORT_CONTEXT = 96
"""Tokens of the sequences that remember."""
FEW_SEQUENCES = {"batch": 2, "tokens": 2}
"""Of the kernels of steps beside passes."""
CUT_SIZES: tuple[dict[str, int], ...] = (
    {},
    {"intermediate_size": 512},
    {"intermediate_size": 1024},
    {"hidden_size": 1024},
)
"""Of models whose passes over few tokens are looked at; other formats are cut at other sizes, and beside experts what
reads hidden vectors may be all that is cut."""
RACE_GPU, CUT_GPU = "emulator-2", "emulator-8"
"""The race detector is slow: two blocks are all that it gets. Of passes over few tokens, products are cut where there
are more blocks than tiles."""


@dataclass(frozen=True)
class Verdict:
    """What was found. exploration: over all schedules, None where the race detector alone ran; agreement: of the first
    run that ended, None if none did. race: what that detector says, or how its run failed, "" if it found nothing, None
    where it did not run. pace: what is wrong with how far the copies ran ahead, or "". texts: where the kernels' texts
    lie, if something is wrong. features: of the kernels (`features`)."""

    exploration: ExploreReport | None = None
    agreement: Agreement | None = None
    race: str | None = None
    pace: str = ""
    texts: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def findings(self) -> tuple[str, ...]:
        """One text for each thing that is wrong."""
        found = []
        if self.exploration is not None:
            found += [str(self.exploration)] if not self.exploration.ok else []
            found += ["no launch ended well"] if self.agreement is None and self.exploration.ok else []
        if self.agreement is not None:
            found += self.agreement.problems
        return (*found, *filter(None, (self.pace, self.race)))

    def __str__(self) -> str:
        lines = []
        if self.exploration is not None:
            agreement = "no launch ended well" if self.agreement is None else str(self.agreement)
            lines += [f"schedules: {self.exploration}", f"float32: {agreement}"]
        lines += [f"copies: {self.pace}"] if self.pace else []
        lines += [] if self.race is None else [f"race detector: {self.race or 'no unordered accesses'}"]
        return "\n".join([*lines, *(f"the kernel: {text}" for text in self.texts)])


class Launches(Protocol):
    """What a rig is judged by."""

    rig: Rig

    def run(self, scheduler: str, seed: int, is_short: bool = False) -> Any:
        """What they gave under one schedule; is_short: fewer of them. EmulatorError where one fails."""

    def outputs(self, found: Any) -> Mapping[str, NDArray[Any]]:
        """All of it that must not depend on the schedule."""

    def agreement(self, found: Any) -> Agreement:
        """It beside float32."""

    def pace_problem(self) -> str:
        """What is wrong with how far the copies ran ahead in all runs, or ""."""


@dataclass(frozen=True)
class Case:
    """Kernels to be explored and how they are judged. share: how many schedules they get for each seed."""

    subject: Subject
    made: tuple[Generated, ...]
    judged: Callable[[Rig], Launches]
    share: int = 1

    @property
    def features(self) -> frozenset[str]:
        """Of all its kernels but the head's."""
        first = self.made[0].manifest
        return frozenset(features_of(self.subject.config, first))

    def launches(self, **mode: bool) -> Launches:
        """Once the kernels are compiled; mode: see `Rig`."""
        return self.judged(Rig(self.subject.weights, *self.made, **mode))


def check_model(
    subject: Subject,
    gpu: str = "emulator",
    seeds: int = 1,
    schedulers: Sequence[str] = SCHEDULERS,
    sanitizer: bool = True,
    *,
    only: str = "",
    first: bool = False,
    progress: Progress = lambda line: None,
) -> Iterator[tuple[Subject, Verdict]]:
    """Check a model's kernels and those of the small models beside it: each subject with its verdict, as it is found,
    the small ones first.

    Each is looked at in a process of its own, two at a time. gpu: of one rank or several. With `sanitizer` the awkward
    one's kernels also run once under the race detector, on two blocks of one rank. only: "steps" or "passes". first:
    one at a time, up to the first wrong verdict, and a subject's exploration up to the first schedule that shows it.
    """
    every = pieces(subject, gpu, sanitizer, only)
    shares = sum(one.keywords.get("share", 1) for one, is_raced in every if not is_raced)
    clock = _Clock(0 if first else seeds * len(schedulers) * shares, progress)
    begun: list[Subject] = []

    def works() -> Iterator[tuple[Work[Verdict], Progress]]:
        """The pieces of work, their kernels generated as they come."""
        for maker, is_raced in every:
            for case in made_by(maker):
                begun.append(case.subject)
                if is_raced:
                    yield partial(_raced_aloud, case), clock.say
                else:
                    yield partial(_explored_aloud, case, seeds, schedulers, first), clock.of(case.subject.kind)

    for number, verdict in enumerate(in_order(works(), 1 if first else TOGETHER)):
        yield begun[number], verdict
        if first and not verdict.ok:
            return


Maker = partial[Case]


def pieces(subject: Subject, gpu: str, sanitizer: bool = True, only: str = "") -> list[tuple[Maker, bool]]:
    """Who makes each case that is looked at, in this order, and whether the race detector gets it."""
    kinds = [only] if only else ["steps", "passes"]
    explored = [(maker, False) for kind in kinds for maker in _MAKERS[kind](subject, gpu)]
    raced = [(maker, True) for kind in kinds if sanitizer for maker in _raced_makers(kind, subject)]
    return [*explored[:EARLY], *raced, *explored[EARLY:]]


def _explored_aloud(case: Case, seeds: int, schedulers: Sequence[str], first: bool, say: Progress) -> Verdict:
    often = not first and seeds * len(schedulers) >= OFTEN
    return explored(case, case.launches(watched=True, often=often), seeds, schedulers, first, say)


def _raced_aloud(case: Case, say: Progress) -> Verdict:
    say(f"{case.subject.kind}: the race detector, which is slow")
    return raced(case, case.launches(sanitize=True))


def _step_makers(subject: Subject, gpu: str) -> list[Maker]:
    config, ranks = subject.config, gpu_named(gpu).ranks
    plan = _bare(subject.plan)
    if config.delta_layers:  # a token that is remembered costs the emulator as much as many keys
        plan = {"max_context": SHORT_CONTEXT, **plan}
    makers = awkward_subject, many_tokens_subject, barrier_subject
    awkward, many, barrier = (make(config, plan, ranks=ranks) for make in makers)
    several = partial(JudgedSteps, is_of_several=True)
    return [
        partial(_steps, awkward, gpu, share=AWKWARD_SHARE),
        partial(_steps, many, gpu, several),
        partial(_steps, barrier, gpu, several),
        partial(_steps, replace(subject, plan={**WARPS, **plan}), gpu),
        *_draft_makers(subject, gpu, ranks),
        *_tap_makers(subject, gpu, ranks),
        *_fused_makers(subject, gpu),
    ]


def _fused_makers(subject: Subject, gpu: str) -> list[Maker]:
    """Of kernels with a fused router, if the options ask for one."""
    if not subject.plan.get("fused_router"):
        return []
    return [partial(_steps, fused_subject(subject.config, _bare(subject.plan)), gpu)]


def _draft_makers(subject: Subject, gpu: str, ranks: int = 1) -> list[Maker]:
    """Of kernels that verify drafts, if the options name some."""
    if not subject.plan.get("drafts"):
        return []
    return [partial(_steps, drafting_subject(subject.config, subject.plan, ranks), gpu, JudgedDrafts)]


def _tap_makers(subject: Subject, gpu: str, ranks: int = 1) -> list[Maker]:
    """Of kernels that keep hidden states, if the options name layers."""
    if not subject.plan.get("taps"):
        return []
    return [partial(_steps, tapped_subject(subject.config, _bare(subject.plan), ranks), gpu, JudgedTaps)]


def _bare(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Without what has subjects of its own."""
    return {name: value for name, value in plan.items() if name not in ("drafts", "taps", "fused_router")}


def _pass_makers(subject: Subject, gpu: str) -> list[Maker]:
    has_taps, subject = bool(subject.plan.get("taps")), replace(subject, plan=_bare(subject.plan))
    config, plan, ranks = subject.config, subject.plan, gpu_named(gpu).ranks
    few_bits = {} if config.delta_layers else {"kv_dtype": "e4m3"}
    awkward = awkward_subject(config, {**few_bits, **plan}, MOST_LAYERS, ranks)
    tapped = tapped_subject(config, plan, ranks)
    return [
        partial(_passes, awkward, gpu, default_pass_plan, share=AWKWARD_SHARE),
        partial(_cut_passes, subject, gpu),
        partial(_passes, subject, gpu, _of_several_warpgroups),
        *([partial(_passes, tapped, gpu, default_pass_plan, JudgedTapsOfPasses)] if has_taps else []),
    ]


def _cut_passes(subject: Subject, gpu: str) -> Case:
    """Passes over few tokens, of sizes of which most is cut. PlanError where the model has no passes. Several ranks
    make none with items of a fixed length."""
    config, plan, ranks = subject.config, subject.plan, gpu_named(gpu).ranks
    gpu = together(gpu_named(CUT_GPU), ranks).name
    if ranks > 1:
        plan = {"kv_chunk": 0, **plan}
    subjects = [many_tokens_subject(config, plan, {**MANY_TOKENS, **sizes}, ranks) for sizes in CUT_SIZES]
    most = max(subjects, key=lambda one: len(_features_of_passes(one, gpu, _of_few_tokens)))
    return _passes(most, gpu, _of_few_tokens)


def _of_few_tokens(machine: Gpu, tokens: int, shape: ModelShape) -> PassPlan:
    return short_pass_plans(machine, shape)[0]


def _of_several_warpgroups(machine: Gpu, tokens: int, shape: ModelShape) -> PassPlan:
    return replace(default_pass_plan(machine, tokens, shape), warpgroups=2)


def _steps(subject: Subject, gpu: str, judged: Callable[[Rig], Launches] = JudgedSteps, share: int = 1) -> Case:
    made = generate_kernel(subject.config, subject.machine(gpu), **subject.plan)
    judged_context(subject.config, Plan.from_dict(made.manifest.plan))  # before it is compiled
    return Case(subject, (made,), judged, share)


def _passes(
    subject: Subject,
    gpu: str,
    choose: Callable[..., PassPlan],
    judged: Callable[[Rig], Launches] = JudgedPasses,
    share: int = 1,
) -> Case:
    """PlanError where the model has no passes."""
    config, machine = subject.config, subject.machine(gpu)
    subject = replace(subject, kind=f"passes over prompts, {subject.kind}", plan={**subject.plan, **FEW_SEQUENCES})
    plan, pass_plan = _plans_of_passes(subject, machine, choose)
    made = generate_pass(config, machine, plan, pass_plan), generate_head(config, machine, plan, PASS_TOKENS)
    return Case(subject, made, judged, share)


def _features_of_passes(subject: Subject, gpu: str, choose: Callable[..., PassPlan]) -> set[str]:
    machine = subject.machine(gpu)
    return features_of_passes(subject.config, machine, *_plans_of_passes(subject, machine, choose))


def _plans_of_passes(subject: Subject, machine: Gpu, choose: Callable[..., PassPlan]) -> tuple[Plan, PassPlan]:
    """With as large tiles as heads and a stage's keys want: the emulator's are small by rule. PlanError where there are
    no passes."""
    config = subject.config
    plan = choose_plan(config, machine, **{**subject.plan, **FEW_SEQUENCES})
    chosen = choose(machine, PASS_TOKENS, config.shape)
    larger = replace(chosen, warpgroups=2)
    for one in (chosen, larger):
        with suppress(PlanError):
            describe_pass(config, machine, plan, one)
            return plan, one
    return plan, replace(larger, tile_tokens=LARGE_TILE, cut_tokens=LARGE_TILE if chosen.cut_tokens else 0)


_MAKERS = {"steps": _step_makers, "passes": _pass_makers}


def _raced_makers(kind: str, subject: Subject) -> list[Maker]:
    """Of the kernels that run under the race detector: small ones, on few blocks, whose rows have many states."""
    bare = _bare(subject.plan)
    if kind == "passes":
        return [partial(_passes, awkward_subject(subject.config, bare), RACE_GPU, default_pass_plan)]
    plan = {**WARPS, "kv_chunk": KV_TILE_TOKENS, **bare}
    others = *_draft_makers(subject, RACE_GPU), *_fused_makers(subject, RACE_GPU)
    return [partial(_steps, awkward_subject(subject.config, plan), RACE_GPU), *others]


def made_by(maker: Maker) -> Iterator[Case]:
    """The case, if there are such kernels for the model."""
    try:
        yield maker()
    except PlanError:
        if maker.func is _steps:
            raise


def explored(
    case: Case,
    launches: Launches,
    seeds: int = 1,
    schedulers: Sequence[str] = SCHEDULERS,
    first: bool = False,
    progress: Progress = lambda line: None,
) -> Verdict:
    """What so many schedules of each scheduler show, times the case's share. first: up to the first that shows it."""
    ended = list[Any]()

    def run(scheduler: str, seed: int) -> Mapping[str, NDArray[Any]]:
        progress(f"{scheduler}, seed {seed}")
        found = launches.run(scheduler, seed)
        if not ended and first and not (agreement := launches.agreement(found)).ok:
            raise KernelFault(str(agreement))
        ended.append(found)
        del ended[1:]
        return launches.outputs(found)

    exploration = explore(run, range(seeds * case.share), schedulers, stop_after=1 if first else None)
    agreement = launches.agreement(ended[0]) if ended else None
    verdict = Verdict(exploration, agreement, pace=launches.pace_problem(), features=case.features)
    return _with_texts(verdict, case)


def raced(case: Case, launches: Launches) -> Verdict:
    """What the race detector says of a short run."""
    return _with_texts(Verdict(race=find_races(launches)), case)


def _with_texts(verdict: Verdict, case: Case) -> Verdict:
    """With the kernels' texts kept, if something is wrong."""
    return verdict if verdict.ok else replace(verdict, texts=tuple(str(kept_text(made)) for made in case.made))


def find_races(launches: Launches) -> str:
    """Of launches of a rig under ThreadSanitizer, once: its report, or how the run failed, or ""."""
    try:
        launches.run("random", 0, is_short=True)
    except EmulatorError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Clock:
    """Says which run begins, and about how long all of them will take."""

    def __init__(self, runs: int, say: Progress) -> None:
        self._left, self._done, self._say, self._started = runs, 0, say, time.monotonic()

    def of(self, kind: str) -> Progress:
        """For the runs of a subject."""
        return lambda line: self.say(f"{kind}: {line}{self._tick()}")

    def say(self, line: str) -> None:
        self._say(line)

    def _tick(self) -> str:
        estimate = (time.monotonic() - self._started) / self._done * self._left if self._done else None
        self._done, self._left = self._done + 1, max(0, self._left - 1)
        return "" if not estimate else f"; about {estimate:.0f} s left"
