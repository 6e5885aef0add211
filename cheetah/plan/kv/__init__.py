"""The run-time plan of attention: which block takes which keys of a step, and how that is laid out in int32 words."""

from cheetah.plan.kv.encoding import KvPlanLayout, by_turns, kv_plan
from cheetah.plan.kv.launch import (
    LaunchTile,
    kv_plans_for_launch,
    launch_tiles,
    max_plans,
    most_tiles,
)
from cheetah.plan.kv.scheduler import ITEM_WORDS, KvPlan, Scheduling, Tile, schedule

__all__ = [
    "ITEM_WORDS",
    "KvPlan",
    "KvPlanLayout",
    "LaunchTile",
    "Scheduling",
    "Tile",
    "by_turns",
    "kv_plan",
    "kv_plans_for_launch",
    "launch_tiles",
    "max_plans",
    "most_tiles",
    "schedule",
]
