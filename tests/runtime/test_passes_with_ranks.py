"""Prompts read in passes by several emulated GPUs: the same keys, values and hidden states, to the bit, as by one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import TinyWeights

from cheetah.errors import CheetahError
from cheetah.generate import choose_plan, describe_pass, generate_pass
from cheetah.models.config import ModelConfig
from cheetah.models.gemma import Gemma2Config
from cheetah.models.gpt_oss import GptOssConfig
from cheetah.models.layer_kind import ClampedGate, Routing
from cheetah.models.olmo import Olmo3Config
from cheetah.models.qwen2 import Qwen2Config
from cheetah.models.qwen3 import Qwen3Config
from cheetah.models.qwen3_moe import Qwen3MoeConfig
from cheetah.package import Generated
from cheetah.plan import PlanError, gpu_named
from cheetah.plan.prompt import default_pass_plan
from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.assembly.texts import KeptTexts
from cheetah.runtime.device.emulator import EmulatorDevice
from cheetah.runtime.device.group import EmulatorGroup, GroupBuffer
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launches import Part
from cheetah.runtime.sampling import Sampling
from cheetah.tools.check import check_model
from cheetah.tools.subjects import Subject, random_tensors
from tests.tiers import tiered

pytestmark = [pytest.mark.slow, pytest.mark.compiler]

SIZES: dict[str, Any] = {
    **{"hidden_size": 128, "intermediate_size": 128, "layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 64},
    **{"vocab_size": 300, "max_position_embeddings": 200},
}
"""A rank of two has a whole tile of o's rows, as it has of models that people run."""
PROMPTS = [[5, 17, 250, *range(30, 55)], [*range(100, 119)]]
LAYER_TYPES = ("sliding_attention", "full_attention")
MODELS: dict[str, tuple[type[ModelConfig], dict[str, Any], dict[str, Any]]] = {
    "norms behind, two windows, caps, taps": (Gemma2Config, {"sliding_window": 32}, {"taps": "0"}),
    "norms of heads, a cache in 8 bits": (Qwen3Config, {}, {"kv_dtype": "e4m3"}),
    "biases, narrow M-tiles": (Qwen2Config, {"hidden_size": 384}, {}),
    "norms over all heads, norms behind": (Olmo3Config, {"sliding_window": 32, "layer_types": LAYER_TYPES}, {}),
    "experts": (Qwen3MoeConfig, {"routing": Routing(9, 3)}, {}),
    "experts with biases, sinks": (
        GptOssConfig,
        {
            **{"sliding_window": 32, "layer_types": LAYER_TYPES, "routing": Routing(9, 3, biases=True)},
            "clamped_gate": ClampedGate(1.702, 1.25),
        },
        {},
    ),
}
AWKWARD = "norms behind, two windows, caps, taps"


def assembled(name: str, ranks: int, scheduler: str = "round_robin", seed: int = 0, **options: Any) -> Assembly:
    config, sizes, plan = MODELS[name]
    devices = [EmulatorDevice(scheduler=scheduler, seed=seed) for _ in range(ranks)]
    return assemble(
        TinyWeights(config(**{**SIZES, **sizes})),  # type: ignore[arg-type]
        device=devices[0] if ranks == 1 else EmulatorGroup(devices),
        gpu="emulator-2",
        tensor_parallel_size=ranks,
        quiet=True,
        prompt_passes=64,
        overrides={"max_context": 80, "kv_chunk": 64, "max_steps": 4, "batch": 2, **plan},
        **options,
    )


Found = tuple[list[NDArray[Any]], NDArray[Any], list[tuple[int, ...]]]


