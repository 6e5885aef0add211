"""The front door of the attention kernel: what it takes, what it gives back, what it refuses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cheetah.attention import AttentionError, BatchAttention, Prefix
from cheetah.attention.arrays import ArrayError, view_array
from cheetah.blocks.attention.shipped_variants import combined, soft_cap, streaming_llm
from cheetah.blocks.attention.variants import Variant
from cheetah.errors import CheetahError
from cheetah.plan import PlanError
from cheetah.plan.kv.page_table import page_table
from tests.program.rig import emulated_gpu

pytestmark = pytest.mark.compiler
SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 8}
PAGES = 12


def made(**more: Any) -> BatchAttention:
    given = {**SIZES, "batch": 2, "queries": 2, "max_keys": 64, "gpu": emulated_gpu(3), "device": "emulator", **more}
    return BatchAttention(**given)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


POOL = numbers(PAGES, 2, 2, 8, 64)
TABLE = page_table([[3, 1, 7], [0, 2]], [20, 9], 8)
QUERIES = numbers(2, 4, 64, seed=1)


@pytest.fixture
def attention() -> BatchAttention:
    ready = made()
    ready.plan(*TABLE)
    return ready


@pytest.mark.slow
def test_arrays_of_several_kinds_give_the_same(attention: BatchAttention) -> None:
    output, lse = attention.run(QUERIES, POOL)
    assert output.dtype == ml_dtypes.bfloat16 and lse.dtype == np.float32 and lse.shape == (2, 4)
    as_bits, _ = attention.run(QUERIES.view(np.uint16), POOL.view(np.uint16))
    np.testing.assert_array_equal(as_bits, output.view(np.uint16))
    nhd = np.ascontiguousarray(POOL.transpose(0, 1, 3, 2, 4))
    np.testing.assert_array_equal(attention.run(QUERIES, nhd, layout="NHD")[0], output)
    ours, our_lse = np.zeros((2, 4, 64), np.uint16), np.zeros((2, 4), np.float32)
    found, found_lse = attention.run(QUERIES, POOL, ours, our_lse)
    assert found is ours and found_lse is our_lse
    np.testing.assert_array_equal(ours, output.view(np.uint16))
    np.testing.assert_array_equal(our_lse, lse)


class Exporting:
    """An array that speaks nothing but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **_: Any) -> Any:
        return self.array.__dlpack__()


@pytest.mark.slow
def test_dlpack(attention: BatchAttention) -> None:
    output, _ = attention.run(QUERIES, POOL)
    bits = Exporting(QUERIES.view(np.uint16)), Exporting(POOL.view(np.uint16))
    np.testing.assert_array_equal(attention.run(*bits)[0].view(np.uint16), output.view(np.uint16))


def test_what_is_no_array_is_named() -> None:
    for array, message in (
        ([1.0], "q is a list"),
        (np.zeros((4, 4))[:, ::2], "not contiguous"),
        (np.zeros(3, np.complex128), "complex128"),
    ):
        with pytest.raises(ArrayError, match=message):
            view_array(array, "q")


def test_a_launch_never_changes(attention: BatchAttention) -> None:
    attention.run(QUERIES, POOL)
    assert attention._last_run is not None
    before = dict(attention._last_run.arguments)
    offsets, nbytes = attention.spec.sections.offsets, attention.workspace_bytes
    attention.launch()
    attention.plan(*page_table([[3], [0, 2]], [1, 16], 8))
    attention.launch()
    assert attention._last_run.arguments == before
    assert (attention.spec.sections.offsets, attention.workspace_bytes) == (offsets, nbytes)
    assert attention.time_ms(2) > 0 and attention.kv_bytes == 17 * 2 * 2 * 64 * 2


def test_epochs_begin_again_after_the_last_one_and_leave_out_that_of_a_clean_workspace(
    attention: BatchAttention,
) -> None:
    attention.plan(*TABLE, minimum=16, chunk=16)
    output, _ = attention.run(QUERIES, POOL)
    place, blocks = attention.spec.sections.offsets["launches"], attention.spec.machine.blocks
    attention.workspace.upload(np.array([(2**32 - 2) * blocks], np.uint64), place)
    for _ in range(3):
        np.testing.assert_array_equal(attention.run(QUERIES, POOL)[0], output)
    assert attention.workspace.download(np.uint64, 1, place)[0] == (2**32 + 1) * blocks


@pytest.mark.slow
def test_a_workspace_of_exactly_the_size_is_taken(attention: BatchAttention) -> None:
    output, _ = attention.run(QUERIES, POOL)
    device = attention.device
    given = made(device=device, workspace=device.allocate(attention.workspace_bytes, 0xFF))
    given.plan(*TABLE)
    np.testing.assert_array_equal(given.run(QUERIES, POOL)[0], output)
    with pytest.raises(AttentionError, match=f"{attention.workspace_bytes} needed"):
        made(device=device, workspace=device.allocate(attention.workspace_bytes - 1))

    class Shifted:
        address, nbytes, upload = 128, attention.workspace_bytes, None

    with pytest.raises(AttentionError, match="multiple of 256"):
        made(device=device, workspace=Shifted())


