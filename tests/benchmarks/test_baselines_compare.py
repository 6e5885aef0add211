"""`benchmarks/compare.py` with contestants that are made up: order, failures, ceilings, table. No torch is needed."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.baselines import gpt_fast
from cheetah.models.registry import preset


class Fake:
    """Answers with one record a turn; `fails_at`: the turn that does not work, -1 for getting ready."""

    def __init__(self, name: str, log: list[str], fails_at: int | None = None, ceiling: float | None = 4700.0) -> None:
        self.name, self.model, self.failure = name, "m", ""
        self._log, self._fails_at, self._ceiling, self._turn = log, fails_at, ceiling, 0
        self.closed = False

    def wait_ready(self, deadline: float) -> None:
        if self._fails_at == -1:
            raise compare.Failed("it never was ready")

    def turn(self, deadline: float) -> list[dict[str, Any]]:
        self._log.append(self.name)
        self._turn += 1
        if self._fails_at == self._turn - 1:
            raise compare.Failed("it broke")
        share = None if self._ceiling is None else 0.5
        figures = {"tokens_per_s": 100.0 * self._turn, "ms_per_step": 10 / self._turn, "gb_per_s": 2350.0}
        place = {"system": self.name, "model": "m", "context": 5}
        return [{**place, **figures, "ceiling_gb_per_s": self._ceiling, "share": share}]

    def close(self) -> None:
        self.closed = True


def compete(tmp_path: Path, fakes: Sequence[Any], seconds: float = 60.0) -> list[dict[str, Any]]:
    options = argparse.Namespace(rounds=3, json=tmp_path / "records.jsonl")
    return compare.compete(fakes, options, time.monotonic() + seconds)


def test_the_order_alternates_and_every_record_is_written(tmp_path: Path) -> None:
    log: list[str] = []
    records = compete(tmp_path, [Fake("a", log), Fake("b", log)])
    assert "".join(log) == "abbaab"
    written = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert written == records
    assert [record["round"] for record in records] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("fails_at", "turns"), [(-1, 0), (0, 1), (1, 2)])
def test_a_failing_system_harms_no_other(tmp_path: Path, fails_at: int, turns: int) -> None:
    log: list[str] = []
    bad = Fake("bad", log, fails_at)
    records = compete(tmp_path, [bad, Fake("good", log)])
    assert [record["system"] for record in records].count("good") == 3
    assert log.count("bad") == turns
    assert bad.failure and bad.closed


def test_no_turn_begins_when_the_time_is_over(tmp_path: Path) -> None:
    log: list[str] = []
    assert compete(tmp_path, [Fake("a", log)], seconds=-1.0) == []
    assert log == []


def test_a_ceiling_is_lent_and_said_to_be(tmp_path: Path) -> None:
    records = compete(tmp_path, [Fake("a", []), Fake("b", [], ceiling=None)])
    lent = [record for record in records if record["system"] == "b"]
    assert all(record["share"] == 0.5 and "another system" in record["settings"]["ceiling"] for record in lent)
    assert all("settings" not in record for record in records if record["system"] == "a")


def test_the_table_has_medians_and_keeps_models_and_contexts_together(tmp_path: Path) -> None:
    records = compete(tmp_path, [Fake("a", []), Fake("b", [])])
    lines = compare.table(records).splitlines()
    assert [line.split()[0] for line in lines] == ["system", "a", "b"]
    assert lines[1].split() == ["a", "m", "5", "200.0", "100.0", "200.0", "300.0", "5.0000", "50.0%"]


def test_a_batch_is_told_beside_systems_that_have_one_sequence() -> None:
    figures = {"model": "m", "context": 5, "tokens_per_s": 1.0, "ms_per_step": 1.0, "share": None}
    records = [{"system": "a", **figures}, {"system": "b", "batch": 8, "per_step": 1, **figures}]
    records.append({"system": "b", "batch": 1, "per_step": 16, **figures})
    systems = [line.split("  ")[0] for line in compare.table(records).splitlines()]
    assert systems == ["system", "a", "b, batch 8", "b, tokens a step 16"]


def test_an_unknown_system_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parser().parse_args(["--systems", "cheetah,vlm"])
    assert "'vlm': choose from cheetah, plain, transformers" in capsys.readouterr().err


def test_a_process_that_ends_is_a_failure_with_its_code(tmp_path: Path) -> None:
    options = compare.parser().parse_args(["--device", "cpu", "--contexts", "5"])
    baseline = compare.Baseline("no-such-system", "demo", options, tmp_path / "lock")
    with pytest.raises(compare.Failed, match="exit code 2"):
        baseline.wait_ready(time.monotonic() + 60)
    baseline.close()


@pytest.mark.parametrize("named", [(), ("--gpt-fast", "nowhere")])
def test_gpt_fast_is_fetched_by_its_user(named: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    """Without a clone one line says where to get it; nothing is imported or measured instead."""
    command = [sys.executable, "-m", "benchmarks.baselines", "gpt-fast", "random:llama-3.1-8b", *named]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 1
    assert "git clone https://github.com/meta-pytorch/gpt-fast" in done.stderr and "Traceback" not in done.stderr


def test_a_file_that_is_no_model_of_gpt_fast_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("ModelArgs = None\n")
    with pytest.raises(gpt_fast.GptFastError, match="Transformer not there"):
        gpt_fast.load_model_file(gpt_fast.model_file(tmp_path))


def test_a_clone_is_found_by_its_name_as_what_compiles_it_needs(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("class ModelArgs: ...\nclass Transformer: ...\n")
    module = gpt_fast.load_model_file(tmp_path / "model.py")
    assert importlib.import_module(module.__name__) is module


def test_gpt_fast_is_given_the_sizes_of_the_preset() -> None:
    arguments = gpt_fast.model_arguments(preset("llama-3.1-8b"), 256)
    assert arguments["dim"] // arguments["n_head"] == 128 and arguments["n_local_heads"] == 8
    assert (arguments["block_size"], arguments["intermediate_size"]) == (256, 14336)


@pytest.mark.parametrize("script", ["studies.sh", "baselines.sh"])
def test_a_script_says_how_it_is_used(script: str) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / script
    done = subprocess.run([path], capture_output=True, text=True)
    assert done.returncode != 0 and f"usage: benchmarks/{script} RESULTS.jsonl" in done.stderr
