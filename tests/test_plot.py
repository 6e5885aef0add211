"""`benchmarks/plot.py` on made-up records: which record is on which line, and what is drawn of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plot import PlotError, columns_of, draw, main, read_records


def record(context: int, tokens_per_s: float, system: str = "cheetah", **more: Any) -> dict[str, Any]:
    ms = 1e3 / tokens_per_s
    return {
        "model": "llama-3.1-8b",
        "weights": "bf16 random",
        "batch": 1,
        "gpu": "NVIDIA H200",
        "system": system,
        "context": context,
        "tokens_per_s": tokens_per_s,
        "ms_per_step": ms,
        "ms_per_step_samples": [ms * 0.5, ms, ms * 2],
        "share": 0.9,
        "plan": {"sync": "flags"},
        **more,
    }


def written(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def test_a_line_is_a_system_in_ascending_context_and_the_last_record_counts() -> None:
    records = [record(6144, 200.0), record(128, 100.0), record(128, 250.0), record(128, 160.0, "gpt-fast")]
    (lines,) = columns_of(records).values()
    assert {label: [(one["context"], one["tokens_per_s"]) for one in line] for label, line in lines.items()} == {
        "cheetah": [(128, 250.0), (6144, 200.0)],
        "gpt-fast": [(128, 160.0)],
    }


def test_random_weights_share_a_column_with_others_and_other_models_do_not() -> None:
    records = [record(1, 10.0), record(2, 10.0, weights="bf16"), record(1, 10.0, model="llama-3.2-1b")]
    columns = columns_of([*records, record(1, 10.0, batch=2), record(1, 10.0, weights="int4")])
    assert [title.partition("\n")[0] for title in columns] == [
        "llama-3.1-8b bf16, batch 1",
        "llama-3.1-8b bf16, batch 2",
        "llama-3.1-8b int4, batch 1",
        "llama-3.2-1b bf16, batch 1",
    ]


def test_what_a_step_does_besides_has_a_column_of_its_own() -> None:
    eight = {"batch": 8, "contexts": [128] * 8, "shared": 0, "per_step": 1}
    records = [record(128, 10.0, **eight), record(128, 10.0, **{**eight, "shared": 64})]
    records += [record(128, 10.0, per_step=32), record(128, 10.0, batch=2, contexts=[128, 500])]
    assert [title.partition("\n")[0] for title in columns_of(records)] == [
        "llama-3.1-8b bf16, batch 1, 32 tokens a step",
        "llama-3.1-8b bf16, batch 2, contexts 128+500",
        "llama-3.1-8b bf16, batch 8",
        "llama-3.1-8b bf16, batch 8, 64 tokens shared",
    ]


@pytest.mark.slow
def test_samples_of_a_batch_count_the_tokens_of_all_sequences() -> None:
    pytest.importorskip("matplotlib")
    eight = record(128, 800.0, batch=8, ms_per_step=10.0, ms_per_step_samples=[8.0, 10.0, 16.0])
    bars = draw(columns_of([eight])).axes[0].containers[0]
    slowest, fastest = bars.lines[2][0].get_segments()[0]
    assert (slowest[1], fastest[1]) == (pytest.approx(500.0), pytest.approx(1000.0))


def test_lines_by_a_field_of_the_plan() -> None:
    records = [record(1, 10.0), record(1, 9.0, plan={"sync": "barrier"}), record(1, 8.0, "gpt-fast", plan=None)]
    (lines,) = columns_of(records, ["system", "plan.sync"]).values()
    assert list(lines) == ["cheetah, barrier", "cheetah, flags", "gpt-fast, -"]


@pytest.mark.slow
def test_the_figure_shows_speeds_shares_and_samples() -> None:
    pytest.importorskip("matplotlib")
    records = [record(128, 280.0), record(6144, 260.0, share=None), record(128, 600.0, model="llama-3.2-1b")]
    figure = draw(columns_of(records))
    speeds, _, shares, _ = figure.axes
    bars = speeds.containers[0]
    assert bars.lines[0].get_xydata().tolist() == [[128, 280.0], [6144, 260.0]]
    slowest, fastest = bars.lines[2][0].get_segments()[0]
    assert (slowest[1], fastest[1]) == (pytest.approx(140.0), pytest.approx(560.0))
    assert shares.lines[0].get_xydata().tolist() == [[128, 90.0]]


@pytest.mark.slow
def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    source = written(tmp_path / "a.jsonl", record(0, 280.0), record(32768, 210.0), record(128, 160.0, "gpt-fast"))
    main([str(source), "-o", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_the_emulator_is_not_drawn(tmp_path: Path) -> None:
    source = written(tmp_path / "a.jsonl", record(1, 10.0, note="emulated: not a speed"))
    assert read_records([source]) == []
    with pytest.raises(PlotError, match="no record of a speed"):
        draw({})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}\n", "a.jsonl:1: the record has no context, model"),
        ("\n{\n", "a.jsonl:2: no JSON record"),
        ("3\n", "a.jsonl:1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, words: str) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(text)
    with pytest.raises(PlotError, match=words):
        read_records([source])


def test_a_missing_file_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="nowhere.jsonl: cannot be read"):
        main([str(tmp_path / "nowhere.jsonl"), "-o", str(tmp_path / "a.png")])
