"""Kernels of commands that are tested for what they do with one: each is made once."""

from collections.abc import Iterator
from functools import cache

import pytest

from cheetah.tools import regenerate

made_once = cache(regenerate.generate_kernel)


@pytest.fixture(scope="module")
def kernels_made_once() -> Iterator[None]:
    """What `cheetah generate` and the commands that load a model call gives the same kernel for the same plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regenerate, "generate_kernel", made_once)
        yield
