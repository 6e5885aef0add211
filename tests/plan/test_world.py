"""Who exchanges: blocks of several GPUs have numbers of their own, and heads belong to ranks."""

import pytest

from cheetah.plan import GPUS, PlanError
from cheetah.plan.world import World, world_of

from .shapes import LLAMA_8B, TINY


def test_blocks_of_all_ranks_are_numbered_once():
    world = World(3, 12)
    numbers = [world.number(block, rank) for rank in range(3) for block in range(4)]
    assert numbers == list(range(12))


def test_a_gpu_by_itself_is_all_there_is():
    gpu = GPUS["h200"]
    assert world_of(gpu) == World(1, gpu.blocks) and world_of(gpu).number(5, 0) == 5
    assert LLAMA_8B.of_rank(1) == LLAMA_8B


def test_a_rank_has_some_of_the_heads_and_all_else():
    rank = LLAMA_8B.of_rank(4)
    assert (rank.heads, rank.kv_heads, rank.group) == (8, 2, LLAMA_8B.group)
    assert (rank.hidden, rank.ffn, rank.vocab, rank.layers) == (4096, 14336, 128256, 32)
    with pytest.raises(PlanError, match="heads with 1 KV heads"):
        TINY.of_rank(2)
