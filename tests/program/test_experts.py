"""A feed-forward of experts in the generated kernel: against float32, in company and alone, with logits that tie or are
none.

Seeds are those of weights whose choices are not near: no two of a token's logits around the last one chosen lie nearer
than 0.03, which is more than bf16 makes of them. Nearer ones may be chosen otherwise, and then the logits are others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from cheetah.errors import CheetahError
from cheetah.generate import generate_kernel
from cheetah.models.config import ModelConfig
from cheetah.models.dense.fused_router import router_rows
from cheetah.models.formats import PackingError
from cheetah.models.layer_kind import Routing
from cheetah.models.mixtral import MixtralConfig
from cheetah.models.olmoe import OlmoeConfig
from cheetah.models.qwen3_moe import Qwen3MoeConfig
from cheetah.models.registry import preset
from cheetah.models.rounding import as_bf16
from cheetah.package import Generated
from cheetah.plan import PlanError, default_plan, gpu_named
from tests.program.planted_experts import OF_SEVERAL
from tests.program.rig import (
    RandomWeights,
    Rig,
    bits,
    emulated_gpu,
    float32_logits,
    kept_kernel,
    random_weights,
    relative_error,
    same_bits_alone,
    token_ids,
)
from tests.tiers import tiered
from tests.tolerances import LOGITS

pytestmark = [pytest.mark.compiler, pytest.mark.slow]


def qwen(hidden: int = 80, width: int = 32, heads: int = 2, experts: int = 9, chosen: int = 3) -> ModelConfig:
    return Qwen3MoeConfig(
        *(hidden, width, 2, heads, 1, 64, 50), max_position_embeddings=256, routing=Routing(experts, chosen)
    )


OLMOE = OlmoeConfig(48, 32, 2, 2, 2, 64, 50, max_position_embeddings=256, routing=Routing(40, 2, normalised=False))
MIXTRAL = MixtralConfig(48, 288, 2, 2, 1, 64, 50, max_position_embeddings=256, routing=Routing(5, 2))

# name: (configuration, seed of its weights, how it is run, tokens, of them a step)
CASES: dict[str, tuple[ModelConfig, int, dict[str, Any], int, int]] = {
    "one token a step": (qwen(), 12, {"blocks": 3}, 24, 1),
    "one token a step, a fused router": (qwen(), 12, {"blocks": 3, "fused_router": 1}, 24, 1),
    "more experts than lanes, weights of all, barrier": (OLMOE, 5, {"blocks": 4, "sync": "barrier"}, 16, 1),
    "four tokens, an expert's part in slices": (MIXTRAL, 2, {"blocks": 3, "tokens": 4, "down_slices": 4}, 24, 4),
    "narrow rows, four tokens": (qwen(144, 256, 4, 6), 2, {"blocks": 2, "tokens": 4}, 24, 4),
    "narrow q, k, v and router": (qwen(256, 64, 2, 16), 2, {"blocks": 5}, 16, 1),
    "narrow q, k, v and router, two tokens, barrier": (
        qwen(256, 64, 2, 16),
        2,
        {"blocks": 5, "tokens": 2, "sync": "barrier"},
        16,
        2,
    ),
    "eight tokens, eight warps": (qwen(), 12, {"blocks": 5, "tokens": 8, "consumer_warps": 8}, 24, 8),
    "sixteen tokens": (qwen(), 12, {"blocks": 3, "tokens": 16, "down_slices": 2}, 24, 16),
    "every expert chosen, an M-tile a block": (qwen(48, 32, 2, 4, 4), 0, {"blocks": 16}, 12, 1),
}


EXHAUSTIVE = (
    *("eight tokens, eight warps", "sixteen tokens", "one token a step"),
    "narrow q, k, v and router, two tokens, barrier",
)


@pytest.mark.parametrize("case", tiered(CASES, EXHAUSTIVE))
def test_logits_of_every_position(case: str) -> None:
    config, seed, plan, count, per_step = CASES[case]
    weights, ids = random_weights(config, seed), token_ids(count, config.vocab_size)
    found = Rig(weights, **plan).session("priority", 1).score(ids, per_step)
    assert relative_error(found, float32_logits(weights, ids)) < LOGITS


@cache
def of_four(sync: str = "flags") -> Rig:
    """Four sequences a step, whose attention does not depend on their company, nor what their experts make on how much
    of it is in shared memory at once."""
    return Rig(random_weights(qwen(), 12), blocks=3, batch=4, kv_chunk=16, sync=sync, down_slices=2)


WHOLE: dict[str, Any] = {"blocks": 3, "batch": 4, "kv_chunk": 16}
"""What experts make is in shared memory at once."""


@pytest.mark.parametrize("sync", tiered(["flags", "barrier"], ["barrier"]))
def test_the_bits_of_a_sequence_do_not_depend_on_its_company(sync: str) -> None:
    """Some tokens are those of another sequence, so their experts are the same; others are not."""
    several = [token_ids(9, 50, seed=seed) for seed in range(4)]
    several[1][:5] = several[0][:5]
    together = same_bits_alone(of_four(sync), several)
    wanted = float32_logits(of_four(sync).weights, several[0])
    assert relative_error(together[0], wanted) < LOGITS


def test_a_token_that_is_no_number_changes_no_other() -> None:
    """Its logits are none, all of them: it is given to the lowest experts, and makes no address of any kind."""
    weights = RandomWeights(qwen(), 12)
    broken = RandomWeights(qwen(), 12)
    broken.tensors["model.embed_tokens.weight"][49] = as_bf16(np.full(80, np.nan))
    rig = Rig(broken, generate=kept_kernel, **WHOLE)
    ids, nothing = token_ids(6, 49), [49] * 6
    session = rig.session("random", 1)
    found, lost = session.score_together([ids, nothing], [session.sequence(), session.sequence()])
    assert np.isnan(lost).all()
    session = of_four().session("random", 1)
    assert relative_error(found, float32_logits(weights, ids)) < LOGITS
    np.testing.assert_array_equal(bits(found), bits(session.score_together([ids], [session.sequence()])[0]))


def test_of_equal_logits_the_lowest_experts_count() -> None:
    """A router of zeros: every token is given to the first three, a third each."""
    weights, ids = RandomWeights(qwen()), token_ids(12, 50)
    for name, tensor in weights.tensors.items():
        if name.endswith("mlp.gate.weight"):
            weights.tensors[name] = np.zeros_like(tensor)
    session = Rig(weights, generate=kept_kernel, **WHOLE).session("random", 3)
    found, wanted = session.score(ids), float32_logits(weights, ids)
    assert relative_error(found, wanted) < LOGITS
    name = "model.layers.1.mlp.experts.{}.down_proj.weight"
    weights.tensors[name.format(2)] = weights.tensors[name.format(8)]
    assert relative_error(float32_logits(weights, ids), wanted) > 4 * LOGITS, "another expert would show"


def test_a_block_that_would_make_no_part_of_gated_is_refused() -> None:
    with pytest.raises(PlanError, match="3 experts of a token have 12 M-tiles of gate_up together, and .* 13 blocks"):
        generate_kernel(qwen(), emulated_gpu(13))
    with pytest.raises(PlanError, match="down_slices is 2: what experts make of a token comes whole"):
        generate_kernel(qwen(), emulated_gpu(3), down_slices=2)


def test_what_cannot_be_fused_is_refused() -> None:
    weights, gpu = RandomWeights(qwen()), gpu_named(emulated_gpu(3))
    weights.tensors["model.layers.1.input_layernorm.weight"][3] = 0
    with pytest.raises(PackingError, match="layers.1.input_layernorm.weight: weight 3 is 0: rows of a fused"):
        router_rows(weights.config, weights.tensor, 1)
    for config, plan in ((qwen(), {"batch": 2}), (qwen(), {"sync": "barrier"}), (OLMOE, {}), (qwen(experts=19), {})):
        with pytest.raises(PlanError, match="fused_router is 1"):
            generate_kernel(config, gpu, fused_router=1, **plan)


def test_what_does_not_fit_whole_comes_in_turn() -> None:
    """Ranks as long as two fit, then slices of one."""
    mixtral, gpt_oss, gpu = preset("mixtral-8x7b").shape, preset("gpt-oss-20b").shape, gpu_named("h200")
    parts = [default_plan(gpu, mixtral, batch=tokens).down_slices for tokens in (1, 2, 4, 8)]
    assert parts == [1, 1, 2, 4]
    assert [default_plan(gpu, gpt_oss, tokens=tokens).down_slices for tokens in (4, 8, 16)] == [1, 2, 4]
    assert [mixtral.table.named("down").in_turn(count) for count in (1, 2, 4)] == [(2, 1), (1, 1), (1, 2)]


@pytest.mark.parametrize("bug", tiered(OF_SEVERAL, [*OF_SEVERAL][1:]))
def test_a_planted_bug_is_found(bug: str) -> None:
    def planted(*arguments: Any, **named: Any) -> Generated:
        with pytest.MonkeyPatch.context() as patch:
            OF_SEVERAL[bug](patch)
            return generate_kernel(*arguments, **named)

    weights, ids = random_weights(qwen(), 12), token_ids(24, 50)
    parts = 2 if "in turn" in bug else 1
    session = Rig(weights, blocks=3, tokens=4, down_slices=parts, generate=planted).session("random", 1)
    try:
        assert not relative_error(session.score(ids, 4), float32_logits(weights, ids)) < 2 * LOGITS
    except CheetahError:
        pass
