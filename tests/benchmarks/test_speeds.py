"""`benchmarks.speeds` and `benchmarks.held` in the emulator: which records they make; none passes for a speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import held, speeds
from benchmarks.table import README_WORKS
from cheetah.cli.configs import named_config
from cheetah.tools.bench import check_depths

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.compiler
def test_a_record_of_each_work_and_each_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(speeds.GROUPS, "int4", (speeds.Job("demo", "5,20"),))
    target = tmp_path / "records.jsonl"
    once = f"--steps 2 --repetitions 1 --rests 0,0.01 --device emulator --json {target}"
    assert speeds.main(["int4", *once.split()]) == 0
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(one["context"], one["rest_s"]) for one in records] == [(5, 0.0), (5, 0.01), (20, 0.0), (20, 0.01)]
    assert all(one["note"] == "emulated: not a speed" for one in records)
    table = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[:2] for line in table] == [["demo", "5"], ["demo", "20"]]
    assert all("0 s: " in line and "0.01 s: " in line for line in table)


def test_what_is_out_of_time_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert speeds.main(["70b", "--budget-s", "-1", "--device", "emulator"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 kernels were left out"


def test_every_job_is_one_that_its_model_can_do() -> None:
    for job in (job for group in speeds.GROUPS.values() for job in group):
        config = named_config(f"random:{job.model}").config
        for work in job.works:
            check_depths(config, work.contexts, speeds.STEPS * work.per_step)


def test_every_work_of_the_tables_is_in_a_group() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    rows = results[results.index("<!-- speeds") : results.index("<!-- end of speeds -->")].splitlines()[3:]
    written = {tuple(cell.strip() for cell in row.split("|")[1:3]) for row in rows}
    assert written <= works_of(*jobs())
    assert works_of(*speeds.GROUPS["readme"]) == set(README_WORKS)


def jobs() -> list[speeds.Job]:
    return [job for group in speeds.GROUPS.values() for job in group]


def works_of(*jobs: speeds.Job) -> set[tuple[str, str]]:
    """The models and works of jobs, as tables name them."""
    return {(job.model, speeds.work_of(work)) for job in jobs for work in as_records(job)}


def as_records(job: speeds.Job) -> list[dict[str, object]]:
    """As records tell the works of a job."""
    return [
        {
            "contexts": list(work.contexts),
            "shared": work.shared,
            "per_step": work.per_step,
            "plan": {"kv_dtype": job.kv_dtype},
        }
        for work in job.works
    ]


@pytest.mark.slow
@pytest.mark.compiler
def test_what_was_held_is_a_record_too(tmp_path: Path) -> None:
    target = tmp_path / "records.jsonl"
    once = f"--context 5 --seconds 0.01 --steps 2 --device emulator --json {target}"
    assert held.main(["random:demo", *once.split()]) == 0
    (found,) = (json.loads(line) for line in target.read_text().splitlines())
    assert found["held_s"] > 0 and found["note"] == "emulated: not a speed" and found["samples"] == []
    assert found["repetitions"] == len(found["ms_per_step_samples"])


def test_the_first_second_and_the_last_two_of_what_was_held() -> None:
    """A launch of 100 steps takes a fifth of a second, the last of 5 s a fourth."""
    found = held.of_time([2.0] * 10 + [2.1] * 5 + [2.5] * 8, 100)
    assert found == {"held_s": 5.05, "first_second_ms": 2.0, "last_seconds_ms": 2.5}
    assert held.of_time([30.0], 100) == {"held_s": 3.0, "first_second_ms": 30.0, "last_seconds_ms": 30.0}