def found_by(name: str, ranks: int, *schedule: Any, **options: Any) -> Found:
    """The hidden states that each rank has, with what tapped layers left, the cache of all KV heads, and the tokens of
    the head behind two passes, of which the second goes on with both prompts."""
    made = assembled(name, ranks, *schedule, **options)
    (passes,), first = made.passes, made.launcher.cache
    caches = [first, CachedSequence(first.pool, first.page_size, first.context)]
    for cut in (slice(0, 11), slice(11, None)):
        parts = [Part(cache, prompt[cut], len(prompt[cut])) for cache, prompt in zip(caches, PROMPTS, strict=True)]
        passes.launch_together([Part(one.cache, one.inputs, one.total, wanted=1) for one in parts])
    heads = [Part(cache, [row], 1, Sampling(temperature=0.7, seed=row)) for row, cache in enumerate(caches)]
    tokens = [one.token_ids for one in passes.head.launch_together(heads)]
    taps = [] if passes.taps is None else of_ranks(passes.taps, passes.taps.nbytes // 2)
    states = of_ranks(passes._buffers["hidden_states"], (len(PROMPTS), passes._padded_hidden))
    pool, shape = made.buffers["kv"], made.manifest.buffer("kv").shape
    kind = np.uint8 if made.launcher._plan.kv_dtype == "e4m3" else np.uint16
    left = [np.concatenate([one.reshape(-1), *rows]) for one, *rows in zip(states, *[taps] * bool(taps), strict=True)]
    return left, np.concatenate(of_ranks(pool, shape, kind), axis=3), tokens


def of_ranks(buffer: Any, shape: Any, kind: Any = np.uint16) -> list[NDArray[Any]]:
    """What each has."""
    return [one.download(kind, shape) for one in (buffer.ranks if isinstance(buffer, GroupBuffer) else [buffer])]


@cache
def by_one_gpu(name: str) -> Found:
    return found_by(name, 1)


SCHEDULES = [("round_robin", 0), *((name, seed) for name in ("random", "priority") for seed in range(4))]
CASES = [(name, *schedule) for name in MODELS for schedule in SCHEDULES]
ALWAYS_TRIED = [(AWKWARD, "priority", 1)]


@pytest.mark.parametrize(
    ("name", "scheduler", "seed"),
    tiered(CASES, [case for case in CASES if case not in ALWAYS_TRIED]),
)
def test_passes_of_two_ranks_are_those_of_one(name: str, scheduler: str, seed: int) -> None:
    states, pool, tokens = found_by(name, 2, scheduler, seed)
    (wanted,), wanted_pool, wanted_tokens = by_one_gpu(name)
    assert all(np.array_equal(one, wanted) for one in states), "other hidden states or taps"
    pages = slice(0, min(pool.shape[1], wanted_pool.shape[1]))
    assert np.array_equal(pool[:, pages], wanted_pool[:, pages]), "other keys or values"
    assert tokens == wanted_tokens


@dataclass(frozen=True)
class Bug:
    """A change of all places of the text of a pass that match a pattern. told: what the emulator says of it, if it is
    not the results that differ."""

    name: str
    pattern: str
    instead: str
    told: str = ""


BUGS = [
    Bug("waits in the scope of one GPU", r"wait_at_least_u64_sys\(", "wait_at_least_u64(", "in the scope of one GPU"),
    Bug("adds in the scope of one GPU", r"add_release_u64_sys\(", "add_release_u64(", "is published to it"),
    Bug("peers are not told of a phase's end", r"add_release_u64_sys\(\(uint64_t\*\)\(?peer.*;", ";", "deadlock"),
    Bug("peers do not get what is gated", r"store_to_peer_u32x4\(unit, .*;", ";"),
    Bug(
        "what is gated is pushed before it is stored",
        r"(named_barrier\(3, HANDING_ON\);)"
        r"(\s+#pragma unroll 1\s+for \(uint32_t pushed(?:.|\s)*?\(unit, units\[0\]\);\s+\})",
        r"\2 \1",
    ),
    Bug("peers do not get attention", r"store_to_peer_u32x4\(\(uint4\*\).*;", ";"),
    Bug("peers do not get squares", r"store_to_peer_f32\(.*;", ";"),
    Bug("peers do not get hidden states", r"store_to_peer_bf16\(peer.*;", ";"),
    Bug("peers do not get taps", r"store_to_peer_bf16\(kept.*;", ";"),
    Bug("every rank takes itself for the first", r"\brank \* ", "0 * "),
]
BUGS_ALWAYS_TRIED = ("peers do not get squares", "what is gated is pushed before it is stored")


@pytest.mark.parametrize(
    "bug", tiered(BUGS, [bug for bug in BUGS if bug.name not in BUGS_ALWAYS_TRIED]), ids=lambda bug: bug.name
)
def test_bugs_planted_in_passes_are_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    (wanted,), wanted_pool, _ = by_one_gpu(AWKWARD)

    def generate(*arguments: Any, **options: Any) -> Generated:
        made = generate_pass(*arguments, **options)
        text = re.sub(bug.pattern, bug.instead, made.text)
        assert text != made.text, "nothing was changed"
        return made.with_text(text)

    monkeypatch.setattr("cheetah.generate.generate_pass", generate)
    monkeypatch.setattr(KeptTexts, "get", lambda self, asked, make: make())
    if bug.told:
        with pytest.raises(CheetahError, match=bug.told):
            found_by(AWKWARD, 2)
        return
    states, pool, _ = found_by(AWKWARD, 2)
    same = np.array_equal(pool[:, : wanted_pool.shape[1]], wanted_pool[:, : pool.shape[1]])
    assert not same or not all(np.array_equal(one, wanted) for one in states)


def test_passes_that_would_have_other_bits_are_refused_where_bits_are_fixed() -> None:
    """A rank has six M-tiles of the residual, one and a half tiles."""
    gpu, config = gpu_named("emulator-2x2"), Qwen2Config(**{**SIZES, "hidden_size": 192})
    passes = default_pass_plan(gpu, 64, config.shape)
    describe_pass(config, gpu, choose_plan(config, gpu), passes)
    with pytest.raises(PlanError, match="the 192 rows of the residual are whole tiles of 64 on each: prompts"):
        describe_pass(config, gpu, choose_plan(config, gpu, kv_chunk=64), passes)


@pytest.mark.exhaustive
def test_a_check_of_several_ranks_takes_their_passes() -> None:
    config = Qwen2Config(**SIZES)
    subject = Subject("a small model", config, random_tensors(config), {})
    found = [*check_model(subject, "emulator-2x2", 1, ("round_robin", "priority"), False, only="passes")]
    assert len(found) == 2 and all(verdict.ok for _, verdict in found), found
