"""Kernels of Qwen3.5: gated heads of attention, and layers of Gated DeltaNet beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cheetah.blocks.delta.memory import DeltaMemory
from cheetah.blocks.delta.norms import NormedHeads
from cheetah.emulator import SCHEDULERS
from cheetah.generate import generate_kernel
from cheetah.models.config import ModelConfig
from cheetah.models.dense.reference import Reference
from cheetah.models.layer_kind import DeltaNet, Routing
from cheetah.models.qwen3_5 import Qwen35Config, Qwen35MoeConfig
from cheetah.models.registry import preset
from cheetah.models.rope import Rope
from cheetah.models.rounding import round_to_bf16, widen
from cheetah.plan import Plan, PlanError
from cheetah.plan.delta import DeltaHeads
from cheetah.plan.report import inspect_plan
from cheetah.tools.check import SHORT_CONTEXT, Case, explored
from cheetah.tools.judged_steps import JudgedSteps
from cheetah.tools.remembered import memories, words_of_states
from cheetah.tools.subjects import awkward_subject
from tests.program.quantized_weights import QuantizedWeights
from tests.program.rig import (
    F32,
    RandomWeights,
    Rig,
    as_bf16,
    bits,
    float32_logits,
    kept_kernel,
    plain_kernel,
    relative_error,
    token_ids,
)
from tests.tiers import tiered
from tests.tolerances import LOGITS

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

COUNT = 10
MIXED_PLANS: list[dict[str, Any]] = [{"sync": "barrier"}, {"batch": 1, "tokens": 1}]
MIXED_SEED = 17
"""Of quantised weights by which no token's experts are nearly others."""


def hybrid(
    key_heads: int, shared: int, delta_layers: tuple[int, ...], layers: int, heads: int, dims: int
) -> Qwen35Config:
    """A shape of which nothing divides 32 but its heads."""
    return Qwen35Config(
        *(48, 40, layers, heads, 1, dims, 50),
        rms_norm_eps=1e-6,
        max_position_embeddings=256,
        rope=Rope(partial_rotary_factor=0.25),
        delta=DeltaNet(key_heads, key_heads * shared),
        delta_layers=delta_layers,
    )


AWKWARD = hybrid(1, 3, (0, 1, 3, 4), layers=5, heads=3, dims=128)
"""Its eight shares lie with five blocks, some with two; no period in its layers; the last one remembers."""
GATED = hybrid(1, 1, (), layers=2, heads=2, dims=256)
ROUTED = Qwen35MoeConfig(
    **{
        **vars(replace(AWKWARD, layers=3, delta_layers=(0, 2), intermediate_size=32)),
        "routing": Routing(6, 2, shared=48),
    }
)
"""Of six experts, and one that every token has, which is wider."""


