"""Prompts of Qwen3.5 in passes: what sequences remember, by token and by pass."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cheetah.emulator import EmulatorError
from cheetah.models.config import ModelConfig
from cheetah.models.dense.reference import Reference, rms_norm
from cheetah.models.dense.weights import FINAL_NORM
from cheetah.models.rounding import widen
from cheetah.plan.prompt import PassPlan
from tests.program.joined import chosen
from tests.program.rig import relative_error, token_ids
from tests.program.test_hybrids import AWKWARD, GATED, QuantizedHybrid, awkward, weights
from tests.program.test_prompt_pass import PassRig, PassSession
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

HEADS = AWKWARD.shape.delta
assert HEADS is not None
IDS, OTHERS = token_ids(39, AWKWARD.vocab_size), token_ids(30, AWKWARD.vocab_size, 5)
STATES_TOLERANCE = 0.03
"""The largest relative root mean square of a layer's memories (seen: 0.020, of the last layer)."""

HIDDEN_TOLERANCE = 0.04
"""The largest relative error of hidden states (seen: 0.027)."""


def rig_of(
    config: ModelConfig = AWKWARD,
    bugs: tuple[tuple[str, str], ...] = (),
    cut_tokens: int = 0,
    warpgroups: int = 1,
    given: Any = None,
) -> PassRig:
    plan = PassPlan(tokens=96, tile_tokens=16, warpgroups=warpgroups, stages=3, cut_tokens=cut_tokens, key_tile=16)
    stages = {"page_size": 16, "kv_chunk": 0 if cut_tokens else 64, "stage_bytes": 16384}
    return PassRig(config, blocks=3, pass_plan=plan, bugs=bugs, weights=given or weights(config), **stages)


@cache
def rig() -> PassRig:
    return rig_of()


@cache
def planted_rig() -> PassRig:
    return rig_of(bugs=tuple(BUGS.values()))


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
    "few tokens at a time, in company": ({0: 4, 1: 30}, {0: 8, 2: 3}, {0: 4, 2: 20}, {0: 23}),
    "cut at a stage of tokens": ({0: 16}, {0: 23}),
    "behind two others": ({2: 2, 1: 30, 0: 39},),
}


@pytest.mark.parametrize("scheduler", tiered(["round_robin", "random"], ["random"]))
@pytest.mark.parametrize("reading", tiered(READINGS, ["cut at a stage of tokens"]))
def test_neither_cuts_nor_company_change_a_bit(reading: str, scheduler: str) -> None:
    assert left_by(read(rig(), *READINGS[reading], scheduler=scheduler, seed=3)) == alone()


def test_what_is_remembered_is_that_of_steps_and_near_the_references() -> None:
    """The product of the first layer is the only one before it; the scan differs from steps in the order of sums."""
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


@pytest.mark.parametrize("config", tiered([AWKWARD, GATED], [GATED]), ids=lambda config: f"heads of {config.head_dim}")
def test_hidden_states_are_near_the_references(config: ModelConfig) -> None:
    rig_of_config = rig() if config is AWKWARD else rig_of(config, warpgroups=2)
    session, reference = PassSession(rig_of_config), Reference(config, weights(config).tensor)
    session.read({1: OTHERS, 0: IDS}, wanted=range(32, 32 + len(IDS)))
    weight = widen(weights(config).tensor(FINAL_NORM)) + np.float32(config.norms.plus_one)
    found = [rms_norm(state, weight, config.rms_norm_eps) for state in session.states(len(IDS))]
    assert relative_error(np.stack(found), np.stack([reference.hidden_state(one) for one in IDS])) < HIDDEN_TOLERANCE


@pytest.mark.exhaustive
def test_numbers_of_value_heads_are_a_product_of_their_own_beside_quantised_weights() -> None:
    formats = {"in_proj": "fp8", **dict.fromkeys(("o", "gate_up", "down"), "int4-g32")}
    given = QuantizedHybrid(replace(AWKWARD, weight_formats=tuple(formats.items())), 1)
    quantised = rig_of(given.config, given=given)
    session = read(quantised, {0: 39})
    assert left_by(read(quantised, {1: 30, 0: 16}, {0: 23})) == left_by(session)
    reference = Reference(given.config, given.tensor)
    reference.forward(IDS)
    found = memories(words(session, session.caches[0].state or 0))
    for number, layer in enumerate(HEADS.layers):
        assert far(found[number], reference.states[layer].memory) < STATES_TOLERANCE, layer


@pytest.mark.exhaustive
def test_other_cuts_than_at_runs_of_four_change_the_order_of_sums_alone() -> None:
    right, found = read(rig(), {0: 39}), read(rig(), {0: 1, 1: 30}, {0: 2}, {0: 1, 2: 2}, {0: 7}, {0: 28})
    ours, its = (memories(words(one, one.caches[0].state or 0)) for one in (found, right))
    assert far(ours[0], its[0]) < 1e-6
    assert far(ours, its) < STATES_TOLERANCE


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
    "the runs of a stage twice": (
        "token < in_runs; token += 4) take_run(stage_2, token,",
        "token < 2 * in_runs; token += 4) take_run(stage_2, token % in_runs,",
    ),
    "a query's product with the key behind the one meant": (
        "so_far_2 = fma_f32(changes[0], numbers_14.x",
        "so_far_2 = fma_f32(changes[0], numbers_14.y",
    ),
    "gates of the token before": (
        "gates[0] = ((uint32_t*)(workspace + MIXED_AT))[(uint64_t)(column)",
        "gates[0] = ((uint32_t*)(workspace + MIXED_AT))[(uint64_t)(max(column, 1u) - 1)",
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


def test_parts_of_prompts_end_with_whole_runs() -> None:
    """By hand: of room for 39 columns 36, from position 3 on 37, up to the 40th token; all that are left where they
    fit; what there is room for where that is less than to the end of a run."""
    fitting = PassSession(rig()).passes.fitting
    assert [fitting([start], [left], 39) for start, left in ((0, 50), (3, 50), (0, 38))] == [[36], [37], [38]]
    assert fitting([1], [50], 2) == [2]
