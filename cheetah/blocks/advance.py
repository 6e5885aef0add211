"""How far the sequences of a launch have come: as many tokens a step as each has columns, or as turned out right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cheetah import lang as ch
from cheetah.blocks.machine import Machine
from cheetah.lang import ty


class Records(Protocol):
    """The records of a launch's sequences and columns."""

    def sequence(self, sequence: ch.Expr, name: str) -> Any: ...
    def record(self, column: ch.Expr, name: str) -> Any: ...


class Advance(Protocol):
    """What columns, tiles of attention and KV plans ask."""

    is_counted: bool
    """Whether it is known at the end of a step only, by what was chosen in it."""

    def number(self, records: Records, column: ch.Expr, sequence: ch.Expr, step: ch.Expr) -> ch.Expr:
        """Which of its sequence's tokens a column has in a step."""

    def cached(self, tile: Any, step: ch.Value) -> ch.Expr:
        """How many keys of a tile are cached in a step; tile: what has the fields of its record."""

    def plan_step(self, step: ch.Expr) -> ch.Expr:
        """The step of a launch in which nothing is drafted whose KV plans hold in this one."""


class BySteps:
    """`per_step` tokens more in every step."""

    is_counted = False

    def number(self, records: Records, column: ch.Expr, sequence: ch.Expr, step: ch.Expr) -> Any:
        per_step = ch.const(ty.u32, records.sequence(sequence, "per_step"), name="per_step")
        return step * per_step + records.record(column, "number")

    def cached(self, tile: Any, step: ch.Value) -> Any:
        return tile.length + tile.stride * ch.cast(ty.u32, step)

    def plan_step(self, step: ch.Expr) -> ch.Expr:
        return step


@dataclass(frozen=True, eq=False)
class ByAcceptance:
    """What was verified in each step, in shared memory: of every sequence how many tokens are behind it, then the
    fewest steps of `per_step` tokens each that would have brought every sequence as far.

    Two copies take turns. The first consumer warp writes that of the next step before it arrives at `step_done`, behind
    its wait for `step_taken` of the step before: until then the producer lane may read the other one's predecessor,
    which lay in the same place.
    """

    machine: Machine
    is_counted = True

    def copy(self, step: ch.Value) -> ch.Expr:
        """The words of a step (u32*)."""
        words = self.machine.region("done", ty.u32)
        return words + ch.cast(ty.u32, step) % 2 * (self.machine.plan.batch + 1)

    def done(self, sequence: ch.Expr, step: ch.Value) -> ch.Expr:
        """How many tokens of the launch a sequence has behind it in a step."""
        return self.copy(step)[sequence]

    def number(self, records: Records, column: ch.Expr, sequence: ch.Expr, step: ch.Expr) -> Any:
        return self.done(sequence, step) + records.record(column, "number")

    def cached(self, tile: Any, step: ch.Value) -> Any:
        return tile.length + self.done(tile.stride, step)

    def plan_step(self, step: ch.Expr) -> ch.Expr:
        """Nobody is further than after so many steps, so all keys that there are lie in the items; what lies behind
        them changes no bit."""
        return self.copy(step)[self.machine.plan.batch]


def advance_of(machine: Machine) -> Advance:
    """As the machine's plan has it."""
    return ByAcceptance(machine) if machine.plan.drafts else BySteps()
