"""Where blocks share an M-tile: each multiplies a part of its columns, and the first adds up what the parts made.

Of four and eight GPUs a rank may have fewer M-tiles of o and down than blocks, which then wait while others read. Parts
change the order of a sum, so its bits: with a fixed `kv_chunk`, where bits are those of one GPU, there are none.
"""

from __future__ import annotations

from cheetah.plan.formats import BlockRows
from cheetah.plan.gpu import Gpu
from cheetah.plan.layout import MatrixLayout
from cheetah.plan.plan import Plan
from cheetah.plan.products import Product

LEAST_RANKS = 4
"""Measured: with two GPUs, parts lose 2 to 7 % where all blocks have an M-tile, and mostly they do."""
PARTS = (4, 2)
"""The most that every part finds a block for."""


def k_parts(product: Product, layout: MatrixLayout, plan: Plan, gpu: Gpu) -> int:
    """Blocks that share each M-tile of a product whose rows are added to the residual, in steps of one token."""
    alone = plan.tokens > 1 or bool(plan.kv_chunk) or plan.sync != "flags" or gpu.ranks < LEAST_RANKS
    if alone or not product.adds or product.experts is not None or isinstance(layout.format, BlockRows):
        return 1
    if layout.slices > 1:
        return 1
    fitting = (count for count in PARTS if layout.m_tiles * count <= layout.blocks and layout.chunks >= count)
    return next(fitting, 1)


def parts_vector(product: Product) -> str:
    """The vector of an exchange through which parts come to who adds them."""
    return f"{product.name}_parts"


def parts_words(layout: MatrixLayout, count: int) -> int:
    """Its payload words: the rows of all M-tiles, of each part but the first."""
    return (count - 1) * layout.m_tiles * layout.tile_rows
