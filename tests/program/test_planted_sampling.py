"""Every bug that is planted in sampling and in the host's words is found, and nothing is found without."""

from __future__ import annotations

import pytest

from cheetah.errors import CheetahError
from tests.program.joined import chosen
from tests.program.planted_sampling import BUGS, DETECTORS, SamplingBug, planted_rig
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]


def finding(detector: str) -> str | None:
    """The first thing that a detector finds."""
    session = planted_rig().session("random", 1)
    try:
        return next(DETECTORS[detector](session), None)
    except CheetahError as error:
        return str(error)


EXHAUSTIVE = (
    *("the mask of the token before", "presence is taken off from the second time on", "counted by every block"),
    *("noise is not written down", "a list weighs what one lane does", "a lane's second was not left out"),
    *("everything listed is all there is", "min_p beyond the lists", "the same candidate again"),
    *("a pivot counts itself", "the bracket's end is not brought nearer", "an order of any launch"),
    "the order of the sequence beside",
)
"""Of each there is one of its kind that `make test` looks for."""


@pytest.mark.parametrize("detector", DETECTORS)
def test_nothing_is_found_in_the_kernel_as_it_is(detector: str) -> None:
    assert finding(detector) is None


@pytest.mark.parametrize(
    "bug", tiered(BUGS, [bug for bug in BUGS if bug.name in EXHAUSTIVE]), ids=lambda bug: bug.name.replace(" ", "-")
)
def test_a_planted_bug_is_found(bug: SamplingBug) -> None:
    with chosen(planted_rig(), BUGS.index(bug) + 1):
        assert finding(bug.found_by)


def test_a_bug_whose_place_is_gone_is_refused() -> None:
    with pytest.raises(AssertionError, match="old text: nothing matches 'no such text'"):
        SamplingBug("old text", "no such text").planted("some text", 1)
