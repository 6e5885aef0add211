"""What families do otherwise than Llama: the reference against formulas written again here, and where vectors lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.dense.reference import Reference
from cheetah.models.dense.weights import buffer_bytes, logical_matrix, tensor_shapes, vector_shapes
from cheetah.models.family import Packing
from cheetah.models.mistral import MistralConfig
from cheetah.models.qwen2 import Qwen2Config
from cheetah.models.qwen3 import Qwen3Config
from cheetah.models.registry import family_of
from cheetah.models.rounding import widen
from cheetah.plan import GPUS, default_plan, step_matrices
from tests.program.rig import random_weights, token_ids

F64 = NDArray[np.float64]
SIZES: dict[str, Any] = {"max_position_embeddings": 256, "rms_norm_eps": 1e-3}
CONFIGS: dict[str, ModelConfig] = {
    "qwen3": Qwen3Config(48, 40, 2, 4, 2, 64, 50, **SIZES),
    "qwen3 tied": Qwen3Config(48, 40, 2, 5, 1, 64, 50, **SIZES, tied_embeddings=True),
    "qwen2": Qwen2Config(48, 40, 2, 7, 1, 64, 50, **SIZES),
    "mistral": MistralConfig(80, 40, 2, 2, 1, 128, 50, **SIZES),
    "mistral with a window": MistralConfig(48, 40, 2, 4, 2, 64, 50, **SIZES, sliding_window=5),
}


def whole_sequence(config: ModelConfig, tensor: Any, ids: list[int]) -> F64:
    """The logits of all positions at once, in float64: transformers' formulas, masks instead of a cache."""

    def weight(name: str, layer: int = 0) -> F64:
        return widen(tensor(f"model.layers.{layer}.{name}")).astype(np.float64)

    def norm(x: F64, scale: F64) -> F64:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * scale

    def heads(x: F64, part: str, layer: int) -> F64:
        made = x @ weight(f"self_attn.{part}_proj.weight", layer).T
        if isinstance(config, Qwen2Config):
            made = made + weight(f"self_attn.{part}_proj.bias", layer)
        made = made.reshape(len(ids), -1, config.head_dim)
        if isinstance(config, Qwen3Config) and part != "v":
            made = norm(made, weight(f"self_attn.{part}_norm.weight", layer))
        return made if part == "v" else made * cos + rotated_half(made) * sin

    def rotated_half(x: F64) -> F64:
        half = config.head_dim // 2
        return np.concatenate([-x[..., half:], x[..., :half]], -1)

    angles = config.rope_table(len(ids)).astype(np.float64)
    cos, sin = (np.concatenate([angles[:, None, :, part]] * 2, -1) for part in range(2))
    distance = np.arange(len(ids))[:, None] - np.arange(len(ids))
    seen = (distance >= 0) & (distance < (config.sliding_window or len(ids)))
    table = widen(tensor("model.embed_tokens.weight")).astype(np.float64)
    x = table[ids]
    for layer in range(config.layers):
        normed = norm(x, weight("input_layernorm.weight", layer))
        q, k, v = (heads(normed, part, layer) for part in "qkv")
        k, v = (np.repeat(one, config.group, 1) for one in (k, v))
        logits = np.where(seen, np.einsum("qhd,khd->hqk", q, k) / np.sqrt(config.head_dim), -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        output = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(len(ids), -1)
        x = x + output @ weight("self_attn.o_proj.weight", layer).T
        normed = norm(x, weight("post_attention_layernorm.weight", layer))
        gate, up = (normed @ weight(f"mlp.{part}_proj.weight", layer).T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight("mlp.down_proj.weight", layer).T
    head = table if config.tied_embeddings else widen(tensor("lm_head.weight")).astype(np.float64)
    return norm(x, widen(tensor("model.norm.weight")).astype(np.float64)) @ head.T


@pytest.mark.parametrize("name", CONFIGS)
def test_the_reference_says_what_transformers_formulas_say(name: str) -> None:
    config = CONFIGS[name]
    weights, ids = random_weights(config), token_ids(17, config.vocab_size)
    found = Reference(config, weights.tensor).forward(ids)
    np.testing.assert_allclose(found, whole_sequence(config, weights.tensor, ids), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_vectors_of_a_family_lie_where_its_kernel_reads_them(name: str) -> None:
    config, gpu = CONFIGS[name], GPUS["emulator-2"]
    weights, family = random_weights(config), family_of(config)
    matrices = step_matrices(config.shape, default_plan(gpu, config.shape, max_context=64), gpu)
    buffers = {part: np.full(size, 0xA5, np.uint8) for part, size in buffer_bytes(config, matrices).items()}

    def write(part: str, offset: int, data: NDArray[np.uint8]) -> None:
        buffers[part][offset : offset + data.size] = data

    family.pack_weights(config, matrices, Packing(weights.tensor, write))
    found = {part: buffers[part].view(np.uint16).reshape(shape) for part, shape in vector_shapes(config).items()}
    assert set(found) == {"qwen3": {"head_norms"}, "qwen2": {"biases"}}.get(name.split()[0], set())
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}.self_attn."
        if "head_norms" in found:
            assert np.array_equal(found["head_norms"][layer, 0], weights.tensor(prefix + "q_norm.weight"))
            assert np.array_equal(found["head_norms"][layer, 1], weights.tensor(prefix + "k_norm.weight"))
        if "biases" in found:
            columns = [weights.tensor(f"{prefix}{part}_proj.bias")[:, None] for part in "qkv"]
            assert np.array_equal(found["biases"][layer], logical_matrix(config, "qkv", columns)[:, 0])


def test_m_tile_order_of_biases_is_that_of_the_rows_they_are_added_to() -> None:
    """Row r of the packed matrix is made of the tensor's row whose bias lies at r: both show that row's number."""
    config = CONFIGS["qwen2"]
    numbers = [first + np.arange(rows, dtype=np.uint16) for first, rows in ((0, 448), (1000, 64), (2000, 64))]
    matrix = logical_matrix(config, "qkv", [np.repeat(part[:, None], 3, 1) for part in numbers])
    biases = logical_matrix(config, "qkv", [part[:, None] for part in numbers])[:, 0]
    assert np.array_equal(matrix[:, 0], biases)
    assert biases[:16].tolist() == [*range(8), *range(32, 40)], "dims 0 to 7 and their partners half a head away"


def test_parameters_are_counted_with_biases_and_head_norms() -> None:
    for config in CONFIGS.values():
        assert sum(int(np.prod(shape)) for shape in tensor_shapes(config).values()) == config.parameter_count
