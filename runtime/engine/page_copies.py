"""Copies pages of the KV pool on the device, as `kv_cache` notes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cheetah.errors import CheetahError

if TYPE_CHECKING:
    from cheetah.runtime.device.interface import Buffer


def copy_page(buffer: Buffer, pool_shape: Sequence[int], element_bytes: int, source: int, target: int) -> None:
    """Copies page `source` over page `target`, in all layers, after the launches so far and before the next.

    buffer: the pool, `pool_shape` = (layers, pages, 2, kv_heads, page_size, head_dim) elements of `element_bytes`
    bytes. One copy a layer. CheetahError for pages that the pool does not have, with nothing copied.
    """
    layers, pages = pool_shape[:2]
    page_bytes = math.prod(pool_shape[2:]) * element_bytes
    for name, page in (("source", source), ("target", target)):
        if not 0 <= page < pages:
            raise CheetahError(f"page copy: {name} page {page} is not in the pool: its pages are 0 to {pages - 1}")
    if source == target:
        return
    for layer in range(layers):
        first = layer * pages
        buffer.copy((first + source) * page_bytes, (first + target) * page_bytes, page_bytes)


def copy_pages(
    buffer: Buffer, pool_shape: Sequence[int], element_bytes: int, copies: Iterable[tuple[int, int]]
) -> None:
    """Makes these (source, target) copies in their order; see `copy_page` and `PagePool.take_copies`."""
    for source, target in copies:
        copy_page(buffer, pool_shape, element_bytes, source, target)
