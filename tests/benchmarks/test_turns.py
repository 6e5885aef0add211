"""`benchmarks.turns` in the emulator: a tree beside itself, and what a tree that fails leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import turns

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.compiler
def test_a_tree_beside_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "records.jsonl"
    once = f"{ROOT} demo:1:5 --turns 1 --device emulator --after-device emulator --json {target}"
    assert turns.main(once.split()) == 0
    (record,) = (json.loads(line) for line in target.read_text().splitlines())
    assert record["model"] == "demo" and len(record["before_ms"]) == len(record["after_ms"]) == 1
    assert "->" in capsys.readouterr().out


def test_a_line_tells_by_how_much_the_medians_differ() -> None:
    work = turns.TurnWork.parse("llama-3.1-8b@int4-g128:8:128")
    record = {"before_ms": [2.0, 2.0, 2.2], "after_ms": [1.9, 1.98, 2.0], "before_share": [0.8], "after_share": [0.9]}
    line = turns.line_of(work, record)
    assert "-1.00 %" in line and "differ by 10.0 / 5.1 %" in line and line.endswith("80.0  90.0 % of the ceiling")


@pytest.mark.slow
def test_a_tree_whose_process_ends_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert turns.main([str(tmp_path), "no-such-model:pass:16", "--device", "emulator"]) == 1
    assert "ended with code 1" in capfd.readouterr().err
