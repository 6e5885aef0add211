"""`cheetah check demo`, as it is by default, finds what maintainers do wrong; here it stops at the first finding."""

from __future__ import annotations

from typing import Any

import pytest

from cheetah.generate import Generated, generate_kernel
from cheetah.models.registry import DEMO
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.tools.check import Subject, check_model
from tests.program.maintainers_bugs import MORE, TRIED, MaintainersBug
from tests.program.planted import clean_kernel

pytestmark = pytest.mark.compiler


def demo() -> Subject:
    checkpoint = open_checkpoint(DEMO)
    return Subject("the whole model", checkpoint.config, checkpoint.tensor, {"max_context": 128})


def cases() -> list[Any]:
    return [
        pytest.param(bug, marks=() if bug.is_quick else pytest.mark.slow, id=bug.name.replace(" ", "-"))
        for bug in (*TRIED, *MORE)
    ]


@pytest.mark.parametrize("bug", cases())
def test_the_check_finds(bug: MaintainersBug, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = []

    def generate(*arguments: Any, **options: Any) -> Generated:
        made = (generate_kernel if bug.change else clean_kernel)(*arguments, **options)
        planted = bug.planted(made)
        changed.append(planted.text != made.text)
        return planted

    monkeypatch.setattr("cheetah.tools.check.generate_kernel", generate)
    if bug.change:
        bug.change(monkeypatch)
    verdicts = check_model(demo(), sanitizer=False, stop_after=1)
    found = next((verdict for _, verdict in verdicts if not verdict.ok), None)
    assert any(changed) or not bug.edits, "no kernel has the text that is to be changed"
    assert found, f"{bug.name}: nothing found"
    assert any(words in str(found) for words in bug.words.split("|")), str(found)
