"""Kernels of the families' tiny models in the emulator against transformers' logits; those of experts are nearer to
float32, as distributions, than transformers in bf16 is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from cheetah.models.dense.reference import Reference
from cheetah.models.registry import in_format
from cheetah.runtime.checkpoint.loading import Checkpoint
from tests.models.goldens.families import LOGITS as GOLDEN_LOGITS
from tests.models.goldens.families import divergence, tokens_of, weights_of_model
from tests.models.test_against_transformers import CONTEXTS, GOLDENS, config_of, has_kernel
from tests.program.quantized_weights import QuantizedWeights
from tests.program.rig import RandomWeights, Rig, as_bf16, float32_logits, relative_error
from tests.tiers import tiered
from tests.tolerances import LOGITS

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

OF_BOTH_TIERS = ("gemma3_text", "olmo3", "mixtral")
"""Which have between them what the others have, but for fused tensors and multipliers."""
LEAST_NEARNESS = 0.03
"""Of the tokens whose experts are surely those of float32: see `Reference`."""
SEEDS = {"mixtral": 7}
"""Of quantised weights by which no token's experts are nearly others, after which its successors see other keys."""
WITH_KERNELS = [name for name in GOLDENS if has_kernel(name)]
RARE = [name for name in WITH_KERNELS if name not in OF_BOTH_TIERS]


class GoldenWeights(RandomWeights):
    """Those of which transformers made the logits."""

    def __init__(self, name: str) -> None:
        self.config = config_of(name)
        drawn = weights_of_model(self.config)
        self.tensors = {tensor: as_bf16(values) for tensor, values in drawn.items()}


@pytest.mark.parametrize("name", tiered(WITH_KERNELS, RARE))
def test_a_kernel_computes_what_transformers_does(name: str) -> None:
    weights = GoldenWeights(name)
    rig = Rig(weights, blocks=2, max_context=CONTEXTS.get(name, 64))
    found = rig.session("priority", 1).score(tokens_of(weights.config.vocab_size))
    wanted, decided = load_file(GOLDEN_LOGITS)[name], decided_tokens(weights)
    assert relative_error(found[decided], wanted[decided]) < LOGITS
    assert decided.mean() > 0.7
    if weights.config.routing is not None:
        of_bf16 = np.array(GOLDENS[name]["kl_of_bf16"])
        assert divergence(wanted, found)[decided].mean() < of_bf16[decided].mean(), "transformers in bf16 is nearer"


def decided_tokens(weights: GoldenWeights | Checkpoint) -> NDArray[np.bool_]:
    """Those whose experts are surely the ones that float32 chooses."""
    reference, ids = Reference(weights.config, weights.tensor), tokens_of(weights.config.vocab_size)
    reference.forward(ids)
    return np.array(reference.nearness) > LEAST_NEARNESS


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_kernel_of_quantised_weights_computes_what_they_stand_for(name: str) -> None:
    config = replace(in_format(config_of(name), "int4-g32"), max_position_embeddings=CONTEXTS.get(name, 64))
    weights, ids = QuantizedWeights(config, SEEDS.get(name, 0), scales="bf16"), tokens_of(config.vocab_size)
    found = Rig(weights, blocks=2, max_context=config.max_position_embeddings).session().score(ids)
    assert relative_error(found, float32_logits(weights, ids)) < LOGITS
    assert np.isfinite(found).all()
