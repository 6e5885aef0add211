"""`benchmarks.prompts` in the emulator: which records it makes, and that none of them passes for a speed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.prompts import in_turns, main, matrix_shapes, product_flops, timed
from cheetah.models.registry import preset


@pytest.mark.slow
@pytest.mark.compiler
def test_a_record_each_of_prompts_and_of_attention(tmp_path: Path) -> None:
    target = tmp_path / "records.jsonl"
    once = "--device emulator --alone --repetitions 1 --warmup 0 --rest 0 --json"
    for what in ("--prompts 20", "--attention 30"):
        main(["random:demo", *what.split(), *once.split(), str(target)])
    records = [json.loads(line) for line in target.read_text().splitlines()]
    systems = ("cheetah", "cheetah, attention", "cheetah, attention and laying out keys")
    assert [one["system"] for one in records] == list(systems)
    assert all(one["note"] == "emulated: not a speed" for one in records)
    attention, with_keys = records[1:]
    assert len(attention["us_of_passes"]) == 1 and attention["us"] == with_keys["us"] > 0  # nothing was cached


def test_products_are_those_of_all_layers() -> None:
    config = preset("llama-3.1-8b")
    assert matrix_shapes(config)["gate_up"] == (28672, 4096) and matrix_shapes(config)["down"] == (4096, 14336)
    assert product_flops(config, 1) == 2 * 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)
    found = timed("cheetah, a pass", [40.0, 45.0, 60.0], product_flops(config, 2048))
    assert found["pass_ms"] == 45.0 and found["product_tflops"] == pytest.approx(635.2, abs=0.1)


def test_systems_take_turns_in_an_order_that_alternates() -> None:
    called: list[str] = []
    works = {name: (lambda name=name: called.append(name) or 1.0 * len(called)) for name in "ab"}
    samples = in_turns(works, argparse.Namespace(repetitions=2, warmup=1, rest=0.0))
    assert "".join(called) == "baabba" and samples == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
