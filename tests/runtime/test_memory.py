"""The memory table: against the plan's own sizes, and refused with what would fit."""

from dataclasses import replace

import pytest

from cheetah.manifest import Buffer
from cheetah.models.dense.weights import buffer_bytes
from cheetah.models.registry import PRESETS
from cheetah.plan import GPUS, default_plan, step_matrices
from cheetah.runtime.build.memory import (
    MemoryShortage,
    memory_estimate,
    memory_of_buffers,
    packed_weight_bytes,
    size_text,
)

ODD = replace(PRESETS["llama-3.1-8b"], hidden_size=328, intermediate_size=1004, vocab_size=777, layers=3)


@pytest.mark.parametrize("config", [*PRESETS.values(), ODD])
@pytest.mark.parametrize("gpu", ["h200", "emulator"])
def test_weights_and_embedding_are_those_that_are_packed(config, gpu):
    shape = config.shape
    sizes = buffer_bytes(config, step_matrices(shape, default_plan(GPUS[gpu], shape), GPUS[gpu]))
    estimate = memory_estimate(config, max_context=100)
    assert packed_weight_bytes(config) == estimate.bytes_of("weights") == sizes["weights"]
    assert estimate.bytes_of("embedding") == sizes["embedding"]
    assert estimate.bytes_of("norms") == sizes["norms"]


def test_8b_at_8192_tokens():
    estimate = memory_estimate(PRESETS["llama-3.1-8b"], max_context=8192, logits_rows=64, workspace_bytes=1000)
    assert estimate.kv_bytes_per_token == 131072
    assert estimate.bytes_of("keys and values") == 2**30
    assert estimate.bytes_of("rotary table") == 8192 * 64 * 2 * 4
    assert estimate.total_bytes == sum(size for _, size in estimate.parts)
    lines = [line.split() for line in estimate.table().splitlines()]
    assert "keys and values 1.00 GB (8192 tokens of 128.0 KB)".split() in lines
    assert lines[-1] == ["total", "16.0", "GB"]


def test_the_cache_has_whole_pages_for_each_sequence():
    estimate = memory_estimate(PRESETS["llama-3.1-8b"], max_context=100, page_size=64, batch=3)
    assert estimate.kv_tokens == 3 * 128


def test_a_shortage_says_what_would_fit():
    config = PRESETS["llama-3.2-1b"]
    estimate = memory_estimate(config, max_context=8192)
    estimate.check(estimate.total_bytes, "H200")
    with pytest.raises(MemoryShortage, match="H200 has .* free, .* are needed: .*use max_context=8176 or less"):
        estimate.check(estimate.total_bytes - 1, "H200")
    with pytest.raises(MemoryShortage, match="the weights alone do not fit"):
        estimate.check(2**30, "H200")


def test_buffers_of_a_manifest_give_the_same_table():
    config = PRESETS["llama-3.2-1b"]
    wanted = memory_estimate(config, max_context=64, workspace_bytes=300)
    names = {"weights": "weights", "embedding": "embedding", "norms": "norms", "rope": "rotary table"}
    sizes = {name: wanted.bytes_of(label) for name, label in names.items()}
    sizes |= {"kv": wanted.bytes_of("keys and values"), "exchange": 100, "status": 200}
    buffers = [Buffer(name, "bf16", (size // 2,), size, "zero") for name, size in sizes.items()]
    assert memory_of_buffers(config, buffers) == wanted


def test_a_cache_of_8_bit_elements_holds_twice_the_tokens():
    config = PRESETS["llama-3.2-1b"]
    nbytes = 64 * config.kv_bytes_per_token
    found = [memory_of_buffers(config, [Buffer("kv", dtype, (1,), nbytes, "zero")]) for dtype in ("bf16", "u8")]
    assert [estimate.kv_tokens for estimate in found] == [64, 128]


def test_advice_is_for_each_sequence_of_a_batch():
    estimate = memory_estimate(PRESETS["llama-3.2-1b"], max_context=8192, batch=4)
    with pytest.raises(MemoryShortage, match="use max_context=6144 or less, or a batch below 4"):
        estimate.check(estimate.total_bytes - estimate.bytes_of("keys and values") // 4, "gpu")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KB"), (15 * 2**20, "15.0 MB"), (2**41, "2048.0 GB")]
)
def test_sizes_in_words(size, text):
    assert size_text(size) == text
