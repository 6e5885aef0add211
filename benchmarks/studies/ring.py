"""Study: depth and stage size of the copy ring (the paper's Table 8), on the whole decode step of Llama 3.1 8B.

How many chunks are requested at most at a time (`in_flight`) is varied beside them: a deep ring that asks for all of
its chunks at once delays the exchanges. Weights are random and lie in packed order whatever the stage size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.studies.decode_state import TINY, decode_state
from benchmarks.studies.measuring import Launch, Study, StudyError, Variant
from benchmarks.studies.model import Fused
from cheetah.generate import generate_kernel
from cheetah.models.config import ModelConfig
from cheetah.models.registry import preset
from cheetah.package import Generated
from cheetah.plan import Plan, PlanError
from cheetah.plan.formats import KV_TILE_TOKENS

MODEL, CONTEXT, STEPS = "llama-3.1-8b", 128, 4
# stage_bytes: (stages, in_flight), None for as many stages as fit.
KB = 1024
GRID: dict[int, tuple[tuple[int | None, int], ...]] = {
    8 * KB: ((None, 4), (None, 8), (None, 16)),
    16 * KB: ((None, 2), (None, 3), (None, 4), (None, 6), (None, 11), (8, 4), (6, 4), (4, 3), (2, 1)),
    32 * KB: ((None, 1), (None, 2), (None, 3), (None, 5), (4, 2), (2, 1)),
    64 * KB: ((None, 1), (None, 2)),
}
TINY_GRID: dict[int, tuple[tuple[int | None, int], ...]] = {4 * KB: ((None, 3), (2, 1)), 8 * KB: ((4, 2), (64, 1))}


def run(study: Study) -> None:
    """Measure every ring that fits, all by turns."""
    config, context = (TINY, 40) if study.tiny else (preset(MODEL), CONTEXT)
    kernels = rings(study, config)
    first = next(iter(kernels.values()))
    with decode_state(study.device, config, first.manifest) as state:
        arguments = state.arguments(context, STEPS)
        fused = {name: Fused(state, config, generated, name) for name, generated in kernels.items()}
        _check(study, fused, arguments)
        bytes_per_step = first.manifest.step_bytes["weights"] + context * config.kv_bytes_per_token
        variants = {
            name: Variant(_launch(one, arguments), STEPS, bytes_per_step, None, one.about)
            for name, one in fused.items()
        }
        case = {"model": "tiny" if study.tiny else MODEL, "context": context}
        study.compare(case, variants, state.buffers["weights"])


def rings(study: Study, config: ModelConfig) -> dict[str, Generated]:
    """The kernel of every ring of the grid that fits, by its description."""
    kernels: dict[str, Generated] = {}
    for stage_bytes, depths in (TINY_GRID if study.tiny else GRID).items():
        for stages, in_flight in depths:
            try:
                made = generate_kernel(config, study.gpu, stage_bytes=stage_bytes, stages=stages, in_flight=in_flight)
            except PlanError:  # it does not fit into shared memory, or asks for more chunks than there are stages
                continue
            kernels[f"{made.manifest.plan['stages']} x {stage_bytes // KB} KB, {in_flight} in flight"] = made
    return kernels


def _launch(fused: Fused, arguments: dict[str, Any]) -> Launch:
    return Launch(lambda: fused.launch(arguments), from_graph=False)


def _check(study: Study, kernels: dict[str, Fused], arguments: dict[str, Any]) -> None:
    """Every kernel must make the same tokens each time, and so must rings of one stage size, which have the same
    weights, where as many warps take turns with the keys: how many may is what a shallow ring limits."""
    made: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
    for name, fused in kernels.items():
        for turn in ("first", "second"):
            fused.launch(arguments)
            study.wait()
            tokens = tuple(fused.tokens.download(np.int32, STEPS + 1).tolist())
            made.setdefault(_alike(fused), {})[f"{name}, {turn} launch"] = tokens
    for same in made.values():
        if len(set(same.values())) > 1:
            raise StudyError(f"kernels that differ in their ring alone make different tokens: {same}")


def _alike(fused: Fused) -> tuple[int, int]:
    """(stage bytes, warps that take turns with the keys of an item at most): kernels of one pair make the same bits."""
    plan = Plan.from_dict(fused.manifest.plan)
    tiles = plan.kv_stage_tokens(fused.head_dim) // KV_TILE_TOKENS
    return plan.stage_bytes, min(plan.consumer_warps, max(1, (plan.stages - plan.in_flight) * tiles))
