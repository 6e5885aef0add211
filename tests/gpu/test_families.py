"""Every family of layers on the GPU: the tiny models of the goldens, whole and quantised, in steps and in passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from cheetah.models.dense.reference import Reference
from cheetah.models.formats.quantized import scheme_of_name
from cheetah.models.registry import family_of, read_config
from cheetah.plan import gpu_named
from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.index import ceil_div, round_up
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

BLOCKS = gpu_named("h200").blocks
K_TILE_COLUMNS = 32
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
    values = wide_enough(name)
    config = read_config(values)
    shapes = family_of(config).tensor_shapes(config)
    (folder / "config.json").write_text(json.dumps(values))
    weights = {key: with_zeros(one, shapes[key]) for key, one in weights_of_model(config_of(name)).items()}
    save_file({key: one.astype(ml_dtypes.bfloat16) for key, one in weights.items()}, folder / "model.safetensors")
    return name, folder


def wide_enough(name: str) -> dict[str, Any]:
    """The config.json of a golden, of whose experts each block of a GPU has an M-tile: all that comes to them is zeros,
    so that logits and choices are those of the golden."""
    values, config = dict(GOLDENS[name]["config"]), config_of(name)
    if config.routing is not None:
        width = "moe_intermediate_size" if "moe_intermediate_size" in values else "intermediate_size"
        values[width] = round_up(ceil_div(BLOCKS * M_TILE_ROWS, 2 * config.table.chosen), K_TILE_COLUMNS)
    return values


def with_zeros(values: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Behind what there is, up to the shape."""
    return np.pad(values, [(0, wanted - own) for own, wanted in zip(values.shape, shape, strict=True)])


@pytest.mark.parametrize(("family", "format", "passes"), tiered(WAYS, OF_TWO_OTHERS), indirect=["family"])
def test_a_family_agrees_with_transformers(family: tuple[str, Path], passes: bool, format: str) -> None:
    name, folder = family
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
