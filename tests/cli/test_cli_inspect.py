"""`cheetah inspect`: its numbers are the report's."""

import re
from pathlib import Path

import pytest
from commands import cheetah, refused

from cheetah.generate import choose_plan
from cheetah.models.dense.page import page_of
from cheetah.models.registry import preset
from cheetah.plan import gpu_named
from cheetah.plan.report import inspect_plan


def row(text: str, name: str) -> list[str]:
    """The cells of the first line that begins with `name`."""
    cells = ([cell.strip() for cell in line.strip("│ ").split("│")] for line in text.splitlines())
    return next(found for found in cells if found[0].startswith(name))


def test_prints_the_report() -> None:
    gpu, config = gpu_named("h200"), preset("llama-3.1-8b")
    report = inspect_plan(config.shape, choose_plan(config, gpu, sync="barrier"), gpu, 6144)
    text = cheetah("inspect", "llama-3.1-8b", "--context", "6144", "--sync", "barrier").stdout
    for phase in report.phases:
        assert row(text, phase.name)[1:6] == [
            str(phase.runs),
            f"{phase.smallest_bytes / 1e3:.1f}",
            f"{phase.mean_bytes / 1e3:.1f}",
            f"{phase.largest_bytes / 1e3:.1f}",
            f"{phase.imbalance_percent:.1f} %",
        ]
    for what, value in report.summary():
        assert any(line.startswith(what) and value in line for line in text.splitlines()), what
    assert f"{report.shared.total_bytes}" in text and "6144 tokens" in text


def test_a_batch_has_columns_and_slices() -> None:
    text = cheetah("inspect", "llama-3.1-8b", "--batch", "8").stdout
    assert "1024 tokens, batch 8" in text and "8 tokens a step at most" in text and "its input in 4 parts" in text
    assert "newest (over scratch)" in text


@pytest.mark.slow
def test_draws_the_shares(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cheetah("inspect", "demo", "--plot", tmp_path / "shares.png")
    assert (tmp_path / "shares.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_bytes_by_format() -> None:
    text = cheetah("inspect", "llama-3.1-8b@int4-g128").stdout
    layers = 32 * (4096 * (6144 + 4096 + 2 * 14336) + 14336 * 4096)  # 4 bits each, and a scale of 16 bits for 128
    found = re.search(r"int4-g128 ([0-9.]+) GB, bf16 1.051 GB", text)
    assert found is not None and float(found[1]) == pytest.approx(layers * (4 + 16 / 128) / 8 / 1e9, rel=0.005)
    assert "weights a step           15.009 GB (bf16)" in cheetah("inspect", "llama-3.1-8b").stdout


def test_tells_what_passes_over_prompts_take() -> None:
    text = cheetah("inspect", "llama-3.1-8b", "--batch", "8").stdout
    assert re.search(r"2048 +\S +256 +\S +\d{6} +\S +210", text), text


def test_a_context_that_the_plan_does_not_hold_is_refused() -> None:
    assert "context is 513" in refused("inspect", "demo", "--context", "513")


def test_h100_and_plan_options() -> None:
    text = cheetah("inspect", "llama-3.2-1b", "--gpu", "h100", "--stages", "5").stdout
    assert "h100: 132 blocks" in text and "5 stages" in text


def test_phases_are_those_of_the_page_and_of_a_pass() -> None:
    text = cheetah("inspect", "llama-3.1-8b", "--phases").stdout
    step, of_pass = text.split("\n\na pass of 2048 tokens\n")
    assert str(page_of(preset("llama-3.1-8b"))) in step and step.startswith("a step\n")
    assert "queries, keys, values" in of_pass and "hidden states" in of_pass


def test_the_layer_that_drafts_reads_the_models_head_in_four_bits() -> None:
    text = cheetah("inspect", "qwen3.5-27b@fp8-block128", "--mtp").stdout
    assert "weights a step           1.138 GB (bf16 0.105 GB, fp8-block128 0.376 GB," in text
    assert "int4-g128 0.658 GB)" in text
    assert "has no layer that drafts which is read here" in refused("inspect", "qwen3-8b", "--mtp")
