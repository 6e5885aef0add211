"""One page of the pool becomes another, in all layers and in nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from cheetah.errors import CheetahError
from cheetah.runtime.device import open_device
from cheetah.runtime.engine.page_copies import copy_page, copy_pages


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_page_is_copied_in_every_layer(dtype: type[np.unsignedinteger]) -> None:
    shape = (3, 5, 2, 2, 4, 8)
    contents = np.random.default_rng().integers(0, 256, shape).astype(dtype)
    pool = open_device("emulator").allocate(contents.nbytes)
    pool.upload(contents)
    copy_pages(pool, shape, contents.itemsize, [(1, 4), (4, 0), (3, 4), (2, 2)])
    expected = contents.copy()
    expected[:, 0], expected[:, 4] = contents[:, 1], contents[:, 3]
    assert np.array_equal(pool.download(dtype, shape), expected)


@pytest.mark.parametrize(("source", "target", "name"), [(5, 0, "source page 5"), (0, -1, "target page -1")])
def test_pages_outside_the_pool_are_refused(source: int, target: int, name: str) -> None:
    shape = (2, 5, 2, 1, 1, 8)
    pool = open_device("emulator").allocate(2 * 5 * 16, fill=1)
    with pytest.raises(CheetahError, match=f"{name} is not in the pool: its pages are 0 to 4"):
        copy_page(pool, shape, 1, source, target)
