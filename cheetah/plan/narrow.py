"""Which matrices have narrow M-tiles, see `MatrixLayout`.

Those whose rows are added to the residual (o and down) have the same, so that a row of the residual lies with one
block. In models of experts the router may have them, and q, k and v whose readers finish heads; gate, and q and k that
are rotated where they are made, need the rows of an M-tile together. Kernels that share weights share the model and the
machine, which is all that is asked.
"""

from cheetah.plan.formats import BF16, M_TILE_ROWS, NARROW_ROWS
from cheetah.plan.gpu import Gpu
from cheetah.plan.index import ceil_div
from cheetah.plan.products import IN_PROJ_BA, ROUTER, Product, RowOrder
from cheetah.plan.shape import ModelShape
from cheetah.plan.split import Split
from cheetah.plan.world import world_of

LEAST_COLUMNS, LEAST_COLUMNS_EMULATED = 1024, 256
"""Below, an M-tile is a chunk or two by rule, and half of it takes as long."""


def residual_tile_rows(shape: ModelShape, gpu: Gpu) -> int:
    """Rows of an M-tile of o and down: 8 where the blocks with most rows then have fewer of them, else 16."""
    return NARROW_ROWS if _may_be_narrow(shape, gpu) and _saves_rows(shape.hidden, gpu) else M_TILE_ROWS


def tile_rows(product: Product, shape: ModelShape, gpu: Gpu) -> int:
    """Rows of an M-tile of a product. Beside those that are added to the residual, in models of experts those whose
    rows are published one by one: the router's, and heads that their readers finish."""
    if product.adds:
        return residual_tile_rows(shape, gpu)
    is_plain = product.order is RowOrder.PLAIN or product.name in (ROUTER, IN_PROJ_BA)
    is_by_rows = is_plain or product.order is RowOrder.HEADS and shape.raw_heads
    can_be = (
        (shape.experts is not None or product.name == IN_PROJ_BA)
        and is_by_rows
        and not product.is_once
        and product.format == BF16
        and product.rows % M_TILE_ROWS == 0
        and product.columns % (2 * BF16.columns) == 0
        and product.columns >= _least_columns(gpu)
    )
    return NARROW_ROWS if can_be and _saves_rows(product.rows, gpu) else M_TILE_ROWS


def residual_split(shape: ModelShape, gpu: Gpu) -> Split:
    """Which block of a rank owns which of the rank's M-tiles of o and down, and so which rows of the residual."""
    return Split(ceil_div(residual_m_tiles(shape, gpu), gpu.ranks), gpu.blocks)


def residual_m_tiles(shape: ModelShape, gpu: Gpu) -> int:
    """M-tiles of o and of down, of all ranks."""
    return ceil_div(shape.hidden, residual_tile_rows(shape, gpu))


def start_of_others(shape: ModelShape, gpu: Gpu) -> int:
    """The start of the other matrices' `Split`: their first M-tiles go to the blocks that the last wave of o and down
    leaves out."""
    return residual_split(shape, gpu).light_blocks


def _may_be_narrow(shape: ModelShape, gpu: Gpu) -> bool:
    """Rows make whole pairs of narrow M-tiles, which passes over prompts take together, and columns whole K-tiles."""
    products, least = shape.table.onto_residual, _least_columns(gpu)
    return (
        all(product.format == BF16 for product in products)
        and shape.hidden % M_TILE_ROWS == 0
        and all(product.columns % (2 * BF16.columns) == 0 and product.columns >= least for product in products)
    )


def _least_columns(gpu: Gpu) -> int:
    return LEAST_COLUMNS_EMULATED if gpu.emulated else LEAST_COLUMNS


def _saves_rows(count: int, gpu: Gpu) -> bool:
    """Whether the blocks with most of so many rows have fewer of them in narrow M-tiles."""
    blocks = world_of(gpu).blocks
    usual, narrow = (ceil_div(count, rows * blocks) * rows for rows in (M_TILE_ROWS, NARROW_ROWS))
    return narrow < usual
