"""The demo model, and the trained checkpoint where it is present, on a GPU through both bindings and both exchanges.

64 teacher-forced steps against the float32 reference, greedy ids up to the first small margin, and the same bits again.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cheetah.models.dense.reference import Reference
from cheetah.models.registry import DEMO_FOLDER
from cheetah.runtime import LLM, SamplingParams
from cheetah.runtime.checkpoint.loading import open_checkpoint
from tests.program.test_against_reference import first_small, trained_checkpoint
from tests.tolerances import LOGITS

__all__ = ["trained_checkpoint"]  # a fixture
pytestmark = pytest.mark.gpu

STEPS = 64


def device_named(name: str) -> str:
    pytest.importorskip(name)
    return name


def follow(folder: Path, prompt: list[int], device: str, sync: str) -> list[int]:
    """The GPU's greedy ids up to the first small margin, after its logits were held to float32."""
    checkpoint = open_checkpoint(folder)
    text = Reference(checkpoint.config, checkpoint.tensor).generate(prompt, STEPS)
    ids = [*prompt, *text][:STEPS]
    wanted = Reference(checkpoint.config, checkpoint.tensor).forward(ids)
    with LLM(folder, device=device, sync=sync, quiet=True) as llm:
        found = llm.score(ids)
        assert np.array_equal(found, llm.score(ids)), "bits moved between runs"
        made = llm.generate(prompt, SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)).token_ids
    error = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert error.max() < LOGITS
    ordered = np.sort(wanted, axis=1)
    sure = first_small((ordered[:, -1] - ordered[:, -2])[len(prompt) - 1 :])
    assert list(made[:sure]) == text[:sure]
    return list(made[:sure])


@pytest.mark.parametrize("sync", ["flags", "barrier"])
@pytest.mark.parametrize("device", ["cuda", "pycuda"])
def test_the_demo_model(device: str, sync: str) -> None:
    follow(DEMO_FOLDER, [0, 100, 200, 300], device_named(device), sync)


@pytest.mark.parametrize("sync", ["flags", "barrier"])
@pytest.mark.parametrize("device", ["cuda", "pycuda"])
def test_the_trained_checkpoint(trained_checkpoint: Path, device: str, sync: str) -> None:
    for golden in json.loads((trained_checkpoint / "golden.json").read_text())["cases"]:
        stored = golden["stored_weights_fp32"]
        made = follow(trained_checkpoint, golden["prompt_ids"], device_named(device), sync)
        sure = min(len(made), first_small(stored["margins"]))
        assert made[:sure] == stored["greedy_ids"][:sure]
