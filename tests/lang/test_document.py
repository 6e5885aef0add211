"""docs/language.md shows only code that is in the examples, that they render, or that runs as it stands there."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from cheetah import lang as ch
from tests.scripts import run_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "language.md").read_text()
BLOCKS = re.findall(r"<!-- (.+?) -->\n```(?:python|cuda)\n(.*?)```\n(?:```cuda\n(.*?)```\n)?", PAGE, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "code", "output"), BLOCKS, ids=[source for source, _, _ in BLOCKS])
def test_the_code_shown_is_the_code_that_runs(source: str, code: str, output: str, tmp_path: Path) -> None:
    if source == "runs":
        (tmp_path / "shown.py").write_text(code)
        assert run_script(tmp_path / "shown.py") == output
    elif source.startswith("rendered by "):
        assert code in run_script(ROOT / source.removeprefix("rendered by "), "--cuda")
    else:
        assert code in (ROOT / source).read_text()


def test_no_code_is_shown_without_its_source() -> None:
    assert len(re.findall(r"^```(?:python|cuda)$", PAGE, re.MULTILINE)) == len(BLOCKS) + sum(
        1 for _, _, output in BLOCKS if output
    )
    assert len(BLOCKS) >= 10


def test_every_mistake_is_listed() -> None:
    listed = set(re.findall(r"^\| `(\w+Error)` \|", PAGE, re.MULTILINE))
    assert listed == {name for name in ch.__all__ if name.endswith("Error")} - {"LangError"}


def test_every_file_is_listed() -> None:
    table = PAGE[PAGE.index("## Where things are") :]
    files = {path.stem for path in (ROOT / "cheetah" / "lang").glob("*.py")} - {"__init__"}
    assert files <= set(re.findall(r"`(\w+)/?`", table))


def test_code_is_not_wider_than_the_page() -> None:
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    wide = [line for line in prose.splitlines() if len(line) > 140 and not line.startswith("|")]
    assert wide == [] and textwrap.dedent(PAGE) == PAGE
