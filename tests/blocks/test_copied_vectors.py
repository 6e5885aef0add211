"""Vectors that the copy engine brings behind the grid barrier: products with them, round after round, and what becomes
of those in which a wait, a fence or a meeting is missing."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from cheetah import lang as ch
from cheetah.blocks.columns import Columns
from cheetah.blocks.exchange_kinds import make_exchange
from cheetah.blocks.linear.matvec import Matvec
from cheetah.blocks.linear.prologue import Slices
from cheetah.emulator import SCHEDULERS, EmulatorError, allocate, explore
from cheetah.lang import ty
from cheetah.models.formats import pack_matrix
from cheetah.models.rounding import widen
from cheetah.plan import MatrixLayout, ModelShape
from cheetah.plan.formats import BF16_VECTOR
from tests.blocks.small_kernel import SmallKernel, filled, initialise, plan_of
from tests.blocks.test_matvec import in_fragment_order
from tests.blocks.test_quantized_products import rows_of
from tests.program.rig import as_bf16, relative_error
from tests.tolerances import MATVEC

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

PARAMETERS = ch.Params(
    weights=ty.ptr(ty.u8),
    exchange=ty.ptr_mut(ty.u8),
    x=ty.ptr(ty.u32),
    y=ty.ptr_mut(ty.f32),
    column_count=ty.u32,
    rounds=ty.u32,
)
ROUNDS = 3
Case = tuple[int, int, int, str, tuple[tuple[str, Any], ...]]
# rows, columns, blocks, format, fields of the plan
PARTS: Case = (70, 1250, 3, "bf16", (("tokens", 8), ("down_slices", 4)))
QUANTIZED_PARTS: Case = (33, 1200, 2, "int4-g128", (("tokens", 8), ("down_slices", 3)))
SHARED_UNITS: Case = (20, 100, 2, "int8", (("tokens", 4), ("down_slices", 1)))
PUBLISHED: Case = (33, 800, 2, "int4-g128", (("tokens", 8), ("down_slices", 2)))
"""What is published as the matrix wants it; elsewhere who reads it converts it."""
CASES: dict[str, Case] = {
    "published as the matrix wants it": PUBLISHED,
    "parts, the last one shorter": PARTS,
    "parts that are converted": QUANTIZED_PARTS,
    "units that several lanes read": SHARED_UNITS,
    "whole": (50, 700, 3, "bf16", (("tokens", 8), ("consumer_warps", 8), ("down_slices", 1))),
    "one token": (17, 33, 2, "bf16", (("down_slices", 1),)),
    "narrow M-tiles, parts": (40, 1536, 3, "bf16", (("tokens", 8), ("down_slices", 3), ("tile_rows", 8))),
}


@cache
def product(case: Case, watched: bool = False, sanitize: bool = False, bug: tuple[str, str] | None = None) -> Any:
    """Round r: the blocks publish x[r] in turns, word by word, and meet; y[r] = W x[r]."""
    rows, elements, blocks, format, fields = case
    formats = () if format == "bf16" else (("down", format),)
    shape = ModelShape(16, elements, 16, 1, 1, 64, 1, formats)
    options = dict(fields)
    tile_rows = options.pop("tile_rows", 16)
    plan = plan_of(shape, blocks, sync="barrier", **options)
    tiles = shape.format_of("down")
    chunk_bytes = tiles.chunk_bytes(plan.stage_bytes, plan.consumer_warps)
    how = {"slices": plan.down_slices, "format": tiles, "tile_rows": tile_rows}
    layout = MatrixLayout("w", rows, elements, blocks, chunk_bytes, **how)
    words = layout.padded_columns // 2 * plan.tokens
    published = layout.vector_kind(plan.tokens) if case == PUBLISHED else BF16_VECTOR

    def body(machine: Any, ring: Any, given: dict[str, Any]) -> None:
        columns = Columns(machine, given["column_count"], given["x"], given["x"])
        matvec = Matvec(columns, ring, given["weights"])
        exchange = make_exchange(machine, given["exchange"], {"v": words}, copied={"v": published})
        initialise(machine, matvec)
        initialise(machine, exchange)
        with machine.consumer:
            exchange.start()
        with ch.roles_for(machine.roles, given["rounds"], name="round") as round_:

            def store(done: Any) -> None:
                row, total = done.m_tile * tile_rows + done.row, done.sum()
                with ch.if_(done.is_own & (row < rows)):
                    given["y"][(round_ * plan.tokens + done.column) * rows + row] = total

            with machine.consumer:
                first = machine.block + machine.thread * blocks
                with ch.for_(first, words, machine.consumer_threads * blocks) as word:
                    exchange.publish("v", word, given["x"][round_ * words + word], 0)
                exchange.meet()
            matvec(layout, Slices(columns, exchange.at("v", ty.u32(0)), elements), store)
            with machine.consumer:
                exchange.meet()  # all have read before the next round is published

    kernel = SmallKernel(shape, blocks, plan, PARAMETERS, body, sanitize=sanitize, bug=bug, watched=watched)
    return kernel, layout


class Work:
    """Random weights and vectors of a case, and what comes of them."""

    def __init__(self, case: Case, **how: Any) -> None:
        self.kernel, self.layout = product(case, **how)
        rows, elements, tokens = self.layout.rows, self.layout.columns, self.kernel.plan.tokens
        draw = np.random.default_rng(1)
        if case[3] == "bf16":
            matrix = as_bf16(draw.standard_normal((rows, elements)))
            numbers = widen(matrix)
        else:
            matrix = rows_of(case[3], rows, elements)
            numbers = matrix.dequantized()
        self.weights = filled(pack_matrix(self.layout, matrix))
        x = np.zeros((ROUNDS, tokens, self.layout.padded_columns), np.uint16)
        x[:, :, :elements] = as_bf16(draw.standard_normal((ROUNDS, tokens, elements)))
        self.x = filled(np.stack([in_fragment_order(one) for one in x]))
        self.wanted = widen(x[:, :, :elements]).astype(np.float64) @ numbers.astype(np.float64).T

    def run(self, scheduler: str = "round_robin", seed: int = 0) -> np.ndarray:
        """y [rounds, tokens, rows]"""
        workspace = allocate((512 + self.x.nbytes,), np.uint8, fill=0)
        y = allocate(self.wanted.shape, np.float32)
        tokens = self.kernel.plan.tokens
        arguments = {"weights": self.weights, "exchange": workspace, "x": self.x, "y": y, "column_count": tokens}
        self.kernel.launch({**arguments, "rounds": ROUNDS}, scheduler, seed)
        return y

    def is_right(self, scheduler: str, seed: int) -> bool:
        found = self.run(scheduler, seed)
        return bool(np.isfinite(found).all()) and relative_error(found, self.wanted) < MATVEC


@pytest.mark.parametrize("case", CASES)
def test_products_against_float64(case: str) -> None:
    work = Work(CASES[case], watched=True)
    assert work.is_right("round_robin", 0)
    report = explore(work.run, range(3))
    assert report.ok, str(report)


REQUEST = "fence_proxy_async_global();\n    fence_proxy_async_shared();\n"
STORED = "// grid barrier\n      fence_proxy_async_global();"
RACE = "Race"
"""What only the race detector shows."""
CONVERTED = "warp_barrier();\n  vector_parities"
BUGS: dict[str, tuple[Case, tuple[str, str], str]] = {
    "multiplied before it has landed": (
        *(PARTS, ("mbarrier_wait(landed", "if (false) mbarrier_wait(landed")),
        "wrong sums|in flight",
    ),
    "copied over a part that is multiplied": (
        *(PARTS, ("  named_barrier(1, CONSUMERS);\n  if (part + 2 <", "  if (part + 2 <")),
        "wrong sums|in flight|has loaded without waiting|Deadlock",
    ),
    "parities that do not turn": (PARTS, ("vector_parities ^= 7u << half * 4;", ""), "wrong sums|Deadlock|in flight"),
    "no fence of who copies": (
        *(SHARED_UNITS, (REQUEST, REQUEST.replace("fence_proxy_async_global();", ""))),
        "the thread that issues this copy has made no fence_proxy_async",
    ),
    "no fence of who stores": (
        *(SHARED_UNITS, (STORED, "// grid barrier")),
        "that thread has made no fence_proxy_async",
    ),
    "multiplied before another lane has converted it": (
        *(SHARED_UNITS, (CONVERTED, "vector_parities")),
        RACE,
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    case, bug, words = BUGS[name]
    found = first_finding(Work(case, watched=words != RACE, sanitize=words == RACE, bug=bug))
    assert re.search(words, found), found or "nothing"


def first_finding(work: Work) -> str:
    """What the first schedule says in which something is wrong."""
    for seed in range(6):
        for scheduler in SCHEDULERS:
            try:
                if not work.is_right(scheduler, seed):
                    return "wrong sums"
            except EmulatorError as error:
                return f"{type(error).__name__}: {error}"
    return ""
