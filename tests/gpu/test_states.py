"""What sequences remember on the GPU, of a model of real shapes: kept for others, and of drafts that were right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cheetah import LLM, SamplingParams

pytestmark = pytest.mark.gpu

TEXT = [int(token) for token in np.random.default_rng(3).integers(5, 5000, 900)]
Answers = list[tuple[int, ...]]


def opened(**options: Any) -> LLM:
    chosen: dict[str, Any] = {"batch": 4, "max_context": 2048, "kv_chunk": 512, "tokenizer": False, **options}
    return LLM("random:qwen3.5-0.8b", device="cuda", quiet=True, **chosen)


def asked(llm: LLM, *prompts: list[int], **more: Any) -> tuple[Answers, int]:
    """The answers of each prompt, and how many tokens of them were cached."""
    params = SamplingParams(max_tokens=48, ignore_eos=True, **{"temperature": 0.0, **more})
    found: Any = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return [one.token_ids for output in found for one in output.outputs], sum(
        one.timings.cached_tokens for one in found
    )


def talk(llm: LLM) -> list[tuple[Answers, int]]:
    """Three turns, then several answers to the first one's prompt, and one that parts from it."""
    ids, found = TEXT[:700], []
    for turn in range(3):
        found.append(asked(llm, ids))
        ids = [*ids, *found[-1][0][0], *TEXT[turn * 40 : turn * 40 + 90]]
    found.append(asked(llm, TEXT[:700], temperature=1.0, seed=7, n=3))
    parted = [*TEXT[:350], *TEXT[500:700]]
    return [*found, asked(llm, parted), asked(llm, [*parted[:400], 7, 8], parted)]


def test_answers_behind_kept_states_are_those_of_prompts_read_whole() -> None:
    with opened(prefix_cache=False) as llm:
        whole = talk(llm)
    with opened() as llm:
        kept = talk(llm)
    assert [answers for answers, _ in kept] == [answers for answers, _ in whole]
    assert not any(count for _, count in whole)
    (first, *turns), several, (parts, again) = [count for _, count in kept[:3]], kept[3][1], (kept[4][1], kept[5][1])
    assert first == 0 and all(count >= 688 for count in turns) and several == 688 and parts == 0 and again >= 2 * 336


def test_drafts_change_no_answer() -> None:
    """Of few tokens, which repeat themselves, and of several sequences with columns of their own."""
    repeating, hot = (TEXT[:40] * 9)[:350], {"temperature": 0.8, "seed": 3, "allowed_token_ids": TEXT[:3]}
    prompts = [repeating, TEXT[:200], TEXT[300:333]]
    with opened() as llm:
        wanted = [asked(llm, *prompts)[0], asked(llm, *prompts, **hot)[0]]
    with opened(speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        assert [asked(llm, *prompts)[0], asked(llm, *prompts, **hot)[0]] == wanted
        alone = [asked(llm, one)[0][0] for one in prompts]
        assert alone == wanted[0] and llm.engine.engine.load().decoded.drafted.accepted > 10
