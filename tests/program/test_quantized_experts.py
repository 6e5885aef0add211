"""Experts in quantised weights, beside a router and attention in other formats, against float32: by digits, by f16
numbers and by raised ones, with factors of rows that each expert has for itself.

Seeds are those of weights whose choices are not near, as in `test_experts`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cheetah.blocks.linear.matvec import Matvec
from cheetah.generate import generate_kernel
from cheetah.models.config import ConfigError, ModelConfig
from cheetah.plan import PlanError
from tests.program.quantized_weights import QuantizedWeights
from tests.program.rig import Rig, emulated_gpu, float32_logits, relative_error, same_bits_alone, token_ids
from tests.program.test_experts import qwen
from tests.tiers import tiered
from tests.tolerances import LOGITS

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

Formats = tuple[tuple[str, str], ...]
# name: (configuration, formats, seed of the weights, plan)
CASES: dict[str, tuple[ModelConfig, Formats, int, dict[str, Any]]] = {
    "a token, digits": (
        *(qwen(256, 256, 4), (("qkv", "fp8"), ("o", "int4-g64"), ("gate_up", "int4-g128-asym"), ("down", "int4"))),
        *(1, {"blocks": 3}),
    ),
    "a token, an expert a warp, more experts than warps": (
        *(qwen(80, 256, 2, 9, 5), (("gate_up", "int4-g128"), ("down", "int4"))),
        *(2, {"blocks": 5}),
    ),
    "a token, f16 numbers, every expert chosen": (
        *(qwen(256, 256, 4, 4, 4), (("gate_up", "fp8"), ("down", "fp8-block128"))),
        *(0, {"blocks": 3}),
    ),
    "two tokens, digits, then bytes": (
        *(qwen(256, 256, 4), (("gate_up", "int4-g32"), ("down", "int8-g64-asym"))),
        *(0, {"blocks": 4, "batch": 2, "kv_chunk": 16}),
    ),
    "eight tokens, sizes that do not divide, barrier": (
        *(qwen(144, 416), (("gate_up", "int8-asym"), ("down", "int4-g32-asym"))),
        *(0, {"blocks": 4, "tokens": 8, "sync": "barrier", "down_slices": 6, "stage_bytes": 4608}),
    ),
    "eight tokens, nvfp4": (
        *(qwen(144, 128), (("qkv", "nvfp4"), ("gate_up", "nvfp4"), ("down", "nvfp4"))),
        *(2, {"blocks": 4, "tokens": 8}),
    ),
}
EXHAUSTIVE = ("a token, f16 numbers, every expert chosen", "eight tokens, sizes that do not divide, barrier")


@cache
def rig(case: str) -> Rig:
    config, formats, seed, plan = CASES[case]
    return Rig(QuantizedWeights(replace(config, weight_formats=formats), seed), **plan)


@pytest.mark.parametrize("case", tiered(CASES, EXHAUSTIVE))
def test_logits_of_every_position(case: str) -> None:
    ready = rig(case)
    ids = token_ids(16, ready.config.vocab_size)
    found = ready.session("random", 1).score(ids, ready.plan.tokens)
    assert relative_error(found, float32_logits(ready.weights, ids)) < LOGITS


def test_the_bits_of_a_sequence_do_not_depend_on_its_company() -> None:
    same_bits_alone(rig("two tokens, digits, then bytes"), [token_ids(6, 50, seed=seed) for seed in range(2)])


def test_factors_of_the_last_expert_for_all_are_seen() -> None:
    from contextlib import contextmanager

    config, formats, seed, plan = CASES["a token, digits"]
    weights, ids = QuantizedWeights(replace(config, weight_formats=formats), seed), token_ids(4, 50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Matvec, "_added_to", contextmanager(lambda self, share, sums, *more: iter((sums,))))
        session = Rig(weights, **plan).session("random", 1)
    assert not relative_error(session.score(ids), float32_logits(weights, ids)) < 2 * LOGITS


def test_what_no_kernel_has_is_refused() -> None:
    sparse = replace(qwen(256, 128), weight_formats=(("down", "2of4"),))
    with pytest.raises(PlanError, match="experts in 2of4: give bf16 or a quantised format"):
        generate_kernel(sparse, emulated_gpu(3))
    with pytest.raises(ConfigError, match="the router of experts is in int8: supported is bf16"):
        replace(qwen(), weight_formats=(("router", "int8"),))
