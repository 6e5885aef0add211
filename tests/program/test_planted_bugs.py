"""Every bug that is planted in the real kernel is found, and nothing is found in the kernel as it is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import pytest

from cheetah.generate import choose_plan
from cheetah.models.dense.step_sizes import product_inputs
from cheetah.plan import GPUS, step_matrices
from tests.program.joined import chosen
from tests.program.planted import BUGS as COMMON_BUGS
from tests.program.planted import (
    HEAD_ALONE,
    IDLE,
    MANY,
    NARROW,
    ROOMY,
    USUAL,
    Bug,
    Finding,
    Gauntlet,
    Setup,
    joined_rig,
    race_in,
)
from tests.program.planted_experts import EXPERT_BUGS, FUSED, FUSED_BUGS, ROUTED
from tests.program.planted_families import BIASED, FAMILY_BUGS, NORMED, SANDWICHED, WINDOWED
from tests.program.rig import Rig, emulated_gpu
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

BUGS = (*COMMON_BUGS, *FAMILY_BUGS, *EXPERT_BUGS)
SEEDS = 20
EXHAUSTIVE = (
    *("the sums of squares of the norm before", "half the rows squared", "no wait for the sums of squares"),
    "an input is there once an adding warp has come to it",
    *("states overwritten while folded", "no wait for gated"),
    *("queries used before they are there", "a team's states folded before they are there"),
    *("middle lies over attention, one phase early", "middle over attention, with barriers"),
    *("no grid barrier after gate_up", "partial states folded as they come"),
    *("heads normalised by the first layer's weights", "norm over half a head", "values normalised like keys"),
    *("no epsilon in the norm of a head", "bias of the other half of a pair"),
    *("no window in the mask, only in the plan", "no barrier between loading and multiplying"),
    *("the next vector over a team's states", "one arrival frees a stage"),
    *("ring wait of the wrong parity", "norm of a head after its rotation", "keys kept as they were published"),
    *("token read before it is chosen", "epoch not advanced between steps", "keys given back for one warp"),
    *("one vector of candidates", "new keys kept by nobody", "no barrier after the mbarriers are made"),
    *("stale values multiplied by zero", "hidden lies over middle", "a window of one key more"),
    *("states folded before they are there", "raw heads read before they are there"),
    *("keys normalised by the queries' weights", "one partial state merged twice", "one reduction buffer"),
    *("stage given back before all lanes have read", "one warp's sums are enough"),
    *("weights fetched ahead are not used up", "no grid barrier before the merge"),
    *("newest key taken from the cache", "bias of the next head", "newest keys read before their warp has stored them"),
    *("weights of the other norm behind", "no residual multiplier", "no wait for the squares of rows"),
    *("halves of columns swapped", "the parity of the sums"),
    *("the sums of the next M-tile", "the parity of what was taken", "one adding warp's candidates are enough"),
    *("adding warps go on before the step ends", "a product ends before its rows are finished"),
    *("rows by half of their columns", "candidates taken before they are laid down"),
    "cache read before the step is done",
    *("experts all weigh alike", "weights of the softmax of all", "no wait for the experts' logits"),
    *("the first expert for all", "a list that is told of too soon", "weights that nobody knows yet"),
    "tags for who reads a vector in the head alone",
    *(bug.name for bug in FUSED_BUGS[1:]),
)
"""Of each there is one of its kind that `make test` looks for."""
assert {bug.name for bug in BUGS} >= set(EXHAUSTIVE), "a bug that is not there is called exhaustive"
RACE_ONLY = tuple(bug for bug in BUGS if bug.found_by == ("race",))
SETUPS = {
    "usual": USUAL,
    "roomy": ROOMY,
    "idle": IDLE,
    "head alone": HEAD_ALONE,
    "many": MANY,
    "narrow": NARROW,
    "normed": NORMED,
    "sandwiched": SANDWICHED,
    "biased": BIASED,
    "windowed": WINDOWED,
    "routed": ROUTED,
    "fused": FUSED,
}


def named(bug: Bug) -> str:
    return bug.name.replace(" ", "-")


def planted(bug: Bug, looked_for: Sequence[Bug], **mode: bool) -> AbstractContextManager[Rig]:
    """The kernel with the bug, in one text with others that are looked for in the same setup and the same tier."""

    def kind(one: Bug) -> tuple[Setup, str, bool]:
        return one.setup, one.sync, one.name in EXHAUSTIVE

    company = tuple(one for one in looked_for if kind(one) == kind(bug))
    return chosen(joined_rig(company, **mode), company.index(bug) + 1)


def first_finding(rig: Rig, setup: Setup, detector: str) -> Finding | None:
    """The first thing that one detector finds; the reference's run comes first, for its bits."""
    gauntlet = Gauntlet(rig, setup)
    for finding in gauntlet.reference():
        if finding.detector == detector:
            return finding
    return None if detector == "reference" else next(gauntlet.schedules(SEEDS), None)


