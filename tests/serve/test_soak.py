"""A server under random requests; `python -m benchmarks.serving soak` does the same at length."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.serving import hostile
from benchmarks.serving.load import Load, measure, measure_intrusion, percentile
from benchmarks.serving.soak import Soak
from benchmarks.serving.stream import NotAsExpected
from tests.serve.serving import quick_llm, served


@pytest.mark.slow
def test_a_soak_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "LONG_SHARE", 0.0)  # megabytes take seconds
    monkeypatch.setattr(hostile, "LONG_BODIES", ())
    monkeypatch.setattr(hostile, "SHORT_BODIES", hostile.SHORT_BODIES[7:])  # grammars too
    with quick_llm(batch=3, kv_chunk=64) as llm, served(llm, most_waiting=8, hosts=("127.0.0.1",)) as running:
        record = asyncio.run(Soak(running.address, 300, requests=60, kinds=4, longest=5, hostile=0.3).run())
    kinds = ("streamed", "whole", "gone", "wrong", "hostile")
    assert all(record[kind] for kind in kinds) and sum(record[kind] for kind in kinds) == 60
    assert record["request_ms_p50"] > 0 and record["gap_ms_p100"] > 0 and record["health_ms_p100"] > 0
    assert record["told to try again"]


@pytest.mark.slow
def test_a_soak_tells_an_answer_that_is_not_the_one_alone() -> None:
    with quick_llm(batch=3, kv_chunk=64) as llm, served(llm) as running:
        soak = Soak(running.address, 300, requests=12, kinds=1, longest=6)
        soak.answers[0] = [1, 2, 3]
        with pytest.raises(ExceptionGroup) as found:
            asyncio.run(soak.run())
    assert found.group_contains(NotAsExpected, match=r"request 0: \[1, 2, 3\] once")


@pytest.mark.slow
def test_a_load_and_an_intrusion_are_measured() -> None:
    with quick_llm(batch=2) as llm, served(llm) as running:
        load = asyncio.run(measure(running.address, Load(2, 6, 8, 2), 300))
        intrusion = asyncio.run(measure_intrusion(running.address, Load(1, 6, 20), 40, 300))
    assert load["clients"] == 2 and load["tokens_per_s"] > 0 and load["first_token_ms_p50"] > 0
    assert load["gap_ms_p50"] <= load["gap_ms_p99"] <= load["gap_ms_max"]
    assert intrusion["long_first_token_ms"] > 0


def test_percentiles() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.0 and percentile([1.0, 2.0, 3.0], 99) == 3.0
    assert percentile([], 50) == 0.0
