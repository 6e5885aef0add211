"""Filters and penalties in numpy, by which the kernel's draws are judged, against the installed transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.models.warpers import CASES, Case, answers, as_answer

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu


def test_the_answers_that_are_kept_are_those_of_the_installed_version() -> None:
    assert [as_answer(*case.theirs()) for case in CASES] == answers()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.filters} of {case.spread}")
def test_other_logits_are_filtered_alike(case: Case) -> None:
    for seed in range(10_000, 10_005):
        drawn = replace(case, seed=seed)
        (ours, kept), (theirs, left) = drawn.ours(), drawn.theirs()
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(kept, left)
