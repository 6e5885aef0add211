"""One product of a pass over many tokens as a kernel of its own, written with the blocks of prompts.

`kind`: "plain" (the rows), "swiglu" (gate and up rows), or "residual" (added to a residual stream, whose next norm's
input is stored).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.studies.kernels import finish_kernel
from cheetah import lang as ch
from cheetah.blocks.prompt.cases import Finish, Given
from cheetah.blocks.prompt.finish import Scales, Store, StoreGated, StoreResidual
from cheetah.blocks.prompt.machine import PassMachine, emit_pass, start_pass
from cheetah.blocks.prompt.product import TileProduct
from cheetah.blocks.prompt.ring import TileRing
from cheetah.lang import prim, ty
from cheetah.package import Generated
from cheetah.plan import Gpu, MatrixLayout
from cheetah.plan.formats import M_TILE_ROWS, VECTOR_COLUMNS
from cheetah.plan.prompt import GROUP_TOKENS, PassPlan

EPSILON = 1e-5
PARAMETERS = ch.Params(
    weights=ty.ptr(ty.u8),
    input=ty.ptr(ty.u8),
    squares=ty.ptr(ty.f32),
    norm=ty.ptr(ty.bf16),
    residual=ty.ptr_mut(ty.f32),
    out=ty.ptr_mut(ty.u8),
    out_squares=ty.ptr_mut(ty.f32),
    tokens=ty.u32,
)
KINDS = ("plain", "swiglu", "residual")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Product:
    """What a kernel is made for. normalised: the input's norm is finished here, by 1/rms from `squares`."""

    layout: MatrixLayout
    plan: PassPlan
    gpu: Gpu
    kind: str = "plain"
    normalised: bool = False

    @property
    def out_columns(self) -> int:
        """Columns of the output: padded rows, or gated ones."""
        return self.layout.padded_rows // (2 if self.kind == "swiglu" else 1)


def product_kernel(product: Product) -> Generated:
    """Text and manifest. Shapes: weights as packed; input, out in token order; squares f32 [row tiles of the input]
    [tokens]; norm bf16 [padded rows]; residual in accumulator order; out_squares f32 [row tiles][tokens]."""
    plan, gpu = product.plan, product.gpu
    shared = plan.shared(product.layout.format, gpu.shared_bytes)

    @ch.kernel(PARAMETERS, name="prompt_product", max_threads=plan.threads)
    def prompt_product(**given: Any) -> None:
        machine = start_pass(plan, gpu, shared)
        _emit(product, machine, SimpleNamespace(**given))

    return finish_kernel(prompt_product, gpu, plan, shared.total_bytes, cooperative=False)


@ch.inline
def _emit(product: Product, machine: PassMachine, given: SimpleNamespace) -> None:
    plan = machine.plan
    token_tiles = (given.tokens + (plan.tile_tokens - 1)) // plan.tile_tokens
    ring = TileRing(machine, product.layout.format)
    with ch.if_(machine.thread == 0):
        ring.initialise()
        prim.mbarrier_fence_init()
    prim.block_barrier()  # orders the barriers' initialisation before their first use by any role
    ring.start()
    multiply = TileProduct(machine, ring, token_tiles)
    residual = given.residual if product.kind == "residual" else None
    operands = Given(given.weights, ch.argument(0, ty.u64), given.input, residual)
    multiply(product.layout, operands, _finish(product, machine, given))
    emit_pass(machine)


def _finish(product: Product, machine: PassMachine, given: SimpleNamespace) -> Finish:
    if product.kind == "residual":
        m_tiles = product.layout.m_tiles
        return StoreResidual(machine, given.residual, [given.out], [given.out_squares], given.norm, m_tiles)
    columns = product.layout.columns
    parts = -(-columns // (M_TILE_ROWS * machine.plan.tile_m_tiles))
    scales = Scales(machine, given.squares, parts, columns, EPSILON) if product.normalised else None
    kind = {"plain": Store, "swiglu": StoreGated}[product.kind]
    return kind(machine, [given.out], product.layout.full_m_tiles, scales)


# -- arrays ---------------------------------------------------------------------------------------------------------


def to_token_order(plan: PassPlan, x: NDArray[np.uint16]) -> Bytes:
    """bf16 bits [tokens, columns] as a buffer of activations; what there is not is zero."""
    tokens, columns = x.shape
    padded = np.zeros((plan.tokens, -(-columns // VECTOR_COLUMNS) * VECTOR_COLUMNS), np.uint16)
    padded[:tokens, :columns] = x
    # token: group, in group; column: K-tile, i, unit, low or high
    axes = padded.reshape(plan.groups, GROUP_TOKENS, -1, 4, 4, 2)
    return np.ascontiguousarray(axes.transpose(2, 0, 4, 1, 3, 5)).view(np.uint8).ravel()


def from_token_order(plan: PassPlan, packed: Bytes, columns: int) -> NDArray[np.uint16]:
    """The inverse: bf16 bits [tokens of the pass, columns]."""
    axes = packed.view(np.uint16).reshape(-1, plan.groups, 4, GROUP_TOKENS, 4, 2)
    return axes.transpose(1, 3, 0, 4, 2, 5).reshape(plan.tokens, -1)[:, :columns]


def to_accumulator_order(plan: PassPlan, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """f32 [tokens of the pass, rows] as a residual stream: rows g, g, g + 8, g + 8 of tokens 2t, 2t + 1 a lane."""
    axes = x.reshape(plan.groups, 4, 2, -1, 2, 8)  # group, t, token of two; M-tile, half of its rows, g
    return np.ascontiguousarray(axes.transpose(3, 0, 5, 1, 4, 2)).ravel()


def from_accumulator_order(plan: PassPlan, stream: NDArray[np.float32]) -> NDArray[np.float32]:
    """The inverse: f32 [tokens of the pass, rows]."""
    axes = stream.reshape(-1, plan.groups, 8, 4, 2, 2)
    return axes.transpose(1, 3, 5, 0, 4, 2).reshape(plan.tokens, -1)
