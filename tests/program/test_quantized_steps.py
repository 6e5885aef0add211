"""Whole steps whose matrices are quantised, each in a format of its own beside a bf16 head, against float32."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from cheetah.blocks.linear.matvec import Matvec
from cheetah.models.config import ModelConfig
from tests.program.layer_kinds import fused, sandwich, ungated
from tests.program.quantized_weights import QuantizedWeights
from tests.program.rig import Rig, bits, float32_logits, model, relative_error, token_ids
from tests.program.test_families import qwen2, qwen3
from tests.tiers import tiered
from tests.tolerances import EIGHT_BIT_LOGITS, LOGITS

pytestmark = pytest.mark.compiler

Formats = tuple[tuple[str, str], ...]
MIXED: Formats = (("qkv", "fp8"), ("o", "int4-g128-asym"), ("gate_up", "int8"), ("down", "int4-g32"))
OTHERS: Formats = (
    *(("qkv", "int4-g64"), ("o", "fp8-block128"), ("gate_up", "int4-g128")),
    *(("down", "fp8"), ("lm_head", "int8-asym")),
)
ORDERED: Formats = (
    *(("qkv", "int4-g128"), ("o", "fp8-block128"), ("gate_up", "int4-g64-asym")),
    *(("down", "int4-g32"), ("lm_head", "int8-g128")),
)
WINDOWS = "blocks-1024of1024"
CASES: dict[str, tuple[ModelConfig, Formats, dict[str, Any]]] = {
    "llama, three sequences, slices": (model(144, 280), MIXED, {"batch": 3, "tokens": 4, "down_slices": 2}),
    "llama, one token, everything": (model(), OTHERS, {}),
    "llama, four tokens, two of four, lists, parts that come ahead": (
        *(
            model(144, 1100),
            (("qkv", "2of4+list9"), ("o", "2of4-int4-g64"), ("gate_up", "blocks-2of4"), ("down", "2of4+list7")),
        ),
        {"tokens": 4, "sync": "barrier"},
    ),
    "llama, two tokens, two of four codes": (
        *(
            model(256, 512, heads=4),
            (("qkv", "2of4-int4-g128"), ("o", "2of4-fp8"), ("gate_up", "2of4-int4"), ("down", "2of4-int4-g64")),
        ),
        {"tokens": 2},
    ),
    "llama, one token, digits, a list": (
        *(
            model(256, 512, heads=4),
            (("qkv", "int4-g128-asym"), ("o", "int8+list2"), ("gate_up", "int4-g64+list3"), ("down", "int4")),
        ),
        {"down_slices": 2},
    ),
    "llama, two tokens, blocks one by one": (
        *(model(144, 1100), tuple((name, WINDOWS) for name in ("qkv", "o", "gate_up", "down"))),
        {"tokens": 2, "down_slices": 3},  # of two windows
    ),
    "llama, eight tokens, blocks one by one, parts that come ahead": (
        *(model(144, 1100), tuple((name, WINDOWS) for name in ("qkv", "o", "gate_up", "down"))),
        {"tokens": 8, "sync": "barrier"},
    ),
    "qwen3, keys of eight bits": (qwen3(), OTHERS[:4], {"kv_dtype": "e4m3"}),
    "qwen2, barrier": (qwen2(4, 2), MIXED, {"sync": "barrier", "tokens": 2}),
    "llama, eight tokens, parts that come ahead": (model(144, 1100), MIXED, {"tokens": 8, "sync": "barrier"}),
    "act-order, a token, digits, f16": (model(256, 512, heads=4, act_order=True), ORDERED, {"down_slices": 2}),
    "act-order, three sequences, sizes that do not divide": (
        *(model(144, 280, act_order=True), (*MIXED[1:3], ("down", "int4-g32"))),
        {"batch": 3, "tokens": 4, "down_slices": 2},
    ),
    "act-order, eight tokens": (
        *(model(256, 512, heads=4, act_order=True), (("qkv", "int4-g64"), ("o", "int4-g64"), ("gate_up", "int8-g32"))),
        {"tokens": 8},
    ),
    "norms on both sides, two sequences, slices": (
        *(sandwich(144, 280), (("qkv", "fp8"), ("o", "int4-g64"), ("down", "int4-g32"))),
        {"batch": 2, "down_slices": 2},
    ),
    "fused tensors in act-order": (
        *(fused(act_order=True), (("qkv", "int4-g64"), ("gate_up", "int8-g32"), ("down", "int4-g32-asym"))),
        {},
    ),
    "act-order, no gate, biases": (
        *(ungated(256, 512, act_order=True), (("qkv", "int4-g64"), ("gate_up", "int4-g64"), ("down", "int4-g32"))),
        {"tokens": 2},
    ),
    "act-order, two tokens, biases": (
        *(replace(qwen2(4, 2), hidden_size=256, act_order=True), (("qkv", "int4-g64"), ("o", "int8-g32"))),
        {"tokens": 2},
    ),
}


EXHAUSTIVE = (
    *("qwen2, barrier", "qwen3, keys of eight bits", "act-order, two tokens, biases"),
    *("llama, eight tokens, parts that come ahead", "llama, two tokens, blocks one by one"),
    *("act-order, three sequences, sizes that do not divide", "act-order, eight tokens"),
    "act-order, no gate, biases",
)


@cache
def rig(case: str) -> Rig:
    config, formats, fields = CASES[case]
    weights = QuantizedWeights(replace(config, weight_formats=formats), scales="bf16")
    return Rig(weights, blocks=3, **{"consumer_warps": 2, "max_context": 128, **fields})


@pytest.mark.slow
@pytest.mark.parametrize("case", tiered(CASES, EXHAUSTIVE))
def test_logits_of_every_position(case: str) -> None:
    ready = rig(case)
    ids = token_ids(12, ready.config.vocab_size)
    found = ready.session("random", 1).score(ids)
    tolerance = EIGHT_BIT_LOGITS if ready.plan.kv_dtype == "e4m3" else LOGITS
    assert relative_error(found, float32_logits(ready.weights, ids)) < tolerance


@pytest.mark.slow
@pytest.mark.exhaustive
def test_rows_of_the_m_tiles_that_would_be_dealt_in_turn_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matvec, "_dealt", lambda self, layout: None)
    config, formats, fields = CASES["llama, two tokens, blocks one by one"]
    weights = QuantizedWeights(replace(config, weight_formats=formats), scales="bf16")
    ready = Rig(weights, blocks=3, consumer_warps=2, max_context=128, **fields)
    ids = token_ids(12, config.vocab_size)
    assert relative_error(ready.session("random", 1).score(ids), float32_logits(weights, ids)) > LOGITS


@pytest.mark.slow
def test_several_sequences_and_many_tokens_of_a_step() -> None:
    ready = rig("llama, three sequences, slices")
    prompts = [token_ids(9, ready.config.vocab_size, seed) for seed in range(ready.plan.batch)]
    session = ready.session("random", 2)
    found = session.score_together(prompts, [session.sequence() for _ in prompts])
    for ids, logits in zip(prompts, found, strict=True):
        assert relative_error(logits, float32_logits(ready.weights, ids)) < LOGITS
    one_by_one = ready.session().score(prompts[0])
    assert relative_error(ready.session().score(prompts[0], per_step=4), one_by_one) < LOGITS


@pytest.mark.slow
def test_schedules_change_no_bit() -> None:
    ready = rig("llama, one token, everything")
    ids = token_ids(5, ready.config.vocab_size)
    wanted = ready.session().score(ids)
    for scheduler, seed in (("random", 1), ("random", 2), ("random", 3)):
        np.testing.assert_array_equal(bits(ready.session(scheduler, seed).score(ids)), bits(wanted))
