"""The ladder of examples: each runs by its one command and agrees with numpy, under every scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lang.compilers import compile_cuda
from tests.scripts import run_script
from tests.tiers import tiered

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
LADDER = ("1_scale", "2_matvec", "3_ring", "4_two_matvecs")


def run_example(name: str, *options: str) -> str:
    return run_script(ROOT / "examples" / f"{name}.py", *options)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("options", tiered(["", "--scheduler round_robin", "--scheduler priority --seed 5"], [""]))
@pytest.mark.parametrize("name", LADDER)
def test_it_agrees_with_numpy(name: str, options: str) -> None:
    assert "agrees with numpy" in run_example(name, *options.split()).splitlines()[-1]


@pytest.mark.slow
@pytest.mark.compiler
def test_one_command_runs_it() -> None:
    command = [sys.executable, str(ROOT / "examples" / "2_matvec.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0 and "agrees with numpy" in done.stdout.splitlines()[-1], done.stderr


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(LADDER, LADDER[:3]))
def test_it_has_no_race(name: str) -> None:
    assert "agrees with numpy" in run_example(name, "--sanitize")


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", LADDER)
def test_its_cuda_compiles(name: str) -> None:
    text = run_example(name, "--cuda")
    assert 'extern "C" __global__ void' in text
    compile_cuda(text)


def test_the_check_can_fail(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("import numpy as np; from emulate import check; check('y', np.ones(2), np.array([1.0, np.nan]))")
    (tmp_path / "emulate.py").write_text((ROOT / "examples" / "emulate.py").read_text())
    with pytest.raises(SystemExit, match="y differs from numpy by nan"):
        run_script(script)


def test_each_page_says_what_is_new() -> None:
    for before, name in zip(LADDER, LADDER[1:], strict=False):
        assert f"New since {before}" in (ROOT / "examples" / f"{name}.py").read_text()
    pages = {path.stem for path in (ROOT / "examples").glob("[0-9]_*.py")}
    assert pages == set(LADDER)
