"""Static decisions as plain data and arithmetic: which block owns which rows, chunks, shared memory, the KV schedule.

Knows nothing of the language, the model's code or the runtime.
"""

from cheetah.plan.defaults import default_plan
from cheetah.plan.errors import PlanError
from cheetah.plan.formats import M_TILE_ROWS, VECTOR_COLUMNS
from cheetah.plan.gpu import GPUS, Gpu, gpu_named
from cheetah.plan.layout import MatrixLayout
from cheetah.plan.matrices import StepMatrices, step_matrices
from cheetah.plan.plan import Plan
from cheetah.plan.regions import shared_map
from cheetah.plan.shape import ModelShape
from cheetah.plan.shared_memory import Region, SharedMap

__all__ = [
    "GPUS",
    "VECTOR_COLUMNS",
    "M_TILE_ROWS",
    "Gpu",
    "MatrixLayout",
    "ModelShape",
    "Plan",
    "PlanError",
    "Region",
    "SharedMap",
    "StepMatrices",
    "default_plan",
    "gpu_named",
    "shared_map",
    "step_matrices",
]
