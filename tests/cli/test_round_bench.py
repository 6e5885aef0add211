"""`cheetah bench --speculative`: made-up mean lengths, said to be so, of launches whose tokens are checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import cheetah, refused

from cheetah.tools.round_bench import drafts_for, parsed_lengths_of_rounds, round_ends
from tests.program.test_hybrids import hybrid


@pytest.mark.parametrize("length", [1, 1.5, 2.96, 4.59, 8])
def test_steps_of_a_mean_length(length: float) -> None:
    ends = round_ends(100, length)
    made = [after - before for before, after in zip([0, *ends], ends, strict=False)]
    assert set(made) <= {int(length), int(length) + 1} and ends[-1] == pytest.approx(100 * length)


def test_a_draft_is_wrong_where_a_step_shall_end() -> None:
    assert drafts_for([5, 6, 7, 8, 9], [2, 3, 5], 10) == [5, 7, 8, 8]


def test_what_is_asked_for() -> None:
    assert parsed_lengths_of_rounds("7:1,2.5") == (7, [1.0, 2.5])
    assert parsed_lengths_of_rounds("3") == (3, [1.0, 4.0])


@pytest.mark.parametrize("asked", ["0:1", "7:9", "7:0.5", "seven", "7:1,x"])
def test_refused(asked: str) -> None:
    assert "--speculative" in refused("bench", "random:demo", "--speculative", asked)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.compiler
def test_launches_of_a_model_that_remembers_begin_alike(tmp_path: Path) -> None:
    """Gated DeltaNet: a launch that began with the states of the one before had other tokens."""
    config = hybrid(1, 2, (0, 1, 2), layers=4, heads=2, dims=128)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    quick = ("--device", "emulator", "--steps", "4", "--repetitions", "1", "--warmup", "1", "--contexts", "20")
    asked = ("bench", f"random:{tmp_path}", "--gpu", "emulator-2", "--speculative", "3:1,2.5", *quick)
    assert "identical: yes" in cheetah(*asked).stdout


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.usefixtures("kernels_made_once")
def test_lines_and_a_table() -> None:
    quick = ("--device", "emulator", "--steps", "4", "--repetitions", "1", "--warmup", "0", "--contexts", "20")
    asked = ("bench", "random:demo", "--speculative", "3:1,2.5,4", *quick)
    lines = [json.loads(line) for line in cheetah(*asked, "--json", "-").stdout.splitlines()]
    assert [(one["drafts"], one["synthetic_mean_length"]) for one in lines] == [(0, 1), (3, 1), (3, 2.5), (3, 4)]
    for one in lines:
        assert one["identical"] and one["tokens_per_s"] == pytest.approx(
            1e3 * one["synthetic_mean_length"] / one["ms_per_step"], rel=1e-3
        )
    shown = cheetah(*asked).stdout
    assert "synthetic mean length" in shown and "identical: yes" in shown and "not a speed" in shown