CLEAN = [(setup, sync) for setup in SETUPS for sync in ("flags", "barrier") if setup != "many"]
CLEAN.remove(("fused", "barrier"))
CLEAN_ALWAYS = [("narrow", "barrier"), ("windowed", "flags")]


@pytest.mark.parametrize(("setup", "sync"), tiered(CLEAN, [case for case in CLEAN if case not in CLEAN_ALWAYS]))
def test_nothing_is_found_in_the_kernel_as_it_is(setup: str, sync: str) -> None:
    assert_clean(SETUPS[setup], sync, seeds=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("setup", "sync", "seeds"),
    [("usual", "flags", 50), ("idle", "flags", 50), ("many", "flags", 2), *((*case, 6) for case in CLEAN)],
)
def test_nothing_is_found_in_the_kernel_by_many_schedules(setup: str, sync: str, seeds: int) -> None:
    assert_clean(SETUPS[setup], sync, seeds)


def assert_clean(setup: Setup, sync: str, seeds: int) -> None:
    gauntlet = Gauntlet(setup.rig(sync=sync), setup)
    findings = [*gauntlet.reference(), *gauntlet.schedules(seeds)]
    assert not findings, findings[0]


SHOWN = [bug for bug in BUGS if bug not in RACE_ONLY]


@pytest.mark.parametrize("bug", tiered(SHOWN, [bug for bug in SHOWN if bug.name in EXHAUSTIVE]), ids=named)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    detector = bug.found_by[0]
    with planted(bug, SHOWN) as rig:
        assert first_finding(rig, bug.setup, detector), f"{bug.name}: nothing found by {detector} in {SEEDS} seeds"


RACES = [bug for bug in BUGS if "race" in bug.found_by]
FOUND_OTHERWISE_TOO = [bug for bug in RACES if bug not in RACE_ONLY]


@pytest.mark.parametrize("bug", tiered(RACES, [*FOUND_OTHERWISE_TOO, *RACE_ONLY[1:]]), ids=named)
def test_the_race_detector_finds_a_planted_bug(bug: Bug) -> None:
    looked_for = [bug] if bug is RACE_ONLY[0] else [one for one in RACES if one is not RACE_ONLY[0]]
    with planted(bug, looked_for, sanitize=True) as rig:
        assert race_in(rig), f"{bug.name}: no race"


@pytest.mark.exhaustive
@pytest.mark.parametrize("bug", RACE_ONLY, ids=named)
def test_no_schedule_shows_a_missing_order_that_the_processor_gives(bug: Bug) -> None:
    with planted(bug, RACE_ONLY) as rig:
        gauntlet = Gauntlet(rig, bug.setup)
        assert not [*gauntlet.reference(), *gauntlet.schedules(2)], (
            "found without the race detector: say so in its entry"
        )


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_words_carry_tags_where_whoever_reads_them_reads_all_that_is_published(setup: Setup) -> None:
    """Of the vectors that products take; the hidden one is read in every layer, and by the head."""
    shape, gpu = setup.config.shape, GPUS[emulated_gpu(setup.blocks)]
    plan = choose_plan(setup.config, gpu)
    matrices = step_matrices(shape, plan, gpu)
    tagged = {vector.name for vector in shape.table.inputs} - {"hidden"}
    if matrices.head.owners <= matrices.named("qkv").owners:
        tagged.add("hidden")
    assert set(product_inputs(shape, gpu, plan)) == tagged
    assert ("hidden" in tagged) == (setup is not HEAD_ALONE)


def test_a_bug_that_changes_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="the text is as it was"):
        joined_rig((Bug("no bug", ()),))
    with pytest.raises(AssertionError, match="nothing in the kernel matches 'no such text'"):
        joined_rig((Bug("old text", (), (("no such text", ""),)),))


def test_every_text_that_a_bug_replaces_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that `make test-all` alone looks for: a kernel that is written otherwise leaves none behind.
    No kernel is compiled."""

    class Made(Exception):
        pass

    def made(*arguments: object, **options: object) -> None:
        raise Made

    monkeypatch.setattr("cheetah.tools.rig.compile_program", made)
    for bug in BUGS:
        if not bug.change:
            with pytest.raises(Made):
                bug.setup.rig(generate=bug.kernel, sync=bug.sync)
