"""gpt-oss in the generated kernel: experts in MXFP4 whose widths fill no K-tile, biases everywhere, sinks, windows in
every second layer, a clamped gate; against float32. With bf16 weights `test_goldens` has it, against transformers.

Seeds are those of weights whose choices are not near, as in `test_experts`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cheetah.blocks.experts.products import WeighedBiases
from cheetah.blocks.linear.epilogue import RowBiases
from cheetah.models.config_json import FULL, SLIDING
from cheetah.models.gpt_oss import YARN, GptOssConfig
from cheetah.models.layer_kind import ClampedGate, Routing
from tests.program.quantized_weights import QuantizedWeights
from tests.program.rig import Rig, float32_logits, relative_error, same_bits_alone, token_ids
from tests.tiers import tiered
from tests.tolerances import LOGITS

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

MXFP4 = (("gate_up", "mxfp4"), ("down", "mxfp4"))


def gpt_oss(hidden: int = 144, width: int = 96, experts: int = 7, chosen: int = 3) -> GptOssConfig:
    """The limit of the gate is such that a quarter of its rows reach it."""
    return GptOssConfig(
        *(hidden, width, 2, 4, 2, 64, 50),
        max_position_embeddings=256,
        rope=replace(YARN, original_max_position_embeddings=64),
        sliding_window=6,
        layer_types=(SLIDING, FULL),
        routing=Routing(experts, chosen, biases=True),
        clamped_gate=ClampedGate(1.702, 1.5),
    )


# name: (configuration, formats, seed of the weights, plan)
CASES: dict[str, tuple[GptOssConfig, tuple[tuple[str, str], ...], int, dict[str, Any]]] = {
    "a token": (gpt_oss(), MXFP4, 2, {"blocks": 3}),
    "two sequences, formats that differ": (
        *(gpt_oss(), (("qkv", "int8"), ("gate_up", "int4-g32"), ("down", "mxfp4")), 1),
        {"blocks": 4, "batch": 2, "kv_chunk": 16},
    ),
    "eight tokens behind the barrier, every expert chosen": (
        *(gpt_oss(96, 160, 5, 5), MXFP4, 0),
        {"blocks": 4, "tokens": 8, "sync": "barrier", "down_slices": 3},
    ),
}


@cache
def rig(case: str) -> Rig:
    config, formats, seed, plan = CASES[case]
    return Rig(QuantizedWeights(replace(config, weight_formats=formats), seed), **plan)


@pytest.mark.parametrize("case", tiered(CASES, [*CASES][1:]))
def test_logits_of_every_position(case: str) -> None:
    ready = rig(case)
    ids = token_ids(16, ready.config.vocab_size)
    found = ready.session("random", 1).score(ids, ready.plan.tokens)
    assert relative_error(found, float32_logits(ready.weights, ids)) < LOGITS


def test_the_bits_of_a_sequence_do_not_depend_on_its_company() -> None:
    same_bits_alone(rig("two sequences, formats that differ"), [token_ids(6, 50, seed=seed) for seed in range(2)])


@pytest.mark.exhaustive
def test_biases_of_the_first_expert_for_all_are_seen() -> None:
    config, formats, seed, plan = CASES["a token"]
    weights, ids = QuantizedWeights(replace(config, weight_formats=formats), seed), token_ids(4, 50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeighedBiases, "of", lambda self, rows: RowBiases(self.biases).of(rows))
        session = Rig(weights, **plan).session("random", 1)
    assert not relative_error(session.score(ids), float32_logits(weights, ids)) < LOGITS
