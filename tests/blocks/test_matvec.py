"""A matrix times the vectors of several tokens, alone: odd sizes, numbers of blocks, warps, tokens; slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cheetah import lang as ch
from cheetah.blocks.columns import Columns, fragment_word
from cheetah.blocks.linear.matvec import Matvec
from cheetah.blocks.linear.prologue import Slices, Units
from cheetah.emulator import allocate, explore
from cheetah.generate import generate_kernel
from cheetah.lang import UnusedStageError, prim, ty
from cheetah.models.formats import pack_matrix
from cheetah.models.rounding import widen
from cheetah.plan import VECTOR_COLUMNS, MatrixLayout, ModelShape, PlanError
from cheetah.plan.index import round_up
from cheetah.plan.narrow import residual_tile_rows
from tests.blocks.small_kernel import SmallKernel, filled, gpu_of, initialise, plan_of
from tests.program.rig import as_bf16, emulated_gpu, model, relative_error
from tests.tiers import tiered
from tests.tolerances import MATVEC

pytestmark = pytest.mark.compiler

PARAMETERS = ch.Params(weights=ty.ptr(ty.u8), x=ty.ptr(ty.u32), y=ty.ptr_mut(ty.f32), column_count=ty.u32)

# rows, columns, blocks, then fields of the plan
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "one element": (1, 1, 1, {}),
    "one K-tile": (16, 32, 2, {}),
    "one over": (17, 33, 2, {}),
    "fewer M-tiles than blocks": (20, 70, 5, {}),
    "one M-tile over a wave": (65, 100, 4, {}),
    "a chunk and a pair": (40, 160, 3, {}),
    "many chunks": (50, 1000, 2, {}),
    "more chunks than stages": (200, 300, 2, {"stages": 2, "in_flight": 1}),
    "fewer requests while it waits": (200, 300, 2, {"in_flight": 3, "in_flight_waiting": 1}),
    "eight warps": (33, 700, 3, {"consumer_warps": 8}),
    "six warps": (33, 700, 3, {"consumer_warps": 6, "stage_bytes": 12288}),
    "large stages": (33, 1400, 3, {"consumer_warps": 4, "stage_bytes": 16384}),
    "rotated": (70, 90, 4, {"start": 3}),
    "two tokens": (50, 200, 3, {"tokens": 2}),
    "one adding warp": (200, 100, 3, {"adding_warps": 1}),
    "three adding warps in turn": (200, 100, 3, {"adding_warps": 3}),
    "four tokens, four warps": (50, 200, 3, {"tokens": 4, "consumer_warps": 4}),
    "eight tokens, two warps": (50, 200, 3, {"tokens": 8}),
    "eight tokens, eight warps": (50, 700, 3, {"tokens": 8, "consumer_warps": 8}),
    "sixteen tokens": (33, 100, 3, {"tokens": 16}),
    "64 tokens, eight warps": (33, 100, 2, {"tokens": 64, "consumer_warps": 8}),
    "two slices": (50, 1000, 3, {"tokens": 4, "down_slices": 2}),
    "uneven slices, a last wave that some have": (70, 1250, 3, {"tokens": 8, "down_slices": 3}),
    "slices for one token": (33, 700, 2, {"down_slices": 4}),
    "narrow": (48, 576, 2, {"start": 1}),
    "narrow, two tokens": (64, 320, 3, {"tokens": 2}),
    "narrow, four tokens, two slices": (64, 1344, 3, {"tokens": 4, "down_slices": 2}),
    "narrow, eight tokens": (48, 320, 2, {"tokens": 8}),
    "narrow, sixteen tokens, three slices": (48, 640, 2, {"tokens": 16, "down_slices": 3}),
}


ORDERED = ch.Params(**dict(PARAMETERS.items()), places=ty.ptr(ty.u16))


def product(
    rows: int,
    elements: int,
    blocks: int,
    fields: dict[str, Any],
    format: str = "bf16",
    *,
    parameters: ch.Params = PARAMETERS,
    **how: Any,
) -> tuple[SmallKernel, MatrixLayout]:
    """y = W x for W [rows, elements] and several x: each row of y is stored by the block that owns it. parameters:
    ORDERED for a matrix whose columns lie where `places` says. how: options of `SmallKernel`. M-tiles are narrow where
    the rule says so of a down projection of these sizes."""
    formats = () if format == "bf16" else (("down", format),)
    shape = ModelShape(max(rows, 16), elements, 16, 4, 1, 64, 1, formats)
    fields = {"down_slices": 1, "start": 0, **fields}
    start = fields.pop("start")
    plan = plan_of(shape, blocks, **fields)
    slices, tiles = plan.down_slices, shape.format_of("down")
    chunk_bytes = tiles.chunk_bytes(plan.stage_bytes, plan.consumer_warps)
    height = residual_tile_rows(shape, gpu_of(blocks))
    layout = MatrixLayout(
        *("w", rows, elements, blocks, chunk_bytes, start), slices=slices, format=tiles, tile_rows=height
    )

    def body(machine: Any, ring: Any, given: dict[str, Any]) -> None:
        columns = Columns(machine, given["column_count"], given["x"], given["x"])
        matvec = Matvec(columns, ring, given["weights"])
        initialise(machine, matvec)

        def read(data: Any, unit: Any, count: int) -> None:
            for number in range(count):
                data[number] = prim.load_constant_u32x4(given["x"] + (unit + number * machine.consumer_threads) * 4)

        def store(done: Any) -> None:
            row, total = done.m_tile * done.count + done.row, done.sum()
            with ch.if_(done.is_own & (row < rows)):
                given["y"][done.column * rows + row] = total

        available = round_up(elements, VECTOR_COLUMNS)
        matvec(layout, Slices(columns, Units(read), available, given.get("places")), store)

    return SmallKernel(shape, blocks, plan, parameters, body, **how), layout


def in_fragment_order(x: np.ndarray) -> np.ndarray:
    """bf16 bits [tokens, elements] as the exchange holds them (u32)."""
    tokens, elements = x.shape
    words = np.zeros(x.size // 2, np.uint32)
    element, token = np.meshgrid(np.arange(0, elements, 2), np.arange(tokens))
    pairs = x[:, 0::2].astype(np.uint32) | x[:, 1::2].astype(np.uint32) << 16
    words[fragment_word(element, token, tokens)] = pairs
    return words


EXHAUSTIVE = (
    *("one K-tile", "one over", "one M-tile over a wave", "a chunk and a pair", "many chunks", "eight warps"),
    *("large stages", "two tokens", "one adding warp", "four tokens, four warps", "eight tokens, eight warps"),
    *("sixteen tokens", "two slices", "narrow, two tokens", "narrow, eight tokens"),
)
"""Others have the same together with something else."""


@pytest.mark.slow
@pytest.mark.parametrize("case", tiered(CASES, EXHAUSTIVE))
def test_product_against_float64(case: str) -> None:
    kernel, layout = product(*CASES[case])
    assert layout.is_narrow == case.startswith("narrow")
    draw = np.random.default_rng(1)
    tokens = kernel.plan.tokens
    matrix = as_bf16(draw.standard_normal((layout.rows, layout.columns)))
    x = np.zeros((tokens, layout.padded_columns), np.uint16)
    x[:, : layout.columns] = as_bf16(draw.standard_normal((tokens, layout.columns)))
    weights = filled(pack_matrix(layout, matrix))
    wanted = widen(x[:, : layout.columns]).astype(np.float64) @ widen(matrix).astype(np.float64).T

    def run(scheduler: str, seed: int, used: int = tokens) -> np.ndarray:
        y = allocate((tokens, layout.rows), np.float32)
        given = in_fragment_order(x)
        arguments = {"weights": weights, "x": filled(given), "y": y, "column_count": used}
        kernel.launch(arguments, scheduler, seed)
        return y

    everything = run("round_robin", 0)
    assert relative_error(everything, wanted) < MATVEC
    report = explore(run, range(3))
    assert report.ok, str(report)
    if tokens > 1:  # a kernel serves fewer tokens with the same bits, and leaves the rest alone
        fewer = run("random", 1, tokens - 1)
        np.testing.assert_array_equal(fewer[:-1], everything[:-1])
        assert np.isnan(fewer[-1]).all()


@pytest.mark.slow
def test_slices_change_no_bit() -> None:
    """Chunks are added in the same order, whatever is multiplied between them."""
    outputs = []
    for slices in (1, 2, 5):
        kernel, layout = product(70, 1250, 3, {"tokens": 4, "down_slices": slices})
        draw = np.random.default_rng(2)
        weights = filled(pack_matrix(layout, as_bf16(draw.standard_normal((layout.rows, layout.columns)))))
        x = as_bf16(draw.standard_normal((4, layout.padded_columns)))
        y = allocate((4, layout.rows), np.float32)
        arguments = {"weights": weights, "x": filled(in_fragment_order(x)), "y": y, "column_count": 4}
        kernel.launch(arguments, "random", slices)
        outputs.append(y)
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])


def test_an_odd_number_of_consumer_warps_is_refused() -> None:
    with pytest.raises(PlanError, match="consumer_warps is 3: .* use an even number"):
        generate_kernel(model(), emulated_gpu(2), consumer_warps=3)


def test_products_without_adding_warps_are_refused() -> None:
    with pytest.raises(PlanError, match="adding_warps is 0: nobody would finish the rows"):
        generate_kernel(model(), emulated_gpu(2), adding_warps=0)


@pytest.mark.slow
def test_a_matrix_that_is_fetched_and_never_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matvec, "multiply", lambda self, layout, load: None)
    with pytest.raises(UnusedStageError, match="the stages of `qkv` are filled but never used"):
        generate_kernel(model(), emulated_gpu(2))
