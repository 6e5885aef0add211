"""Which plan is fastest: a search over the few choices that a rule cannot know for certain. Knows no device.

Coordinate descent: one kind of choice after the other is varied around the best plan so far, until a pass changes
nothing. The plans of a group are measured in turn, so that a GPU that warms up or slows down does so for all of them,
and a plan takes the place of another only if it is faster by more than such measurements differ by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Any

from cheetah.errors import CheetahError
from cheetah.generate import choose_plan
from cheetah.models.config import ModelConfig
from cheetah.plan import Gpu, Plan, PlanError
from cheetah.plan.plan import SYNCS
from cheetah.runtime.assembly.tuned import SEARCHED

MARGIN = 0.005
"""A plan must win by this much. Medians of one kernel, taken minutes apart in a run on an H200, differed by up to 0.9
percent; plans that take turns are compared more closely than that."""
MOST_PASSES = 3
FINALISTS = 4

STAGE_FACTORS = WARP_FACTORS = (0.5, 1, 2)
KEY_FACTORS = (0.25, 0.5, 1, 2)
CHUNKS_IN_FLIGHT = (2, 3, 4, 6, 8, 12)
FLIGHT_FACTORS = (0.5, 2)
"""Factors of what the rule says; of `in_flight`, the range in bytes."""

Choice = dict[str, Any]
"""The SEARCHED fields of a plan."""

Measure = Callable[[Sequence[Plan]], Sequence[float]]
"""Scores of plans that are measured in turn: less is better, infinite for a plan that is out of the question."""


def choice_of(plan: Plan) -> Choice:
    """What the search varies of a plan."""
    return {name: getattr(plan, name) for name in SEARCHED}


@dataclass(frozen=True)
class Space:
    """The plans around a rule's. fixed: fields that are not searched, e.g. max_context. fields: those that are."""

    config: ModelConfig
    gpu: Gpu
    fixed: Mapping[str, Any]
    fields: tuple[str, ...] = SEARCHED

    def __post_init__(self) -> None:
        if unknown := [name for name in self.fields if name not in SEARCHED]:
            raise CheetahError(f"--search {','.join(unknown)}: choose from {','.join(SEARCHED)}")

    @property
    def rule(self) -> Plan:
        """The plan by rule."""
        return choose_plan(self.config, self.gpu, **self.fixed)

    def around(self, plan: Plan, field: str) -> list[Plan]:
        """The other plans that differ from `plan` in `field`. With the size of a stage, the number of chunks in flight
        changes as well, so that their bytes stay the same."""
        choices = self._choices(choice_of(plan), field)
        plans = (self._plan(choice) for choice in choices)
        return list(dict.fromkeys(found for found in plans if found is not None and found != plan))

    def _plan(self, choice: Choice) -> Plan | None:
        """None where the machine or the model refuses it."""
        try:
            return choose_plan(self.config, self.gpu, **{**self.fixed, **choice})
        except PlanError:
            return None

    def _choices(self, now: Choice, field: str) -> Iterable[Choice]:
        rule = self.rule
        if field == "stage_bytes":
            flight = now["stage_bytes"] * now["in_flight"]
            sizes = _scaled(rule.stage_bytes, STAGE_FACTORS)
            return [{**now, "stage_bytes": size, "in_flight": max(2, flight // size)} for size in sizes]
        return [{**now, field: value} for value in self._values(now, field, rule)]

    def _values(self, now: Choice, field: str, rule: Plan) -> Sequence[int | str]:
        if field == "in_flight":
            least, most = (factor * rule.stage_bytes * rule.in_flight for factor in FLIGHT_FACTORS)
            return [count for count in CHUNKS_IN_FLIGHT if least <= count * now["stage_bytes"] <= most]
        if field == "consumer_warps":
            return _scaled(rule.consumer_warps, WARP_FACTORS)
        return SYNCS if field == "sync" else _scaled(rule.kv_chunk_min, KEY_FACTORS)


def _scaled(value: int, factors: Sequence[float]) -> list[int]:
    return [int(value * factor) for factor in factors if value * factor >= 1]


def descend(space: Space, measure: Measure, say: Callable[[str], None] = lambda line: None) -> Plan:
    """The best plan that the search meets, beginning with the rule's."""
    best, seen = space.rule, set[tuple[str, Plan]]()
    for _ in range(MOST_PASSES):
        before = best
        for field in space.fields:
            group = [best, *space.around(best, field)]
            if len(group) == 1 or (field, best) in seen:
                continue
            scores = measure(group)
            best = chosen(group, scores)
            seen |= {(field, plan) for plan in group if choice_without(plan, field) == choice_without(best, field)}
            seen.add((field, best))
            say(_group_line(field, group, scores, best))
        if best == before:
            break
    return best


def choice_without(plan: Plan, field: str) -> Choice:
    """What makes the surroundings of a plan in `field` those of another one."""
    return {name: value for name, value in choice_of(plan).items() if name != field}


def chosen(group: Sequence[Plan], scores: Sequence[float], margin: float = MARGIN) -> Plan:
    """The fastest of a group, but the first one where that is not slower by more than the margin."""
    least = min(range(len(group)), key=lambda index: scores[index])
    return group[least] if scores[least] < scores[0] * (1 - margin) else group[0]


def _group_line(field: str, group: Sequence[Plan], scores: Sequence[float], best: Plan) -> str:
    times = ("not measured" if isinf(score) else f"{score:.4f} ms" for score in scores)
    entries = [f"{getattr(plan, field)}: {time}" for plan, time in zip(group, times, strict=True)]
    return f"{field} {', '.join(entries)} -> {getattr(best, field)}"