def test_requests_without_keys(attention: BatchAttention) -> None:
    attention.plan(*page_table([[], [4]], [0, 5], 8), qo_indptr=np.array([0, 2, 3], np.int32))
    output, lse = attention.run(numbers(3, 4, 64), POOL)
    assert (output[:2] == 0).all() and (lse[:2] == -np.inf).all()
    assert np.isfinite(lse[2]).all()
    attention.plan(*page_table([[], []], [0, 0], 8))
    output, lse = attention.run(QUERIES, POOL)
    assert (output == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"head_dim": 96}, "made for 64, 128 and 256"),
        ({"queries": 9}, "1 to 8"),
        ({"batch": 9}, "at most 8"),
        ({"heads": 5}, "multiple of kv_heads"),
        ({"kv_dtype": "f16"}, "bf16, e4m3"),
    ],
)
def test_what_no_kernel_is_made_for(more: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        made(**more)


def test_plans_and_runs_that_do_not_fit(attention: BatchAttention) -> None:
    indptr, indices, last = TABLE
    wrong: list[tuple[Any, str]] = [
        (lambda: attention.plan(indptr.astype(np.int64), indices, last), "int64"),
        (lambda: attention.plan(*page_table([[0]] * 3, [1] * 3, 8)), "3 requests"),
        (lambda: attention.plan(*TABLE, qo_indptr=np.array([0, 3, 4], np.int32)), "1 to 2 rows"),
        (lambda: attention.plan(*TABLE, prefixes=[Prefix(*page_table([[5]], [8], 8), groups=[(0, 2)])]), "levels="),
        (lambda: attention.plan(*TABLE, order=[0, 0]), "permutation"),
        (lambda: attention.run(QUERIES[:1], POOL), r"q is bf16 \(1, 4, 64\)"),
        (lambda: attention.run(QUERIES, POOL[:5]), "names page 7"),
        (lambda: attention.run(QUERIES, POOL.view(np.uint8)), "kv is u8"),
        (lambda: attention.run(QUERIES, POOL, layout="XYZ"), "HND or NHD"),
        (lambda: attention.run(QUERIES, POOL, scales=np.ones(2)), "e4m3"),
        (lambda: attention.run(QUERIES, POOL, slope=1), "takes"),
        (lambda: made().run(QUERIES, POOL), "plan first"),
    ]
    for call, message in wrong:
        with pytest.raises(CheetahError, match=message):
            call()


def test_a_page_table_for_more_keys_than_there_is_room(attention: BatchAttention) -> None:
    with pytest.raises(AttentionError, match="page_table: .* room"):
        attention.plan(*page_table([[0] * 17, []], [136, 0], 8))


def test_a_refused_plan_leaves_the_one_before(attention: BatchAttention) -> None:
    """The tables of the plan before lie in the workspace still: a run must not take other rows or pages for them."""
    output, _ = attention.run(QUERIES, POOL)
    too_long = page_table([[0] * 17, [11]], [136, 8], 8)
    with pytest.raises(AttentionError, match="room"):
        attention.plan(*too_long, qo_indptr=np.array([0, 2, 3], np.int32))
    with pytest.raises(ArrayError, match=r"the plan has bf16 \(2, 4, 64\)"):
        attention.run(numbers(3, 4, 64), POOL)
    np.testing.assert_array_equal(attention.run(QUERIES, POOL[:8])[0], output)


def test_a_plan_that_did_not_arrive_whole_serves_nobody(
    attention: BatchAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention.run(QUERIES, POOL)

    def refuse(words: np.ndarray, offset: int) -> None:
        raise CheetahError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(attention.workspace, "upload", refuse)
        with pytest.raises(CheetahError, match="gone"):
            attention.plan(*TABLE)
    for call in (attention.launch, lambda: attention.run(QUERIES, POOL)):
        with pytest.raises(AttentionError, match="before plan"):
            call()
    attention.plan(*TABLE)
    attention.launch()


def test_arrays_of_the_last_run_that_are_too_small_for_the_plan_are_not_launched(attention: BatchAttention) -> None:
    attention.run(QUERIES, POOL[:8])
    attention.plan(*TABLE, qo_indptr=np.array([0, 2, 3], np.int32))
    with pytest.raises(AttentionError, match="have 2 rows and 8 pages, and the plan reads 3 rows and names page 7"):
        attention.launch()
    attention.plan(*page_table([[8], [0]], [1, 1], 8))
    with pytest.raises(AttentionError, match="names page 8"):
        attention.launch()


@pytest.mark.slow
@pytest.mark.parametrize("variant", [streaming_llm(4, 60), combined(streaming_llm(4, 60), soft_cap(30.0))])
def test_keys_that_depend_on_who_asks_are_not_shared(variant: Variant) -> None:
    attention = made(variant=variant, levels=2)
    table = page_table([[1, 2]], [10], 8)
    with pytest.raises(AttentionError, match="one query a request and no prefixes"):
        attention.plan(*table, qo_indptr=np.array([0, 2], np.int32))
    with pytest.raises(AttentionError, match="one query a request and no prefixes"):
        attention.plan(*table, prefixes=[Prefix(*page_table([[0]], [8], 8), groups=[(0, 1)])])
    attention.plan(*table)
