"""Kernels of the families' tiny models in the emulator against transformers' logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from cheetah.models.registry import in_format
from tests.models.goldens.families import LOGITS as GOLDEN_LOGITS
from tests.models.goldens.families import tokens_of, weights_of_model
from tests.models.test_against_transformers import CONTEXTS, GOLDENS, config_of
from tests.program.quantized_weights import QuantizedWeights
from tests.program.rig import RandomWeights, Rig, as_bf16, float32_logits, relative_error
from tests.tiers import tiered
from tests.tolerances import LOGITS

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

OF_BOTH_TIERS = ("gemma3_text", "olmo3")
"""Which have between them what the others have, but for fused tensors and multipliers."""
RARE = [name for name in GOLDENS if name not in OF_BOTH_TIERS]


class GoldenWeights(RandomWeights):
    """Those of which transformers made the logits."""

    def __init__(self, name: str) -> None:
        self.config = config_of(name)
        drawn = weights_of_model(self.config)
        self.tensors = {tensor: as_bf16(values) for tensor, values in drawn.items()}


@pytest.mark.parametrize("name", tiered(GOLDENS, RARE))
def test_a_kernel_computes_what_transformers_does(name: str) -> None:
    weights = GoldenWeights(name)
    rig = Rig(weights, blocks=2, max_context=CONTEXTS.get(name, 64))
    found = rig.session("priority", 1).score(tokens_of(weights.config.vocab_size))
    assert relative_error(found, load_file(GOLDEN_LOGITS)[name]) < LOGITS


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", GOLDENS)
def test_a_kernel_of_quantised_weights_computes_what_they_stand_for(name: str) -> None:
    config = replace(in_format(config_of(name), "int4-g32"), max_position_embeddings=CONTEXTS.get(name, 64))
    weights, ids = QuantizedWeights(config, scales="bf16"), tokens_of(config.vocab_size)
    found = Rig(weights, blocks=2, max_context=config.max_position_embeddings).session().score(ids)
    assert relative_error(found, float32_logits(weights, ids)) < LOGITS
    assert np.isfinite(found).all()
