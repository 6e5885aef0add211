"""All emulator tests of a session share one new compile cache."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("CHEETAH_CACHE")
    os.environ["CHEETAH_CACHE"] = str(tmp_path_factory.mktemp("compiled"))
    yield
    os.environ.pop("CHEETAH_CACHE")
    if before is not None:
        os.environ["CHEETAH_CACHE"] = before
