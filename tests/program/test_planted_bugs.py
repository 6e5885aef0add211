"""Every bug that is planted in the real kernel is found, and nothing is found in the kernel as it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.program.planted import BUGS as COMMON_BUGS
from tests.program.planted import IDLE, MANY, ROOMY, USUAL, Bug, Finding, Gauntlet, Setup, race_in
from tests.program.planted_families import BIASED, FAMILY_BUGS, NORMED, WINDOWED

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

BUGS = (*COMMON_BUGS, *FAMILY_BUGS)
SEEDS = 20
RACES_ALWAYS_LOOKED_FOR = (
    "consumer warps do not wait for full",
    "one reduction buffer",
    "cache read before the step is done",
)
RACE_ONLY = tuple(bug for bug in BUGS if bug.found_by == ("race",))
SETUPS = {
    "usual": USUAL,
    "roomy": ROOMY,
    "idle": IDLE,
    "many": MANY,
    "normed": NORMED,
    "biased": BIASED,
    "windowed": WINDOWED,
}


def named(bug: Bug) -> str:
    return bug.name.replace(" ", "-")


def first_finding(bug: Bug, detector: str) -> Finding | None:
    """The first thing that one detector finds; the reference's run comes first, for its bits."""
    gauntlet = Gauntlet(bug.rig(), bug.setup)
    for finding in gauntlet.reference():
        if finding.detector == detector:
            return finding
    return None if detector == "reference" else next(gauntlet.schedules(SEEDS), None)


@pytest.mark.parametrize("sync", ["flags", "barrier"])
@pytest.mark.parametrize("setup", ["usual", "roomy", "idle", "normed", "biased", "windowed"])
def test_nothing_is_found_in_the_kernel_as_it_is(setup: str, sync: str) -> None:
    assert_clean(SETUPS[setup], sync, seeds=6)


@pytest.mark.parametrize(("setup", "seeds"), [("usual", 50), ("idle", 50), ("many", 2)])
def test_nothing_is_found_in_the_kernel_by_many_schedules(setup: str, seeds: int) -> None:
    assert_clean(SETUPS[setup], "flags", seeds)


def assert_clean(setup: Setup, sync: str, seeds: int) -> None:
    gauntlet = Gauntlet(setup.rig(sync=sync), setup)
    findings = [*gauntlet.reference(), *gauntlet.schedules(seeds)]
    assert not findings, findings[0]


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug not in RACE_ONLY], ids=named)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    detector = bug.found_by[0]
    assert first_finding(bug, detector), f"{bug.name}: nothing found by {detector} in {SEEDS} seeds"


def race_cases() -> list[Any]:
    """All of them take minutes."""
    quick = [bug for bug in BUGS if bug in RACE_ONLY or bug.name in RACES_ALWAYS_LOOKED_FOR]
    return [pytest.param(bug, marks=() if bug in quick else pytest.mark.slow) for bug in BUGS if "race" in bug.found_by]


@pytest.mark.parametrize("bug", race_cases(), ids=named)
def test_the_race_detector_finds_a_planted_bug(bug: Bug) -> None:
    assert race_in(bug.rig(sanitize=True)), f"{bug.name}: no race"


@pytest.mark.parametrize("bug", RACE_ONLY, ids=named)
def test_no_schedule_shows_a_missing_order_that_the_processor_gives(bug: Bug) -> None:
    gauntlet = Gauntlet(bug.rig(), bug.setup)
    assert not [*gauntlet.reference(), *gauntlet.schedules(2)], "found without the race detector: say so in its entry"


def test_a_bug_that_changes_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="the text is as it was"):
        Bug("no bug", ()).rig()
    with pytest.raises(AssertionError, match="nothing in the kernel matches 'no such text'"):
        Bug("old text", (), (("no such text", ""),)).rig()
