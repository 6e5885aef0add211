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


PASSES = """
from cheetah.runtime import LLM, SamplingParams
prompts = [list(range(1, 300)), [7] * 90]
with LLM("demo", device="cuda", prompt_passes=True, quiet=True, timeout_s=float("inf")) as llm:
    for prompt in prompts:
        print(llm.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True)).token_ids)
"""
"""Long and short passes; the demo model has 512 tokens."""

needs_sanitizer = pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer on PATH"
)


@needs_sanitizer
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
@pytest.mark.parametrize("sync", ["flags", "barrier"])
def test_the_kernel_is_clean(tool: str, sync: str) -> None:
    require_clean(tool, PROGRAM.format(sync=sync))


@needs_sanitizer
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_passes_over_prompts_are_clean(tool: str) -> None:
    require_clean(tool, PASSES, "--kernel-name", "kernel_substring=prompt_pass")


def require_clean(tool: str, program: str, *options: str) -> None:
    """The sanitizer's own word, and no error."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *options, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    assert "ERROR SUMMARY: 0 errors" in said, said[-3000:]
