"""What each of several GPUs (ranks) has of a model's matrices: whole M-tiles, as many as the others, or whole heads."""

from __future__ import annotations

from dataclasses import replace

from cheetah.plan.errors import PlanError
from cheetah.plan.formats import M_TILE_ROWS
from cheetah.plan.gpu import RANKS, Gpu
from cheetah.plan.index import ceil_div
from cheetah.plan.narrow import residual_tile_rows
from cheetah.plan.products import Product
from cheetah.plan.shape import ModelShape


def require_shared(shape: ModelShape, gpu: Gpu) -> None:
    """PlanError, with the numbers of GPUs that work, unless the ranks of a machine share heads and M-tiles evenly."""
    if problem := _why_not_shared(shape, gpu, gpu.ranks):
        works = [str(ranks) for ranks in RANKS if _why_not_shared(shape, gpu, ranks) is None]
        advice = f"one of {', '.join(works)}" if len(works) > 1 else "one GPU"
        raise PlanError(f"a step by {gpu.ranks} GPUs: {problem}: use {advice}")


def _why_not_shared(shape: ModelShape, gpu: Gpu, ranks: int) -> str | None:
    if ranks == 1:
        return None
    if shape.joint_norms and shape.kv_heads % ranks:
        return f"norms over all heads add up each key head once, and {shape.kv_heads} are on {ranks} GPUs"
    try:
        shape.of_rank(ranks)
    except PlanError as problem:
        return str(problem)
    rows = residual_tile_rows(shape, replace(gpu, ranks=ranks))
    for product in shape.table.products:
        m_tiles = ceil_div(product.rows, rows if product.adds else M_TILE_ROWS)
        if not product.is_own and m_tiles % ranks:
            return f"the {m_tiles} M-tiles of {product.name} cannot be dealt evenly to {ranks} GPUs"
    return None


def rows_of_rank(product: Product, shape: ModelShape, tile_rows: int, ranks: int) -> int:
    """Rows that a rank has, the last one with those that fill the last M-tiles of the head."""
    if ranks == 1:
        return product.rows
    if product.is_own:
        return shape.of_rank(ranks).table.named(product.name).rows
    return ceil_div(ceil_div(product.rows, tile_rows), ranks) * tile_rows
