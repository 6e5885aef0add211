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
from cheetah.models.rounding import exact, round_to_bf16, widen
from cheetah.plan.delta import DeltaHeads
from cheetah.plan.products import SHARED_UP
from cheetah.plan.prompt import PassPlan
from cheetah.tools.judged_passes import decided_ids
from tests.program.joined import chosen
from tests.program.rig import relative_error, token_ids
from tests.program.test_hybrids import AWKWARD, GATED, ROUTED, QuantizedHybrid, weights
from tests.program.test_hybrids import rig_of as rig_of_steps
from tests.program.test_prompt_pass import PassRig, PassSession
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

ROUTED = replace(ROUTED, intermediate_size=96)
"""Experts of three K-tiles: a pass takes no fewer than two."""
EXPERTS = "experts, and one that every token has"
MODELS = {"dense": AWKWARD, EXPERTS: ROUTED}
OTHERS = token_ids(30, AWKWARD.vocab_size, 5)
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
    sanitize: bool = False,
) -> PassRig:
    plan = PassPlan(tokens=96, tile_tokens=16, warpgroups=warpgroups, stages=3, cut_tokens=cut_tokens, key_tile=16)
    if config.routing is not None and cut_tokens:
        plan = replace(plan, weights_warps=3)
    stages = {"page_size": 16, "kv_chunk": 0 if cut_tokens else 64, "stage_bytes": 8192}
    blocks, given = 13 if cut_tokens else 3, given or weights(config)
    return PassRig(config, blocks=blocks, pass_plan=plan, bugs=bugs, weights=given, sanitize=sanitize, **stages)


@cache
def rig(config: ModelConfig = AWKWARD) -> PassRig:
    return rig_of(config)


@cache
def planted_rig(config: ModelConfig = AWKWARD) -> PassRig:
    return rig_of(config, bugs=tuple(BUGS[config].values()))


def heads_of(config: ModelConfig) -> DeltaHeads:
    heads = config.shape.delta
    assert heads is not None
    return heads


@cache
def ids_of(config: ModelConfig, given: Any = None) -> list[int]:
    """A prompt of which rounding decides no token's experts."""
    if config.routing is None:
        return token_ids(39, config.vocab_size)
    tensor = (given or weights(config)).tensor
    references = [Reference(config, tensor, rounding) for rounding in (exact, round_to_bf16)]
    return decided_ids(references, np.random.default_rng(0), 70)


def read(
    rig: PassRig, *parts: dict[int, int], scheduler: str = "round_robin", seed: int = 0, ids: Any = None
) -> PassSession:
    """Passes over so many further tokens of some sequences, 0 of `ids`, or of `ids_of`, and others of OTHERS, where who
    knows what lies in states before."""
    session, of_first = PassSession(rig, seed), ids or ids_of(rig.config)
    session.buffers["states"].fill(0xFF)
    for counts in parts:
        lengths = {number: session.caches[number].length for number in counts}
        ids = {
            number: (OTHERS if number else of_first)[lengths[number] : lengths[number] + count]
            for number, count in counts.items()
        }
        session.read(ids, scheduler, seed)
    return session


