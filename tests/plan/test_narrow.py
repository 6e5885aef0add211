"""Which matrices have narrow M-tiles: where the busiest block then reads less, and only where they can."""

from dataclasses import replace

import pytest

from cheetah.models.registry import PRESET_NAMES, in_format, preset
from cheetah.plan import GPUS, default_plan, step_matrices
from cheetah.plan.narrow import residual_split, residual_tile_rows

from .shapes import LLAMA_3B

H200 = GPUS["h200"]
NARROW = {
    *("llama-3.2-3b", "qwen3-0.6b", "qwen3-4b", "qwen3-14b", "qwen3-32b", "mistral-small-24b", "mistral-small-3.2-24b"),
    *("ministral-3-3b", "ministral-3-14b", "phi-3-mini-4k", "phi-4-mini", "phi-4", "olmo-2-32b", "olmo-3-32b"),
    *("granite-4.0-micro", "afm-4.5b", "gemma-2-2b", "gemma-2-27b", "gemma-3-270m", "gemma-3-4b"),
    *("exaone-4.0-32b", "seed-oss-36b", "qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-27b"),
}


def test_presets_with_narrow_m_tiles():
    found = {name for name in PRESET_NAMES if residual_tile_rows(preset(name).shape, H200) == 8}
    assert found == NARROW


def test_quantised_matrices_have_none():
    assert residual_tile_rows(in_format(preset("llama-3.2-3b"), "int4-g128").shape, H200) == 16


@pytest.mark.parametrize(
    "sizes",
    [{"hidden": 3080}, {"ffn": 8224}, {"ffn": 960}, {"heads": 8, "head_dim": 64}, {"formats": (("o", "int8"),)}],
    ids=str,
)
def test_sizes_that_leave_half_a_tile_over_and_short_rows_have_none(sizes):
    """Rows make whole pairs, for passes; columns whole K-tiles, and chunks enough to be halved."""
    shape = replace(LLAMA_3B, **sizes)
    assert residual_tile_rows(replace(shape, hidden=3072), H200) == (8 if "hidden" in sizes else 16)
    assert residual_tile_rows(shape, H200) == 16


@pytest.mark.parametrize("gpu", ["h200", "emulator", "emulator-2", "emulator-8"])
def test_the_busiest_block_reads_less_where_m_tiles_are_narrow_and_never_more(gpu):
    machine, seen = GPUS[gpu], set()
    for hidden in range(16, 6000, 16 if machine.emulated else 176):
        shape = replace(LLAMA_3B, hidden=hidden)
        height, split = residual_tile_rows(shape, machine), residual_split(shape, machine)
        usual = -(-hidden // (16 * machine.blocks)) * 16
        most = max(split.count(block) for block in range(machine.blocks)) * height
        seen.add(height)
        assert most == (usual if height == 16 else usual - 8), shape
    assert seen == {8, 16}


@pytest.mark.parametrize("name", sorted(name for name in NARROW if preset(name).routing is None))
def test_o_and_down_lie_with_the_same_blocks_and_say_so(name):
    shape = preset(name).shape
    plan = default_plan(H200, shape)
    matrices = step_matrices(shape, plan, H200)
    owners = {matrices[product].split for product in shape.table.onto_residual}
    assert owners == {residual_split(shape, H200)}
    described = {entry["name"]: entry.get("tile_rows") for entry in matrices.describe()}
    own = {} if shape.delta is None else {"in_proj": None}
    assert described == own | {"qkv": None, "o": 8, "gate_up": None, "down": 8, "lm_head": None}
