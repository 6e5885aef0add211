"""compute-sanitizer over a whole small model: no bad access, no misuse of barriers."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
from cheetah.runtime import LLM, SamplingParams
with LLM("demo", device="cuda", sync="{sync}", quiet=True, timeout_s=float("inf")) as llm:
    print(llm.generate([1, 2, 3, 4, 5], SamplingParams(max_tokens=12, ignore_eos=True)).token_ids)
"""


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer on PATH")
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
@pytest.mark.parametrize("sync", ["flags", "barrier"])
def test_the_kernel_is_clean(tool: str, sync: str) -> None:
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        sys.executable,
        "-c",
        PROGRAM.format(sync=sync),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
