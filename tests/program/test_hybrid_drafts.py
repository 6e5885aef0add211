"""Drafts beside Gated DeltaNet: what is remembered is of the tokens that turned out right, whichever those are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cheetah import lang as ch
from cheetah.blocks.delta.memory import DeltaMemory
from cheetah.blocks.delta.records import Records
from cheetah.generate import generate_kernel
from cheetah.lang import ty
from cheetah.runtime.engine.drafting import Drafting
from cheetah.runtime.engine.launcher import Part, Sampling
from tests.program.rig import Rig, Session, kept
from tests.program.test_hybrids import AWKWARD, rig_of
from tests.program.test_verified import HOT, PROMPT, made, wrong
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

COUNT = 30
PLAN: dict[str, Any] = {"batch": 2, "tokens": 8, "kv_chunk": 32, "drafts": 7}
Words = NDArray[np.uint32]


@cache
def rig(**more: Any) -> Rig:
    return rig_of(AWKWARD, kept(generate_kernel), **PLAN | more)


def states(session: Session) -> Words:
    """[slots, words]."""
    buffer = session.buffers["states"]
    return np.asarray(buffer.download(np.uint32, (3, buffer.nbytes // 12)))


@cache
def plain(stop: int | None = None) -> tuple[list[int], Words]:
    """Tokens by a kernel that verifies nothing, one a step, and what it remembers then."""
    session = rig_of(AWKWARD, kept(generate_kernel), batch=2, tokens=4, kv_chunk=32).session()
    sampling = Sampling(HOT.temperature, HOT.seed, () if stop is None else (stop,))
    part = Part(session.sequence(), PROMPT, len(PROMPT) - 1 + COUNT, sampling)
    (result,) = session.launcher.launch_together([part])
    assert part.cache.state == 0
    return [*result.token_ids], states(session)[0]


def drafted(using: Rig, per_step: int, rounds: int, drafts: Sequence[int], stop: int | None = None) -> bool:
    """Whether tokens and states are those of one by one, in a slot that somebody else has left."""
    session, sampling = using.session("random", per_step), Sampling(HOT.temperature, HOT.seed, (stop,) if stop else ())
    session.buffers["states"].fill(0x3F)
    found, _ = made(session, COUNT, sampling, per_step=per_step, rounds=rounds, drafts=drafts)
    return found == plain(stop)[0] and np.array_equal(states(session)[0], plain(stop)[1])


MANY = [(every, per_step, rounds) for every in (1, 2, 3, 5, 100) for per_step in (3, 8) for rounds in (1, 2, 64)]
SOME = [(3, 8, 64), (5, 3, 2), (100, 8, 1)]


@pytest.mark.parametrize(("every", "per_step", "rounds"), tiered(MANY, [case for case in MANY if case not in SOME]))
def test_any_count_of_right_drafts_after_any_other_leaves_the_same_states(
    every: int, per_step: int, rounds: int
) -> None:
    """Several launches, and steps within one; the prompt is given by columns too."""
    assert drafted(rig(), per_step, rounds, wrong(plain()[0], every)[: COUNT - 1])


def test_a_stop_id_among_drafts_ends_what_is_remembered() -> None:
    stop = plain()[0][13]
    assert plain(stop)[0][-1] == stop and drafted(rig(), 8, 64, plain()[0][: COUNT - 1], stop)


def test_sequences_with_columns_of_their_own_remember_their_own() -> None:
    (wanted, expected), session = plain(), rig().session("random", 1)
    parts = [
        Part(
            session.sequence(),
            PROMPT,
            len(PROMPT) - 1 + COUNT,
            HOT,
            width,
            known=PROMPT,
            prompt=len(PROMPT),
            drafting=Drafting(48, drafts),
        )
        for width, drafts in ((2, ()), (6, wrong(wanted, 4)[: COUNT - 1]))
    ]
    assert [[*one.token_ids] for one in session.launcher.launch_together(parts)] == [wanted, wanted]
    assert all(np.array_equal(states(session)[part.cache.state or 0], expected) for part in parts)


@pytest.mark.exhaustive
def test_no_race() -> None:
    session = rig(sanitize=True).session("random", 3)
    assert made(session, 9, HOT, per_step=8, drafts=wrong(plain()[0], 3)[:8])[0] == plain()[0][:9]


# -- planted ----------------------------------------------------------------------------------------------------------

COUNTED = Records.counted


def _counted(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    def counted(self: Records, sequence: Any, step: Any) -> tuple[Any, Any]:
        return change(*COUNTED(self, sequence, step))

    return lambda patch: patch.setattr(Records, "counted", counted)


def _of_first(self: Records, layer: Any, share: Any, column: Any) -> Any:
    return OF(self, layer, share, column - column)


OF = Records.of
BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a wrong draft's record too": _counted(lambda behind, more: (behind, ch.select(more % 8 == 0, more, more + 1))),
    "one record too few": _counted(lambda behind, more: (behind, ch.select(more == 0, more, more - 1))),
    "what lies in the slot before the first token": _counted(lambda behind, more: (behind + more, more)),
    "the records of the step before the last": _counted(lambda behind, more: (behind, ty.u32(0) * more)),
    "one record for all columns": lambda patch: patch.setattr(Records, "of", _of_first),
    "nothing behind the last step": lambda patch: patch.setattr(DeltaMemory, "settle", lambda self, step: None),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("bug", BUGS)
def test_what_is_planted_shows(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    wanted = plain()[0]
    BUGS[bug](monkeypatch)
    planted = rig_of(AWKWARD, generate_kernel, **PLAN)
    assert not drafted(planted, 8, 64, wrong(wanted, 3)[: COUNT - 1])
