"""What holds for every test: those marked `compiler` are skipped where there is no g++."""

import shutil

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("g++"):
        return
    for item in items:
        if item.get_closest_marker("compiler"):
            item.add_marker(pytest.mark.skip(reason="needs g++, which is not on PATH"))
