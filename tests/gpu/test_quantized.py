"""Quantised weights on the GPU: whole steps of small models against float32, in every format and size of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cheetah.models.dense.reference import Reference
from cheetah.models.rounding import round_to_bf16
from cheetah.plan.formats import QUANTIZED_FORMATS
from cheetah.runtime.build.assemble import assemble
from cheetah.runtime.device import open_device
from tests.gpu.test_batches import scored, sequence
from tests.program.quantized_weights import LINEAR, QuantizedWeights
from tests.program.rig import float32_logits, model, relative_error, token_ids
from tests.tolerances import LOGITS

pytestmark = pytest.mark.gpu

CONFIG = model(512, 1536, 2, 4, 1, 128, 500, max_position_embeddings=1024)


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
def test_a_step_against_float32(name: str, batch: int) -> None:
    weights = QuantizedWeights(replace(CONFIG, weight_formats=tuple((matrix, name) for matrix in LINEAR)))
    # A launch has room for the logits of 64 columns.
    prompts = [token_ids(min(20, 64 // batch), CONFIG.vocab_size, seed) for seed in range(batch)]
    with open_device("cuda") as device:
        overrides = {"batch": batch}
        ready = assemble(weights, device=device, overrides=overrides, timeout_s=20, tuned=False, quiet=True)
        try:
            found = scored(ready, [sequence(ready) for _ in prompts], prompts)
        finally:
            ready.close()
    for ids, logits in zip(prompts, found, strict=True):
        wanted = float32_logits(weights, ids)
        judged = well_conditioned(weights, ids, wanted)
        assert judged.mean() > 0.8
        assert relative_error(logits[judged], wanted[judged]) < LOGITS


def well_conditioned(weights: QuantizedWeights, ids: list[int], wanted: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Positions whose logits hardly move when vectors are rounded to bf16: elsewhere random weights have heads that
    turn from one key to another, and any order of the sums gives another answer."""
    rounded = Reference(weights.config, weights.tensor, rounding=round_to_bf16).forward(ids)
    moved = np.linalg.norm(rounded - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    return np.asarray(moved < LOGITS / 2)
