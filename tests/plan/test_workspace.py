"""The attention workspace: its published size, its sections, and buffers that cannot be one."""

import pytest

from cheetah.plan import PlanError, Workspace, workspace_bytes


def test_workspace_is_the_published_example():
    assert workspace_bytes(blocks=132, kv_heads=8, rows=4, head_dim=128, tiles=8) == 558_592


def test_sections_are_those_of_the_table():
    workspace = Workspace(blocks=132, kv_heads=8, rows=4, head_dim=128, tiles=8)
    assert workspace.sizes == {
        "work_indptr": 4 * 133,
        "items": 32 * (64 + 264),
        "merge_indptr": 4 * 65,
        "merges": 8 * 64,
        "merge_src": 4 * 264,
        "partial_o": 4 * 264 * 4 * 128,
        "partial_lse": 4 * 264 * 4,
    }


def test_several_levels_and_fixed_chunks_have_their_own_limits():
    levels = Workspace(blocks=132, kv_heads=8, rows=32, head_dim=128, tiles=9, levels=2, level_rows=32)
    assert levels.sizes["partial_o"] == 4 * 128 * (264 * 32 + 8 * (32 + 32))
    assert (levels.sizes["items"], levels.sizes["merges"]) == (32 * 336, 8 * 72)
    assert levels.sizes["merge_src"] == 4 * (2 * 72 + 9 * 132)
    fixed = Workspace(blocks=132, kv_heads=8, rows=4, head_dim=128, tiles=8, chunk=256, max_keys=8192)
    assert fixed.sizes["merge_src"] == 4 * 8 * 8 * 32
    assert fixed.sizes["partial_lse"] == 4 * 8 * 8 * 32 * 4


@pytest.mark.parametrize("choices", [{}, {"levels": 2}, {"chunk": 16, "max_keys": 100}])
def test_sections_are_aligned_and_apart(choices):
    workspace = Workspace(blocks=4, kv_heads=2, rows=3, head_dim=64, tiles=2, **choices)
    end = 0
    for name, offset in workspace.offsets.items():
        assert offset % 256 == 0 and 0 <= offset - end < 256
        end = offset + workspace.sizes[name]
    assert 0 <= workspace.nbytes - end < 256


def test_a_smaller_or_misaligned_workspace_is_refused():
    workspace = Workspace(blocks=132, kv_heads=8, rows=4, head_dim=128, tiles=8)
    workspace.check(558_592, 0x7000)
    with pytest.raises(PlanError, match="558591 bytes given, 558592 needed"):
        workspace.check(558_591)
    with pytest.raises(PlanError, match="0x7010 is no multiple of 256"):
        workspace.check(558_592, 0x7010)


def test_impossible_sizes_are_refused():
    with pytest.raises(PlanError, match="head_dim is 0"):
        Workspace(blocks=4, kv_heads=2, rows=3, head_dim=0)
    with pytest.raises(PlanError, match="tile_rows is 0"):
        Workspace(blocks=4, kv_heads=2, rows=0, head_dim=64)
    with pytest.raises(PlanError, match="max_keys is 0"):
        Workspace(blocks=4, kv_heads=2, rows=3, head_dim=64, chunk=16)
