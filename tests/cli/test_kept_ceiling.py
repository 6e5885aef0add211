"""The read ceiling: measured once a machine, and what is told beside it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cheetah.plan import gpu_named
from cheetah.runtime.engine.requests import Decoded, Load
from cheetah.runtime.metrics import engine_metrics
from cheetah.tools import kept_ceiling
from cheetah.tools.kept_ceiling import FILE, read_ceiling


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was measured and closed, in order, where the cache is an empty folder."""
    done: list[str] = []

    class Measuring:
        def __init__(self, *arguments: Any) -> None:
            done.append("measured")

        def gb_per_s(self) -> float:
            return 4400.0 + len(done)

        def close(self) -> None:
            done.append("closed")

    monkeypatch.setenv("CHEETAH_CACHE", str(tmp_path))
    monkeypatch.setattr(kept_ceiling, "ReadCeiling", Measuring)
    return done


def llm(gpu: str = "h200", driver: str = "CUDA 13") -> Any:
    device = SimpleNamespace(describe=lambda: SimpleNamespace(name="NVIDIA H200", driver=driver))
    assembly = SimpleNamespace(device=device, buffers={"weights": None})
    return SimpleNamespace(assembly=assembly, manifest=SimpleNamespace(gpu={"name": gpu_named(gpu).name}))


def test_it_is_measured_once_a_machine(measured: list[str], tmp_path: Path) -> None:
    assert read_ceiling(llm()) == read_ceiling(llm()) == 4401.0 and measured == ["measured", "closed"]
    assert read_ceiling(llm(driver="CUDA 14")) == 4403.0, "another driver is another machine"
    assert json.loads((tmp_path / FILE).read_text()) == {"NVIDIA H200, CUDA 13": 4401.0, "NVIDIA H200, CUDA 14": 4403.0}
    assert read_ceiling(llm("emulator")) is None and len(measured) == 4


@pytest.mark.parametrize("text", ["{", "[]", '{"NVIDIA H200, CUDA 13": true}', '{"NVIDIA H200, CUDA 13": -1}'])
def test_a_file_that_says_nothing_is_written_again(measured: list[str], tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert read_ceiling(llm()) == 4401.0
    assert json.loads((tmp_path / FILE).read_text()) == {"NVIDIA H200, CUDA 13": 4401.0}


def test_a_share_is_told_where_there_is_a_ceiling_alone() -> None:
    load = Load(1, 0, 0.5, 0, 0, 0, Decoded(100, 0.5, 10**12), Decoded(10, 0.05, 2 * 10**11))
    without, found = ({one.name: one.value for one in engine_metrics(load, most)} for most in (None, 5000.0))
    assert without["cheetah:decode_bytes_per_step"] == 2e10 and without["cheetah:decode_steps"] == 100
    assert not [name for name in without if "gb_per_second" in name or "ceiling" in name]
    assert (found["cheetah:decode_gb_per_second"], found["cheetah:read_ceiling_share"]) == (4000, 0.8)
    assert Decoded() + load.latest == load.latest and Decoded().bytes_per_step == Decoded().gb_per_s == 0
