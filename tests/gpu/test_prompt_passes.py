"""Prompts that were read in passes, at real shapes: what follows them against float32 and `transformers` in bf16, and
bits that neither the cuts of a prompt nor the company in a pass change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.checkpoint.loading import Checkpoint, open_checkpoint
from cheetah.runtime.checkpoint.random_weights import random_tensors
from cheetah.runtime.engine.engine import Engine
from cheetah.runtime.engine.kv_cache import CachedSequence
from cheetah.runtime.engine.launches import Part
from tests.gpu.test_transformers import hf_logits, hf_logits_of_all, mean_kl, torch
from tests.program.rig import token_ids

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_large]

MODEL = "random:llama-3.2-1b"
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "bf16": (MODEL, {}),
    "8B": ("random:llama-3.1-8b", {}),
    "narrow M-tiles": ("random:qwen3-0.6b", {}),
    "int4-g128": (f"{MODEL}@int4-g128", {}),
    "int8": (f"{MODEL}@int8", {}),
    "fp8": (f"{MODEL}@fp8", {}),
    "2of4": (f"{MODEL}@2of4", {}),
    "2of4 and lists": (f"{MODEL}@2of4+list65", {}),
    "int4 and lists": (f"{MODEL}@int4-g128+list5", {}),
    "e4m3 cache": (MODEL, {"kv_dtype": "e4m3"}),
    "attention in bf16": (f"{MODEL}@int4-g128", {}),
}
OF_ALL_LENGTHS = ("8B", "narrow M-tiles")
FOLLOWING = 64
LENGTHS = (37, 128, 500, 2048, 8192 - FOLLOWING)
CUTS = ([1100], [37, 263, 800], [512, 16, 572], [1, 1099])
CACHES_ERROR = 1.1
"""How much more than after steps the KL after passes may be where the cache's own error is larger than all others."""


@contextmanager
def opened(name: str) -> Iterator[tuple[Checkpoint, Assembly]]:
    model, fields = CASES[name]
    overrides = {"batch": 4, "max_context": 8192, **fields}
    checkpoint = open_checkpoint(model)
    if name == "attention in bf16":
        checkpoint = quantised_alone(checkpoint, ("gate_up", "down"))
    assembly = assemble(checkpoint, device="cuda", overrides=overrides, prompt_passes=True, quiet=True)
    try:
        yield checkpoint, assembly
    finally:
        assembly.close()


def quantised_alone(checkpoint: Checkpoint, matrices: Sequence[str]) -> Checkpoint:
    """The random checkpoint with all but these matrices in bf16."""
    formats = tuple(one for one in checkpoint.config.weight_formats if one[0] in matrices)
    config = replace(checkpoint.config, weight_formats=formats)
    tensors = random_tensors(config)
    return replace(checkpoint, config=config, tensor=tensors, rows=tensors.rows)


@pytest.fixture(scope="module")
def ready() -> Iterator[Assembly]:
    with opened("bf16") as (_, assembly):
        yield assembly


