"""What is noted beside a measurement, with a nvidia-smi and a git made for the test."""

from pathlib import Path

import pytest

from cheetah import __version__
from cheetah.tools.circumstances import clocks, commit, visible


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=None)


def test_clocks_are_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "nvidia-smi", 'echo "$@" >&2; echo "1980, 3201, 41, [N/A]"')
    assert clocks() == {"sm_mhz": 1980.0, "memory_mhz": 3201.0, "temperature_c": 41.0}


def test_nvidia_smi_is_asked_for_the_gpu_that_the_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-8d")
    assert [visible(0), visible(1), visible(2)] == ["3", "GPU-8d", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible(0) == "0"


@pytest.mark.parametrize("script", ["exit 9", "echo nothing of the kind"])
def test_no_clocks_where_nvidia_smi_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    install(tmp_path, monkeypatch, "nvidia-smi", script)
    assert clocks() == {}


def test_no_clocks_and_no_commit_where_there_are_no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHEETAH_COMMIT", raising=False)
    assert clocks() == {} and commit() == f"version {__version__}"
    monkeypatch.setenv("CHEETAH_COMMIT", "abc")
    assert commit() == "abc"


def test_commit_is_what_git_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "git", "echo 0123456789ab-dirty")
    assert commit() == "0123456789ab-dirty"
