"""Quantised checkpoints from the folder to the logits, in the emulator: what is loaded is what the files stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from cheetah import LLM
from cheetah.models.formats.quantized import scheme_of_name
from cheetah.models.registry import family_of
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.tools.quantize import SCALES, quantization_job, write_quantized
from tests.program.rig import relative_error
from tests.tolerances import LOGITS

pytestmark = pytest.mark.compiler

IDS = [0, 17, 300, 45, 45, 511, 2, 9]


def written(model: str, out: Path, format: str) -> Path:
    write_quantized(quantization_job(model, scheme_of_name(format, SCALES), clip=False), out, lambda nbytes: None)
    return out


def check_logits(model: str, ids: list[int]) -> None:
    checkpoint = open_checkpoint(model)
    reference = family_of(checkpoint.config).reference(checkpoint.config, checkpoint.tensor)
    with LLM(model, device="emulator", gpu="emulator-2", quiet=True, tokenizer=False, prompt_tokens=0) as llm:
        found = llm.score(ids)
    assert relative_error(found, reference.forward(ids)) < LOGITS


@pytest.mark.parametrize("format", ["int4-g64", "fp8"])
def test_the_demo_model_quantised(tmp_path: Path, format: str) -> None:
    check_logits(str(written("demo", tmp_path / "model", format)), IDS)
