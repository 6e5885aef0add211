"""The launches that a kernel of decode steps is judged by, and what float32 says of what they gave.

The device lays traps (see `JudgingDevice`): where a kernel may not look there is something that tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.emulator import EmulatorError
from cheetah.errors import CheetahError
from cheetah.models.config import ModelConfig
from cheetah.models.family import ReferenceModel
from cheetah.models.rounding import F32, Rounding, as_bf16, exact, round_to_bf16, round_to_e4m3
from cheetah.models.sampling import Filters, Penalties, adjusted, gumbel_noise, kept
from cheetah.plan import Plan
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launcher import LaunchFault, Part, Sampling
from cheetah.runtime.engine.request_rows import bias_of, mask_of
from cheetah.runtime.engine.watching import MASK_BITS
from cheetah.tools.judging_device import KernelFault, Pace, judging
from cheetah.tools.published import Comparison, Filled, Launched, LaunchedSequence, Texts, Token
from cheetah.tools.rig import Rig, Session

PROMPT_TOKENS = 5
"""Four steps without a head follow one another."""
TOGETHER_STEPS, TEACHER_TOKENS, LONG_PROMPT = 3, 5, 41
TEMPERATURE, SAMPLING_SEED = 0.8, 7 + (11 << 32)
"""The seed needs both of its halves."""
HOT = 16.0
"""The temperature of sequences that draw together: every row of the head has a chance, those of padding too."""
SAMPLING_MARGIN = 1e-3
"""How far below the best a drawn token's noisy logit may lie: logarithms differ in their last bits."""
TOLERANCE_FACTOR, LEAST_TOLERANCE = 3.0, 0.01
"""Allowed: so many times the error that rounding activations to bf16 makes in the reference itself."""
OF_A_FAULT = 0.05
"""Allowed of what is exchanged where a launch ended wrongly, so that no logits say what rounding does."""
MOST_CACHED = 0.2
"""The same where the logits are right."""
TOO_LARGE = 2.0**34
"""An element that no embedding has."""
LARGE = 2.0**32.5
"""One that might be, but not of so many."""
NEAR = 0.05
"""Standard deviations of a router's logits: choices that are nearer may turn out otherwise in bf16."""


@dataclass(frozen=True)
class Agreement:
    """The kernel's logits, or what else `compared` names, against float32. Errors are relative (L2, the worst of
    `count`); `problems` are sentences."""

    count: int
    error: float
    tolerance: float
    problems: tuple[str, ...]
    compared: str = "positions' logits"

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if not self.ok:
            return "\n".join(self.problems)
        return f"{self.count} {self.compared} within {self.error:.2e} of float32 (allowed {self.tolerance:.2e})"


@dataclass(frozen=True)
class Scored:
    """Logits of a launch: after each of `ids`, which follow the first `cached` tokens of the filling. `found` f32
    [len(ids), vocab]; `place` says which launch that was; `pages`: the bits of keys and values that it cached [layers,
    2, kv_heads, len(ids), head_dim]."""

    place: str
    cached: int
    ids: tuple[int, ...]
    found: F32
    pages: NDArray[Any]


@dataclass(frozen=True)
class Drawn:
    """What a sequence drew, a token from each row of the logits f32 [len(tokens), vocab]. prompt: what its penalties
    know of; position: of the first token."""

    place: str
    tokens: tuple[int, ...]
    logits: F32
    sampling: Sampling
    position: int
    prompt: tuple[int, ...] = ()


@dataclass(frozen=True)
class Transcript:
    """What one run gave. asked: its scheduler, its seed, whether it was short. pool, exchange: the KV pool and the
    exchanged vectors at the end: f32 states show what bf16 and the choice of a token hide."""

    asked: tuple[str, int, bool]
    scored: tuple[Scored, ...]
    drawn: tuple[Drawn, ...]
    pool: NDArray[Any]
    exchange: NDArray[np.uint8]


