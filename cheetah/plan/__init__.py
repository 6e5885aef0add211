"""Static decisions as plain data and arithmetic: which block owns which rows, chunks, shared memory, the KV schedule.

Knows nothing of the language, the model's code or the runtime.
"""

from cheetah.plan.defaults import default_plan
from cheetah.plan.errors import PlanError
from cheetah.plan.formats import M_TILE_ROWS, VECTOR_COLUMNS
from cheetah.plan.gpu import GPUS, Gpu, gpu_named
from cheetah.plan.kv import KvPlanLayout, kv_plan
from cheetah.plan.kv.launch import LaunchTile, kv_plans_for_launch, launch_tiles, max_plans, most_tiles
from cheetah.plan.kv.scheduler import KvPlan, Scheduling, Tile
from cheetah.plan.layout import MatrixLayout
from cheetah.plan.matrices import StepMatrices, step_matrices
from cheetah.plan.plan import Plan
from cheetah.plan.regions import kernel_regions, shared_map
from cheetah.plan.shape import ModelShape
from cheetah.plan.shared_memory import Region, SharedMap, ring_regions, stages_that_fit
from cheetah.plan.split import Split

__all__ = [
    "GPUS",
    "VECTOR_COLUMNS",
    "M_TILE_ROWS",
    "Gpu",
    "KvPlan",
    "KvPlanLayout",
    "LaunchTile",
    "MatrixLayout",
    "ModelShape",
    "Plan",
    "PlanError",
    "Region",
    "Scheduling",
    "SharedMap",
    "Split",
    "StepMatrices",
    "Tile",
    "default_plan",
    "gpu_named",
    "kernel_regions",
    "kv_plan",
    "kv_plans_for_launch",
    "launch_tiles",
    "max_plans",
    "most_tiles",
    "ring_regions",
    "shared_map",
    "stages_that_fit",
    "step_matrices",
]
