"""Tokens of which rounding decides no experts: behind another choice all numbers are others, which would say nothing of
the kernels. Where a sequence remembers, they are others for good.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cheetah.models.dense.reference import Reference

TRIED_IDS, SURE = 60, 0.2
"""Of tokens in models of experts: so many are drawn, until one's choices are no nearer in any layer, in standard
deviations of a router's logits, and the surest is taken. Keys in 8 bits move those more than rounding to bf16 does."""
NEAR = 0.05
"""Standard deviations of a router's logits: choices that are nearer may turn out otherwise in bf16."""


def decided_ids(references: Sequence[Reference], draw: np.random.Generator, length: int) -> list[int]:
    """A prompt of which rounding decides no token's experts, as far as can be, by references that round and do not."""
    found: list[int] = []
    for reference in references:
        reference.reset()
    while len(found) < length:
        found.append(decided_id(references, drawn_ids(references[0], draw), SURE))
        for reference in references:
            reference.hidden_state(found[-1])
    return found


def drawn_ids(reference: Reference, draw: np.random.Generator) -> Iterable[int]:
    """Those that are tried."""
    return map(int, draw.integers(0, reference.config.vocab_size, TRIED_IDS))


def decided_id(references: Sequence[Reference], ids: Iterable[int], sure: float) -> int:
    """The first of the ids whose choices behind the references' sequence are so sure, or the surest one."""
    best, surest = 0, -1.0
    for id_ in ids:
        found = min(_nearness_behind(reference, id_) for reference in references)
        if found > surest:
            best, surest = id_, found
        if found > sure:
            break
    return best


def _nearness_behind(reference: Reference, id_: int) -> float:
    """How near another choice is for a token behind the reference's sequence, which stays as it is."""
    reference.hidden_state(id_)
    nearness = float(reference.nearness[-1])
    reference.forget_last()
    return nearness
