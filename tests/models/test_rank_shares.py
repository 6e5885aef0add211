"""What each of several GPUs has of a model: parts of the whole packing, each row once, heads where they belong."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cheetah.models.config import ModelConfig
from cheetah.models.dense.pack_weights import pack_all
from cheetah.models.dense.weights import buffer_bytes, logical_matrix, matrix_tensors, tensor_shapes
from cheetah.models.family import Packing
from cheetah.models.formats import unpack_matrix
from cheetah.models.qwen2 import Qwen2Config
from cheetah.plan import PlanError, StepMatrices, default_plan, gpu_named, step_matrices
from cheetah.plan.gpu import Gpu, together
from cheetah.plan.products import RowOrder
from cheetah.plan.world import Rank

EMULATOR = gpu_named("emulator-2")
CONFIG = Qwen2Config(
    hidden_size=128, intermediate_size=192, layers=2, query_heads=8, kv_heads=2, head_dim=64, vocab_size=77
)
"""Rows of 8, 12 and 5 M-tiles, of which the last are not shared evenly; biases, in the order of heads."""

Bits = NDArray[np.uint16]


def tensors_of(config: ModelConfig) -> dict[str, Bits]:
    rng = np.random.default_rng(3)
    return {name: rng.integers(1, 2**16, shape, np.uint16) for name, shape in tensor_shapes(config).items()}


def matrices_of(config: ModelConfig, gpu: Gpu) -> StepMatrices:
    return step_matrices(config.shape, default_plan(gpu, config.shape, max_context=64), gpu)


def packed(config: ModelConfig, matrices: StepMatrices, tensors: dict[str, Bits], rank: int) -> dict[str, Bits]:
    buffers = {name: np.full(nbytes, 0xEE, np.uint8) for name, nbytes in buffer_bytes(config, matrices).items()}

    def write(name: str, offset: int, data: NDArray[np.uint8]) -> None:
        buffers[name][offset : offset + data.nbytes] = data

    pack_all(config, matrices, Packing(tensors.__getitem__, write, rank=rank, threads=1))
    return {name: one.view(np.uint16) if name != "weights" else one for name, one in buffers.items()}


def heads_of(config: ModelConfig, tensors: list[Bits], rank: Rank) -> list[Bits]:
    """The rows of q, k and v, or biases of them, that are of a rank's heads."""
    counts = config.query_heads, config.kv_heads, config.kv_heads
    split = (one.reshape(count, -1, *one.shape[1:]) for one, count in zip(tensors, counts, strict=True))
    parts = (rank.part(count) for count in counts)
    return [one[part.start : part.stop].reshape(-1, *one.shape[2:]) for one, part in zip(split, parts, strict=True)]


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 2), (4, 2)])
def test_ranks_pack_parts_of_the_whole_matrices(ranks: int, kv_heads: int) -> None:
    config, gpu = replace(CONFIG, kv_heads=kv_heads), together(EMULATOR, ranks)
    tensors, matrices = tensors_of(config), matrices_of(config, gpu)
    buffers = [packed(config, matrices, tensors, rank) for rank in range(ranks)]
    for layout in matrices:
        product, layer = config.table.named(layout.name), matrices.copies(layout) - 1
        own = [tensors[name] for name in matrix_tensors(config, layout.name, layer)]
        first = matrices.offset(layout.name, layer)
        found = [unpack_matrix(layout, one["weights"][first : first + layout.total_bytes]) for one in buffers]
        if product.order is RowOrder.HEADS:
            small = replace(config, query_heads=config.query_heads // ranks, kv_heads=max(1, kv_heads // ranks))
            for rank, rows in enumerate(found):
                wanted = logical_matrix(small, layout.name, heads_of(config, own, Rank(rank, ranks)))
                assert np.array_equal(rows, wanted), (layout.name, rank)
        else:
            whole, joined = logical_matrix(config, layout.name, own), np.concatenate(found)
            assert np.array_equal(joined[: len(whole)], whole) and not joined[len(whole) :].any(), layout.name
    for rank, one in enumerate(buffers):
        assert np.array_equal(one["embedding"], buffers[0]["embedding"])
        biases = [tensors[f"model.layers.1.self_attn.{part}_proj.bias"][:, None] for part in "qkv"]
        small = replace(config, query_heads=config.query_heads // ranks, kv_heads=max(1, kv_heads // ranks))
        wanted = logical_matrix(small, "qkv", heads_of(config, biases, Rank(rank, ranks)))[:, 0]
        assert np.array_equal(one["biases"].reshape(2, -1)[1], wanted)


def test_what_several_gpus_cannot_share_is_refused_with_the_numbers_that_work() -> None:
    with pytest.raises(PlanError, match="12 M-tiles of gate_up.* 8 GPUs: use one of 1, 2, 4"):
        matrices_of(replace(CONFIG, intermediate_size=96), together(EMULATOR, 8))
    with pytest.raises(PlanError, match="6 heads with 2 KV heads.* 4 GPUs: use one of 1, 2"):
        matrices_of(replace(CONFIG, query_heads=6), together(EMULATOR, 4))
    with pytest.raises(PlanError, match="2 GPUs: .*: use one GPU"):
        matrices_of(replace(CONFIG, query_heads=7, kv_heads=1), together(EMULATOR, 2))


def test_names_of_machines_say_how_many_gpus_and_what_part_of_each() -> None:
    h200 = gpu_named("h200")
    two = gpu_named("h200x2")
    assert (two.name, two.ranks, two.blocks, two.memory_bytes) == ("h200x2", 2, 132, h200.memory_bytes)
    halves = gpu_named("h200.2x2")
    assert (halves.name, halves.ranks, halves.blocks) == ("h200.2x2", 2, 66)
    assert halves.read_gb_per_s == h200.read_gb_per_s / 2
    for name in ("h200x3", "h200x", "h200.3x2", "x2", "h100x2x2"):
        with pytest.raises(PlanError):
            gpu_named(name)
