"""What float32 says of what a kernel of decode steps gave in its launches (`step_course`).

The device lays traps (see `JudgingDevice`): where a kernel may not look there is something that tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.emulator import EmulatorError
from cheetah.models.config import ModelConfig
from cheetah.models.dense import program
from cheetah.models.dense.reference import Reference
from cheetah.models.rounding import F32, Rounding, exact, round_to_bf16, round_to_e4m3
from cheetah.models.sampling import adjusted, gumbel_noise, kept
from cheetah.runtime.engine.launcher import LaunchFault
from cheetah.runtime.engine.request_rows import bias_of, mask_of
from cheetah.runtime.engine.watching import MASK_BITS
from cheetah.tools.decided import NEAR, decided_id, drawn_ids
from cheetah.tools.judging_device import KernelFault, Pace, judging
from cheetah.tools.published import Comparison, Filled, Launched, LaunchedSequence, Texts, Token
from cheetah.tools.remembered import words_of_states, wrong_states
from cheetah.tools.rig import Rig, Session
from cheetah.tools.step_course import Course, CourseRun, Drawn, Scored

SAMPLING_MARGIN = 1e-3
"""How far below the best a drawn token's noisy logit may lie: logarithms differ in their last bits."""
TOLERANCE_FACTOR, LEAST_TOLERANCE = 3.0, 0.01
"""Allowed: so many times the error that rounding activations to bf16 makes in the reference itself."""
FACTOR_OF_HYBRIDS = 6.0
"""The same beside Gated DeltaNet: what a memory has under a query may be little more than rounding, as behind a first
token whose key and query are nearly at right angles, and the norm of heads makes it as large as any. So much of what
rounding does is allowed of states, too (seen of right kernels: up to 4.1 times)."""
STATES_ALLOWANCE = LEAST_TOLERANCE, FACTOR_OF_HYBRIDS
OF_A_FAULT = 0.05
"""Allowed of what is exchanged where a launch ended wrongly, so that no logits say what rounding does."""
MOST_CACHED = 0.2
"""The same where the logits are right."""
SURE = 2 * NEAR
"""That of tokens which are given, beside layers that remember."""


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
class Transcript:
    """What one run gave. asked: its scheduler, its seed, whether it was short. pool, exchange: the KV pool and the
    exchanged vectors at the end: f32 states show what bf16 and the choice of a token hide. states: what sequences
    remember in layers of Gated DeltaNet."""

    asked: tuple[str, int, bool]
    scored: tuple[Scored, ...]
    drawn: tuple[Drawn, ...]
    pool: NDArray[Any]
    exchange: NDArray[np.uint8]
    states: NDArray[np.uint32]


