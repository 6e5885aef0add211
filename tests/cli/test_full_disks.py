"""Disks without room: each command that writes files ends with one message, and leaves nothing half written."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cheetah.errors import CheetahError
from cheetah.tools.calibrate import calibration_source, write_scaled
from tests.cli.commands import refused


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file has room for more than some kB: the system refuses a write as it does on a full disk."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python does not look whether all of it was written
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("command", ["quantize demo --format int8", "sparsify demo"])
def test_what_is_written(command: str, tmp_path: Path) -> None:
    told = refused(*command.split(), "-o", tmp_path / "out")
    assert told.startswith("error: ") and told.endswith("\n") and told.count("\n") == 1 and "File too large" in told
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.usefixtures("full_disk")
def test_scales_of_a_text(tmp_path: Path) -> None:
    """`cheetah calibrate`, once it has read the text."""
    source = calibration_source("demo")
    scales = np.ones((source.config.layers, 2, 1), np.float32)
    with pytest.raises(CheetahError, match="out: cannot be written: File too large"):
        write_scaled(source, tmp_path / "out", scales)
    assert not [*tmp_path.iterdir()]
