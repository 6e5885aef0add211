"""Starting is quick: what is not needed is not imported, and a kernel's text takes a fraction of a second."""

import subprocess
import sys
import time

import pytest

from cheetah.models.registry import preset
from cheetah.tools.regenerate import generate_named

SLOW = ("cuda", "pycuda", "torch", "matplotlib", "jinja2", "huggingface_hub", "tokenizers", "safetensors", "pydantic")


def imported_by(statement: str) -> set[str]:
    """Names of the modules, and of the packages they are in, that a statement loads in a new interpreter."""
    program = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import cheetah", "import cheetah.runtime", "import cheetah.cli"])
def test_what_is_only_named_loads_no_numpy(statement: str) -> None:
    loaded = imported_by(statement)
    assert not loaded & {*SLOW, "numpy", "cheetah.lang", "cheetah.plan", "cheetah.runtime.llm"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "from cheetah.runtime import LLM, SamplingParams",
        "import cheetah.runtime.assembly.assemble, cheetah.runtime.checkpoint.loading, "
        "cheetah.tools.regenerate, cheetah.runtime.assembly.compile",
    ],
)
def test_loading_and_generating_need_little(statement: str) -> None:
    loaded = imported_by(statement)
    assert "numpy" in loaded
    assert not loaded & {*SLOW, "rich", "typer", "cheetah.emulator"}


@pytest.mark.slow
def test_the_text_of_8b_takes_less_than_two_seconds() -> None:
    """Processor time of this thread, so that a busy machine does not matter."""
    started = time.thread_time()
    generate_named(preset("llama-3.1-8b"), "llama-3.1-8b", "h200", {"max_context": 8192})
    assert time.thread_time() - started < 2
