"""Steps of two ranks on GPUs, beside those of one: the same bits on one GPU that they share, and on two where there are
two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.layer_kind import Routing
from cheetah.models.llama import LlamaConfig
from cheetah.models.olmo import Olmo3Config
from cheetah.models.qwen3 import Qwen3Config
from cheetah.models.qwen3_moe import Qwen3MoeConfig
from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.device.interface import DeviceError
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launches import Part
from cheetah.runtime.sampling import Sampling
from tests.program.rig import random_weights

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone, pytest.mark.xdist_group("alone")]

SIZES: dict[str, Any] = {
    **{"hidden_size": 768, "intermediate_size": 1280, "layers": 3, "query_heads": 8, "kv_heads": 4, "head_dim": 64},
    **{"vocab_size": 5003, "max_position_embeddings": 1024},
}
SMALL: dict[str, ModelConfig] = {"llama": LlamaConfig(**SIZES), "qwen3": Qwen3Config(**SIZES)}
LAYER_TYPES = ("sliding_attention", "full_attention", "full_attention")
IN_PASSES: dict[str, ModelConfig] = {
    "llama": SMALL["llama"],
    "experts": Qwen3MoeConfig(**SIZES, routing=Routing(16, 4)),
    "norms over all heads": Olmo3Config(**SIZES, sliding_window=128, layer_types=LAYER_TYPES),
}
PUBLISHED = ("random:qwen3-0.6b", "random:llama-3.1-8b", "random:llama-3.1-8b@int4-g128", "random:llama-3.1-8b@fp8")
"""Models that have narrow M-tiles with two GPUs if and only if they have them with one."""
TOGETHER = ("cuda:0,0", "cuda:0,1")
STEPS = 24


@contextmanager
def skipped_without(device: str) -> Iterator[None]:
    """Skips a test where there is no such device."""
    try:
        yield
    except DeviceError as error:
        if "GPUs are asked for" in str(error):
            pytest.skip(f"{device}: {error}")
        raise


@contextmanager
def opened(weights: Any, device: str, **plan: Any) -> Iterator[Assembly]:
    passes = plan.pop("prompt_passes", False)
    fields = {"max_context": 512, "kv_chunk": 256, "max_steps": 32, **plan}
    with skipped_without(device):
        made = assemble(weights, device=device, quiet=True, overrides=fields, prompt_passes=passes, timeout_s=20)
    try:
        yield made
    finally:
        made.close()


def found_by(weights: Any, device: str, batch: int) -> tuple[list[tuple[int, ...]], NDArray[np.uint32] | None]:
    """Tokens of sequences side by side, greedy and drawn, and the logits of the last steps of a single one."""
    with opened(weights, device, batch=batch) as made:
        launcher = made.launcher
        caches = [launcher.cache, *(launcher.cache.fork() for _ in range(batch - 1))]
        logits, tokens = made.logits_buffer() if batch == 1 else None, list[tuple[int, ...]]()
        for sampling in (Sampling(), Sampling(temperature=0.8, seed=5)):
            for cache in caches:
                cache.clear()
            parts = [Part(cache, (5 + number, 17, 250), STEPS, sampling) for number, cache in enumerate(caches)]
            tokens += [result.token_ids for result in launcher.launch_together(parts, logits)]
        rows = None if logits is None else logits.download(np.uint32, (STEPS, weights.config.vocab_size))
        return tokens, rows


def require_same(weights: Any, device: str, batch: int) -> None:
    found, wanted = found_by(weights, device, batch), found_by(weights, "cuda:0", batch)
    assert found[0] == wanted[0] and np.array_equal(found[1], wanted[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("device", TOGETHER)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", SMALL)
def test_small_models_give_the_same_bits(name: str, batch: int, device: str) -> None:
    require_same(random_weights(SMALL[name]), device, batch)


@pytest.mark.parametrize("device", TOGETHER)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_give_the_same_bits(name: str, device: str) -> None:
    require_same(open_checkpoint(name), device, 1)


def states_by(weights: Any, device: str) -> NDArray[np.uint16]:
    """The last hidden states of two prompts that a pass reads side by side."""
    with opened(weights, device, batch=2, prompt_passes=512) as made:
        passes, first = made.passes[-1], made.launcher.cache
        caches = [first, CachedSequence(first.pool, first.page_size, first.context)]
        prompts = [[7 + place for place in range(301)], [9 + 3 * place for place in range(97)]]
        parts = [Part(cache, prompt, len(prompt), wanted=8) for cache, prompt in zip(caches, prompts, strict=True)]
        passes.launch_together(parts)
        return passes._buffers["hidden_states"].download(np.uint16, (16, weights.config.padded_hidden))


@pytest.mark.parametrize("device", TOGETHER)
@pytest.mark.parametrize("name", IN_PASSES)
def test_passes_leave_the_same_bits(name: str, device: str) -> None:
    weights = random_weights(IN_PASSES[name])
    assert np.array_equal(states_by(weights, device), states_by(weights, "cuda:0"))


def drafted_by(device: str, speculation: bool, **options: Any) -> tuple[list[tuple[int, ...]], float]:
    """Two answers of a model that drafts for itself, and which part of the drafts was right."""
    asked = [
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=heat, seed=3, speculation=speculation)
        for heat in (0.0, 0.8)
    ]
    config = {"model": "demo", "num_speculative_tokens": 4}
    with skipped_without(device):
        llm = LLM(
            "demo",
            device=device,
            max_context=192,
            kv_chunk=64,
            batch=2,
            quiet=True,
            speculative_config=config,
            **options,
        )
    with llm:
        found = llm.generate(["the cat sat on", "a dog ran to the house and"], asked, use_tqdm=False)
        drafted = llm.engine.engine.load().decoded.drafted
    return [tuple(one.outputs[0].token_ids) for one in found], drafted.accepted / max(1, drafted.tokens)


@pytest.mark.parametrize("device", TOGETHER)
def test_drafts_of_another_model_change_no_token(device: str) -> None:
    (found, right), (wanted, _) = drafted_by(device, True, timeout_s=20), drafted_by("cuda:0", False, timeout_s=20)
    assert found == wanted and right > 0.9


@pytest.mark.parametrize("device", TOGETHER)
def test_many_launches_end_with_the_same_token(device: str) -> None:
    with opened(random_weights(SMALL["llama"]), device) as made:
        launcher, found = made.launcher, set[tuple[int, ...]]()
        for number in range(5000):
            launcher.cache.clear()
            found.add(launcher.launch_together([Part(launcher.cache, (5,), 1 + number % 3)])[0].token_ids[:1])
    assert len(found) == 1
