"""Prompts of Qwen3.5 in passes: what sequences remember, by token and by pass."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from cheetah.emulator import EmulatorError
from cheetah.models.dense.reference import Reference
from cheetah.plan.prompt import PassPlan
from tests.program.joined import chosen
from tests.program.rig import token_ids
from tests.program.test_hybrids import AWKWARD, awkward, weights
from tests.program.test_prompt_pass import PassRig, PassSession
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

HEADS = AWKWARD.shape.delta
assert HEADS is not None
IDS, OTHERS = token_ids(39, AWKWARD.vocab_size), token_ids(30, AWKWARD.vocab_size, 5)
STATES_TOLERANCE = 0.04
"""The largest relative root mean square of a layer's memories (seen: 0.029, of the last layer)."""


def rig_of(bugs: tuple[tuple[str, str], ...] = (), cut_tokens: int = 0) -> PassRig:
    plan = PassPlan(tokens=96, tile_tokens=16, warpgroups=1, stages=3, cut_tokens=cut_tokens, key_tile=16)
    stages = {"page_size": 16, "kv_chunk": 0 if cut_tokens else 64, "stage_bytes": 16384}
    return PassRig(AWKWARD, blocks=3, pass_plan=plan, bugs=bugs, weights=weights(AWKWARD), **stages)


@cache
def rig() -> PassRig:
    return rig_of()


@cache
def planted_rig() -> PassRig:
    return rig_of(tuple(BUGS.values()))


def read(rig: PassRig, *parts: dict[int, int], scheduler: str = "round_robin", seed: int = 0) -> PassSession:
    """Passes over so many further tokens of some sequences, 0 of IDS and others of OTHERS, where who knows what lies in
    states before."""
    session = PassSession(rig, seed)
    session.buffers["states"].fill(0xFF)
    for counts in parts:
        lengths = {number: session.caches[number].length for number in counts}
        ids = {
            number: (OTHERS if number else IDS)[lengths[number] : lengths[number] + count]
            for number, count in counts.items()
        }
        session.read(ids, scheduler, seed)
    return session


def words(session: PassSession, state: int) -> NDArray[np.uint32]:
    """[layers, shares, words]: one of the states."""
    states = session.buffers["states"]
    whole = states.download(np.uint32, (states.nbytes // 4,))
    return whole.reshape(-1, len(HEADS.layers), HEADS.shares, HEADS.share_words)[state]


def left_by(session: PassSession) -> tuple[bytes, bytes]:
    """What of sequence 0 is remembered, and its keys and values."""
    state = session.caches[0].state
    assert state is not None
    return words(session, state).tobytes(), session.keys_and_values().tobytes()


def memories(of_state: NDArray[np.uint32]) -> NDArray[np.float32]:
    """[layers, value heads, key, value]."""
    found = of_state[:, :, : HEADS.memory_words].copy().view(np.float32)
    shape = (len(HEADS.layers), HEADS.key_heads, 8, HEADS.shared, 16, 128)
    return found.reshape(shape).transpose(0, 1, 3, 5, 2, 4).reshape(len(HEADS.layers), -1, 128, 128)


def far(found: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((found - right) ** 2) / np.mean(right**2)))


@cache
def alone() -> tuple[bytes, bytes]:
    return left_by(read(rig(), {0: 39}))


READINGS: dict[str, tuple[dict[int, int], ...]] = {
    "few tokens at a time, in company": ({0: 1, 1: 30}, {0: 2, 2: 3}, {0: 1, 2: 20}, {0: 35}),
    "cut at a stage of tokens": ({0: 16}, {0: 23}),
    "behind two others": ({2: 2, 1: 30, 0: 39},),
}


@pytest.mark.parametrize("scheduler", tiered(["round_robin", "random"], ["random"]))
@pytest.mark.parametrize("reading", tiered(READINGS, ["cut at a stage of tokens"]))
def test_neither_cuts_nor_company_change_a_bit(reading: str, scheduler: str) -> None:
    assert left_by(read(rig(), *READINGS[reading], scheduler=scheduler, seed=3)) == alone()


def test_what_is_remembered_is_that_of_steps_and_near_the_references() -> None:
    """The product of the first layer is the only one before it, and the order of the scan's sums is that of a step."""
    session = read(rig(), {0: 39})
    found = memories(words(session, session.caches[0].state or 0))
    steps, reference = awkward().session(), Reference(AWKWARD, weights(AWKWARD).tensor)
    steps.score(IDS)
    by_steps = steps.buffers["states"].download(np.uint32, (HEADS.state_words,))
    by_steps = memories(by_steps.reshape(len(HEADS.layers), HEADS.shares, HEADS.share_words))
    assert far(found[0], by_steps[0]) < 1e-6
    reference.forward(IDS)
    for number, layer in enumerate(HEADS.layers):
        assert far(found[number], reference.states[layer].memory) < STATES_TOLERANCE, layer


@pytest.mark.exhaustive
def test_a_product_that_is_cut_makes_nearly_the_same() -> None:
    session = read(rig_of(cut_tokens=16), {0: 13})
    right = read(rig(), {0: 13})
    found, same = (memories(words(one, one.caches[0].state or 0)) for one in (session, right))
    assert far(found, same) < STATES_TOLERANCE


BUGS = {
    "the state of the sequence before": (
        "state_slots + of_segment.z / PAGES_PER_SEQUENCE",
        "state_slots + max(of_segment.z / PAGES_PER_SEQUENCE, 1u) - 1",
    ),
    "rows before the segment, of another sequence": ("if (first_of_run > 0) {", "if (column + first_of_run > 0) {"),
    "the tokens of a stage twice": (
        "for (uint32_t token = 0; token < count; ++token) {",
        "for (uint32_t twice = 0; twice < 2 * count; ++twice) { uint32_t token = twice % count;",
    ),
    "gates of the token before": (
        "uint32_t gates = ((uint32_t*)(workspace + MIXED_AT))[(uint64_t)(column)",
        "uint32_t gates = ((uint32_t*)(workspace + MIXED_AT))[(uint64_t)(max(column, 1u) - 1)",
    ),
    "what is kept of the token before": (
        "float kept = ((const float*)(stage + 9728) + token * 12)[6];",
        "float kept = ((const float*)(stage + 9728) + max(token, 1u) * 12 - 12)[6];",
    ),
    "the last rows but one": (
        "uint32_t token = segment_column + of_segment.y - min(of_segment.y, 3u) + last;",
        "uint32_t token = segment_column + of_segment.y - min(of_segment.y, 3u) + min(last, 1u);",
    ),
    "a memory that nobody has cleared": ("if (is_new == false) {", "if (true) {"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str) -> None:
    with chosen(planted_rig(), list(BUGS).index(bug) + 1) as wrong:
        try:
            found = left_by(read(wrong, {1: 30, 0: 16}, {0: 23}))
        except EmulatorError:
            return
    assert found != alone()
