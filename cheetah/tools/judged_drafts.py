"""The launches that a kernel which verifies drafts is judged by: with whatever drafts it makes the tokens that it makes
without any, by as many steps as the meaning of a step says, and counts what came of them.

What it makes without is held to float32, as other kernels are (`judged_steps`). Where sequences remember in layers of
Gated DeltaNet, that too is the same with drafts and without, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.errors import CheetahError
from cheetah.models.rounding import F32
from cheetah.models.sampling import Filters, Penalties
from cheetah.runtime.engine.drafting import Drafted, Drafting
from cheetah.runtime.engine.launcher import LaunchFault, Part, Sampling
from cheetah.runtime.engine.launches import Launch, LaunchResult
from cheetah.runtime.engine.request_rows import mask_of
from cheetah.runtime.engine.watching import Mask
from cheetah.tools.judged_steps import JudgedSteps, Transcript, without_advice
from cheetah.tools.judging_device import KernelFault, noting
from cheetah.tools.published import Filled, Launched
from cheetah.tools.rig import Rig, Session
from cheetah.tools.step_course import Drawn, Scored

PROMPT, COUNT, MASKED_COUNT = 9, 40, 16
"""Tokens of the prompt, and that are made behind it; with masks of their own."""
COUNT_OF_HYBRIDS, MASKED_COUNT_OF_HYBRIDS = 20, 8
"""Of models with Gated DeltaNet: a token that is remembered costs the emulator as much as many keys."""
ROUNDS = 64
HOT = Sampling(temperature=1.2, seed=7)


@dataclass(frozen=True)
class Drafter:
    """Where drafts come from: the true tokens, but each `every`-th (0: none), then what is looked up behind `ngrams` of
    such lengths ((0, 0): nothing), in the truth with gaps first if it `predicts`."""

    every: int = 0
    ngrams: tuple[int, int] = (0, 0)
    predicts: bool = False

    def drafts(self, truth: Sequence[int], vocab: int) -> list[int]:
        """For all of the truth but its last token."""
        return wrong(truth, self.every, vocab)[:-1] if self.every else []

    def text(self, truth: Sequence[int]) -> list[int]:
        """In which drafts are looked up first."""
        return [token for place, token in enumerate(truth) if place % 9] if self.predicts else []


def wrong(tokens: Sequence[int], every: int, vocab: int) -> list[int]:
    """The tokens, of which each `every`-th is another."""
    return [(token + 1) % vocab if number % every == 0 else token for number, token in enumerate(tokens)]


def looked_up(ids: Sequence[int], ngrams: tuple[int, int], count: int, text: Sequence[int] = ()) -> list[int]:
    """What a launch shall draft behind these ids: what follows the latest of the longest matches, on and on, of which
    those in `text` come first."""
    shortest, longest = ngrams
    ids = [*text, *ids]
    for length in range(min(longest, len(ids) - 1), shortest - 1, -1):
        ends = range(len(ids) - 1, length - 1, -1)
        for end in sorted(ends, key=lambda end: (end > len(text), -end)):
            if list(ids[end - length : end]) == list(ids[-length:]):
                found = list(ids[end:])
                return (found * count)[:count]
    return []


def expected(
    truth: Sequence[int],
    given: int,
    per_step: int,
    drafts: Sequence[int],
    ngrams: tuple[int, int],
    text: Sequence[int] = (),
) -> tuple[int, Drafted]:
    """The steps of a launch and what comes of its drafts, by the meaning of a step. truth: all of its tokens, of which
    `given` are inputs."""
    rounds, steps, tokens, right = 0, 0, 0, [0] * per_step
    done, total = 0, len(truth) - 1
    while done < total:
        known = max(given, done + 1)
        wanted = max(0, done + per_step - known)
        proposed = list(drafts[known - given :])[:wanted]
        if ngrams[1]:
            proposed += looked_up(truth[:known], ngrams, wanted, text)[len(proposed) :]
        rounds, steps, tokens = rounds + 1, steps + bool(proposed), tokens + len(proposed)
        inputs = [*truth[done:known], *proposed, *[0] * wanted][:per_step]
        reached = 1
        while reached < per_step and done + reached < total and inputs[reached] == truth[done + reached]:
            if known <= done + reached < known + len(proposed):
                right[done + reached - known] += 1
            reached += 1
        done += reached
    while right and not right[-1]:
        right.pop()
    return rounds, Drafted(steps, tokens, tuple(right))


def kinds_of(vocab: int) -> dict[str, Sampling]:
    """What is asked of the tokens. So few of them repeat themselves."""
    few = tuple(range(min(4, vocab // 4), vocab, max(1, vocab // 3)))
    biases = ((7 % vocab, 1.0), (9 % vocab, 2.0))
    return {
        "few": Sampling(allowed=few),
        "seeded": HOT,
        "penalised": Sampling(allowed=few, penalties=Penalties(1.1, 0.2, 0.15)),
        "penalised, seeded": Sampling(temperature=1.0, seed=2, penalties=Penalties(1.2, 0.3, 0.7), bias=biases),
        "filtered": Sampling(temperature=2.0, seed=11, filters=Filters(12, 0.7, 0.01)),
    }


WORKS = (
    ("few", Drafter(0, (2, 3))),
    ("seeded", Drafter(3)),
    ("penalised, seeded", Drafter(2, (1, 2))),
    ("filtered", Drafter(4)),
    ("penalised", Drafter(0, (1, 4))),
    ("seeded", Drafter(0, (1, 3), predicts=True)),
)
SHORT = (*WORKS[:1], *WORKS[2:4])
"""Of the race detector."""
OF_HYBRIDS, SHORT_OF_HYBRIDS = WORKS[:3], WORKS[1:2]
"""What is drafted for, no layer remembers; how much of it counts, all do."""


Works = Sequence[tuple[str, Drafter]]


class JudgedDrafts(JudgedSteps):
    """The launches that every schedule goes through: tokens of each kind without drafts, then by each of WORKS; a stop
    id inside of what was drafted; the logits that judged; tokens that have a mask each; two sequences together.

    truth: tokens that are right, by kind; else those that the kernel makes without drafts, which float32 judges."""

    def __init__(self, rig: Rig, truth: dict[str, list[int]] | None = None) -> None:
        super().__init__(rig)
        plan, is_hybrid = rig.plan, bool(rig.config.delta_layers)
        self.count, self.masked_count = COUNT, MASKED_COUNT
        self.works: Mapping[bool, Works] = {False: WORKS, True: SHORT}
        if is_hybrid:
            self.count, self.masked_count = COUNT_OF_HYBRIDS, MASKED_COUNT_OF_HYBRIDS
            self.works = {False: OF_HYBRIDS, True: SHORT_OF_HYBRIDS}
        steps, needed = PROMPT + self.count, PROMPT + self.count + plan.tokens
        if not plan.drafts or self.course.context < needed or plan.max_steps < steps:
            raise CheetahError(f"check of drafts needs drafts, and max_context and max_steps of at least {needed}")
        self.width, self.kinds, self.truth = plan.drafts + 1, kinds_of(rig.config.vocab_size), truth or {}
        self.opening = [*self.course.filling[:PROMPT]]

    def run(
        self, scheduler: str, seed: int, is_short: bool = False, published: list[Launched | Filled] | None = None
    ) -> Transcript:
        """One run. is_short: of SHORT alone. published: gets the launches without drafts, and there are no others then.
        EmulatorError where a launch fails, or drafts change anything."""
        session = Session(self.rig, noting(self.rig, scheduler, seed, published), self.course.page_order)
        try:
            run = _Run(self, session)
            if published is not None:
                run.all_plain()
            else:
                for problem in run.problems(self.works[is_short], is_short):
                    raise KernelFault(problem)
        except LaunchFault as error:
            raise KernelFault(without_advice(error)) from error
        asked = scheduler, seed, is_short
        kept = session.cached(), session.exchanged(), session.states()
        return Transcript(asked, tuple(run.scored), tuple(run.drawn), *kept)

    def without_drafts(self) -> dict[str, list[int]]:
        """The tokens of each kind."""
        run = _Run(self, self.rig.session())
        return {**{kind: run.plain(kind) for kind in self.kinds}, "masked": run.masked(1)[0]}


class _Run:
    """One run of the launches."""

    def __init__(self, judged: JudgedDrafts, session: Session) -> None:
        self.judged, self.session, self.vocab = judged, session, judged.config.vocab_size
        self.scored: list[Scored] = []
        self.drawn: list[Drawn] = []
        self._plain: dict[str, list[int]] = {**judged.truth}
        self._remembered: dict[str, NDArray[np.uint32]] = {}

    def plain(self, kind: str) -> list[int]:
        """The tokens of a kind, made without drafts."""
        if kind not in self._plain:
            sampling = self.judged.kinds[kind]
            self._plain[kind] = self._made_alone(kind, sampling)
        return self._plain[kind]

    def all_plain(self) -> None:
        """The tokens of all kinds, made without drafts whatever is known of them."""
        self._plain = {}
        for kind in self.judged.kinds:
            self.plain(kind)

    def problems(self, works: Works, is_short: bool) -> Iterator[str]:
        """What is not as without drafts, or comes by other steps."""
        for kind, drafter in works:
            yield from self._with_drafts(kind, drafter)
        if not is_short:
            yield from self._stopped()
            yield from self._judging()
            yield from self._masked()
            if self.judged.plan.batch > 1:
                yield from self._together()

    def _with_drafts(self, kind: str, drafter: Drafter) -> Iterator[str]:
        truth, width, opening = self.plain(kind), self.judged.width, self.judged.opening
        drafts, text = drafter.drafts(truth, self.vocab), drafter.text(truth)
        drafting = Drafting(ROUNDS, drafts, drafter.ngrams, text)
        result, launch, state = self._launch(self.judged.kinds[kind], self.judged.count, width, drafting)
        yield from self._differing(f"tokens of kind {kind!r} by {drafter}", result, truth)
        yield from self._otherwise(f"tokens of kind {kind!r} by {drafter}", state, self._remembered.get(kind))
        meant = expected([*opening, *truth], len(opening), width, drafts, drafter.ngrams, text)
        if (result.steps, result.drafted) != meant:
            yield f"kind {kind!r} by {drafter}: {result.drafted} in {result.steps} steps, not {meant[1]} in {meant[0]}"
        told = self.session.launcher.fresh(launch)
        if told != [result.token_ids] or launch.drafted_of(0) != result.drafted:
            yield f"kind {kind!r}: the host was told of {told}, {launch.drafted_of(0)}, not of {result.drafted}"

    def _stopped(self) -> Iterator[str]:
        """What was drafted behind a stop id counts for nobody."""
        truth = self.plain("seeded")
        count = self.judged.count
        for place in (count // 2 + 1, count // 2 + 4):
            sampling = replace(self.judged.kinds["seeded"], stop_ids=(truth[place], self.vocab))
            drafting = Drafting(ROUNDS, truth[:-1])
            result, _, state = self._launch(sampling, count, self.judged.width, drafting)
            first = truth.index(truth[place])
            yield from self._differing(f"tokens up to stop id {truth[place]}", result, truth[: first + 1])
            alone = self._scored([*self.judged.opening, *truth[:first]])[1] if state.size else None
            yield from self._otherwise(f"tokens up to stop id {truth[place]}", state, alone)
            if result.drafted.accepted > first:
                yield f"{result.drafted.accepted} drafts count before stop id {truth[place]}, which is token {first}"

    def _judging(self) -> Iterator[str]:
        """The rows of the logits that judged the tokens."""
        judged, count = self.judged, self.judged.count // 2
        truth = self.plain("seeded")[:count]
        logits = self.session.device.allocate_mapped(count * judged.plan.tokens * self.vocab * 4)
        drafting = Drafting(count, wrong(truth, 4, self.vocab)[:-1])
        result, launch, _ = self._launch(judged.kinds["seeded"], count, judged.width, drafting, logits)
        yield from self._differing("tokens whose logits are wanted", result, truth)
        tokens = range(PROMPT - 1 + count)
        rows = np.stack([*self.session.launcher.logits_after(launch, 0, tokens)])
        scored, _ = self._scored([*judged.opening, *truth][: len(tokens)])
        if not np.array_equal(rows, scored):
            yield "the logits that are said to have judged the tokens are not those of the tokens one by one"

    def _masked(self) -> Iterator[str]:
        truth, alone = self._plain.setdefault("masked", []), None
        if not truth:
            truth, alone = self.masked(1)
        found, state = self.masked(self.judged.width, truth)
        if found != truth:
            yield f"tokens with a mask each are {found}, and {truth} without drafts"
        yield from self._otherwise("tokens with a mask each", state, alone)

    def masked(self, width: int, drafts: Sequence[int] = ()) -> tuple[list[int], NDArray[np.uint32]]:
        """Tokens each of which has a mask of its own, by launches of one step, and what is remembered of them."""
        opening, sampling = self.judged.opening, self.judged.kinds["seeded"]
        ids, cache = [*opening], self.session.sequence()
        while len(ids) < len(opening) + self.judged.masked_count:
            made = len(ids) - len(opening)
            ahead = list(drafts[made : made + width - 1])[: self.judged.masked_count - made - 1] if cache.length else []
            masks = [self._mask(made + 1 + number) for number in range(len(ahead))]
            inputs = ids[cache.length :]
            part = Part(cache, inputs, len(inputs) + len(ahead), sampling, 1 + len(ahead), ids, len(opening))
            drafting = Drafting(1, ahead, masks=masks) if ahead else None
            parts = [replace(part, mask=self._mask(made), drafting=drafting)]
            ids += self.session.launcher.launch_together(parts)[0].token_ids
        state = self.session.remembered_by(cache)
        cache.clear()
        return ids[len(opening) :], state

    def _mask(self, place: int) -> Mask:
        """Another third of the tokens for each place."""
        return mask_of(Sampling(allowed=tuple(range(place % 3, self.vocab, 3))), self.vocab)

    def _together(self) -> Iterator[str]:
        """Two sequences share steps, with widths of their own."""
        kinds, opening = ("few", "penalised, seeded"), self.judged.opening
        tokens, count = self.judged.plan.tokens, self.judged.count
        widths = tokens - max(1, tokens // 3), max(1, tokens // 3)
        caches = [self.session.sequence() for _ in kinds]
        parts = []
        for cache, kind, width, every in zip(caches, kinds, widths, (0, 2), strict=True):
            drafts = wrong(self.plain(kind), every, self.vocab)[:-1] if every else ()
            drafting = Drafting(PROMPT + count, drafts, (1, 2))
            total = len(opening) - 1 + count
            sampling = self.judged.kinds[kind]
            parts.append(Part(cache, opening, total, sampling, width, opening, len(opening), drafting=drafting))
        results = self.session.launcher.launch_together(parts)
        for kind, result, cache in zip(kinds, results, caches, strict=True):
            what, state = f"tokens of kind {kind!r} beside another sequence", self.session.remembered_by(cache)
            yield from self._differing(what, result, self.plain(kind))
            yield from self._otherwise(what, state, self._remembered.get(kind))
        for cache in caches:
            cache.clear()

    def _differing(self, what: str, result: LaunchResult, truth: Sequence[int]) -> Iterator[str]:
        if list(result.token_ids) != list(truth):
            pairs = zip_longest(result.token_ids, truth)
            place = next(number for number, (one, other) in enumerate(pairs) if one != other)
            yield f"{what} are others than without drafts from token {place} on: {result.token_ids}, not {truth}"

    @staticmethod
    def _otherwise(what: str, state: NDArray[np.uint32], alone: NDArray[np.uint32] | None) -> Iterator[str]:
        """Where a sequence remembers other bits than without drafts."""
        if alone is not None and not np.array_equal(state, alone):
            layer, share = map(int, np.argwhere((state != alone).any(axis=-1))[0])
            yield (
                f"what a sequence remembers of {what} is not what it does without drafts: first share {share} of layer "
                f"{layer} of those that remember"
            )

    def _scored(self, ids: Sequence[int]) -> tuple[F32, NDArray[np.uint32]]:
        """The logits behind tokens that are given one by one, and what is remembered of them."""
        cache = self.session.launcher.cache
        found = self.session.score(ids), self.session.remembered_by(cache)
        cache.clear()
        return found

    def _launch(
        self,
        sampling: Sampling,
        count: int,
        width: int,
        drafting: Drafting,
        logits: object = None,
        cached: list[NDArray[Any]] | None = None,
    ) -> tuple[LaunchResult, Launch, NDArray[np.uint32]]:
        """One launch of `count` tokens behind the opening, in a cache of its own; also what is remembered of them.
        cached: gets the bits of their keys and values."""
        opening, cache, launcher = self.judged.opening, self.session.sequence(), self.session.launcher
        total = len(opening) - 1 + count
        part = Part(cache, opening, total, sampling, width, opening, len(opening), drafting=drafting)
        launch = launcher.prepare([part], logits)  # type: ignore[arg-type]
        launcher.start(launch)
        (result,) = launcher.finish(launch)
        state = self.session.remembered_by(cache)
        if cached is not None:
            cached.append(self.session.cached_of(cache))
        cache.clear()
        return result, launch, state

    def _made_alone(self, kind: str, sampling: Sampling) -> list[int]:
        """Tokens without drafts, which are noted for float32 to judge."""
        opening, count, cached = self.judged.opening, self.judged.count, list[NDArray[Any]]()
        steps = len(opening) - 1 + count
        logits = self.session.device.allocate_mapped(steps * self.judged.plan.tokens * self.vocab * 4)
        result, launch, state = self._launch(sampling, count, 1, Drafting(steps), logits, cached)
        tokens, ids = tuple(result.token_ids), (*opening, *result.token_ids[:-1])
        found = np.stack([*self.session.launcher.logits_after(launch, 0, range(steps))])
        self._remembered[kind] = state
        self.scored.append(Scored(f"kind {kind!r}", 0, ids, found, cached[0], state if state.size else None))
        rows, prompt = found[len(opening) - 1 :], tuple(opening)
        self.drawn.append(Drawn(f"kind {kind!r}", tokens, rows, sampling, len(opening), prompt))
        return [*tokens]
