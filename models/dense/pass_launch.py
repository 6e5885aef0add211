"""The parameters of a kernel of passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cheetah.lang import Expr, ty
from cheetah.models.config import ModelConfig
from cheetah.models.dense.launch import (
    ModelLaunch,
    buffer_field,
    hidden_states_parameter,
    number_field,
    parameter_field,
    parameters_of,
    peers_field,
    rank_field,
    taps_field,
    timeline_field,
)
from cheetah.models.dense.launch import in_all_memories as in_all_memories
from cheetah.package import KernelParameter
from cheetah.plan import Plan
from cheetah.plan.pass_tables import TABLE_WORDS


@dataclass(frozen=True, eq=False, kw_only=True)
class PassLaunch(ModelLaunch):
    """The kernel's parameters, in order. All but the workspace and the ids are those of the decode step."""

    ids: Expr = buffer_field(ty.ptr(ty.i32), "token ids of the pass: see cheetah.plan.pass_tables", "tokens")
    groups: Expr = buffer_field(ty.ptr(ty.i32), "of 8 columns each, also there", "token_groups", TABLE_WORDS)
    segments: Expr = buffer_field(ty.ptr(ty.i32), "parts of sequences, also there", "token_segments", TABLE_WORDS)
    tiles: Expr = buffer_field(
        ty.ptr(ty.i32), "what attention reads together, also there", "token_segments", TABLE_WORDS
    )
    workspace: Expr = buffer_field(
        ty.ptr_mut(ty.u8), "what phases hand on; zeroed once", "workspace_bytes", fill="zero"
    )
    wanted: Expr = buffer_field(ty.ptr(ty.i32), "columns whose last hidden states are wanted", "tokens")
    hidden_states: Expr = parameter_field(hidden_states_parameter(ty.ptr_mut(ty.bf16), given=True))
    column_count: Expr = number_field("columns of this launch in use")
    segment_count: Expr = number_field("segments of this launch")
    tile_count: Expr = number_field("rows of `tiles` of this launch")
    wanted_count: Expr = number_field(
        "columns in `wanted`; with none the launch ends before attention in the last layer"
    )
    arrivals: Expr = number_field("what the workspace's counter stands at: blocks x phases for each launch", ty.u64)
    taps: Expr = taps_field()
    rank: Expr | None = rank_field()
    peers: Mapping[str, tuple[Expr, ...]] = peers_field("workspace", "hidden_states", "taps")
    timeline: Expr | None = timeline_field(
        "nanoseconds of the events of every phase: see cheetah.blocks.timeline", "zero"
    )


def pass_parameters(
    config: ModelConfig, plan: Plan, traced: bool = False, ranks: int = 1
) -> dict[str, KernelParameter]:
    """The parameters of a kernel by name, in the order of its signature. plan: of decoding; traced: with a timeline;
    ranks: GPUs that make its passes together."""
    return parameters_of(PassLaunch, config, plan, traced, ranks)
