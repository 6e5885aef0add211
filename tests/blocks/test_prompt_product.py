"""Products of a pass against numpy, under every schedule; what the last stage, tile and M-tile leave over; bugs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from benchmarks.studies.prompt_kernel import (
    EPSILON,
    PARAMETERS,
    Product,
    from_accumulator_order,
    from_token_order,
    product_kernel,
    to_accumulator_order,
    to_token_order,
)
from cheetah.emulator import SCHEDULERS, EmulatorError, Program, allocate, compile_program
from cheetah.models.formats import pack_matrix
from cheetah.models.rounding import round_to_bf16, widen
from cheetah.plan import MatrixLayout, PlanError, gpu_named
from cheetah.plan.prompt import GROUP_BYTES, GROUP_TOKENS, PassPlan

pytestmark = pytest.mark.compiler

GPU = gpu_named("emulator-2")
PLAN = PassPlan(tokens=48, tile_tokens=16, warpgroups=1, stages=3)
STAGE_BYTES = 4096
SHAPES = {"plain": (96, 224), "swiglu": (80, 96), "residual": (48, 160)}
"""Rows and columns: rows that leave M-tiles of a tile over, an odd number of K-tiles or chunks, chunks not full."""


def to_bf16_bits(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)


def product(kind: str, normalised: bool = False) -> Product:
    rows, columns = SHAPES[kind]
    return Product(MatrixLayout("w", rows, columns, GPU.blocks, STAGE_BYTES), PLAN, GPU, kind, normalised)


@cache
def program(of: Product, old: str = "", new: str = "", sanitize: bool = False, watched: bool = False) -> Program:
    text = product_kernel(of).text
    assert not old or old in text, old
    parameters = [(name, str(type_)) for name, type_ in PARAMETERS.items()]
    changed = text.replace(old, new) if old else text
    return compile_program(changed, "prompt_product", parameters, sanitize=sanitize, watched=watched)


@dataclass
class Launch:
    """The arrays of a launch, drawn afresh, and what must come of them (float32, rounded as the kernel rounds)."""

    of: Product
    tokens: int = 40

    def __post_init__(self) -> None:
        draw = np.random.default_rng(5)
        layout, plan = self.of.layout, self.of.plan
        self.rows = round_to_bf16(draw.standard_normal((layout.rows, layout.columns)).astype(np.float32) / 8)
        self.x = round_to_bf16(draw.standard_normal((self.tokens, layout.columns)).astype(np.float32))
        self.norm = round_to_bf16(1 + draw.standard_normal(layout.padded_rows).astype(np.float32) / 4)
        self.stream = draw.standard_normal((plan.tokens, layout.padded_rows)).astype(np.float32)
        parts = -(-layout.columns // (16 * plan.tile_m_tiles))
        self.squares = draw.uniform(10, 90, (parts, plan.tokens)).astype(np.float32)

    def run(self, kernel: Program, scheduler: str = "round_robin", seed: int = 0) -> None:
        layout, plan = self.of.layout, self.of.plan
        weights = allocate(layout.total_bytes, np.uint8)
        weights[:] = pack_matrix(layout, to_bf16_bits(self.rows))
        x = allocate(plan.activation_bytes(layout.columns), np.uint8)
        x[:] = to_token_order(plan, to_bf16_bits(self.x))
        residual = allocate(self.stream.size, np.float32)
        residual[:] = to_accumulator_order(plan, self.stream)
        self.out = allocate(plan.activation_bytes(self.of.out_columns), np.uint8)
        self.out_squares = allocate((plan.row_tiles(layout), plan.tokens), np.float32)
        arguments = [weights, x, self.squares, to_bf16_bits(self.norm), residual, self.out, self.out_squares]
        shared = plan.shared(layout.format).total_bytes
        kernel.launch(GPU.blocks, plan.threads, shared, [*arguments, self.tokens], scheduler=scheduler, seed=seed)
        self.residual = residual

    def expected(self) -> np.ndarray:
        """[tokens, rows] before the last rounding."""
        sums = self.x @ self.rows.T
        if self.of.normalised:
            sums *= 1 / np.sqrt(self.squares.sum(axis=0)[: self.tokens, None] / self.of.layout.columns + EPSILON)
        return sums

    def error(self) -> float:
        """Largest difference from what is expected, relative to numbers above 1."""
        sums, plan = self.expected(), self.of.plan
        found = widen(from_token_order(plan, self.out, self.of.out_columns))[: self.tokens]
        if self.of.kind == "plain":
            return largest(found[:, : self.of.layout.rows], sums)
        if self.of.kind == "swiglu":
            halves = sums.reshape(self.tokens, -1, 2, 8)
            gate, up = halves[:, :, 0].reshape(self.tokens, -1), halves[:, :, 1].reshape(self.tokens, -1)
            return largest(found, gate / (1 + np.exp(-gate)) * up)
        return self._residual_error(sums, found)

    def _residual_error(self, sums: np.ndarray, found: np.ndarray) -> float:
        kept = self.stream[: self.tokens] + sums
        x = round_to_bf16(kept)
        squares = np.square(x).reshape(self.tokens, -1).sum(axis=1)
        errors = [
            largest(from_accumulator_order(self.of.plan, self.residual)[: self.tokens], kept),
            largest(found, x * self.norm),
            largest(self.out_squares.sum(axis=0)[: self.tokens], squares),
        ]
        return max(errors)


def largest(found: np.ndarray, wanted: np.ndarray) -> float:
    return float((np.abs(found - wanted) / np.maximum(1, np.abs(wanted))).max())


TOLERANCE = 1e-2
"""Two roundings to bf16 and a sum on the edge of one."""


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.slow
def test_products_are_numpys(kind: str) -> None:
    of = product(kind, normalised=kind != "residual")
    bits = set()
    for scheduler in SCHEDULERS:
        for seed in range(3):
            launch = Launch(of)
            launch.run(program(of), scheduler, seed)
            assert launch.error() < TOLERANCE
            bits.add(launch.out.tobytes())
    assert len(bits) == 1


@pytest.mark.parametrize("tokens", [1, 16, 17, 48])
def test_any_number_of_tokens(tokens: int) -> None:
    launch = Launch(product("plain", normalised=True), tokens)
    launch.run(program(launch.of))
    assert launch.error() < TOLERANCE


@pytest.mark.parametrize("columns", [32, 64, 96])
def test_few_columns(columns: int) -> None:
    """One K-tile, one stage, one stage and a half."""
    of = product("plain")
    launch = Launch(replace(of, layout=replace(of.layout, columns=columns)))
    launch.run(program(launch.of))
    assert launch.error() < TOLERANCE


@pytest.mark.slow
def test_the_rules_of_memory_and_order_are_kept() -> None:
    of = product("residual")
    for mode in ({"watched": True}, {"sanitize": True}):
        launch = Launch(of)
        launch.run(program(of, **mode), "random", 3)
        assert launch.error() < TOLERANCE


BUGS = {
    "no fence": ("  wgmma_fence();\n", ""),
    "a stage given back a step early": (
        "mbarrier_arrive(empty + previous);",
        "mbarrier_arrive(empty + (previous + 1) % 3);",
    ),
    "no wait in the loop": ("  wgmma_wait_but_one();\n", ""),
    "no wait at the end": ("  wgmma_wait_all();\n", ""),
    "the wait at the end is for one group less": ("  wgmma_wait_all();\n", "  wgmma_wait_but_one();\n"),
    "the order of k is wrong": (", 128, 512);", ", 512, 128);"),
    "the second half of a K-tile is the first": ("descriptor + 16,", "descriptor,"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str) -> None:
    old, new = BUGS[bug]
    of = product("plain")
    launch = Launch(of)

    def find() -> None:
        for scheduler in SCHEDULERS:
            for seed in range(5):
                launch.run(program(of, old, new), scheduler, seed)
                assert launch.error() < TOLERANCE

    with pytest.raises((EmulatorError, AssertionError)):
        find()


def test_orders_have_inverses() -> None:
    draw = np.random.default_rng(1)
    bits = draw.integers(0, 2**16, (PLAN.tokens, 64), dtype=np.uint16)
    packed = to_token_order(PLAN, bits)
    np.testing.assert_array_equal(from_token_order(PLAN, packed, 64), bits)
    for column, token in ((0, 0), (37, 21), (63, 47)):
        group = column // 32 * PLAN.groups + token // GROUP_TOKENS
        place = group * GROUP_BYTES + PLAN.address_in_group(column % 32, token % GROUP_TOKENS)
        assert packed[place : place + 2].view(np.uint16)[0] == bits[token, column]
    stream = draw.standard_normal((PLAN.tokens, 32)).astype(np.float32)
    np.testing.assert_array_equal(from_accumulator_order(PLAN, to_accumulator_order(PLAN, stream)), stream)


def test_plans_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match="40 tokens, cut for 0, in tiles of 16: give whole tiles"):
        PassPlan(tokens=40, tile_tokens=16)
    with pytest.raises(PlanError, match="the chunks of w have 1: give decoding stages of a multiple of 2048 bytes"):
        PLAN.check(MatrixLayout("w", 64, 128, 2, 1024))
