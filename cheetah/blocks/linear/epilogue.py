"""What happens to the rows of a finished strip: residual, SwiGLU, rotary embedding. One warp and token, one row a
lane."""

from __future__ import annotations

from typing import Any

from cheetah import lang as ch
from cheetah.blocks.columns import fragment_word
from cheetah.blocks.exchange import Exchange
from cheetah.blocks.linear.matvec import Rows
from cheetah.blocks.machine import Machine
from cheetah.lang import prim, ty
from cheetah.plan import STRIP_ROWS

HALF = STRIP_ROWS // 2


@ch.inline
def publish_rows(
    exchange: Exchange, name: str, rows: Rows, value: ch.Expr, first: ch.Value, count: int, epoch: ch.Expr
) -> None:
    """Publish `count` values, one a lane from lane 0 on, as pairs of bf16 beginning at element `first` (even)."""
    tokens = exchange.machine.plan.tokens
    neighbour = prim.shuffle_xor_f32(value, 1)
    pair = prim.pack_bf16x2(value, neighbour)
    with ch.if_((rows.lane < count) & (rows.lane % 2 == 0)):
        exchange.publish(name, fragment_word(first + rows.lane, rows.column, tokens), pair, epoch)


@ch.inline
def add_residual(machine: Machine, exchange: Exchange, name: str, rows: Rows, epoch: ch.Expr) -> None:
    """residual += rows, kept in f32 by the block that owns them, and published rounded to bf16."""
    residual = machine.region("residual", ty.f32)
    value = ch.var(ty.f32, rows.sum)
    with ch.if_(rows.lane < STRIP_ROWS):
        place = (rows.round * STRIP_ROWS + rows.row) * machine.plan.tokens + rows.column
        value += residual[place]
        residual[place] = value
    publish_rows(exchange, name, rows, value, rows.strip * STRIP_ROWS, STRIP_ROWS, epoch)


@ch.inline
def scaled(machine: Machine, rows: Rows) -> Any:
    """The rows of a product whose input was normalised: times 1/rms of their token."""
    return rows.sum * machine.region("scales", ty.f32)[rows.column]


@ch.inline
def swiglu(machine: Machine, exchange: Exchange, name: str, rows: Rows, epoch: ch.Expr) -> None:
    """silu(gate) * up: a strip holds 8 gate rows and, 8 lanes further, their up rows."""
    value = scaled(machine, rows)
    other = prim.shuffle_xor_f32(value, HALF)
    # Lanes of the up rows compute something too; only the first 8 lanes publish.
    gated = prim.divide_f32(value, 1.0 + prim.exp_f32(-value)) * other
    publish_rows(exchange, name, rows, gated, rows.strip * HALF, HALF, epoch)


@ch.inline
def rotate(machine: Machine, rows: Rows, value: ch.Expr, strip_of_head: ch.Expr) -> tuple[Any, Any]:
    """RoPE (rotate-half): the pair (k, k + D/2) lies 8 lanes apart. Returns the rotated value and its dim in the head.

    cos and sin of the token's position lie in the region `rope` as pairs.
    """
    angles = machine.region("rope", ty.f32x2) + rows.column * (machine.shape.head_dim // 2)
    frequency = strip_of_head * HALF + rows.row % HALF
    angle = angles[frequency]
    partner = prim.shuffle_xor_f32(value, HALF)
    is_second = rows.row >= HALF
    rotated = value * angle.x + ch.select(is_second, partner, -partner) * angle.y
    dim = frequency + ch.select(is_second, machine.shape.head_dim // 2, ty.u32(0))
    return rotated, dim
