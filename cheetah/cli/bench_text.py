"""`cheetah bench --speculative K --text FILE`: what drafts are worth on real text, answered by the model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cheetah.cli.configs import RANDOM
from cheetah.cli.measured import Measured
from cheetah.cli.tables import console, table_of
from cheetah.errors import CheetahError

if TYPE_CHECKING:
    from cheetah.tools.text_bench import Answered


@dataclass(frozen=True)
class TextAsked:
    """drafts: of a step, at most. model: drafts them, a model's name or mtp; None: they are looked up. file: has the
    prompts. max_tokens: of an answer. write: takes a record of each prompt."""

    drafts: int
    model: str | None
    file: str
    max_tokens: int
    write: Callable[[dict[str, Any]], None]
    shows: bool


def bench_text(model: str, measured: Measured, asked: TextAsked, load: dict[str, Any]) -> None:
    """Answers the prompts of a file with drafts and without."""
    if model.startswith(RANDOM):
        raise CheetahError(f"--text: {model} has made-up weights, which soon repeat themselves: give a real model")
    from cheetah.cli.measured import circumstances_of
    from cheetah.runtime import LLM
    from cheetah.runtime.speculation import drafting_by
    from cheetah.tools.text_bench import measured_text, prompts_of, text_record

    prompts = prompts_of(_text_of(asked.file))
    config = drafting_by(asked.model) | {"num_speculative_tokens": asked.drafts}
    with LLM(model, **load, plan=measured.plan, speculative_config=config, quiet=True) as llm:
        circumstances = circumstances_of(measured.name, measured.config, measured.weights, llm.assembly.device)
        found = measured_text(llm, prompts, asked.max_tokens)
    for number, one in enumerate(found):
        asked.write(text_record(one, number, circumstances | {"drafts": asked.drafts, "draft_model": asked.model}))
    if asked.shows:
        _print(circumstances, asked, found)


def _text_of(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise CheetahError(f"--text {file}: cannot be read: {problem}") from None


def _print(circumstances: dict[str, Any], asked: TextAsked, found: Sequence[Answered]) -> None:
    title = (
        f"{circumstances['model']}, weights {circumstances['weights']}, up to {asked.drafts} drafts a step"
        f"{f' by {asked.model}' if asked.model is not None else ''}",
        f"commit {circumstances['commit']}",
        f"{circumstances['gpu']}, {circumstances['driver']}",
    )
    figures = ("prompt", "tokens", "answer", "mean length", "accepted", "tokens/s", "without drafts")
    rows = [_row(str(number), one) for number, one in enumerate(found)]
    shown = console()
    shown.print(table_of(title, figures, [*rows, _row("all", reduce(add, found))]))
    shown.print("identical: yes, every answer is the one that is made without drafts, which ran in the same engine")
    shown.print("mean length: tokens that a step makes, over all steps of an answer; greedy, by the host's clock")


def _row(name: str, one: Answered) -> tuple[str, ...]:
    accepted = f"{one.drafted.accepted} of {one.drafted.tokens}"
    rates = f"{one.tokens_per_s:.1f}", f"{one.plain_tokens_per_s:.1f}"
    return name, str(one.prompt_tokens), str(one.tokens), f"{one.mean_length:.2f}", accepted, *rates
