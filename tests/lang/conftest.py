"""Kernels that the language's tests run in the emulator are compiled into a new cache."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="package")
def compile_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHEETAH_CACHE", str(tmp_path_factory.mktemp("compiled")))
        yield
