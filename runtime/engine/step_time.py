"""How long a launch takes: short enough that text streams, long enough that launching costs nothing."""

from __future__ import annotations

LAUNCH_SECONDS = 0.1


class StepTime:
    """How long a step of a kind of launch takes, by those seen so far, and so how many steps the next one makes: what
    takes about LAUNCH_SECONDS."""

    def __init__(self, max_steps: int, target_s: float = LAUNCH_SECONDS):
        self.max_steps = max_steps
        self._target_s = target_s
        self._step_s = target_s
        self._is_known = False

    @property
    def step_s(self) -> float:
        """Seconds of a step, by the last launch."""
        return self._step_s

    def note(self, steps: int, seconds: float) -> None:
        """Remembers how long a launch took."""
        self._step_s, self._is_known = seconds / steps, True

    def guess(self, steps: int, seconds: float) -> None:
        """How long a launch of another kind took, which is believed until one of this kind was made."""
        if not self._is_known:
            self._step_s = seconds / steps

    def steps(self, wanted: int) -> int:
        """Steps of the next launch, at most `wanted`."""
        fitting = int(self._target_s / self._step_s) if self._step_s > 0 else self.max_steps
        return max(1, min(wanted, self.max_steps, fitting))
