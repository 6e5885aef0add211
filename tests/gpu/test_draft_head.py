"""An EAGLE-3 head on a GPU: its drafts are those that float32 makes, in rounds on the device too."""

from __future__ import annotations

from pathlib import Path

import pytest

from cheetah.runtime import LLM
from tests.runtime.test_draft_head import DRAFTS, as_meant, drafts_of_rounds, head_in, meaning_of

pytestmark = pytest.mark.gpu


def test_it_drafts_what_it_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_in(tmp_path / "head")
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS}
    with LLM("demo", quiet=True, max_context=192, batch=1, speculative_config=config) as llm:
        pace = llm.engine.engine._scheduler._pace
        monkeypatch.setattr(pace, "break_even", lambda sequences: 0.0)
        monkeypatch.setattr(pace, "lacks_plain", lambda sequences: False)
        found = drafts_of_rounds(llm, monkeypatch)
    assert len(found) > 3 and as_meant(found, meaning_of(head)) > 0.9
