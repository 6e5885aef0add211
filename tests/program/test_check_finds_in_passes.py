"""`cheetah check demo` finds what maintainers do wrong in passes over prompts; here it stops at the first finding."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from cheetah.generate import Generated, generate_head, generate_pass
from cheetah.tools.check import check_model
from tests.program.maintainers_bugs import FLOAT32, UNFENCED, MaintainersBug, bug, without
from tests.program.rig import kept
from tests.program.test_check_finds import demo

pytestmark = pytest.mark.compiler

OPERAND = "overwrites operand B|has changed between its issue and|while it was in flight"
RELEASE = r"\s*warp_barrier\(\);\s*if \(lane == 0\) mbarrier_arrive\(empty \+ previous\);"
WAITS = r"(\s*wait_at_least_u64\(\(uint64_t\*\)\(workspace\), arrivals_due\);)"
UNEQUAL = "different bits|deadlock|has made no fence_proxy_async since|" + FLOAT32

OF_NEXT_TILE = r"(\(ACTIVATION_TILE_BYTES \+ 2 \* UNIT_BYTES\)|ACTIVATION_TILE_BYTES)"
EXCHANGED = r"\1 + (2 * ACTIVATION_TILE_BYTES + 2 * UNIT_BYTES - \2) / 16"

BUGS = (
    bug(
        "no fence between operands and products",
        "were stored to after the warp's last wgmma_fence",
        without(r"wgmma_fence\(\);", after=r"\s*uint64_t descriptor"),
    ),
    bug("no fence behind what others copy", UNFENCED, without(r"fence_proxy_async\(\);", after=r"\s*named_barrier")),
    bug("a stage given back a step early", OPERAND, (rf"(wgmma_wait_but_one\(\);)({RELEASE})", r"\2\1")),
    bug(
        "a wait for one group too few",
        OPERAND,
        without(r"wgmma_wait_but_one\(\);", after=r"\s*warp_barrier\(\);"),
    ),
    bug(
        "a block without a tile does not wait",
        UNEQUAL,
        (
            rf"(\+ phase \+ 1;\s*)if \(thread == 0\) {WAITS}",
            r"\1if (thread == 0 && (block < 2 * token_tiles || phase % 2 != 0)) \2",
        ),
    ),
    bug("the halves of k exchanged in operand B", FLOAT32, (rf"(descriptor\w*) \+ {OF_NEXT_TILE} / 16", EXCHANGED)),
    bug(
        "the units of operand B read across",
        FLOAT32,
        (r"(\+ STAGE_WEIGHTS_BYTES), UNIT_BYTES, GROUP_BYTES\)", r"\1, GROUP_BYTES, UNIT_BYTES)"),
    ),
    bug(
        "lanes that bring weights do not meet",
        "still in flight|deadlock",
        without(r"warp_barrier\(\);", before=r"advance\(weights_stage, weights_parity[^;]*\);(?:\s*\})+\s*"),
    ),
    bug(
        "copies that do not count the phase that adds parts",
        UNEQUAL,
        without(r"copies_due \+= BLOCKS;", after=r"\s*renew\(\);"),
    ),
)


EXHAUSTIVE = (
    "no fence behind what others copy",
    "the units of operand B read across",
    "copies that do not count the phase that adds parts",
    "the halves of k exchanged in operand B",
    "a stage given back a step early",
)
"""Of each there is one of its kind that `make test` looks for: the first in a step, the halves, who does not wait."""


def cases() -> list[Any]:
    return [
        pytest.param(bug, marks=pytest.mark.exhaustive if bug.name in EXHAUSTIVE else (), id=bug.name.replace(" ", "-"))
        for bug in BUGS
    ]


@cache
def whole_pass(*arguments: Any) -> Generated:
    """The kernel as it is, made once for all that is planted in it."""
    return kept(generate_pass)(*arguments)


@cache
def whole_head(*arguments: Any) -> Generated:
    return kept(generate_head)(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("bug", cases())
def test_the_check_of_passes_finds(bug: MaintainersBug, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = []

    def generate(*arguments: Any) -> Generated:
        made = whole_pass(*arguments)
        text = bug.planted(made)
        changed.append(text.text != made.text)
        return text

    monkeypatch.setattr("cheetah.tools.check.generate_pass", generate)
    monkeypatch.setattr("cheetah.tools.check.generate_head", whole_head)
    verdicts = check_model(demo(), sanitizer=False, only="passes", first=True)
    found = next((verdict for _, verdict in verdicts if not verdict.ok), None)
    assert any(changed), "no kernel has the text that is to be changed"
    assert found, f"{bug.name}: nothing found"
    assert any(words in str(found) for words in bug.words.split("|")), str(found)