def judged_context(config: ModelConfig, plan: Plan) -> int:
    """How many tokens a sequence of the launches may have. CheetahError where they need more, in steps or in tokens."""
    context = min(plan.max_context, config.max_position_embeddings)
    needed = PROMPT_TOKENS + 3 + 3 + 3 + 2
    if context < needed or plan.max_steps < needed:
        raise CheetahError(
            f"check needs max_context and max_steps of at least {needed}, not {context}, {plan.max_steps}"
        )
    return context


class JudgedSteps:
    """The launches that every schedule goes through, over the pages of the pool in a shuffled order. Caches are filled
    by the reference with the beginnings of one text, the filling.

    1. Some given tokens with logits, across the length at which a head's keys are split over blocks, the cached ones
    filling their last page: nothing behind them may be looked up; then some that are sampled. 2. An empty cache: a
    prompt and sampled tokens in one launch. 3. A launch that goes on at a temperature; the same again from the same
    place with a stop id, which ends it early. 4. A launch that goes on from there. 5. The logits of that whole sequence
    in one launch from an empty cache. 6. If a step takes several tokens: a prompt longer than an item, so many tokens a
    step, that ends where the context does and leaves columns of its last step empty; where items have a fixed length,
    the same with a token less a step, to the bit. 7. If it takes several sequences:
    as many as it takes, from an empty cache to one that they fill, with logits; then tokens of each, which asks for
    what the others do not (masks, biases, penalties, filters), with logits again; the same where one of them ends, by
    itself, in another order, or by the host's word; and if it takes more tokens than sequences, shares of the columns
    that differ. 8. With the first seed: embeddings with a number that is too large, with which nothing can be drawn.

    is_of_several: without 1 to 5, where a step takes several sequences; they are the dearest.
    """

    def __init__(self, rig: Rig, is_of_several: bool = False) -> None:
        self.rig, self.config, self.plan, self.pace = rig, rig.config, rig.plan, Pace(rig.plan.in_flight)
        self.is_of_several = is_of_several and rig.plan.batch > 1
        self._has_explained = False
        config, plan = rig.config, rig.plan
        self.reference, self.rounded = reference_of(rig), reference_of(rig, round_to_bf16)
        self.context = judged_context(config, plan)
        draw = np.random.default_rng(0)
        self.prompt, self.filling, self.teacher, self.long = (
            tuple(int(token) for token in draw.integers(0, config.vocab_size, count))
            for count in (PROMPT_TOKENS, self.context, TEACHER_TOKENS, min(LONG_PROMPT, self.context - 1))
        )
        self.page_order = [int(page) for page in draw.permutation(plan.kv_pages)]
        exact_one, rounded = reference_of(rig), reference_of(rig, round_to_bf16)
        for reference in (exact_one, rounded):
            reference.forward(self.filling)
        self.filled = np.stack([rounded.keys, rounded.values], axis=1)[:, :, :, : self.context]
        # Beside the references that begin anew: those that go on behind the filling's first tokens.
        self._numbers = rig.session().numbers_of
        self._behind = {
            id(one): (filled, filled.keys.copy(), filled.values.copy())
            for one, filled in ((self.reference, exact_one), (self.rounded, rounded))
        }

    @property
    def split(self) -> int:
        """Tokens that are cached up to the length at which keys are split, so that the last of the given tokens finds
        whole pages cached, if possible in a stage with room for more."""
        page, before_last = self.plan.page_size, TEACHER_TOKENS - 1
        most = min(self.rig.gpu.kv_chunk_min + before_last, self.context - 3)
        last = most // page * page
        if last % self.plan.kv_stage_tokens(self.config.head_dim) == 0:
            last -= page
        return max(0, last - before_last)

    @property
    def lengths(self) -> list[int]:
        """Tokens that the sequences of a step have cached: none, up to the context's end, several items, a few."""
        several = min(5 * self.rig.gpu.kv_chunk_min + 1, self.context - 2 * TOGETHER_STEPS)
        lengths = [0, self.context - 2 * TOGETHER_STEPS + 1, several, self.split, 33, 1, 64, 17]
        return [min(length, self.context - 2 * TOGETHER_STEPS + 1) for length in lengths[: self.plan.batch]]

    def run(
        self, scheduler: str, seed: int, is_short: bool = False, published: list[Launched | Filled] | None = None
    ) -> Transcript:
        """One run. is_short: of launches 2 and 7 alone. published: gets each launch, with what its blocks published,
        and what was filled. EmulatorError where one fails or breaks its promises."""
        device = judging(self.rig, scheduler, seed, self.pace, published)
        session, asked = Session(self.rig, device, self.page_order), (scheduler, seed, is_short)
        try:
            run = _Run(self, session, published)
            run.short() if is_short else run.whole()
            exchange = session.exchanged()
            found = Transcript(asked, tuple(run.scored), tuple(run.drawn), session.cached(), exchange)
            if seed == 0 and not is_short and published is None:
                run.too_large()
        except (LaunchFault, KernelFault) as error:
            text = str(error).partition(" Look for")[
                0
            ]  # without its advice on checkpoints: these weights were made here
            raise KernelFault(text if published is not None else self._explained(text, asked)) from error
        return found

    def _explained(self, fault: str, asked: tuple[str, int, bool]) -> str:
        """What is wrong with a launch, the first time also with what is off first in those of the run."""
        is_known, self._has_explained = self._has_explained, True
        off = "" if is_known else self.first_off(asked, OF_A_FAULT)
        return f"{fault}\n{off}" if off else fault

    def outputs(self, found: Transcript) -> dict[str, NDArray[Any]]:
        """Everything that must not depend on the schedule."""
        sampled = {f"the tokens of {one.place}": np.array(one.tokens, np.int64) for one in found.drawn}
        scored = {f"the logits of {one.place}": one.found for one in found.scored}
        others = {f"the logits drawn from in {one.place}": one.logits for one in found.drawn}
        return {**sampled, **scored, **others, "the KV pool": found.pool, "the exchange": found.exchange}

    def pace_problem(self) -> str:
        """What is wrong with how far the copies ran ahead."""
        return self.pace.problem()

    def agreement(self, found: Transcript) -> Agreement:
        """Logits beside the reference's, and sampled ids beside the logits before them."""
        errors, allowed, problems, decided = [], LEAST_TOLERANCE, list[str](), list[NDArray[np.bool_]]()
        for one in found.scored:
            exact, rounded = (self.logits_by(reference, one) for reference in (self.reference, self.rounded))
            decided.append(self._decided(one))
            errors.append(np.where(decided[-1], relative_errors(one.found, exact), 0.0))
            of_rounding = np.where(decided[-1], relative_errors(rounded, exact), 0.0)
            allowed = max(allowed, TOLERANCE_FACTOR * float(of_rounding.max()))
        for one, wrong, is_decided in zip(found.scored, errors, decided, strict=True):
            if not np.all(wrong <= allowed):  # a NaN is no agreement
                first = int(np.argmax(~(wrong <= allowed)))
                off = "" if problems else f"; {self._first_off(found, one, first, allowed)}"
                problems.append(
                    f"{one.place}: the logits of position {one.cached + first} are {wrong[first]:.2e} from float32, "
                    f"allowed is {allowed:.2e}{off}"
                )
            else:
                problems += self._wrong_pages(one, max(MOST_CACHED, 2 * allowed), is_decided)
        problems += filter(None, (problem for one in found.drawn for problem in sampling_problems(one)))
        every = np.concatenate(errors)
        return Agreement(int(np.concatenate(decided).sum()), float(every.max()), allowed, tuple(problems))

    def _decided(self, scored: Scored) -> NDArray[np.bool_]:
        """Whether the choices of experts behind each position's logits stay what they are if numbers are rounded: else
        the kernel may choose others, and it only has to give numbers. Behind `logits_by`."""
        count, is_number = len(scored.ids), np.isfinite(scored.found).all(axis=-1)
        both = (self._begun(reference, scored) for reference in (self.reference, self.rounded))
        nearest = np.minimum(*(np.array(one.nearness[-count:]) for one in both))
        decided: NDArray[np.bool_] = (nearest > NEAR) | ~is_number
        return decided

    def _begun(self, reference: ReferenceModel, scored: Scored) -> ReferenceModel:
        """The one that goes on where a launch did."""
        return reference if scored.cached == 0 else self._behind[id(reference)][0]

    def _wrong_pages(self, scored: Scored, allowed: float, decided: NDArray[np.bool_]) -> Iterator[str]:
        """What a launch with right logits has left in the cache, if that is not what later ones are to read."""
        cached, wanted = (
            one.swapaxes(2, 3).reshape(*one.shape[:2], len(scored.ids), -1)
            for one in (self._numbers(scored.pages), self._wanted_pages(scored))
        )
        wrong = ~(np.linalg.norm(cached - wanted, axis=-1) <= allowed * np.linalg.norm(wanted, axis=-1))
        wrong &= decided
        if wrong.any():
            layer, kind, position = map(int, np.argwhere(wrong)[0])
            what = f"layer {layer}'s {('keys', 'values')[kind]} of position {scored.cached + position}"
            yield f"{scored.place}: all logits are right, but what is cached as {what} is not"

    def _first_off(self, found: Transcript, scored: Scored, number: int, allowed: float) -> str:
        """What is off first of the numbers that led to a position's logits."""
        if off := self.first_off(found.asked, allowed):
            return off
        token, numbers = self._first_logit(scored, number)
        head = self.config.table.head.name
        return f"first off: phase {head}: what it was given is right, of token {token} the logit is {numbers}"

    def first_off(self, asked: tuple[str, int, bool], allowed: float) -> str:
        """What is off first in the launches of a run: they are made again, and what their blocks publish stands beside
        the reference that rounds. "" where nothing is."""
        noted, texts = list[Launched | Filled](), Texts()
        with suppress(EmulatorError):
            self.run(*asked, published=noted)
        vectors = self.rig.family.program.exchanged_vectors(self.config, self.rig.gpu, self.plan)
        comparison = Comparison(self.config, vectors, allowed)
        for one in noted:
            if isinstance(one, Launched):
                tokens = (token for sequence in one.sequences for token in self._tokens(sequence, texts))
                if off := comparison.first_off(one, [*tokens]):
                    return f"first off: {off}"
            for what in one.sequences if isinstance(one, Launched) else (one,):
                texts.note(what)
        return ""

    def _tokens(self, sequence: LaunchedSequence, texts: Texts) -> Iterator[Token]:
        """Those of a sequence in a launch, by the references."""
        filled, before = texts.before(sequence)
        both = [self._beginning(reference, filled) for reference in (self.reference, self.rounded)]
        for reference, token in product(both, before):
            reference.step(token)
        cached = self._numbers(sequence.cached)
        for number, token in enumerate(sequence.ids):
            for reference in both:
                reference.step(token)
            rounded, place = both[1], sequence.record.length + number
            wanted = np.stack([rounded.keys[:, :, place], rounded.values[:, :, place]], axis=1)
            is_decided = min(reference.nearness[-1] for reference in both) > NEAR
            where = *sequence.place_of(number), place
            yield Token(*where, rounded.exchanged, cached[:, :, :, number], wanted, is_decided)

    def _first_logit(self, scored: Scored, number: int) -> tuple[int, str]:
        """Of a position's logits the one that is furthest off."""
        found, wanted = scored.found[number], self.logits_by(self.rounded, scored)[number]
        off = np.abs(found - wanted)
        token = int(np.argmax(np.where(np.isnan(off), np.inf, off)))
        return token, f"{found[token]:.6g}, float32 has {wanted[token]:.6g}"

    def _wanted_pages(self, scored: Scored) -> F32:
        """The keys and values of a launch's tokens by the reference that rounds."""
        self.logits_by(self.rounded, scored)
        reference = self._begun(self.rounded, scored)
        tokens = slice(scored.cached, scored.cached + len(scored.ids))
        return np.stack([reference.keys[:, :, tokens], reference.values[:, :, tokens]], axis=1)

    def logits_by(self, reference: ReferenceModel, scored: Scored) -> F32:
        """What a reference has where a launch left logits."""
        begun = self._beginning(reference, scored.cached)
        return np.stack([begun.step(token) for token in scored.ids])

    def _beginning(self, reference: ReferenceModel, filled: int) -> ReferenceModel:
        """The one of a kind that goes on behind the filling's first tokens."""
        if filled == 0:
            reference.reset()
            return reference
        behind, keys, values = self._behind[id(reference)]
        behind.keys[:], behind.values[:], behind.length = keys, values, filled
        return behind


