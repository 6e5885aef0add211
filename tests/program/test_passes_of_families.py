"""Several prompts in a pass, through the engine, of families that do something else than Llama: what is chosen behind
them, their scores, and that neither company nor cached pages change a bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cheetah.models.config import ModelConfig
from cheetah.models.dense.reference import Reference
from cheetah.models.layer_kind import Routing
from cheetah.models.mistral import MistralConfig
from cheetah.models.qwen2 import Qwen2Config
from cheetah.models.qwen3 import Qwen3Config
from cheetah.models.seed_oss import SeedOssConfig
from cheetah.runtime.assembly.assemble import Assembly, assemble
from cheetah.runtime.device.emulator import EmulatorDevice
from cheetah.runtime.engine.launcher import Sampling
from cheetah.runtime.engine.requests import Request
from cheetah.tools.decided import decided_ids
from tests.program.answers import Record, Service
from tests.program.kinds import KINDS
from tests.program.layer_kinds import sandwich, ungated
from tests.program.rig import RandomWeights, emulated_gpu, random_weights, relative_error, token_ids
from tests.program.test_experts import MIXTRAL
from tests.program.test_hybrids import AWKWARD
from tests.program.test_hybrids import weights as hybrid_weights
from tests.tiers import tiered

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

SHAPE = (48, 40, 2, 2, 1, 64, 50)
FAMILIES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "a sliding window, pages of 5": (
        MistralConfig(*SHAPE, max_position_embeddings=256, sliding_window=21),
        {"page_size": 5},
    ),
    "layers of several kinds, pages of 5": (
        KINDS,
        {"page_size": 5},
    ),
    "norms of heads, pages of 16": (Qwen3Config(*SHAPE, max_position_embeddings=256), {}),
    "norms on both sides, multipliers, a soft-cap": (sandwich(), {}),
    "experts": (replace(MIXTRAL, routing=Routing(7, 2)), {}),
    "biases, ten query heads": (SeedOssConfig(48, 40, 2, 10, 1, 64, 50, max_position_embeddings=256), {}),
    "no gate, biases of all, heads of 96": (ungated(), {}),
    "Gated DeltaNet, gated heads": (AWKWARD, {"batch": 3}),
    "biases, keys in 8 bits": (Qwen2Config(*SHAPE, max_position_embeddings=256), {"kv_dtype": "e4m3"}),
}
LENGTHS = (33, 1, 70, 16, 17)
TOLERANCE = 0.06
"""Relative error of the logits of a position (rounding the reference to bf16 gives 0.04 by itself)."""
E4M3_TOLERANCE = 0.25


def weights_of(config: ModelConfig) -> RandomWeights:
    return hybrid_weights(config) if config.delta_layers else random_weights(config)


def assembled(family: str) -> Assembly:
    config, plan = FAMILIES[family]
    return assemble(
        weights_of(config),
        device=EmulatorDevice(),
        gpu=emulated_gpu(2),
        overrides={"max_context": 96, "consumer_warps": 4, "kv_chunk": 64, "max_steps": 8, "batch": 4, **plan},
        prompt_passes=64,
        quiet=True,
    )


@pytest.mark.parametrize("family", tiered(FAMILIES, [name for name in FAMILIES if "window" not in name]))
def test_several_prompts_in_a_pass(family: str) -> None:
    config, plan = FAMILIES[family]
    ready, record = assembled(family), Record()
    requests = [
        Request(tuple(token_ids(length, config.vocab_size, 1)), 3, Sampling(0.8, 100 * number), count=1 + number % 2)
        for number, length in enumerate(LENGTHS)
    ]
    keeps = ready.launcher.window is None and not config.delta_layers
    alone = [ids for one in requests for ids in Service(ready, record, prefix_cache=keeps).answers([one])]
    service = Service(ready, record, prefix_cache=keeps)
    for _ in range(2):
        assert service.answers(requests) == alone
    assert not record.changed
    assert any(service.cached_tokens) == keeps
    reference = Reference(config, weights_of(config).tensor)
    ids = decided_ids([reference], np.random.default_rng(1), 90)
    scores = service.desk.score(ids, ready.logits_buffer())
    tolerance = E4M3_TOLERANCE if "kv_dtype" in plan else TOLERANCE
    assert relative_error(np.asarray(scores), reference.forward(ids)) < tolerance
