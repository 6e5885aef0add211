"""Quantised and sparse weights on the GPU: whole steps of small models against float32, in every format."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from cheetah.models.dense.reference import Reference
from cheetah.models.registry import in_format
from cheetah.models.rounding import round_to_bf16
from cheetah.plan.formats import QUANTIZED_FORMATS, SPARSE_FORMATS
from cheetah.runtime.assembly.assemble import assemble
from cheetah.runtime.device import open_device
from tests.gpu.test_batches import scored, sequence
from tests.program.quantized_weights import QuantizedWeights
from tests.program.rig import float32_logits, model, relative_error, token_ids
from tests.tiers import tiered
from tests.tolerances import LOGITS

pytestmark = pytest.mark.gpu

NUDGES = 4
PARTS = (
    "blocks-1024of1024",
    "blocks-2of4",
    "blocks-1of4",
    "int4-g128+list5",
    "int4+list3",
    "int8-g64-asym+list2",
    "2of4+list65",
)
NAMES = (*SPARSE_FORMATS, *QUANTIZED_FORMATS, *PARTS, "int4-g128-order", "int8-g64-order")
ALL = [(name, batch) for name in NAMES for batch in (1, 2, 8)]
OF_TWO_TOO = ("2of4", "int4-g128", "int8", "fp8", "int4-g128+list5")
"""Of each way to multiply one with two sequences; what a format's words mean shows with one and with eight."""
CONFIG = model(512, 1536, 2, 4, 1, 128, 500, max_position_embeddings=1024)


@pytest.mark.parametrize(("name", "batch"), tiered(ALL, [(name, 2) for name in NAMES if name not in OF_TWO_TOO]))
def test_a_step_against_float32(name: str, batch: int) -> None:
    weights = QuantizedWeights(in_format(CONFIG, name))
    # A launch has room for the logits of 64 columns. Of longer prompts fewer positions are well-conditioned: there are
    # more keys to turn between (int8-g64-asym, one prompt: 88 % of 16, 80 % of 20, 73 % of 40).
    prompts = [token_ids(min(16, 64 // batch), CONFIG.vocab_size, seed) for seed in range(batch)]
    with open_device("cuda") as device:
        overrides = {"batch": batch}
        ready = assemble(weights, device=device, overrides=overrides, timeout_s=20, quiet=True)
        try:
            found = scored(ready, [sequence(ready) for _ in prompts], prompts)
        finally:
            ready.close()
    wanted = [float32_logits(weights, ids) for ids in prompts]
    judged = [well_conditioned(weights, ids, exact) for ids, exact in zip(prompts, wanted, strict=True)]
    assert np.concatenate(judged).mean() > 0.8
    for logits, exact, good in zip(found, wanted, judged, strict=True):
        assert relative_error(logits[good], exact[good]) < LOGITS


def well_conditioned(weights: QuantizedWeights, ids: list[int], wanted: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Positions whose logits hardly move however vectors are rounded to bf16: elsewhere random weights have heads that
    turn from one key to another, and any order of the sums gives another answer."""
    good = np.ones(len(ids), np.bool_)
    for rounding in (round_to_bf16, *map(nudged, range(NUDGES))):
        rounded = Reference(weights.config, weights.tensor, rounding=rounding).forward(ids)
        moved = np.linalg.norm(rounded - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        good &= moved < LOGITS / 2
    return good


def nudged(seed: int) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """Rounding to bf16 of numbers that were moved by up to half of the distance between two, at random."""
    draw = np.random.default_rng(seed)

    def rounding(values: NDArray[np.float32]) -> NDArray[np.float32]:
        moved = values * (1 + draw.uniform(-(2.0**-9), 2.0**-9, values.shape))
        return round_to_bf16(moved.astype(np.float32))

    return rounding