class _Run:
    """One run of the launches, and what it gave so far."""

    def __init__(self, judged: JudgedSteps, session: Session, published: list[Launched | Filled] | None) -> None:
        self.judged, self.session, self.plan, self.published = judged, session, judged.plan, published
        self.scored: list[Scored] = []
        self.drawn: list[Drawn] = []

    def whole(self) -> None:
        if not self.judged.is_of_several:
            self._across_a_split()
            self._one_sequence()
        if self.plan.tokens > 1:
            self._long_prompt()
        self._together()

    def short(self) -> None:
        self.session.launcher.launch(self.judged.prompt, PROMPT_TOKENS + 1, Sampling())
        self._together()

    def _across_a_split(self) -> None:
        judged, launcher = self.judged, self.session.launcher
        cached = self._fill(launcher.cache, judged.split)
        self._note("given tokens behind a filled cache", cached, judged.teacher, self.session.score(judged.teacher))
        launcher.launch(judged.teacher[-1:], 2, Sampling())
        launcher.restart()

    def _one_sequence(self) -> None:
        judged, launcher = self.judged, self.session.launcher
        hot = Sampling(TEMPERATURE, SAMPLING_SEED)
        prompted = launcher.launch(judged.prompt, PROMPT_TOKENS + 2, Sampling()).token_ids
        drawn = launcher.launch(prompted[-1:], 3, hot).token_ids
        launcher.cache.length -= len(drawn)
        ended = launcher.launch(prompted[-1:], 3, replace(hot, stop_ids=(judged.config.vocab_size, drawn[1])))
        stopped, steps = ended.token_ids, drawn.index(drawn[1]) + 1
        if stopped != drawn[:steps] or ended.steps != steps:
            raise KernelFault(
                f"with stop id {drawn[1]} a launch sampled {stopped} in {ended.steps} steps; without it {drawn}"
            )
        continued = launcher.launch(stopped[-1:], 2, Sampling()).token_ids
        launcher.restart()
        ids = (*judged.prompt, *prompted, *stopped, *continued)
        logits = self.session.score(ids)
        self._note("one sequence, a token a step", 0, ids, logits)
        position = PROMPT_TOKENS
        places = ("a prompt's end", "a launch that goes on", "a launch behind a stop id")
        for place, tokens, how in zip(
            places, (prompted, stopped, continued), (Sampling(), hot, Sampling()), strict=True
        ):
            rows = logits[position - 1 : position - 1 + len(tokens)]
            self.drawn.append(Drawn(place, tokens, rows, how, position))
            position += len(tokens)
        launcher.restart()

    def _long_prompt(self) -> None:
        judged, launcher = self.judged, self.session.launcher
        cached = self._fill(launcher.cache, judged.context - len(judged.long))
        launcher.make_room(launcher.cache, len(judged.long))
        before = self.session.cached()
        logits = self.session.score(judged.long, self.plan.tokens)
        self._require_unchanged(before, range(cached, judged.context))
        self._note("a prompt, several tokens a step, to the context's end", cached, judged.long, logits)
        launcher.restart()
        if self.plan.kv_chunk and self.plan.tokens > 2:
            self._fill(launcher.cache, cached)
            self._require_same(logits, self.session.score(judged.long, self.plan.tokens - 1))
            launcher.restart()

    def _require_same(self, logits: F32, others: F32) -> None:
        """KernelFault where steps with fewer tokens, which begin at other places of a tile of keys, gave other bits."""
        differ = np.flatnonzero((logits.view(np.uint32) != others.view(np.uint32)).any(axis=1))
        if differ.size:
            few = self.plan.tokens - 1
            raise KernelFault(
                f"token {differ[0]} of a prompt has other logits, in their bits, with {few} tokens a step than with "
                f"{few + 1}, though items of attention end where `kv_chunk` says"
            )

    def _require_unchanged(self, before: NDArray[Any], but: range) -> None:
        """KernelFault where a launch has cached more than these tokens of its only sequence."""
        after, size, pages = self.session.cached(), self.plan.page_size, self.session.launcher.cache.pages
        for token in but:
            before[:, pages[token // size], :, :, token % size] = after[:, pages[token // size], :, :, token % size]
        if before.tobytes() != after.tobytes():
            raise KernelFault("a launch has written keys or values of tokens that it did not have")

    def _together(self) -> None:
        """What sequences that share steps have, and what each then draws."""
        judged, session = self.judged, self.session
        if self.plan.tokens > self.plan.batch > 1:
            self._shares_of_columns()
        caches = [session.sequence() for _ in judged.lengths]
        ids = [judged.filling[: TOGETHER_STEPS + number][-TOGETHER_STEPS:] for number in range(len(caches))]
        for cache, length in zip(caches, judged.lengths, strict=True):
            self._fill(cache, length)
        for number, logits in enumerate(session.score_together(ids, caches)):
            place = f"sequence {number} of {len(caches)} in a step"
            self._note(place, judged.lengths[number], ids[number], logits, caches[number])
        parts = []
        for number, cache in enumerate(caches):
            given = 1 + number % 2  # of two nothing is sampled, and counted, behind the first
            cache.length -= given
            logits = self.scored[number - len(caches)].found[-1]
            known = (int(logits.argmax()), *ids[number])
            sampling = asked(number, judged.config.vocab_size, known, float(logits.max()))
            parts.append(Part(cache, known[-given:], TOGETHER_STEPS, sampling, known=known, prompt=len(known)))
        begins = [part.cache.length for part in parts]
        results = session.launcher.launch_together(parts, session.logits)
        rows = session.logits_of_parts(TOGETHER_STEPS, len(parts))
        for number, (part, result, logits) in enumerate(zip(parts, results, rows, strict=True)):
            given = len(part.inputs)
            if len(result.token_ids) != TOGETHER_STEPS + 1 - given:
                raise KernelFault(f"sequence {number} drew {result.token_ids} in {TOGETHER_STEPS} steps")
            place = f"sequence {number} of {len(parts)} that ask for different things"
            position = judged.lengths[number] + TOGETHER_STEPS
            how = part.sampling, position, tuple(part.known)
            self.drawn.append(Drawn(place, result.token_ids, logits[given - 1 :], *how))
        for is_stopped in (True, False) if len(parts) > 1 else ():
            for part, length in zip(parts, begins, strict=True):
                part.cache.length = length
            self._first_one_ends(parts, [result.token_ids for result in results], is_stopped)
        for part, length in zip(parts, begins, strict=True):
            part.cache.length = length
        self._all_end(parts)
        for cache in caches:
            cache.clear()

    def _all_end(self, parts: Sequence[Part]) -> None:
        """All sequences end by the host's word: so does the launch, which looks in a step and says so in the next."""
        launcher = self.session.launcher
        launch = launcher.prepare(parts)
        for number in range(len(parts)):
            launcher.cancel(launch, number)
        launcher.start(launch)
        if (steps := launcher.finish(launch)[0].steps) != 2:
            raise KernelFault(f"a launch whose sequences the host ended in the first step made {steps} steps, not 2")

    def _first_one_ends(self, parts: Sequence[Part], drawn: Sequence[tuple[int, ...]], is_stopped: bool) -> None:
        """The same again, but that the first sequence ends: with its first token, in the opposite order, so that it has
        the last column, or by the host from the first step on. The others go on as they did."""
        launcher = self.session.launcher
        ending = replace(parts[0], sampling=replace(parts[0].sampling, stop_ids=drawn[0][:1] if is_stopped else ()))
        order = -1 if is_stopped else 1
        launch = launcher.prepare([ending, *parts[1:]][::order])
        if not is_stopped:
            launcher.cancel(launch, 0)
        launcher.start(launch)
        found = [result.token_ids for result in launcher.finish(launch)][::order]
        ended = drawn[0][:1]  # who looks for the host's word in a step says so in the next
        if found != [ended, *drawn[1:]]:
            how = "with its first token" if is_stopped else "by the host's word"
            raise KernelFault(f"sequences drew {found} where the first was to end {how}, else {[*drawn]}")

    def _shares_of_columns(self) -> None:
        """Sequences that have more and fewer of a step's columns."""
        judged, session = self.judged, self.session
        shares = [self.plan.tokens - self.plan.batch, *[1] * (self.plan.batch - 1)]
        caches, steps = [session.sequence() for _ in shares], 2
        ids = [judged.filling[7 : 7 + steps * share] for share in shares]
        for cache, length in zip(caches, reversed(judged.lengths), strict=True):
            self._fill(cache, min(length, judged.context - steps * shares[0]))
        lengths = [cache.length for cache in caches]
        parts = [
            Part(cache, tokens, len(tokens), per_step=share)
            for cache, tokens, share in zip(caches, ids, shares, strict=True)
        ]
        session.launcher.launch_together(parts, session.logits)
        found = session.logits.download(np.float32, (steps, self.plan.tokens, judged.config.vocab_size))
        columns = [number for number, _ in session.launcher.columns]
        for number, cache in enumerate(caches):
            own = [column for column, part in enumerate(columns) if part == number]
            logits = found[:, own].reshape(-1, judged.config.vocab_size)
            place = f"sequence {number} with {shares[number]} tokens a step"
            self._note(place, lengths[number], ids[number], logits, cache)
            cache.clear()

    def too_large(self) -> None:
        """An embedding with a number that none has, of either sign: all logits behind it are NaN, no other's are."""
        hidden, width = self.judged.config.hidden_size, self.judged.config.padded_hidden
        embeddings, norms = (self.session.words_of(name) for name in ("embedding", "norms"))
        before = embeddings[0].copy(), norms[0].copy()
        for embedding in embeddings:
            for token, value in ((1, TOO_LARGE), (2, -TOO_LARGE), (4, LARGE / 4), (5, -LARGE / 4)):
                embedding[token * width + hidden // 2] = as_bf16(value)
            embedding[3 * width :][:hidden] = as_bf16(LARGE)
        alone = self.plan.batch == 1
        try:
            self._with_large_ones([[1], [2], [3]] if alone else [[1, 0], [0, 2], [3, 0]])
            self._drawing_without_numbers([1] if alone else [1, 0])
            for weights in norms:
                weights[hidden // 2 :: width] = as_bf16(16.0)  # what is published of an element is too large then
            self._with_large_ones([[4], [5]] if alone else [[4, 0], [0, 5]])
        finally:
            for embedding, weights in zip(embeddings, norms, strict=True):
                embedding[:], weights[:] = before

    def _with_large_ones(self, launches: list[list[int]]) -> None:
        for tokens in launches:
            caches = [self.session.sequence() for _ in tokens]
            found = self.session.score_together([(token,) for token in tokens], caches)
            for token, logits, cache in zip(tokens, found, caches, strict=True):
                if bool(np.isnan(logits).all()) != bool(token) or np.isnan(logits).any() != bool(token):
                    was = "not all of its logits are NaN" if token else "NaN stands among its logits"
                    beside = (
                        "has an embedding with a number of 2^34, or all of 2^32.5"
                        if token
                        else "shares a step with such a sequence"
                    )
                    raise KernelFault(f"a sequence that {beside}: {was}")
                cache.clear()

    def _drawing_without_numbers(self, tokens: list[int]) -> None:
        """Such a sequence has no token to go on with, and the launch goes on for the other."""
        caches = [self.session.sequence() for _ in tokens]
        parts = [Part(cache, (token,), 2, Sampling()) for token, cache in zip(tokens, caches, strict=True)]
        for token, result in zip(tokens, self.session.launcher.launch_together(parts), strict=True):
            if result.has_failed != bool(token):
                what = "none of whose logits is a number" if token else "beside one without logits that are numbers"
                raise KernelFault(f"a sequence {what}: has failed is {result.has_failed}, with {result.token_ids}")
        for cache in caches:
            cache.clear()

    def _fill(self, cache: CachedSequence, length: int) -> int:
        """Writes the filling's first keys and values to the cache's pages; all else in the pool stays poisoned."""
        cache.reserve(length)
        pool, size = self.session.cached(), self.plan.page_size
        stored = self.session.stored(self.judged.filled[:, :, :, :length])
        for number, page in enumerate(cache.pages[: -(-length // size)]):
            slots = stored[:, :, :, number * size : (number + 1) * size]
            pool[:, page, :, :, : slots.shape[3]] = slots
        self.session.cache(pool)
        cache.length = length
        if length and self.published is not None:
            self.published.append(Filled(tuple(cache.pages), length))
        return length

    def _note(
        self, place: str, cached: int, ids: Sequence[int], found: F32, cache: CachedSequence | None = None
    ) -> None:
        cache = cache or self.session.launcher.cache
        pages = self.session.cached_of(cache)[:, :, :, cached : cached + len(ids)]
        self.scored.append(Scored(place, cached, tuple(ids), found, pages))


def asked(number: int, vocab: int, known: Sequence[int], highest: float) -> Sampling:
    """What sequence `number` of those that share a step asks for: each something else. known: its tokens so far;
    highest: its highest logit, by which these are biased: so much that it matters what comes first, bias or penalty.

    Filters are decided by the lists of the nearest tokens, or in rounds."""
    odd = tuple(range(number % 3, vocab, 3))
    biased = tuple((token, highest) for token in dict.fromkeys(known))
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": HOT, "filters": Filters(2, 0.95, 0.001)},
        {"allowed": odd, "temperature": HOT, "filters": Filters(vocab // 6), "penalties": Penalties(frequency=0.4)},
        {
            "temperature": 1.5,
            "bias": ((odd[-1], 3.0), *biased),
            "penalties": Penalties(1.3, 0.5, 0.25),
            "filters": Filters(top_p=0.6),
        },
        {"banned": odd, "penalties": Penalties(repetition=1.9, presence=2.0), "bias": biased},
    )
    return Sampling(seed=SAMPLING_SEED + number, **kinds[number % len(kinds)])


def reference_of(rig: Rig, rounding: Rounding = exact) -> ReferenceModel:
    """What a rig's kernels mean, over a cache that keeps what theirs keeps."""
    cached = round_to_e4m3 if rig.plan.kv_dtype == "e4m3" else None
    scales = getattr(rig.weights, "kv_scales", None) if cached else None
    return rig.family.reference(rig.config, rig.weights.tensor, rounding, cached=cached, kv_scales=scales)


def sampling_problems(drawn: Drawn) -> Iterator[str]:
    """Why tokens cannot have been drawn from the logits before them."""
    sampling, vocab = drawn.sampling, drawn.logits.shape[1]
    allowed = (mask_of(sampling, vocab)[:, None] >> np.arange(MASK_BITS, dtype=np.uint32) & 1).reshape(-1)[:vocab] > 0
    in_prompt, counts = np.isin(np.arange(vocab), drawn.prompt), np.zeros(vocab, np.uint32)
    for number, (token, logits) in enumerate(zip(drawn.tokens, drawn.logits, strict=True)):
        scores = adjusted(logits, allowed, bias_of(sampling, vocab), sampling.penalties, in_prompt, counts)
        margin, position = SAMPLING_MARGIN, drawn.position + number
        if sampling.temperature:
            scaled = scores / np.float32(sampling.temperature)
            noisy = scaled + gumbel_noise(np.arange(vocab), sampling.seed, position)
            scores = np.where(kept(scaled, sampling.filters), noisy, np.float32(-np.inf))
        best = int(scores.argmax())  # the lowest of equal ones
        if not (scores[token] >= scores[best] - margin if sampling.temperature else token == best):
            yield f"{drawn.place}: token {token} was sampled at position {position}, its logits give {best}"
        counts[token] += 1


def relative_errors(found: F32, wanted: F32) -> F32:
    """|found - wanted| / |wanted| (L2) of each row."""
    return np.asarray(np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1))
