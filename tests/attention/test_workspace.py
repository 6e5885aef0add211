"""What never changes while lengths do: the workspace and the launch; and what the planner need not read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cheetah.attention import AttentionError, BatchAttention
from cheetah.blocks.attention import shipped_variants as shipped
from cheetah.runtime.device import open_device
from tests.attention.adapter import Memory, attend, attention_of
from tests.attention.cases import Case, Core, random_case, with_sliding_window
from tests.attention.relations import assert_meaning

pytestmark = pytest.mark.compiler
SMALL: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=64, batch=4, queries=8, levels=2, max_keys=512, chunk=16)
MAIN = Core(shortest_chunk=16)


def built(**more: Any) -> BatchAttention:
    return BatchAttention(**SMALL, gpu="emulator", consumer_warps=4, **more)


def run(attention: BatchAttention, case: Case, **more: Any) -> np.ndarray:
    memory = Memory(case)
    attention.plan(*memory.own, qo_indptr=case.rows, chunk=0)
    return attention.run(
        np.concatenate(case.queries).astype(ml_dtypes.bfloat16), more.pop("pool", memory.pool), **more
    )[0]


@pytest.mark.slow
def test_a_workspace_of_the_exact_size() -> None:
    device = open_device("emulator")
    made = attention_of(MAIN)
    exact = device.allocate(made.workspace_bytes, 0xFF)
    case = random_case(MAIN, (199, 3))
    given = built(device=device, workspace=exact)
    np.testing.assert_array_equal(run(given, case).astype(np.float32), attend(case).output)
    with pytest.raises(AttentionError, match=f"{made.workspace_bytes - 1} bytes given, {made.workspace_bytes} needed"):
        built(device=device, workspace=device.allocate(made.workspace_bytes - 1))


def test_lengths_change_no_offset_and_no_launch() -> None:
    attention = attention_of(MAIN)
    before = attention.workspace_bytes, dict(attention.spec.sections.offsets), attention.kernel.manifest.launch
    for lengths in ((1,), (199, 3, 512, 0), (16, 16)):
        assert_meaning(random_case(MAIN, lengths))
        assert before == (attention.workspace_bytes, attention.spec.sections.offsets, attention.kernel.manifest.launch)


def test_token_major_pools_are_converted() -> None:
    case = random_case(MAIN, (54, 17))
    attention = attention_of(MAIN)
    pool = np.ascontiguousarray(Memory(case).pool.swapaxes(2, 3))
    found = run(attention, case, pool=pool, layout="NHD").astype(np.float32)
    np.testing.assert_array_equal(found, attend(case).output)


@pytest.mark.slow
@pytest.mark.parametrize("own", [199, 512])
def test_keys_left_of_a_window_are_not_read(own: int) -> None:
    """The window's first key is own - 1 - 13; ranges are rounded outward to 16 keys."""
    case = with_sliding_window(random_case(MAIN, (own,)), 13)
    memory = Memory(case)
    attention = BatchAttention(**SMALL, gpu="emulator", consumer_warps=4, variant=shipped.sliding_window(13))
    plan = attention.plan(*memory.own, chunk=0)
    assert plan.items[:, 3].min() == (own - 14) // 16 * 16
    wide = replace(case, core=MAIN)
    assert attention_of(wide.core).plan(*memory.own, chunk=0).items[:, 3].min() == 0
