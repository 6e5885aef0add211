"""Where the kernels of these tests run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attention import adapter

EMULATOR = pytest.param(adapter.EMULATOR, id="emulator", marks=pytest.mark.compiler)
GPU = pytest.param(adapter.GPU, id="gpu", marks=pytest.mark.gpu)
GPU_AS_ASKED = pytest.param(adapter.Target("cuda"), id="gpu", marks=pytest.mark.gpu)
"""With as many blocks as the test's kernels are for."""


@pytest.fixture(params=[EMULATOR, GPU])
def target(request: pytest.FixtureRequest) -> Iterator[adapter.Target]:
    """Every kernel of the test runs there."""
    with adapter.running_on(request.param):
        yield request.param