class JudgedSteps:
    """Judges a kernel by the launches of a course (`CourseRun`). is_of_several: see there."""

    def __init__(self, rig: Rig, is_of_several: bool = False) -> None:
        self.rig, self.config, self.plan, self.pace = rig, rig.config, rig.plan, Pace(rig.plan.in_flight)
        self._has_explained = False
        self._large_under: tuple[str, int] | None = None  # the schedule of launches with numbers that are too large
        self.reference, self.rounded = reference_of(rig), reference_of(rig, round_to_bf16)
        exact_one, rounded = reference_of(rig), reference_of(rig, round_to_bf16)
        self.course = Course(rig, is_of_several)
        self._states: dict[tuple[int, int], Any] = {}
        self._read_filling((exact_one, rounded))
        if self.config.delta_layers:
            self.course.remembered = self._remembered
        if self._must_decide:
            self.course.instead = cache(self._decided_behind)
        filled = np.stack([rounded.keys, rounded.values], axis=1)[:, :, :, : self.course.context]
        self._with_keys = layers_with_keys(self.config)
        self.course.filled = filled[self._with_keys]
        # Beside the references that begin anew: those that go on behind the filling's first tokens.
        self._numbers = rig.session().numbers_of
        self._behind = {
            id(one): (filled, filled.keys.copy(), filled.values.copy())
            for one, filled in ((self.reference, exact_one), (self.rounded, rounded))
        }

    @property
    def _must_decide(self) -> bool:
        """Whether a choice of experts that rounding decides would be remembered."""
        return self.config.routing is not None and bool(self.config.delta_layers)

    def _read_filling(self, references: Sequence[Reference]) -> None:
        """By those that others stand beside; what is remembered is kept where caches are filled so far."""
        wanted = self.course.filled_lengths if self.config.delta_layers else set()
        self.course.filling = tuple(self._read(references, self.course.filling, wanted))

    def _read(
        self, references: Sequence[Reference], ids: Sequence[int], wanted: AbstractSet[int] = frozenset()
    ) -> Iterator[int]:
        """The tokens that references read: these, or such as are decided where they must be."""
        draw = np.random.default_rng(len(ids))
        for length, token in enumerate(ids, 1):
            if self._must_decide:
                token = decided_id(references, chain((token,), drawn_ids(references[0], draw)), SURE)
            for begun, reference in zip((self.reference, self.rounded), references, strict=True):
                reference.hidden_state(token)
                if length in wanted:
                    self._states[id(begun), length] = reference.states
            yield token

    def _decided_behind(self, filled: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Such tokens in the place of these, behind the filling's first ones."""
        references = [self._beginning(reference, filled) for reference in (self.reference, self.rounded)]
        return tuple(self._read(references, ids))

    def _remembered(self, filled: int, ids: Sequence[int]) -> NDArray[np.uint32]:
        """What a state holds behind some of the filling's tokens, and others."""
        heads, reference = self.config.shape.delta, self._beginning(self.rounded, filled)
        assert heads is not None
        for token in ids:
            reference.step(token)
        return words_of_states(heads, [reference.states[layer] for layer in heads.layers])

    def run(
        self, scheduler: str, seed: int, is_short: bool = False, published: list[Launched | Filled] | None = None
    ) -> Transcript:
        """One run. is_short: as the race detector's. published: gets each launch, with what its blocks published, and
        what was filled. EmulatorError where one fails or breaks its promises."""
        device = judging(self.rig, scheduler, seed, self.pace, published)
        session, asked = Session(self.rig, device, self.course.page_order), (scheduler, seed, is_short)
        try:
            run = CourseRun(self.course, session, published)
            run.short() if is_short else run.whole()
            exchange = session.exchanged()
            found = Transcript(asked, tuple(run.scored), tuple(run.drawn), session.cached(), exchange, session.states())
            self._large_under = self._large_under or (scheduler, seed)  # the first alone: no other has shown more
            if self._large_under == (scheduler, seed) and not is_short and published is None:
                run.too_large()
        except (LaunchFault, KernelFault) as error:
            text = without_advice(error)
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
        memory = {"the KV pool": found.pool, "the exchange": found.exchange, "the states": found.states}
        return {**sampled, **scored, **others, **memory}

    def pace_problem(self) -> str:
        """What is wrong with how far the copies ran ahead."""
        return self.pace.problem()

    def agreement(self, found: Transcript) -> Agreement:
        """Logits beside the reference's, and sampled ids beside the logits before them."""
        factor = tolerance_factor(self.config)
        errors, allowed, problems, decided = [], LEAST_TOLERANCE, list[str](), list[NDArray[np.bool_]]()
        for one in found.scored:
            exact, rounded = (self.logits_by(reference, one) for reference in (self.reference, self.rounded))
            decided.append(self._decided(one))
            errors.append(np.where(decided[-1], relative_errors(one.found, exact), 0.0))
            of_rounding = np.where(decided[-1], relative_errors(rounded, exact), 0.0)
            allowed = max(allowed, factor * float(of_rounding.max()))
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
                states = self._wrong_states(one) if is_decided.all() else ()
                problems += (f"{one.place}: all logits are right, but {state}" for state in states)
        problems += filter(None, (problem for one in found.drawn for problem in sampling_problems(one)))
        every = np.concatenate(errors)
        return Agreement(int(np.concatenate(decided).sum()), float(every.max()), allowed, tuple(problems))

    def _decided(self, scored: Scored) -> NDArray[np.bool_]:
        """Whether the choices of experts behind each position's logits stay what they are if numbers are rounded: else
        the kernel may choose others, and it only has to give numbers: there, and behind it where that is remembered.
        Behind `logits_by`."""
        count, is_number = len(scored.ids), np.isfinite(scored.found).all(axis=-1)
        both = (self._begun(reference, scored) for reference in (self.reference, self.rounded))
        nearest = np.minimum(*(np.array(one.nearness[-count:]) for one in both))
        decided: NDArray[np.bool_] = (nearest > NEAR) | ~is_number
        return np.logical_and.accumulate(decided) if self._must_decide else decided

    def _begun(self, reference: Reference, scored: Scored) -> Reference:
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
            number, kind, position = map(int, np.argwhere(wrong)[0])
            layer = self._with_keys[number]
            what = f"layer {layer}'s {('keys', 'values')[kind]} of position {scored.cached + position}"
            yield f"{scored.place}: all logits are right, but what is cached as {what} is not"

    def _wrong_states(self, scored: Scored) -> Iterator[str]:
        """What a sequence remembers behind a launch, if that is not what later ones begin with."""
        heads = self.config.shape.delta
        if heads is None or scored.state is None:
            return
        for reference in (self.reference, self.rounded):
            self.logits_by(reference, scored)
        exact, rounded = (self._begun(reference, scored).states for reference in (self.reference, self.rounded))
        yield from wrong_states(heads, scored.state, exact, rounded, STATES_ALLOWANCE)

    def _first_off(self, found: Transcript, scored: Scored, number: int, allowed: float) -> str:
        """What is off first of the numbers that led to a position's logits; where sequences remember, what they do."""
        if off := self.first_off(found.asked, allowed):
            return off
        if self.config.delta_layers:
            return next(self._wrong_states(scored), "what is remembered of them is right")
        token, numbers = self._first_logit(scored, number)
        head = self.config.table.head.name
        return f"first off: phase {head}: what it was given is right, of token {token} the logit is {numbers}"

    def first_off(self, asked: tuple[str, int, bool], allowed: float) -> str:
        """What is off first in the launches of a run: they are made again, and what their blocks publish stands beside
        the reference that rounds. "" where nothing is."""
        if self.config.delta_layers:  # whose layers publish other vectors
            return ""
        noted, texts = list[Launched | Filled](), Texts()
        with suppress(EmulatorError):
            self.run(*asked, published=noted)
        vectors = program.exchanged_vectors(self.config, self.rig.gpu, self.plan)
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
        keys, values = (one[self._with_keys][:, :, tokens] for one in (reference.keys, reference.values))
        return np.stack([keys, values], axis=1)

    def logits_by(self, reference: Reference, scored: Scored) -> F32:
        """What a reference has where a launch left logits."""
        begun = self._beginning(reference, scored.cached)
        return np.stack([begun.step(token) for token in scored.ids])

    def _beginning(self, reference: Reference, filled: int) -> Reference:
        """The one of a kind that goes on behind the filling's first tokens."""
        if filled == 0:
            reference.reset()
            return reference
        behind, keys, values = self._behind[id(reference)]
        behind.keys[:], behind.values[:], behind.length = keys, values, filled
        behind.states = self._states.get((id(reference), filled), behind.states)
        return behind


def without_advice(fault: Exception) -> str:
    """Of a checkpoint's weights: these were made here."""
    return str(fault).partition(" Look for")[0]


def tolerance_factor(config: ModelConfig) -> float:
    """So many times the error of rounding is allowed."""
    return FACTOR_OF_HYBRIDS if config.delta_layers else TOLERANCE_FACTOR


def layers_with_keys(config: ModelConfig) -> list[int]:
    """The layers that have keys and values."""
    return [layer for layer in range(config.layers) if layer not in config.delta_layers]


def reference_of(rig: Rig, rounding: Rounding = exact) -> Reference:
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
