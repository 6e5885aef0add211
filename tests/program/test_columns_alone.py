"""A column's logits are bits of its sequence and its position: the same alone, beside others in a step, by every kernel
of a family."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from cheetah.models.config import ModelConfig
from cheetah.models.gemma import Gemma3Config
from cheetah.models.llama import LlamaConfig
from cheetah.plan import ModelShape, Plan
from tests.program.kinds import KINDS
from tests.program.quantized_weights import LINEAR, QuantizedWeights
from tests.program.rig import F32, Rig, bits, kept_kernel, random_weights, token_ids
from tests.program.test_experts import qwen as qwen3_moe
from tests.program.test_families import qwen2, qwen3
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

COUNT, WARPS = 112, 8
"""Tokens: steps of 7 of them begin at every place of a tile of 16 keys."""


@dataclass(frozen=True)
class Subject:
    """A model and how its kernels are made. tokens: the kernels of its family, that of one token a step first."""

    config: ModelConfig
    plan: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = (1, 8)
    format: str | None = None


def llama(hidden: int = 48, heads: int = 3, kv_heads: int = 1, head_dim: int = 64) -> ModelConfig:
    return LlamaConfig(hidden, 40, 2, heads, kv_heads, head_dim, 50, max_position_embeddings=256)


def wide(hidden: int = 256) -> ModelConfig:
    """Of columns that quantised formats have digits and halves for."""
    return LlamaConfig(hidden, hidden, 2, 4, 1, 64, 50, max_position_embeddings=256)


GEMMA = Gemma3Config(48, 40, 2, 4, 2, 256, 50, max_position_embeddings=256, attention_scale=0.1)
SUBJECTS = {
    "biases, group of 3, e4m3": Subject(qwen2(3), {"kv_dtype": "e4m3"}),
    "windows, sinks, norms over all heads, caps": Subject(KINDS),
    "norms of heads, e4m3": Subject(qwen3(3), {"kv_dtype": "e4m3"}),
    "a window of many items": Subject(replace(KINDS, sliding_window=90), {"kv_chunk": 16}),
    "norms of heads, heads of 128": Subject(qwen3(4, 2, 128), {"blocks": 3}),
    "biases, group of 7": Subject(qwen2(14, 2), {"sync": "barrier"}, (1, 2, 4, 8, 16)),
    "group of 11": Subject(llama(heads=11), {"blocks": 3}, (1, 2, 8)),
    "group of 16, heads of 256": Subject(llama(heads=16, head_dim=256), {"stages": 4, "in_flight": 3}),
    "more than 64 M-tiles of the residual, e4m3": Subject(llama(1104), {"kv_dtype": "e4m3"}, (1, 2, 8)),
    "heads of 256, a short ring": Subject(GEMMA, {"stages": 4, "in_flight": 3}),
    "a short ring, heads of 128": Subject(llama(head_dim=128), {"stages": 3, "in_flight": 2}, (1, 16)),
    "experts": Subject(qwen3_moe(hidden=144, width=256, experts=6), {}, (1, 2, 8)),
    "int8": Subject(wide(), {}, (1, 2, 4, 8), "int8"),
    "int4 by numbers": Subject(wide(), {"by_numbers": 1}, (1, 2, 4, 8), "int4-g128"),
    "int4 with zero points by numbers": Subject(wide(512), {"by_numbers": 1}, (1, 8), "int4-g32-asym"),
    "fp8 by numbers": Subject(wide(), {"by_numbers": 1}, (1, 2, 4, 8), "fp8"),
    "fp8 of blocks by numbers": Subject(wide(), {"by_numbers": 1}, (1, 8), "fp8-block128"),
    "int8-g64-asym": Subject(wide(), {"kv_dtype": "e4m3"}, (1, 8), "int8-g64-asym"),
}


@cache
def rig(name: str, tokens: int) -> Rig:
    subject = SUBJECTS[name]
    config, weights = subject.config, random_weights
    if subject.format:
        config = replace(config, weight_formats=tuple((matrix, subject.format) for matrix in LINEAR))
        weights = QuantizedWeights
    plan = {"tokens": tokens, "kv_chunk": 32, "consumer_warps": WARPS, "max_context": 128, **subject.plan}
    return Rig(weights(config), generate=kept_kernel, **plan)


def scored(name: str, tokens: int, per_step: int) -> F32:
    return rig(name, tokens).session().score(token_ids(COUNT, 50), per_step)


@cache
def alone(name: str) -> F32:
    return scored(name, SUBJECTS[name].tokens[0], 1)


def assert_alike(found: F32, wanted: F32) -> None:
    differ = np.flatnonzero((bits(found) != bits(wanted)).any(axis=1))
    assert differ.size == 0, f"{differ.size} of {len(found)} tokens differ, the first is number {differ[0]}"


CHEAP = ["biases, group of 3, e4m3", "windows, sinks, norms over all heads, caps"]


@pytest.mark.parametrize("name", tiered(SUBJECTS, [name for name in SUBJECTS if name not in CHEAP]))
def test_a_column_is_as_alone(name: str) -> None:
    assert_alike(scored(name, 8 if 8 in SUBJECTS[name].tokens else 16, 7), alone(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_kernel_and_width(name: str) -> None:
    for tokens in SUBJECTS[name].tokens[1:]:
        for per_step in sorted({1, 2, 3, 5, 7, tokens} & set(range(1, tokens + 1))):
            assert_alike(scored(name, tokens, per_step), alone(name))


def test_as_many_rows_in_a_tile_as_warps_take_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps then share rows out, and fewer of them keys."""

    def without_bound(self: Plan, shape: ModelShape) -> int:
        return max(1, min(self.tokens, self.tile_rows // shape.group))

    monkeypatch.setattr(Plan, "tile_columns", without_bound)
    session = Rig(random_weights(llama(heads=4)), tokens=8, kv_chunk=256, consumer_warps=4, max_context=128).session()
    wanted = session.score(token_ids(COUNT, 50), 8)
    session.launcher.restart()
    assert (bits(session.score(token_ids(COUNT, 50), 1)) != bits(wanted)).any()
