"""`benchmarks.identical`: what it asks, and that it tells an answer that differs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import identical
from cheetah.runtime import SamplingParams
from cheetah.runtime.engine.drafting import Drafted
from cheetah.runtime.engine.requests import Decoded


class Remembering:
    """Answers like an `LLM` whose tokens follow from prompt and seed; with drafts each `wrong`-th answer is another."""

    def __init__(self, wrong: int = 0) -> None:
        self.config = SimpleNamespace(vocab_size=50)
        self.engine = SimpleNamespace(engine=self)
        self.together: list[int] = []
        self._wrong, self._made = wrong, 0

    def load(self) -> Any:
        return SimpleNamespace(decoded=Decoded(steps=self._made, drafted=Drafted(1, self._made, (self._made // 2,))))

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], use_tqdm: bool) -> list[Any]:
        self.together.append(len(prompts))
        return [self._answer(prompt, one) for prompt, one in zip(prompts, params, strict=True)]

    def _answer(self, prompt: list[int], params: SamplingParams) -> Any:
        ids = [(sum(prompt) + (params.seed or 0) + place) % 50 for place in range(params.max_tokens or 0)]
        if params.speculation:
            self._made += 1
            assert len(params.prediction) == len(ids) and [*params.prediction] != ids
            if self._wrong and self._made % self._wrong == 0:
                ids[-1] = 51
        return SimpleNamespace(token_ids=tuple(ids), outputs=[SimpleNamespace(logprobs=None)])


@pytest.mark.parametrize(("wrong", "differing"), [(0, 0), (3, 24)])
def test_answers_that_differ_are_counted(wrong: int, differing: int) -> None:
    llm = Remembering(wrong)
    found = [*identical.compared(llm, "it", 2 * 36 * 10, 10, seed=1)]  # type: ignore[arg-type]
    assert [one.batch for one in found] == [*range(1, 9)]
    assert [one.tokens for one in found] == [2 * batch * 10 for batch in range(1, 9)]
    assert sum(one.differing for one in found) == differing
    assert [*llm.together[:6]] == [2, 1, 1, 4, 2, 2] and llm.together[-4:] == [8, 8, 8, 8]
    assert ("NO, 6 answers differ" if wrong else "identical: yes") in identical.line_of(found[-1])


def test_all_options_are_asked_for_in_turn() -> None:
    asked = [*islice(identical.requests(50, 30, 1), 20)]
    assert len({one.params.seed for one in asked}) == 20
    for name in ("top_k", "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids", "logprobs"):
        assert any(getattr(one.params, name) is not None for one in asked), name
    assert any(one.params.stop_token_ids and one.params.min_tokens for one in asked)


@pytest.mark.exhaustive
def test_the_demo_answers_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["demo", "--device", "emulator", "--tokens", "240", "--answer-tokens", "30", "--max-context", "320"]
    assert identical.main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(line.endswith("identical: yes") for line in lines)
