"""docs/attention.md: its code runs and prints what it says, and its tables are complete."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cheetah.blocks.attention import shipped_variants
from cheetah.blocks.attention.variants import KNOWN, Variant

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- (runs.*?) -->\n```python\n(.*?)```\n(?:```text\n(.*?)```\n)?", PAGE, re.DOTALL)


@pytest.mark.slow
@pytest.mark.compiler
def test_the_code_runs_as_it_is_shown(tmp_path: Path) -> None:
    """All of it in order, as one program."""
    (tmp_path / "shown.py").write_text("\n".join(code for _, code, _ in BLOCKS))
    command = [sys.executable, str(tmp_path / "shown.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(output for _, _, output in BLOCKS)


def test_all_code_is_run() -> None:
    assert len(BLOCKS) == len(re.findall(r"^```python$", PAGE, re.MULTILINE)) == 4


def test_every_shipped_variant_is_listed() -> None:
    made = {
        name
        for name, function in vars(shipped_variants).items()
        if getattr(inspect.unwrap(function), "__annotations__", {}).get("return") == "Variant"
    }
    shipped = PAGE[PAGE.index("## Variants that ship") : PAGE.index("## A variant of your own")]
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \|.*\|(.*)\|$", shipped, re.MULTILINE)
    assert {name for name, _, _ in rows} == made - {"combined"} and "combined(" in PAGE
    for name, _, given in rows:
        arguments = {"sliding_window": (1,), "soft_cap": (1.0,), "streaming_llm": (1, 1)}.get(name, ())
        variant = getattr(shipped_variants, name)(*arguments)
        assert isinstance(variant, Variant)
        assert re.findall(r"`(\w+)`", given) == list(variant.parameters)


def test_every_function_is_listed() -> None:
    assert set(re.findall(r"`(\w+)\([^)]*at\)`", PAGE)) == set(KNOWN)
    listed = set(re.findall(r"`(\w+)`", PAGE[PAGE.index("`at` knows") :]))
    assert {name for names in KNOWN.values() for name in names} <= listed