def words(session: PassSession, state: int) -> NDArray[np.uint32]:
    """[layers, shares, words]: one of the states."""
    states, heads = session.buffers["states"], heads_of(session.config)
    whole = states.download(np.uint32, (states.nbytes // 4,))
    return whole.reshape(-1, len(heads.layers), heads.shares, heads.share_words)[state]


def left_by(session: PassSession) -> tuple[bytes, bytes]:
    """What of sequence 0 is remembered, and its keys and values."""
    state = session.caches[0].state
    assert state is not None
    return words(session, state).tobytes(), session.keys_and_values().tobytes()


def memories(of_state: NDArray[np.uint32]) -> NDArray[np.float32]:
    """[layers, value heads, key, value], of heads as all of these models have them."""
    heads, layers = heads_of(AWKWARD), len(of_state)
    found = of_state[:, :, : heads.memory_words].copy().view(np.float32)
    shape = (layers, heads.key_heads, 8, heads.shared, 16, 128)
    return found.reshape(shape).transpose(0, 1, 3, 5, 2, 4).reshape(layers, -1, 128, 128)


def far(found: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((found - right) ** 2) / np.mean(right**2)))


@cache
def alone(config: ModelConfig = AWKWARD, count: int = 39) -> tuple[bytes, bytes]:
    return left_by(read(rig(config), {0: count}))


READINGS: dict[str, tuple[dict[int, int], ...]] = {
    "few tokens at a time, in company": ({0: 4, 1: 30}, {0: 8, 2: 3}, {0: 4, 2: 20}, {0: 23}),
    "cut at a stage of tokens": ({0: 16}, {0: 23}),
    "behind two others": ({2: 2, 1: 30, 0: 39},),
    "cut at 64 tokens": ({1: 24, 0: 64}, {1: 6, 0: 6, 2: 30}),
}
OF_MODELS = [
    (model, reading) for model in MODELS for reading in READINGS if model == EXPERTS or reading != "cut at 64 tokens"
]
OFTEN = [("dense", "behind two others"), (EXPERTS, "few tokens at a time, in company"), (EXPERTS, "cut at 64 tokens")]


@pytest.mark.parametrize("scheduler", tiered(["round_robin", "random"], ["random"]))
@pytest.mark.parametrize("model, reading", tiered(OF_MODELS, [one for one in OF_MODELS if one not in OFTEN]))
def test_neither_cuts_nor_company_change_a_bit(model: str, reading: str, scheduler: str) -> None:
    config, parts = MODELS[model], READINGS[reading]
    count = sum(part.get(0, 0) for part in parts)
    assert left_by(read(rig(config), *parts, scheduler=scheduler, seed=3)) == alone(config, count)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_remembered_is_that_of_steps_and_near_the_references(model: str) -> None:
    """The product of the first layer is the only one before it; the scan differs from steps in the order of sums."""
    config = MODELS[model]
    ids, heads, session = ids_of(config), heads_of(config), read(rig(config), {0: len(ids_of(config))})
    found = memories(words(session, session.caches[0].state or 0))
    steps, reference = rig_of_steps(config).session(), Reference(config, weights(config).tensor)
    steps.score(ids)
    by_steps = steps.buffers["states"].download(np.uint32, (heads.state_words,))
    by_steps = memories(by_steps.reshape(len(heads.layers), heads.shares, heads.share_words))
    assert far(found[0], by_steps[0]) < 1e-6
    reference.forward(ids)
    for number, layer in enumerate(heads.layers):
        assert far(found[number], reference.states[layer].memory) < STATES_TOLERANCE, layer


@pytest.mark.parametrize("model", tiered([*MODELS, "heads of 256"], ["heads of 256"]))
def test_hidden_states_are_near_the_references(model: str) -> None:
    config = MODELS.get(model, GATED)
    rig_of_config, ids = rig_of(config, warpgroups=2) if config is GATED else rig(config), ids_of(config)[:60]
    session, reference = PassSession(rig_of_config), Reference(config, weights(config).tensor)
    session.read({1: OTHERS, 0: ids}, wanted=range(32, 32 + len(ids)))
    weight = widen(weights(config).tensor(FINAL_NORM)) + np.float32(config.norms.plus_one)
    found = [rms_norm(state, weight, config.rms_norm_eps) for state in session.states(len(ids))]
    assert relative_error(np.stack(found), np.stack([reference.hidden_state(one) for one in ids])) < HIDDEN_TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
def test_numbers_of_value_heads_are_a_product_of_their_own_beside_quantised_weights(model: str) -> None:
    """Beside experts, too, the one that every token has stays in bf16."""
    formats = {"in_proj": "fp8", **dict.fromkeys(("o", "gate_up", "down"), "int4-g32")}
    given = QuantizedHybrid(replace(MODELS[model], weight_formats=tuple(formats.items())), 1)
    quantised, ids = rig_of(given.config, given=given), ids_of(given.config, given)
    session = read(quantised, {0: 39}, ids=ids)
    assert left_by(read(quantised, {1: 30, 0: 16}, {0: 23}, ids=ids)) == left_by(session)
    reference = Reference(given.config, given.tensor)
    reference.forward(ids[:39])
    found = memories(words(session, session.caches[0].state or 0))
    for number, layer in enumerate(heads_of(given.config).layers):
        assert far(found[number], reference.states[layer].memory) < STATES_TOLERANCE, layer


@pytest.mark.exhaustive
def test_other_cuts_than_at_runs_of_four_change_the_order_of_sums_alone() -> None:
    right, found = read(rig(), {0: 39}), read(rig(), {0: 1, 1: 30}, {0: 2}, {0: 1, 2: 2}, {0: 7}, {0: 28})
    ours, its = (memories(words(one, one.caches[0].state or 0)) for one in (found, right))
    assert far(ours[0], its[0]) < 1e-6
    assert far(ours, its) < STATES_TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
def test_a_product_that_is_cut_makes_nearly_the_same(model: str) -> None:
    """Of experts weights are brought by three warps, as on a GPU, and the one that every token has is cut along k."""
    config = MODELS[model]
    if config.routing is not None:
        config = replace(config, hidden_size=512)
    cut, whole = rig_of(config, cut_tokens=16), rig(config)
    parts = [cut.sizes.parts(product) for product in cut.sizes.table.products if product.name == SHARED_UP]
    assert parts == [2] * (config.routing is not None)
    session, right = read(cut, {0: 13}, scheduler="random", seed=2), read(whole, {0: 13})
    found, same = (memories(words(one, one.caches[0].state or 0)) for one in (session, right))
    assert far(found, same) < STATES_TOLERANCE


@pytest.mark.exhaustive
def test_no_races_are_found_where_choices_and_sums_share_memory() -> None:
    found = read(rig_of(ROUTED, sanitize=True), {1: 5, 0: 16}, {0: 4}, scheduler="random", seed=4)
    assert left_by(found) == alone(ROUTED, 20)


BUGS_OF_DELTA = {
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
BUGS_OF_EXPERTS = {
    "all weigh the expert that they have as the first token does": ("[token * 16 + 8];", "[8];"),
    "an expert's logit in the place of the one that every token has": ("[token * 16 + 8];", "[token * 16 + 5];"),
    "rows of its neighbour's weight": (" * 8 + lane % 4 * 2 + 1];", " * 8 + lane % 4 * 2];"),
    "the stream as it was": ("add_residual_of_add_weighed(sums, 0);", ""),
}
BUGS = {AWKWARD: BUGS_OF_DELTA, ROUTED: BUGS_OF_EXPERTS}


@pytest.mark.exhaustive
@pytest.mark.parametrize("model, bug", [(model, bug) for model, config in MODELS.items() for bug in BUGS[config]])
def test_planted_bugs_are_found(model: str, bug: str) -> None:
    config = MODELS[model]
    with chosen(planted_rig(config), list(BUGS[config]).index(bug) + 1) as wrong:
        try:
            found = left_by(read(wrong, {1: 30, 0: 16}, {0: 23}))
        except EmulatorError:
            return
    assert found != alone(config)


def test_parts_of_prompts_end_with_whole_runs() -> None:
    """By hand: of room for 39 columns 36, from position 3 on 37, up to the 40th token; all that are left where they
    fit; what there is room for where that is less than to the end of a run."""
    fitting = PassSession(rig(ROUTED)).passes.fitting
    assert [fitting([start], [left], 39) for start, left in ((0, 50), (3, 50), (0, 38))] == [[36], [37], [38]]
    assert fitting([1], [50], 2) == [2]
