"""`cheetah check demo@2of4` finds what goes wrong with weights of which two of every four are there.

`make test` plants the bugs of steps in products alone (`tests/blocks/test_two_of_four.py`).
"""

from __future__ import annotations

from typing import Any

import pytest

from cheetah.generate import Generated, generate_kernel, generate_pass
from cheetah.models.registry import DEMO, in_format
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.runtime.checkpoint.random_weights import random_tensors
from cheetah.tools import check
from cheetah.tools.check import check_model
from cheetah.tools.subjects import Subject
from tests.program.maintainers_bugs import FLOAT32, MaintainersBug, bug

pytestmark = [pytest.mark.compiler, pytest.mark.exhaustive]

IN_STEPS = (
    bug("the places of the neighbouring lane", FLOAT32, (r"(PLACES_AT\)\)\[)lane\]", r"\1lane ^ 1]")),
    bug("the places of both halves from the same lanes", FLOAT32, (r"mma_2of4_bf16_1\(sums", "mma_2of4_bf16_0(sums")),
    bug("the weights of the other half", FLOAT32, (r"\[lane \+ 32\]", "[lane]")),
    bug("the vector of the other half", FLOAT32, (r"(load_rows_b16\(.*) \+ 4\)\);", r"\1));")),
)
IN_PASSES = (
    bug("the places of rows g for rows g + 8", FLOAT32, (r"indices >> 16", "indices")),
    bug(
        "the places of the other four columns",
        FLOAT32,
        (r"\? FIRST_BYTES : SECOND_BYTES", "? SECOND_BYTES : FIRST_BYTES"),
    ),
)


def subject() -> Subject:
    config = in_format(open_checkpoint(DEMO).config, "2of4")
    return Subject("the whole model", config, random_tensors(config), {"max_context": 128})


def cases() -> list[Any]:
    of_kinds = (("steps", IN_STEPS), ("passes", IN_PASSES))
    return [pytest.param(one, only, id=one.name) for only, bugs in of_kinds for one in bugs]


@pytest.mark.parametrize(("planted", "only"), cases())
def test_the_check_finds(planted: MaintainersBug, only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = []
    name, right = ("generate_kernel", generate_kernel) if only == "steps" else ("generate_pass", generate_pass)

    def generate(*arguments: Any, **options: Any) -> Generated:
        made = right(*arguments, **options)
        wrong = planted.planted(made)
        changed.append(wrong.text != made.text)
        return wrong

    monkeypatch.setattr(check, name, generate)
    verdicts = check_model(subject(), sanitizer=False, only=only, first=True)
    found = next((verdict for _, verdict in verdicts if not verdict.ok), None)
    assert any(changed), "no kernel has the text that is to be changed"
    assert found and planted.words in str(found), str(found)
