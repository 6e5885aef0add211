"""Of the bugs in `source_bugs` each is where it is said to be, and `cheetah check` finds what the documents say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.program.source_bugs import BUGS

ROOT = Path(__file__).parents[2]
SHARE = 0.94
"""Of the bugs that are not harmless so many are found: 159 of 166."""


def test_every_text_that_a_bug_replaces_is_there_once() -> None:
    """A block that is written otherwise leaves none behind. No kernel is made."""
    assert max(Counter(bug.name for bug in BUGS).values()) == 1
    for bug in BUGS:
        assert bug.planted() != bug.file.read_text(), bug.name


def test_the_documents_name_each_bug() -> None:
    listed = (ROOT / "docs/internals/planted.md").read_text()
    for bug in BUGS:
        row = next((line for line in listed.splitlines() if line.startswith(f"| {bug.kind} | {bug.name}")), "")
        assert row, f"no line says what is found of {bug.kind}: {bug.name}"
        assert ("harmless" in row, "**missed**" in row) == (bool(bug.harmless), bool(bug.missed)), row


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_check_finds_nearly_all_bugs() -> None:
    """By its defaults: all but those that the list calls missed, and nothing harmless."""
    parts = os.cpu_count() or 1
    command = [sys.executable, "-m", "tests.program.planted_sources"]
    running = [
        subprocess.Popen([*command, str(number), str(parts)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for number in range(parts)
    ]
    lines = [line for one in running for line in one.communicate()[0].splitlines()]
    found = {one["name"]: one for one in map(json.loads, lines)}
    assert not {bug.name for bug in BUGS} - set(found), "not looked at"
    missed = {name for name, one in found.items() if not one["where"]}
    harmful = [bug for bug in BUGS if not bug.harmless]
    assert len([bug for bug in harmful if bug.name not in missed]) >= SHARE * len(harmful), missed
    assert missed == {bug.name for bug in BUGS if bug.harmless or bug.missed}
