"""The numbers of `cheetah inspect`: bytes a step against those of the published models, shares, exchanges, the plot."""

import sys

import pytest

from cheetah.plan import GPUS, PlanError, default_plan, step_matrices
from cheetah.plan.kv import Scheduling, kv_plan
from cheetah.plan.report import inspect_plan, plot_shares, step_bytes

from .shapes import LLAMA_1B, LLAMA_3B, LLAMA_8B, LLAMA_70B, TINY


def report_of(shape, gpu="h200", context=1, **overrides):
    plan = default_plan(GPUS[gpu], shape, **overrides)
    return inspect_plan(shape, plan, GPUS[gpu], context)


@pytest.mark.parametrize(
    ("shape", "gigabytes", "tokens_per_s"), [(LLAMA_8B, 15.01, 314), (LLAMA_1B, 2.47, 1910)], ids=["8B", "1B"]
)
def test_bytes_and_rate_at_the_ceiling_are_those_of_the_published_sizes(shape, gigabytes, tokens_per_s):
    report = report_of(shape)
    assert round(report.step_bytes.gigabytes, 2) == gigabytes
    assert report.ceiling_tokens_per_s == pytest.approx(tokens_per_s, abs=1)
    assert report.ceiling_ms == pytest.approx(1e3 / report.ceiling_tokens_per_s)


def test_weights_without_padding_are_the_parameters_but_the_embedding():
    shape = LLAMA_70B
    matrices = step_matrices(shape, default_plan(GPUS["h200"], shape), GPUS["h200"])
    layer = shape.hidden * (shape.qkv_rows + shape.query_rows + 3 * shape.ffn)
    assert matrices.weight_bytes == 2 * (shape.layers * layer + shape.vocab * shape.hidden)


def test_kv_grows_with_context_and_batch():
    one = step_bytes(LLAMA_8B, 0, 1000)
    assert one.kv == 32 * 8 * 128 * 2 * 2 * 1000
    many = step_bytes(LLAMA_8B, 0, 2000, batch=4)
    assert (many.kv, many.norms, many.embedding) == (8 * one.kv, one.norms, 4 * one.embedding)
    assert many.total == many.kv + many.norms + many.embedding + many.rope


@pytest.mark.parametrize("gpu", ["h200", "emulator-8"])
@pytest.mark.parametrize("shape", [LLAMA_1B, LLAMA_8B, TINY])
def test_shares_of_the_phases_sum_to_the_bytes_of_the_step(shape, gpu):
    report = report_of(shape, gpu, context=777)
    assert [phase.name for phase in report.phases] == ["qkv", "attention", "o", "gate_up", "down", "lm_head"]
    assert [phase.runs for phase in report.phases] == [shape.layers] * 5 + [1]
    assert all(len(phase.block_bytes) == GPUS[gpu].blocks for phase in report.phases)
    assert report.step_share.total_bytes == report.step_bytes.weights + report.step_bytes.kv
    assert report.step_share.total_bytes == sum(phase.step_bytes for phase in report.phases)


def test_imbalance_is_the_largest_share_over_the_mean():
    phases = {phase.name: phase for phase in report_of(LLAMA_8B).phases}
    m_tile = 4096 * 16 * 2
    assert (phases["o"].largest_bytes, phases["o"].smallest_bytes) == (2 * m_tile, m_tile)
    assert phases["o"].imbalance_percent == pytest.approx(100 * (2 * 132 / 256 - 1))
    assert phases["qkv"].imbalance_percent == pytest.approx(100 * (3 * 132 / 384 - 1))


def test_attention_shares_are_the_schedule_s():
    report = report_of(LLAMA_8B, context=1000, batch=2)
    attention = report.phases[1]
    assert attention.total_bytes == 2 * 1000 * 8 * 128 * 4
    schedule = kv_plan([1000, 1000], 4, Scheduling(8, 132, minimum=256))
    assert attention.largest_bytes == max(schedule.tokens(block) for block in range(132)) * 128 * 4


def test_keys_are_dealt_out_in_items_of_the_fixed_size_if_there_is_one():
    fixed = report_of(LLAMA_8B, context=1000, batch=2, kv_chunk=512).phases[1]
    assert fixed.total_bytes == 2 * 1000 * 8 * 128 * 4
    assert fixed.largest_bytes == 512 * 128 * 4  # 2 x 8 heads of 512 and 488 keys on 132 blocks
    assert sorted(set(fixed.block_bytes)) == [0, 488 * 128 * 4, 512 * 128 * 4]


def test_a_cache_of_eight_bits_is_half_as_many_bytes():
    bf16, e4m3 = (report_of(LLAMA_8B, context=1000, kv_dtype=name) for name in ("bf16", "e4m3"))
    assert e4m3.step_bytes.kv * 2 == bf16.step_bytes.kv == bf16.phases[1].step_bytes
    assert e4m3.phases[1].step_bytes == e4m3.step_bytes.kv
    assert dict(e4m3.summary())["KV a step"] == "0.066 GB (e4m3)"


def test_exchanges_are_eight_a_layer_and_five_a_step():
    assert report_of(LLAMA_8B).exchanges_per_step == 261
    assert report_of(TINY, "emulator").exchanges_per_step == 37


def test_summary_names_machine_bytes_and_rate():
    rows = dict(report_of(LLAMA_8B).summary())
    assert rows["bytes a step"] == "15.010 GB" and rows["tokens/s at the ceiling"] == "314"
    assert rows["machine"] == "h200: 132 blocks, 4720 GB/s"
    assert rows["columns"] == "1 tokens a step at most; attention tiles of 1"
    assert rows["slices of down"] == "its input in 2 parts"


def test_summary_names_narrow_m_tiles_where_there_are():
    assert dict(report_of(LLAMA_3B).summary())["M-tiles of o, down"] == "narrow: 8 rows, 3 a block at most"
    assert "M-tiles of o, down" not in dict(report_of(LLAMA_8B).summary())


def test_summary_names_columns_and_slices():
    report = report_of(LLAMA_8B, batch=3)
    rows = dict(report.summary())
    assert rows["context"] == "1 tokens, batch 3"
    assert rows["columns"] == "4 tokens a step at most; attention tiles of 4"
    assert rows["slices of down"] == "its input in 4 parts"
    assert report.ceiling_tokens_per_s == pytest.approx(3e3 / report.ceiling_ms)
    assert dict(report_of(LLAMA_8B, tokens=16).summary())["columns"].endswith("attention tiles of 4")
    assert dict(report_of(LLAMA_8B, tokens=16, consumer_warps=4).summary())["columns"].endswith("attention tiles of 4")


def test_contexts_beyond_the_plan_are_refused():
    with pytest.raises(PlanError, match=r"context is 9000: the plan holds 1 to 8192 tokens \(max_context\)"):
        report_of(LLAMA_8B, context=9000)
    with pytest.raises(PlanError, match="context is 0"):
        report_of(LLAMA_8B, context=0)


@pytest.mark.slow
def test_the_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "shares.png"
    plot_shares(report_of(LLAMA_8B, context=1000), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_a_plot_that_cannot_be_written_is_a_clear_error(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(PlanError, match="cannot be written to .*none"):
        plot_shares(report_of(TINY), tmp_path / "none" / "shares.png")
    with pytest.raises(PlanError, match="cannot be written to .*xyz"):
        plot_shares(report_of(TINY), tmp_path / "shares.xyz")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlanError, match=r"pip install '\.\[plot\]' in Cheetah's checkout"):
        plot_shares(report_of(TINY), tmp_path / "shares.png")
