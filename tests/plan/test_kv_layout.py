"""The device form of a KV plan, and the attention workspace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cheetah.plan import KvPlanLayout, PlanError, Workspace, kv_plan, kv_plans_for_launch, workspace_bytes


def read(layout, words, name, shape):
    """What a kernel would read: `shape` words from the section's offset."""
    return words[layout.offsets[name] :][: int(np.prod(shape))].reshape(shape)


def test_sections_have_the_offsets_of_the_format():
    layout = KvPlanLayout(blocks=132, kv_heads=8, batch=1)
    assert (layout.max_items, layout.max_merges, layout.max_partials) == (272, 8, 264)
    assert layout.offsets == {
        "header": 0,
        "work_indptr": 64,  # 133 words in 192
        "items": 256,  # 272 * 8 words
        "merge_indptr": 2432,  # 9 words in 64
        "merges": 2496,  # 16 words in 64
        "merge_src": 2560,  # 264 words in 320
    }
    assert layout.plan_words == 2880


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20000), min_size=1, max_size=8),
    kv_heads=st.sampled_from([1, 2, 8]),
    blocks=st.sampled_from([1, 4, 132]),
    first_step=st.integers(0, 63),
)
def test_an_encoded_plan_reads_back(lengths, kv_heads, blocks, first_step):
    plan = kv_plan(lengths, kv_heads, blocks, 4)
    layout = KvPlanLayout(blocks, kv_heads, len(lengths))
    words = layout.encode(plan, first_step)
    assert words.dtype == np.int32 and words.shape == (layout.plan_words,) and layout.plan_words % 64 == 0
    assert words[:64].tolist() == [first_step, plan.item_count, plan.merge_count] + [0] * 61
    assert np.array_equal(read(layout, words, "work_indptr", (blocks + 1,)), plan.work_indptr)
    assert np.array_equal(read(layout, words, "items", (plan.item_count, 8)), plan.items)
    assert np.array_equal(read(layout, words, "merge_indptr", (plan.merge_count + 1,)), plan.merge_indptr)
    assert np.array_equal(read(layout, words, "merges", (plan.merge_count, 2)), plan.merges)
    assert np.array_equal(read(layout, words, "merge_src", (plan.partials,)), plan.merge_src)


def test_a_launch_is_encoded_row_by_row():
    layout = KvPlanLayout(blocks=4, kv_heads=2)
    plans = kv_plans_for_launch(30, 20, kv_heads=2, blocks=4, group=4)
    words = layout.encode_launch(plans)
    assert words.shape == (3, layout.plan_words) and words[:, 0].tolist() == [0, 2, 18]
    assert np.array_equal(words[1], layout.encode(plans[1][1], 2))


def test_plans_that_do_not_fit_are_refused():
    with pytest.raises(PlanError, match="the plan is for 8 blocks and this layout for 4"):
        KvPlanLayout(blocks=4, kv_heads=2).encode(kv_plan([10], 2, 8, 4), 0)
    with pytest.raises(PlanError, match="16 items and the layout room for 10"):
        KvPlanLayout(blocks=4, kv_heads=2).encode(kv_plan([10] * 8, 2, 4, 4), 0)
    with pytest.raises(PlanError, match="use a larger batch or no fixed chunk length"):
        KvPlanLayout(blocks=4, kv_heads=2).encode(kv_plan([1000], 2, 4, 4, chunk=16), 0)


def test_workspace_is_the_published_example():
    assert workspace_bytes(blocks=132, kv_heads=8, rows=4, head_dim=128, batch=8) == 558_592


def test_workspace_sections_are_aligned_and_apart():
    workspace = Workspace(blocks=4, kv_heads=2, rows=3, head_dim=64, batch=2)
    end = 0
    for name, offset in workspace.offsets.items():
        assert offset % 256 == 0 and 0 <= offset - end < 256
        end = offset + workspace.sizes[name]
    assert 0 <= workspace.nbytes - end < 256


def test_a_smaller_or_misaligned_workspace_is_refused():
    workspace = Workspace(blocks=132, kv_heads=8, rows=4, head_dim=128, batch=8)
    workspace.check(558_592, 0x7000)
    with pytest.raises(PlanError, match="558591 bytes given, 558592 needed"):
        workspace.check(558_591)
    with pytest.raises(PlanError, match="0x7010 is no multiple of 256"):
        workspace.check(558_592, 0x7010)
