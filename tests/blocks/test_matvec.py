"""The matrix-vector product alone: odd sizes, numbers of blocks and of warps, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cheetah import lang as ch
from cheetah.blocks.matvec import Matvec
from cheetah.blocks.vector import load_vector
from cheetah.emulator import allocate, explore
from cheetah.generate import generate_kernel
from cheetah.lang import UnusedStageError, prim, ty
from cheetah.models.llama.packing import pack_matrix
from cheetah.models.llama.reference import widen
from cheetah.plan import MatrixLayout, ModelShape, PlanError
from tests.blocks.small_kernel import SmallKernel, filled, plan_of
from tests.program.rig import as_bf16, emulated_gpu, model, relative_error
from tests.tolerances import MATVEC

pytestmark = pytest.mark.compiler

PARAMETERS = ch.Params(weights=ty.ptr(ty.u8), x=ty.ptr(ty.bf16), y=ty.ptr_mut(ty.f32))

# rows, columns, blocks, then fields of the plan
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "one element": (1, 1, 1, {}),
    "one tile pair": (16, 32, 2, {}),
    "one over": (17, 33, 2, {}),
    "fewer strips than blocks": (20, 70, 5, {}),
    "one strip over a round": (65, 100, 4, {}),
    "a chunk and a pair": (40, 160, 3, {}),
    "many chunks": (50, 1000, 2, {}),
    "more chunks than stages": (200, 300, 2, {"stages": 2, "in_flight": 1}),
    "eight warps": (33, 700, 3, {"math_warps": 8}),
    "six warps": (33, 700, 3, {"math_warps": 6, "stage_bytes": 12288}),
    "large stages": (33, 1400, 3, {"math_warps": 4, "stage_bytes": 16384}),
    "rotated": (70, 90, 4, {"start_residual": 3}),
}


def product(rows: int, columns: int, blocks: int, fields: dict[str, Any]) -> tuple[SmallKernel, MatrixLayout]:
    """y = W x for W [rows, columns]: x is loaded as it is, each row of y is stored by the block that owns it."""
    shape = ModelShape(max(rows, 16), columns, 16, 1, 1, 64, 1)
    plan = plan_of(shape, blocks, **fields)
    layout = MatrixLayout("w", rows, columns, blocks, plan.stage_bytes, plan.start_residual)
    padded = layout.padded_columns

    def body(machine: Any, ring: Any, given: dict[str, Any]) -> None:
        matvec = Matvec(machine, ring, given["weights"])

        def read(data: Any, unit: Any, count: int) -> None:
            for number in range(count):
                data[number] = prim.load_constant_u32x4(given["x"] + (unit + number * machine.math_threads) * 8)

        def store(done: Any) -> None:
            row = done.strip * 16 + done.row
            with ch.if_((done.lane < 16) & (row < rows)):
                given["y"][row] = done.sum

        with machine.copy:
            matvec.copy(layout, ty.u64(0))
        with machine.math:
            load_vector(machine, padded, padded, read)
            matvec.multiply(layout, store)

    return SmallKernel(shape, blocks, plan, PARAMETERS, body), layout


@pytest.mark.parametrize("case", CASES)
def test_product_against_float64(case: str) -> None:
    kernel, layout = product(*CASES[case])
    draw = np.random.default_rng(1)
    matrix = as_bf16(draw.standard_normal((layout.rows, layout.columns)))
    x = np.zeros(layout.padded_columns, np.uint16)
    x[: layout.columns] = as_bf16(draw.standard_normal(layout.columns))
    weights = filled(pack_matrix(layout, matrix))
    wanted = widen(matrix).astype(np.float64) @ widen(x[: layout.columns]).astype(np.float64)

    def run(scheduler: str, seed: int) -> np.ndarray:
        y = allocate(layout.rows, np.float32)
        kernel.launch({"weights": weights, "x": filled(x), "y": y}, scheduler, seed)
        return y

    assert relative_error(run("round_robin", 0)[None], wanted[None]) < MATVEC
    report = explore(run, range(3))
    assert report.ok, str(report)


def test_an_odd_number_of_math_warps_is_refused() -> None:
    with pytest.raises(PlanError, match="math_warps is 3: .* use an even number"):
        generate_kernel(model(), emulated_gpu(2), math_warps=3)


def test_a_matrix_that_is_fetched_and_never_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matvec, "multiply", lambda self, layout, finish: None)
    with pytest.raises(UnusedStageError, match="the stages of `qkv` are filled but never used"):
        generate_kernel(model(), emulated_gpu(2))
