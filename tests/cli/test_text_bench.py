"""`cheetah bench --speculative K --text FILE`: real text, whose answers are compared in the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import cheetah, refused

from cheetah.errors import CheetahError
from cheetah.runtime.engine.drafting import Drafted
from cheetah.tools.text_bench import Answered, answered, prompts_of

TEXT = "the cat sat on the mat and the cat sat on the mat and the cat\n---\nOne morning,\n---\n\n"


def test_prompts_lie_between_lines() -> None:
    assert prompts_of(TEXT) == [TEXT.partition("\n")[0], "One morning,"]
    assert prompts_of("a --- b\n\nc\n") == ["a --- b\n\nc"]
    with pytest.raises(CheetahError, match="no prompt"):
        prompts_of("\n---\n \n")


def test_a_mean_length_is_over_all_steps() -> None:
    one, other = Answered(9, 31, 20, Drafted(5, 35, (10,)), 2.0, 3.0), Answered(3, 11, 10, Drafted(), 1.0, 1.0)
    assert one.mean_length == 1.5 and other.mean_length == 1.0 and (one + other).mean_length == pytest.approx(4 / 3)
    assert (one.tokens_per_s, one.plain_tokens_per_s) == (15.0, 10.0) and (one + other).prompt_tokens == 12


@pytest.mark.parametrize("asked", [["--speculative", "7:2"], [], ["--speculative", "x"]])
def test_made_up_lengths_and_weights_are_refused(tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "text").write_text(TEXT)
    assert "--speculative 7" in refused("bench", "demo", "--text", str(tmp_path / "text"), *asked)
    named = ("--text", str(tmp_path / "text"), "--speculative", "7")
    assert "made-up weights" in refused("bench", "random:demo", *named)
    assert "cannot be read" in refused("bench", "demo", "--text", str(tmp_path / "nothing"), *named[2:])
    assert "give --text" in refused("bench", "demo", "--draft-model", "demo")


@pytest.mark.slow
@pytest.mark.compiler
def test_lines_of_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    asked = ("bench", "demo", "--text", str(tmp_path / "text"), "--speculative", "3", "--max-tokens", "6")
    quick = ("--device", "emulator", "--max-context", "64")
    shown = cheetah(*asked, *quick).stdout
    assert "identical: yes" in shown and "mean length" in shown
    lines = [json.loads(line) for line in cheetah(*asked, *quick, "--json", "-").stdout.splitlines()]
    assert [(one["prompt"], one["drafts"], one["tokens"], one["identical"]) for one in lines] == [
        (number, 3, 6, True) for number in range(2)
    ]
    assert all(1.0 <= one["mean_length"] <= 4.0 for one in lines)


def test_other_tokens_are_no_speed() -> None:
    class Output:
        def __init__(self, *ids: int) -> None:
            self.token_ids = ids

    class Changed:
        def generate(self, prompt: str, asked: Any) -> Output:
            return Output(1, 2, 4 if asked.speculation else 3)

    with pytest.raises(CheetahError, match="drafts changed token 2 of an answer"):
        answered(Changed(), "x", 3)  # type: ignore[arg-type]
