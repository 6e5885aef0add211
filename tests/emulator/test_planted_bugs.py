"""Every planted bug is caught: by schedules alone where they can show it, by the sanitizer where it is a race."""

import numpy as np
import pytest

from cheetah.emulator import SCHEDULERS, EmulatorError, Race, explore
from tests.emulator.planted import BUGS, Bug, expected_totals, planted_program, run
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]


def names(bug: Bug) -> str:
    return bug.name.replace(" ", "-")


def test_the_clean_kernel_gives_the_same_right_bits_under_every_schedule() -> None:
    kernel = planted_program()
    totals, _ = run(kernel)
    np.testing.assert_allclose(totals, expected_totals(), rtol=1e-4, atol=1e-6)
    report = explore(lambda scheduler, seed: run(kernel, scheduler, seed), range(200))
    assert report.ok, str(report)


@pytest.mark.parametrize("scheduler", tiered(SCHEDULERS, ["round_robin", "priority"]))
def test_the_clean_kernel_has_no_race(scheduler: str) -> None:
    totals, _ = run(planted_program(sanitize=True), scheduler, seed=3)
    np.testing.assert_allclose(totals, expected_totals(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bug", BUGS, ids=names)
def test_schedules_show_the_bug(bug: Bug) -> None:
    good = run(planted_program())
    kernel = planted_program(bug)
    report = explore(lambda scheduler, seed: run(kernel, scheduler, seed), range(20), expected=good)
    for scheduler in bug.seen_by:
        assert report.failed[scheduler], f"{bug.name}: {scheduler} saw nothing in 20 seeds"
    if not bug.seen_by:
        assert report.ok, f"{bug.name} is meant to be one that no schedule shows: {report}"
    if bug.kind:
        assert {failure.kind for failure in report.failures} == {bug.kind}


RACES = [bug for bug in BUGS if bug.is_race]


@pytest.mark.parametrize("bug", tiered(RACES, RACES[1::2]), ids=names)
def test_the_sanitizer_finds_the_bug_in_one_run(bug: Bug) -> None:
    # Without a wait on "empty" the producer warp may overrun its mbarrier before anything is read twice.
    errors = EmulatorError if "empty" in bug.name else Race
    with pytest.raises(errors, match=r"at planted\.cu:\d+"):
        run(planted_program(bug, sanitize=True), "round_robin")
