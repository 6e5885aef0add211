"""What families do otherwise than Llama, in the generated kernel: against float32, and under schedules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cheetah.generate import generate_kernel
from cheetah.models.config import ModelConfig
from cheetah.models.config_json import ConfigError
from cheetah.models.mistral import MistralConfig
from cheetah.models.qwen2 import Qwen2Config
from cheetah.models.qwen3 import Qwen3Config
from tests.program.rig import Rig, bits, float32_logits, random_weights, relative_error, token_ids
from tests.tolerances import EIGHT_BIT_LOGITS, LOGITS

pytestmark = pytest.mark.compiler

SPLIT: dict[str, Any] = {"kv_chunk_min": 16}


def qwen3(heads: int = 2, kv_heads: int = 1, head_dim: int = 64, **more: Any) -> ModelConfig:
    return Qwen3Config(48, 40, 2, heads, kv_heads, head_dim, 50, max_position_embeddings=256, **more)


def qwen2(heads: int = 2, kv_heads: int = 1, head_dim: int = 64) -> ModelConfig:
    return Qwen2Config(48, 40, 2, heads, kv_heads, head_dim, 50, max_position_embeddings=256)


# name: (configuration, how it is run, tokens)
CASES: dict[str, tuple[ModelConfig, dict[str, Any], int]] = {
    "qwen3": (qwen3(), {}, 40),
    "qwen3, head of 128, several KV heads": (qwen3(4, 2, 128), {"blocks": 3, **SPLIT}, 40),
    "qwen3, group of 5, barrier": (qwen3(5), {"blocks": 3, "sync": "barrier", **SPLIT}, 40),
    "qwen3, group of 8, eight warps": (qwen3(8), {"math_warps": 8, **SPLIT}, 40),
    "qwen3, more blocks than items": (qwen3(3, 3), {"blocks": 8, **SPLIT}, 40),
    "qwen3, tied, large epsilon": (qwen3(tied_embeddings=True, rms_norm_eps=0.1), {"blocks": 4}, 20),
    "qwen3, pages of 5": (qwen3(), {"page_size": 5, **SPLIT}, 40),
    "qwen2": (qwen2(), {}, 40),
    "qwen2, group of 7": (qwen2(14, 2), {"blocks": 3, "sync": "barrier", **SPLIT}, 40),
    "mistral": (MistralConfig(80, 40, 2, 2, 1, 128, 50, max_position_embeddings=256), {"blocks": 3, **SPLIT}, 40),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_of_every_position(case: str) -> None:
    config, plan, count = CASES[case]
    weights, ids = random_weights(config), token_ids(count, config.vocab_size)
    found = Rig(weights, **plan).session("priority", 1).score(ids)
    assert relative_error(found, float32_logits(weights, ids)) < LOGITS


@pytest.mark.parametrize("config", [qwen3(4, 2), qwen2(4, 2)], ids=["qwen3", "qwen2"])
def test_many_tokens_of_a_step_are_the_same_as_one(config: ModelConfig) -> None:
    """Several tiles then load a new key: each is in the cache once, as the first of them made it."""
    weights, ids = random_weights(config), token_ids(40, config.vocab_size)
    session = Rig(weights, blocks=3, tokens=16, math_warps=2, **SPLIT).session("random", 2)
    assert relative_error(session.score(ids, per_step=16), float32_logits(weights, ids)) < LOGITS
    several = session.cached()
    alone = Rig(weights, blocks=3, tokens=16, math_warps=2, **SPLIT).session("random", 3)
    alone.score(ids)
    difference = np.abs(several.astype(np.int64) - alone.cached().astype(np.int64))
    assert (difference <= 1).mean() > 0.95, "up to the last bit of bf16, where sums were made in another order"


@pytest.mark.parametrize("config", [qwen3(4, 2, 128), qwen2(4, 2)], ids=["qwen3", "qwen2"])
def test_several_sequences_with_keys_of_eight_bits(config: ModelConfig) -> None:
    weights = random_weights(config)
    ids = [token_ids(count, config.vocab_size, seed=count) for count in (20, 20, 20)]
    session = Rig(weights, blocks=3, batch=4, kv_dtype="e4m3", **SPLIT).session("random", 1)
    caches = [session.sequence() for _ in ids]
    for found, sequence in zip(session.score_together(ids, caches), ids, strict=True):
        assert relative_error(found, float32_logits(weights, sequence)) < EIGHT_BIT_LOGITS


@pytest.mark.parametrize("config", [qwen3(4, 2), qwen2(4, 2)], ids=["qwen3", "qwen2"])
def test_schedules_change_no_bit(config: ModelConfig) -> None:
    weights, ids = random_weights(config), token_ids(24, config.vocab_size)
    rig = Rig(weights, blocks=4, tokens=2, **SPLIT)
    runs = []
    for scheduler in ("round_robin", "random", "priority"):
        session = rig.session(scheduler, 5)
        runs.append((bits(session.score(ids, per_step=2)), session.cached(), session.exchanged()))
    for run in runs[1:]:
        assert all(np.array_equal(first, other) for first, other in zip(runs[0], run, strict=True))


def test_a_context_beyond_the_window_is_refused_with_what_would_fit() -> None:
    config = MistralConfig(48, 40, 2, 2, 1, 64, 50, max_position_embeddings=256, sliding_window=100)
    with pytest.raises(ConfigError, match="sliding_window = 100 is less than max_context = 256: .*use max_context=100"):
        generate_kernel(config, "emulator-2")
    weights, ids = random_weights(config), token_ids(20, 50)
    found = Rig(weights, max_context=100).session().score(ids)
    assert relative_error(found, float32_logits(weights, ids)) < LOGITS
