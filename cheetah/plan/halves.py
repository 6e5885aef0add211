"""The two halves of an H100's and an H200's L2, and which memory belongs to which.

No document says it. Measured on H200s: an exchange of 4 KB beside a stream of weights takes 2100 or 5700 cycles by
nothing but the place of its vector, and address bits 12, 13, 15, 17 and 19 said which for each of 528 places.
"""

from __future__ import annotations

from collections.abc import Collection

PART_BYTES = 4096
"""All memory of an aligned part belongs to one half."""
PAGE_BYTES = 2**21
"""The CUDA driver begins what is as large at a multiple of it. Pages differ in which half is which."""
_FARTHEST = 64


def half_of(part: int) -> int:
    """The half, 0 or 1, of a page's part number `part`."""
    return (part ^ part >> 1 ^ part >> 3 ^ part >> 5 ^ part >> 7) & 1


def parts_in_half(count: int, half: int, taken: Collection[int]) -> range:
    """Of the ranges of `count` parts that all lie in one half, and of which none is taken, the one that ends first."""
    ranges = (range(first, first + count * apart, apart) for apart in range(1, _FARTHEST) for first in range(_FARTHEST))
    free = (parts for parts in ranges if all(half_of(part) == half and part not in taken for part in parts))
    return min(free, key=lambda parts: parts[-1])
