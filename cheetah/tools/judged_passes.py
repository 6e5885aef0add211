"""The launches that kernels of passes over prompts are judged by, and what float32 says of what they left.

A prompt in two passes, with a second one beside its end, then the head over the last tokens of both. Where sequences
remember in layers of Gated DeltaNet both are read in more parts, each from a copy of what was remembered, and the
second one at once too, to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.emulator import EmulatorError
from cheetah.models.dense import prompt as pass_program
from cheetah.models.rounding import F32, Rounding, exact, round_to_bf16
from cheetah.plan.prompt import PassPlan
from cheetah.runtime.device.group import buffers_of_ranks
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launches import Part
from cheetah.runtime.engine.prompt_passes import columns_of
from cheetah.tools.decided import NEAR, decided_ids
from cheetah.tools.judged_steps import (
    LEAST_TOLERANCE,
    STATES_ALLOWANCE,
    Agreement,
    layers_with_keys,
    reference_of,
    relative_errors,
    tolerance_factor,
)
from cheetah.tools.judging_device import KernelFault, judging
from cheetah.tools.published import Comparison, Filled, Launched, Token
from cheetah.tools.remembered import State, wrong_states
from cheetah.tools.rig import Rig, Session

FIRST, REST, SECOND = 13, 20, 17
"""Tokens of the first prompt's two passes, and of the second prompt. In the first some blocks multiply nothing; both
prompts end with the first key of a tile of keys."""
FEW = 2
READINGS = ({0: FIRST}, {0: REST, 1: SECOND})
"""Of each pass how many tokens of which prompt it reads."""
READINGS_OF_HYBRIDS = ({0: FIRST}, {0: FEW, 1: REST}, {0: REST - FEW, 1: FIRST})
"""The second prompt is cut where tokens that are taken together end, the first one is not; its second part is shorter
than what channels are mixed of."""
NAMES = ("first", "second")
JUDGED = 2
"""Last tokens of each prompt whose logits are looked at."""
Bits = NDArray[Any]


@dataclass(frozen=True)
class PassTranscript:
    """What one run gave. asked: its scheduler and its seed. cached: the keys and values of both prompts, as they are
    stored; logits: after their last tokens; states: the words of what both remember, none where they do not."""

    asked: tuple[str, int]
    cached: tuple[Bits, ...]
    logits: F32
    states: tuple[NDArray[np.uint32], ...]


class JudgedPasses:
    """Passes over two prompts, in the pages of a shuffled pool: the first of one prompt alone, the second of its
    rest and of the other one."""

    def __init__(self, rig: Rig) -> None:
        self.rig, draw = rig, np.random.default_rng(0)
        self.readings = READINGS_OF_HYBRIDS if rig.config.delta_layers else READINGS
        lengths = [sum(reading.get(prompt, 0) for reading in self.readings) for prompt in range(2)]
        self.prompts = [tuple(self._ids(draw, length)) for length in lengths]
        self.page_order = [int(page) for page in draw.permutation(rig.plan.kv_pages)]
        self._numbers = rig.session().numbers_of

    def _ids(self, draw: np.random.Generator, length: int) -> Sequence[int]:
        if self.rig.config.routing is None:
            return list(map(int, draw.integers(0, self.rig.config.vocab_size, length)))
        return decided_ids([reference_of(self.rig, rounding) for rounding in (exact, round_to_bf16)], draw, length)

    def run(
        self, scheduler: str, seed: int, is_short: bool = False, published: list[Launched | Filled] | None = None
    ) -> PassTranscript:
        """One run. published: gets both passes, with what their blocks handed on. EmulatorError where a launch
        fails."""
        session = Session(self.rig, judging(self.rig, scheduler, seed, published=published), self.page_order)
        for rows in self._rows_of_keys():  # those that a pass has not written are no numbers
            for workspace in buffers_of_ranks(session.buffers["workspace"]):
                workspace.array[rows] = 0xFF
        caches, logits = [session.sequence() for _ in self.prompts], list[F32]()
        for reading in self.readings:
            caches = [self._copied(cache) for cache in caches]
            parts = [self._part(caches[prompt], prompt, tokens) for prompt, tokens in reading.items()]
            session.passes.launch_together(parts)
            logits += self._logits_of(session, parts)
        cached, states = ([of(cache) for cache in caches] for of in (session.cached_of, session.remembered_by))
        if self.rig.config.delta_layers:
            self._require_same_whole(session, cached[1], states[1])
        return PassTranscript((scheduler, seed), tuple(cached), np.concatenate(logits), tuple(states))

    @staticmethod
    def _logits_of(session: Session, parts: Sequence[Part]) -> list[F32]:
        """Those behind the tokens whose hidden states the last pass has left."""
        head, count = session.passes.head, sum(part.wanted for part in parts)
        room = session.device.allocate(4 * head.max_steps * head.tokens * head.vocab_size, 0xFF)
        return [*head.score(parts[0].cache, range(count), room)]

    @staticmethod
    def _copied(cache: CachedSequence) -> CachedSequence:
        """A sequence in the place of one that remembers: it begins with a copy of that, as those do that begin with a
        prompt which others had."""
        if cache.state is None:
            return cache
        copy = cache.fork()
        cache.clear()
        return copy

    def _require_same_whole(self, session: Session, *of_parts: Bits) -> None:
        """KernelFault where the second prompt, read at once and alone, leaves other bits than its parts, each but the
        last of which ends where tokens that are taken together do."""
        whole = session.sequence()
        session.passes.launch_together([replace(self._part(whole, 1, len(self.prompts[1])), wanted=0)])
        found = session.cached_of(whole), session.remembered_by(whole)
        for what, parts, alone in zip(("its keys and values", "what it remembers"), of_parts, found, strict=True):
            if parts.tobytes() != alone.tobytes():
                raise KernelFault(
                    f"of a prompt that is read in parts {what} differ in bits from when it is read at once"
                )

    def _rows_of_keys(self) -> list[slice]:
        """The bytes of the workspace that hold keys, and those that hold values."""
        return pass_program.rows_of_keys(self.rig.config, self.rig.gpu, self.rig.plan, self._pass_plan)

    @property
    def _pass_plan(self) -> PassPlan:
        stated = self.rig.made[pass_program.KERNEL_NAME].manifest.plan
        return PassPlan.from_dict({name: value for name, value in stated.items() if name != "decoding"})

    def outputs(self, found: PassTranscript) -> dict[str, Bits]:
        """Everything that must not depend on the schedule."""
        kinds = {"keys and values": found.cached, "what is remembered": found.states}
        prompts = range(len(self.prompts))
        named = {f"{what} of the {NAMES[prompt]} prompt": kinds[what][prompt] for what in kinds for prompt in prompts}
        return {**named, "the logits": found.logits}

    def pace_problem(self) -> str:
        """Nothing: how far passes copy ahead is not said by a plan."""
        return ""

    def _part(self, cache: CachedSequence, prompt: int, tokens: int) -> Part:
        ids = self.prompts[prompt][cache.length : cache.length + tokens + 1]
        return Part(cache, ids, tokens, wanted=JUDGED if len(ids) == tokens else 0)

    def agreement(self, found: PassTranscript) -> Agreement:
        """The cached keys and values, the logits, and what is remembered, against the reference's."""
        numbers = [*map(self._numbers, found.cached), found.logits]
        (wanted, states), (rounded, rounded_states) = (self._wanted(rounding) for rounding in (exact, round_to_bf16))
        errors, own = (
            np.concatenate([relative_errors(_rows(one), _rows(other)) for one, other in zip(part, wanted, strict=True)])
            for part in (numbers, rounded)
        )
        tolerance = max(LEAST_TOLERANCE, tolerance_factor(self.rig.config) * float(own.max()))
        worst = float(np.where(np.isnan(errors), np.inf, errors).max())
        problems = [] if worst <= tolerance else [self._problem(found, worst, tolerance)]
        for name, words, right, rounds in zip(NAMES, found.states, states, rounded_states, strict=True):
            problems += (f"the {name} prompt: {wrong}" for wrong in self._wrong_states(words, right, rounds))
        return Agreement(len(errors), worst, tolerance, tuple(problems), "cached heads of keys and values, and logits")

    def _wrong_states(
        self, words: NDArray[np.uint32], right: Mapping[int, State], rounded: Mapping[int, State]
    ) -> Iterator[str]:
        heads = self.rig.config.shape.delta
        return iter(()) if heads is None else wrong_states(heads, words, right, rounded, STATES_ALLOWANCE)

    def _problem(self, found: PassTranscript, worst: float, allowed: float) -> str:
        off = "" if self.rig.config.delta_layers else self.first_off(found, allowed)
        problem = f"a cached key or value, or logits, are {worst:.2e} from float32, allowed is {allowed:.2e}"
        return f"{problem}; first off: {off}" if off else problem

    def first_off(self, found: PassTranscript, allowed: float) -> str:
        """What is off first in the passes of a run: they are made again, and what their blocks hand on stands beside
        the reference that rounds. Behind the last phase come the hidden states, and the head."""
        rig, published = self.rig, list[Launched | Filled]()
        with suppress(EmulatorError):
            self.run(*found.asked, published=published)
        vectors = pass_program.exchanged_vectors(rig.config, rig.gpu, rig.plan, self._pass_plan)
        comparison = Comparison(rig.config, vectors, allowed)
        references = [reference_of(rig, rounding) for rounding in (exact, round_to_bf16)]
        tokens = [
            [*self._tokens(references, prompt, self._numbers(cached))] for prompt, cached in enumerate(found.cached)
        ]
        read = (tokens[0][:FIRST], [*tokens[0][FIRST:], *tokens[1]])
        for number, (launch, of_launch) in enumerate(zip(published, read, strict=False), 1):
            assert isinstance(launch, Launched)
            if off := comparison.first_off(launch, of_launch):
                return f"pass {number}, {off}"
        return f"phase {rig.config.table.head.name}, or the hidden states before it: what passes hand on is right"

    def _tokens(self, references: Sequence[Any], prompt: int, cached: F32) -> Iterator[Token]:
        """Those of a prompt, by references that do not round and that do."""
        for reference in references:
            reference.reset()
        for position, token in enumerate(self.prompts[prompt]):
            for reference in references:
                reference.hidden_state(token)
            rounded = references[1]
            wanted = np.stack([rounded.keys[:, :, position], rounded.values[:, :, position]], axis=1)
            is_decided = min(reference.nearness[-1] for reference in references) > NEAR
            column = position if prompt == 0 and position < FIRST else position - FIRST
            column = columns_of(REST) + position if prompt else column
            yield Token(0, column, position, rounded.exchanged, cached[:, :, :, position], wanted, is_decided)

    def _wanted(self, rounding: Rounding) -> tuple[list[F32], list[Mapping[int, State]]]:
        """(the cached keys and values of each prompt, then the logits, what each remembers)."""
        reference = reference_of(self.rig, rounding)
        found, logits, states = [], [], list[Mapping[int, State]]()
        for prompt in self.prompts:
            reference.reset()
            logits.append(reference.forward(prompt)[-JUDGED:])
            kept = np.stack([reference.keys, reference.values], axis=1)[layers_with_keys(self.rig.config)]
            found.append(kept[:, :, :, : len(prompt)])
            states.append(reference.states)
        return [*found, np.concatenate(logits)], states


def _rows(array: F32) -> F32:
    return array.reshape(-1, array.shape[-1])