class HybridWeights(RandomWeights):
    """Rates of forgetting from nearly none to all; norms whose weights are near 0 where 1 is added to them."""

    @staticmethod
    def _draw(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        if name.endswith("A_log"):
            return draw.uniform(-6, 2, shape).astype(np.float32)
        if name.endswith("dt_bias"):
            return draw.standard_normal(shape).astype(np.float32)
        if "norm" in name and "linear_attn" not in name:
            return as_bf16(0.1 * draw.standard_normal(shape))
        return RandomWeights._draw(draw, name, shape)


@cache
def weights(config: ModelConfig) -> HybridWeights:
    """By which no token's experts are nearly others."""
    return HybridWeights(config, 54 if config.routing is not None else 0)


def rig_of(config: ModelConfig, generate: Callable[..., Any] = kept_kernel, **plan: Any) -> Rig:
    chosen = {"blocks": 5, "batch": 3, "tokens": 4, "consumer_warps": 4, "page_size": 16, **plan}
    return Rig(weights(config), generate=generate, **chosen)


@cache
def awkward() -> Rig:
    return rig_of(AWKWARD)


@cache
def ids_and_logits(number: int) -> tuple[list[int], F32]:
    """Some tokens, and what the kernel of several sequences makes of them one by one."""
    ids = token_ids(COUNT, AWKWARD.vocab_size, number)
    return ids, awkward().session().score(ids)


def test_gated_heads_have_the_logits_of_the_reference() -> None:
    ids = token_ids(COUNT, GATED.vocab_size)
    found = rig_of(GATED, batch=1, tokens=1, blocks=3).session().score(ids)
    assert relative_error(found, float32_logits(weights(GATED), ids)) < LOGITS


def test_sequences_together_have_the_logits_of_the_reference_and_bits_of_their_own() -> None:
    session, all_ids = awkward().session("random", seed=3), [ids_and_logits(number)[0] for number in range(3)]
    together = session.score_together(all_ids, [session.sequence() for _ in all_ids])
    for number, found in enumerate(together):
        ids, alone = ids_and_logits(number)
        assert relative_error(found, float32_logits(weights(AWKWARD), ids)) < LOGITS
        assert np.array_equal(bits(found), bits(alone)), number


def test_a_state_has_the_memory_of_the_reference_and_its_channels() -> None:
    """Where `words_of_states` has them, which `cheetah check` fills states by."""
    (ids, _), session, heads = ids_and_logits(0), awkward().session(), AWKWARD.shape.delta
    assert heads is not None
    session.score(ids)
    words = session.states()[session.launcher.cache.state]
    reference = Reference(AWKWARD, weights(AWKWARD).tensor, rounding=round_to_bf16)
    reference.forward(ids)
    wanted = words_of_states(heads, [reference.states[layer] for layer in heads.layers])
    channels = (widen(np.ascontiguousarray(one[0, :, heads.memory_words :]).view(np.uint16)) for one in (words, wanted))
    for first, other in ([memories(heads, one)[0] for one in (words, wanted)], [*channels]):
        assert np.linalg.norm(first - other) < LOGITS * np.linalg.norm(other)


@pytest.mark.exhaustive
def test_a_check_finds_nothing_in_what_is_right() -> None:
    subject = awkward_subject(preset("qwen3.5-0.8b"), {"max_context": SHORT_CONTEXT})
    made = generate_kernel(subject.config, subject.machine("emulator"), **subject.plan)
    case = Case(subject, (made,), JudgedSteps)
    assert explored(case, case.launches(watched=True), schedulers=SCHEDULERS[:1]).ok


def several_a_step(rig: Rig) -> F32:
    """Six tokens by steps of four, of which the last two columns are for nobody, then the others one by one."""
    session, (ids, _) = rig.session(), ids_and_logits(0)
    first = session.launcher.score(ids[:6], session.logits, 4)
    return np.concatenate([first, session.score(ids[6:])])


def after_another(rig: Rig) -> F32:
    """Where another sequence has left what it remembered, and who knows what before."""
    session, (ids, _) = rig.session(), ids_and_logits(0)
    session.buffers["states"].fill(0xFF)
    session.score(ids_and_logits(1)[0])
    session.launcher.restart()
    return session.score(ids)


@pytest.mark.parametrize("read", [several_a_step, after_another])
def test_what_is_remembered_is_of_the_tokens_that_count(read: Callable[[Rig], F32]) -> None:
    assert np.array_equal(bits(read(awkward())), bits(ids_and_logits(0)[1]))


@pytest.mark.parametrize("scheduler", tiered(SCHEDULERS, SCHEDULERS[-1:]))
def test_bits_do_not_depend_on_the_schedule(scheduler: str) -> None:
    ids, alone = ids_and_logits(2)
    assert np.array_equal(bits(awkward().session(scheduler, seed=1).score(ids)), bits(alone))


@pytest.mark.parametrize(
    "plan", tiered([{"sync": "barrier"}, {"batch": 1, "tokens": 1}, {"blocks": 13}], [{"blocks": 13}])
)
def test_kernels_of_other_plans_are_right_too(plan: dict[str, Any]) -> None:
    """Behind a grid barrier; of one column; with blocks that remember nothing."""
    ids = ids_and_logits(0)[0]
    found = rig_of(AWKWARD, **plan).session().score(ids)
    assert relative_error(found, float32_logits(weights(AWKWARD), ids)) < LOGITS


class QuantizedHybrid(QuantizedWeights):
    _draw = staticmethod(HybridWeights._draw)


@pytest.mark.parametrize("plan", tiered(MIXED_PLANS, MIXED_PLANS[1:]))
def test_matrices_of_a_layer_in_several_formats(plan: dict[str, Any]) -> None:
    """As files have them: numbers of Gated DeltaNet, heads and the expert that every token has in bf16."""
    formats = {"in_proj": "fp8", **dict.fromkeys(("o", "gate_up", "down"), "int4-g32")}
    mixed = QuantizedHybrid(replace(ROUTED, weight_formats=tuple(formats.items())), MIXED_SEED)
    rig = Rig(mixed, **{"blocks": 5, "batch": 3, "tokens": 4, "consumer_warps": 4, "page_size": 16, **plan})
    ids = ids_and_logits(0)[0]
    assert relative_error(rig.session().score(ids), float32_logits(mixed, ids)) < LOGITS


def test_an_expert_that_every_token_has_is_added_to_those_that_it_chose() -> None:
    """Two sequences together have the bits of each alone, and the logits of the reference."""
    session = rig_of(ROUTED).session("random", 2)
    all_ids = [ids_and_logits(number)[0] for number in range(2)]
    together = session.score_together(all_ids, [session.sequence() for _ in all_ids])
    for ids, found in zip(all_ids, together, strict=True):
        assert relative_error(found, float32_logits(weights(ROUTED), ids)) < LOGITS
        alone = rig_of(ROUTED).session("priority", 1)
        assert np.array_equal(bits(found), bits(alone.score_together([ids], [alone.sequence()])[0]))


def _always_live(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeltaMemory, "_is_live", lambda self, column: self.columns.state(column, "total") > 0)


def _as_it_lies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeltaMemory, "_unless", lambda self, is_new, place: place[0])


