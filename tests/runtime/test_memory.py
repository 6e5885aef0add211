"""The memory table: of a manifest's buffers, and refused with what would fit."""

import math

import pytest

from cheetah.manifest import DTYPE_BYTES, Buffer
from cheetah.models.registry import PRESETS
from cheetah.runtime.assembly.memory import MemoryEstimate, MemoryShortage, memory_of_buffers, size_text


def estimate_of(model: str, tokens: int, batch: int = 1, **others: int) -> MemoryEstimate:
    """The table of a cache of so many tokens, and buffers of these bytes."""
    config = PRESETS[model]
    sizes = {"weights": 2 * config.parameter_count, **others}
    buffers = [Buffer(name, "bf16", (size // 2,), size, "zero") for name, size in sizes.items()]
    return memory_of_buffers(config, [*buffers, cache_of(model, tokens)], batch)


def cache_of(model: str, tokens: int, dtype: str = "bf16", ranks: int = 1) -> Buffer:
    """What each of several GPUs has of a cache of so many tokens."""
    config, element = PRESETS[model], DTYPE_BYTES[dtype]
    shape = (config.layers, tokens // 16, 2, config.kv_heads // ranks, 16, config.head_dim)
    return Buffer("kv", dtype, shape, math.prod(shape) * element, "poison")


def test_8b_at_8192_tokens():
    estimate = estimate_of("llama-3.1-8b", 8192, rope=8192 * 64 * 2 * 4, exchange=1000, status=200)
    assert estimate.kv_bytes_per_token == 131072
    assert estimate.bytes_of("keys and values") == 2**30
    assert estimate.bytes_of("rotary table") == 8192 * 64 * 2 * 4
    assert estimate.bytes_of("workspace") == 1200
    assert estimate.total_bytes == sum(size for _, size in estimate.parts)
    lines = [line.split() for line in estimate.table().splitlines()]
    assert "keys and values 1.00 GB (8192 tokens of 128.0 KB)".split() in lines
    assert lines[-1] == ["total", "16.0", "GB"]


def test_a_shortage_says_what_would_fit():
    estimate = estimate_of("llama-3.2-1b", 8192)
    estimate.check(estimate.total_bytes, "H200")
    with pytest.raises(MemoryShortage, match="H200 has .* free, .* are needed: .*use max_context=8176 or less"):
        estimate.check(estimate.total_bytes - 1, "H200")
    with pytest.raises(MemoryShortage, match="the weights alone do not fit"):
        estimate.check(2**30, "H200")


def test_a_cache_of_8_bit_elements_holds_twice_the_tokens_and_so_does_each_of_two_gpus():
    model = "llama-3.2-1b"
    caches = [cache_of(model, 64), cache_of(model, 128, "u8"), cache_of(model, 128, ranks=2)]
    found = [memory_of_buffers(PRESETS[model], [cache]) for cache in caches]
    assert len({cache.bytes for cache in caches}) == 1
    assert [estimate.kv_tokens for estimate in found] == [64, 128, 128]


def test_advice_is_for_each_sequence_of_a_batch():
    estimate = estimate_of("llama-3.2-1b", 4 * 8192, batch=4)
    with pytest.raises(MemoryShortage, match="use max_context=6144 or less, or a batch below 4"):
        estimate.check(estimate.total_bytes - estimate.bytes_of("keys and values") // 4, "gpu")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KB"), (15 * 2**20, "15.0 MB"), (2**41, "2048.0 GB")]
)
def test_sizes_in_words(size, text):
    assert size_text(size) == text
