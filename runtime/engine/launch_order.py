"""The next launch as it was decided, before anything is prepared: who takes part, by which kernel, what becomes of it.

The one thing that goes from `scheduler`, which decides, to `running`, which launches, and back to be settled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from cheetah.runtime.engine.completion import Completion
from cheetah.runtime.engine.launches import KernelLaunches, Part
from cheetah.runtime.engine.step_launches import StepLaunches
from cheetah.runtime.engine.step_time import StepTime

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer


class Purpose(Enum):
    """What a launch is for, and so what becomes of its results; see `Scheduler.settle`."""

    DECODE = auto()
    """Those who run make tokens."""
    PREFILL = auto()
    """Tokens of prompts come into the cache, by steps, the last of which may sample, or by a pass."""
    JUDGE = auto()
    """The ids of a prompt that a pass has read are judged by the logits before each."""
    DRAFT = auto()
    """Another model drafts what those who run make next, or reads what they have: see `draft_model`."""
    CHOOSE_FIRST = auto()
    """The first tokens behind prompts that a pass has read to their ends."""


@dataclass(frozen=True)
class LaunchOrder:
    """A launch of `launcher`'s kernel. takers: of each part, the completions whose tokens it makes; other threads may
    look at them. logits: where they are to lie, if somebody wants them. judged: ids of a prompt that are judged by
    these, where they are not the inputs themselves. timer: learns how long its steps take."""

    purpose: Purpose
    launcher: KernelLaunches
    parts: Sequence[Part]
    takers: Sequence[tuple[Completion, ...]]
    logits: Buffer | None = None
    judged: Sequence[int] | None = None
    timer: StepTime | None = None

    @property
    def steps(self) -> int:
        """Steps that it makes at most."""
        return self.parts[0].steps


class LogitsBuffers:
    """Two buffers in the host's memory: a launch writes one while the other is read. allocate: gives buffer 0 or 1;
    without it nobody may want logits."""

    def __init__(self, allocate: Callable[[int], Buffer] | None = None):
        self._allocate, self._turn = allocate, 0

    @property
    def are_there(self) -> bool:
        return self._allocate is not None

    def next(self, are_wanted: bool) -> Buffer | None:
        """The one that nobody reads, if a launch's logits are wanted."""
        return self._allocate(self._turn) if are_wanted and self._allocate is not None else None

    def written(self) -> None:
        """A launch has ended that wrote to it: it is read from now on."""
        self._turn = 1 - self._turn


def steps_with(logits: Buffer | None, steps: int, *launchers: StepLaunches) -> int:
    """As many of `steps` as a launch by any of these takes, all of whose logits go to that buffer, if there is one."""
    return steps if logits is None else min(steps, *(launcher.score_steps(logits) for launcher in launchers))