def _slot_of_another(patch: pytest.MonkeyPatch) -> None:
    state = DeltaMemory._state
    patch.setattr(DeltaMemory, "_state", lambda self, share, sequence: state(self, share, sequence - sequence))


def _one_head_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NormedHeads, "_scaled", lambda self, pair, scale: pair)


def _together(rig: Rig) -> F32:
    session = rig.session()
    return session.score_together([ids_and_logits(n)[0] for n in range(3)], [session.sequence() for _ in range(3)])[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("plant", "read"),
    [
        (_always_live, several_a_step),
        (_as_it_lies, after_another),
        (_slot_of_another, _together),
        (_one_head_for_all, _together),
    ],
)
def test_what_is_planted_shows(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], read: Callable[[Rig], F32]
) -> None:
    plant(monkeypatch)
    assert not np.array_equal(bits(read(rig_of(AWKWARD, plain_kernel))), bits(ids_and_logits(0)[1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"delta": DeltaNet(1, 3, key_dim=64)},
            "keys of 64 and values of 128 elements, of 4 tokens: kernels exist for",
        ),
        ({"delta": DeltaNet(1, 2)}, "2 value heads of Gated DeltaNet have 256 rows, and 3 query heads 384"),
        ({"delta_layers": tuple(range(5))}, "give some, not all"),
        ({"weight_formats": (("down", "2of4"),)}, "down in 2of4: beside Gated DeltaNet give bf16 or a quantised"),
        ({"weight_formats": (("o", "int8"),), "act_order": True}, "act-order beside Gated DeltaNet"),
    ],
)
def test_what_no_kernel_has_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _ = replace(AWKWARD, **changes).shape


def test_plans_that_no_kernel_has_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match="supported is 'bf16'"):
        rig_of(AWKWARD, plain_kernel, kv_dtype="e4m3")


def test_value_heads_share_key_heads_evenly() -> None:
    with pytest.raises(PlanError, match="5 value heads on 2 key heads"):
        DeltaHeads(2, 5, (0,))


def test_reports_count_what_layers_have() -> None:
    """By hand: of five layers one has keys and values, and the others three heads of 128 by 128, which have 2 x 128
    and 3 x 16 channels' numbers of three tokens before, in two words, with each of eight shares."""
    config, plan = AWKWARD, Plan.from_dict(awkward().manifest.plan)
    report = inspect_plan(config.shape, plan, awkward().gpu, context=100)
    assert report.step_bytes.kv == 2 * 2 * 128 * 100 * plan.batch
    share = 4 * (3 * 16 * 128 + (256 + 48) * 2)
    assert report.step_bytes.states == 4 * 8 * share * plan.batch
    assert {phase.name: phase.runs for phase in report.phases} == {
        **{"in_proj": 4, "delta": 4, "qkv": 1, "attention": 1},
        **{"o": 5, "gate_up": 5, "down": 5, "lm_head": 1},
    }
    (delta,) = (phase for phase in report.phases if phase.name == "delta")
    assert delta.block_bytes == tuple(count * share * plan.batch for count in (2, 2, 2, 1, 1))
    assert report.exchanges_per_step == 2 + 4 * (3 + 2 + 1 + 2) + (2 + 1 + 2 + 1 + 2) + 3
