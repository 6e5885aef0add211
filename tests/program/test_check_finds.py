"""`cheetah check demo`, as it is by default, finds what maintainers do wrong; here it stops at the first finding."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from cheetah.generate import Generated, generate_kernel
from cheetah.models.registry import DEMO
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.tools import check
from cheetah.tools.check import check_model
from cheetah.tools.rig import Rig
from cheetah.tools.subjects import Subject
from tests.program.joined import choose, joined
from tests.program.maintainers_bugs import MORE, TRIED, MaintainersBug
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]


EXHAUSTIVE = (
    *("no warp barrier before attention gives a stage back", "the newest key's page at the end of a page"),
    *("the parity of the step's end", "the upper half of the seed ignored", "a chunk more requested than has landed"),
    *("the mean of squares over the padded size", "the fence before the store", "one lane waits for the loads of all"),
    *("values cached over their keys", "the first column's angles for all", "keys copied into the place of values"),
    *("a chunk counted that nobody requested", "a block that waits for ever"),
    "epochs handed out twice, over words that were left",
    *("attention that does not wait for its loads", "no fence in the producer lane"),
    *("rows of padding among the candidates", "epochs that begin again, over words that were left"),
    *("the first column's norm for all", "a query that sees a key too many"),
    *("the wrong parity of a stage ahead", "keys cached in the first sequence's pages"),
    *("draws keyed by the position before", "a whole stage announced for the last keys"),
    *("products that do not wait for their loads", "no warp barrier where one lane waits for all"),
    *("the norm's epsilon left out", "the highest id on ties"),
)
"""Of each there is one of its kind that `make test` looks for; a lane that waits for all is one of
`tests/emulator/test_watch.py`, here the last kernel shows it, behind all schedules of the others."""


def demo() -> Subject:
    checkpoint = open_checkpoint(DEMO)
    return Subject("the whole model", checkpoint.config, checkpoint.tensor, {"max_context": 128})


def cases() -> list[Any]:
    bugs = (*TRIED, *MORE)
    return tiered(bugs, [bug for bug in bugs if bug.name in EXHAUSTIVE])


@cache
def whole_kernel(*arguments: Any, **options: Any) -> Generated:
    """The kernel as it is, made once for all that is planted in it."""
    return generate_kernel(*arguments, **options)


@cache
def joined_kernel(is_exhaustive: bool, *arguments: Any, **options: Any) -> Generated:
    """The kernel with all bugs of a tier in it, none of them on."""
    made = whole_kernel(*arguments, **options)
    return joined(made, [bug.planted(made) for bug in of_tier(is_exhaustive)])


def of_tier(is_exhaustive: bool) -> list[MaintainersBug]:
    return [bug for bug in (*TRIED, *MORE) if (bug.name in EXHAUSTIVE) == is_exhaustive]


def plant_beside_others(bug: MaintainersBug, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """As `planted`, in texts that have the tier's other bugs too, so that each is compiled once."""
    changed = planted(bug, monkeypatch)
    is_exhaustive = bug.name in EXHAUSTIVE
    generate, number = check.generate_kernel, of_tier(is_exhaustive).index(bug) + 1

    def joined_instead(*arguments: Any, **options: Any) -> Generated:
        generate(*arguments, **options)
        return joined_kernel(is_exhaustive, *arguments, **options)

    def rig(*arguments: Any, **options: Any) -> Rig:
        made = Rig(*arguments, **options)
        choose(made, number)
        return made

    monkeypatch.setattr(check, "generate_kernel", joined_instead)
    monkeypatch.setattr(check, "Rig", rig)
    return changed


def planted(bug: MaintainersBug, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Plants the bug in every kernel that is made from now on; gives for each whether its text changed."""
    changed: list[bool] = []

    def generate(*arguments: Any, **options: Any) -> Generated:
        made = whole_kernel(*arguments, **options)
        text = bug.planted(made)
        changed.append(text.text != made.text)
        return text

    monkeypatch.setattr("cheetah.tools.check.generate_kernel", generate)
    if bug.change:
        bug.change(monkeypatch)
    return changed


@pytest.mark.parametrize("bug", cases(), ids=lambda bug: bug.name.replace(" ", "-"))
def test_the_check_finds(bug: MaintainersBug, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = plant_beside_others(bug, monkeypatch)
    verdicts = check_model(demo(), sanitizer=False, only="steps", first=True)
    found = next((verdict for _, verdict in verdicts if not verdict.ok), None)
    assert any(changed) or not bug.edits, "no kernel has the text that is to be changed"
    assert found, f"{bug.name}: nothing found"
    assert any(words in str(found) for words in bug.words.split("|")), str(found)


def test_every_text_that_a_bug_replaces_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that `make test-all` alone looks for. No kernel is compiled."""
    for name in ("Case.launches", "explored"):
        monkeypatch.setattr(f"cheetah.tools.check.{name}", lambda *arguments, **options: None)
    made: list[Generated] = []

    def generate(*arguments: Any, **options: Any) -> Generated:
        made.append(whole_kernel(*arguments, **options))
        return made[-1]

    monkeypatch.setattr("cheetah.tools.check.generate_kernel", generate)
    assert len([*check_model(demo(), sanitizer=False, only="steps")]) == len(made) == 4
    bugs = [bug for bug in (*TRIED, *MORE) if bug.edits]
    assert not [bug.name for bug in bugs if all(bug.planted(one).text == one.text for one in made)]


@pytest.mark.exhaustive
def test_the_check_sees_copies_that_wait_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is wrong with them, so that all schedules run: here few."""
    (bug,) = (one for one in MORE if one.name == "a chunk counted that nobody requested")
    changed = planted(bug, monkeypatch)
    paces = [
        verdict.pace
        for _, verdict in check_model(demo(), "emulator-2", 2, ("priority",), sanitizer=False, only="steps")
    ]
    assert all(changed) and any("never had more than" in pace for pace in paces)
