"""Drafts of other models on several GPUs: the drafts and the answers of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cheetah.plan import PlanError
from cheetah.runtime import LLM
from tests.runtime import test_block_drafts as of_blocks
from tests.runtime import test_draft_head as of_heads
from tests.runtime import test_draft_model as of_models
from tests.runtime import test_mtp as of_mtp
from tests.runtime.test_draft_model import asked, drafted_in, ids_of
from tests.runtime.test_speculation import ASKED, TEXT
from tests.tiers import tiered

HYBRID = replace(
    of_mtp.hybrid(2, 1, (0,), layers=2, heads=2, dims=128), hidden_size=64, intermediate_size=64, kv_heads=2
)
KINDS: dict[str, tuple[Callable[[Path], Any], Callable[..., LLM]]] = {
    "model": (lambda folder: "demo", of_models.drafted_by),
    "head": (of_heads.head_in, of_heads.drafted_by),
    "block": (of_blocks.drafter, of_blocks.drafted_by),
    "mtp": (lambda folder: of_mtp.folder_in(folder.parent, HYBRID), of_mtp.opened),
}
"""What drafts, and an `LLM` for which it does. Of the head's 25 M-tiles of tokens the second rank has 12."""


class Found(NamedTuple):
    """Answers in company; drafts of rounds on the device, by the ids before them; which part of those was right."""

    answers: list[list[tuple[int, ...]]]
    drafts: dict[tuple[int, ...], tuple[int, ...]]
    right: float


def found_by(llm: LLM, kind: str, patch: pytest.MonkeyPatch) -> Found:
    drafts: dict[tuple[int, ...], tuple[int, ...]] = {}
    with of_blocks.knows(llm, of_blocks.RANK) if kind == "block" else nullcontext():
        prompt: Any = {"prompt_token_ids": of_mtp.PROMPT} if kind == "mtp" else TEXT
        skipped = int(kind in ("head", "mtp"))
        drafted = drafted_in(llm, lambda: drafts.update(of_heads.drafts_of_rounds(llm, patch, skipped, prompt)))
        kinds = [ASKED[0], ASKED[1 if kind == "mtp" else 5]]
        answers = llm.generate([prompt] * 2, asked(kinds, True, 12), use_tqdm=False)
    return Found(ids_of(answers), drafts, drafted.accepted / drafted.tokens)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("kind", tiered(KINDS, ["model", "head", "mtp"]))
def test_drafts_and_answers_of_two_ranks_are_those_of_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts that steps read: passes by two ranks have one's bits where 256 divides the hidden size."""
    made, opened = KINDS[kind]
    drafter, found = made(tmp_path / "drafter"), list[Found]()
    for ranks in (1, 2):
        options: dict[str, Any] = {"batch": 2, "max_context": 96, "plan": {"tokens": 8, "page_size": 16}}
        with opened(drafter, prompt_passes=False, tensor_parallel_size=ranks, **options) as llm:
            found.append(found_by(llm, kind, monkeypatch))
    one, two = found
    both = one.drafts.keys() & two.drafts.keys()
    assert two.answers == one.answers and min(one.right, two.right) > (0.15 if kind == "mtp" else 0.2)
    assert len(both) > 3 and all(one.drafts[ids] == two.drafts[ids] for ids in both)


def test_what_cannot_be_shared_out_is_refused_by_name(tmp_path: Path) -> None:
    said = "speculative_config: of what drafts, a step by 4 GPUs: 2 heads with 1 KV heads cannot be dealt evenly"
    with pytest.raises(PlanError, match=said):
        of_blocks.drafted_by(of_blocks.drafter(tmp_path / "drafter"), tensor_parallel_size=4, prompt_passes=False)
