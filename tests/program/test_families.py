"""What families do otherwise than Llama, in the generated kernel: against float32, and under schedules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cheetah.generate import generate_kernel
from cheetah.manifest import NO_PAGE
from cheetah.models.config import ModelConfig
from cheetah.models.config_json import FULL, SLIDING
from cheetah.models.gemma import Gemma3Config
from cheetah.models.mistral import MistralConfig
from cheetah.models.qwen2 import Qwen2Config
from cheetah.models.qwen3 import Qwen3Config
from cheetah.models.rope import Rope
from tests.program.kinds import KINDS, JointlyNormed
from tests.program.layer_kinds import behind, fused, sandwich, ungated
from tests.program.rig import Rig, bits, float32_logits, kept_kernel, random_weights, relative_error, token_ids
from tests.tiers import tiered
from tests.tolerances import EIGHT_BIT_LOGITS, LOGITS

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

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
    "qwen3, group of 8, eight warps": (qwen3(8), {"consumer_warps": 8, **SPLIT}, 40),
    "qwen3, more blocks than items": (qwen3(3, 3), {"blocks": 8, **SPLIT}, 40),
    "qwen3, tied, large epsilon": (qwen3(tied_embeddings=True, rms_norm_eps=0.1), {"blocks": 4}, 20),
    "qwen3, pages of 5": (qwen3(), {"page_size": 5, **SPLIT}, 40),
    "qwen2": (qwen2(), {}, 40),
    "qwen2, group of 7": (qwen2(14, 2), {"blocks": 3, "sync": "barrier", **SPLIT}, 40),
    "qwen3, heads of 256": (qwen3(4, 2, 256), {"blocks": 3, **SPLIT}, 40),
    "gemma 3": (
        Gemma3Config(
            *(48, 40, 2, 4, 2, 64, 50),
            max_position_embeddings=256,
            sliding_window=21,
            layer_types=(SLIDING, FULL),
            local_rope=Rope(1000.0),
            attention_scale=0.1,
        ),
        {"blocks": 3, **SPLIT},
        40,
    ),
    "norms over all heads, barrier": (
        JointlyNormed(48, 40, 2, 6, 3, 64, 50, max_position_embeddings=256),
        {"blocks": 5, "sync": "barrier", "page_size": 5, **SPLIT},
        40,
    ),
    "kinds": (KINDS, {"blocks": 3, "page_size": 5, **SPLIT}, 110),
    "kinds, barrier": (KINDS, {"blocks": 4, "sync": "barrier", "kv_chunk": 16}, 70),
    "norms on both sides": (sandwich(), {"blocks": 3, "tokens": 2}, 24),
    "norms behind alone, barrier": (behind(), {"blocks": 8, "sync": "barrier"}, 24),
    "fused tensors, heads rotated in part": (fused(80, 40, 2), {"blocks": 3, **SPLIT}, 24),
    "no gate, biases": (ungated(80, 40, head_dim=64), {"blocks": 3, "tokens": 2}, 24),
    "heads of 96, barrier, pages of 5": (
        *(ungated(), {"blocks": 5, "sync": "barrier", "tokens": 2, "page_size": 5, **SPLIT}),
        40,
    ),
    "mistral": (MistralConfig(80, 40, 2, 2, 1, 128, 50, max_position_embeddings=256), {"blocks": 3, **SPLIT}, 40),
}


EXHAUSTIVE = (
    *("qwen3", "qwen3, more blocks than items", "qwen3, tied, large epsilon", "qwen3, pages of 5", "qwen2"),
    *("fused tensors, heads rotated in part", "norms behind alone, barrier", "heads of 96, barrier, pages of 5"),
    *("qwen3, group of 8, eight warps", "qwen3, group of 5, barrier", "mistral", "kinds, barrier"),
    *("qwen3, heads of 256", "norms over all heads, barrier"),
)


@pytest.mark.parametrize("case", tiered(CASES, EXHAUSTIVE))
def test_logits_of_every_position(case: str) -> None:
    config, plan, count = CASES[case]
    weights, ids = random_weights(config), token_ids(count, config.vocab_size)
    found = Rig(weights, **plan).session("priority", 1).score(ids)
    assert relative_error(found, float32_logits(weights, ids)) < LOGITS


@cache
def rig_of(config: ModelConfig) -> Rig:
    """Of so many tokens a step, and of several sequences."""
    plan = {"blocks": 3, "tokens": 16, "batch": 4, "consumer_warps": 2}
    return Rig(random_weights(config), generate=kept_kernel, **plan, **SPLIT)


@pytest.mark.parametrize(
    "config", tiered([qwen3(4, 2), qwen2(4, 2), KINDS], [qwen2(4, 2)]), ids=lambda config: type(config).__name__
)
def test_many_tokens_of_a_step_are_the_same_as_one(config: ModelConfig) -> None:
    """Several tiles then load a new key: each is in the cache once, as the first of them made it."""
    weights, ids = random_weights(config), token_ids(40, config.vocab_size)
    rig = rig_of(config)
    session = rig.session("random", 2)
    assert relative_error(session.score(ids, per_step=16), float32_logits(weights, ids)) < LOGITS
    several = session.cached()
    alone = rig.session("random", 3)
    alone.score(ids)
    difference = np.abs(several.astype(np.int64) - alone.cached().astype(np.int64))
    assert (difference <= 1).mean() > 0.95, "up to the last bit of bf16, where sums were made in another order"


@pytest.mark.parametrize(
    "config",
    tiered([qwen3(4, 2, 128), qwen2(4, 2), fused(48)], [qwen2(4, 2), fused(48)]),
    ids=["qwen3", "qwen2", "phi3"],
)
def test_several_sequences_with_keys_of_eight_bits(config: ModelConfig) -> None:
    weights = random_weights(config)
    ids = [token_ids(count, config.vocab_size, seed=count) for count in (20, 20, 20)]
    session = Rig(weights, blocks=3, batch=4, kv_dtype="e4m3", **SPLIT).session("random", 1)
    caches = [session.sequence() for _ in ids]
    for found, sequence in zip(session.score_together(ids, caches), ids, strict=True):
        assert relative_error(found, float32_logits(weights, sequence)) < EIGHT_BIT_LOGITS


SCHEDULED = [qwen3(4, 2), qwen2(4, 2), KINDS, behind()]


@pytest.mark.parametrize("config", tiered(SCHEDULED, SCHEDULED[1::2]), ids=lambda config: type(config).__name__)
def test_schedules_change_no_bit(config: ModelConfig) -> None:
    ids = token_ids(24, config.vocab_size)
    rig = rig_of(config)
    runs = []
    for scheduler in ("round_robin", "random", "priority"):
        session = rig.session(scheduler, 5)
        runs.append((bits(session.score(ids, per_step=2)), session.cached(), session.exchanged()))
    for run in runs[1:]:
        assert all(np.array_equal(first, other) for first, other in zip(runs[0], run, strict=True))


# -- sliding windows ------------------------------------------------------------------------------------------------


def windowed(window: int, heads: int = 4, kv_heads: int = 2) -> ModelConfig:
    sizes = (48, 40, 2, heads, kv_heads, 64, 50)
    return MistralConfig(*sizes, max_position_embeddings=256, sliding_window=window)


# name: (window, how it is run, tokens)
WINDOWS: dict[str, tuple[int, dict[str, Any], int]] = {
    "of a few pages": (40, {"blocks": 3, **SPLIT}, 150),
    "of one key": (1, {}, 110),
    "that no page divides": (33, {"page_size": 5, "blocks": 3, "sync": "barrier", **SPLIT}, 120),
    "within a page": (7, {"page_size": 32, "blocks": 4, **SPLIT}, 110),
    "of fixed chunks": (50, {"kv_chunk": 16, "blocks": 3}, 150),
}


@pytest.mark.parametrize("case", tiered(WINDOWS, ["within a page", "of fixed chunks", "of one key", "of a few pages"]))
def test_a_sliding_window(case: str) -> None:
    window, plan, count = WINDOWS[case]
    weights, ids = random_weights(windowed(window)), token_ids(count, 50)
    session = Rig(weights, **plan).session("priority", 1, launch_steps=20)
    assert relative_error(session.score(ids), float32_logits(weights, ids)) < LOGITS
    cache, page = session.launcher.cache, session.rig.plan.page_size
    kept = -(-(window + 20) // page) + 16 // page + 2
    assert 0 < page * sum(number != NO_PAGE for number in cache.pages) <= page * kept < page * len(cache.pages)
    assert session.pool.free_pages == session.pool.pages - sum(number != NO_PAGE for number in cache.pages)
    cache.clear()
    assert session.pool.free_pages == session.pool.pages


def test_a_window_of_which_one_key_more_or_less_shows() -> None:
    """The tests above would see a window that is off by one."""
    weights, ids = random_weights(windowed(7)), token_ids(40, 50)
    wanted = float32_logits(weights, ids)[10:]
    for window in (6, 8):
        other = float32_logits(SimpleNamespace(config=windowed(window), tensor=weights.tensor), ids)[10:]
        assert relative_error(other, wanted) > 2 * LOGITS


def test_a_window_over_prompts_and_several_sequences() -> None:
    config = windowed(40)
    weights, ids = random_weights(config), token_ids(120, 50)
    session = Rig(weights, blocks=3, tokens=16, batch=3, **SPLIT).session("random", 2, launch_steps=3)
    assert relative_error(session.score(ids, per_step=16), float32_logits(weights, ids)) < LOGITS
    several = [token_ids(60, 50, seed=seed) for seed in range(3)]
    caches = [session.sequence() for _ in several]
    for first in range(0, 60, 20):
        together = session.score_together([one[first : first + 20] for one in several], caches)
        for found, sequence in zip(together, several, strict=True):
            wanted = float32_logits(weights, sequence[: first + 20])[first:]
            assert relative_error(found, wanted) < LOGITS


def test_a_context_within_the_window_has_the_kernel_of_a_model_without() -> None:
    config = windowed(100)
    without = replace(config, sliding_window=None)
    plain, whole = (generate_kernel(one, "emulator-2", max_context=100).text for one in (config, without))
    assert plain == whole != generate_kernel(config, "emulator-2", max_context=101).text


def test_windows_in_some_layers_over_several_sequences_that_share_a_prefix() -> None:
    """Layers that see all keys read the prefix once for all, those with a window read their own."""
    weights, prefix = random_weights(KINDS), token_ids(64, 50)
    session = rig_of(KINDS).session("random", 4, launch_steps=20)
    first = session.sequence()
    session.score_together([prefix], [first])
    caches = [first.fork() for _ in range(3)]
    several = [token_ids(20, 50, seed=seed) for seed in range(3)]
    for found, ids in zip(session.score_together(several, caches), several, strict=True):
        assert relative_error(found, float32_logits(weights, [*prefix, *ids])[64:]) < LOGITS
    plans = session.launcher._plans
    levels = [set(words[0, plans._layout.sections.offsets["items"] :][: words[0, 1] * 8 : 8]) for words in plans._words]
    assert levels == [{0, 1}, {0}]
    assert NO_PAGE not in caches[0].pages, "layers that see all keys need them"
