"""Every family of layers on the GPU: the tiny models of the goldens, whole and quantised, in steps and in passes."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cheetah.models.dense.reference import Reference
from cheetah.models.formats.quantized import scheme_of_name
from cheetah.runtime import LLM
from cheetah.runtime.checkpoint.loading import open_checkpoint
from cheetah.tools.quantize import SCALES, quantization_job
from tests.models.goldens.families import LOGITS as GOLDEN_LOGITS
from tests.models.goldens.families import tokens_of, weights_of_model
from tests.models.test_against_transformers import CONTEXTS, GOLDENS, config_of
from tests.program.test_goldens import WITH_KERNELS, decided_tokens
from tests.tiers import tiered
from tests.tolerances import LOGITS

pytestmark = pytest.mark.gpu

TOO_SMALL_FOR_PASSES = ("qwen3_moe", "bf16")
"""Whose experts' down has one K-tile."""
WAYS = [(name, format, passes) for name in WITH_KERNELS for format in ("bf16", "int8") for passes in (False, True)]
WITH_EXPERTS = [name for name in WITH_KERNELS if config_of(name).routing]
OF_TWO_OTHERS = [(name, "int8", True) for name in WITH_KERNELS if name not in WITH_EXPERTS]
"""What is a family's own shows in passes with bf16 and in steps with int8; how passes multiply int8 is of no family,
but for experts, whose rows are listed."""


@pytest.fixture
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The name of a golden, and its checkpoint as a folder."""
    name, folder = request.param, tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GOLDENS[name]["config"]))
    weights = weights_of_model(config_of(name))
    save_file({key: one.astype(ml_dtypes.bfloat16) for key, one in weights.items()}, folder / "model.safetensors")
    return name, folder


@pytest.mark.parametrize(("family", "format", "passes"), tiered(WAYS, OF_TWO_OTHERS), indirect=["family"])
def test_a_family_agrees_with_transformers(family: tuple[str, Path], passes: bool, format: str) -> None:
    name, folder = family
    if passes and (name, format) == TOO_SMALL_FOR_PASSES:
        pytest.skip("products of a pass have two K-tiles or more")
    if format != "bf16":
        job = quantization_job(str(folder), scheme_of_name(format, SCALES), clip=False)
        folder = folder.parent / format
        job.write(folder, lambda nbytes: None)
    checkpoint = open_checkpoint(folder)
    ids = tokens_of(checkpoint.config.vocab_size)
    wanted = load_file(GOLDEN_LOGITS)[name]
    if format != "bf16":
        reference = Reference(checkpoint.config, checkpoint.tensor, max_context=CONTEXTS.get(name))
        wanted = reference.forward(ids)
    context = CONTEXTS.get(name, checkpoint.config.max_position_embeddings)
    with LLM(folder, device="cuda", tokenizer=False, quiet=True, prompt_passes=passes, max_context=context) as llm:
        found = llm.score(ids)
    errors = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    decided = decided_tokens(checkpoint)
    assert decided.mean() > (0.7 if format == "bf16" else 0.5)
    assert errors[decided].max() < LOGITS, errors
