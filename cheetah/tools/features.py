"""What a kernel has that others have not: by which `cheetah check` knows whether the small models that it looks at have
what the named model's kernels have on a GPU.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from cheetah.generate import choose_plan
from cheetah.manifest import Manifest
from cheetah.models.config import ModelConfig
from cheetah.models.dense import program, prompt
from cheetah.plan import Gpu, Plan, PlanError, step_matrices
from cheetah.plan.formats import BF16, KV_TILE_TOKENS
from cheetah.plan.halves import PART_BYTES
from cheetah.plan.prompt import PassPlan, default_pass_plan, short_pass_plans

PASSES, LONG_PASS = "passes over prompts", 2048
TAPPED = "hidden states of layers kept"
FEW_STATES = 4
"""States of a row of attention that one warp folds by itself."""


def features_of_steps(config: ModelConfig, gpu: Gpu, plan: Plan) -> set[str]:
    """Of the kernel of decode steps by that plan."""
    matrices = step_matrices(config.shape, plan, gpu)
    tokens = "one token a step" if plan.tokens == 1 else "several tokens a step"
    has = _of_model(config, plan) | {
        "tagged words": plan.sync == "flags",
        "copied vectors": plan.sync == "barrier",
        "vectors in halves of L2": _lies_in_halves(config, gpu, plan),
        f"narrow M-tiles, {tokens}": any(one.is_narrow for one in matrices),
        "parts of a product's input": plan.down_slices > 1,
        TAPPED: bool(plan.taps),
        "a fused router": bool(plan.fused_router),
        "several sequences": plan.batch > 1,
        tokens: True,
        "fewer chunks under way while waiting": plan.in_flight_waiting < plan.in_flight,
        "a single chunk under way while waiting": plan.waits_most,
        "registers moved between roles": plan.moves_registers,
        "items of a fixed length": plan.kv_chunk > 0,
        "runs of pages": KV_TILE_TOKENS % plan.page_size > 0,
        "whole pages": KV_TILE_TOKENS % plan.page_size == 0,
        f"merges of more than {FEW_STATES} states": most_states(config, gpu, plan) > FEW_STATES,
    }
    return {name for name, is_there in has.items() if is_there}


def _lies_in_halves(config: ModelConfig, gpu: Gpu, plan: Plan) -> bool:
    """Whether inputs of products lie in parts, between which there is room for others."""
    exchanged = program.exchanged_vectors(config, gpu, plan)
    gaps = (np.diff(np.sort(one.places, axis=None)) for one in exchanged if one.is_tagged)
    return any(np.any(found > PART_BYTES // 4) for found in gaps)


def features_of_passes(config: ModelConfig, gpu: Gpu, plan: Plan, pass_plan: PassPlan) -> set[str]:
    """Of the kernel of passes over prompts."""
    matrices = step_matrices(config.shape, plan, gpu)
    cuts = prompt.cuts(config, gpu, plan, pass_plan).values()
    has = _of_model(config, plan) | {
        "narrow M-tiles": any(one.is_narrow for one in matrices.of_layer),
        "parts of products that are added": any(parts > 1 for _, parts in cuts),
        TAPPED: bool(plan.taps),
        "lower tiles": any(height is not None for height, _ in cuts),
        "several warpgroups": pass_plan.warpgroups > 1,
    }
    return {PASSES, *(f"{name}, in passes" for name, is_there in has.items() if is_there)}


def features_of(config: ModelConfig, manifest: Manifest) -> set[str]:
    """Of a generated kernel, of steps or of passes."""
    gpu, plan = Gpu(**manifest.gpu, ranks=manifest.world_size), dict(manifest.plan)
    decoding = plan.pop("decoding", None)
    if decoding is None:
        return features_of_steps(config, gpu, Plan.from_dict(plan))
    return features_of_passes(config, gpu, Plan.from_dict(decoding), PassPlan.from_dict(plan))


def features_on(gpu: Gpu, config: ModelConfig, **options: Any) -> set[str]:
    """What a model's kernels have on a machine by these options of the plan: the one of steps, and those of passes of
    all lengths, where it has passes. PlanError where there is no such plan."""
    plan = choose_plan(config, gpu, **options)
    found = features_of_steps(config, gpu, plan)
    for pass_plan in (default_pass_plan(gpu, LONG_PASS, config.shape), *short_pass_plans(gpu, config.shape)):
        with suppress(PlanError):
            found |= features_of_passes(config, gpu, plan, pass_plan)
    return found


def _of_model(config: ModelConfig, plan: Plan) -> dict[str, bool]:
    """What steps and passes have in common."""
    formats = {f"weights in {format}": True for _, format in config.weight_formats if format != BF16.name}
    kinds = config.kinds
    return formats | {
        "columns in an order": config.act_order,
        "a cache in 8 bits": plan.kv_dtype == "e4m3",
        "a window": any(kind.attention.window_of(plan.max_context) is not None for kind in kinds),
        "layers of several kinds": len(kinds) > 1,
        "biases": any(kind.attention.biases for kind in kinds),
        "norms of heads": any(kind.attention.head_norms for kind in kinds),
        "no rotation in some layers": any(kind.attention.rope is None for kind in kinds),
        "a soft cap": any(kind.attention.soft_cap is not None for kind in kinds),
        "attention sinks": any(kind.attention.sinks for kind in kinds),
        "experts": any(kind.routing is not None for kind in kinds),
        "biases of experts": config.has_expert_biases,
        "a clamped gate": config.clamped_gate is not None,
        "norms after sublayers": any(kind.norms.after for kind in kinds),
    }


def most_states(config: ModelConfig, gpu: Gpu, plan: Plan) -> int:
    """Partial states of a row at most: of a full context, whose keys all blocks share where items have no fixed
    length."""
    if plan.kv_chunk:
        return -(-plan.max_context // plan.kv_chunk)
    return min(-(-plan.max_context // gpu.kv_chunk_min), gpu.blocks)
