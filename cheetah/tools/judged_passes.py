"""The launches that kernels of passes over prompts are judged by, and what float32 says of what they left.

A prompt in two passes, with a second one beside its end, then the head over the last tokens of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cheetah.models.rounding import F32, Rounding, exact, round_to_bf16
from cheetah.plan.prompt import PassPlan
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launches import Part
from cheetah.tools.judged_steps import (
    LEAST_TOLERANCE,
    TOLERANCE_FACTOR,
    Agreement,
    reference_of,
    relative_errors,
)
from cheetah.tools.judging_device import judging
from cheetah.tools.rig import Rig, Session, parts_of

FIRST, REST, SECOND = 13, 20, 17
"""Tokens of the first prompt's two passes, and of the second prompt. In the first some blocks multiply nothing; both
prompts end with the first key of a tile of keys."""
JUDGED = 2
"""Last tokens of each prompt whose logits are looked at."""
TRIED_IDS, SURE = 60, 0.2
"""Of prompts' tokens in models of experts: so many are drawn, until one's choices are no nearer in any layer, in
standard deviations of a router's logits, and the surest is taken. Keys in 8 bits move those more than rounding to bf16
does."""

Bits = NDArray[Any]


def decided_ids(references: Sequence[Any], draw: np.random.Generator, length: int) -> list[int]:
    """A prompt of which rounding decides no token's experts, as far as can be, by references that round and do not:
    another choice would say nothing of the kernels, but behind it all numbers are others."""
    found: list[int] = []
    for reference in references:
        reference.reset()
    while len(found) < length:
        best, surest = 0, -1.0
        for id_ in map(int, draw.integers(0, references[0].config.vocab_size, TRIED_IDS)):
            sure = min(_nearness_behind(reference, id_) for reference in references)
            if sure > surest:
                best, surest = id_, sure
            if sure > SURE:
                break
        found.append(best)
        for reference in references:
            reference.hidden_state(best)
    return found


def _nearness_behind(reference: Any, id_: int) -> float:
    """How near another choice is for a token behind the reference's sequence, which stays as it is."""
    reference.hidden_state(id_)
    nearness = float(reference.nearness[-1])
    reference.forget_last()
    return nearness


class JudgedPasses:
    """Two passes over two prompts, in the pages of a shuffled pool: the first of one prompt alone, the second of its
    rest and of the other one."""

    def __init__(self, rig: Rig) -> None:
        self.rig, draw = rig, np.random.default_rng(0)
        lengths = (FIRST + REST, SECOND)
        self.prompts = [tuple(self._ids(draw, length)) for length in lengths]
        self.page_order = [int(page) for page in draw.permutation(rig.plan.kv_pages)]
        self._numbers = rig.session().numbers_of

    def _ids(self, draw: np.random.Generator, length: int) -> Sequence[int]:
        if self.rig.config.routing is None:
            return list(map(int, draw.integers(0, self.rig.config.vocab_size, length)))
        return decided_ids([reference_of(self.rig, rounding) for rounding in (exact, round_to_bf16)], draw, length)

    def run(self, scheduler: str, seed: int, is_short: bool = False) -> list[Bits]:
        """The cached keys and values of both prompts, as they are stored, and the logits after their last tokens.
        EmulatorError where a launch fails."""
        session = Session(self.rig, judging(self.rig, scheduler, seed), self.page_order)
        for rows in self._rows_of_keys():  # those that a pass has not written are no numbers
            for workspace in parts_of(session.buffers["workspace"]):
                workspace.array[rows] = 0xFF
        first, second = (session.sequence() for _ in self.prompts)
        session.passes.launch_together([self._part(first, 0, FIRST)])
        session.passes.launch_together([self._part(first, 0, REST), self._part(second, 1, SECOND)])
        head = session.passes.head
        room = session.device.allocate(4 * head.max_steps * head.tokens * head.vocab_size, 0xFF)
        logits = np.concatenate([*head.score(first, range(len(self.prompts) * JUDGED), room)])
        return [*(session.cached_of(cache) for cache in (first, second)), logits]

    def _rows_of_keys(self) -> list[slice]:
        """The bytes of the workspace that hold keys, and those that hold values."""
        program = self.rig.family.prompt_program
        stated = self.rig.made[program.KERNEL_NAME].manifest.plan
        plan = PassPlan.from_dict({name: value for name, value in stated.items() if name != "decoding"})
        return program.rows_of_keys(self.rig.config, self.rig.gpu, self.rig.plan, plan)

    def outputs(self, found: list[Bits]) -> dict[str, Bits]:
        """Everything that must not depend on the schedule."""
        names = ("keys and values of the first prompt", "keys and values of the second prompt", "the logits")
        return dict(zip(names, found, strict=True))

    def pace_problem(self) -> str:
        """Nothing: how far passes copy ahead is not said by a plan."""
        return ""

    def _part(self, cache: CachedSequence, prompt: int, tokens: int) -> Part:
        ids = self.prompts[prompt][cache.length : cache.length + tokens + 1]
        return Part(cache, ids, tokens, wanted=JUDGED if len(ids) == tokens else 0)

    def agreement(self, found: Sequence[Bits]) -> Agreement:
        """The cached keys and values, and the logits, against the reference's."""
        numbers = [*map(self._numbers, found[:-1]), found[-1]]
        wanted, rounded = (self._wanted(rounding) for rounding in (exact, round_to_bf16))
        errors, own = (
            np.concatenate([relative_errors(_rows(one), _rows(other)) for one, other in zip(part, wanted, strict=True)])
            for part in (numbers, rounded)
        )
        tolerance = max(LEAST_TOLERANCE, TOLERANCE_FACTOR * float(own.max()))
        worst = float(np.where(np.isnan(errors), np.inf, errors).max())
        problem = f"a cached key or value, or logits, are {worst:.2e} from float32, allowed is {tolerance:.2e}"
        problems = () if worst <= tolerance else (problem,)
        return Agreement(len(errors), worst, tolerance, problems, "cached heads of keys and values, and logits")

    def _wanted(self, rounding: Rounding) -> list[F32]:
        reference = reference_of(self.rig, rounding)
        found, logits = [], []
        for prompt in self.prompts:
            reference.reset()
            logits.append(reference.forward(prompt)[-JUDGED:])
            found.append(np.stack([reference.keys, reference.values], axis=1)[:, :, :, : len(prompt)])
        return [*found, np.concatenate(logits)]


def _rows(array: F32) -> F32:
    return array.reshape(-1, array.shape[-1])