def read(ready: Assembly, cache: CachedSequence, ids: Sequence[int], cuts: Sequence[int], of_few: bool = False) -> None:
    """Passes over so many tokens each; the last of `ids` is left. of_few: by the kernel with room for fewest that has
    room for them; else all by the one with most."""
    for count in cuts:
        fitting = [one for one in ready.passes if of_few and count <= one.tokens]
        passes = (*fitting, ready.passes[-1])[0]
        for tokens in [passes.tokens] * (count // passes.tokens) + [count % passes.tokens]:
            begin = cache.length
            if tokens:
                passes.launch_together(
                    [Part(cache, ids[begin : begin + tokens + 1], tokens, per_step=passes.tile_tokens)]
                )


def cached(ready: Assembly, cache: CachedSequence) -> bytes:
    """The bits of a sequence's keys and values."""
    shape = ready.manifest.buffer("kv").shape
    pages = ready.buffers["kv"].download(np.uint16, shape)[:, cache.pages]  # [layers, pages, 2, kv heads, size, dims]
    tokens = pages.transpose(0, 2, 3, 1, 4, 5).reshape(*(shape[0], 2, shape[3], -1, shape[5]))
    return np.ascontiguousarray(tokens[:, :, :, : cache.length]).tobytes()


@pytest.mark.parametrize("name", ["bf16", "8B", "narrow M-tiles"])
def test_prompts_of_any_length_are_as_near_to_float32_as_transformers_bf16(name: str) -> None:
    """Read by the kernels that the engine takes for so many: 8192 tokens with those that follow are the context."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with opened(name) as (checkpoint, ready):
        texts = [token_ids(length + FOLLOWING, checkpoint.config.vocab_size, length) for length in LENGTHS]
        found = []
        for length, ids in zip(LENGTHS, texts, strict=True):
            ready.launcher.restart()
            read(ready, ready.launcher.cache, ids, [length], of_few=True)
            found.append(ready.launcher.score(ids[length:], ready.logits_buffer()))
    exact, bf16 = (hf_logits_of_all(checkpoint, dtype, texts, FOLLOWING) for dtype in (torch.float32, torch.bfloat16))
    for length, logits, wanted, theirs in zip(LENGTHS, found, exact, bf16, strict=True):
        kl, bf16_kl = mean_kl(wanted, logits), mean_kl(wanted, theirs)
        print(f"\n{name}, behind passes over {length} tokens: KL ours {kl:.3e}, transformers bf16 {bf16_kl:.3e}")
        assert kl <= bf16_kl, length


@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_ALL_LENGTHS])
def test_what_follows_a_prompt_is_as_near_to_float32_as_transformers_bf16(name: str) -> None:
    """Of the weights that quantised ones stand for. With a cache in e4m3: as near as after steps."""
    cuts = [1100, 900]
    torch.backends.cuda.matmul.allow_tf32 = False
    with opened(name) as (checkpoint, ready):
        length = sum(cuts)
        ids = token_ids(length + FOLLOWING, checkpoint.config.vocab_size, length)
        ready.launcher.restart()
        read(ready, ready.launcher.cache, ids, cuts)
        logits = ready.launcher.score(ids[length:], ready.logits_buffer())
        steps = Engine(ready.launcher).score(ids, ready.logits_buffer())[length:] if "cache" in name else None
    exact, bf16 = (hf_logits(checkpoint, dtype, ids, FOLLOWING) for dtype in (torch.float32, torch.bfloat16))
    kl, bf16_kl = mean_kl(exact, logits), mean_kl(exact, bf16)
    print(f"\n{name}, behind passes over {cuts}: KL ours {kl:.3e}, transformers bf16 {bf16_kl:.3e}")
    if steps is None:
        assert kl <= bf16_kl
    else:
        steps_kl = mean_kl(exact, steps)
        print(f"{name}, all read in steps: KL {steps_kl:.3e}")
        assert kl <= CACHES_ERROR * steps_kl


def test_scores_of_a_prompt_are_as_near_to_float32_as_transformers_bf16() -> None:
    """Of every position, from the hidden states that two passes leave."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with opened("bf16") as (checkpoint, ready):
        ids = token_ids(2500, checkpoint.config.vocab_size, 7)
        scores = Engine(ready.launcher, passes=ready.passes).score(ids, ready.logits_buffer())
    assert scores is not None
    exact, bf16 = (hf_logits(checkpoint, dtype, ids, len(ids)) for dtype in (torch.float32, torch.bfloat16))
    for part in (slice(0, 200), slice(200, 2048), slice(2048, 2500)):
        kl, bf16_kl = mean_kl(exact[part], scores[part]), mean_kl(exact[part], bf16[part])
        print(f"\nscores of {part}: KL ours {kl:.3e}, transformers bf16 {bf16_kl:.3e}")
        assert kl <= bf16_kl


def test_neither_cuts_nor_company_change_a_bit(ready: Assembly) -> None:
    vocab, found = ready.launcher.vocab_size, set()
    ids = token_ids(1101, vocab, 5)
    for cuts in CUTS:
        cache = ready.launcher.cache.fork()
        cache.clear()
        read(ready, cache, ids, cuts)
        found.add(cached(ready, cache))
        cache.clear()
    assert len(found) == 1
    one, other = ready.launcher.cache.fork(), ready.launcher.cache.fork()
    for cache in (one, other):
        cache.clear()
    parts = [Part(other, token_ids(302, vocab, 6), 301), Part(one, ids, 1100)]
    ready.passes[-1].launch_together(parts)
    assert cached(ready, one) in found
